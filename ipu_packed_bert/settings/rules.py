"""The rules between settings, each of which is in range.  Loads neither torch nor poptorch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Container, Iterable, Iterator, List, Mapping, NamedTuple

from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.finetuning import SquadConfig
from ipu_packed_bert.settings.reader import problems_message
from ipu_packed_bert.settings.schema import FINETUNE, EngineConfig, PlacementConfig
from ipu_packed_bert.settings.yaml_files import ConfigError
from pack_data.packers import packs_at_depth


class _Problem(NamedTuple):
    """A broken rule."""

    keys: str  # its settings, separated by spaces
    message: str  # a template; its names are `config`, the sections of the configuration, and those of `values`
    values: Mapping[str, Any] = {}


_Problems = Iterator[_Problem]

_MIN_TRAINED_VOCABULARY = 128  # tokens, enough for the special tokens and single characters


def cross_check(config: Config, broken: Container[str] = frozenset()) -> List[str]:
    """Return one line for each broken rule between settings.

    Args:
        config: the configuration.
        broken: settings with a problem; rules about them are skipped.
    """
    rules = _of_fine_tuning if config.command == FINETUNE else _of_pretraining
    return _messages(config, [*rules(config), *_of_every_run(config)], broken)


def _messages(
    config: Config, problems: Iterable[_Problem], broken: Container[str] = frozenset()
) -> List[str]:
    """Fill in the templates of the problems whose settings are not broken."""
    messages = []
    for keys, template, values in problems:
        if not any(key in broken for key in keys.split()):
            messages.append(template.format(**{**vars(config), **values}, config=config))
    return messages


def _of_every_run(config: Config) -> _Problems:
    data = config.data
    model = config.model
    if not packs_at_depth(data.packer, data.max_sequences_per_pack):
        yield _Problem(
            "data.packer data.max_sequences_per_pack",
            "data.max_sequences_per_pack is {data.depth_shown}; too large for data.packer {data.packer}",
        )
    if model.hidden_size % model.num_heads != 0:
        yield _Problem(
            "model.hidden_size model.num_heads",
            "model.hidden_size is {model.hidden_size}; must be a multiple of model.num_heads, {model.num_heads}",
        )
    yield from _of_placement(config.placement)
    yield from _of_engine(config.engine)
    if config.engine.kind == "ipu":
        yield from _on_ipus(config)


def _of_placement(placement: PlacementConfig) -> _Problems:
    for name in ("placement.layers_per_ipu", "placement.available_memory_proportion"):
        count = len(getattr(placement, name.partition(".")[2]))
        if count != placement.ipus_per_replica:
            yield _Problem(
                f"{name} placement.ipus_per_replica",
                "{name} has {count} values; must have one for each of the {placement.ipus_per_replica} IPUs of a "
                "replica",
                {"name": name, "count": count},
            )
    ipus = placement.replicas * placement.ipus_per_replica
    if ipus & (ipus - 1) != 0:
        yield _Problem(
            "placement.replicas placement.ipus_per_replica",
            "placement.replicas x placement.ipus_per_replica is {placement.replicas} x {placement.ipus_per_replica} = "
            "{config.ipus}; must be a power of two",
        )
    if placement.replicated_tensor_sharding and placement.replicas == 1:
        yield _Problem(
            "placement.replicated_tensor_sharding placement.replicas",
            "placement.replicated_tensor_sharding is true; must be false with one replica",
        )


def _of_engine(engine: EngineConfig) -> _Problems:
    exported = engine.offline_export is not None
    if engine.ipu_model and exported:
        yield _Problem(
            "engine.ipu_model engine.offline_export",
            "engine.ipu_model is true; must be false if engine.offline_export compiles for real IPUs",
        )
    if engine.executable is not None and (exported or engine.ipu_model or engine.log_cycles):
        yield _Problem(
            "engine.executable engine.offline_export engine.ipu_model engine.log_cycles",
            "engine.executable names a program compiled without a device, which runs on IPUs and counts no cycles; "
            "engine.offline_export must be null, engine.ipu_model false, and engine.log_cycles false",
        )


def _on_ipus(config: Config) -> _Problems:
    optimizer = config.optimizer
    if optimizer.max_gradient_norm is not None and optimizer.name != "adamw":
        yield _Problem(
            "optimizer.max_gradient_norm optimizer.name engine.kind",
            "optimizer.max_gradient_norm is {optimizer.max_gradient_norm}; must be null on IPUs with optimizer.name "
            "{optimizer.name}: PopTorch clips for adamw only",
        )


def _of_mixtures(config: Config) -> _Problems:
    data = config.data
    if data.shares is not None and len(data.shares) != len(data.folders):
        yield _Problem(
            "data.shares data.mixed_with",
            "data.shares has {shares} numbers; must have one for each of the {folders} data sets of data.directory and "
            "data.mixed_with",
            {"shares": len(data.shares), "folders": len(data.folders)},
        )
    if len({Path(folder).resolve() for folder in data.folders}) < len(data.folders):
        yield _Problem(
            "data.directory data.mixed_with",
            "data.mixed_with: {data.named} has a data set twice; name it once, and set its part with data.shares",
        )


def _of_pretraining(config: Config) -> _Problems:
    data = config.data
    model = config.model
    slots = data.max_sequence_length
    if data.packer == "none" and data.max_sequences_per_pack != 1:
        yield _Problem(
            "data.packer data.max_sequences_per_pack",
            "data.max_sequences_per_pack is {data.depth_shown}; must be 1 if data.packer is none",
        )
    yield from _of_mixtures(config)
    if config.predictions_per_sequence >= slots:
        yield _Problem(
            "data.max_predictions_per_sequence data.max_sequence_length",
            "data.max_predictions_per_sequence is {config.predictions_per_sequence}; must be below "
            "data.max_sequence_length, {data.max_sequence_length}",
        )
    if slots > model.max_position_embeddings:
        yield _Problem(
            "data.max_sequence_length model.max_position_embeddings",
            "data.max_sequence_length is {data.max_sequence_length}; must be at most model.max_position_embeddings, "
            "{model.max_position_embeddings}",
        )
    layers = sum(config.placement.layers_per_ipu)
    if layers != model.num_layers:
        yield _Problem(
            "placement.layers_per_ipu model.num_layers",
            "placement.layers_per_ipu places {layers} layers, model.num_layers is {model.num_layers}; change one of "
            "them",
            {"layers": layers},
        )
    if model.vocabulary_size % config.placement.embedding_serialization_factor != 0:
        yield _Problem(
            "placement.embedding_serialization_factor model.vocabulary_size",
            "placement.embedding_serialization_factor is {placement.embedding_serialization_factor}; must divide "
            "model.vocabulary_size, {model.vocabulary_size}",
        )
    if config.batch.gradient_accumulation < config.pipeline_stages:
        yield _Problem(
            "batch.gradient_accumulation placement.layers_per_ipu",
            "batch.gradient_accumulation is {batch.gradient_accumulation}; must be at least the "
            "{config.pipeline_stages} stages of the training pipeline",
        )
    steps = config.run.steps
    if steps > config.schedule_steps and config.optimizer.schedule != "constant":
        yield _Problem(
            "run.steps optimizer.schedule_steps",
            schedule_too_short(f"run.steps is {steps}", steps, config.schedule_steps),
        )
    if config.run.evaluate_every and config.evaluation_directory is None:
        yield _Problem(
            "run.evaluate_every data.held_out data.evaluation_directory",
            "run.evaluate_every is {run.evaluate_every}; requires held-out data: set data.held_out above 0 and build "
            "with `{build_line}`, or name a data set in data.evaluation_directory",
            {"build_line": config.build_line()},
        )


def _of_fine_tuning(config: Config) -> _Problems:
    data = config.data
    task = config.task
    if data.training is None and data.evaluation is None:
        yield _Problem(
            "data.training data.evaluation",
            "data.training and data.evaluation are null; name a file in at least one of them",
        )
    if data.training is None and config.start.checkpoint is None:
        yield _Problem(
            "data.training model.checkpoint",
            "data.training is null; requires model.checkpoint, the model to evaluate",
        )
    if config.run.evaluate_every and data.evaluation is None:
        yield _Problem(
            "data.training run.evaluate_every data.evaluation",
            "run.evaluate_every is {run.evaluate_every}; requires data.evaluation",
        )
    if isinstance(task, SquadConfig) and task.drop_seen_paragraphs and data.training is None:
        yield _Problem(
            "data.evaluation task.drop_seen_paragraphs data.training",
            "task.drop_seen_paragraphs is true; requires data.training, the file with these paragraphs",
        )
    if config.model.vocabulary_size < _MIN_TRAINED_VOCABULARY:
        yield _Problem(
            "model.vocabulary_size",
            "model.vocabulary_size is {model.vocabulary_size}; must be at least {least}",
            {"least": _MIN_TRAINED_VOCABULARY},
        )
    if config.engine.offline_export is not None and data.training is None:
        yield _Problem(
            "engine.offline_export data.training",
            "engine.offline_export compiles a training program; data.training must not be null",
        )


def check_on_ipus(config: Config) -> None:
    """Raise ConfigError for settings that IPUs do not support, with all problems."""
    problems = _messages(config, _on_ipus(config))
    if problems:
        raise ConfigError(problems_message(config.path, problems))


_TOO_FEW_MICRO_BATCHES = (
    "batch.gradient_accumulation is {batch.gradient_accumulation}, {accumulation} with a packing factor of "
    "{factor:.3f}; must be at least the {stages} stages of the training pipeline"
)
_TOO_FEW_ROWS = (
    "batch.sequences_per_update is {batch.sequences_per_update}, with a packing factor of {factor:.3f} {rows} rows for "
    "each replica; must be at least a row for each of the {stages} stages of the training pipeline: --set "
    "batch.sequences_per_update={sequences}{fewer}"
)


def check_accumulation(config: Config, packing_factor: float) -> None:
    """Raise ConfigError if a packed update has fewer micro-batches than the training pipeline has stages."""
    accumulation = config.accumulation(packing_factor)
    stages = config.pipeline_stages
    if accumulation >= stages:
        return
    message = _TOO_FEW_ROWS if config.command == FINETUNE else _TOO_FEW_MICRO_BATCHES
    replicas = config.placement.replicas
    fewer = f", or use fewer than {replicas} replicas" if replicas > 1 else ""
    text = message.format(
        batch=config.batch,
        accumulation=accumulation,
        factor=packing_factor,
        rows=config.rows_of_replica(packing_factor),
        stages=stages,
        sequences=math.ceil(stages * replicas * packing_factor),
        fewer=fewer,
    )
    raise ConfigError(f"{config.path}: {text}")


def check_for_ipus(config: Config, packing_factor: float) -> None:
    """Raise ConfigError for settings that IPUs do not support, and for an update that does not fill the pipeline."""
    check_on_ipus(config)
    check_accumulation(config, packing_factor)


def schedule_too_short(setting: str, steps: int, schedule_steps: int) -> str:
    """Return the message for a run with more updates than its schedule.

    Args:
        setting: the setting that determines the number of updates, with its value.
        steps: updates of the run.
        schedule_steps: updates of the schedule.
    """
    return (
        f"{setting}; optimizer.schedule_steps is {schedule_steps}, after which the learning rate is 0; "
        f"--set optimizer.schedule_steps={steps} extends the schedule, which changes the rates of the following "
        "updates"
    )
