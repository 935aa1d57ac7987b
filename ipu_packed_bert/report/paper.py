"""The paper's tables and those beside them, each a function from the results of model and packers to a `Table`."""

from __future__ import annotations

from functools import partial
from math import log, sqrt
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ipu_packed_bert.cycles.arrangement import UNPACKED, Arrangement
from ipu_packed_bert.cycles.calibration import Calibration, Observations, overhead
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
from ipu_packed_bert.cycles.points import FITTED_DEPTH, FRAMEWORK_SPREAD, PAPER_OVERHEAD, POPART, TABLE2
from ipu_packed_bert.cycles.uncertainty import INSIDE, MEASURED_BY, Interval
from ipu_packed_bert.cycles.workload import Machine, engine_arrangement, shape_of
from ipu_packed_bert.planning.plan import RunPlan
from ipu_packed_bert.report.packings import PackingKey, Packings, PackingSummary
from ipu_packed_bert.report.scaling import ScalingPoint
from ipu_packed_bert.report.sources import MeasuredOverhead
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
    with_interval,
)
from pack_data.histogram import LengthHistogram
from pack_data.sort import Batching

# The rows of Table 1: (packer, packing depth), and the paper's figures: EFF %, p, OH %, realised speed-up.
ROWS: Tuple[PackingKey, ...] = (
    ("none", 1),
    ("greedy", None),
    ("spfhp", 2),
    ("spfhp", 3),
    ("nnlshp", 3),
    ("spfhp", 4),
    ("spfhp", 8),
    ("spfhp", None),
    ("optimal", 2),
    ("optimal", 3),
    ("optimal", 4),
    ("optimal", 8),
    ("optimal", None),
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


def _narrowed(comparison: ModelledOverhead, depth: int) -> str:
    """Which measurement would narrow the interval of the overhead at this depth most, in a line."""
    calibration, pipeline = comparison.calibration, comparison.packed(depth)
    assert calibration.draws is not None
    found = calibration.draws.explained(lambda parameters: overhead(pipeline, comparison.unpacked, parameters))
    field, share = next(iter(found.items()))
    return f"What would narrow the overhead's interval most, by {share:.0%} of its variance: {MEASURED_BY[field]}."


class ModelledOverhead:
    """Overheads of packed pipelines over an unpacked one, each with its interval."""

    def __init__(
        self, machine: Machine, config: Config, calibration: Calibration, *, packed: Optional[Arrangement] = None
    ):
        """packed: the arrangement of the packed graph; None: that of the IPU engine with this configuration."""
        self.machine = machine
        self.config = config
        self.calibration = calibration
        self.arrangement = engine_arrangement(config) if packed is None else packed
        self.unpacked = machine.pipeline(config, arrangement=UNPACKED, depth=1)

    def packed(self, depth: int) -> Pipeline:
        return self.machine.pipeline(self.config, arrangement=self.arrangement, depth=depth)

    def overhead(self, depth: int) -> Interval:
        """Extra cycles of a micro-batch (kernel), a fraction."""
        pipeline = self.packed(depth)
        return self.calibration.interval(lambda parameters: overhead(pipeline, self.unpacked, parameters))

    def _fitted_overhead(self, depth: int) -> Interval:
        """:meth:`overhead` with the value at the fitted parameters."""
        value = overhead(self.packed(depth), self.unpacked, self.calibration.parameters)
        return self.overhead(depth)._replace(value=value)

    def _pipeline_overhead(self, depth: int) -> Interval:
        """Extra cycles of a pipeline cycle, which the slowest IPU decides; a fraction."""
        pipeline = self.packed(depth)
        return self.calibration.interval(
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

        return self.calibration.interval(found)

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

        return {part: self.calibration.interval(of(part)) for part in (*_PARTS, "layout")}


def table1(
    comparison: ModelledOverhead,
    packings: Packings,
    rows: Sequence[PackingKey],
    sort: Optional[Batching],
    histogram_name: str,
) -> Table:
    """Table 1 of the paper: packings of a histogram; SORT's batches where they are given."""
    lines: List[Dict[str, Any]] = []
    papers = ModelledOverhead(comparison.machine, comparison.config, comparison.calibration, packed=POPART)
    for key in rows:
        summary = packings[key]
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
        if key[0] == "none" and sort is not None:
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
    notes = [
        "EFF and p are computed from the histogram. OH is extra cycles of a micro-batch against unpacked BERT of the "
        "same length. Realised speed-up = p / (1 + OH), as in the paper.",
        "The paper's graph makes the mask in every layer (PopART); its numbers are at the fitted parameters. "
        + _FITTED,
        *INTERVALS,
    ]
    if sort is not None:
        notes.append(
            f"SORT needs one engine for each of {sort.shapes} lengths: {sort.shapes} compilations instead of 1, "
            "which is no percentage of a run."
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
    return Table("table1", title, columns, lines, tuple(notes), parts)


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
        (
            Column("part", "part", CONFIGURED),
            Column("median", "%", MODEL, ".3f", ("lower", "upper")),
        ),
        rows,
        (
            f"{SCORES}: what its columns for the mask cost (engine.mask: product), beside joining them to query "
            "and key (mask application).",
            "layout: rearranging query and key with these columns, or an additive mask into the scores' layout; "
            "the atom size is the unknown.",
            "A pipeline cycle is what the slowest IPU takes: the first IPU's heads hide behind the encoder.",
            "Medians do not add up; the sum is the median of the sums.",
            _narrowed(comparison, depth),
        )
        + INTERVALS,
    )


def _interval(interval: Interval) -> Dict[str, Optional[float]]:
    return {
        "lower": percent(interval.lower),
        "median": percent(interval.value),
        "upper": percent(interval.upper),
    }


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


class ModelledRun(NamedTuple):
    """One configuration on one target."""

    name: str
    pipeline: Pipeline
    accumulation: int
    packing_factor: float
    factor_source: str
    made: RunPlan  # its memory is printed beside its throughput
    too_large: Optional[str] = None  # a line where it does not fit; then no rate is given


def breakdown(run: ModelledRun, calibration: Calibration) -> Table:
    """Cycles of each IPU in one pipeline cycle, and what that makes in sequences per second."""
    pipeline, accumulation, parameters = run.pipeline, run.accumulation, calibration.parameters
    slowest = pipeline.bottleneck(parameters).number
    rows: List[Dict[str, Any]] = []
    for ipu in pipeline.ipus:
        cost, f = ipu.total, parameters.factor
        interval = calibration.interval(partial(pipeline.ipu_cycles, ipu))
        rows.append(
            {
                "ipu": str(ipu.number),
                "layers": str(ipu.layers),
                "matmul": f * cost.matmul,
                "vertices": f * cost.vertices,
                "layout": f * cost.layout_cycles(parameters.layout),
                "exchange": f * cost.exchange,
                "sync": f * cost.sync,
                "copies": pipeline.target.link_cycles(sum(ipu.link_bytes.values())),
                "cycles": pipeline.ipu_cycles(ipu, parameters),
                "lower": interval.lower,
                "upper": interval.upper,
                "mark": "slowest" if ipu.number == slowest else "",
            }
        )
    step = pipeline.step(accumulation, parameters)
    notes = [
        f"pipeline cycle {step.pipeline_cycle:,.0f} cycles, weight update {step.update:,.0f}, step of "
        f"{accumulation} accumulations {step.cycles:,.0f} cycles = {step.seconds:.3f} s "
        f"({pipeline.target.name}, {MODEL})"
    ]
    if run.too_large is None:
        rates = calibration.throughput(lambda p: pipeline.sequences_per_second(accumulation, run.packing_factor, p))
        replicas, ipus = pipeline.placement.replicas, len(pipeline.ipus)
        notes.append(
            f"{_count(replicas, 'replica')} x {_count(ipus, 'IPU')} = {_count(replicas * ipus, 'IPU')}: "
            f"{rates[1]:,.0f} sequences/s, {rates[0]:,.0f} to {rates[2]:,.0f} ({MODEL}; {run.packing_factor:.3f} "
            f"sequences a pack, {run.factor_source})"
        )
    else:
        notes.append(run.too_large)
    if pipeline.unknown:
        named = ", ".join(f"{operator} x{times}" for operator, times in sorted(pipeline.unknown.items()))
        notes.append(f"operators without an estimator, costed as elementwise divisions: {named}")
    columns = [Column("ipu", "IPU", CONFIGURED), Column("layers", "layers", CONFIGURED)]
    columns += [
        Column(key, title, MODEL, ".3f", scale=1e6)
        for key, title in (
            ("matmul", "matmul"),
            ("vertices", "other compute"),
            ("layout", "layout"),
            ("exchange", "exchange"),
            ("sync", "sync"),
            ("copies", "copy phase"),
        )
    ]
    columns.insert(2, Column("cycles", "together", MODEL, ".2f", ("lower", "upper"), 1e6))
    return Table(
        "breakdown",
        f"{run.name} on {pipeline.target.name}: million cycles of each IPU for a micro-batch of {pipeline.micro_batch}",
        tuple(columns) + (Column("mark", "", MODEL),),
        rows,
        (*notes, *ADDED_UP),
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def what_if(runs: Sequence[ModelledRun], calibration: Calibration) -> Table:
    """Configurations side by side; ratios are to the first."""
    rows: List[Dict[str, Any]] = []
    first: Optional[Tuple[Optional[float], float]] = None

    def rates_of(run: ModelledRun) -> Optional[Interval]:
        if run.too_large:
            return None
        return calibration.throughput(
            lambda p: run.pipeline.sequences_per_second(run.accumulation, run.packing_factor, p)
        )

    for run in runs:
        step = run.pipeline.step(run.accumulation, calibration.parameters)
        rates = rates_of(run)
        rate = None if rates is None else rates.value
        per_pack = step.pipeline_cycle / run.pipeline.micro_batch
        if first is None:
            first = (rate, per_pack)
        rows.append(
            {
                "name": run.name,
                "target": run.pipeline.target.name,
                "micro_batch": run.pipeline.micro_batch,
                "packing_factor": run.packing_factor,
                "factor_source": run.factor_source,
                "pipeline_cycle": step.pipeline_cycle,
                "slowest": str(run.pipeline.bottleneck(calibration.parameters).number),
                "per_pack": per_pack,
                "step_seconds": step.seconds,
                "rate": rate,
                "rate_lower": None if rates is None else rates.lower,
                "rate_upper": None if rates is None else rates.upper,
                "cycles_ratio": per_pack / first[1],
                "rate_ratio": None if rate is None or first[0] is None else rate / first[0],
                "fullest": percent(run.made.fullest),
            }
        )
    return Table(
        "what_if",
        "What if",
        (
            Column("name", "configuration", CONFIGURED),
            Column("target", "target", CONFIGURED),
            Column("micro_batch", "micro-batch", CONFIGURED, "d"),
            Column("packing_factor", "p", COMPUTED, ".3f"),
            Column("factor_source", "p from", CONFIGURED),
            Column("pipeline_cycle", "pipeline cycle", MODEL, ",.0f"),
            Column("slowest", "slowest IPU", MODEL),
            Column("per_pack", "cycles/pack", MODEL, ",.0f"),
            Column("step_seconds", "s/step", MODEL, ".3f"),
            modelled("rate", "seq/s", ",.0f"),
            Column("cycles_ratio", "cycles/pack ratio", MODEL, ".4f"),
            Column("rate_ratio", "seq/s ratio", MODEL, ".4f"),
            Column("fullest", "fullest tile %", COMPUTED, ".0f"),
        ),
        rows,
        (
            "Rates are of all replicas of the configuration; ratios are against the first line.",
            "A configuration of depth 1 is counted as canonical BERT: a padding mask, [CLS] at slot 0, the same "
            "positions in every row.",
        )
        + tuple(run.too_large for run in runs if run.too_large),
    )


# Point, what is compared, and the two points whose quotient it is.
_RATIOS = (
    ("D6/D5", "base: 512 against 128, seq/s", "D6", "D5"),
    ("D4/D3", "large: packed 512 against unpacked 128, seq/s", "D4", "D3"),
    ("D3/D5", "128: large against base, seq/s", "D3", "D5"),
    ("D2/D1", "POD64 against POD16, packed 512, seq/s", "D2", "D1"),
    ("D11", "D4 against D1, seq/s at equal clocks", "D4", "D1"),
    ("D8/D3", "POD64 against POD16, large 128, seq/s", "D8", "D3"),
    ("E3/E2", "POD128 against POD64, packed 512, seq/s", "E3", "E2"),
    ("E6/E4", "Pod256 against Pod64, packed 512, seq/s", "E6", "E4"),
)


def _compared(
    labels: Tuple[str, str, str],
    measured: Optional[float],
    model: Sequence[Optional[float]],
    trivial: Optional[float],
    use: str,
    left_out: Optional[float] = None,
) -> Dict[str, Any]:
    """A row. labels: point, what, unit. model: least, value, most. left_out: the error of a fit without the point."""

    def error(value: Optional[float]) -> Optional[float]:
        return None if value is None or not measured else percent(value / measured - 1.0)

    return {
        **dict(zip(("point", "what", "unit"), labels)),
        "measured": measured,
        **dict(zip(("lower", "model", "upper"), model)),
        "error": error(model[1]),
        "left_out": percent(left_out),
        "trivial": trivial,
        "trivial_error": error(trivial),
        "use": use,
    }


def points(observations: Observations, calibration: Calibration) -> Table:
    """D1 to D12 and E1 to E6: what others measured, what the model says, and what "31 % of peak" says."""
    errors = {row["point"]: row for row in calibration.report["points"]}
    by_name = {o.point.name: o for o in observations.throughputs}
    rows = [
        _compared(
            (name, o.point.what, "seq/s"),
            o.point.sequences_per_second,
            calibration.throughput(o.predicted)._replace(value=o.predicted(calibration.parameters)),
            o.trivial(),
            "fitted",
            errors[name]["left_out_error"],
        )
        for name, o in by_name.items()
    ]
    for point, what, a, b in _RATIOS:
        first, second = by_name[a], by_name[b]
        clocks = first.pipeline.target.clock_hz / second.pipeline.target.clock_hz
        model = first.predicted(calibration.parameters) / second.predicted(calibration.parameters) / clocks
        rows.append(
            _compared(
                (point, what, "ratio"),
                first.point.sequences_per_second / second.point.sequences_per_second / clocks,
                (None, model, None),
                first.trivial() / second.trivial() / clocks,
                "ratio",
            )
        )
    left_out = calibration.report["overhead_fitted_depth"]["left_out"]
    mean, worst = calibration.report["mean_error"], calibration.report["worst_error"]
    draws = calibration.draws
    assert draws is not None
    points_left_out = draws.report["left_out"]
    ratios = [row for row in rows if row["unit"] == "ratio"]
    of_ratios = [
        sqrt(sum(log(row[key] / row["measured"]) ** 2 for row in ratios) / len(ratios)) for key in ("model", "trivial")
    ]
    right, pairs = _ordered(observations, calibration)
    return Table(
        "points",
        'D1 to D12, E1 to E6: published measurements against the model and against "31 % of peak"',
        (
            Column("point", "point", CONFIGURED),
            Column("what", "what", CONFIGURED),
            Column("unit", "unit", CONFIGURED),
            Column("measured", "measured", PUBLISHED, ",.4g"),
            Column("model", "model", MODEL, ",.4g", ("lower", "upper")),
            Column("error", "error %", MODEL, "+.1f"),
            Column("left_out", "left out %", MODEL, "+.1f"),
            Column("trivial", "31 % of peak", COMPUTED, ",.4g"),
            Column("trivial_error", "error %", COMPUTED, "+.1f"),
            Column("use", "use", CONFIGURED),
        ),
        rows,
        (
            f"Error of the throughputs, each left out of its own fit: {percent(mean['left_out']):.1f} % on average, "
            f"{percent(worst['left_out']):.1f} % at worst; fitted {percent(mean['fitted']):.1f} and "
            f"{percent(worst['fitted']):.1f} %; 31 % of peak {percent(mean['trivial']):.1f} and "
            f"{percent(worst['trivial']):.1f} %.",
            f"rms error of the ratios: model {percent(of_ratios[0]):.1f} %, 31 % of peak "
            f"{percent(of_ratios[1]):.1f} %; of {pairs} pairs of throughputs the model says {right} times which "
            "makes better use of the peak, where the trivial model calls all equal.",
            "left out: the error when the parameters are fitted without this point. The model is at the fitted "
            "parameters.",
            f"D7: the same task differs by {percent(FRAMEWORK_SPREAD):.0f} % between frameworks; D9 is Table 1 and "
            f"D10 Table 2 (--table). The overhead at depth {FITTED_DEPTH} of a fit on throughputs alone is "
            f"{percent(left_out / PAPER_OVERHEAD[FITTED_DEPTH] - 1.0):+.1f} % off.",
            f"Of the {len(points_left_out)} throughputs, each left out of the draws' weights, "
            f"{sum(point['inside'] for point in points_left_out)} lie inside their {INSIDE:.0%} interval; "
            f"{draws.report['drawn']:,} draws were weighted, effective {draws.report['effective']:,.0f}.",
        )
        + INTERVALS,
    )


def _ordered(observations: Observations, calibration: Calibration) -> Tuple[int, int]:
    """(pairs of throughputs that the model orders rightly by their share of the peak, all pairs)"""
    shares = [
        (o.point.sequences_per_second / o.trivial(), o.predicted(calibration.parameters) / o.trivial())
        for o in observations.throughputs
    ]
    pairs = [(a, b) for number, a in enumerate(shares) for b in shares[:number]]
    return sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs), len(pairs)


def measured(
    found: MeasuredOverhead,
    packing_factor: Optional[float],
    modelled: Optional[Tuple[float, float, float]] = None,
) -> Table:
    """Overhead from two run logs or profiles; modelled: what the model says of the same runs, low, median and high."""
    source, unit = found.packed.source, found.packed.unit
    factor = packing_factor if packing_factor is not None else found.packed.packing_factor
    rows = [
        {"run": f"{kind}: {m.detail}", "per_pack": m.per_pack, "packing_factor": m.packing_factor}
        for kind, m in (("packed", found.packed), ("unpacked", found.unpacked))
    ]
    rows[0].update(overhead=percent(found.overhead), realised=None if factor is None else factor / (1 + found.overhead))
    spread = found.spread
    if spread is not None:
        rows[0].update(overhead_lower=percent(spread[0]), overhead_upper=percent(spread[1]))
    if modelled is not None:
        low, middle, high = modelled
        rows[0].update(model_lower=percent(low), model=percent(middle), model_upper=percent(high))
    # The paper's packs without a limit hold at most 16 sequences.
    depth = found.packed.depth if found.packed.depth != 16 else None
    beside = [row for (packer, limit), row in _PAPER_ROWS.items() if packer in ("spfhp", "nnlshp") and limit == depth]
    if found.packed.length == 512 and beside:
        rows[0].update(paper_overhead=beside[-1][2], paper_realised=beside[-1][3])
    notes = [
        "OH: extra time of a pack relative to an unpacked row; compare runs with equal accumulation and waiting data."
    ]
    if source != HARDWARE:
        notes.append(
            "These are not cycles of IPU hardware."
            if source == PROFILE
            else "These are seconds of this host, not IPU cycles."
        )
    by_model = (with_interval("model", "OH %", MODEL, ".2f"),)
    return Table(
        "measured",
        "Measured: packed against unpacked",
        (
            Column("run", "run", CONFIGURED),
            Column("per_pack", f"{unit}/pack", source, ",.6g"),
            Column("packing_factor", "p", source, ".3f"),
            with_interval("overhead", "OH %", source, ".2f"),
            Column("realised", "speed-up", source, ".3f"),
            *(by_model if modelled is not None else ()),
            Column("paper_overhead", "OH %", PAPER, ".3f"),
            Column("paper_realised", "speed-up", PAPER, ".3f"),
        ),
        rows,
        tuple(notes),
    )


def scaling(found: Sequence[ScalingPoint], packing_factor: float, histogram: LengthHistogram) -> Table:
    """Figure 5: a row for each number of devices, a column for each batch size."""
    batches = sorted({point.batch for point in found})
    devices = sorted({point.devices for point in found})
    speedup = {(point.batch, point.devices): point.speedup for point in found}
    rows = [
        {"devices": count, "packing": packing_factor, **{f"batch_{b}": speedup[b, count] for b in batches}}
        for count in devices
    ]
    alone = speedup[batches[-1], devices[0]]
    return Table(
        "scaling",
        f"Figure 5: theoretical speed-up over padding, {histogram.name}",
        (Column("devices", "devices", CONFIGURED, "d"), Column("packing", "packing", COMPUTED, ".3f"))
        + tuple(Column(f"batch_{b}", f"un-padding, {b}/device", COMPUTED, ".3f") for b in batches),
        rows,
        (
            "Un-padding waits for the device that drew the longest sequences (simulated); packing takes equally "
            "long everywhere.",
            f"One device waits for none. Un-padding gains {alone:.2f} there, more than the "
            f"{histogram.theoretical_speedup:.2f} that all padding is worth in tokens: attention's work grows with the "
            "square of the length, so a padded row wastes more of it than its share of the slots. A pack computes its "
            "whole row, the masked pairs too.",
        ),
    )
