"""A configuration as a workload of the cycle model: which graph to trace, in which arrangement, on which IPUs."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import mask_columns
from ipu_profiling.cycles.matmul import Planner
from ipu_profiling.cycles.pipeline import Pipeline, PipelinePlacement, assemble
from ipu_profiling.cycles.target import Target
from ipu_profiling.cycles.tracing import (
    UNPACKED,
    Graph,
    cached,
    capture,
    capture_update,
    sources_digest,
)

_TRACED_LAYERS = 3  # the first, the last, and one between them that stands for all others


class MicroBatchShape(NamedTuple):
    """Sizes of a micro-batch of packs."""

    micro_batch: int  # B, packs
    slots: int  # S
    depth: int  # D, most sequences of a pack
    masked: int  # P, most masked tokens of a pack


def shape_of(config: Config, *, depth: Optional[int] = None) -> MicroBatchShape:
    """Return the micro-batch of a configuration; P is max_predictions_per_sequence, plus D with packing.

    Args:
        config: the configuration.
        depth: sequences per pack in place of the configured number.

    Raises:
        ValueError: the number of sequences per pack is unlimited.
    """
    depth = depth if depth is not None else config.data.depth
    if depth is None:
        raise ValueError(
            f"{config.path}: data.max_sequences_per_pack is unlimited; the cycle model needs a number, so set one"
        )
    return MicroBatchShape(
        config.batch.micro_batch,
        config.data.max_sequence_length,
        depth,
        config.predictions_per_sequence + (depth if depth > 1 else 0),
    )


def _placement_of(config: Config) -> PipelinePlacement:
    placement = config.placement
    return PipelinePlacement(
        tuple(placement.layers_per_ipu),
        tuple(placement.available_memory_proportion),
        placement.replicas,
        placement.embedding_serialization_factor,
        placement.replicated_tensor_sharding and placement.replicas > 1,
        placement.optimizer_state_off_chip,
        config.engine.recomputes(ipus=True),
        config.engine.half_partials,
    )


def _batch_shapes(shape: MicroBatchShape) -> Dict[str, Tuple[Tuple[int, ...], str]]:
    """Return (shape, dtype) of the inputs of the model by name, in their order."""
    from ipu_packed_bert.model.packed import BATCH_FIELDS

    shapes: Dict[str, Tuple[Tuple[int, ...], str]] = {}
    for name in BATCH_FIELDS:
        if name.endswith("_scale"):
            shapes[name] = ((shape.micro_batch,), "float32")
            continue
        columns = shape.slots
        if name.startswith("masked_lm"):
            columns = shape.masked
        elif name.startswith("next_sentence"):
            columns = shape.depth
        shapes[name] = ((shape.micro_batch, columns), "int32")
    return shapes


def _build(config: Config, model: Any, shape: MicroBatchShape, arrangement: str) -> Any:
    """Build the network of `config` with the sizes of `model` in an arrangement; needs torch."""
    from ipu_profiling.cycles import variants

    return variants.build(
        model,
        config.loss,
        arrangement,
        slots=shape.slots,
        depth=shape.depth,
        columns=mask_columns(model, shape.depth),
    )


class Traces:
    """Graphs of configurations, each traced once and kept as a file of `folder` unless that is None."""

    def __init__(self, folder: Optional[Path] = None):
        self.folder = folder
        self._graphs: Dict[Tuple, Graph] = {}

    def _get(self, key: Tuple, trace: Callable[[], Graph]) -> Graph:
        """Return the graph of a key, which is traced unless this object or the cache has it."""
        if key not in self._graphs:
            self._graphs[key] = cached(f"{sources_digest()} {key}", self.folder, trace)
        return self._graphs[key]

    def training(self, config: Config, shape: MicroBatchShape, arrangement: str) -> Graph:
        """Trace forward and backward of a micro-batch of a network of three layers."""
        layers = min(_TRACED_LAYERS, config.model.num_layers)
        model = replace(config.model, num_layers=layers)

        def build() -> Any:
            return _build(config, model, shape, arrangement)

        key = ("training", astuple(model), astuple(config.loss), tuple(shape), arrangement)
        return self._get(key, lambda: capture(build, _batch_shapes(shape), layers))

    def update(self, config: Config) -> Graph:
        """Trace the weight update of a network of one layer; `pipeline` scales its cost to the whole network."""
        model = replace(config.model, num_layers=1)

        shape = MicroBatchShape(1, config.data.max_sequence_length, 1, 1)

        def build() -> Any:
            return _build(config, model, shape, UNPACKED)

        def optimizer(network: Any) -> Any:
            from ipu_packed_bert.model.optimizer import build_optimizer

            return build_optimizer(network, config.optimizer, betas=(0.9, 0.999))

        key = ("update", astuple(model), astuple(config.loss), config.optimizer.name)
        return self._get(key, lambda: capture_update(build, optimizer, 1))


class Machine:
    """A target with its planner, its traces and its assembled pipelines."""

    def __init__(
        self, target: Target, folder: Optional[Path] = None, traces: Optional[Traces] = None
    ):
        self.target = target
        self.planner = Planner(target, folder)
        self.traces = traces or Traces(folder)
        self._pipelines: Dict[Tuple, Pipeline] = {}

    def pipeline(
        self,
        config: Config,
        *,
        arrangement: Optional[str] = None,
        depth: Optional[int] = None,
        feed_forward_per_ipu: Tuple[int, ...] = (),
    ) -> Pipeline:
        """Lower the configuration's training step for this target.

        Args:
            config: the configuration.
            arrangement: the variant of the graph; by default that of the IPU engine.
            depth: sequences per pack in place of the configured number.
            feed_forward_per_ipu: as in `PipelinePlacement`.

        Raises:
            ValueError: the number of sequences per pack is unlimited.
        """
        shape = shape_of(config, depth=depth)
        if arrangement is None:
            arrangement = config.engine.mask if shape.depth > 1 else UNPACKED
        placement = _placement_of(config)._replace(feed_forward_per_ipu=feed_forward_per_ipu)
        key = (
            astuple(config.model),
            astuple(config.loss),
            astuple(config.optimizer),
            tuple(shape),
            tuple(placement),
            arrangement,
        )
        if key not in self._pipelines:
            self._pipelines[key] = assemble(
                self.traces.training(config, shape, arrangement),
                self.traces.update(config),
                placement,
                self.planner,
                num_layers=config.model.num_layers,
                micro_batch=shape.micro_batch,
            )
        return self._pipelines[key]

    @property
    def unknown(self) -> Dict[str, int]:
        """Operators without an estimator in the assembled pipelines, with their calls in the graph with the most."""
        unknown: Dict[str, int] = {}
        for pipeline in self._pipelines.values():
            for operator, calls in pipeline.unknown.items():
                unknown[operator] = max(calls, unknown.get(operator, 0))
        return unknown

    def save(self) -> None:
        """Store the plans of matrix products."""
        self.planner.save()
