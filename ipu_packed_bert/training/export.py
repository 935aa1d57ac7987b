"""A run as a Hugging Face folder, and such a folder as a run to begin with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Optional

import yaml

from ipu_packed_bert.run_files.folder import CHECKPOINTS, CONFIG
from ipu_packed_bert.settings.pretraining import config_from_tree
from pack_data.reading.fields import said_of
from pack_data.reading.files import write_atomically

if TYPE_CHECKING:
    from ipu_packed_bert.model.hugging_face import Loaded

# torch loads inside the functions, so that a machine without it gets one line.


class _Exported(NamedTuple):
    """What was written."""

    step: int  # updates made
    note: Optional[str]  # what could not be compared, in one line


def export_run(run: Path, folder: Path, *, vocabulary: Optional[Path] = None) -> _Exported:
    """Write the newest checkpoint of a run of pre-training as a Hugging Face folder.

    The vocabulary is the given file, else that of the run's configuration, else the one beside its data set.  Raises
    ValueError where the weights were trained with another one.
    """
    from ipu_packed_bert.model.hugging_face import write_folder
    from ipu_packed_bert.tasks.starting_weights import learnt

    found = learnt(run, vocabulary=vocabulary)
    with said_of(run):
        weights = found.checkpoint.engine["model"]
        write_folder(folder, found.model, weights, found.vocabulary, architecture=found.architecture)
    return _Exported(found.checkpoint.step, found.note)


def import_folder(folder: Path, run: Path) -> Loaded:
    """Write a Hugging Face folder as a run before its first update; says which heads the folder did not have.

    Those are initialised from `run.seed` of the default configuration.
    """
    import torch

    from ipu_packed_bert.model.hugging_face import load_into, read_folder
    from ipu_packed_bert.model.packed import PackedBertForPreTraining
    from ipu_packed_bert.run_files.checkpoints import Checkpoint, save_checkpoint
    from ipu_packed_bert.run_files.vocabulary_identity import Identity

    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise ValueError(f"{run}: exists and is not an empty folder; give another one")
    pretrained = read_folder(folder)
    # What the weights decide and no more: the rest is left to the data set and to the defaults.
    decided = {
        "data": {"vocabulary": str(run / pretrained.vocabulary.file)},
        "model": dataclasses.asdict(pretrained.model),
    }
    config = config_from_tree(decided, str(folder))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        network = PackedBertForPreTraining(config.model, config.loss)
    loaded = load_into(network, pretrained.weights)
    run.mkdir(parents=True, exist_ok=True)
    write_atomically(run / pretrained.vocabulary.file, pretrained.vocabulary.text)
    write_atomically(run / CONFIG, yaml.safe_dump(decided, sort_keys=False).encode())
    weights, identity = {"model": network.state_dict()}, Identity.of(pretrained.vocabulary)
    imported = Checkpoint(0, weights, {}, config.to_yaml(), *identity)
    save_checkpoint(run / CHECKPOINTS, imported, keep=1)
    return loaded
