"""Timing in rounds: the sides take turns, so that all of them see the same machine; quartiles."""

from __future__ import annotations

import math
import time
from typing import (
    Any,
    Callable,
    Dict,
    Hashable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Tuple,
    TypeVar,
)

import numpy as np

from pack_data.cli.timing import Clock, timed

_Side = TypeVar("_Side", bound=Hashable)
_Result = TypeVar("_Result")


class _Quartiles(NamedTuple):
    low: float
    median: float
    high: float

    def __str__(self) -> str:
        """Return `1.920 (1.911..1.934)`."""
        return f"{self.median:.3f} ({self.low:.3f}..{self.high:.3f})"


def quartiles(values: np.ndarray) -> _Quartiles:
    return _Quartiles(*np.percentile(values, [25, 50, 75]).tolist())


def rounds_in_turn(
    sides: Mapping[_Side, Callable[[int], _Result]], rounds: int, bar: Any = None
) -> Iterator[Tuple[int, Dict[_Side, _Result]]]:
    """Yield the number of each round and the result of each side.

    Round 0 warms up and should not be counted. Every second round runs in reverse order. `bar` moves after each side.
    """
    for number in range(rounds + 1):
        order = list(sides)
        if number % 2:
            order.reverse()
        results = {}
        for side in order:
            results[side] = sides[side](number)
            if bar is not None:
                bar.update()
        yield number, results


def seconds_in_turn(
    sides: Mapping[_Side, Callable[[], Any]],
    rounds: int,
    clock: Clock = time.perf_counter,
    *,
    warm_up: bool = True,
    at_most: float = math.inf,
) -> Dict[_Side, np.ndarray]:
    """Return the seconds of each side, one value per round; from two rounds on, end once a side has taken `at_most`."""
    seconds: Dict[_Side, List[float]] = {side: [] for side in sides}
    once = {side: lambda number, work=work: timed(work, clock)[0] for side, work in sides.items()}
    for number, results in rounds_in_turn(once, rounds if warm_up else rounds - 1):
        for side, taken in results.items():
            if number or not warm_up:
                seconds[side].append(taken)
        if min(map(len, seconds.values())) >= 2 and max(map(sum, seconds.values())) >= at_most:
            break
    return {side: np.array(values) for side, values in seconds.items()}
