"""Tables as values: columns that say where their numbers come from, and the three forms they are written in."""
from __future__ import annotations

import csv
import io
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

# Where a number comes from. Every column of every table has one of these.
HARDWARE, PROFILE, MODEL, HOST, PAPER = "hardware", "profile", "model", "host", "paper"
COMPUTED = "computed"                     # arithmetic on a histogram or on other columns
PUBLISHED = "published"                   # measured by others, not in the paper
CONFIGURED = "config"
SOURCES = (HARDWARE, PROFILE, MODEL, HOST, PAPER, COMPUTED, PUBLISHED, CONFIGURED)


class Column(NamedTuple):
    key: str
    title: str
    source: str                           # one of SOURCES
    form: str = ""                        # format specification; text where empty


class Table(NamedTuple):
    name: str
    title: str
    columns: Tuple[Column, ...]
    rows: List[Dict[str, Any]]
    notes: Tuple[str, ...] = ()


def text(table: Table) -> str:
    """For a terminal: title, column titles, their sources, rows, notes."""
    cells = [[_cell(row.get(column.key), column.form) for column in table.columns] for row in table.rows]
    heads = [[column.title for column in table.columns], [f"({column.source})" for column in table.columns]]
    widths = [max(len(line[i]) for line in heads + cells) for i in range(len(table.columns))]
    left = [not column.form for column in table.columns]

    def line(parts: Sequence[str]) -> str:
        return "  ".join(part.ljust(width) if on_left else part.rjust(width)
                         for part, width, on_left in zip(parts, widths, left)).rstrip()

    lines = [table.title, "-" * len(table.title), line(heads[0]), line(heads[1])]
    lines += [line(row) for row in cells]
    return "\n".join(lines + [f"  {note}" for note in table.notes])


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, str) or not form:
        return str(value)
    return format(value, form)


def as_csv(tables: Sequence[Table]) -> str:
    """Every table under a line with its name; sources in the second line of each."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    for number, table in enumerate(tables):
        if number:
            writer.writerow([])
        writer.writerow([f"# {table.name}"])
        writer.writerow([column.key for column in table.columns])
        writer.writerow([column.source for column in table.columns])
        for row in table.rows:
            writer.writerow(["" if row.get(column.key) is None else row[column.key] for column in table.columns])
    return stream.getvalue()


def as_json(table: Table) -> Dict[str, Any]:
    return {"name": table.name, "title": table.title, "notes": list(table.notes),
            "columns": [{"key": c.key, "title": c.title, "source": c.source} for c in table.columns],
            "rows": [{column.key: row.get(column.key) for column in table.columns} for row in table.rows]}


def percent(fraction: Optional[float]) -> Optional[float]:
    return None if fraction is None else 100.0 * fraction
