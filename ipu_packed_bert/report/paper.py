"""The paper's tables and those beside them, each a function from the results of model and packers to a `Table`."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from ipu_packed_bert.cycles.arrangement import POPART, UNPACKED
from ipu_packed_bert.cycles.calibration import Calibration, overhead
from ipu_packed_bert.cycles.lowering import (
    CLS,
    COPIES,
    ENCODER,
    LOSS,
    MASK_APPLICATION,
    MASK_BUILD,
    MLM,
    POSITIONS,
    SCORES,
)
from ipu_packed_bert.cycles.pipeline import Parameters, Pipeline
from ipu_packed_bert.cycles.points import FITTED_DEPTH, PAPER_OVERHEAD, TABLE2
from ipu_packed_bert.cycles.uncertainty import INSIDE, Interval
from ipu_packed_bert.cycles.workload import Machine, shape_of
from ipu_packed_bert.report.measured import Measured
from ipu_packed_bert.report.packings import PackingKey, PackingSummary
from ipu_packed_bert.settings.pretraining import Config
from pack_data.display.table import (
    COMPUTED,
    CONFIGURED,
    FITTED_MODEL,
    HARDWARE,
    MODEL,
    PAPER,
    PROFILE,
    PUBLISHED,
    Column,
    Part,
    Table,
    modelled,
    percent,
    spread,
    with_interval,
)
from pack_data.sort import Batching

# The rows of Table 1: (packer, packing depth), and the paper's figures: EFF %, p, OH %, realised speed-up.
ROWS: Tuple[PackingKey, ...] = (
    *(("none", 1), ("greedy", None)),
    *(("spfhp", 2), ("spfhp", 3), ("nnlshp", 3), ("spfhp", 4), ("spfhp", 8), ("spfhp", None)),
    *(("optimal", depth) for depth in (2, 3, 4, 8, None)),
)
_PAPER_ROWS: Dict[PackingKey, Tuple[Any, Any, Any, Any]] = {
    ("none", 1): (50.0, 1.00, 0.0, 1.0),
    ("sort", 1): (99.9, 2.00, ">>100", "<<1.000"),
    ("greedy", None): ("~78", "~1.6", "~4.48", "~1.5"),
    ("spfhp", 2): (80.5, 1.61, 4.283, 1.544),
    ("spfhp", 3): (89.4, 1.79, 4.287, 1.716),
    ("nnlshp", 3): (99.7, 2.00, 4.287, 1.913),
    ("spfhp", 4): (93.9, 1.88, 4.294, 1.803),
    ("spfhp", 8): (98.9, 1.98, 4.481, 1.895),
    ("spfhp", None): (99.6, 1.99, 4.477, 1.905),
}
_PARTS = (MASK_BUILD, MASK_APPLICATION, SCORES, POSITIONS, CLS, LOSS, MLM, COPIES, ENCODER)

# What the numbers rest on; printed below every table that holds them.
_FITTED = (
    f"The overhead of the paper's graph at depth {FITTED_DEPTH} is fitted; the other depths repeat it, "
    "plus what deeper heads cost."
)
INTERVALS = (
    f"A number with an interval is the median of the draws of everything that is not known, the interval holds "
    f"{INSIDE:.0%} of them (docs/cycle_model.md); a number without a mark is predicted.",
)
ADDED_UP = (
    f"Intervals hold {INSIDE:.0%} of the draws of everything that is not known (docs/cycle_model.md); the numbers are "
    "at the fitted parameters, so that they add up.",
)


def _fitted(calibration: Calibration, value: Callable[[Parameters], Any]) -> Interval:
    """The interval of the draws around the value at the fitted parameters, so that parts add up to their whole."""
    return calibration.draws.interval(value)._replace(value=float(value(calibration.parameters)))


class ModelledOverhead:
    """Overheads of packed pipelines over an unpacked one, each with its interval."""

    def __init__(self, machine: Machine, config: Config, calibration: Calibration, *, packed: Optional[str] = None):
        """packed: the arrangement of the packed graph; None: that of the IPU engine with this configuration."""
        self.machine = machine
        self.config = config
        self.calibration = calibration
        self.arrangement = config.engine.mask if packed is None else packed
        self.unpacked = machine.pipeline(config, arrangement=UNPACKED, depth=1)

    def packed(self, depth: int) -> Pipeline:
        return self.machine.pipeline(self.config, arrangement=self.arrangement, depth=depth)

    def overhead(self, depth: int) -> Interval:
        """Extra cycles of a micro-batch (kernel), a fraction."""
        pipeline = self.packed(depth)
        return self.calibration.draws.interval(lambda parameters: overhead(pipeline, self.unpacked, parameters))

    def _fitted_overhead(self, depth: int) -> Interval:
        """:meth:`overhead` with the value at the fitted parameters."""
        pipeline = self.packed(depth)
        return _fitted(self.calibration, lambda parameters: overhead(pipeline, self.unpacked, parameters))

    def _pipeline_overhead(self, depth: int) -> Interval:
        """Extra cycles of a pipeline cycle, which the slowest IPU decides; a fraction."""
        pipeline = self.packed(depth)
        return self.calibration.draws.interval(
            lambda parameters: pipeline.pipeline_cycle(parameters) / self.unpacked.pipeline_cycle(parameters) - 1.0
        )

    def training_overhead(self, depth: int, packing_factor: float) -> Interval:
        """p / (packed / unpacked throughput) - 1 of whole weight updates, as Table 2 compares throughputs.

        A packed update has fewer micro-batches, so that its pipeline's fill and drain and its weight update count more.
        """
        packed, full = self.packed(depth), self.config.batch.gradient_accumulation
        accumulation = self.config.accumulation(packing_factor)

        def found(parameters: Parameters) -> Any:
            ratio = packed.sequences_per_second(
                accumulation, packing_factor, parameters
            ) / self.unpacked.sequences_per_second(full, 1.0, parameters)
            return packing_factor / ratio - 1.0

        return self.calibration.draws.interval(found)

    def decomposition(self, depth: int) -> Dict[str, Interval]:
        """Overhead by cause, as fractions of the unpacked micro-batch; in each draw they add up to the overhead."""
        pipeline = self.packed(depth)

        def parts(parameters: Parameters) -> Dict[str, Any]:
            whole = self.unpacked.micro_batch_cycles(parameters)
            after, before = pipeline.category_cycles(parameters), self.unpacked.category_cycles(parameters)
            found = {part: (after.get(part, 0.0) - before.get(part, 0.0)) / whole for part in _PARTS}
            layout = sum(after.get(part + ", layout", 0.0) - before.get(part + ", layout", 0.0) for part in _PARTS)
            return {**found, "layout": layout / whole}

        def of(part: str) -> Callable[[Parameters], Any]:
            return lambda parameters: parts(parameters)[part] + 0.0 * parameters.factor

        return {part: self.calibration.draws.interval(of(part)) for part in (*_PARTS, "layout")}


def table1(
    comparison: ModelledOverhead, packings: Mapping[PackingKey, PackingSummary], sort: Batching, histogram_name: str
) -> Table:
    """Table 1 of the paper: packings of a histogram, and SORT's batches."""
    lines: List[Dict[str, Any]] = []
    papers = ModelledOverhead(comparison.machine, comparison.config, comparison.calibration, packed=POPART)
    for key, summary in packings.items():
        line: Dict[str, Any] = {
            "depth": _depth(key[1], summary),
            "algorithm": key[0].upper(),
            "efficiency": percent(summary.efficiency),
            "packing_factor": summary.packing_factor,
        }
        # The paper's own graph is counted in the rows that the paper has.
        for prefix, compared in (("", comparison), ("papers_", papers))[: 2 if key in _PAPER_ROWS else 1]:
            if key[0] == "none":
                over = Interval(0.0, 0.0, 0.0)
            else:
                depth = summary.largest_depth if key[1] is None else key[1]
                over = compared._fitted_overhead(depth) if prefix else compared.overhead(depth)
            line.update(_overhead_columns(prefix, over, summary.packing_factor))
        lines.append(_beside_paper(line, _PAPER_ROWS.get(key)))
        if key[0] == "none":
            lines.append(
                _beside_paper(
                    {
                        "depth": "1",
                        "algorithm": "SORT",
                        "efficiency": percent(sort.efficiency),
                        "packing_factor": sort.speedup,
                        "overhead": f"{sort.shapes} engines",
                    },
                    _PAPER_ROWS["sort", 1],
                )
            )
    notes = (
        "EFF and p are computed from the histogram. OH is extra cycles of a micro-batch against unpacked BERT of the "
        "same length. Realised speed-up = p / (1 + OH), as in the paper.",
        "The paper's graph makes the mask in every layer (PopART); its numbers are at the fitted parameters. "
        + _FITTED,
        *INTERVALS,
        f"SORT needs one engine for each of {sort.shapes} lengths: {sort.shapes} compilations instead of 1, "
        "which is no percentage of a run.",
    )
    columns = (
        Column("depth", "depth", CONFIGURED),
        Column("algorithm", "packing", CONFIGURED),
        Column("efficiency", "EFF %", COMPUTED, ".2f"),
        Column("paper_efficiency", "paper", PAPER, ".1f"),
        Column("packing_factor", "p", COMPUTED, ".3f"),
        Column("paper_packing_factor", "paper", PAPER, ".2f"),
        with_interval("papers_overhead", "OH %", FITTED_MODEL, ".2f"),
        Column("paper_overhead", "paper", PAPER, ".3f"),
        Column("papers_realised", "speed-up", FITTED_MODEL, ".3f"),
        Column("papers_realised_lower", "at least", FITTED_MODEL, ".3f"),
        Column("papers_realised_upper", "at most", FITTED_MODEL, ".3f"),
        Column("paper_realised", "paper", PAPER, ".3f"),
        modelled("overhead", "OH %", ".2f"),
        modelled("realised", "speed-up", ".3f"),
    )
    parts = _parts(("depth", "algorithm", "efficiency", "packing_factor"), comparison.config.engine.mask)
    title = f"Table 1: packing {histogram_name}, {comparison.config.name}"
    return Table("table1", title, columns, lines, notes, parts)


