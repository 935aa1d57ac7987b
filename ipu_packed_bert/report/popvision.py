"""What a PopVision profile holds, read by the SDK's analysis library (pva): memory and cycles of each IPU.

The names of pva that are used are those of Graphcore's published applications and tutorials:
compilation.target.numIPUs, compilation.tiles[].memory.total.includingGaps and .alwaysLiveBytes,
execution.runs[].steps[] with .program.type.name, .program.name and .ipus[].cycles.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

# The classes that a profile and the cycle model have in common, and what falls into none of them.
PRODUCTS, COMPUTE, REARRANGEMENTS = "products", "other compute", "rearrangements"
EXCHANGE, SYNC, LINKS, HOST, OTHER = "exchange", "sync", "between IPUs", "host and streaming memory", "other"
CLASSES = (PRODUCTS, COMPUTE, REARRANGEMENTS, EXCHANGE, SYNC, LINKS, HOST, OTHER)
# Kinds of programs, by the beginning of their names in pva.
_KINDS = (
    ("DoExchange", EXCHANGE),
    ("GlobalExchange", LINKS),
    ("StreamCopy", HOST),
    ("RemoteBuffer", HOST),
    ("Sync", SYNC),
    ("Sans", SYNC),
)
# Compute sets, by words in their names; PopLibs names them so.
_PRODUCT_WORDS = ("matmul", "conv", "gemm", "reduce_mm")
_COPY_WORDS = ("copy", "transpose", "rearrange", "prearrange")


class Memory(NamedTuple):
    """Bytes on one IPU."""

    ipu: int
    bytes: int  # of all tiles, gaps included
    always_live: int
    fullest_tile: int


class Work(NamedTuple):
    """Cycles of one IPU in one run of the program, the median over the runs."""

    ipu: int
    cycles: float
    classes: Dict[str, float]


class Profile(NamedTuple):
    poplar: str
    memory: Tuple[Memory, ...]
    runs: int
    work: Tuple[Work, ...]  # empty where nothing was executed


def find_profile(folder: Path) -> Path:
    """The newest profile.pop in a folder or below it. Raises ValueError where there is none."""
    found = sorted(Path(folder).rglob("profile.pop"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ValueError(f"{folder}: no profile.pop in it; Poplar writes one where the program ran with profiling on")
    return found[-1]


def _open_report(path: Path) -> Any:
    """pva's report. Raises ValueError, in one line, where the library or the file is missing."""
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
    """The first `ipus` IPUs of a profile, which are those of the first replica; None: all."""
    report = _open_report(path)
    ipus = ipus or int(report.compilation.target.numIPUs)
    return Profile(str(report.poplarVersion.string), _memory(report, ipus), *_execution(report, ipus))


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
        found.append(Memory(ipu, sum(used), sum(int(memory.alwaysLiveBytes) for memory in here), max(used)))
    return tuple(found)


def _execution(report: Any, ipus: int) -> Tuple[int, Tuple[Work, ...]]:
    """(runs, work) of the runs that are updates: those at least half as long as the longest.

    The others carry weights to the device and back.
    """
    runs: List[Dict[str, List[float]]] = []  # by class, of each IPU
    for run in report.execution.runs:
        cycles: Dict[str, List[float]] = {}
        for step in run.steps:
            sums = cycles.setdefault(_class_of(step.program.type.name, str(step.program.name)), [0.0] * ipus)
            for ipu, there in zip(range(ipus), step.ipus):
                sums[ipu] += float(there.cycles)
        runs.append(cycles)
    longest = max((_longest(run) for run in runs), default=0.0)
    runs = [run for run in runs if longest and _longest(run) >= longest / 2]
    if not runs:
        return 0, ()
    work = []
    for ipu in range(ipus):
        classes = {}
        for name in CLASSES:
            values = [run[name][ipu] if name in run else 0.0 for run in runs]
            if any(values):
                classes[name] = median(values)
        work.append(Work(ipu, median([sum(sums[ipu] for sums in run.values()) for run in runs]), classes))
    return len(runs), tuple(work)


def _longest(run: Dict[str, List[float]]) -> float:
    """Cycles of the IPU that works most."""
    return max((sum(each) for each in zip(*run.values())), default=0.0)


def _class_of(kind: str, name: str) -> str:
    """The class of a program; of a compute set by words of its name, which is a guess."""
    if kind != "OnTileExecute":
        return next((where for beginning, where in _KINDS if kind.startswith(beginning)), OTHER)
    words = name.lower()
    if any(word in words for word in _COPY_WORDS):
        return REARRANGEMENTS
    return PRODUCTS if any(word in words for word in _PRODUCT_WORDS) else COMPUTE
