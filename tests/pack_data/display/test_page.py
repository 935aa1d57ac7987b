"""Pages: what is read back is what was put in, words are escaped, and nothing is loaded from anywhere."""

import json
import math
from html import unescape

import pytest

pytest.importorskip("matplotlib", reason="needs matplotlib")
pytest.importorskip("jinja2", reason="needs jinja2")

from pack_data.display.page import Figure, Page, Section, _folded
from pack_data.display.table import COMPUTED, PAPER, Cell, Column, Table
from tests.pack_data.display.test_picture import ODD, PICTURES
from tests.pages import check_page
from tests.refusals import refused

TABLE = Table(
    "first",
    "A table " + ODD,
    (
        Column("name", "name", COMPUTED),
        Column("value", "value, %", PAPER, ".2f"),
        Column("list", "list"),
        Column("other", "other", COMPUTED),
    ),
    [
        {"name": ODD, "value": 2.5, "list": Cell([1, 2], "1 + 2"), "other": True},
        {"name": "nothing", "value": None, "other": {"a": float("nan")}},
        {"name": "not finite", "value": math.inf, "list": [3], "other": -7},
    ],
    ("A note " + ODD,),
)
RAW = TABLE._replace(name="raw", title="Raw " + ODD)
PAGE = Page(
    "Title " + ODD,
    "Answer " + ODD,
    (Section("Part " + ODD, ("Words " + ODD, TABLE, *PICTURES[1:])),),
    (Figure("1.5", "unit " + ODD, "said " + ODD),),
    PICTURES[:1],
    (RAW,),
)


@pytest.fixture(scope="module")
def text():
    return PAGE.html()


def test_a_page_read_back_is_what_was_put_in(text):
    page = check_page(text)
    assert page.tables == json.loads(json.dumps(PAGE.to_json()["tables"]))
    assert page.tables["first"][2] == {"name": "not finite", "value": None, "list": [3], "other": -7}
    assert page.tables["first"][1]["other"] == {"a": None}
    for words, row in zip(page.shown["first"], TABLE.rows):
        assert words == {column.key: column.shown(row) for column in TABLE.columns}
    assert page.pictures == PAGE.to_json()["pictures"] == [picture.title for picture in PICTURES]
    assert page.notes == 2 * ["Source: [a] computed; [b] the paper.", "A note " + ODD]


def test_words_are_escaped_and_the_answer_is_first(text):
    assert "a <b>" not in text
    plain = unescape(text)
    assert plain.count(ODD) > 12  # none is lost
    words = ("Answer " + ODD, "1.5", "unit " + ODD, PICTURES[0].title, "Part " + ODD, 'id="raw"')
    header = plain.index("<header")
    places = [plain.index(word, header) for word in words]
    assert places == sorted(places)


def test_a_page_with_two_parts_of_one_name_leaves_the_former_file(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("former")
    for part in (PICTURES[0], TABLE, PICTURES[0]._replace(title="Edges")):
        twice = PAGE._replace(sections=(*PAGE.sections, Section("more", (part,))))
        with refused("two (pictures|tables)", unchanged=tmp_path):
            twice.write(path)


@pytest.mark.parametrize(
    "rows, columns, beside, folded",
    [(10, 3, True, False), (11, 3, True, True), (2, 4, True, True), (20, 4, False, False), (21, 3, False, True)],
)
def test_large_tables_are_folded(rows, columns, beside, folded):
    names = [str(number) for number in range(columns)]
    columns = tuple(Column(name, name) for name in names)
    table = Table("t", "table", columns, [dict.fromkeys(names, 1)] * rows)
    section = Section("part", (PICTURES[-1], table) if beside else (table,))
    assert _folded(table, section) == folded
