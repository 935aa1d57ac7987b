"""Predictions of a fine-tuned model for the records of a file: packed, computed, and returned in the input's order.

trained = find_trained(Path("runs/squad"))                    # or a Hugging Face directory
prepared = prepare(trained, Asked(Source.of("questions.json")), overrides=["engine.kind=host"])
answers = predict(prepared).answers
"""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import numpy as np

from ipu_packed_bert.data.global_batches import Batch, Layout, in_order
from ipu_packed_bert.engine import build_engine, choose_engine
from ipu_packed_bert.engine.base import Engine
from ipu_packed_bert.model.hugging_face import Weights, read_folder
from ipu_packed_bert.run_files.folder import CONFIG, MODEL
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.finetuning import (
    MULTI_LABEL,
    OF_PREDICTIONS,
    REGRESSION,
    SINGLE_LABEL,
    SQUAD,
    TASKS,
    TOKENS,
    affects_predictions,
)
from ipu_packed_bert.settings.loading import config_from_tree
from ipu_packed_bert.settings.reader import OVERRIDE, parse_override, peek
from ipu_packed_bert.settings.schema import ModelConfig
from ipu_packed_bert.settings.user_task import full_name, is_own
from ipu_packed_bert.settings.yaml_files import load_yaml
from ipu_packed_bert.tasks import task_class
from ipu_packed_bert.tasks.classification import PROBLEM_TYPES
from ipu_packed_bert.tasks.examples import Asked, ExampleTask
from ipu_packed_bert.tasks.inputs import Tokenizer
from ipu_packed_bert.tasks.starting_weights import (
    PACKAGE,
    check_positions,
    folder_of,
    labels_of,
    with_dropout,
)
from ipu_packed_bert.training.examples import load_weights
from pack_data.cli.command import NotFinite
from pack_data.reading.fields import Fields, read_object
from pack_data.store.quantities import padding_share
from pack_data.text.vocabulary import AnyVocabulary

# Hugging Face classes with a head for a task.
_ARCHITECTURES = {"BertForQuestionAnswering": SQUAD, "BertForTokenClassification": TOKENS}
_PROBLEMS = {problem: kind for kind, problem in PROBLEM_TYPES.items()}
# Slots of a row for a Hugging Face directory, which does not record them; reduced to the positions of the model.
_SLOTS = {SQUAD: 384}
_OTHER_SLOTS = 128
_IPU_MICRO_BATCHES = 64  # of a call per replica on IPUs, if the file has enough rows


class _Trained(NamedTuple):
    """A fine-tuned model."""

    name: str
    tree: Mapping[str, Any]  # settings, by section
    model: ModelConfig
    weights: Weights
    vocabulary: AnyVocabulary
    labels: Optional[List[str]]
    description: str
    stored: bool  # True if a run has written the settings


def find_trained(folder: Path, task: Optional[str] = None) -> _Trained:
    """Load the model of a fine-tuning run, with the run's settings, or of a Hugging Face directory.

    Args:
        folder: directory of the run or model.
        task: task of a model whose config.json does not determine it.

    Returns:
        The model, its settings, vocabulary and labels.

    Raises:
        ValueError: the directory does not exist, or its model has no head for a task.
    """
    if not (folder / CONFIG).is_file():
        if not folder.exists() and str(folder) != PACKAGE:
            raise ValueError(
                f"{folder}: no such directory; pass the directory of a fine-tuning run, or that of a Hugging Face model"
            )
        return _of_folder(folder_of(str(folder)), task)
    tree = load_yaml(folder / CONFIG)
    name = peek("task.name", tree, ())
    if not isinstance(name, str) or not (name in TASKS or is_own(name)):
        raise ValueError(
            f"{folder}: a pre-training run, whose model has no head for a task; fine-tune it first: packed-bert "
            f"finetune --config ... --set model.checkpoint={folder}"
        )
    if not (folder / MODEL).is_dir():
        raise ValueError(
            f"{folder}: has no {MODEL}/, which the run writes at its end; continue the run with --resume"
        )
    kept: Dict[str, Dict[str, Any]] = {section: {} for section in OF_PREDICTIONS}
    for section, settings in kept.items():
        for key, value in (tree.get(section) or {}).items():
            if affects_predictions(f"{section}.{key}"):
                settings[key] = value
    kept["task"].pop("drop_seen_paragraphs", None)
    # The device of training need not be the device of prediction.
    for key in ("kind", "ipu_model", "offline_export", "executable", "profile_directory"):
        kept["engine"].pop(key, None)
    model, weights, vocabulary = read_folder(folder / MODEL)
    labels = labels_of(folder / MODEL / "config.json")
    return _Trained(
        str(folder), kept, model, weights, vocabulary, labels, f"{folder}, task {name}", True
    )


