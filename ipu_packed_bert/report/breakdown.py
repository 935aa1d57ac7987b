"""The table of the breakdown: the overhead by cause, the cycles of each IPU, the time of an update by part."""

from __future__ import annotations

from functools import partial
from typing import Any, Dict, List, NamedTuple, Tuple

from ipu_packed_bert.cycles.calibration import Calibration, Interval
from ipu_packed_bert.cycles.lowering import CATEGORIES, SCORES
from ipu_packed_bert.cycles.pipeline import Ipu, Parameters, Pipeline
from ipu_packed_bert.report.fields import INTERVALS, Field, in_percent, rows_of
from ipu_packed_bert.report.paper import ModelledOverhead
from pack_data.display.table import CONFIGURED, MODEL, Column, Part, Table, modelled

# Titles of the fields of `UpdateCost`.
_ONCE = {
    "optimizer": "optimiser",
    "links": "gradients over IPU-Links",
    "gateways": "gradients over gateway links",
    "steps": "steps of the ring",
    "streaming": "optimiser state off chip",
    "host": "host, between two calls",
}
_MILLION = 1e6


class _Share(NamedTuple):
    """A part of the overhead or of an update, with its values by key."""

    name: str
    values: Dict[str, Interval]


_WHAT = Field(Column("what", "part", CONFIGURED), lambda share: share.name)
_OVERHEAD = Field(
    modelled("overhead", "%", ".3f"), lambda share: in_percent(share.values["overhead"])
)


def breakdown(comparison: ModelledOverhead, depth: int, packing_factor: float) -> Table:
    """Return one table of three parts for the packed graph: its overhead, its IPUs, its weight update.

    Args:
        comparison: the packed and the unpacked graph.
        depth: most sequences of a pack.
        packing_factor: mean sequences per pack, which determines the accumulation of a packed update.
    """
    config = comparison.config
    calibration = comparison.calibration
    packed = comparison.packed(depth)
    accumulation = config.accumulation(packing_factor)
    full = config.batch.gradient_accumulation

    ipu_fields = _ipu_fields(packed, calibration)
    update_fields = (
        _WHAT,
        Field(
            modelled("packed", f"packed, accumulation {accumulation:,}", ",.1f"),
            lambda share: share.values["packed"],
        ),
        Field(
            modelled("unpacked", f"unpacked, accumulation {full:,}", ",.1f"),
            lambda share: share.values["unpacked"],
        ),
    )
    update_shares = _update_shares((packed, accumulation), (comparison.unpacked, full), calibration)
    rows = (
        *rows_of((_WHAT, _OVERHEAD), _overhead_shares(comparison, depth)),
        *rows_of(ipu_fields, packed.ipus),
        *rows_of(update_fields, update_shares),
    )
    columns = tuple(
        field.column for field in (_WHAT, _OVERHEAD, *ipu_fields[1:], *update_fields[1:])
    )
    parts = (
        Part(
            f"Overhead at depth {depth}, percent of the unpacked micro-batch's cycles",
            ("what", "overhead"),
        ),
        Part(
            f"Million cycles of each IPU ({packed.target.name}) for a micro-batch of {packed.micro_batch}",
            tuple(field.column.key for field in ipu_fields),
        ),
        Part("Milliseconds of an update", ("what", "packed", "unpacked")),
    )
    step = packed.step(accumulation, calibration.parameters)
    notes = (
        f"{SCORES}: the cost of its columns for the mask (engine.mask: product); joining them to query and key is "
        "mask application.",
        "layout: rearranging query and key with these columns, or an additive mask into the scores' layout; its "
        "atom size is unknown.",
        "A pipeline cycle is that of the slowest IPU, so the heads on the first IPU cost no time while another is "
        "slower.",
        f"pipeline cycle {step.pipeline_cycle:,.0f} cycles, weight update {step.update:,.0f}, step of "
        f"{accumulation} accumulations {step.cycles:,.0f} cycles = {step.seconds:.3f} s "
        f"({packed.target.name}, {MODEL}); the pipeline has {packed.placement.stages} stages.",
        *INTERVALS,
    )
    title = f"Breakdown of the cycles of {config.name}"
    return Table("breakdown", title, columns, rows, notes, parts)


