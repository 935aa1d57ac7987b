"""Numbers on an axis: where its marks stand, and how they are written."""

from __future__ import annotations

import math
from typing import Callable, List, NamedTuple, Sequence

from pack_data.page.charts import Axis, Skip

_LETTERS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def short(value: float) -> str:
    """`0.02`, `1,500`, `20 k`, `1.5 M`: a number of few characters."""
    size = abs(value)
    if size >= 10_000:
        for unit, letter in _LETTERS:
            if size >= unit:
                return f"{value / unit:.4g} {letter}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def ticks(low: float, high: float, about: int = 6) -> List[float]:
    """Round numbers, some `about` of them, the first at most low and the last at least high."""
    span = high - low
    if not span > 0:
        return [low, low + 1.0]
    step = 10.0 ** math.floor(math.log10(span / about))
    step = next(step * factor for factor in (1, 2, 5, 10) if span / (step * factor) <= about)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, 2 - math.floor(math.log10(step)))
    return [round(number * step, digits) for number in range(first, last + 1)]


def powers(low: float, high: float, base: int, about: int = 12) -> List[float]:
    """Powers of the base, the first at most low and the last at least high; both above 0."""
    first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
    last = max(last, first + 1)
    every = -(-(last - first) // about)
    return [float(base) ** number for number in range(first, last + every, every)]


class Scale(NamedTuple):
    """From numbers to places on the picture."""

    ticks: List[float]
    place: Callable[[float], float]


def scale(axis: Axis, values: Sequence[float], start: float, end: float, *, whole: bool = False) -> Scale:
    """The axis of these values from place `start` to place `end`; whole: it ends at the last value, as one with a
    `most` does, not at a tick.
    """
    found = [value for value in values if math.isfinite(value)]
    if axis.log:
        found = [value for value in (*found, axis.least, axis.most) if value is not None and value > 0] or [1.0]
        marks = powers(min(found), max(found), axis.log)
        low, high = math.log(marks[0]), math.log(marks[-1])
        return Scale(marks, lambda value: start + (end - start) * (math.log(max(value, 1e-300)) - low) / (high - low))
    least = axis.least if axis.least is not None else min([0.0, *found])
    most = axis.most if axis.most is not None else max([0.0, *found])
    marks = ticks(least, most)
    if axis.skips:
        return _skipping(axis.skips, least, most, start, end)
    low = least if whole and most > least else marks[0]
    high = most if (whole or axis.most is not None) and most > least else marks[-1]
    marks = [mark for mark in marks if low <= mark <= high]
    return Scale(marks, lambda value: start + (end - start) * (value - low) / (high - low))


_GAP = 0.03  # of what is drawn, for each skip


def _skipping(skips: Sequence[Skip], least: float, most: float, start: float, end: float) -> Scale:
    """An axis from least to most on which a skip is a gap; its marks stand on what is drawn."""
    drawn = most - least - sum(skip.end - skip.start for skip in skips)

    def kept(value: float) -> float:
        for start_of, end_of, _ in reversed(skips):
            inside = min(max((value - start_of) / (end_of - start_of), 0.0), 1.0)
            value += inside * (_GAP * drawn - (end_of - start_of))
        return value

    marks = ticks(0.0, drawn)
    step = marks[1] - marks[0]
    edges = [least, *(edge for skip in skips for edge in skip[:2]), most]
    found = [
        round(number * step, 9)
        for first, last in zip(edges[::2], edges[1::2])
        for number in range(math.ceil(first / step - 1e-9), math.floor(last / step + 1e-9) + 1)
    ]
    low, high = kept(least), kept(most)
    return Scale(found, lambda value: start + (end - start) * (kept(value) - low) / (high - low))
