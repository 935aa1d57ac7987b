"""A page: the answer first, then sections of words, pictures and tables, as one HTML file that needs nothing else.

Every cell of a table holds its value as JSON beside what is shown of it, so that what reads the page gets back the
numbers that it was made from.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple, Union

from pack_data.display.facts import Facts, columns_of, notes_of
from pack_data.display.picture import Picture, drawing
from pack_data.reading.durable import write_atomically
from pack_data.reading.packages import load_package

# Beside a picture, a table with more rows or columns than these is folded; elsewhere one with more than _MANY rows.
_FEW = 10
_NARROW = 3
_MANY = 20
Part = Union[str, Facts, Picture]  # str: a paragraph


class Figure(NamedTuple):
    """A number that is shown large: `1.999`, `sequences in a pack`, `2.001 would be without any padding`."""

    value: str
    unit: str
    words: str


class Section(NamedTuple):
    """A part whose title is that of the section is shown without it. Large tables are folded."""

    title: str
    parts: Tuple[Part, ...]


class Page(NamedTuple):
    """answer: one sentence. figures: three. first: the picture beside them, or two that belong together.

    raw: tables of keys as they stand in files; folded, at the end.
    """

    title: str
    answer: str
    sections: Tuple[Section, ...]
    figures: Tuple[Figure, ...] = ()
    first: Tuple[Picture, ...] = ()
    raw: Tuple[Facts, ...] = ()

    def _parts(self) -> List[Part]:
        return [
            *self.first,
            *(part for section in self.sections for part in section.parts),
            *self.raw,
        ]

    def tables(self) -> List[Facts]:
        return [part for part in self._parts() if isinstance(part, Facts)]

    def pictures(self) -> List[Picture]:
        return _drawn(self._parts())

    def to_json(self) -> Dict[str, Any]:
        """Return the words, the tables and the titles of the pictures as plain values."""
        return {
            "title": self.title,
            "answer": self.answer,
            "figures": [figure._asdict() for figure in self.figures],
            "tables": {facts.name: _rows_of(facts) for facts in self.tables()},
            "pictures": [picture.title for picture in self.pictures()],
        }

    def html(self) -> str:
        """Return the page; ValueError if two pictures, tables or sections have one title, or two tables one name."""
        for what, names in (
            ("pictures", [picture.title for picture in self.pictures()]),
            ("tables", [table.title for table in self.tables()]),
            ("names of tables", [table.name for table in self.tables()]),
            ("sections", [section.title for section in self.sections]),
        ):
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                raise ValueError(
                    f"{self.title}: two {what} are called {twice[0]!r}; each must have its own"
                )
        jinja2 = load_package("jinja2", "a page")

        def image(picture: Picture) -> str:
            """Return the address of the picture's SVG."""
            return "data:image/svg+xml;base64," + base64.b64encode(drawing(picture)).decode()

        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("pack_data.display", "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        return environment.get_template("page.html").render(
            page=self,
            image=image,
            folded=_folded,
            narrow=_narrow,
            columns_of=columns_of,
            notes_of=notes_of,
            stored=lambda value: json.dumps(value, allow_nan=False),
        )

    def write(self, path: Union[str, Path]) -> None:
        """Write the file, atomically."""
        write_atomically(Path(path), self.html().encode())


def _rows_of(facts: Facts) -> List[Dict[str, Any]]:
    """Return the values of a table by the keys of its columns; an account has a row for each fact."""
    columns = columns_of(facts)
    rows = zip(*(column.values for column in columns))
    return [dict(zip((column.key for column in columns), values)) for values in rows]


def _drawn(parts: Sequence[Part]) -> List[Picture]:
    return [part for part in parts if not isinstance(part, (str, Facts))]


def _folded(part: Part, section: Section) -> bool:
    """Return True if a part is a table that is shown only when it is opened."""
    if not isinstance(part, Facts):
        return False
    columns = columns_of(part)
    rows = len(columns[0].cells) if columns else 0
    large = rows > _FEW or len(columns) > _NARROW
    return rows > _MANY or (large and bool(_drawn(section.parts)))


def _narrow(section: Section) -> bool:
    """Return True if a section shows one picture and nothing else, so that another section fits beside it."""
    return [part for part in section.parts if not _folded(part, section)] == _drawn(section.parts)[
        :1
    ]