def _of_folder(folder: Path, task: Optional[str]) -> _Trained:
    if not (folder / "config.json").exists():
        raise ValueError(
            f"{folder}: neither a fine-tuning run ({CONFIG}, {MODEL}/) nor a Hugging Face directory (config.json); "
            "pass the directory of a fine-tuned model"
        )
    about = read_object(folder / "config.json", way_out="get the file again")
    architectures = about.optional("architectures", Fields.list_of, Fields.text) or []
    problem = about.optional("problem_type", Fields.text)
    labels = labels_of(folder / "config.json")
    classifies = "BertForSequenceClassification" in architectures
    name = next((_ARCHITECTURES[key] for key in architectures if key in _ARCHITECTURES), None)
    if name is None and (not classifies or task in _PROBLEMS.values() or is_own(task)):
        name = task
    if name is None and classifies:
        count = len(labels) if labels else about.optional("num_labels", Fields.integer) or 2
        name = _PROBLEMS.get(problem or "", REGRESSION if count == 1 else SINGLE_LABEL)
    if name is None:
        architecture = ", ".join(architectures) or "its list of architectures"
        raise ValueError(
            f"{folder / 'config.json'}: {architecture} does not determine a task; pass a model fine-tuned for one of "
            f"{', '.join(TASKS)}, or name its task with --set task.name=..."
        )

    name = full_name(name)
    model, weights, vocabulary = read_folder(folder)
    has_classes = name in (SINGLE_LABEL, MULTI_LABEL, TOKENS)
    if labels is None and has_classes and "classifier.weight" in weights:
        labels = [f"LABEL_{number}" for number in range(len(weights["classifier.weight"]))]
    slots = min(_SLOTS.get(name, _OTHER_SLOTS), model.max_position_embeddings)
    tree: Dict[str, Any] = {"task": {"name": name}, "data": {"max_sequence_length": slots}}
    description = f"{folder}, task {name}"
    return _Trained(str(folder), tree, model, weights, vocabulary, labels, description, False)


class _Prepared(NamedTuple):
    config: Config
    task: ExampleTask
    engine: Engine
    layout: Layout


def _configured(trained: _Trained, asked: Asked, overrides: Sequence[Any] = ()) -> Config:
    """Return the settings for a prediction; raise ConfigError with every problem."""
    name = full_name(str(peek("task.name", trained.tree, map(parse_override, overrides))))
    trained_for = trained.tree["task"]["name"]
    if name != trained_for:  # checked first, because another task has other settings
        raise ValueError(
            f"--set task.name={name}: {trained.name} was trained for {trained_for}; leave the option out"
        )
    tree = {section: dict(values) for section, values in trained.tree.items()}
    tree["data"].update(training=None, evaluation=str(asked.source.path))
    tree["model"] = {"checkpoint": trained.name}
    config = config_from_tree(tree, trained.name, overrides, stored=trained.stored)
    for key, origin in config.origins.items():
        if origin == OVERRIDE and not affects_predictions(key):
            raise ValueError(f"--set {key}=...: affects training and not predictions; leave it out")
    check_positions(config, trained.model, trained.name)
    return config


