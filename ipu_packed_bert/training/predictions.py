"""Answers of a fine-tuned model to a file's records: packed, computed and put back into the input's order.

trained = find_trained(Path("runs/squad"))                    # or a Hugging Face folder
prepared = prepare(trained, Asked(Source.of("questions.json")), overrides=["engine.kind=host"])
found = predict(prepared)
"""

from __future__ import annotations

import contextlib
import dataclasses
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
    REGRESSION,
    SINGLE_LABEL,
    SQUAD,
    TASKS,
    TOKENS,
)
from ipu_packed_bert.settings.loading import config_from_tree
from ipu_packed_bert.settings.reader import OVERRIDE, peek
from ipu_packed_bert.settings.schema import ModelConfig
from ipu_packed_bert.settings.user_task import full_name, is_own
from ipu_packed_bert.settings.yaml_files import load_yaml
from ipu_packed_bert.tasks import task_class
from ipu_packed_bert.tasks.classification import PROBLEM_TYPES
from ipu_packed_bert.tasks.examples import Asked, ExampleTask
from ipu_packed_bert.tasks.inputs import Tokenizer
from ipu_packed_bert.tasks.starting_weights import PACKAGE, folder_of, labels_of, with_dropout
from ipu_packed_bert.training.examples import load_weights
from pack_data.cli.command import NotFinite
from pack_data.reading.fields import Fields, read_object
from pack_data.text.vocabulary import AnyVocabulary

# Of a run's configuration, what predicting needs; the rest is of training.
_KEPT = {"task": None, "engine": None, "placement": None, "batch": ("micro_batch",)}
_KEPT_DATA = ("max_sequence_length", "packer", "max_sequences_per_pack")
# Hugging Face's classes.
_ARCHITECTURES = {"BertForQuestionAnswering": SQUAD, "BertForTokenClassification": TOKENS}
_PROBLEMS = {problem: kind for kind, problem in PROBLEM_TYPES.items()}
# Slots of a row for a folder, which does not say what it was trained with; fewer where it has fewer positions.
_SLOTS = {SQUAD: 384}
_OTHER_SLOTS = 128
# Rows of one call on IPUs: as many micro-batches for each replica, where the file has as many.
_IPU_MICRO_BATCHES = 64


class _Trained(NamedTuple):
    """A fine-tuned model."""

    name: str
    tree: Mapping[str, Any]  # settings, by section
    model: ModelConfig
    weights: Weights
    vocabulary: AnyVocabulary
    labels: Optional[List[str]]
    description: str
    stored: bool  # whether a run has written the settings


def find_trained(folder: Path, task: Optional[str] = None) -> _Trained:
    """Find the model of a fine-tuning run, with the run's settings, or a Hugging Face directory.

    task: of a folder whose config.json does not say it. Raises ValueError, in one line, where there is no head that
    answers.
    """
    if not (folder / CONFIG).is_file():
        if not folder.exists() and str(folder) != PACKAGE:
            raise ValueError(
                f"{folder}: no such folder; name that of a fine-tuning run, or of a fine-tuned model of Hugging Face"
            )
        return _of_folder(folder_of(str(folder)), task)
    tree = load_yaml(folder / CONFIG)
    name = peek("task.name", tree, ())
    if not isinstance(name, str) or not (name in TASKS or is_own(name)):
        raise ValueError(
            f"{folder}: a run of pre-training, which has no head that answers; fine-tune it first: packed-bert "
            f"finetune --config ... --set model.checkpoint={folder}"
        )
    if not (folder / MODEL).is_dir():
        raise ValueError(
            f"{folder}: holds no {MODEL}/, which is written when the run ends; go on with --resume"
        )
    kept: Dict[str, Any] = {}
    for section, keys in {**_KEPT, "data": _KEPT_DATA}.items():
        found = tree.get(section) or {}
        kept[section] = {key: value for key, value in found.items() if keys is None or key in keys}
    kept["task"].pop("drop_seen_paragraphs", None)
    # Where it was trained is not where it answers.
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
            f"{folder}: neither a fine-tuning run ({CONFIG}, {MODEL}/) nor a Hugging Face folder (config.json); "
            "name that of a fine-tuned model"
        )
    about = read_object(folder / "config.json", way_out="get the file again")
    architectures = about.optional("architectures", Fields.list_of, Fields.text) or []
    problem = about.optional("problem_type", Fields.text)
    labels = labels_of(folder / "config.json")
    found = next((_ARCHITECTURES[each] for each in architectures if each in _ARCHITECTURES), None)
    if found is None and "BertForSequenceClassification" in architectures:
        found = task if task in _PROBLEMS.values() or is_own(task) else None
    elif found is None:
        found = task
    if found is None and "BertForSequenceClassification" in architectures:
        count = len(labels) if labels else about.optional("num_labels", Fields.integer) or 2
        found = _PROBLEMS.get(problem or "", REGRESSION if count == 1 else SINGLE_LABEL)
    if found is None:
        what = ", ".join(architectures) or "no architecture"
        raise ValueError(
            f"{folder / 'config.json'}: {what} is none that answers; name a model fine-tuned for one of the tasks "
            f"{', '.join(TASKS)}, or say which task it is of with --set task.name=..."
        )
    found, pretrained = full_name(found), read_folder(folder)
    if (
        labels is None
        and found in (SINGLE_LABEL, MULTI_LABEL, TOKENS)
        and "classifier.weight" in pretrained.weights
    ):
        labels = [
            f"LABEL_{number}" for number in range(len(pretrained.weights["classifier.weight"]))
        ]
    slots = min(_SLOTS.get(found, _OTHER_SLOTS), pretrained.model.max_position_embeddings)
    tree: Dict[str, Any] = {"task": {"name": found}, "data": {"max_sequence_length": slots}}
    return _Trained(
        str(folder),
        tree,
        pretrained.model,
        pretrained.weights,
        pretrained.vocabulary,
        labels,
        f"{folder}, task {found}",
        False,
    )


