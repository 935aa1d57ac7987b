"""The rules between settings, each of which is in range.  Loads neither torch nor poptorch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Container, Iterator, List, Tuple

from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.finetuning import SquadConfig
from ipu_packed_bert.settings.reader import problems_message
from ipu_packed_bert.settings.schema import FINETUNE, EngineConfig, PlacementConfig
from ipu_packed_bert.settings.yaml_files import ConfigError
from pack_data.packers import packs_at_depth

# The settings of a broken rule, separated by spaces, and its message.
_Problems = Iterator[Tuple[str, str]]

_MIN_TRAINED_VOCABULARY = 128  # tokens, enough for the special tokens and single characters


def cross_check(config: Config, broken: Container[str] = frozenset()) -> List[str]:
    """Return one line for each broken rule between settings.

    Args:
        config: the configuration.
        broken: settings with a problem; rules about them are skipped.
    """
    rules = _of_fine_tuning if config.command == FINETUNE else _of_pretraining
    problems = []
    for keys, problem in [*rules(config), *_of_every_run(config)]:
        if not any(key in broken for key in keys.split()):
            problems.append(problem)
    return problems


def _of_every_run(config: Config) -> _Problems:
    data = config.data
    model = config.model
    if not packs_at_depth(data.packer, data.max_sequences_per_pack):
        yield (
            "data.packer data.max_sequences_per_pack",
            f"data.max_sequences_per_pack is {data.depth_shown}; too large for data.packer {data.packer}",
        )
    if model.hidden_size % model.num_heads != 0:
        yield (
            "model.hidden_size model.num_heads",
            f"model.hidden_size is {model.hidden_size}; must be a multiple of model.num_heads, {model.num_heads}",
        )
    yield from _of_placement(config.placement)
    yield from _of_engine(config.engine)
    if config.engine.kind == "ipu":
        yield from _on_ipus(config)


def _of_placement(placement: PlacementConfig) -> _Problems:
    per_replica = placement.ipus_per_replica
    ipus = placement.replicas * per_replica
    for name in ("layers_per_ipu", "available_memory_proportion"):
        count = len(getattr(placement, name))
        if count != per_replica:
            yield (
                f"placement.{name} placement.ipus_per_replica",
                f"placement.{name} has {count} values; must have one for each of the {per_replica} IPUs of a replica",
            )
    if ipus & (ipus - 1) != 0:
        yield (
            "placement.replicas placement.ipus_per_replica",
            f"placement.replicas x placement.ipus_per_replica is {placement.replicas} x {per_replica} = {ipus}; "
            "must be a power of two",
        )
    if placement.replicated_tensor_sharding and placement.replicas == 1:
        yield (
            "placement.replicated_tensor_sharding placement.replicas",
            "placement.replicated_tensor_sharding is true; must be false with one replica",
        )


def _of_engine(engine: EngineConfig) -> _Problems:
    exported = engine.offline_export is not None
    if engine.ipu_model and exported:
        yield (
            "engine.ipu_model engine.offline_export",
            "engine.ipu_model is true; must be false if engine.offline_export compiles for real IPUs",
        )
    if engine.executable is not None and (exported or engine.ipu_model or engine.log_cycles):
        yield (
            "engine.executable engine.offline_export engine.ipu_model engine.log_cycles",
            "engine.executable names a program compiled without a device, which runs on IPUs and counts no cycles; "
            "engine.offline_export must be null, engine.ipu_model false, and engine.log_cycles false",
        )


def _on_ipus(config: Config) -> _Problems:
    optimizer = config.optimizer
    if optimizer.max_gradient_norm is not None and optimizer.name != "adamw":
        yield (
            "optimizer.max_gradient_norm optimizer.name engine.kind",
            f"optimizer.max_gradient_norm is {optimizer.max_gradient_norm}; must be null on IPUs with optimizer.name "
            f"{optimizer.name}: PopTorch clips for adamw only",
        )


def _of_mixtures(config: Config) -> _Problems:
    data = config.data
    if data.shares is not None and len(data.shares) != len(data.folders):
        yield (
            "data.shares data.mixed_with",
            f"data.shares has {len(data.shares)} numbers; must have one for each of the {len(data.folders)} data sets "
            "of data.directory and data.mixed_with",
        )
    if len({Path(folder).resolve() for folder in data.folders}) < len(data.folders):
        yield (
            "data.directory data.mixed_with",
            f"data.mixed_with: {data.named} has a data set twice; name it once, and set its part with data.shares",
        )


def _of_pretraining(config: Config) -> _Problems:
    data = config.data
    model = config.model
    placement = config.placement
    slots = data.max_sequence_length
    if data.packer == "none" and data.max_sequences_per_pack != 1:
        yield (
            "data.packer data.max_sequences_per_pack",
            f"data.max_sequences_per_pack is {data.depth_shown}; must be 1 if data.packer is none",
        )
    yield from _of_mixtures(config)
    if config.predictions_per_sequence >= slots:
        yield (
            "data.max_predictions_per_sequence data.max_sequence_length",
            f"data.max_predictions_per_sequence is {config.predictions_per_sequence}; must be below "
            f"data.max_sequence_length, {slots}",
        )
    if slots > model.max_position_embeddings:
        yield (
            "data.max_sequence_length model.max_position_embeddings",
            f"data.max_sequence_length is {slots}; must be at most model.max_position_embeddings, "
            f"{model.max_position_embeddings}",
        )
    layers = sum(placement.layers_per_ipu)
    if layers != model.num_layers:
        yield (
            "placement.layers_per_ipu model.num_layers",
            f"placement.layers_per_ipu places {layers} layers, model.num_layers is {model.num_layers}; "
            "change one of them",
        )
    parts = placement.embedding_serialization_factor
    if model.vocabulary_size % parts != 0:
        yield (
            "placement.embedding_serialization_factor model.vocabulary_size",
            f"placement.embedding_serialization_factor is {parts}; must divide model.vocabulary_size, "
            f"{model.vocabulary_size}",
        )
    accumulation = config.batch.gradient_accumulation
    stages = config.pipeline_stages
    if accumulation < stages:
        yield (
            "batch.gradient_accumulation placement.layers_per_ipu",
            f"batch.gradient_accumulation is {accumulation}; must be at least the {stages} stages of the training "
            "pipeline",
        )
    steps = config.run.steps
    if steps > config.schedule_steps and config.optimizer.schedule != "constant":
        yield (
            "run.steps optimizer.schedule_steps",
            schedule_too_short(f"run.steps is {steps}", steps, config.schedule_steps),
        )
    if config.run.evaluate_every and config.evaluation_directory is None:
        yield (
            "run.evaluate_every data.held_out data.evaluation_directory",
            f"run.evaluate_every is {config.run.evaluate_every}; requires held-out data: set data.held_out above 0 and "
            f"build with `{config.build_line()}`, or name a data set in data.evaluation_directory",
        )


def _of_fine_tuning(config: Config) -> _Problems:
    data = config.data
    task = config.task
    if data.training is None and data.evaluation is None:
        yield (
            "data.training data.evaluation",
            "data.training and data.evaluation are null; name a file in at least one of them",
        )
    if data.training is None and config.start.checkpoint is None:
        yield (
            "data.training model.checkpoint",
            "data.training is null; requires model.checkpoint, the model to evaluate",
        )
    if config.run.evaluate_every and data.evaluation is None:
        yield (
            "data.training run.evaluate_every data.evaluation",
            f"run.evaluate_every is {config.run.evaluate_every}; requires data.evaluation",
        )
    if isinstance(task, SquadConfig) and task.drop_seen_paragraphs and data.training is None:
        yield (
            "data.evaluation task.drop_seen_paragraphs data.training",
            "task.drop_seen_paragraphs is true; requires data.training, the file with these paragraphs",
        )
    if config.model.vocabulary_size < _MIN_TRAINED_VOCABULARY:
        yield (
            "model.vocabulary_size",
            f"model.vocabulary_size is {config.model.vocabulary_size}; must be at least {_MIN_TRAINED_VOCABULARY}",
        )
    if config.engine.offline_export is not None and data.training is None:
        yield (
            "engine.offline_export data.training",
            "engine.offline_export compiles a training program; data.training must not be null",
        )


def check_on_ipus(config: Config) -> None:
    """Raise ConfigError for settings that IPUs do not support, with all problems."""
    problems = [problem for _, problem in _on_ipus(config)]
    if problems:
        raise ConfigError(problems_message(config.path, problems))


def check_accumulation(config: Config, packing_factor: float) -> None:
    """Raise ConfigError if a packed update has fewer micro-batches than the training pipeline has stages."""
    accumulation = config.accumulation(packing_factor)
    stages = config.pipeline_stages
    if accumulation >= stages:
        return
    batch = config.batch
    replicas = config.placement.replicas
    if config.command != FINETUNE:
        raise ConfigError(
            f"{config.path}: batch.gradient_accumulation is {batch.gradient_accumulation}, {accumulation} with a "
            f"packing factor of {packing_factor:.3f}; must be at least the {stages} stages of the training pipeline"
        )
    sequences = math.ceil(stages * replicas * packing_factor)
    fewer = f", or use fewer than {replicas} replicas" if replicas > 1 else ""
    raise ConfigError(
        f"{config.path}: batch.sequences_per_update is {batch.sequences_per_update}, with a packing factor of "
        f"{packing_factor:.3f} {config.packs_of_replica(packing_factor)} rows for each replica; must be at least a row "
        f"for each of the {stages} stages of the training pipeline: --set batch.sequences_per_update={sequences}{fewer}"
    )


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
