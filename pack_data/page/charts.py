"""Pictures as values: what is drawn, apart from how. `svg.py` draws them for a page."""

from __future__ import annotations

import re
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple, Union

Values = Tuple[Optional[float], ...]  # None: there is no value


class Skip(NamedTuple):
    """Numbers of an axis that are not drawn, but for a gap."""

    start: float
    end: float
    about: str  # what is left out


class Axis(NamedTuple):
    """What an axis is of, with its unit.

    log: base of a logarithmic axis, 0 for a linear one. least, most: where it begins and ends; None: as the values
    need, with 0. The axis of bars holds 0 whatever these say. skips: what a linear axis of `Tiles` leaves out,
    ascending.
    """

    label: str
    log: int = 0
    least: Optional[float] = None
    most: Optional[float] = None
    skips: Tuple[Skip, ...] = ()


class Series(NamedTuple):
    """One value for each category.

    lower, upper: the interval of each value. hints: what is said of each value that is pointed at; none: its name
    and number. padding: the values are of empty slots or idle time, drawn without a colour.
    """

    name: str
    values: Values
    lower: Values = ()
    upper: Values = ()
    hints: Tuple[str, ...] = ()
    padding: bool = False


class Bars(NamedTuple):
    """Bars of one or more series, from 0: beside each other, or stacked.

    across: the bars go to the right, each category on a line. edges: numbers that begin and end each bar, ascending,
    for bars without gaps over an axis of numbers. ends: a text at the end of each bar of a stack or a single series.
    """

    title: str
    categories: Tuple[str, ...]
    values: Axis
    series: Tuple[Series, ...]
    along: str = ""  # what the categories are
    stacked: bool = False
    across: bool = False
    edges: Tuple[float, ...] = ()
    ends: Tuple[str, ...] = ()
    notes: Tuple[str, ...] = ()


class Line(NamedTuple):
    """points: marks alone, without a line between them."""

    name: str
    x: Tuple[float, ...]
    y: Values
    points: bool = False
    hints: Tuple[str, ...] = ()


class Lines(NamedTuple):
    """levels: (name, y) of lines across the whole picture."""

    title: str
    x: Axis
    y: Axis
    lines: Tuple[Line, ...]
    levels: Tuple[Tuple[str, float], ...] = ()
    notes: Tuple[str, ...] = ()


class HeatMap(NamedTuple):
    """values: [rows][columns]; the larger a value, the darker its cell. form: format specification of the cells."""

    title: str
    rows: Tuple[str, ...]
    columns: Tuple[str, ...]
    values: Tuple[Values, ...]
    form: str
    along: str  # what the columns are
    down: str  # what the rows are
    notes: Tuple[str, ...] = ()

    def shades(self) -> List[Values]:
        """How dark each cell is, from 0 to 1: the square root shows small differences between small values."""
        most = max([value for row in self.values for value in row if value is not None and value > 0], default=1.0)
        return [tuple(None if each is None else (max(0.0, each) / most) ** 0.5 for each in row) for row in self.values]


class Tile(NamedTuple):
    """A rectangle from (left, top) to (right, bottom), of the series with this number."""

    left: float
    right: float
    top: float
    bottom: float
    series: int
    hint: str


class Tiles(NamedTuple):
    """Rectangles on two axes, y from the top down.

    rows: names of the rows [0, 1), [1, 2), ... instead of numbers. padding: numbers of series drawn without a colour.
    square: as high as wide.
    """

    title: str
    x: Axis
    y: Axis
    series: Tuple[str, ...]
    tiles: Tuple[Tile, ...]
    rows: Tuple[str, ...] = ()
    padding: Tuple[int, ...] = ()
    square: bool = False
    notes: Tuple[str, ...] = ()


Picture = Union[Bars, Lines, HeatMap, Tiles]


def names_of(pictures: Sequence[Picture]) -> List[str]:
    """The titles as parts of files' names, no two alike."""
    found: List[str] = []
    for picture in pictures:
        name = re.sub("[^a-z0-9]+", "_", picture.title.lower()).strip("_")[:60]
        number, free = len(found), name
        while free in found:
            number += 1
            free = f"{name}_{number}"
        found.append(free)
    return found


def hint(series: Series, place: int, category: str, unit: str) -> str:
    """What is said of a value that is pointed at."""
    if series.hints:
        return series.hints[place]
    value = series.values[place]
    interval = ""
    if series.lower and series.lower[place] is not None and series.upper[place] is not None:
        interval = f" ({series.lower[place]:,.6g} to {series.upper[place]:,.6g})"
    return f"{category}, {series.name}: {0.0 if value is None else value:,.6g}{interval}; {unit}"


def bar_limits(bars: Bars) -> Tuple[float, float]:
    """The least and the largest value that the axis of the bars must hold, 0 among them."""
    found: List[float] = [0.0]
    if bars.stacked:
        for place in range(len(bars.categories)):
            each = [series.values[place] or 0.0 for series in bars.series]
            found += [sum(value for value in each if value > 0), sum(value for value in each if value < 0)]
    else:
        for series in bars.series:
            found += [value for value in (*series.values, *series.lower, *series.upper) if value is not None]
    found += [limit for limit in (bars.values.least, bars.values.most) if limit is not None]
    return min(found), max(found)


def thinned(x: Sequence[float], y: Sequence[Any], most: int = 400) -> List[int]:
    """Places of at most about `most` points that look like all of them: of each range the lowest and the highest."""
    count = len(x)
    if count <= most:
        return list(range(count))
    kept = {0, count - 1}
    ranges = max(1, most // 2)
    for number in range(ranges):
        places = [
            place for place in range(number * count // ranges, (number + 1) * count // ranges) if y[place] is not None
        ]
        if places:
            kept |= {min(places, key=lambda place: y[place]), max(places, key=lambda place: y[place])}
    return sorted(kept)
