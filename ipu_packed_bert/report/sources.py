"""Cycles that were measured: of a run's log, or of a PopVision profile.

`measure()` names the source, which is printed beside every number computed from it. Where nothing was measured, cycles
come from the analytic model (`cycles`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ipu_packed_bert.report.popvision import open_report
from ipu_packed_bert.run_files.folder import CONFIG, LOG, read_log
from ipu_packed_bert.settings.reader import load_yaml, plain
from pack_data.display.table import HARDWARE, HOST, PROFILE
from pack_data.reading.fields import Fields, named, shown


@dataclass(frozen=True)
class _RunMeasurement:
    """Time of one pack of a training run: IPU cycles, or seconds where no device counts cycles."""

    source: str  # "hardware", "profile" or "host"
    per_pack: float  # cycles or seconds
    unit: str  # "cycles" or "seconds"
    packing_factor: Optional[float]  # sequences / packs, where known
    detail: str  # what was read
    length: Optional[int] = None  # slots of a pack and packing depth, where known
    depth: Optional[int] = None
    settings: Optional[Dict[str, Any]] = None  # the run's configuration by section, where known
    spread: Optional[Tuple[float, float]] = None  # quartiles of `per_pack` over updates
    packs_per_step: int = 0  # the median; 0 where it is not known


@dataclass(frozen=True)
class MeasuredOverhead:
    """A packed run against an unpacked one."""

    packed: _RunMeasurement
    unpacked: _RunMeasurement

    @property
    def overhead(self) -> float:
        """Extra time of a pack relative to an unpacked row of the same length, a fraction (paper section 4.1)."""
        return self.packed.per_pack / self.unpacked.per_pack - 1.0

    @property
    def spread(self) -> Optional[Tuple[float, float]]:
        """The overhead from the quartiles of both runs: the least of one against the most of the other."""
        if self.packed.spread is None or self.unpacked.spread is None:
            return None
        (low, high), (least, most) = self.packed.spread, self.unpacked.spread
        return low / most - 1.0, high / least - 1.0

    @property
    def realised(self) -> Optional[float]:
        """p / (1 + OH), with the packing factor of the packed run."""
        factor = self.packed.packing_factor
        return None if factor is None else factor / (1.0 + self.overhead)


# What two runs must have in common to be compared: (section, settings, what that is called); no settings: all of them.
_POD = ("machine", "replicas", "ipus_per_replica", "layers_per_ipu")
_SAME_BUT_PACKED: Tuple[Tuple[str, Tuple[str, ...], str], ...] = (
    ("model", (), "model"),
    ("batch", ("micro_batch", "gradient_accumulation"), "batch"),
    ("placement", _POD, "pod"),
    ("engine", ("mask", "recompute_layers"), "mask and recomputation"),
)
SAME_PROGRAM = (
    ("data", ("max_sequence_length", "max_sequences_per_pack"), "length and packing depth"),
    ("model", (), "model"),
    ("batch", ("micro_batch",), "batch"),
    ("placement", _POD + ("available_memory_proportion",), "pod"),
    ("engine", ("mask", "recompute_layers", "half_partials"), "mask and recomputation"),
)


def refuse_differences(
    one: str,
    settings: Mapping[str, Any],
    other: str,
    others: Mapping[str, Any],
    rules: Sequence[Tuple[str, Tuple[str, ...], str]],
) -> None:
    """Raises ValueError that names the first setting in which two runs differ; what only one states is not compared."""
    for section, names, what in rules:
        mine, theirs = settings.get(section) or {}, others.get(section) or {}
        for name in names or sorted(set(mine) & set(theirs)):
            if name in mine and name in theirs and plain(mine[name]) != plain(theirs[name]):
                raise ValueError(
                    f"{one} has {section}.{named(name)} {shown(mine[name])}, {other} {shown(theirs[name])}; "
                    f"compare runs of the same {what}"
                )


def compare(packed: _RunMeasurement, unpacked: _RunMeasurement) -> MeasuredOverhead:
    """Raises ValueError where the two differ in more than packing, as far as that is known."""
    if (packed.source, packed.unit) != (unpacked.source, unpacked.unit):
        raise ValueError(
            f"{packed.detail} gives {packed.unit} ({packed.source}), {unpacked.detail} gives {unpacked.unit} "
            f"({unpacked.source}); compare runs of the same engine"
        )
    if packed.length is not None and unpacked.length is not None and packed.length != unpacked.length:
        raise ValueError(
            f"{packed.detail} has packs of {packed.length} slots, {unpacked.detail} rows of {unpacked.length}; "
            "compare runs of the same data.max_sequence_length"
        )
    refuse_differences(packed.detail, packed.settings or {}, unpacked.detail, unpacked.settings or {}, _SAME_BUT_PACKED)
    if (unpacked.packing_factor or 1.0) > 1.0:
        raise ValueError(
            f"{unpacked.detail}: holds {unpacked.packing_factor:.3f} sequences a pack; the run to compare with must be "
            "unpacked (data.max_sequences_per_pack: 1)"
        )
    return MeasuredOverhead(packed, unpacked)


class LoggedRun:
    """A run folder of `run_pretraining.py`: cycles of `hardware` where PopTorch counted them, else `host` seconds."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)

    def measure(self) -> _RunMeasurement:
        """Median over the steps without the first, which compiles and warms up."""
        steps = self._steps()
        if len(steps) < 2:
            raise ValueError(
                f"{self.folder / LOG}: holds {len(steps)} steps; the first is a warm-up, so at least 2 "
                "are needed, train for more steps"
            )
        steps = steps[1:]
        counted = all(step.get("cycles") is not None for step in steps)
        key = "cycles" if counted else "seconds"
        packs, sequences = sum(step["packs"] for step in steps), sum(step["sequences"] for step in steps)
        length, depth, settings = self._settings()
        each = sorted(step[key] / step["packs"] for step in steps)
        return _RunMeasurement(
            HARDWARE if counted else HOST,
            median(each),
            key,
            sequences / packs,
            str(self.folder),
            length,
            depth,
            settings,
            (each[len(each) // 4], each[-1 - len(each) // 4]),
            int(median(step["packs"] for step in steps)),
        )

    def _settings(self) -> Tuple[Optional[int], Optional[int], Optional[Dict[str, Any]]]:
        """(slots, depth, settings) of the run's configuration; None for what it leaves open or where it is missing."""
        path = self.folder / CONFIG
        if not path.is_file():
            return None, None, None
        found = Fields.of(load_yaml(path), path, f"it must be the {CONFIG} that the run wrote")
        data = found.object("data")
        for section in ("model", "batch", "placement", "engine"):
            found.optional(section, Fields.object)
        length, depth = (
            data.optional(key, Fields.integer, least=1) for key in ("max_sequence_length", "max_sequences_per_pack")
        )
        return length, depth, {section: values for section, values in found.tree.items() if values is not None}

    def _steps(self) -> List[Dict[str, Any]]:
        """The lines of the log that are steps, checked: whole numbers of packs and sequences, positive finite times."""
        path = self.folder / LOG
        steps = []
        if not path.is_file():
            raise ValueError(f"{path}: no such file; give the folder of a run")
        for number, record in enumerate(read_log(path), start=1):
            if "seconds" not in record or "packs" not in record:
                continue
            fields = Fields.of(record, f"{path}, line {number}", "give the folder of a finished run")
            for key in ("packs", "sequences"):
                fields.integer(key, least=1)
            for key in ("seconds", "cycles"):
                value = fields.number(key) if key == "seconds" else fields.optional(key, Fields.number)
                if value is not None and not 0.0 < value < 2.0**100:
                    raise fields.error(key, "must be a number above 0")
            steps.append(record)
        return steps


def measure(path: Path) -> _RunMeasurement:
    """Of a profile.pop or a folder that holds one and no log; else of a run's folder."""
    if path.suffix == ".pop" or ((path / "profile.pop").is_file() and not (path / LOG).is_file()):
        return _profiled(path)
    return LoggedRun(path).measure()


def _profiled(path: Path) -> _RunMeasurement:
    """Cycles of the busiest IPU, summed over the steps that a profile holds, read by the SDK's analysis library."""
    path = path / "profile.pop" if path.is_dir() else path
    report = open_report(path)
    cycles: Dict[int, int] = {}
    for step in report.execution.steps:
        for number, ipu in enumerate(step.ipus):
            cycles[number] = cycles.get(number, 0) + int(ipu.cycles)
    if not cycles or not max(cycles.values()):
        raise ValueError(f"{path}: holds no execution; run the program with profiling on, not only compile it")
    return _RunMeasurement(PROFILE, max(cycles.values()), "cycles", None, str(path))
