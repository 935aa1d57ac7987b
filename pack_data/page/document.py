"""A page: sections of words, tables and pictures, written as one HTML file that needs nothing else.

Every cell of a table holds its value as JSON beside what is shown of it, so that what reads the page gets back the
numbers that it was made from.
"""

from __future__ import annotations

import json
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple, Union

from pack_data.files import write_atomically
from pack_data.page import style
from pack_data.page.charts import Bars, HeatMap, Lines, Picture, Tiles, names_of
from pack_data.page.svg import draw
from pack_data.table import Table, plain


class Words(NamedTuple):
    """A paragraph."""

    text: str


Part = Union[Words, Table, Picture]


class Section(NamedTuple):
    title: str
    parts: Tuple[Part, ...]


class Page(NamedTuple):
    title: str
    lead: str
    sections: Tuple[Section, ...]

    def tables(self) -> List[Table]:
        return [part for section in self.sections for part in section.parts if isinstance(part, Table)]

    def pictures(self) -> List[Picture]:
        kinds = (Bars, Lines, HeatMap, Tiles)
        return [part for section in self.sections for part in section.parts if isinstance(part, kinds)]

    def to_json(self) -> Dict[str, Any]:
        """What the tables hold, and the titles of the pictures, as plain values."""
        return {
            "title": self.title,
            "tables": {
                table.name: [{column.key: plain(row.get(column.key)) for column in table.columns} for row in table.rows]
                for table in self.tables()
            },
            "pictures": [picture.title for picture in self.pictures()],
        }

    def html(self) -> str:
        """The page. ValueError where two pictures or two tables have one title, or two tables one name."""
        for what, names in (
            ("pictures", [picture.title for picture in self.pictures()]),
            ("tables", [table.title for table in self.tables()]),
            ("names of tables", [table.name for table in self.tables()]),
            ("sections", [section.title for section in self.sections]),
        ):
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                raise ValueError(f"{self.title}: two {what} are called {twice[0]!r}; give each its own")
        links = " ".join(
            f'<a href="#part{number}">{escape(section.title)}</a>' for number, section in enumerate(self.sections)
        )
        drawn, names = 0, names_of(self.pictures())
        body = [f"<h1>{escape(self.title)}</h1>\n<p>{escape(self.lead)}</p>\n<nav>{links}</nav>"]
        for number, section in enumerate(self.sections):
            body.append(f'<section id="part{number}"><h2>{escape(section.title)}</h2>')
            for part in section.parts:
                if isinstance(part, Words):
                    body.append(f"<p>{escape(part.text)}</p>")
                elif isinstance(part, Table):
                    body.append(_table(part))
                else:
                    body.append(_figure(part, drawn, names[drawn]))
                    drawn += 1
            body.append("</section>")
        return _FRAME.format(
            title=escape(self.title), page=style.PAGE, drawing=style.DRAWING, body="\n".join(body), script=style.SCRIPT
        )

    def write(self, path: Union[str, Path]) -> None:
        """Writes the file, whole or not at all."""
        write_atomically(Path(path), self.html().encode())


# The policy forbids the page to load anything from anywhere.
_FRAME = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<link rel="icon" href="data:,">
<style id="drawing">{drawing}</style>
<style>{page}</style>
</head>
<body>
{body}
<script>{script}</script>
</body>
</html>
"""


def _table(table: Table) -> str:
    letters = table.source_marks()
    words = {
        column.key
        for column in table.columns
        if not column.form and any(isinstance(plain(row.get(column.key)), (str, list)) for row in table.rows)
    }
    heads, lines = [], []
    for column in table.columns:
        mark = f"<sup>{letters[column.source]}</sup>" if letters.get(column.source) else ""
        kind = ' class="w"' if column.key in words else ""
        heads.append(
            f'<th scope="col"{kind} data-key="{escape(column.key)}">'
            f'<button type="button">{escape(column.heading)}</button>{mark}</th>'
        )
    for row in table.rows:
        cells = []
        for column in table.columns:
            value = row.get(column.key)
            kind = ' class="w"' if column.key in words else ""
            data = escape(json.dumps(plain(value), allow_nan=False))
            cells.append(f'<td{kind} data-value="{data}">{escape(column.shown(row))}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll"><table id="{escape(table.name)}"><caption>{escape(table.title)}</caption>'
        f"<thead><tr>{''.join(heads)}</tr></thead>\n<tbody>"
        + "\n".join(lines)
        + "</tbody></table></div>"
        + _notes((*table.source_note(), *table.notes))
    )


def _figure(picture: Picture, number: int, name: str) -> str:
    return (
        f'<figure id="picture{number}">{draw(picture, number)}'
        f'<button type="button" data-file="{name}.svg">Save as SVG</button></figure>' + _notes(picture.notes)
    )


def _notes(notes: Sequence[str]) -> str:
    return "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
