"""Seconds that a piece of work takes, and how many are left, in words."""

from __future__ import annotations

import time
from typing import Callable, Tuple, TypeVar

_Result = TypeVar("_Result")
Clock = Callable[[], float]


def time_text(seconds: float) -> str:
    """Return `0.4 s`, `35 s`, `1 min 20 s` or `2 h 05 min`."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    if seconds < 10.0:
        return f"{seconds:.1f} s"
    if minutes == 0:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def timed(work: Callable[[], _Result], clock: Clock = time.perf_counter) -> Tuple[float, _Result]:
    """Return the seconds of the work and its result."""
    start = clock()
    result = work()
    return clock() - start, result
