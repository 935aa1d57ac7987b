"""Tables: one value for a terminal, Markdown, CSV, JSON and pages; and columns of plain text.

A `Table` has rows of values and columns that say how a value is shown and where it comes from.
"""

from __future__ import annotations

import json
import math
import textwrap
from numbers import Real
from typing import Any, Collection, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

# Where the numbers of a column come from.
HARDWARE, PROFILE, HOST, PAPER = "hardware", "profile", "host", "paper"
MODEL, FITTED_MODEL = "predicted", "fitted"  # the analytic model: a prediction, or a value that it was fitted to
COUNTED = "counted"  # by the model, from the graph and the machine alone
COMPUTED = "computed"  # arithmetic on a histogram or on other columns
PUBLISHED = "published"  # measured by others, not in the paper
CONFIGURED = "config"
_SOURCES = {
    HARDWARE: "cycles counted by the hardware",
    PROFILE: "cycles of a profile",
    MODEL: "predicted by the cycle model",
    FITTED_MODEL: "fitted: the cycle model was made to meet the paper at depth 2",
    HOST: "seconds of this host",
    COUNTED: "counted exactly, no fitted or uncertain parameter enters",
    PAPER: "the paper",
    COMPUTED: "computed",
    PUBLISHED: "measured and published by others",
}
WIDTH = 110  # characters of a line in print
_LONGEST = 40  # characters of a cell of words, where the table is wider than a line


class Cell(NamedTuple):
    """A value that is shown in words of its own."""

    value: Any
    text: str


class Column(NamedTuple):
    """source: one of the above, or none. form: format specification; none: words, or numbers of any kind.

    interval: the keys of the least and the most that the value may be; shown with it in one cell.
    scale: a value is divided by it where it is shown; the title says so.
    """

    key: str
    title: str
    source: str = ""
    form: str = ""
    interval: Tuple[str, ...] = ()
    scale: float = 1.0

    def shown(self, row: Mapping[str, Any]) -> str:
        """A cell: `1.1, 1.0 to 2.8` where the value has an interval, `1.1 exact` where the interval is the value."""
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
        words = self._number(float(value) if isinstance(value, float) else value)
        ends = [end for end in (row.get(key) for key in self.interval) if end is not None]
        if len(ends) == 2:
            low, high = sorted(ends)
            exact = low == value == high
            words += " exact" if exact else f", {self._number(low)} to {self._number(high)}"
        return words

    def _number(self, value: Any) -> str:
        if not math.isfinite(value):
            return "not finite"
        form = self.form or (",.4g" if isinstance(value, float) else ",")
        value = value / self.scale if self.scale != 1.0 else value
        # No exponents: people read whole numbers.
        return f"{value:,.0f}" if form.endswith("g") and abs(value) >= 1e4 else format(value, form)


class Part(NamedTuple):
    """A group of columns, shown as a table of its own without its empty rows."""

    title: str
    keys: Tuple[str, ...]


