"""The report as one HTML page: every table of it, its pictures above it."""

from __future__ import annotations

from typing import List, Sequence

from ipu_packed_bert.report.pictures import pictures
from pack_data.display.page import Page, Part, Section
from pack_data.display.table import Table


def page_of(title: str, lead: str, found: Sequence[Table], words: Sequence[str]) -> Page:
    """words: what is said of the model below the tables."""
    sections: List[Section] = []
    for number, table in enumerate(found, start=1):
        parts: List[Part] = list(pictures(table))
        for each in table.printed():
            before = f"{table.title.split(':')[0]}. {each.title}" if table.parts else f"{table.title}, in numbers"
            parts.append(each._replace(name=f"{each.name}-{number}", title=before))
        sections.append(Section(table.title, tuple(parts)))
    if words:
        sections.append(Section("About the model", tuple(words)))
    return Page(title, lead, tuple(sections))
