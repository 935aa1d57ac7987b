"""The report's answer: overhead and speed-ups in three lines, and the throughput and days of a whole run."""

from __future__ import annotations

from functools import partial
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from ipu_packed_bert.settings.config import Config
from ipu_profiling.report.paper import ModelledOverhead, kernel_speed_up
from pack_data.display.table import CONFIGURED, MODEL, PAPER, Column, Table

_DAY = 86_400.0  # seconds

# Name, unit and the paper's value, which is of BERT-large at 512 slots with NNLSHP at depth 3.
_LINES = (
    ("overhead of a packed row", " %", "4.287"),
    ("speed-up of the graph", "", "1.913"),
    ("speed-up of the run", "", "above 2"),
)
_ANSWER = (
    Column("what", "", CONFIGURED),
    Column("ours", "ours", MODEL, ".3f"),
    Column("paper", "paper", PAPER),
)
_RUN = (
    Column("what", "", CONFIGURED),
    Column("packed", "packed", MODEL, ".3f"),
    Column("unpacked", "unpacked", MODEL, ".3f"),
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
    graph = kernel_speed_up(packing_factor, overhead)
    run = comparison.speed_up(depth, packing_factor) if too_large is None else None
    rows = []
    texts = []
    for (what, unit, paper), ours in zip(_LINES, (100.0 * overhead, graph, run)):
        rows.append({"what": what, "ours": ours, "paper": paper})
        computed = "not computed: it does not fit"
        if ours is not None:
            computed = f"{ours:.3f}{unit} (computed)"
        texts.append(f"{what:<26}{computed}; paper {paper}{unit} (quoted)")

    answer = Table("answer", f"Overhead and speed-ups, {config.name}", _ANSWER, rows)
    if too_large is not None:
        return Headline(tuple(texts), (answer._replace(notes=(too_large,)),))
    return Headline(tuple(texts), (answer, _run(comparison, config, depth, packing_factor)))


def _run(comparison: ModelledOverhead, config: Config, depth: int, packing_factor: float) -> Table:
    """Return throughput and days of the run."""
    calibration = comparison.calibration
    packed = comparison.packed(depth)
    works = (
        (packed, config.accumulation(packing_factor), packing_factor),
        (comparison.unpacked, config.batch.gradient_accumulation, 1.0),
    )
    columns: List[Tuple[Any, ...]] = []
    for pipeline, accumulation, factor in works:
        rate = calibration.throughput(partial(pipeline.sequences_per_second, accumulation, factor))
        seconds = pipeline.step(accumulation, calibration.parameters).seconds
        cells = (
            f"{accumulation:,}",
            f"{rate.value:,.0f}",
            f"{rate.lower:,.0f} to {rate.upper:,.0f}",
            config.run.steps * seconds / _DAY,
        )
        columns.append(cells)
    names = (
        "micro-batches of an update",
        "sequences/s of all replicas",
        "  interval",
        f"days of the run, {config.run.steps:,} updates",
    )
    rows: List[Dict[str, Any]] = []
    for what, packed_cell, unpacked_cell in zip(names, *columns):
        rows.append({"what": what, "packed": packed_cell, "unpacked": unpacked_cell})
    ipus = config.placement.replicas * len(packed.ipus)
    title = (
        f"What packing gains, {config.name} on {ipus} IPUs ({packed.target.name}): {packing_factor:.3f} sequences per "
        "pack"
    )
    note = (
        "The graph is one micro-batch; the run adds what an update costs once. The paper's values are of BERT-large at "
        "512 slots, from Table 1 (cycles of its graph) and Figure 3."
    )
    return Table("headline", title, _RUN, rows, (note,))