class Table(NamedTuple):
    """name: unique on a page. rows: by the columns' keys; a missing value is shown as `-`.

    parts: the columns are shown in these groups; none: all together.
    """

    name: str
    title: str
    columns: Tuple[Column, ...]
    rows: Sequence[Mapping[str, Any]]
    notes: Tuple[str, ...] = ()
    parts: Tuple[Part, ...] = ()

    def printed(self) -> List[Table]:
        """One table for each part; the notes stand below the last."""
        if not self.parts:
            return [self]
        found = []
        for number, part in enumerate(self.parts):
            columns = tuple(column for column in self.columns if column.key in part.keys)
            own = [column.key for column in columns if column.source not in (CONFIGURED, COMPUTED)]
            rows = [row for row in self.rows if any(row.get(key) is not None for key in own)]
            notes = self.notes if number + 1 == len(self.parts) else ()
            found.append(Table(f"{self.name}_{number + 1}", part.title, columns, rows, notes))
        return found

    def _every_column(self) -> List[Column]:
        """The columns, and beside each those of its interval."""
        found = []
        for column in self.columns:
            found.append(column._replace(interval=()))
            for key, words in zip(column.interval, ("at least", "at most")):
                found.append(Column(key, f"{column.title}, {words}", column.source, column.form))
        return found

    def source_marks(self) -> Dict[str, str]:
        """A letter for each source of the columns; an empty one where all have the same. Labels have no source."""
        sources = list(dict.fromkeys(column.source for column in self.columns if column.source in _SOURCES))
        return {source: chr(ord("a") + number) if len(sources) > 1 else "" for number, source in enumerate(sources)}

    def source_note(self) -> Tuple[str, ...]:
        marks = self.source_marks()
        words = "; ".join(
            f"[{mark}] {_SOURCES[source]}" if mark else _SOURCES[source] for source, mark in marks.items()
        )
        return (f"Source: {words}.",) if words else ()

    def to_json(self) -> Dict[str, Any]:
        columns = self._every_column()
        return {
            "name": self.name,
            "title": self.title,
            "notes": list(self.notes),
            "columns": [{"key": each.key, "title": each.title, "source": each.source} for each in columns],
            "rows": [{column.key: plain(row.get(column.key)) for column in columns} for row in self.rows],
        }

    def text(self, said: Optional[Set[str]] = None) -> str:
        """For a terminal: title, rows with the sources of their columns marked, notes; no line is wider than `WIDTH`.

        said: notes that stand above already, and are left out; those of this table are added.
        """
        said = set() if said is None else said
        lines = [self.title, "-" * len(self.title)]
        for number, part in enumerate(self.printed()):
            lines += ([""] if number else []) + ([part.title] if self.parts else [])
            lines += _lines_of(part)
            for note in (*part.source_note(), *(note for note in part.notes if note not in said)):
                lines += wrapped(note, "  ")
        said.update(self.notes)
        return "\n".join(lines)

    def markdown(self) -> str:
        """One Markdown table for each part, and the notes; without the title."""
        found = []
        for part in self.printed():
            found += [f"{part.title}:\n"] if self.parts else []
            heads = [column.title or column.key for column in part.columns]
            found.append(markdown(heads, [[column.shown(row) for column in part.columns] for row in part.rows]))
            found += [f"{note}\n" for note in (*part.source_note(), *part.notes)]
        return "\n".join(found)