_THEIRS = ("papers_overhead", "papers_realised", "paper_efficiency", "paper_packing_factor", "paper_overhead")


def _parts(labels: Tuple[str, ...], mask: str) -> Tuple[Part, ...]:
    """The paper's graph beside the paper's measurements, and below them this engine's, which nobody has measured."""
    return (
        Part(
            "The paper's graph: modelled, and beside it what the paper measured", (*labels, *_THEIRS, "paper_realised")
        ),
        Part(f"This engine's graph (engine.mask: {mask}): modelled", (*labels, "overhead", "realised")),
    )


def _overhead_columns(prefix: str, over: Interval, p: float) -> Dict[str, float]:
    """Overhead in percent and realised speed-up at packing factor p, with intervals; every key gets the prefix."""
    found = {
        "overhead_lower": 100.0 * over.lower,
        "overhead": 100.0 * over.value,
        "overhead_upper": 100.0 * over.upper,
        "realised": p / (1 + over.value),
        "realised_lower": p / (1 + over.upper),
        "realised_upper": p / (1 + over.lower),
    }
    return {prefix + key: value for key, value in found.items()}


def _depth(depth: Optional[int], summary: PackingSummary) -> str:
    return str(depth) if depth is not None else f"max ({summary.largest_depth})"


def _beside_paper(line: Dict[str, Any], paper: Optional[Tuple[Any, Any, Any, Any]]) -> Dict[str, Any]:
    keys = ("paper_efficiency", "paper_packing_factor", "paper_overhead", "paper_realised")
    return {**line, **dict(zip(keys, paper or (None,) * 4))}


