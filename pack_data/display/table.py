"""Tables: one value for a terminal, JSON and pages; and columns of plain text.

A `Table` has rows of values, and columns with the format and the source of their values.
"""

from __future__ import annotations

import json
import math
import textwrap
from itertools import zip_longest
from numbers import Real
from typing import Any, Collection, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from pack_data.display import lines as text
from pack_data.display.lines import GAP, ShownColumn, table_lines, wrapped

# Where the numbers of a column come from.
HARDWARE = "hardware"
PROFILE = "profile"
PAPER = "paper"
MODEL = "predicted"  # by the analytic model
FITTED_MODEL = "fitted"  # of the analytic model, which was fitted to this value
COMPUTED = "computed"  # arithmetic on a histogram or on other columns
PUBLISHED = "published"  # measured by others, not in the paper
CONFIGURED = "config"
_SOURCES = {
    HARDWARE: "cycles counted by the hardware",
    PROFILE: "cycles of a profile",
    MODEL: "predicted by the cycle model",
    FITTED_MODEL: "fitted: the cycle model was made to meet the paper at depth 2",
    PAPER: "the paper",
    COMPUTED: "computed",
    PUBLISHED: "measured and published by others",
}
WIDTH = 110  # characters of a printed line
_LETTERS = "abcdefghijkl"  # marks of sources
_MOST_LETTERS = 40  # of a line in a cell of words, if the table is wider than a line
_MOST_PLAIN = 1e4  # numbers from here on are shown without decimals, never with an exponent


class Cell(NamedTuple):
    """A value that is shown as a text of its own."""

    value: Any
    text: str


class Column(NamedTuple):
    """A column of a table.

    key: of its values in the rows. source: one of the constants above, or none.
    form: format specification of the numbers; empty for words, or for numbers of any kind.
    interval: keys of the least and the most that the value may be; they are shown with it in one cell.
    scale: a value is divided by it when it is shown; the title names the unit.
    """

    key: str
    title: str
    source: str = ""
    form: str = ""
    interval: Tuple[str, ...] = ()
    scale: float = 1.0

    def shown(self, row: Mapping[str, Any]) -> str:
        """Return the text of a cell.

        With an interval it is `1.1, 1.0 to 2.8`, or `1.1 exact` if the interval is the value.
        """
        value = row.get(self.key)
        if isinstance(value, Cell):
            return value.text
        if value is None:
            return "-"
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, str):
            return value
        if not isinstance(value, Real):
            return json.dumps(plain(value))

        text = self._number(value)
        ends = [row[key] for key in self.interval if row.get(key) is not None]
        if len(ends) < 2:
            return text
        low, high = sorted(ends)
        if low == value == high:
            return f"{text} exact"
        return f"{text}, {self._number(low)} to {self._number(high)}"

    def _number(self, value: Any) -> str:
        if not math.isfinite(value):
            return "not finite"
        form = self.form or (",.4g" if isinstance(value, float) else ",")
        if self.scale != 1.0:
            value /= self.scale
        if form.endswith("g") and abs(value) >= _MOST_PLAIN:
            form = ",.0f"
        return format(value, form)


class Part(NamedTuple):
    """A group of columns, shown as a table of its own without its empty rows."""

    title: str
    keys: Tuple[str, ...]


