"""The table of the breakdown: the overhead by cause, the cycles of each IPU, the time of an update by part."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from ipu_profiling.cycles.calibration import Calibration
from ipu_profiling.cycles.lowering import CATEGORIES, SCORES
from ipu_profiling.cycles.parameters import Parameters
from ipu_profiling.cycles.pipeline import Pipeline
from ipu_profiling.report.paper import ModelledOverhead
from pack_data.display.table import CONFIGURED, MODEL, Column, Part, Table

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

    rows: List[Dict[str, Any]] = []
    for name, share in _overhead_shares(comparison, depth).items():
        rows.append({"what": name, "overhead": 100.0 * share})
    rows += _ipu_rows(packed, calibration)
    rows += _update_rows((packed, accumulation), (comparison.unpacked, full), calibration)
    columns = (
        Column("what", "part", CONFIGURED),
        Column("overhead", "%", MODEL, ".3f"),
        *_IPU_COLUMNS,
        Column("packed", f"packed, accumulation {accumulation:,}", MODEL, ",.1f"),
        Column("unpacked", f"unpacked, accumulation {full:,}", MODEL, ",.1f"),
    )
    parts = (
        Part(
            f"Overhead at depth {depth}, percent of the unpacked micro-batch's cycles",
            ("what", "overhead"),
        ),
        Part(
            f"Million cycles of each IPU ({packed.target.name}) for a micro-batch of {packed.micro_batch}",
            ("what", *(column.key for column in _IPU_COLUMNS)),
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
    )
    title = f"Breakdown of the cycles of {config.name}"
    return Table("breakdown", title, columns, rows, notes, parts)


def _overhead_shares(comparison: ModelledOverhead, depth: int) -> Dict[str, float]:
    """Return the overhead by cause, as fractions of the unpacked micro-batch's cycles, and two totals."""
    packed = comparison.packed(depth)
    unpacked = comparison.unpacked
    parameters = comparison.calibration.parameters
    packed_cycles = packed.category_cycles(parameters)
    unpacked_cycles = unpacked.category_cycles(parameters)

    def share(category: str) -> float:
        extra = packed_cycles.get(category, 0.0) - unpacked_cycles.get(category, 0.0)
        return extra / unpacked.micro_batch_cycles(parameters)

    overheads = {}
    for category in CATEGORIES:
        overheads[category] = share(category)
        if category == SCORES:  # it has most of the rearrangements
            overheads["layout"] = sum(share(f"{each}, layout") for each in CATEGORIES)
    overheads["sum: a micro-batch (OH)"] = comparison.overhead(depth)
    cycles_ratio = packed.pipeline_cycle(parameters) / unpacked.pipeline_cycle(parameters)
    overheads["a pipeline cycle"] = cycles_ratio - 1.0
    return overheads


def _of_ipus(key: str, title: str) -> Column:
    return Column(key, title, MODEL, ".3f", scale=_MILLION)


_IPU_COLUMNS = (
    Column("layers", "layers", CONFIGURED),
    Column("cycles", "together", MODEL, ".2f", scale=_MILLION),
    _of_ipus("matmul", "matmul"),
    _of_ipus("vertices", "other compute"),
    _of_ipus("layout", "layout"),
    _of_ipus("exchange", "exchange"),
    _of_ipus("sync", "sync"),
    _of_ipus("copies", "copy phase"),
    Column("mark", "", MODEL),
)


def _ipu_rows(pipeline: Pipeline, calibration: Calibration) -> List[Dict[str, Any]]:
    """Return the layers of each IPU, and its cycles by kind."""
    parameters = calibration.parameters
    slowest = pipeline.bottleneck(parameters)
    rows = []
    for ipu in pipeline.ipus:
        cost = ipu.total
        row = {
            "what": f"IPU {ipu.number}",
            "layers": str(ipu.layers),
            "cycles": parameters.cycles(cost),
            "layout": parameters.factor * cost.layout_cycles(parameters.layout),
            "copies": pipeline.copy_cycles(ipu),
            "mark": "slowest" if ipu is slowest else "",
        }
        for kind in ("matmul", "vertices", "exchange", "sync"):
            row[kind] = parameters.factor * getattr(cost, kind)
        rows.append(row)
    return rows


def _update_rows(
    packed: Tuple[Pipeline, int], unpacked: Tuple[Pipeline, int], calibration: Calibration
) -> List[Dict[str, Any]]:
    """Return the parts of an update that take time, in milliseconds.

    Args:
        packed: the packed pipeline and its accumulation.
        unpacked: the same of the unpacked one.
        calibration: the fitted parameters.
    """
    rows = []
    for part in ("micro-batches", "pipeline fills and drains", *_ONCE, "together"):
        ours = _milliseconds(*packed, part, calibration.parameters)
        theirs = _milliseconds(*unpacked, part, calibration.parameters)
        # Left out: gateways of one pod, the sum of gradients of one replica.
        if ours or theirs:
            rows.append({"what": _ONCE.get(part, part), "packed": ours, "unpacked": theirs})
    return rows


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