class _Prepared(NamedTuple):
    config: Config
    task: ExampleTask
    engine: Engine
    layout: Layout


def _configured(trained: _Trained, asked: Asked, overrides: Sequence[str] = ()) -> Config:
    """Return the settings with which a model answers; raise ConfigError with every problem."""
    name = full_name(str(peek("task.name", trained.tree, overrides)))
    if name != trained.tree["task"]["name"]:  # before its settings, which are those of another task
        raise ValueError(
            f"--set task.name={name}: {trained.name} was trained for {trained.tree['task']['name']}"
        )
    tree = {section: dict(values) for section, values in trained.tree.items()}
    tree["data"].update(training=None, evaluation=str(asked.source.path))
    tree["model"] = {"checkpoint": trained.name}
    config = config_from_tree(tree, trained.name, overrides, stored=trained.stored)
    kept: Mapping[str, Optional[Sequence[str]]] = {**_KEPT, "data": _KEPT_DATA}
    for key in (key for key, origin in config.origins.items() if origin == OVERRIDE):
        section, _, name = key.partition(".")
        if section not in kept or name not in (kept[section] or (name,)):
            raise ValueError(f"--set {key}=...: is of training and changes no answer; leave it out")
    if config.data.max_sequence_length > trained.model.max_position_embeddings:
        raise ValueError(
            f"{trained.name}: data.max_sequence_length is {config.data.max_sequence_length}; the model has "
            f"{trained.model.max_position_embeddings} positions"
        )
    return config


def prepare(
    trained: _Trained,
    asked: Asked,
    overrides: Sequence[str] = (),
    *,
    read: Callable[[int], Any] = int,
) -> _Prepared:
    """Pack the records, and load the model where they are computed. read: gets the number of tokenised texts."""
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
                f"poprun started {engine.share[1]} instances, each of which would give its own part of the answers; "
                "start one, without poprun"
            )
        load_weights(engine, trained.weights, trained.name, whole=True)
        unwound.pop_all()
    return _Prepared(config, task, engine, task.layout(config, 1.0))


def _in_calls(config: Config, rows: int, *, ipus: bool) -> Config:
    """Return the same with a batch that is one call: a micro-batch on the host; on IPUs enough to fill the pipeline."""
    replicas, size = config.placement.replicas, min(config.batch.micro_batch, rows)
    number = 1
    if ipus:
        number = max(
            config.pipeline_stages, min(_IPU_MICRO_BATCHES, math.ceil(rows / (size * replicas)))
        )
    else:
        config = dataclasses.replace(
            config, placement=dataclasses.replace(config.placement, replicas=1)
        )
        replicas = 1
    batch = dataclasses.replace(
        config.batch, micro_batch=size, sequences_per_update=number * replicas * size
    )
    return dataclasses.replace(config, batch=batch)


def compile_program(prepared: _Prepared) -> None:
    """On IPUs, the program that predicts, so that no answer's time is that of compiling it; on the host nothing."""
    if prepared.config.engine.kind == "ipu":
        prepared.engine.predict(next(in_order(prepared.task.packs, prepared.layout)))


class _Answers(NamedTuple):
    answers: List[Dict[str, Any]]  # one for each record, in the input's order
    metrics: Dict[str, Any]  # empty where no labels were read
    sequences: int
    seconds: float


def predict(prepared: _Prepared, *, seen: Callable[[int], Any] = int) -> _Answers:
    """Predict; raise NotFinite if outputs of the network are infinite or NaN. seen: gets the rows as they are done."""
    task, packs = prepared.task, prepared.task.packs
    batches = _counted(
        in_order(packs, prepared.layout), prepared.layout.packs_per_update, len(packs), seen
    )
    outputs, counts, seconds = task.predict(prepared.engine, batches)
    assert outputs is not None  # every batch has come
    if not all(np.isfinite(each).all() for each in outputs):
        raise NotFinite(
            "the network's outputs are infinite or no numbers; the model's weights are damaged"
        )
    scored = task.score(outputs)
    return _Answers(scored.answers, dict(scored.metrics), counts["sequences"], seconds)


def _counted(
    batches: Iterator[Batch], rows: int, all_rows: int, seen: Callable[[int], Any]
) -> Iterator[Batch]:
    """Yield the batches; `seen` gets each one's rows when the next one is requested."""
    left = all_rows
    for batch in batches:
        yield batch
        seen(min(rows, left))
        left -= rows


_DIGITS = 6  # after the decimal point, of what is written; packing changes the last bits of a float


def lines(answers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line of JSON for each record: its number, from 1, and its answer."""
    for number, answer in enumerate(answers, start=1):
        yield json.dumps({"record": number, **_rounded(answer)}, ensure_ascii=False)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS) + 0.0  # no -0.0
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return value


class Padding(NamedTuple):
    """Shares of the slots that are no tokens, each sequence alone in its row and packed."""

    alone: float
    packed: float


def padding(task: ExampleTask) -> Tuple[int, Padding]:
    """Rows saved, and what padding there is."""
    packing = task.packs.packing
    tokens = packing.efficiency
    return packing.sequences - packing.packs, Padding(
        1.0 - tokens / packing.packing_factor, 1.0 - tokens
    )
