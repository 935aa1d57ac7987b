"""The report's answer, in ten lines: what packing gains of a whole run, and what the kernel alone would."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from ipu_packed_bert.cycles.calibration import speed
from ipu_packed_bert.cycles.pipeline import Parameters, Pipeline
from ipu_packed_bert.cycles.uncertainty import INSIDE, Interval
from ipu_packed_bert.report.paper import ModelledOverhead
from ipu_packed_bert.settings.pretraining import Config
from pack_data.display.table import CONFIGURED, MODEL, Column, Table, percent

_Work = Tuple[Pipeline, int, float]  # a pipeline, the accumulation and the sequences of a pack


def headline(
    comparison: ModelledOverhead, config: Config, depth: int, packing_factor: float, too_large: Optional[str] = None
) -> Table:
    """packing_factor: sequences of a pack. too_large: a line where it does not fit; no rate is given then.

    The unpacked run is the same configuration without packing: as many sequences in an update, as many updates.
    """
    calibration = comparison.calibration
    packed, unpacked = comparison.packed(depth), comparison.unpacked
    accumulation, full = config.accumulation(packing_factor), config.batch.gradient_accumulation
    works: Tuple[_Work, _Work] = ((packed, accumulation, packing_factor), (unpacked, full, 1.0))
    ipus = config.placement.replicas * len(packed.ipus)
    rows: List[Dict[str, Any]] = []

    def add(what: str, both: Sequence[Any], ratio: Optional[Interval] = None) -> None:
        rows.append(
            {
                "what": what,
                "packed": both[0],
                "unpacked": both[1],
                "ratio": None if ratio is None else ratio.value,
                "lower": None if ratio is None else ratio.lower,
                "upper": None if ratio is None else ratio.upper,
            }
        )

    kernel = calibration.draws.interval(_kernel(comparison, depth, packing_factor))
    add(
        "kernel: sequences a million cycles",
        [calibration.draws.interval(_a_million_cycles(pipe, p)).value for pipe, _, p in works],
        kernel,
    )
    whole = calibration.draws.interval(_ratio(works))
    if too_large is None:
        found = [speed(*work, config.run.steps, calibration) for work in works]
        rates = [each.rate for each in found]
        add("sequences/s of all replicas", [f"{rate.value:,.0f}" for rate in rates], whole)
        add("  interval", [f"{rate.lower:,.0f} to {rate.upper:,.0f}" for rate in rates])
        add(f"days of the run, {config.run.steps:,} updates", [each.days for each in found])
    note = too_large or (
        f"A packed row takes {percent(comparison.overhead(depth).value):.2f} % longer. An update has {accumulation:,} "
        f"micro-batches in place of {full:,}; what is paid once takes {percent(1 - whole.value / kernel.value):.1f} % "
        f"of the kernel's {kernel.value:.3f} and leaves {whole.value:.3f}."
    )
    return Table(
        "headline",
        f"What packing gains, {config.name} on {ipus} IPUs ({packed.target.name}): {packing_factor:.3f} sequences a "
        "pack",
        (
            Column("what", "", CONFIGURED),
            Column("packed", "packed", MODEL, ".3f"),
            Column("unpacked", "unpacked", MODEL, ".3f"),
            Column("ratio", f"packed / unpacked, {INSIDE:.0%}", MODEL, ".3f", ("lower", "upper")),
        ),
        rows,
        (note,),
    )


def _kernel(comparison: ModelledOverhead, depth: int, packing_factor: float) -> Callable[[Parameters], Any]:
    packed, unpacked = comparison.packed(depth), comparison.unpacked
    return lambda p: packing_factor * unpacked.micro_batch_cycles(p) / packed.micro_batch_cycles(p)


def _a_million_cycles(pipeline: Pipeline, packing_factor: float) -> Callable[[Parameters], Any]:
    return lambda p: 1e6 * packing_factor * pipeline.micro_batch / pipeline.micro_batch_cycles(p)


def _ratio(works: Tuple[_Work, _Work]) -> Callable[[Parameters], Any]:
    """Packed by unpacked throughput."""

    def found(parameters: Parameters) -> Any:
        rates = [pipeline.sequences_per_second(number, p, parameters) for pipeline, number, p in works]
        return rates[0] / rates[1]

    return found