class Table(NamedTuple):
    """A table.

    name: unique on a page. rows: values by the columns' keys; a missing value is shown as `-`. notes: sentences below.
    parts: groups of columns that are shown one below the other; empty: all columns together.
    """

    name: str
    title: str
    columns: Tuple[Column, ...]
    rows: Sequence[Mapping[str, Any]]
    notes: Tuple[str, ...] = ()
    parts: Tuple[Part, ...] = ()

    def printed(self) -> List[Table]:
        """Return one table for each part, the last one with the notes."""
        if not self.parts:
            return [self]
        tables = []
        for number, part in enumerate(self.parts, start=1):
            columns = tuple(column for column in self.columns if column.key in part.keys)
            measured = [
                column.key for column in columns if column.source not in (CONFIGURED, COMPUTED)
            ]
            rows = [row for row in self.rows if any(row.get(key) is not None for key in measured)]
            tables.append(Table(f"{self.name}_{number}", part.title, columns, rows))
        tables[-1] = tables[-1]._replace(notes=self.notes)
        return tables

    def source_marks(self) -> Dict[str, str]:
        """Return a letter for each source of the columns, empty if all have one source. Labels have no source."""
        sources = dict.fromkeys(
            column.source for column in self.columns if column.source in _SOURCES
        )
        if len(sources) == 1:
            return dict.fromkeys(sources, "")
        return dict(zip(sources, _LETTERS))

    def source_note(self) -> Tuple[str, ...]:
        """Return the sentence that explains the marks; none without a source."""
        sources = []
        for source, mark in self.source_marks().items():
            sources.append(f"[{mark}] {_SOURCES[source]}" if mark else _SOURCES[source])
        return (f"Source: {'; '.join(sources)}.",) if sources else ()

    def to_json(self) -> Dict[str, Any]:
        """Return the whole table as plain values."""
        columns = self._every_column()
        return {
            "name": self.name,
            "title": self.title,
            "notes": list(self.notes),
            "columns": [
                {"key": column.key, "title": column.title, "source": column.source}
                for column in columns
            ],
            "rows": [
                {column.key: plain(row.get(column.key)) for column in columns} for row in self.rows
            ],
        }

    def _every_column(self) -> List[Column]:
        """Return the columns, each followed by those of its interval."""
        columns = []
        for column in self.columns:
            columns.append(column._replace(interval=()))
            for key, end in zip(column.interval, ("at least", "at most")):
                columns.append(Column(key, f"{column.title}, {end}", column.source, column.form))
        return columns

    def text(self, said: Optional[Set[str]] = None) -> str:
        """Return the table for a terminal: title, rows and notes, in lines of at most `WIDTH` characters.

        said: notes that are printed already and are left out; those of this table are added.
        """
        said = set() if said is None else said
        lines = [self.title, "-" * len(self.title)]
        for number, table in enumerate(self.printed()):
            if number:
                lines.append("")
            if self.parts:
                lines.append(table.title)
            lines += _lines_of(table)
            notes = [note for note in table.notes if note not in said]
            for note in (*table.source_note(), *notes):
                lines += wrapped(note, "  ", WIDTH)
        said.update(self.notes)
        return "\n".join(lines)


def plain(value: Any) -> Any:
    """Return a value as JSON has it; of a cell, its value."""
    return text.plain(value.value if isinstance(value, Cell) else value)


# ---- lines of text ---------------------------------------------------------------------------------------------------


def _lines_of(table: Table) -> List[str]:
    """Return the rows; columns that do not fit into a line stand below, after the labels again."""
    marks = table.source_marks()
    columns = []
    for column in table.columns:
        mark = marks.get(column.source)
        columns.append(
            ShownColumn(
                column.key,
                f"{column.title}[{mark}]" if mark and column.title else column.title,
                [column.shown(row) for row in table.rows],
                is_number=bool(column.form),
                is_label=not column.form and column.source in ("", CONFIGURED),
            )
        )
    widths = [max(map(len, (column.heading, *column.cells))) for column in columns]
    if sum(widths) + len(GAP) * (len(widths) - 1) > WIDTH:
        columns = _folded(columns)
    return table_lines(columns, WIDTH)


def _folded(columns: Sequence[ShownColumn]) -> List[ShownColumn]:
    """Break the long cells of words over several lines."""
    rows: List[Tuple[str, ...]] = []
    for cells in zip(*(column.cells for column in columns)):
        broken = []
        for column, cell in zip(columns, cells):
            lines = [cell] if column.is_number else textwrap.wrap(cell, _MOST_LETTERS) or [""]
            broken.append(lines)
        rows += zip_longest(*broken, fillvalue="")
    return [column._replace(cells=cells) for column, cells in zip(columns, zip(*rows))]


def text_table(
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[int] = (0,),
    widths: Optional[Sequence[int]] = None,
    indent: str = "",
) -> List[str]:
    """Return the lines of a table, without blanks at their ends; a heading is a row like any other.

    rows: cells [rows][columns]. left: the numbers of the columns that stand flush left; the others stand flush right.
    widths: characters of each column at least; None: as the widest cell needs. indent: stands before each line.
    """
    return [(indent + GAP.join(cells)).rstrip() for cells in _padded(rows, left, widths)]


def _padded(
    rows: Sequence[Sequence[str]],
    left: Collection[int] = (0,),
    least: Optional[Sequence[int]] = None,
) -> List[List[str]]:
    """Fill up the cells with blanks so that the cells of a column have one width."""
    if not rows:
        return []
    padded_columns = []
    for number, cells in enumerate(zip(*rows)):
        width = max(map(len, cells))
        if least is not None:
            width = max(width, least[number])
        pad = str.ljust if number in left else str.rjust
        padded_columns.append([pad(cell, width) for cell in cells])
    return [list(row) for row in zip(*padded_columns)]
