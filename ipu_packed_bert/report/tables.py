"""Tables whose columns name the source of their numbers, written as text, CSV or JSON."""

from __future__ import annotations

import csv
import io
import textwrap
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from ipu_packed_bert.cycles.uncertainty import Interval
from pack_data.page.charts import Picture
from pack_data.tables import text_table

# Where the numbers of a column come from.
HARDWARE, PROFILE, HOST, PAPER = "hardware", "profile", "host", "paper"
# The analytic model: what it says, and where it was made to say so.
MODEL, FITTED_MODEL = "predicted", "fitted"
COUNTED = "counted"  # by the model, from the graph and the machine alone
COMPUTED = "computed"  # arithmetic on a histogram or on other columns
PUBLISHED = "published"  # measured by others, not in the paper
CONFIGURED = "config"


class ReportColumn(NamedTuple):
    """interval: the keys of what the value may be at least and at most; printed with it in one cell.

    scale: what the value is divided by in print; the title says so.
    """

    key: str
    title: str
    source: str  # one of the above
    form: str = ""  # format specification; text where empty
    interval: Tuple[str, ...] = ()
    scale: float = 1.0


class Part(NamedTuple):
    """Columns that people read together: a table of its own in print, with the rows that have something in it."""

    title: str
    keys: Tuple[str, ...]


class Table(NamedTuple):
    """parts: how the columns are divided in print; none: all together. drawn: pictures of more than the rows hold."""

    name: str
    title: str
    columns: Tuple[ReportColumn, ...]
    rows: List[Dict[str, Any]]
    notes: Tuple[str, ...] = ()
    parts: Tuple[Part, ...] = ()
    drawn: Tuple[Picture, ...] = ()


WIDTH = 110  # characters of a line in print
_LONGEST = 40  # characters of a cell of words, where the table is wider than a line
SOURCES = {
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


def printed(table: Table) -> List[Table]:
    """The tables that a table is in print: one for each part."""
    if not table.parts:
        return [table]
    found = []
    for number, part in enumerate(table.parts):
        columns = tuple(column for column in table.columns if column.key in part.keys)
        own = [column.key for column in columns if column.source not in (CONFIGURED, COMPUTED)]
        rows = [row for row in table.rows if any(row.get(key) is not None for key in own)]
        notes = table.notes if number + 1 == len(table.parts) else ()
        found.append(Table(f"{table.name}_{number + 1}", part.title, columns, rows, notes))
    return found


def text(table: Table, said: Optional[Set[str]] = None) -> str:
    """For a terminal: title, rows with the sources of their columns marked, notes; no line is wider than `WIDTH`.

    said: notes that stand above already, and are left out; those of this table are added.
    """
    said = set() if said is None else said
    lines = [table.title, "-" * len(table.title)]
    for number, each in enumerate(printed(table)):
        lines += ([""] if number else []) + ([each.title] if table.parts else [])
        lines += _rows(each)
        marks = source_marks(each)
        sources = "; ".join(
            f"[{mark}] {SOURCES[source]}" if mark else SOURCES[source] for source, mark in marks.items()
        )
        for note in ([f"Source: {sources}."] if sources else []) + [note for note in each.notes if note not in said]:
            lines += wrapped(note, "  ")
    said.update(table.notes)
    return "\n".join(lines)


def wrapped(line: str, indent: str = "") -> List[str]:
    """The line in lines of at most `WIDTH` columns, each as far to the right as the line itself and the indent."""
    words = line.lstrip(" ")
    indent += " " * (len(line) - len(words))
    return textwrap.wrap(words, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False)


def source_marks(table: Table) -> Dict[str, str]:
    """A letter for each source of the columns; an empty one where all have the same. Labels have no source."""
    sources = list(dict.fromkeys(column.source for column in table.columns if column.source in SOURCES))
    return {source: chr(ord("a") + number) if len(sources) > 1 else "" for number, source in enumerate(sources)}


def _rows(table: Table) -> List[str]:
    """The lines of the columns; those for which a line has no room stand below, beside the labels once more."""
    marks = source_marks(table)
    columns = []
    for column in table.columns:
        mark = marks.get(column.source, "")
        cells = [column.title + (f"[{mark}]" if mark and column.title else "")]
        columns.append((column, cells + [cell(row, column) for row in table.rows]))

    def width(cells: Sequence[str]) -> int:
        return max(map(len, cells)) + 2

    if sum(width(cells) for _, cells in columns) - 2 > WIDTH:
        columns = _folded(columns)
    count = next((n for n, (column, _) in enumerate(columns) if column.source != CONFIGURED or column.form), 0)
    labels = columns[:count]
    blocks: List[List[Tuple[ReportColumn, List[str]]]] = [[]]
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


def _folded(
    columns: Sequence[Tuple[ReportColumn, List[str]]],
) -> List[Tuple[ReportColumn, List[str]]]:
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


def cell(row: Mapping[str, Any], column: ReportColumn) -> str:
    """What is printed of a value: `1.1, 1.0 to 2.8` where it has an interval, `1.1 exact` where that is the value."""
    value = row.get(column.key)
    if value is None:
        return "-"
    if isinstance(value, str) or not column.form:
        return str(value)
    words = _number(value, column)
    ends = [end for end in (row.get(key) for key in column.interval) if end is not None]
    if len(ends) == 2:
        low, high = sorted(ends)
        exact = low == value == high
        words += " exact" if exact else f", {_number(low, column)} to {_number(high, column)}"
    return words


def _number(value: float, column: ReportColumn) -> str:
    value = value / column.scale if column.scale != 1.0 else value
    # No exponents: people read whole numbers.
    return f"{value:,.0f}" if column.form.endswith("g") and abs(value) >= 1e4 else format(value, column.form)


def every_column(table: Table) -> List[ReportColumn]:
    """The columns, and beside each those of its interval."""
    found = []
    for column in table.columns:
        found.append(column._replace(interval=()))
        for key, words in zip(column.interval, ("at least", "at most")):
            found.append(ReportColumn(key, f"{column.title}, {words}", column.source, column.form))
    return found


def as_csv(tables: Sequence[Table]) -> str:
    """Every table under a line with its name; sources in the second line of each."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    for number, table in enumerate(tables):
        columns = every_column(table)
        if number:
            writer.writerow([])
        writer.writerow([f"# {table.name}"])
        writer.writerow([column.key for column in columns])
        writer.writerow([column.source for column in columns])
        for row in table.rows:
            writer.writerow(["" if row.get(column.key) is None else row[column.key] for column in columns])
    return stream.getvalue()


def as_json(table: Table) -> Dict[str, Any]:
    columns = every_column(table)
    return {
        "name": table.name,
        "title": table.title,
        "notes": list(table.notes),
        "columns": [{"key": c.key, "title": c.title, "source": c.source} for c in columns],
        "rows": [{column.key: row.get(column.key) for column in columns} for row in table.rows],
    }


def ends_of(key: str) -> Tuple[str, str]:
    """The keys of a value's interval."""
    return f"{key}_lower", f"{key}_upper"


def spread(key: str, interval: Interval, scale: float = 1.0) -> Dict[str, float]:
    """A value and its interval, under their keys."""
    return {name: scale * end for name, end in zip((f"{key}_lower", key, f"{key}_upper"), interval)}


def modelled(key: str, title: str, form: str, scale: float = 1.0) -> ReportColumn:
    """A column of the model's, with an interval."""
    return ReportColumn(key, title, MODEL, form, ends_of(key), scale)


def percent(fraction: Optional[float]) -> Optional[float]:
    return None if fraction is None else 100.0 * fraction
