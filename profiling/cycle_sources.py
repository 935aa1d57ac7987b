"""Where cycles come from when something really ran: run logs and PopVision profiles, behind one interface.

`measure()` gives a Measurement whose `source` is printed beside every number that follows from it. The analytic model
(`ipu_model`) is the source where nothing ran.
"""
from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Dict, List, Optional, Tuple

import yaml

from tables import HARDWARE, HOST, PROFILE


@dataclass(frozen=True)
class Measurement:
    """Time of one pack of a training run: IPU cycles, or seconds where no device counts cycles."""

    source: str                           # "hardware", "profile" or "host"
    per_pack: float                       # cycles or seconds
    unit: str                             # "cycles" or "seconds"
    packing_factor: Optional[float]       # sequences / packs, where known
    detail: str                           # what was read
    length: Optional[int] = None          # slots of a pack and packing depth, where known
    depth: Optional[int] = None


@dataclass(frozen=True)
class Overhead:
    """A packed run against an unpacked one."""

    packed: Measurement
    unpacked: Measurement

    @property
    def overhead(self) -> float:
        """Extra time of a pack relative to an unpacked row of the same length, a fraction (paper section 4.1)."""
        return self.packed.per_pack / self.unpacked.per_pack - 1.0

    @property
    def realised(self) -> Optional[float]:
        """p / (1 + OH), with the packing factor of the packed run."""
        factor = self.packed.packing_factor
        return None if factor is None else factor / (1.0 + self.overhead)


def compare(packed: Measurement, unpacked: Measurement) -> Overhead:
    """Raises ValueError where the two were not measured in the same way."""
    if (packed.source, packed.unit) != (unpacked.source, unpacked.unit):
        raise ValueError(f"{packed.detail} gives {packed.unit} ({packed.source}), {unpacked.detail} gives {unpacked.unit} "
                         f"({unpacked.source}); compare runs of the same engine")
    return Overhead(packed, unpacked)


class RunLog:
    """A run folder of `run_pretraining.py`: `hardware` where PopTorch counted cycles, else `host` seconds."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)

    def measure(self) -> Measurement:
        """Median over the steps; the first one, which compiles and warms up, is left out."""
        steps = self._steps()
        if len(steps) < 2:
            raise ValueError(f"{self.folder / 'log.jsonl'}: holds {len(steps)} steps; the first is a warm-up, so at least 2 "
                             "are needed, train for more steps")
        steps = steps[1:]
        counted = all(step.get("cycles") is not None for step in steps)
        key = "cycles" if counted else "seconds"
        packs, sequences = sum(step["packs"] for step in steps), sum(step["sequences"] for step in steps)
        return Measurement(HARDWARE if counted else HOST, median(step[key] / step["packs"] for step in steps), key,
                           sequences / packs, str(self.folder), *self._packs())

    def _packs(self) -> Tuple[Optional[int], Optional[int]]:
        """(slots, depth) of the run's configuration; None for what it leaves open."""
        path = self.folder / "config.yml"
        data = yaml.safe_load(path.read_text(encoding="utf-8"))["data"] if path.is_file() else {}
        return data.get("max_sequence_length"), data.get("max_sequences_per_pack")

    def _steps(self) -> List[Dict[str, Any]]:
        path = self.folder / "log.jsonl"
        steps = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                record = json.loads(line)
            except ValueError:
                raise ValueError(f"{path}: line {number} is no JSON; give the folder of a finished run") from None
            if "seconds" in record and record.get("packs"):
                steps.append(record)
        return steps


class PopVisionProfile:
    """A profile.pop of an IPU Model or hardware run, read by the SDK's analysis library."""

    def __init__(self, path: Path, *, packs: int):
        self.path = Path(path)
        self.packs = packs

    def measure(self) -> Measurement:
        """Cycles of the busiest IPU, summed over the steps the profile holds, for each of `packs` packs."""
        try:
            import pva
        except ImportError:
            raise ValueError("reading a PopVision profile needs the Poplar SDK's analysis library (pva); enable the SDK, "
                             "or leave --profile-packed and --profile-unpacked out") from None
        path = self.path / "profile.pop" if self.path.is_dir() else self.path
        if not path.is_file():
            raise ValueError(f"{path}: no such profile; give a profile.pop or the folder that holds it")
        report = pva.openReport(str(path))
        cycles: Dict[int, int] = {}
        for step in report.execution.steps:
            for number, ipu in enumerate(step.ipus):
                cycles[number] = cycles.get(number, 0) + int(ipu.cycles)
        if not cycles or not max(cycles.values()):
            raise ValueError(f"{path}: holds no execution; run the program with profiling on, not only compile it")
        return Measurement(PROFILE, max(cycles.values()) / self.packs, "cycles", None, str(path))
