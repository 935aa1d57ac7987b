"""Tables whose columns name the source of their numbers, written as text, CSV or JSON."""

from __future__ import annotations

import csv
import io
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from pack_data.tables import text_table

# Where the numbers of a column come from.
HARDWARE, PROFILE, MODEL, HOST, PAPER = "hardware", "profile", "model", "host", "paper"
COMPUTED = "computed"  # arithmetic on a histogram or on other columns
PUBLISHED = "published"  # measured by others, not in the paper
CONFIGURED = "config"


class ReportColumn(NamedTuple):
    key: str
    title: str
    source: str  # one of the above
    form: str = ""  # format specification; text where empty


class Table(NamedTuple):
    name: str
    title: str
    columns: Tuple[ReportColumn, ...]
    rows: List[Dict[str, Any]]
    notes: Tuple[str, ...] = ()


def text(table: Table) -> str:
    """For a terminal: title, column titles, their sources, rows, notes."""
    heads = [[column.title for column in table.columns], [f"({column.source})" for column in table.columns]]
    cells = [[_cell(row.get(column.key), column.form) for column in table.columns] for row in table.rows]
    left = [number for number, column in enumerate(table.columns) if not column.form]
    lines = [table.title, "-" * len(table.title), *text_table(heads + cells, left=left)]
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
    return {
        "name": table.name,
        "title": table.title,
        "notes": list(table.notes),
        "columns": [{"key": c.key, "title": c.title, "source": c.source} for c in table.columns],
        "rows": [{column.key: row.get(column.key) for column in table.columns} for row in table.rows],
    }


def percent(fraction: Optional[float]) -> Optional[float]:
    return None if fraction is None else 100.0 * fraction
