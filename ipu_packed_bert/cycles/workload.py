"""A configuration as a workload of the cycle model: which graph to trace, in which arrangement, on which IPUs."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

from ipu_packed_bert.cycles.matmul import Planner
from ipu_packed_bert.cycles.pipeline import Pipeline, PipelinePlacement, assemble
from ipu_packed_bert.cycles.target import Target
from ipu_packed_bert.cycles.tracing import (
    UNPACKED,
    Graph,
    cached,
    capture,
    capture_update,
    sources_digest,
)
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import mask_columns

_TRACED_LAYERS = 3  # first, last, and one between that stands for all


class MicroBatchShape(NamedTuple):
    """Sizes of a micro-batch of packs."""

    micro_batch: int  # B, packs
    slots: int  # S
    depth: int  # D, sequences a pack has room for
    masked: int  # P, masked tokens a pack has room for


def shape_of(config: Config, *, depth: Optional[int] = None) -> MicroBatchShape:
    """Return the micro-batch of a configuration; P is max_predictions_per_sequence, plus D with packing.

    depth: instead of the configured one. Raises ValueError where it is unlimited.
    """
    depth = depth if depth is not None else config.data.max_sequences_per_pack
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
    placement, engine = config.placement, config.engine
    return PipelinePlacement(
        tuple(placement.layers_per_ipu),
        tuple(placement.available_memory_proportion),
        placement.replicas,
        placement.embedding_serialization_factor,
        placement.replicated_tensor_sharding and placement.replicas > 1,
        placement.optimizer_state_off_chip,
        engine.recomputes(ipus=True),
        engine.half_partials,
    )


def _batch_shapes(shape: MicroBatchShape) -> Dict[str, Tuple[Tuple[int, ...], str]]:
    """Return (shape, dtype) of the inputs of the model by name, in their order."""
    from ipu_packed_bert.model.packed import BATCH_FIELDS

    sizes = {"masked_lm": shape.masked, "next_sentence": shape.depth}
    shapes: Dict[str, Tuple[Tuple[int, ...], str]] = {}
    for name in BATCH_FIELDS:
        if name.endswith("_scale"):
            shapes[name] = ((shape.micro_batch,), "float32")
        else:
            size = next(
                (count for prefix, count in sizes.items() if name.startswith(prefix)), shape.slots
            )
            shapes[name] = ((shape.micro_batch, size), "int32")
    return shapes


def _build(config: Config, model: Any, shape: MicroBatchShape, arrangement: str) -> Any:
    """Build the network of `config`, with the layers of `model`, in an arrangement; only this needs torch."""
    from ipu_packed_bert.cycles import variants

    return variants.build(
        model,
        config.loss,
        arrangement,
        slots=shape.slots,
        depth=shape.depth,
        columns=mask_columns(model, shape.depth),
    )


class Traces:
    """Graphs of configurations, each traced once; kept as files where a folder is given."""

    def __init__(self, folder: Optional[Path] = None):
        self.folder = folder
        self.traced = 0
        self._graphs: Dict[Tuple, Graph] = {}

    def _get(self, key: Tuple, make: Callable[[], Graph]) -> Graph:
        if key not in self._graphs:

            def trace() -> Graph:
                self.traced += 1
                return make()

            self._graphs[key] = cached(f"{sources_digest()} {key}", self.folder, trace)
        return self._graphs[key]

    def training(self, config: Config, shape: MicroBatchShape, arrangement: str) -> Graph:
        """Forward and backward of a micro-batch, of a network of three layers."""
        layers = min(_TRACED_LAYERS, config.model.num_layers)
        model = replace(config.model, num_layers=layers)

        def make() -> Graph:
            return capture(
                lambda: _build(config, model, shape, arrangement), _batch_shapes(shape), layers
            )

        return self._get(
            ("training", astuple(model), astuple(config.loss), tuple(shape), arrangement), make
        )

    def update(self, config: Config) -> Graph:
        """Trace the weight update of a network of one layer; its costs are scaled to the parameters of a whole one."""
        model = replace(config.model, num_layers=1)

        def make() -> Graph:
            from ipu_packed_bert.model.optimizer import build_optimizer

            return capture_update(
                lambda: _build(
                    config,
                    model,
                    MicroBatchShape(1, config.data.max_sequence_length, 1, 1),
                    UNPACKED,
                ),
                lambda built: build_optimizer(built, config.optimizer, betas=(0.9, 0.999)),
                1,
            )

        return self._get(
            ("update", astuple(model), astuple(config.loss), config.optimizer.name), make
        )


class Machine:
    """A target with its planner, its traces and the pipelines assembled so far."""

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

        depth: instead of the configured packing depth. feed_forward_per_ipu: as in `PipelinePlacement`.
        """
        shape = shape_of(config, depth=depth)
        if arrangement is None:
            arrangement = (
                config.engine.mask if shape.depth > 1 else UNPACKED
            )  # as the IPU engine runs it
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
        """Operators without an estimator in the pipelines so far, with the most calls that one graph has of each."""
        found: Dict[str, int] = {}
        for pipeline in self._pipelines.values():
            for operator, times in pipeline.unknown.items():
                found[operator] = max(times, found.get(operator, 0))
        return found

    def save(self) -> None:
        self.planner.save()
