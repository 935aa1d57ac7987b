"""A page: sections of words, tables and pictures, written as one HTML file that needs nothing else.

Every cell of a table holds its value as JSON beside what is shown of it, so that what reads the page gets back the
numbers that it was made from.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple, Union

from pack_data.display.picture import Bars, HeatMap, Lines, Picture, Tiles, drawings
from pack_data.display.table import Column, Table, plain
from pack_data.reading.files import write_atomically
from pack_data.reading.packages import load_package

Part = Union[str, Table, Picture]  # str: a paragraph


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
        titles = [picture.title for picture in self.pictures()]
        for what, names in (
            ("pictures", titles),
            ("tables", [table.title for table in self.tables()]),
            ("names of tables", [table.name for table in self.tables()]),
            ("sections", [section.title for section in self.sections]),
        ):
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                raise ValueError(f"{self.title}: two {what} are called {twice[0]!r}; give each its own")
        jinja2, markup = load_package("jinja2", "a page"), load_package("markupsafe", "a page").Markup
        drawn = drawings(self.pictures())
        by_title = {title: markup(picture) for title, picture in zip(titles, drawn.pictures)}

        def drawing(part: Union[Table, Picture]) -> Optional[str]:
            return None if isinstance(part, Table) else by_title[part.title]

        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("pack_data.display", "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        return environment.get_template("page.html").render(
            page=self,
            shared=markup(drawn.shared),
            drawing=drawing,
            words_of=_words_of,
            stored=lambda value: json.dumps(plain(value), allow_nan=False),
        )

    def write(self, path: Union[str, Path]) -> None:
        """Writes the file, whole or not at all."""
        write_atomically(Path(path), self.html().encode())


def _words_of(table: Table) -> Set[Column]:
    """The columns that hold words, which stand flush left."""
    return {
        column
        for column in table.columns
        if not column.form and any(isinstance(plain(row.get(column.key)), (str, list)) for row in table.rows)
    }
