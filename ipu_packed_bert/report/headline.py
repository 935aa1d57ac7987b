"""The report's answer in ten lines: the gain of packing for a whole run and for the kernel alone."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence

from ipu_packed_bert.cycles.calibration import Interval
from ipu_packed_bert.cycles.pipeline import Parameters, Pipeline
from ipu_packed_bert.report.fields import Field, table_of
from ipu_packed_bert.report.paper import ModelledOverhead
from ipu_packed_bert.settings.config import Config
from pack_data.display.table import CONFIGURED, MODEL, Column, Table, percent

_DAY = 86_400.0  # seconds


class _Row(NamedTuple):
    """A line of the answer."""

    what: str
    both: Sequence[Any]  # packed and unpacked
    ratio: Optional[Interval] = None


_FIELDS = (
    Field(Column("what", "", CONFIGURED), lambda row: row.what),
    Field(Column("packed", "packed", MODEL, ".3f"), lambda row: row.both[0]),
    Field(Column("unpacked", "unpacked", MODEL, ".3f"), lambda row: row.both[1]),
    Field(
        Column("ratio", "packed / unpacked, range of fits", MODEL, ".3f", ("lower", "upper")),
        lambda row: row.ratio,
    ),
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

    def kernel_rate(self, parameters: Parameters) -> float:
        """Return the sequences per million cycles of the kernel."""
        sequences = self.packing_factor * self.pipeline.micro_batch
        return 1e6 * sequences / self.pipeline.micro_batch_cycles(parameters)


def headline(
    comparison: ModelledOverhead,
    config: Config,
    depth: int,
    packing_factor: float,
    too_large: Optional[str] = None,
) -> Table:
    """Return the answer as a table.

    The unpacked run is the same configuration without packing, with the same number of sequences in an update and the
    same number of updates.

    Args:
        comparison: the packed and the unpacked graph.
        config: the run's configuration.
        depth: most sequences of a pack.
        packing_factor: mean sequences per pack.
        too_large: the reason why the configuration does not fit, or None; if it does not fit, no rate is computed.
    """
    calibration = comparison.calibration
    accumulation = config.accumulation(packing_factor)
    full = config.batch.gradient_accumulation
    packed = _Work(comparison.packed(depth), accumulation, packing_factor)
    unpacked = _Work(comparison.unpacked, full, 1.0)
    works = (packed, unpacked)

    def kernel_speed_up(parameters: Parameters) -> float:
        return packed.kernel_rate(parameters) / unpacked.kernel_rate(parameters)

    kernel = calibration.interval(kernel_speed_up)
    whole = comparison.speed_up(depth, packing_factor)
    kernel_rates = [work.kernel_rate(calibration.parameters) for work in works]
    rows: List[_Row] = [_Row("kernel: sequences a million cycles", kernel_rates, kernel)]
    if too_large is None:
        rates = [calibration.throughput(work.rate) for work in works]
        steps = [work.pipeline.step(work.accumulation, calibration.parameters) for work in works]
        days = [config.run.steps * step.seconds / _DAY for step in steps]
        rows += [
            _Row("sequences/s of all replicas", [f"{rate.value:,.0f}" for rate in rates], whole),
            _Row("  interval", [f"{rate.lower:,.0f} to {rate.upper:,.0f}" for rate in rates]),
            _Row(f"days of the run, {config.run.steps:,} updates", days),
        ]

    note = too_large or (
        f"A packed row takes {percent(comparison.overhead(depth).value):.2f} % longer. An update has {accumulation:,} "
        f"micro-batches in place of {full:,}; costs once per update reduce the kernel's speed-up of "
        f"{kernel.value:.3f} by {percent(1 - whole.value / kernel.value):.1f} % to {whole.value:.3f}."
    )
    ipus = config.placement.replicas * len(packed.pipeline.ipus)
    title = (
        f"What packing gains, {config.name} on {ipus} IPUs ({packed.pipeline.target.name}): {packing_factor:.3f} "
        "sequences per pack"
    )
    return table_of("headline", title, _FIELDS, rows, (note,))
