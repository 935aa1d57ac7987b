"""The cycle model on a task that learns from files: the program that the IPU engine makes of it.

The calibrated parameters are those of pre-training, the only thing that was measured in public. Needs torch.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, Dict, NamedTuple

from ipu_packed_bert.cycles import calibration
from ipu_packed_bert.cycles.matmul import Planner
from ipu_packed_bert.cycles.pipeline import Pipeline, assemble
from ipu_packed_bert.cycles.tracing import capture, capture_update, layers_alike
from ipu_packed_bert.cycles.workload import TRACED_LAYERS, placement_of
from ipu_packed_bert.settings.finetuning import FinetuneConfig
from ipu_packed_bert.settings.schema import mask_columns
from ipu_packed_bert.tasks.examples import ExampleTask


class TaskCycles(NamedTuple):
    """Computed cycles of a task's training program."""

    pipeline_cycle: float  # of one more micro-batch
    update: float  # of a weight update, all its micro-batches
    seconds: float  # of a weight update, with the host's part
    unknown: Dict[str, int]  # operators that are not counted, with their calls in a micro-batch


def task_cycles(config: FinetuneConfig, task: ExampleTask, planner: Planner, *, packing_factor: float) -> TaskCycles:
    """config: with the micro-batch that runs (`FinetuneConfig.with_micro_batch`)."""
    pipeline = task_pipeline(config, task, planner)
    step = pipeline.step(config.accumulation(packing_factor), calibration.load().parameters)
    return TaskCycles(step.pipeline_cycle, step.cycles, step.seconds, pipeline.unknown)


def task_pipeline(config: FinetuneConfig, task: ExampleTask, planner: Planner) -> Pipeline:
    """The task's training step on the planner's target."""
    rows, layers = config.batch.micro_batch, task.model.num_layers
    batch = task.layout(config, 1.0).filled(task.packs.batch(task.packs.order(0)[:1], 0), rows=rows)
    shapes = {name: (batch[name].shape, str(batch[name].dtype)) for name in task.fields}

    def network(num_layers: int) -> Any:
        from ipu_packed_bert.model.packed import GatherSlots
        from ipu_packed_bert.model.products import OneHotSlots, mask_in_product

        smaller = copy.copy(task)
        smaller.model = replace(task.model, num_layers=num_layers)
        built, depth = smaller.network("eager"), task.max_sequences_per_pack or 1
        if config.engine.mask == "product":
            mask_in_product(built, sequences=depth, columns=mask_columns(task.model, depth))
        for name, module in list(built.named_children()):
            if isinstance(module, GatherSlots):
                setattr(built, name, OneHotSlots(task.max_sequence_length))
        return built

    def optimizer(built: Any) -> Any:
        from ipu_packed_bert.model.optimizer import build_optimizer

        settings: Any = config.optimizer  # has what is read of pre-training's
        return build_optimizer(built, settings, betas=config.betas(1.0))

    few = min(TRACED_LAYERS, layers)
    graph = capture(lambda: network(few), shapes, few)
    if few < layers and not layers_alike(graph):
        graph = capture(lambda: network(layers), shapes, layers)
    return assemble(
        graph,
        capture_update(lambda: network(1), optimizer, 1),
        placement_of(config, heads_return=False),
        planner,
        num_layers=layers,
        micro_batch=rows,
    )
