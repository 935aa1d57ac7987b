"""The report's answer: overhead and speed-ups in three lines, and the throughput and days of a whole run."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

from ipu_packed_bert.cycles.calibration import Interval
from ipu_packed_bert.cycles.pipeline import Parameters, Pipeline
from ipu_packed_bert.report.fields import Field, in_percent, table_of
from ipu_packed_bert.report.paper import ModelledOverhead
from ipu_packed_bert.settings.config import Config
from pack_data.display.table import CONFIGURED, MODEL, PAPER, Column, Table, modelled

_DAY = 86_400.0  # seconds


class _Line(NamedTuple):
    """A line of the answer."""

    what: str
    unit: str
    paper: str  # of BERT-large at 512 slots, NNLSHP at depth 3
    ours: Optional[Interval]  # None: not computed


_ANSWER = (
    Field(Column("what", "", CONFIGURED), lambda line: line.what),
    Field(modelled("ours", "ours", ".3f"), lambda line: line.ours),
    Field(Column("paper", "paper", PAPER), lambda line: line.paper),
)


class _Row(NamedTuple):
    """A figure of the run."""

    what: str
    both: Sequence[Any]  # packed and unpacked


_RUN = (
    Field(Column("what", "", CONFIGURED), lambda row: row.what),
    Field(Column("packed", "packed", MODEL, ".3f"), lambda row: row.both[0]),
    Field(Column("unpacked", "unpacked", MODEL, ".3f"), lambda row: row.both[1]),
)


class _Work(NamedTuple):
    """A pipeline, the micro-batches of an update and the sequences of a pack."""

    pipeline: Pipeline
    accumulation: int
    packing_factor: float

    def rate(self, parameters: Parameters) -> float:
        """Return the sequences per second of all replicas."""
        return self.pipeline.sequences_per_second(
            self.accumulation, self.packing_factor, parameters
        )


class Headline(NamedTuple):
    """The answer of the report."""

    lines: Tuple[str, ...]  # three
    tables: Tuple[Table, ...]  # "answer", the values of the lines; "headline", the run, if it fits


def headline(
    comparison: ModelledOverhead,
    config: Config,
    depth: int,
    packing_factor: float,
    too_large: Optional[str] = None,
) -> Headline:
    """Return the answer of the report.

    The unpacked run is the same configuration without packing, with the same number of sequences in an update and the
    same number of updates.

    Args:
        comparison: the packed and the unpacked graph.
        config: the run's configuration.
        depth: most sequences of a pack.
        packing_factor: mean sequences per pack.
        too_large: the reason why the configuration does not fit, or None; if it does not fit, no rate is computed.
    """
    overhead = comparison.overhead(depth)
    graph = Interval(*(packing_factor / (1 + end) for end in reversed(overhead)))
    run = comparison.speed_up(depth, packing_factor) if too_large is None else None
    lines = (
        _Line("overhead of a packed row", " %", "4.287", in_percent(overhead)),
        _Line("speed-up of the graph", "", "1.913", graph),
        _Line("speed-up of the run", "", "above 2", run),
    )
    answer = table_of("answer", f"Overhead and speed-ups, {config.name}", _ANSWER, lines)
    texts = tuple(map(_text, lines))
    if too_large is not None:
        return Headline(texts, (answer._replace(notes=(too_large,)),))
    return Headline(texts, (answer, _run(comparison, config, depth, packing_factor)))


def _text(line: _Line) -> str:
    """Return a line with the source of both numbers."""
    ours = "not computed: it does not fit"
    if line.ours is not None:
        lower, value, upper = line.ours
        ours = f"{value:.3f}{line.unit} ({lower:.3f} to {upper:.3f}, computed)"
    return f"{line.what:<26}{ours}; paper {line.paper}{line.unit} (quoted)"


def _run(comparison: ModelledOverhead, config: Config, depth: int, packing_factor: float) -> Table:
    """Return throughput and days of the run."""
    calibration = comparison.calibration
    accumulation = config.accumulation(packing_factor)
    full = config.batch.gradient_accumulation
    packed = _Work(comparison.packed(depth), accumulation, packing_factor)
    unpacked = _Work(comparison.unpacked, full, 1.0)
    works = (packed, unpacked)
    rates = [calibration.throughput(work.rate) for work in works]
    steps = [work.pipeline.step(work.accumulation, calibration.parameters) for work in works]
    days = [config.run.steps * step.seconds / _DAY for step in steps]
    rows: List[_Row] = [
        _Row("micro-batches of an update", [f"{work.accumulation:,}" for work in works]),
        _Row("sequences/s of all replicas", [f"{rate.value:,.0f}" for rate in rates]),
        _Row("  interval", [f"{rate.lower:,.0f} to {rate.upper:,.0f}" for rate in rates]),
        _Row(f"days of the run, {config.run.steps:,} updates", days),
    ]
    ipus = config.placement.replicas * len(packed.pipeline.ipus)
    title = (
        f"What packing gains, {config.name} on {ipus} IPUs ({packed.pipeline.target.name}): {packing_factor:.3f} "
        "sequences per pack"
    )
    note = (
        "The graph is one micro-batch; the run adds what an update costs once. The paper's values are of BERT-large at "
        "512 slots, from Table 1 (cycles of its graph) and Figure 3."
    )
    return table_of("headline", title, _RUN, rows, (note,))
