"""The rules between settings, each of which is in range.  Loads neither torch nor poptorch."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Collection, List, Tuple

from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.declare import shown
from ipu_packed_bert.settings.finetuning import SquadConfig
from ipu_packed_bert.settings.reader import problems_message
from ipu_packed_bert.settings.schema import FINETUNE
from ipu_packed_bert.settings.yaml_files import ConfigError
from pack_data.packers import packs_at_depth
from pack_data.reading.declare import AUTO

# Whether a rule is broken, and its message, which names all settings of the rule.
_Rules = List[Tuple[bool, str]]

_MIN_TRAINED_VOCABULARY = 128  # tokens, enough for the special tokens and single characters


def cross_check(config: Config, broken: Collection[str] = ()) -> List[str]:
    """Return one line for each broken rule between settings.

    Args:
        config: the configuration.
        broken: settings with a problem; rules about them are skipped.
    """
    of_command = _of_fine_tuning if config.command == FINETUNE else _of_pretraining
    rules = of_command(config) + _of_every_run(config)
    if config.engine.kind == "ipu":
        rules += _on_ipus(config)
    names = "|".join(map(re.escape, broken))
    of_broken = re.compile(rf"\b({names})\b" if broken else "(?!)")
    return [problem for is_broken, problem in rules if is_broken and not of_broken.search(problem)]


def _of_every_run(config: Config) -> _Rules:
    data = config.data
    depth = shown(data.max_sequences_per_pack)
    model = config.model
    engine = config.engine
    placement = config.placement
    per_replica = placement.ipus_per_replica
    ipus = config.ipus
    exported = engine.offline_export is not None
    rules = [
        (
            data.max_sequences_per_pack != AUTO and not packs_at_depth(data.packer, data.depth),
            f"data.max_sequences_per_pack is {depth}; too large for data.packer {data.packer}",
        ),
        (
            model.hidden_size % model.num_heads != 0,
            f"model.hidden_size is {model.hidden_size}; must be a multiple of model.num_heads, {model.num_heads}",
        ),
        (
            ipus & (ipus - 1) != 0,
            f"placement.replicas x placement.ipus_per_replica is {placement.replicas} x {per_replica} = {ipus}; "
            "must be a power of two",
        ),
        (
            placement.replicated_tensor_sharding and placement.replicas == 1,
            "placement.replicated_tensor_sharding is true; must be false if placement.replicas is 1",
        ),
        (
            engine.ipu_model and exported,
            "engine.ipu_model is true; must be false if engine.offline_export compiles for real IPUs",
        ),
        (
            engine.executable is not None and (exported or engine.ipu_model or engine.log_cycles),
            "engine.executable names a program compiled without a device, which runs on IPUs and counts no cycles; "
            "engine.offline_export must be null, engine.ipu_model false, and engine.log_cycles false",
        ),
    ]
    for name in ("layers_per_ipu", "available_memory_proportion"):
        count = len(getattr(placement, name))
        problem = f"placement.{name} has {count} values; must have one for each IPU of a replica"
        problem += f", and placement.ipus_per_replica is {per_replica}"
        rules.append((count != per_replica, problem))
    return rules


def _on_ipus(config: Config) -> _Rules:
    optimizer = config.optimizer
    return [
        (
            optimizer.max_gradient_norm is not None and optimizer.name != "adamw",
            f"optimizer.max_gradient_norm is {optimizer.max_gradient_norm}; must be null on IPUs with optimizer.name "
            f"{optimizer.name}: PopTorch clips for adamw only",
        )
    ]


def _of_pretraining(config: Config) -> _Rules:
    data = config.data
    model = config.model
    slots = data.max_sequence_length
    folders = data.folders
    layers = sum(config.placement.layers_per_ipu)
    parts = config.placement.embedding_serialization_factor
    accumulation = config.batch.gradient_accumulation
    steps = config.run.steps
    return [
        (
            data.packer == "none" and data.max_sequences_per_pack not in (1, AUTO),
            f"data.max_sequences_per_pack is {shown(data.max_sequences_per_pack)}; must be 1 or auto if data.packer is "
            "none",
        ),
        (
            data.shares is not None and len(data.shares) != len(folders),
            f"data.shares has {len(data.shares or ())} numbers; must have one for each of the {len(folders)} data sets "
            "of data.directory and data.mixed_with",
        ),
        (
            len({Path(folder).resolve() for folder in folders}) < len(folders),
            f"data.mixed_with: {data.named} has a data set twice; name it once, and set its part with data.shares",
        ),
        (
            config.predictions_per_sequence >= slots,
            f"data.max_predictions_per_sequence is {config.predictions_per_sequence}; must be below "
            f"data.max_sequence_length, {slots}",
        ),
        (
            slots > model.max_position_embeddings,
            f"data.max_sequence_length is {slots}; must be at most model.max_position_embeddings, "
            f"{model.max_position_embeddings}",
        ),
        (
            layers != model.num_layers,
            f"placement.layers_per_ipu places {layers} layers, model.num_layers is {model.num_layers}; "
            "change one of them",
        ),
        (
            model.vocabulary_size % parts != 0,
            f"placement.embedding_serialization_factor is {parts}; must divide model.vocabulary_size, "
            f"{model.vocabulary_size}",
        ),
        (
            accumulation < config.pipeline_stages,
            f"batch.gradient_accumulation is {accumulation}; must be at least the {config.pipeline_stages} stages of "
            "the training pipeline of placement.layers_per_ipu",
        ),
        (
            steps > config.schedule_steps and config.optimizer.schedule != "constant",
            schedule_too_short(f"run.steps is {steps}", steps, config.schedule_steps),
        ),
        (
            config.run.evaluate_every > 0 and config.evaluation_directory is None,
            f"run.evaluate_every is {config.run.evaluate_every}; requires held-out data: set data.held_out above 0 and "
            f"build with `{config.build_line()}`, or name a data set in data.evaluation_directory",
        ),
    ]


def _of_fine_tuning(config: Config) -> _Rules:
    data = config.data
    task = config.task
    size = config.model.vocabulary_size
    untrained = data.training is None
    unevaluated = data.evaluation is None
    return [
        (
            data.max_sequences_per_pack == AUTO,
            "data.max_sequences_per_pack is auto; must be a number, or null for unlimited",
        ),
        (
            untrained and unevaluated,
            "data.training and data.evaluation are null; name a file in at least one of them",
        ),
        (
            untrained and config.start.checkpoint is None,
            "data.training is null; requires model.checkpoint, the model to evaluate",
        ),
        (
            config.run.evaluate_every > 0 and unevaluated,
            f"run.evaluate_every is {config.run.evaluate_every}; requires data.evaluation",
        ),
        (
            isinstance(task, SquadConfig) and task.drop_seen_paragraphs and untrained,
            "task.drop_seen_paragraphs is true; requires data.training, the file with these paragraphs",
        ),
        (
            size < _MIN_TRAINED_VOCABULARY,
            f"model.vocabulary_size is {size}; must be at least {_MIN_TRAINED_VOCABULARY}",
        ),
        (
            config.engine.offline_export is not None and untrained,
            "engine.offline_export compiles a training program; data.training must not be null",
        ),
    ]


def check_on_ipus(config: Config) -> None:
    """Raise ConfigError for settings that IPUs do not support, with all problems."""
    problems = [problem for is_broken, problem in _on_ipus(config) if is_broken]
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