def decomposition(comparison: ModelledOverhead, depth: int) -> Table:
    parts = comparison.decomposition(depth)
    order = (MASK_BUILD, MASK_APPLICATION, SCORES, "layout", POSITIONS, CLS, LOSS, MLM, COPIES, ENCODER)
    rows = [
        {
            "part": part,
            "lower": percent(parts[part].lower),
            "median": percent(parts[part].value),
            "upper": percent(parts[part].upper),
        }
        for part in order
    ]
    over, slowest = comparison.overhead(depth), comparison._pipeline_overhead(depth)
    rows.append({"part": "sum: a micro-batch (OH)", **_interval(over)})
    rows.append({"part": "a pipeline cycle", **_interval(slowest)})
    return Table(
        "decomposition",
        f"Where the overhead at depth {depth} comes from, percent of the unpacked micro-batch's cycles",
        (Column("part", "part", CONFIGURED), Column("median", "%", MODEL, ".3f", ("lower", "upper"))),
        rows,
        (
            f"{SCORES}: what its columns for the mask cost (engine.mask: product), beside joining them to query "
            "and key (mask application).",
            "layout: rearranging query and key with these columns, or an additive mask into the scores' layout; "
            "the atom size is the unknown.",
            "A pipeline cycle is what the slowest IPU takes: the first IPU's heads hide behind the encoder.",
            "Medians do not add up; the sum is the median of the sums.",
        )
        + INTERVALS,
    )


