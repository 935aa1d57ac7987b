"""Memory and cycles of each IPU in a PopVision profile, read by the SDK's analysis library (pva).

The names of pva are taken from Graphcore's published applications and tutorials:
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
    """The memory and the cycles of a program."""

    poplar: str  # version
    memory: Tuple[Memory, ...]
    runs: int  # updates
    work: Tuple[Work, ...]  # empty if the program was only compiled


def find_profile(folder: Path) -> Path:
    """Find the newest profile.pop in a directory or below it.

    Raises:
        ValueError: there is none.
    """
    profiles = sorted(Path(folder).rglob("profile.pop"), key=lambda path: path.stat().st_mtime)
    if not profiles:
        raise ValueError(
            f"{folder}: no profile.pop; pass the directory in which the program ran with profiling enabled"
        )
    return profiles[-1]


def _open_report(path: Path) -> Any:
    """Open a profile with pva; raise ValueError if the library or the file is missing."""
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file; pass a profile.pop or its directory")
    try:
        import pva
    except ImportError:
        raise ValueError(
            f"{path}: reading a PopVision profile requires the Poplar SDK's analysis library (pva); enable the SDK "
            "in this shell"
        ) from None
    return pva.openReport(str(path))


def read_profile(path: Path, *, ipus: Optional[int] = None) -> Profile:
    """Read a profile.

    Args:
        path: the profile.pop.
        ipus: IPUs of a replica, to read the first replica only; None: all IPUs.

    Raises:
        ValueError: the file or the analysis library is missing, or the program has fewer IPUs.
    """
    report = _open_report(path)
    number = int(report.compilation.target.numIPUs)
    ipus = ipus or number
    if number < ipus:
        raise ValueError(
            f"{path}: a program for {number} IPUs, fewer than the {ipus} of a replica of the configuration; pass a "
            "profile of the same pod"
        )
    runs, work = _execution(report, ipus)
    return Profile(str(report.poplarVersion.string), _memory(report, ipus), runs, work)


def _memory(report: Any, ipus: int) -> Tuple[Memory, ...]:
    """Return the memory of the first IPUs; nothing if the profile has no tiles."""
    tiles = [tile.memory for tile in report.compilation.tiles]
    if not tiles:
        return ()
    tiles_per_ipu = len(tiles) // int(report.compilation.target.numIPUs)
    memories = []
    for ipu in range(ipus):
        of_ipu = tiles[ipu * tiles_per_ipu : (ipu + 1) * tiles_per_ipu]
        used = [int(memory.total.includingGaps) for memory in of_ipu]
        always_live = sum(int(memory.alwaysLiveBytes) for memory in of_ipu)
        memories.append(Memory(ipu, sum(used), always_live, max(used)))
    return tuple(memories)


def _execution(report: Any, ipus: int) -> Tuple[int, Tuple[Work, ...]]:
    """Return the number of updates and the work of each IPU in them.

    Updates are the runs that are at least half as long as the longest; other runs copy weights to or from the device.
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
    work = [Work(ipu, median(cycles)) for ipu, cycles in enumerate(zip(*updates))]
    return len(updates), tuple(work)