def _overhead_shares(comparison: ModelledOverhead, depth: int) -> List[_Share]:
    """Return the overhead by cause, as fractions of the unpacked micro-batch's cycles, and two totals."""
    packed = comparison.packed(depth)
    unpacked = comparison.unpacked

    def share(parameters: Parameters, category: str) -> float:
        packed_cycles = packed.category_cycles(parameters).get(category, 0.0)
        unpacked_cycles = unpacked.category_cycles(parameters).get(category, 0.0)
        return (packed_cycles - unpacked_cycles) / unpacked.micro_batch_cycles(parameters)

    def layout(parameters: Parameters) -> float:
        return sum(share(parameters, f"{category}, layout") for category in CATEGORIES)

    def cycle(parameters: Parameters) -> float:
        return packed.pipeline_cycle(parameters) / unpacked.pipeline_cycle(parameters) - 1.0

    interval = comparison.calibration.interval
    overheads = {}
    for category in CATEGORIES:
        overheads[category] = interval(partial(share, category=category))
        if category == SCORES:  # it has most of the rearrangements
            overheads["layout"] = interval(layout)
    overheads["sum: a micro-batch (OH)"] = comparison.overhead(depth)
    overheads["a pipeline cycle"] = interval(cycle)
    return [_Share(name, {"overhead": overhead}) for name, overhead in overheads.items()]


def _ipu_fields(pipeline: Pipeline, calibration: Calibration) -> Tuple[Field, ...]:
    """Return the fields of an IPU's row: its layers, and its cycles by kind."""
    parameters = calibration.parameters
    factor = parameters.factor
    slowest = pipeline.bottleneck(parameters)

    def cycles(ipu: Ipu) -> Interval:
        return calibration.interval(lambda fitted: fitted.cycles(ipu.total))

    def kind(key: str, title: str, value: Any) -> Field:
        return Field(Column(key, title, MODEL, ".3f", scale=_MILLION), value)

    return (
        Field(Column("what", "part", CONFIGURED), lambda ipu: f"IPU {ipu.number}"),
        Field(Column("layers", "layers", CONFIGURED), lambda ipu: str(ipu.layers)),
        Field(modelled("cycles", "together", ".2f", _MILLION), cycles),
        kind("matmul", "matmul", lambda ipu: factor * ipu.total.matmul),
        kind("vertices", "other compute", lambda ipu: factor * ipu.total.vertices),
        kind("layout", "layout", lambda ipu: factor * ipu.total.layout_cycles(parameters.layout)),
        kind("exchange", "exchange", lambda ipu: factor * ipu.total.exchange),
        kind("sync", "sync", lambda ipu: factor * ipu.total.sync),
        kind("copies", "copy phase", pipeline.copy_cycles),
        Field(Column("mark", "", MODEL), lambda ipu: "slowest" if ipu is slowest else ""),
    )


def _update_shares(
    packed: Tuple[Pipeline, int], unpacked: Tuple[Pipeline, int], calibration: Calibration
) -> List[_Share]:
    """Return the parts of an update that take time, in milliseconds.

    Args:
        packed: the packed pipeline and its accumulation.
        unpacked: the same of the unpacked one.
        calibration: the fitted parameters.
    """
    shares = []
    for part in ("micro-batches", "pipeline fills and drains", *_ONCE, "together"):
        values = {
            "packed": calibration.interval(partial(_milliseconds, *packed, part)),
            "unpacked": calibration.interval(partial(_milliseconds, *unpacked, part)),
        }
        # Left out: gateways of one pod, the sum of gradients of one replica.
        if any(side.value for side in values.values()):
            shares.append(_Share(_ONCE.get(part, part), values))
    return shares


def _milliseconds(
    pipeline: Pipeline, accumulation: int, part: str, parameters: Parameters
) -> float:
    """Return the time that a part of an update takes."""
    step = pipeline.step(accumulation, parameters)
    if part in _ONCE:
        return 1e3 * getattr(step.once, part)
    if part == "together":
        return 1e3 * step.seconds
    times = accumulation if part == "micro-batches" else pipeline.placement.stages - 1
    return times * 1e3 * pipeline.target.seconds(step.pipeline_cycle)