def _interval(interval: Interval) -> Dict[str, Optional[float]]:
    return {"lower": percent(interval.lower), "median": percent(interval.value), "upper": percent(interval.upper)}


_TABLE2_NOTES = (
    "Speed-up is the quotient of throughputs over whole updates, as in the paper; OH = p / speed-up - 1, the paper's "
    "from its rounded columns. The paper's graph makes the mask in every layer (PopART).",
    "At 384 the paper's graph comes out above the paper's range. No smooth law in the length gives 4.29 % at 512 "
    "(Table 1) and at most 1.2 % at 384: Table 1 counts the kernel's cycles, Table 2 throughputs of the whole, and the "
    "two contradict each other. Host traffic does not explain it: the overhead is per row, and a packed row carries as "
    "many bytes as an unpacked one. Nothing was tuned to it.",
)


def table2(machine: Machine, load: Callable[[str], Config], calibration: Calibration) -> Table:
    """Table 2 of the paper: base and large at 128 and 384, with the paper's packing factors.

    load: the configuration in a file of configs/.
    """
    rows = []
    for row in TABLE2:
        config, p = load(row.packed), row.packing_factor
        depth = shape_of(config).depth
        line = {"model": row.model, "length": row.length, "packing_factor": p, "paper_realised": row.realised}
        for prefix, arrangement in (("", None), ("papers_", POPART)):
            over = ModelledOverhead(machine, config, calibration, packed=arrangement).training_overhead(depth, p)
            line.update(_overhead_columns(prefix, over, p))
        # Both of the paper's numbers are rounded to two decimals.
        low, high = (p - 0.005) / (row.realised + 0.005) - 1.0, (p + 0.005) / (row.realised - 0.005) - 1.0
        line["paper_overhead"] = f"{max(0.0, 100 * low):.1f} to {100 * high:.1f}"
        rows.append(line)
    return Table(
        "table2",
        "Table 2: realised speed-up of pre-training, depth 3",
        (
            Column("model", "model", CONFIGURED),
            Column("length", "length", CONFIGURED, "d"),
            Column("packing_factor", "p", PAPER, ".2f"),
            modelled("papers_overhead", "OH %", ".2f"),
            Column("paper_overhead", "paper", PAPER),
            modelled("papers_realised", "speed-up", ".3f"),
            Column("paper_realised", "paper", PAPER, ".2f"),
            modelled("overhead", "OH %", ".2f"),
            modelled("realised", "speed-up", ".3f"),
        ),
        rows,
        _TABLE2_NOTES + INTERVALS,
        _parts(("model", "length", "packing_factor"), config.engine.mask),
    )