def plain(value: Any) -> Any:
    """A value as JSON has it: a cell's value, null for what is not finite, lists for tuples."""
    if isinstance(value, Cell):
        return plain(value.value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def facts_table(name: str, title: str, facts: Mapping[str, Any], rows: Sequence[Tuple[str, str, str, str]]) -> Table:
    """Return a table of facts.

    Args:
        name: name of the table.
        title: title of the table.
        facts: values by key.
        rows: (key, words, format specification, note) of each fact that is shown.
    """
    columns = (Column("what", "what"), Column("value", "value"), Column("about", "note"))
    cells = []
    for key, words, form, note in rows:
        value = Cell(facts[key], format(facts[key], form))
        cells.append({"what": Cell(key, words), "value": value, "about": note})
    return Table(name, title, columns, cells)


# ---- values with an interval -----------------------------------------------------------------------------------------


def spread(key: str, interval: Sequence[float], scale: float = 1.0) -> Dict[str, float]:
    """A value and its interval (least, value, most), under their keys."""
    return {name: scale * end for name, end in zip((f"{key}_lower", key, f"{key}_upper"), interval)}


def with_interval(key: str, title: str, source: str, form: str, scale: float = 1.0) -> Column:
    """A column of `spread` values."""
    return Column(key, title, source, form, (f"{key}_lower", f"{key}_upper"), scale)


def modelled(key: str, title: str, form: str, scale: float = 1.0) -> Column:
    """A column of the model's, with an interval."""
    return with_interval(key, title, MODEL, form, scale)


def percent(fraction: Optional[float]) -> Optional[float]:
    return None if fraction is None else 100.0 * fraction


# ---- lines of text ---------------------------------------------------------------------------------------------------


def wrapped(line: str, indent: str = "") -> List[str]:
    """Wraps a line at `WIDTH`; continuation lines keep its indentation."""
    words = line.lstrip(" ")
    indent += " " * (len(line) - len(words))
    return textwrap.wrap(words, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False)


_Cells = List[Tuple[Column, List[str]]]  # a column and its cells, the heading first


def _lines_of(table: Table) -> List[str]:
    """The rows; columns that do not fit into a line stand below, beside the labels again."""
    marks = table.source_marks()
    columns: _Cells = []
    for column in table.columns:
        mark = marks.get(column.source, "")
        cells = [column.title + (f"[{mark}]" if mark and column.title else "")]
        columns.append((column, cells + [column.shown(row) for row in table.rows]))

    def width(cells: Sequence[str]) -> int:
        return max(map(len, cells)) + 2

    if sum(width(cells) for _, cells in columns) - 2 > WIDTH:
        columns = _folded(columns)
    is_label = [not column.form and column.source in ("", CONFIGURED) for column, _ in columns]
    labels = columns[: is_label.index(False) if False in is_label else 0]
    blocks: List[_Cells] = [[]]
    room = WIDTH + 2
    for found in columns:
        if found not in labels and blocks[-1] and width(found[1]) > room:
            blocks.append(list(labels))
            room = WIDTH + 2 - sum(width(cells) for _, cells in labels)
        blocks[-1].append(found)
        room -= width(found[1])
    lines: List[str] = []
    for number, block in enumerate(blocks):
        left = [place for place, (column, _) in enumerate(block) if not column.form]
        lines += [""] if number else []
        lines += text_table(list(zip(*[cells for _, cells in block])), left=left)
    return lines


def _folded(columns: _Cells) -> _Cells:
    """With the long cells of words broken over several lines."""
    broken = [
        [textwrap.wrap(each, _LONGEST) or [""] if not column.form else [each] for each in cells]
        for column, cells in columns
    ]
    high = [max(map(len, row)) for row in zip(*broken)]
    return [
        (column, [line for lines, count in zip(cells, high) for line in lines + [""] * (count - len(lines))])
        for (column, _), cells in zip(columns, broken)
    ]


def _padded(
    rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,), widths: Optional[Sequence[int]] = None
) -> List[List[str]]:
    """The cells of a table, filled up with blanks so that the cells of a column have one width.

    rows: cells [rows][columns]. left: the numbers of the columns that stand flush left; the others stand flush right.
    widths: characters of each column at least; None: as the widest cell needs.
    """
    if not rows:
        return []
    least = [0] * len(rows[0]) if widths is None else widths
    wide = [max(width, *(len(row[column]) for row in rows)) for column, width in enumerate(least)]
    return [
        [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, wide))
        ]
        for row in rows
    ]


def text_table(
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[int] = (0,),
    widths: Optional[Sequence[int]] = None,
    between: str = "  ",
    indent: str = "",
) -> List[str]:
    """The lines of a table, without blanks at their ends; see `_padded`. A heading is a row like any other."""
    return [(indent + between.join(cells)).rstrip() for cells in _padded(rows, left=left, widths=widths)]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, columns padded so that it also reads as text; all but the first column flush right."""
    table = _padded([header, *rows])
    rule = ["-" * len(cell) if number == 0 else "-" * (len(cell) - 1) + ":" for number, cell in enumerate(table[0])]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in [table[0], rule, *table[1:]])


def account(title: str, rows: Sequence[Tuple[str, str, str]]) -> str:
    """An underlined title, and under it (what, how much, a note) for each quantity."""
    return "\n".join([title, "-" * len(title), *text_table(rows, left=(0, 2), indent="  ")])
