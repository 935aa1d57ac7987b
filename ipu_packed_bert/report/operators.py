"""Where a micro-batch's cycles go: by operator, by class of operator and block, and the products against the roofline.

All from `Ipu.held`, whose costs add up to the pipeline's: nothing here is estimated anew.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np

from ipu_packed_bert.cycles.calibration import Calibration
from ipu_packed_bert.cycles.layout import Cost, stacked
from ipu_packed_bert.cycles.lowering import Entry, short_name
from ipu_packed_bert.cycles.matmul import Product
from ipu_packed_bert.cycles.pipeline import Parameters, Pipeline
from ipu_packed_bert.report.paper import ADDED_UP
from pack_data.display.table import CONFIGURED, COUNTED, MODEL, Column, Table, modelled, spread

WEIGHTS, ATTENTION, SOFTMAX, NORM = "products with weights", "products of attention", "softmax", "layer norm"
ACTIVATION, GATHER, ELEMENTWISE, OTHER = "GELU and tanh", "gather and scatter", "elementwise", "reduction, copy, stash"
_LAYOUT = "layout (rearranging)"
CLASSES = (WEIGHTS, ATTENTION, SOFTMAX, NORM, ACTIVATION, GATHER, ELEMENTWISE, OTHER, _LAYOUT)
_CLASS_OF = {
    "mm": WEIGHTS,
    "addmm": WEIGHTS,
    "bmm": ATTENTION,
    "baddbmm": ATTENTION,
    "embedding": GATHER,
    "embedding_dense_backward": GATHER,
    "gather": GATHER,
    "scatter_add": GATHER,
    "index_select": GATHER,
    "gelu": ACTIVATION,
    "gelu_backward": ACTIVATION,
    "tanh": ACTIVATION,
    "tanh_backward": ACTIVATION,
    "native_layer_norm": NORM,
    "native_layer_norm_backward": NORM,
    "sum": OTHER,
    "mean": OTHER,
    "amax": OTHER,
    "argmax": OTHER,
    "cat": OTHER,
    "copy": OTHER,
    "stash": OTHER,
    "accumulate": OTHER,
}
_EXACT = "exact: no fitted or uncertain parameter enters, as where both sides have the same operators."
# A layer is any one of them where they are alike; otherwise each has a name with its number.
_BLOCKS = ("embeddings", "mask", "layer", "heads", "pipeline")


def _operator_name(entry: Entry) -> str:
    """`mm` of `aten.mm.default`."""
    return short_name(entry.operator)[0] if "." in entry.operator else entry.operator


def _class_of(name: str) -> str:
    """Of an operator's name."""
    return _CLASS_OF.get(name, SOFTMAX if "softmax" in name else ELEMENTWISE)


def _block_of(entry: Entry) -> str:
    return "layer" if entry.block.startswith("layer") else entry.block


def class_costs(pipeline: Pipeline) -> Dict[Tuple[str, str], Cost]:
    """(block, class) -> cost of a micro-batch through all IPUs, without the copies between them."""
    whole: Dict[Tuple[str, str], Cost] = {}
    for (block, _, operator, _), (_, cost) in operator_costs(pipeline).items():
        key = (block, _class_of(operator))
        whole[key] = whole.get(key, Cost()) + cost
    found: Dict[Tuple[str, str], Cost] = {}
    for (block, kind), cost in whole.items():
        found[block, kind] = cost.plain
        found[block, _LAYOUT] = found.get((block, _LAYOUT), Cost()) + (cost - cost.plain)
    return found


