"""Where a micro-batch's cycles go: by operator, by class of operator and block, and the products against the roofline.

All from `Ipu.held`, whose costs add up to the pipeline's: nothing here is estimated anew.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, List, NamedTuple, Tuple

from ipu_packed_bert.cycles.calibration import Calibration
from ipu_packed_bert.cycles.layout import Cost
from ipu_packed_bert.cycles.lowering import Entry, short_name
from ipu_packed_bert.cycles.matmul import Product
from ipu_packed_bert.cycles.pipeline import Parameters, Pipeline
from ipu_packed_bert.report.tables import CONFIGURED, MODEL, ReportColumn, Table

WEIGHTS, ATTENTION, SOFTMAX, NORM = "products with weights", "products of attention", "softmax", "layer norm"
ACTIVATION, GATHER, ELEMENTWISE, OTHER = "GELU and tanh", "gather and scatter", "elementwise", "reduction, copy, stash"
LAYOUT = "layout (rearranging)"
CLASSES = (WEIGHTS, ATTENTION, SOFTMAX, NORM, ACTIVATION, GATHER, ELEMENTWISE, OTHER, LAYOUT)
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
# A layer is any one of them where they are alike; otherwise each has a name with its number.
BLOCKS = ("embeddings", "mask", "layer", "heads", "pipeline")


def operator_name(entry: Entry) -> str:
    """`mm` of `aten.mm.default`."""
    return short_name(entry.operator)[0] if "." in entry.operator else entry.operator


def class_of(entry: Entry) -> str:
    name = operator_name(entry)
    return _CLASS_OF.get(name, SOFTMAX if "softmax" in name else ELEMENTWISE)


def block_of(entry: Entry) -> str:
    return "layer" if entry.block.startswith("layer") else entry.block


def plain_cycles(cost: Cost, parameters: Parameters) -> float:
    """Without rearrangements."""
    return parameters.cycles(cost) - parameters.factor * parameters.layout_cycles(cost)


def class_cycles(pipeline: Pipeline, parameters: Parameters) -> Dict[Tuple[str, str], float]:
    """(block, class) -> cycles of a micro-batch through all IPUs, without the copies between them."""
    found: Dict[Tuple[str, str], float] = {}
    for ipu in pipeline.ipus:
        for times, entry in ipu.held:
            block = block_of(entry)
            layout = parameters.factor * parameters.layout_cycles(entry.cost)
            for kind, cycles in ((class_of(entry), plain_cycles(entry.cost, parameters)), (LAYOUT, layout)):
                found[block, kind] = found.get((block, kind), 0.0) + times * cycles
    return found


def classes(name: str, packed: Pipeline, unpacked: Pipeline, calibration: Calibration) -> Table:
    """Cycles of each class of operator in each block, packed beside unpacked."""
    parameters = calibration.parameters
    after, before = class_cycles(packed, parameters), class_cycles(unpacked, parameters)
    rows = [
        {
            "block": "all layers" if block == "layer" else block,
            "class": kind,
            "packed": after.get((block, kind), 0.0),
            "unpacked": before.get((block, kind), 0.0),
            "difference": after.get((block, kind), 0.0) - before.get((block, kind), 0.0),
        }
        for block in BLOCKS
        for kind in CLASSES
        if after.get((block, kind)) or before.get((block, kind))
    ]
    return Table(
        "classes",
        f"{name}: million cycles of a micro-batch by block and class of operator",
        (
            ReportColumn("block", "block", CONFIGURED),
            ReportColumn("class", "class", CONFIGURED),
            ReportColumn("packed", "packed", MODEL, ".3f", scale=1e6),
            ReportColumn("unpacked", "unpacked", MODEL, ".3f", scale=1e6),
            ReportColumn("difference", "difference", MODEL, "+.3f", scale=1e6),
        ),
        rows,
        ("Through all IPUs, recomputation included; the copies between IPUs are not in it.",),
    )


def operators(name: str, packed: Pipeline, unpacked: Pipeline, calibration: Calibration) -> Table:
    """Every operator of every block and phase, packed beside unpacked."""
    parameters = calibration.parameters
    lines: Dict[Tuple[str, str, str, str], Dict[str, Any]] = {}
    for side, pipeline in (("packed", packed), ("unpacked", unpacked)):
        for ipu in pipeline.ipus:
            for times, entry in ipu.held:
                if not any((entry.cost.cycles(1.0), entry.cost.layout_calls)):
                    continue  # a view
                key = (block_of(entry), entry.phase, operator_name(entry), entry.category)
                line = lines.setdefault(key, {"calls": 0, "packed": 0.0, "unpacked": 0.0})
                line[side] += times * parameters.cycles(entry.cost)
                if side == "packed":
                    line["calls"] += times
    whole = sum(line["packed"] for line in lines.values())
    rows = [
        {
            "block": key[0],
            "phase": key[1],
            "operator": key[2],
            "part": key[3],
            "calls": line["calls"],
            "packed": line["packed"],
            "share": 100.0 * line["packed"] / whole,
            "unpacked": line["unpacked"],
            "difference": line["packed"] - line["unpacked"],
        }
        for key, line in sorted(lines.items(), key=lambda item: (BLOCKS.index(item[0][0]), -item[1]["packed"]))
    ]
    return Table(
        "operators",
        f"{name}: million cycles of a micro-batch by operator",
        (
            ReportColumn("block", "block", CONFIGURED),
            ReportColumn("phase", "phase", CONFIGURED),
            ReportColumn("operator", "operator", CONFIGURED),
            ReportColumn("part", "part", CONFIGURED),
            ReportColumn("calls", "calls", MODEL, ",d"),
            ReportColumn("packed", "packed", MODEL, ".3f", scale=1e6),
            ReportColumn("share", "%", MODEL, ".2f"),
            ReportColumn("unpacked", "unpacked", MODEL, ".3f", scale=1e6),
            ReportColumn("difference", "more", MODEL, "+.3f", scale=1e6),
        ),
        rows,
        (
            "All layers together, recomputation included. Views cost nothing until an operator needs another order, "
            "and are left out.",
        ),
    )


class PlannedProduct(NamedTuple):
    """A matrix product of a micro-batch."""

    name: str
    product: Product
    calls: int
    cycles: float  # of all calls, without rearrangements

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
    def rate(self) -> float:
        """Multiply-adds a cycle."""
        return self.calls * self.product.macs / self.cycles


def planned_products(pipeline: Pipeline, parameters: Parameters) -> List[PlannedProduct]:
    """The products by block, phase and size, the most expensive first."""
    found: Dict[Tuple[str, str, Product], List[float]] = {}
    for ipu in pipeline.ipus:
        for times, entry in ipu.held:
            if entry.product is not None:
                calls = times * entry.parts
                # IPUs may give products different shares of their memory; the product is the same.
                same = replace(entry.product, memory_proportion=1.0)
                both = found.setdefault((block_of(entry), entry.phase, same), [0, 0.0])
                both[0] += calls
                # The product alone: what else the operator does, a bias or the operands' layout, is not in `matmul`.
                alone = replace(Cost(), matmul=entry.cost.matmul, batched=entry.cost.batched, wide=entry.cost.wide)
                alone = replace(alone, exchange=entry.cost.exchange, sync=entry.cost.sync)
                both[1] += times * parameters.cycles(alone)
    made = [
        PlannedProduct(f"{block}, {phase}", product, int(calls), cycles)
        for (block, phase, product), (calls, cycles) in found.items()
    ]
    return sorted(made, key=lambda each: -each.cycles)


def products(name: str, pipeline: Pipeline, calibration: Calibration) -> Table:
    """The roofline's points: what each product reaches, beside what its operands' arrival and the AMP units allow."""
    target = pipeline.target
    peak, arrival = target.peak_macs_per_cycle, target.tiles * target.exchange_bytes_per_cycle
    rows = []
    for each in planned_products(pipeline, calibration.parameters):
        p = each.product
        rows.append(
            {
                "name": each.name,
                "size": f"{p.matrices} x [{p.rows}, {p.inner}] x [{p.inner}, {p.columns}]",
                "calls": each.calls,
                "intensity": each.intensity,
                "rate": each.rate,
                "share": 100.0 * each.rate / peak,
                "roof": min(float(peak), arrival * each.intensity),
                "cycles": each.cycles,
            }
        )
    return Table(
        "products",
        f"{name}: the matrix products of a micro-batch",
        (
            ReportColumn("name", "where", CONFIGURED),
            ReportColumn("size", "size", CONFIGURED),
            ReportColumn("calls", "calls", MODEL, ",d"),
            ReportColumn("cycles", "M cycles", MODEL, ".3f", scale=1e6),
            ReportColumn("intensity", "MAC/byte", MODEL, ",.1f"),
            ReportColumn("rate", "MAC/cycle", MODEL, ",.0f"),
            ReportColumn("roof", "roof", MODEL, ",.0f"),
            ReportColumn("share", "of peak %", MODEL, ".1f"),
        ),
        rows,
        (
            f"MAC: a multiply-add. The peak is {peak:,} a cycle; operands and result arrive at no more than "
            f"{arrival:,} bytes a cycle (all tiles), each counted once.",
        ),
    )


def update(name: str, packed: Tuple[Pipeline, int], unpacked: Tuple[Pipeline, int], calibration: Calibration) -> Table:
    """What an update's seconds consist of; each pipeline with its accumulation."""
    rows = []
    for side, (pipeline, accumulation) in (("packed", packed), ("unpacked", unpacked)):
        parameters, target = calibration.parameters, pipeline.target
        step = pipeline.step(accumulation, parameters)
        fill = pipeline.placement.stages - 1
        rows.append(
            {
                "run": side,
                "accumulation": accumulation,
                "steady": target.seconds(accumulation * step.pipeline_cycle),
                "bubble": target.seconds(fill * step.pipeline_cycle),
                "update": target.seconds(step.update),
                "host": step.once.host,
                "seconds": step.seconds,
                "bubble_share": 100.0 * fill / (accumulation + fill),
            }
        )
    return Table(
        "update",
        f"{name}: seconds of an update",
        (
            ReportColumn("run", "run", CONFIGURED),
            ReportColumn("accumulation", "accumulation", CONFIGURED, ",d"),
            ReportColumn("steady", "micro-batches", MODEL, ".4f"),
            ReportColumn("bubble", "fill and drain", MODEL, ".4f"),
            ReportColumn("update", "weight update", MODEL, ".4f"),
            ReportColumn("host", "host", MODEL, ".4f"),
            ReportColumn("seconds", "together", MODEL, ".4f"),
            ReportColumn("bubble_share", "bubble %", MODEL, ".2f"),
        ),
        rows,
        (
            f"The pipeline has {packed[0].placement.stages} stages: it fills and drains in "
            f"{packed[0].placement.stages - 1} further pipeline cycles of every update, its bubble.",
        ),
    )
