"""Timing: sides take turns round by round, so that all of them see the same machine; medians, quartiles, versions."""

from __future__ import annotations

import math
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Callable, Dict, Hashable, Iterator, List, Mapping, NamedTuple, Optional, Tuple, TypeVar

import numpy as np

_Side = TypeVar("_Side", bound=Hashable)
_Result = TypeVar("_Result")
Clock = Callable[[], float]


def left_text(seconds: float) -> str:
    """`35 s left`, `1 min 20 s left`, `2 h 05 min left`."""
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s left"
    minutes = whole // 60
    return f"{minutes} min {whole % 60:02} s left" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min left"


class _Quartiles(NamedTuple):
    low: float
    median: float
    high: float

    def __str__(self) -> str:
        """`1.920 (1.911..1.934)`."""
        return f"{self.median:.3f} ({self.low:.3f}..{self.high:.3f})"


def quartiles(values: np.ndarray) -> _Quartiles:
    return _Quartiles(*np.percentile(values, [25, 50, 75]).tolist())


def timed(work: Callable[[], _Result], clock: Clock = time.perf_counter) -> Tuple[float, _Result]:
    """Seconds, and what the work returns."""
    start = clock()
    result = work()
    return clock() - start, result


def rounds_in_turn(
    sides: Mapping[_Side, Callable[[int], _Result]], rounds: int, bar: Any = None
) -> Iterator[Tuple[int, Dict[_Side, _Result]]]:
    """The number of each round, and what each side returns in it. Round 0 warms up: its times are not to be counted.

    Every second round is in reverse order. bar: moves on after each side.
    """
    for number in range(rounds + 1):
        found = {}
        for side in list(sides)[:: -1 if number % 2 else 1]:
            found[side] = sides[side](number)
            if bar is not None:
                bar.update()
        yield number, found


def seconds_in_turn(
    sides: Mapping[_Side, Callable[[], Any]],
    rounds: int,
    clock: Clock = time.perf_counter,
    *,
    warm_up: bool = True,
    at_most: float = math.inf,
) -> Dict[_Side, np.ndarray]:
    """Seconds of each side, one value a round. The rounds end early, after two, where a side has taken `at_most`."""
    seconds: Dict[_Side, List[float]] = {side: [] for side in sides}
    once = {side: lambda number, work=work: timed(work, clock)[0] for side, work in sides.items()}
    for number, found in rounds_in_turn(once, rounds if warm_up else rounds - 1):
        for side, taken in found.items():
            if number or not warm_up:
                seconds[side].append(taken)
        if min(map(len, seconds.values())) >= 2 and max(map(sum, seconds.values())) >= at_most:
            break
    return {side: np.array(values) for side, values in seconds.items()}


def versions(*packages: str) -> Dict[str, Optional[str]]:
    """Of Python and of these packages; None where one is not installed."""
    found: Dict[str, Optional[str]] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found
