"""The writer of the results of all experiments: a page of tables below docs/evidence/, and pictures."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import numpy as np

from evidence.runner import Cell, read_results
from evidence.statistics import Interval
from pack_data.display.picture import Axis, Bars, Line, Lines, Picture, Series, write

# ---- numbers in words ------------------------------------------------------------------------------------------------


def spread(values: Union[Sequence[float], np.ndarray], digits: int = 3) -> str:
    """Format mean and standard deviation over the seeds, `5.123 ± 0.012`; a single value stands alone."""
    mean = f"{np.mean(values):.{digits}f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {np.std(values, ddof=1):.{digits}f}"


def small(value: float) -> str:
    """Format a number that may be very small: `3.1e-12`."""
    if value == 0 or math.isnan(value):
        return "0"
    return f"{value:.1e}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, padded so that it also reads as text; all but the first column stand flush right."""
    columns = []
    for number, cells in enumerate(zip(header, *rows)):
        width = max(map(len, cells))
        pad = str.rjust if number else str.ljust
        heading, *padded = [pad(cell, width) for cell in cells]
        rule = "-" * (width - 1) + (":" if number else "-")
        columns.append([heading, rule, *padded])
    return "".join(f"| {' | '.join(row)} |\n" for row in zip(*columns))


# ---- the parts of an experiment's page -------------------------------------------------------------------------------


CellText = Callable[[Any], Optional[str]]  # row -> cell
TableColumn = Tuple[str, CellText]  # heading, and its cells


class Table(NamedTuple):
    """A table of a page.

    columns: the functions return None for an empty cell.  rows: the arguments of these functions.  last: cells of lines
    below them; missing columns are empty.
    """

    columns: Sequence[TableColumn]
    rows: Sequence[Any]
    last: Sequence[Sequence[str]] = ()

    def markdown(self) -> str:
        lines = []
        for row in self.rows:
            lines.append([cell(row) or "" for _, cell in self.columns])
        for cells in self.last:
            missing = len(self.columns) - len(cells)
            lines.append([*cells, *[""] * missing])
        return markdown([heading for heading, _ in self.columns], lines)


Part = Union[str, Table]
Pictures = Dict[str, Sequence[Picture]]  # kind -> the pictures of one file, below each other


class Shown(ABC):
    """The results in a run's file."""

    uncounted: Sequence[int] = ()  # seeds of a pilot

    def __init__(self, path: Path) -> None:
        self.settings, self.cells, self.facts = read_results(Path(path))

    @abstractmethod
    def parts(self) -> Iterable[Part]:
        """Return the parts of the page: tables, their meaning, the origin of the numbers."""

    def pictures(self) -> Pictures:
        """Draw the pictures; no kind without a finished cell."""
        return {}

    # ---- numbers

    def seeds(self, variant: str) -> List[int]:
        """Return the finished seeds of a variant, without those of a pilot."""
        finished = {cell.seed for cell in self.cells if cell.variant == variant}
        return sorted(finished.difference(self.uncounted))

    def common(self, first: str, second: str) -> List[int]:
        """Return the seeds that both variants have."""
        return sorted({*self.seeds(first)} & {*self.seeds(second)})

    def columns(
        self, variant: str, value: str, seeds: Optional[Sequence[int]] = None
    ) -> np.ndarray:
        """Return one value of a variant's rows, [seeds, points]; by default of all its seeds."""
        columns = []
        for seed in self.seeds(variant) if seeds is None else seeds:
            columns.append([row[value] for row in self.cells[Cell(variant, seed)]])
        return np.array(columns)

    # ---- output

    def text(self) -> str:
        """Return the page in Markdown."""
        written = []
        for part in self.parts():
            written.append(part if isinstance(part, str) else part.markdown())
        return "\n".join(written).rstrip("\n") + "\n"

    def draw(self, folder: Path, stem: str = "") -> List[Path]:
        """Write the pictures, folder/{stem}KIND.png."""
        paths = []
        for kind, pictures in self.pictures().items():
            path = Path(folder) / f"{stem}{kind}.png"
            write(pictures, path)
            paths.append(path)
        return paths


# ---- values of pictures ----------------------------------------------------------------------------------------------


def curve(name: str, x: np.ndarray, y: np.ndarray) -> Line:
    """Return a line through the means, and a band from the lowest to the highest seed; x, y: [seeds, points]."""
    return Line(
        name,
        _tuple(x.mean(axis=0)),
        _tuple(y.mean(axis=0)),
        lower=_tuple(y.min(axis=0)),
        upper=_tuple(y.max(axis=0)),
    )


def _tuple(values: np.ndarray) -> Tuple[float, ...]:
    return tuple(values.tolist())


def curves(
    title: str,
    x: str,
    y: str,
    lines: Sequence[Line],
    levels: Sequence[Tuple[str, float]] = (),
    *,
    log: int = 0,
) -> Lines:
    """Return curves whose axis begins below the least value; log: base of the y axis."""
    heights = [level for _, level in levels]
    for line in lines:
        heights += [value for value in line.lower if value is not None]
    least = min(heights)
    for line in lines:
        heights += [value or 0.0 for value in line.upper]
    margin = 0.05 * (max(heights) - least)
    y_axis = Axis(y, log=log, least=least - margin)
    return Lines(title, Axis(x), y_axis, tuple(lines), tuple(levels))


def bars(
    title: str,
    unit: str,
    series: Mapping[str, Mapping[str, Optional[Interval]]],
    levels: Sequence[Tuple[str, float]] = (),
) -> Bars:
    """Return a bar with its interval for each name of each series."""
    names = tuple(dict.fromkeys(name for values in series.values() for name in values))
    drawn = []
    for label, values in series.items():
        intervals = [values.get(name) for name in names]
        drawn.append(Series(label, _ends(intervals, 0), _ends(intervals, 1), _ends(intervals, 2)))
    return Bars(
        title,
        names,
        Axis(unit),
        tuple(drawn),
        across=True,
        levels=tuple(levels),
    )


def _ends(intervals: Sequence[Optional[Interval]], place: int) -> Tuple[Optional[float], ...]:
    """Return the mean (0), the lower (1) or the upper ends (2) of the intervals."""
    return tuple(interval and float(interval[place]) for interval in intervals)
