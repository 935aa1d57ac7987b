"""Between a run and a Hugging Face folder:

packed-bert export RUN DIR              # the newest checkpoint of a run -> a folder transformers loads
packed-bert export --import DIR RUN     # a folder -> a run to begin with
"""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Optional, Sequence

import yaml

from ipu_packed_bert.config import Config, config_from_tree
from ipu_packed_bert.run_folder import CHECKPOINTS, CONFIG, EXPORT
from ipu_packed_bert.schema import PRETRAINING
from ipu_packed_bert.settings import parse_yaml, peek
from pack_data.cli.command import ArgumentParser, typed
from pack_data.reading.fields import said_of
from pack_data.reading.files import write_atomically
from pack_data.text.tokenizer_file import AnyVocabulary, load_either, vocabulary_in

if TYPE_CHECKING:
    from ipu_packed_bert.checkpoint import Checkpoint
    from ipu_packed_bert.hugging_face import Loaded

# torch loads inside the functions, so that a machine without it gets one line.


class Exported(NamedTuple):
    """What was written."""

    step: int  # updates made
    note: Optional[str]  # what could not be compared, in one line


def export_run(run: Path, folder: Path, *, vocabulary: Optional[Path] = None) -> Exported:
    """Write the newest checkpoint of ``run`` as a Hugging Face folder.

    The vocabulary is the given file, else that of the run's configuration, else the one beside its data set.  Raises
    ValueError where the weights were trained with another one.
    """
    from ipu_packed_bert.checkpoint import load_newest
    from ipu_packed_bert.hugging_face import write_folder
    from ipu_packed_bert.identity import Identity, agree

    checkpoint = load_newest(run / CHECKPOINTS)
    tree = parse_yaml(checkpoint.config, run)
    if peek("task.name", tree, ()) not in (None, PRETRAINING):
        return _export_fine_tuned(run, folder, checkpoint, vocabulary)
    config = config_from_tree(tree, str(run))
    architecture = "BertForPreTraining" if config.loss.next_sentence else "BertForMaskedLM"
    path = Path(vocabulary or config.data.vocabulary or vocabulary_in(config.data.directory))
    of_weights = checkpoint.identity
    written = _vocabulary_of(config, path, of_weights.lowers_case)
    note = agree(of_weights, Identity.of(written), weights_of=run, data_of=path).note
    write_folder(folder, config.model, checkpoint.engine["model"], written, architecture=architecture)
    return Exported(checkpoint.step, note)


def _export_fine_tuned(run: Path, folder: Path, checkpoint: Checkpoint, vocabulary: Optional[Path]) -> Exported:
    """A fine-tuned model; its vocabulary, sizes and labels lie in the run's folder."""
    from ipu_packed_bert.hugging_face import write_folder
    from ipu_packed_bert.start import fine_tuned

    found = fine_tuned(run, checkpoint, vocabulary=vocabulary)
    with said_of(run / EXPORT):
        write_folder(
            folder,
            found.model,
            checkpoint.engine["model"],
            found.vocabulary,
            architecture=found.architecture,
            **found.settings,
        )
    return Exported(checkpoint.step, found.note)


def import_folder(folder: Path, run: Path) -> Loaded:
    """Write a Hugging Face folder as a run before its first update; says which heads the folder did not have.

    Those are initialised from `run.seed` of the default configuration.
    """
    import torch

    from ipu_packed_bert.checkpoint import Checkpoint, save_checkpoint
    from ipu_packed_bert.hugging_face import load_into, read_folder
    from ipu_packed_bert.identity import Identity
    from ipu_packed_bert.model.packed import PackedBertForPreTraining

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


def _vocabulary_of(config: Config, path: Path, lower_case: bool) -> AnyVocabulary:
    if not path.exists():
        raise ValueError(f"{path}: the run's vocabulary is not there; give it with --vocabulary FILE")
    vocabulary = load_either(path, lower_case)
    if len(vocabulary) > config.model.vocabulary_size:
        raise ValueError(
            f"{path}: {len(vocabulary):,} tokens, the run's model has rows for {config.model.vocabulary_size:,}; "
            "give its own with --vocabulary FILE"
        )
    return vocabulary


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(prog=typed("export"), description=__doc__)
    parser.add_argument(
        "--import",
        action="store_true",
        dest="reverse",
        help="read the first folder from Hugging Face's form, write a run",
    )
    parser.add_argument("source", type=Path, help="a run; with --import a Hugging Face folder")
    parser.add_argument("target", type=Path, help="a new folder")
    parser.add_argument(
        "--vocabulary",
        type=Path,
        metavar="FILE",
        help="vocab.txt or tokenizer.json of the run, where it is no longer beside its data set",
    )
    args = parser.parse_args(argv)
    if args.reverse:
        if args.vocabulary:
            parser.error("--vocabulary is for writing a folder; one that is read has its own")
        loaded = import_folder(args.source, args.target)
        print(
            f"{args.target}: begin with it by {typed('pretrain')} --config "
            f"{shlex.quote(str(args.target / CONFIG))} --data DATA --start-from {shlex.quote(str(args.target))}"
        )
        for names, what in (
            (loaded.fresh, "initialised, not in the folder"),
            (loaded.unused, "in the folder, left out"),
        ):
            if names:
                print(f"{what}: {', '.join(names)}")
        return 0
    exported = export_run(args.source, args.target, vocabulary=args.vocabulary)
    print(f"{args.target}: the model after {exported.step:,} updates, as transformers loads it")
    if exported.note:
        print(f"note: {exported.note}")
    return 0