def _sides(calibration: Calibration, packed: Sequence[Cost], unpacked: Sequence[Cost]) -> List[Dict[str, Any]]:
    """For each pair of costs: cycles and shares of both sides, and their difference, with intervals draw by draw."""
    after, before = stacked(packed), stacked(unpacked)

    def share(cost: Cost) -> Callable[[Parameters], Any]:
        def found(parameters: Parameters) -> Any:
            cycles = parameters.cycles(cost)
            return 100.0 * cycles / cycles.sum(axis=0)

        return found

    columns = {
        "packed": calibration.intervals(lambda each: each.cycles(after)),
        "share": calibration.intervals(share(after)),
        "unpacked": calibration.intervals(lambda each: each.cycles(before)),
        "share_unpacked": calibration.intervals(share(before)),
        "difference": calibration.intervals(lambda each: each.cycles(after - before)),
    }
    rows: List[Dict[str, Any]] = [{} for _ in packed]
    for key, intervals in columns.items():
        for row, interval in zip(rows, intervals):
            row.update(spread(key, interval))
    return rows


def classes(name: str, packed: Pipeline, unpacked: Pipeline, calibration: Calibration) -> Table:
    """Cycles of each class of operator in each block, packed beside unpacked."""
    after, before = class_costs(packed), class_costs(unpacked)
    found = [(block, kind) for block in _BLOCKS for kind in CLASSES]
    found = [key for key in found if any(side.get(key, Cost()) != Cost() for side in (after, before))]
    sides = _sides(calibration, *([side.get(key, Cost()) for key in found] for side in (after, before)))
    rows = [
        {"block": "all layers" if block == "layer" else block, "class": kind, **side}
        for (block, kind), side in zip(found, sides)
    ]
    return Table(
        "classes",
        f"{name}: million cycles of a micro-batch by block and class of operator",
        (
            Column("block", "block", CONFIGURED),
            Column("class", "class", CONFIGURED),
            modelled("packed", "packed", ".3f", 1e6),
            modelled("share", "% of packed", ".2f"),
            modelled("unpacked", "unpacked", ".3f", 1e6),
            modelled("share_unpacked", "% of unpacked", ".2f"),
            modelled("difference", "difference", "+.3f", 1e6),
        ),
        rows,
        ("Through all IPUs, recomputation included; the copies between IPUs are not in it.", _EXACT, *ADDED_UP),
    )


@lru_cache(4)
def operator_costs(pipeline: Pipeline) -> Dict[Tuple[str, str, str, str], Tuple[int, Cost]]:
    """(block, phase, operator, part) -> calls and their cost in a micro-batch, without views, which cost nothing."""
    found: Dict[Tuple[str, str, str, str], Tuple[int, Cost]] = {}
    for ipu in pipeline.ipus:
        for times, entry in ipu.held:
            if entry.cost != Cost():
                key = (_block_of(entry), entry.phase, _operator_name(entry), entry.category)
                calls, cost = found.get(key, (0, Cost()))
                found[key] = (calls + times, cost + entry.cost * float(times))
    return found


def operators(name: str, packed: Pipeline, unpacked: Pipeline, calibration: Calibration) -> Table:
    """Every operator of every block and phase, packed beside unpacked."""
    none = (0, Cost())
    after, before = operator_costs(packed), operator_costs(unpacked)
    keys = list({**after, **before})
    sides = _sides(calibration, *([side.get(key, none)[1] for key in keys] for side in (after, before)))
    both = sorted(zip(keys, sides), key=lambda item: (_BLOCKS.index(item[0][0]), -item[1]["packed"]))
    return Table(
        "operators",
        f"{name}: million cycles of a micro-batch by operator",
        (
            Column("block", "block", CONFIGURED),
            Column("phase", "phase", CONFIGURED),
            Column("operator", "operator", CONFIGURED),
            Column("part", "part", CONFIGURED),
            Column("calls", "calls", COUNTED, ",d"),
            modelled("packed", "packed", ".3f", 1e6),
            Column("share", "%", MODEL, ".2f"),
            Column("unpacked", "unpacked", MODEL, ".3f", scale=1e6),
            modelled("difference", "more", "+.3f", 1e6),
        ),
        [
            {
                "calls": after.get(key, none)[0],
                "block": key[0],
                "phase": key[1],
                "operator": key[2],
                "part": key[3],
                **side,
            }
            for key, side in both
        ],
        (
            "All layers together, recomputation included. Views cost nothing until an operator needs another order, "
            "and are left out.",
            _EXACT,
            *ADDED_UP,
        ),
    )