def breakdown(name: str, pipeline: Pipeline, accumulation: int, calibration: Calibration) -> Table:
    """Cycles of each IPU in one pipeline cycle, and what that makes of an update."""
    parameters = calibration.parameters
    slowest = pipeline.bottleneck(parameters).number
    rows: List[Dict[str, Any]] = []
    for ipu in pipeline.ipus:
        cost, f = ipu.total, parameters.factor
        rows.append(
            {
                "ipu": str(ipu.number),
                "layers": str(ipu.layers),
                **spread("cycles", _fitted(calibration, partial(pipeline.ipu_cycles, ipu))),
                "matmul": f * cost.matmul,
                "vertices": f * cost.vertices,
                "layout": f * cost.layout_cycles(parameters.layout),
                "exchange": f * cost.exchange,
                "sync": f * cost.sync,
                "copies": pipeline.target.link_cycles(sum(ipu.link_bytes.values())),
                "mark": "slowest" if ipu.number == slowest else "",
            }
        )
    step = pipeline.step(accumulation, parameters)
    kinds = ("matmul", "vertices", "layout", "exchange", "sync", "copies")
    titles = ("matmul", "other compute", "layout", "exchange", "sync", "copy phase")
    return Table(
        "breakdown",
        f"{name} on {pipeline.target.name}: million cycles of each IPU for a micro-batch of {pipeline.micro_batch}",
        (
            Column("ipu", "IPU", CONFIGURED),
            Column("layers", "layers", CONFIGURED),
            modelled("cycles", "together", ".2f", 1e6),
            *(Column(key, title, MODEL, ".3f", scale=1e6) for key, title in zip(kinds, titles)),
            Column("mark", "", MODEL),
        ),
        rows,
        (
            f"pipeline cycle {step.pipeline_cycle:,.0f} cycles, weight update {step.update:,.0f}, step of "
            f"{accumulation} accumulations {step.cycles:,.0f} cycles = {step.seconds:.3f} s "
            f"({pipeline.target.name}, {MODEL})",
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


def _update_parts(pipeline: Pipeline, accumulation: int, parameters: Parameters) -> Dict[str, Any]:
    """Milliseconds of an update by part."""
    step = pipeline.step(accumulation, parameters)
    each = 1e3 * pipeline.target.seconds(step.pipeline_cycle)
    return {
        "micro-batches": accumulation * each,
        "pipeline fills and drains": (pipeline.placement.stages - 1) * each,
        **{words: 1e3 * getattr(step.once, key) for key, words in _ONCE.items()},
        "together": 1e3 * step.seconds,
    }


def update(name: str, packed: Tuple[Pipeline, int], unpacked: Tuple[Pipeline, int], calibration: Calibration) -> Table:
    """What an update's time consists of; each pipeline with its accumulation."""
    rows: List[Dict[str, Any]] = []
    for part in _update_parts(*packed, calibration.parameters):
        row: Dict[str, Any] = {"part": part}
        for side, run in (("packed", packed), ("unpacked", unpacked)):

            def taken(parameters: Parameters, run: Tuple[Pipeline, int] = run, part: str = part) -> Any:
                return _update_parts(*run, parameters)[part] + 0.0 * parameters.factor

            row.update(spread(side, _fitted(calibration, taken)))
        if row["packed"] or row["unpacked"]:  # one pod has no gateways, one replica sums nothing
            rows.append(row)
    return Table(
        "update",
        f"{name}: milliseconds of an update",
        (
            Column("part", "part", CONFIGURED),
            modelled("packed", f"packed, accumulation {packed[1]:,}", ",.1f"),
            modelled("unpacked", f"unpacked, accumulation {unpacked[1]:,}", ",.1f"),
        ),
        rows,
        (f"The pipeline has {packed[0].placement.stages} stages.", *ADDED_UP),
    )


def points(calibration: Calibration) -> Table:
    """D1 to D12 and E1 to E6: how far the model is off what others measured, and how far "31 % of peak" is."""
    report = calibration.report
    drawn = {point["point"]: point for point in calibration.draws.report["left_out"]}
    rows = [
        {
            "point": row["point"],
            "what": row["what"],
            "measured": row["measured"],
            "error": percent(row["fitted_error"]),
            "left_out": percent(row["left_out_error"]),
            "lower": percent(drawn[row["point"]]["low"]),
            "upper": percent(drawn[row["point"]]["high"]),
            "trivial_error": percent(row["trivial_error"]),
        }
        for row in report["points"]
    ]
    mean, worst = report["mean_error"], report["worst_error"]
    over = report["overhead_fitted_depth"]["left_out"] / PAPER_OVERHEAD[FITTED_DEPTH] - 1.0
    return Table(
        "points",
        'D1 to D12, E1 to E6: published throughputs, and how far off the model and "31 % of peak" are',
        (
            Column("point", "point", CONFIGURED),
            Column("what", "what", CONFIGURED),
            Column("measured", "sequences/s", PUBLISHED, ",.4g"),
            Column("error", "fitted %", MODEL, "+.1f"),
            Column("left_out", "left out %", MODEL, "+.1f", ("lower", "upper")),
            Column("trivial_error", "31 % of peak, %", COMPUTED, "+.1f"),
        ),
        rows,
        (
            f"Error of the throughputs, each left out of its own fit: {percent(mean['left_out']):.1f} % on average, "
            f"{percent(worst['left_out']):.1f} % at worst; fitted {percent(mean['fitted']):.1f} and "
            f"{percent(worst['fitted']):.1f} %; 31 % of peak {percent(mean['trivial']):.1f} and "
            f"{percent(worst['trivial']):.1f} %.",
            "left out: the error when the parameters are fitted without this point, and the interval of "
            f"{INSIDE:.0%} of the draws weighted without it; {sum(point['inside'] for point in drawn.values())} of "
            f"{len(drawn)} intervals hold 0.",
            f"The overhead at depth {FITTED_DEPTH} of a fit on throughputs alone is {percent(over):+.1f} % off.",
        ),
    )


def measured(
    packed: Measured, unpacked: Measured, packing_factor: Optional[float], by_model: Optional[Interval] = None
) -> Table:
    """The overhead of two runs; by_model: what the model says of the same runs."""
    factor = packing_factor if packing_factor is not None else packed.packing_factor
    rows: List[Dict[str, Any]] = [
        {"run": f"{kind}: {m.detail}", "per_pack": m.per_pack, "packing_factor": m.packing_factor}
        for kind, m in (("packed", packed), ("unpacked", unpacked))
    ]
    over = packed.per_pack / unpacked.per_pack - 1.0
    rows[0].update(overhead=percent(over), realised=None if factor is None else factor / (1 + over))
    if packed.quartiles is not None and unpacked.quartiles is not None:
        # The least of one against the most of the other.
        (low, high), (least, most) = packed.quartiles, unpacked.quartiles
        rows[0].update(overhead_lower=percent(low / most - 1.0), overhead_upper=percent(high / least - 1.0))
    if by_model is not None:
        rows[0].update(spread("model", by_model, 100.0))
    data = packed.settings.get("data") or {}
    # The paper's packs without a limit hold at most 16 sequences.
    depth = data.get("max_sequences_per_pack") if data.get("max_sequences_per_pack") != 16 else None
    beside = [row for (packer, limit), row in _PAPER_ROWS.items() if packer in ("spfhp", "nnlshp") and limit == depth]
    if data.get("max_sequence_length") == 512 and beside:
        rows[0].update(paper_overhead=beside[-1][2], paper_realised=beside[-1][3])
    notes = [
        "OH: extra time of a pack relative to an unpacked row; compare runs with equal accumulation and waiting data."
    ]
    if packed.source != HARDWARE:
        what = "cycles of IPU hardware" if packed.source == PROFILE else "IPU cycles, but seconds of this host"
        notes.append(f"These are no {what}.")
    return Table(
        "measured",
        "Measured: packed against unpacked",
        (
            Column("run", "run", CONFIGURED),
            Column("per_pack", f"{packed.unit}/pack", packed.source, ",.6g"),
            Column("packing_factor", "p", packed.source, ".3f"),
            with_interval("overhead", "OH %", packed.source, ".2f"),
            Column("realised", "speed-up", packed.source, ".3f"),
            *((with_interval("model", "OH %", MODEL, ".2f"),) if by_model is not None else ()),
            Column("paper_overhead", "OH %", PAPER, ".3f"),
            Column("paper_realised", "speed-up", PAPER, ".3f"),
        ),
        rows,
        tuple(notes),
    )
