"""What a PopVision profile holds, read by the SDK's analysis library (pva): memory and cycles of each IPU.

The names of pva that are used are those of Graphcore's published applications and tutorials:
compilation.target.numIPUs, compilation.tiles[].memory.total.includingGaps and .alwaysLiveBytes,
execution.runs[].steps[].ipus[].cycles.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, List, NamedTuple, Optional, Tuple


@dataclass(frozen=True)
class Memory:
    """Bytes on one IPU."""

    ipu: int
    bytes: int  # of all tiles, gaps included
    always_live: int
    fullest_tile: int


@dataclass(frozen=True)
class Work:
    """Cycles of one IPU in one run of the program, the median over the runs."""

    ipu: int
    cycles: float


class Profile(NamedTuple):
    poplar: str
    memory: Tuple[Memory, ...]
    runs: int
    work: Tuple[Work, ...]  # empty where nothing was executed


def find_profile(folder: Path) -> Path:
    """Find the newest profile.pop in a directory or below it; raise ValueError if there is none."""
    found = sorted(Path(folder).rglob("profile.pop"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ValueError(
            f"{folder}: no profile.pop in it; Poplar writes one where the program ran with profiling on"
        )
    return found[-1]


def _open_report(path: Path) -> Any:
    """Open the report of pva; raise ValueError, in one line, if the library or the file is missing."""
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such profile; give a profile.pop or the folder that holds it")
    try:
        import pva
    except ImportError:
        raise ValueError(
            f"{path}: to read a PopVision profile needs the Poplar SDK's analysis library (pva); enable the SDK "
            "in this shell"
        ) from None
    return pva.openReport(str(path))


def read_profile(path: Path, *, ipus: Optional[int] = None) -> Profile:
    """Return the first `ipus` IPUs of a profile, which are those of the first replica; None for all."""
    report = _open_report(path)
    ipus = ipus or int(report.compilation.target.numIPUs)
    return Profile(
        str(report.poplarVersion.string), _memory(report, ipus), *_execution(report, ipus)
    )


def _memory(report: Any, ipus: int) -> Tuple[Memory, ...]:
    tiles = list(report.compilation.tiles)
    number = int(report.compilation.target.numIPUs)
    if not tiles or number < ipus:
        return ()
    each = len(tiles) // number
    found = []
    for ipu in range(ipus):
        here = [tile.memory for tile in tiles[ipu * each : (ipu + 1) * each]]
        used = [int(memory.total.includingGaps) for memory in here]
        found.append(
            Memory(ipu, sum(used), sum(int(memory.alwaysLiveBytes) for memory in here), max(used))
        )
    return tuple(found)


def _execution(report: Any, ipus: int) -> Tuple[int, Tuple[Work, ...]]:
    """Return the number of updates, and the work of each IPU in them.

    Updates are the runs at least half as long as the longest; the others carry weights to the device and back.
    """
    runs: List[List[float]] = []  # cycles of each IPU
    for run in report.execution.runs:
        cycles = [0.0] * ipus
        for step in run.steps:
            for number, ipu in enumerate(list(step.ipus)[:ipus]):
                cycles[number] += float(ipu.cycles)
        runs.append(cycles)
    longest = max(map(max, runs), default=0.0)
    updates = [cycles for cycles in runs if longest and max(cycles) >= longest / 2]
    if not updates:
        return 0, ()
    return len(updates), tuple(
        Work(ipu, median(cycles)) for ipu, cycles in enumerate(zip(*updates))
    )
