"""The report's answer: overhead and speed-ups, and the throughput and days of a whole run."""

from __future__ import annotations

from functools import partial
from typing import List, Optional

from ipu_packed_bert.settings.config import Config
from ipu_profiling.report.paper import ModelledOverhead, kernel_speed_up
from pack_data.display.facts import MODEL, PAPER, Fact, Facts, number, with_unit

_DAY = 86_400.0  # seconds

# What is computed, its unit, and the paper's value, which is of BERT-large at 512 slots with NNLSHP at depth 3.
_LINES = (
    ("overhead of a packed row", "%", "4.287"),
    ("speed-up of the graph", "", "1.913"),
    ("speed-up of the run", "", "above 2"),
)


def headline(
    comparison: ModelledOverhead,
    config: Config,
    depth: int,
    packing_factor: float,
    too_large: Optional[str] = None,
) -> List[Facts]:
    """Return the answer of the report and, if the configuration fits, throughput and days of its run.

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
    for (what, unit, paper), ours in zip(_LINES, (100.0 * overhead, graph, run)):
        row = {
            "what": Fact("", what, note=unit),
            "ours": Fact("ours", ours, "ratio", MODEL),
            "paper": Fact("paper", paper, source=PAPER),
        }
        rows.append(row)
    answer = Facts(f"Overhead and speed-ups, {config.name}", rows, name="answer")
    if too_large is not None:
        return [answer._replace(notes=(too_large,))]
    return [answer, _run(comparison, config, depth, packing_factor)]


def _run(comparison: ModelledOverhead, config: Config, depth: int, packing_factor: float) -> Facts:
    """Return throughput and days of the run."""
    calibration = comparison.calibration
    packed = comparison.packed(depth)
    works = (
        ("packed", packed, config.accumulation(packing_factor), packing_factor),
        ("unpacked", comparison.unpacked, config.batch.gradient_accumulation, 1.0),
    )
    names = (
        "micro-batches of an update",
        "sequences/s of all replicas",
        "  interval",
        f"days of the run, {config.run.steps:,} updates",
    )
    rows = [{"what": Fact("", name)} for name in names]
    for side, pipeline, accumulation, factor in works:
        rate = calibration.throughput(partial(pipeline.sequences_per_second, accumulation, factor))
        seconds = pipeline.step(accumulation, calibration.parameters).seconds
        low = number(rate.lower, "sequences")
        values = (
            number(accumulation),
            number(rate.value, "sequences"),
            f"{low} to {number(rate.upper, 'sequences')}",
            config.run.steps * seconds / _DAY,
        )
        for row, value in zip(rows, values):
            row[side] = Fact(side, value, "ratio", MODEL)
    ipus = config.placement.replicas * len(packed.ipus)
    title = (
        f"What packing gains, {config.name} on {ipus} IPUs ({packed.target.name}): "
        f"{with_unit(packing_factor, 'sequences per pack')}"
    )
    note = (
        "The graph is one micro-batch; the run adds what an update costs once. The paper's values are of BERT-large at "
        "512 slots, from Table 1 (cycles of its graph) and Figure 3."
    )
    return Facts(title, rows, (note,), "headline")