class _PlannedProduct(NamedTuple):
    """A matrix product of a micro-batch."""

    name: str
    product: Product
    calls: int
    cost: Cost  # of all calls, without rearrangements

    @property
    def bytes(self) -> int:
        """Of its two operands and its result, each once."""
        p = self.product
        return p.matrices * p.element_bytes * (p.rows * p.inner + p.inner * p.columns + p.rows * p.columns)

    @property
    def intensity(self) -> float:
        """Multiply-adds for each byte."""
        return self.product.macs / self.bytes

    @property
    def macs(self) -> int:
        """Multiply-adds of all calls."""
        return self.calls * self.product.macs


def planned_products(pipeline: Pipeline, parameters: Parameters) -> List[_PlannedProduct]:
    """The products by block, phase and size, the most expensive first."""
    found: Dict[Tuple[str, str, Product], Tuple[int, Cost]] = {}
    for ipu in pipeline.ipus:
        for times, entry in ipu.held:
            if entry.product is not None:
                calls = times * entry.parts
                # IPUs may give products different shares of their memory; the product is the same.
                same = replace(entry.product, memory_proportion=1.0)
                key = (_block_of(entry), entry.phase, same)
                before, cost = found.get(key, (0, Cost()))
                # The product alone: what else the operator does, a bias or the operands' layout, is not in `matmul`.
                alone = replace(Cost(), matmul=entry.cost.matmul, batched=entry.cost.batched, wide=entry.cost.wide)
                alone = replace(alone, exchange=entry.cost.exchange, sync=entry.cost.sync)
                found[key] = (before + calls, cost + alone * float(times))
    made = [
        _PlannedProduct(f"{block}, {phase}", product, calls, cost)
        for (block, phase, product), (calls, cost) in found.items()
    ]
    return sorted(made, key=lambda each: -parameters.cycles(each.cost))


def products(name: str, pipeline: Pipeline, calibration: Calibration) -> Table:
    """The roofline's points: what each product reaches, beside what its operands' arrival and the AMP units allow."""
    target = pipeline.target
    peak, arrival = target.peak_macs_per_cycle, target.tiles * target.exchange_bytes_per_cycle
    made = planned_products(pipeline, calibration.parameters)
    costs, macs = stacked([each.cost for each in made]), np.array([[each.macs] for each in made])
    cycles = calibration.intervals(lambda each: each.cycles(costs))
    rates = calibration.intervals(lambda each: macs / each.cycles(costs))
    rows: List[Dict[str, Any]] = []
    for each, taken, rate in zip(made, cycles, rates):
        p = each.product
        rows.append(
            {
                "name": each.name,
                "size": f"{p.matrices} x [{p.rows}, {p.inner}] x [{p.inner}, {p.columns}]",
                "calls": each.calls,
                "intensity": each.intensity,
                "roof": min(float(peak), arrival * each.intensity),
                **spread("cycles", taken),
                **spread("rate", rate),
                **spread("share", rate, 100.0 / peak),
            }
        )
    return Table(
        "products",
        f"{name}: the matrix products of a micro-batch",
        (
            Column("name", "where", CONFIGURED),
            Column("size", "size", CONFIGURED),
            Column("calls", "calls", COUNTED, ",d"),
            modelled("cycles", "M cycles", ".3f", 1e6),
            Column("intensity", "MAC/byte", COUNTED, ",.1f"),
            modelled("rate", "MAC/cycle", ",.0f"),
            Column("roof", "roof", COUNTED, ",.0f"),
            modelled("share", "of peak %", ".1f"),
        ),
        rows,
        (
            f"MAC: a multiply-add. The peak is {peak:,} a cycle; operands and result arrive at no more than "
            f"{arrival:,} bytes a cycle (all tiles), each counted once.",
            *ADDED_UP,
        ),
    )


