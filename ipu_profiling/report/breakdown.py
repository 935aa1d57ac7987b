"""The table of the breakdown: the overhead by cause, the cycles of each IPU, the time of an update by part."""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

from ipu_profiling.cycles.calibration import Calibration
from ipu_profiling.cycles.lowering import CATEGORIES, SCORES
from ipu_profiling.cycles.parameters import Parameters
from ipu_profiling.cycles.pipeline import Pipeline
from ipu_profiling.report.paper import ModelledOverhead
from pack_data.display.facts import MODEL, Fact, Facts, number, with_unit

# Titles of the fields of `UpdateCost`.
_ONCE = {
    "optimizer": "optimiser",
    "links": "gradients over IPU-Links",
    "gateways": "gradients over gateway links",
    "steps": "steps of the ring",
    "streaming": "optimiser state off chip",
    "host": "host, between two calls",
}


def breakdown(comparison: ModelledOverhead, depth: int, packing_factor: float) -> List[Facts]:
    """Return three tables of the packed graph: its overhead, its IPUs, its weight update.

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

    causes = []
    for cause, share in _overhead_shares(comparison, depth).items():
        overhead = Fact(f"overhead at depth {depth}", 100.0 * share, "percent of the cycles", MODEL)
        causes.append({"what": Fact("part", cause), "overhead": overhead})
    notes_on_causes = (
        "Percent of the cycles of an unpacked micro-batch.",
        f"{SCORES}: the cost of its columns for the mask (engine.mask: product); joining them to query and key is "
        "mask application.",
        "layout: rearranging query and key with these columns, or an additive mask into the scores' layout; its "
        "atom size is unknown.",
    )
    columns = (
        ("packed", f"packed, {accumulation:,} micro-batches", (packed, accumulation)),
        ("unpacked", f"unpacked, {full:,} micro-batches", (comparison.unpacked, full)),
    )
    note_on_ipus = (
        "A pipeline cycle is that of the slowest IPU, so the heads on the first IPU cost no time while another is "
        "slower."
    )
    step = packed.step(accumulation, calibration.parameters)
    target = packed.target.name
    note_on_updates = (
        f"pipeline cycle {with_unit(step.pipeline_cycle, 'cycles')}, weight update {number(step.update, 'cycles')}, "
        f"step of {accumulation} accumulations {with_unit(step.cycles, 'cycles')} = {with_unit(step.seconds, 's')} "
        f"({target}, {MODEL}); the pipeline has {packed.placement.stages} stages."
    )
    title_of_ipus = f"Cycles of each IPU ({target}) for a micro-batch of {packed.micro_batch}"
    updates = _update_rows(columns, calibration.parameters)
    return [
        Facts(f"Breakdown of the cycles of {config.name}", causes, notes_on_causes, "breakdown"),
        Facts(title_of_ipus, _ipu_rows(packed, calibration), [note_on_ipus], "breakdown"),
        Facts("Time of an update", updates, [note_on_updates], "breakdown"),
    ]


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


# Kind of cycles -> its name.
_CYCLES = {
    "cycles": "together",
    "matmul": "matmul",
    "vertices": "other compute",
    "layout": "layout",
    "exchange": "exchange",
    "sync": "sync",
    "copies": "copy phase",
}


def _ipu_rows(pipeline: Pipeline, calibration: Calibration) -> List[Dict[str, Fact]]:
    """Return the layers of each IPU, and its cycles by kind."""
    parameters = calibration.parameters
    slowest = pipeline.bottleneck(parameters)
    rows = []
    for ipu in pipeline.ipus:
        cost = ipu.total
        cycles = {
            "cycles": parameters.cycles(cost),
            "layout": parameters.factor * cost.layout_cycles(parameters.layout),
            "copies": pipeline.copy_cycles(ipu),
        }
        for kind in ("matmul", "vertices", "exchange", "sync"):
            cycles[kind] = parameters.factor * getattr(cost, kind)
        row = {
            "what": Fact("part", f"IPU {ipu.number}"),
            "layers": Fact("layers", str(ipu.layers)),
        }
        for kind, name in _CYCLES.items():
            row[kind] = Fact(name, cycles[kind], "million cycles", MODEL)
        row["mark"] = Fact("", "slowest" if ipu is slowest else "", source=MODEL)
        rows.append(row)
    return rows


def _update_rows(
    columns: Sequence[Tuple[str, str, Tuple[Pipeline, int]]], parameters: Parameters
) -> List[Dict[str, Fact]]:
    """Return the parts of an update that take time.

    Args:
        columns: key and name of each column, and its pipeline with the accumulation.
        parameters: the fitted parameters.
    """
    rows = []
    for part in ("micro-batches", "pipeline fills and drains", *_ONCE, "together"):
        row = {"what": Fact("part", _ONCE.get(part, part))}
        for key, name, (pipeline, accumulation) in columns:
            spent = _milliseconds(pipeline, accumulation, part, parameters)
            row[key] = Fact(name, spent, "ms", MODEL)
        # Left out: gateways of one pod, the sum of gradients of one replica.
        if any(row[key].value for key, _, _ in columns):
            rows.append(row)
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
