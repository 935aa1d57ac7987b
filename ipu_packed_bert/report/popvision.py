"""What a PopVision profile holds, read by the SDK's analysis library (pva): memory and cycles of each IPU.

The names of pva that are used are those of Graphcore's published applications and tutorials:
compilation.target.numIPUs, compilation.tiles[].memory.total.includingGaps and .alwaysLiveBytes,
execution.runs[].steps[] with .program.type.name, .program.name and .ipus[].cycles.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any, Dict, List, NamedTuple, Tuple

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
_LARGEST = 25  # programs that are told by name


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
    largest: Tuple[Tuple[str, str, float], ...]  # (name, class, cycles of a run on its slowest IPU)


def find_profile(folder: Path) -> Path:
    """The newest profile.pop in a folder or below it. Raises ValueError where there is none."""
    found = sorted(Path(folder).rglob("profile.pop"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ValueError(f"{folder}: no profile.pop in it; Poplar writes one where the program ran with profiling on")
    return found[-1]


def open_report(path: Path) -> Any:
    """pva's report. Raises ValueError, in one line, where the library or the file is missing."""
    try:
        import pva
    except ImportError:
        raise ValueError(
            "reading a PopVision profile needs the Poplar SDK's analysis library (pva); enable the SDK in this shell"
        ) from None
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such profile; give a profile.pop or the folder that holds it")
    return pva.openReport(str(path))


def read_profile(path: Path, *, ipus: int) -> Profile:
    """The first `ipus` IPUs of a profile, which are those of the first replica."""
    report = open_report(path)
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


def _execution(report: Any, ipus: int) -> Tuple[int, Tuple[Work, ...], Tuple[Tuple[str, str, float], ...]]:
    """(runs, work, largest) of the runs that are updates: those at least half as long as the longest.

    The others carry weights to the device and back.
    """
    runs: List[Dict[Tuple[str, str], List[float]]] = []
    for run in report.execution.runs:
        cycles: Dict[Tuple[str, str], List[float]] = {}
        for step in run.steps:
            name = str(step.program.name)
            sums = cycles.setdefault((name, _class_of(step.program.type.name, name)), [0.0] * ipus)
            for ipu, there in zip(range(ipus), step.ipus):
                sums[ipu] += float(there.cycles)
        runs.append(cycles)
    longest = max((_longest(run) for run in runs), default=0.0)
    runs = [run for run in runs if longest and _longest(run) >= longest / 2]
    if not runs:
        return 0, (), ()
    work = []
    for ipu in range(ipus):
        classes = {}
        for name in CLASSES:
            values = [sum(sums[ipu] for (_, where), sums in run.items() if where == name) for run in runs]
            if any(values):
                classes[name] = median(values)
        work.append(Work(ipu, median([sum(sums[ipu] for sums in run.values()) for run in runs]), classes))
    slowest = {key: max(sums) for key, sums in runs[-1].items()}
    largest = sorted(slowest.items(), key=lambda item: -item[1])[:_LARGEST]
    return len(runs), tuple(work), tuple((name.lstrip("/"), where, cycles) for (name, where), cycles in largest)


def _longest(run: Dict[Tuple[str, str], List[float]]) -> float:
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