def prepare(
    trained: _Trained,
    asked: Asked,
    overrides: Sequence[Any] = (),
    *,
    read: Callable[[int], Any] = int,
) -> _Prepared:
    """Pack the records and load the model onto its device.

    Args:
        trained: result of `find_trained`.
        asked: the records.
        overrides: settings, KEY=VALUE.
        read: called with the number of tokenised texts, for progress.

    Returns:
        The engine with the model, the packed records and the settings.

    Raises:
        ValueError: the records, the settings or the device do not fit the model.
    """
    config = _configured(trained, asked, overrides)
    choice = choose_engine(config, simulated=False)
    ipus = choice.kind != "host"
    model = with_dropout(trained.model, config)
    config = config.on_engine(choice.kind).for_model(model, ipus=ipus)
    task = task_class(config.task.name)(
        config, Tokenizer(trained.vocabulary, read=read), model, trained.labels, asked
    )
    config = _in_calls(config, len(task.packs), ipus=ipus)
    engine = build_engine(config, task, choice, packing_factor=1.0)
    with contextlib.ExitStack() as unwound:
        unwound.callback(engine.close)
        if engine.share[1] > 1:
            raise ValueError(
                f"poprun started {engine.share[1]} instances, but prediction uses one process; start it without poprun"
            )
        load_weights(engine, trained.weights, trained.name, whole=True)
        unwound.pop_all()
    return _Prepared(config, task, engine, task.layout(config, 1.0))


def _in_calls(config: Config, rows: int, *, ipus: bool) -> Config:
    """Set the batch of one call: a micro-batch on the host; on IPUs enough of them to fill the pipeline."""
    size = min(config.rows_at_once(rows), rows)
    number = 1
    if ipus:
        rows_of_replicas = size * config.placement.replicas
        number = min(_IPU_MICRO_BATCHES, math.ceil(rows / rows_of_replicas))
        number = max(config.pipeline_stages, number)
    else:
        config = config.changed("placement", replicas=1)
    sequences = number * config.placement.replicas * size
    return config.changed("batch", micro_batch=size, sequences_per_update=sequences)


def compile_program(prepared: _Prepared) -> None:
    """Compile the prediction program on IPUs, so that measured times do not include it."""
    if prepared.config.engine.kind == "ipu":
        prepared.engine.predict(next(in_order(prepared.task.packs, prepared.layout)))


class _Answers(NamedTuple):
    answers: List[Dict[str, Any]]  # one per record, in the input's order
    metrics: Dict[str, Any]  # empty if the file has no labels
    sequences: int
    seconds: float


def predict(prepared: _Prepared, *, seen: Callable[[int], Any] = int) -> _Answers:
    """Compute the predictions of all records.

    Args:
        prepared: result of `prepare`.
        seen: called with the number of rows after each batch, for progress.

    Returns:
        The answers, scores, and the number of sequences and seconds.

    Raises:
        NotFinite: outputs of the network are infinite or NaN.
    """
    task = prepared.task
    layout = prepared.layout
    batches = _counted(in_order(task.packs, layout), layout.packs_per_update, len(task.packs), seen)
    outputs, counts, seconds = task.predict(prepared.engine, batches)
    assert outputs is not None  # None only if an interruption ends the batches
    if not all(np.isfinite(output).all() for output in outputs):
        raise NotFinite(
            "the outputs of the network are infinite or NaN, so its weights are damaged; use another checkpoint"
        )
    scored = task.score(outputs)
    records = task.accounts["evaluation"]["records"]
    assert len(scored.answers) == records.came_in  # a record's number is its place in the file
    return _Answers(scored.answers, dict(scored.metrics), counts["sequences"], seconds)


def _counted(
    batches: Iterator[Batch], rows: int, all_rows: int, seen: Callable[[int], Any]
) -> Iterator[Batch]:
    """Yield the batches; call ``seen`` with the rows of each when the next one is requested."""
    for first, batch in zip(range(0, all_rows, rows), batches):
        yield batch
        seen(min(rows, all_rows - first))


_DIGITS = 6  # decimal places of written numbers; packing changes the last bits of a float


def lines(answers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line of JSON for each record, with its number (1-based) and its answer."""
    for number, answer in enumerate(answers, start=1):
        yield json.dumps({"record": number, **_rounded(answer)}, ensure_ascii=False)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS) + 0.0  # no -0.0
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    return value


class Padding(NamedTuple):
    """Fractions of the slots that are padding."""

    alone: float  # with one sequence per row
    packed: float


def padding(task: ExampleTask) -> Tuple[int, Padding]:
    """Return the number of rows that packing saves, and the padding with and without it."""
    packing = task.packs.packing
    unpacked_slots = packing.sequences * packing.max_sequence_length
    saved = packing.sequences - packing.packs
    alone = padding_share(packing.tokens, unpacked_slots)
    return saved, Padding(alone, packing.padding_share)
