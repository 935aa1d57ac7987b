"""The one writer of what experiments show: a page of tables below docs/evidence/, and pictures."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Callable, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from evidence.runner import Cell, read_run
from evidence.statistics import Interval
from pack_data.display.picture import Axis, Bars, Line, Lines, Picture, Series, write
from pack_data.display.table import markdown

# ---- numbers in words ------------------------------------------------------------------------------------------------


def spread(values: Union[Sequence[float], np.ndarray], digits: int = 3) -> str:
    """Mean and standard deviation over the seeds: `5.123 ± 0.012`; a single value stands alone."""
    mean = f"{float(np.mean(values)):.{digits}f}"
    return f"{mean} ± {float(np.std(values, ddof=1)):.{digits}f}" if len(values) > 1 else mean


def small(value: float) -> str:
    """A number that may be very small: `3.1e-12`."""
    return "0" if value == 0 or math.isnan(value) else f"{value:.1e}"


# ---- what an experiment declares -------------------------------------------------------------------------------------


class Table(NamedTuple):
    """columns: heading, and the cell of a row, empty for None. rows: what the columns are asked of.

    last: cells of lines below them; columns that they lack are empty.
    """

    columns: Sequence[Tuple[str, Callable[[Any], Optional[str]]]]
    rows: Sequence[Any]
    last: Sequence[Sequence[str]] = ()

    def markdown(self) -> str:
        lines = [[cell(row) or "" for _, cell in self.columns] for row in self.rows]
        lines += [[*each, *[""] * (len(self.columns) - len(each))] for each in self.last]
        return markdown([heading for heading, _ in self.columns], lines)


class Shown(ABC):
    """What the finished cells of a run's folder say, whichever of them there are."""

    uncounted: Sequence[int] = ()  # seeds of a pilot

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.settings, self.facts, self.cells = read_run(self.folder)

    @abstractmethod
    def parts(self) -> Iterable[Union[str, Table]]:
        """Of the page: tables, what they say, where the numbers come from."""

    @abstractmethod
    def pictures(self) -> Mapping[str, Sequence[Picture]]:
        """Kind -> the pictures of one file, below each other; no kind without a finished cell."""

    # ---- numbers

    def seeds(self, variant: str) -> List[int]:
        """The finished seeds of a variant that count."""
        return sorted(cell.seed for cell in self.cells if cell.variant == variant and cell.seed not in self.uncounted)

    def common(self, first: str, second: str) -> List[int]:
        """The seeds that both variants have."""
        return [seed for seed in self.seeds(first) if seed in self.seeds(second)]

    def columns(self, variant: str, value: str) -> np.ndarray:
        """One value of a variant's rows: [seeds, points]."""
        return np.array([[row[value] for row in self.cells[Cell(variant, seed)]] for seed in self.seeds(variant)])

    # ---- written

    def text(self) -> str:
        """Markdown."""
        written = [part if isinstance(part, str) else part.markdown() for part in self.parts()]
        return "\n".join(written).rstrip("\n") + "\n"

    def draw(self, folder: Path, stem: str = "") -> List[Path]:
        """Pictures, folder/{stem}KIND.png."""
        paths = []
        for kind, pictures in self.pictures().items():
            paths.append(Path(folder) / f"{stem}{kind}.png")
            write(pictures, paths[-1])
        return paths


# ---- values of pictures ----------------------------------------------------------------------------------------------


def curve(name: str, x: np.ndarray, y: np.ndarray) -> Line:
    """[seeds, points] each: a line through the means, and a band from the lowest to the highest seed."""
    middle, low, high = (tuple(each.tolist()) for each in (y.mean(axis=0), y.min(axis=0), y.max(axis=0)))
    return Line(name, tuple(x.mean(axis=0).tolist()), middle, lower=low, upper=high)


def curves(
    title: str, x: str, y: str, lines: Sequence[Line], levels: Sequence[Tuple[str, float]] = (), *, log: int = 0
) -> Lines:
    """Curves whose axis begins below the least value. log: base of the y axis."""
    found = [value for line in lines for value in line.lower if value is not None] + [level for _, level in levels]
    room = 0.05 * (max([*found, *(value or 0.0 for line in lines for value in line.upper)]) - min(found))
    return Lines(title, Axis(x), Axis(y, log=log, least=min(found) - room), tuple(lines), tuple(levels))


def bars(
    title: str,
    unit: str,
    series: Mapping[str, Mapping[str, Optional[Interval]]],
    levels: Sequence[Tuple[str, float]] = (),
    *,
    form: str = "",
) -> Bars:
    """A bar with its interval for each name of each series, to the right. form: of the mean of a single series."""
    names = tuple(dict.fromkeys(name for values in series.values() for name in values))
    drawn, ends = [], []
    for label, values in series.items():
        found = [values.get(name) for name in names]
        middle, low, high = (tuple(each and float(each[end]) for each in found) for end in range(3))
        drawn.append(Series(label, middle, low, high))
        ends = [format(each.mean, form) if each else "" for each in found]
    return Bars(
        title, names, Axis(unit), tuple(drawn), across=True, ends=tuple(ends) if form else (), levels=tuple(levels)
    )  # fmt: skip