_UPDATE_PARTS = ("steady", "bubble", "update", "host", "seconds")


def _update_parts(pipeline: Pipeline, accumulation: int) -> Callable[[Parameters], Any]:
    """The seconds of `_UPDATE_PARTS`."""

    def found(parameters: Parameters) -> Any:
        step, target = pipeline.step(accumulation, parameters), pipeline.target
        cycles = (
            accumulation * step.pipeline_cycle,
            (pipeline.placement.stages - 1) * step.pipeline_cycle,
            step.update,
        )
        seconds = [target.seconds(each) for each in cycles] + [step.once.host, step.seconds]
        return np.stack([np.atleast_1d(each + 0.0 * parameters.factor) for each in seconds])

    return found


def update(name: str, packed: Tuple[Pipeline, int], unpacked: Tuple[Pipeline, int], calibration: Calibration) -> Table:
    """What an update's seconds consist of; each pipeline with its accumulation."""
    rows: List[Dict[str, Any]] = []
    for side, (pipeline, accumulation) in (("packed", packed), ("unpacked", unpacked)):
        fill = pipeline.placement.stages - 1
        parts = calibration.intervals(_update_parts(pipeline, accumulation))
        rows.append(
            {
                "run": side,
                "accumulation": accumulation,
                "bubble_share": 100.0 * fill / (accumulation + fill),
                **{name: end for key, part in zip(_UPDATE_PARTS, parts) for name, end in spread(key, part).items()},
            }
        )
    return Table(
        "update",
        f"{name}: seconds of an update",
        (
            Column("run", "run", CONFIGURED),
            Column("accumulation", "accumulation", CONFIGURED, ",d"),
            modelled("steady", "micro-batches", ".4f"),
            modelled("bubble", "fill and drain", ".4f"),
            modelled("update", "weight update", ".4f"),
            modelled("host", "host", ".4f"),
            modelled("seconds", "together", ".4f"),
            Column("bubble_share", "bubble %", COUNTED, ".2f"),
        ),
        rows,
        (
            f"The pipeline has {packed[0].placement.stages} stages: it fills and drains in "
            f"{packed[0].placement.stages - 1} further pipeline cycles of every update, its bubble.",
            *ADDED_UP,
        ),
    )


# The fields of `UpdateCost`, in words.
_ONCE = {
    "optimizer": "optimiser",
    "links": "gradients over IPU-Links",
    "gateways": "gradients over gateway links",
    "steps": "steps of the ring",
    "streaming": "optimiser state off chip",
    "host": "host, between two calls",
}


def beyond(name: str, packed: Tuple[Pipeline, int], unpacked: Tuple[Pipeline, int], calibration: Calibration) -> Table:
    """What an update costs once, by cause; each pipeline with its accumulation."""
    rows: List[Dict[str, Any]] = [{"part": words} for words in _ONCE.values()]
    for side, (pipeline, accumulation) in (("packed", packed), ("unpacked", unpacked)):
        for row, part in zip(rows, calibration.intervals(_once(pipeline, accumulation))):
            row.update(spread(side, part))
    return Table(
        "beyond",
        f"{name}: milliseconds of an update beyond its pipeline",
        (
            Column("part", "part", CONFIGURED),
            modelled("packed", "packed", ",.1f"),
            modelled("unpacked", "unpacked", ",.1f"),
        ),
        rows,
        ADDED_UP,
    )


def _once(pipeline: Pipeline, accumulation: int) -> Callable[[Parameters], Any]:
    """The milliseconds of `_ONCE`."""

    def found(parameters: Parameters) -> Any:
        once = pipeline.step(accumulation, parameters).once
        return np.stack([np.atleast_1d(1e3 * getattr(once, key) + 0.0 * parameters.factor) for key in _ONCE])

    return found
