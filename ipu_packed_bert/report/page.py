"""The report as one HTML page: every table of it, its pictures above it."""

from __future__ import annotations

from typing import Any, List, Mapping, Sequence

from ipu_packed_bert.report import tables
from ipu_packed_bert.report.pictures import pictures
from ipu_packed_bert.report.tables import CONFIGURED, SOURCES
from pack_data.page.document import Cell, Column, Page, Part, Section, Table, Words


def page_of(title: str, lead: str, found: Sequence[tables.Table], words: Sequence[str]) -> Page:
    """words: what is said of the model below the tables."""
    sections: List[Section] = []
    for number, table in enumerate(found, start=1):
        parts: List[Part] = [picture._replace(notes=()) for picture in pictures(table)]  # the tables have them
        for each in tables.printed(table):
            parts.append(_table(each, number, table))
        sections.append(Section(table.title, tuple(parts)))
    if words:
        sections.append(Section("About the model", tuple(map(Words, words))))
    return Page(title, lead, tuple(sections))


def _table(table: tables.Table, number: int, whole: tables.Table) -> Table:
    """Its cells show what the text prints; each number of an interval is in its cell's value."""
    columns = tuple(
        Column(column.key, column.title or "mark", column.form, SOURCES.get(column.source, ""))
        for column in table.columns
    )
    rows = [{column.key: _cell(row, column) for column in table.columns} for row in table.rows]
    title = f"{whole.title}, in numbers" if table is whole else f"{whole.title.split(':')[0]}. {table.title}"
    return Table(f"{table.name}-{number}", title, columns, rows, table.notes)


def _cell(row: Mapping[str, Any], column: tables.ReportColumn) -> Any:
    value = row.get(column.key)
    if column.source == CONFIGURED and not column.form:
        return value
    return Cell(value, tables.cell(row, column))
