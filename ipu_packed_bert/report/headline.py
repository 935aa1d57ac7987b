"""What a user gets: sequences a second and days of a whole run at the configuration's own accumulation, packed and not.

Beside the kernel's ratio: what packing's shorter accumulation takes of it, and what to change.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from ipu_packed_bert.cycles.calibration import Calibration, speed
from ipu_packed_bert.cycles.pipeline import Parameters, Pipeline, Step
from ipu_packed_bert.cycles.uncertainty import Interval
from ipu_packed_bert.report.paper import INTERVALS, ModelledOverhead
from ipu_packed_bert.settings.pretraining import Config
from pack_data.display.table import CONFIGURED, MODEL, Column, Table, percent

_Work = Tuple[Pipeline, int, float]  # a pipeline, the accumulation and the sequences of a pack


def shares(step: Step, pipeline: Pipeline) -> Dict[str, float]:
    """Of the seconds of an update: filling and draining the pipeline, the update on the IPUs, the host."""
    seconds = pipeline.target.seconds((pipeline.placement.stages - 1) * step.pipeline_cycle)
    return {
        "filling and draining the pipeline": seconds / step.seconds,
        "the weight update on the IPUs": step.once.device / step.seconds,
        "the host between two calls": step.once.host / step.seconds,
    }


def headline(
    comparison: ModelledOverhead, config: Config, depth: int, packing_factor: float, too_large: Optional[str] = None
) -> Table:
    """packing_factor: sequences of a pack. too_large: a line where it does not fit; no rate is given then.

    The unpacked run is the same configuration without packing: as many sequences in an update, as many updates.
    """
    calibration, parameters = comparison.calibration, comparison.calibration.parameters
    packed, unpacked = comparison.packed(depth), comparison.unpacked
    accumulation, full = config.accumulation(packing_factor), config.batch.gradient_accumulation
    works: Tuple[_Work, _Work] = ((packed, accumulation, packing_factor), (unpacked, full, 1.0))
    steps = [pipeline.step(number, parameters) for pipeline, number, _ in works]
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

    kernel = calibration.interval(_kernel(comparison, depth, packing_factor))
    add(
        "kernel: sequences a million cycles",
        [calibration.interval(_a_million_cycles(pipe, p)).value for pipe, _, p in works],
        kernel,
    )
    add("accumulation: micro-batches of an update", [f"{accumulation:,}", f"{full:,}"])
    whole = calibration.interval(_ratio(works))
    if too_large is None:
        found = [speed(*work, config.run.steps, calibration) for work in works]
        rates = [each.rate for each in found]
        add("sequences/s of all replicas", [f"{rate.value:,.0f}" for rate in rates], whole)
        add("  interval", [f"{rate.lower:,.0f} to {rate.upper:,.0f}" for rate in rates])
        add(f"days of the run, {config.run.steps:,} updates", [each.days for each in found])
    parts = [shares(step, work[0]) for step, work in zip(steps, works)]
    for name in parts[0]:
        add(f"% of an update: {name}", [percent(part[name]) for part in parts])
    lost = 1.0 - whole.value / kernel.value
    notes = [
        f"An update of packs has {full / accumulation:.2f} times fewer micro-batches, so that what is paid once an "
        f"update weighs as much more: it takes {percent(lost):.1f} % of the kernel's {kernel.value:.3f} and "
        f"leaves {whole.value:.3f}.",
    ]
    if too_large is None:
        notes += _changes(config, calibration, works, kernel.value)
    else:
        notes.append(too_large)
    return Table(
        "headline",
        f"What packing gains, {config.name}: {packing_factor:.3f} sequences a pack",
        (
            Column("what", "", CONFIGURED),
            Column("packed", "packed", MODEL, ".3f"),
            Column("unpacked", "unpacked", MODEL, ".3f"),
            Column("ratio", "packed / unpacked", MODEL, ".3f", ("lower", "upper")),
        ),
        rows,
        tuple(notes) + INTERVALS,
    )


def _kernel(comparison: ModelledOverhead, depth: int, packing_factor: float) -> Callable[[Parameters], Any]:
    packed, unpacked = comparison.packed(depth), comparison.unpacked
    return lambda p: packing_factor * unpacked.micro_batch_cycles(p) / packed.micro_batch_cycles(p)


def _a_million_cycles(pipeline: Pipeline, packing_factor: float) -> Callable[[Parameters], Any]:
    return lambda p: 1e6 * packing_factor * pipeline.micro_batch / pipeline.micro_batch_cycles(p)


def _ratio(
    works: Tuple[_Work, _Work], *, times: int = 1, instances: Optional[int] = None
) -> Callable[[Parameters], Any]:
    """Packed by unpacked throughput, with `times` the accumulation and so many processes."""

    def found(parameters: Parameters) -> Any:
        rates = [
            pipeline.sequences_per_second(times * number, p, parameters, instances=instances)
            for pipeline, number, p in works
        ]
        return rates[0] / rates[1]

    return found


def _changes(config: Config, calibration: Calibration, works: Tuple[_Work, _Work], kernel: float) -> List[str]:
    """What brings the ratio nearer to the kernel's, with the throughput that it makes."""
    pipeline, number, factor = works[0]

    def rate_of(times: int, instances: Optional[int]) -> float:
        return calibration.throughput(
            lambda each: pipeline.sequences_per_second(times * number, factor, each, instances=instances)
        ).value

    now, found = rate_of(1, None), []

    def tried(what: str, times: int, instances: Optional[int]) -> None:
        rate = rate_of(times, instances)
        ratio = calibration.interval(_ratio(works, times=times, instances=instances)).value
        found.append(f"{what}: {rate:,.0f} sequences/s ({percent(rate / now - 1):+.1f} %), ratio {ratio:.3f}")

    replicas = pipeline.placement.replicas
    if replicas > 1:
        tried(f"a process for each of the {replicas} replicas (poprun --num-instances {replicas})", 1, replicas)
    tried("twice the accumulation (an update of twice the sequences: rate and steps change, too)", 2, None)
    return ["To change:"] + [f"  {line}" for line in found]
