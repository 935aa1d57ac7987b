"""Pages: what is read back is what was put in, words are escaped, and nothing is loaded from anywhere."""

import json
import math
import re
from html import unescape

import pytest

pytest.importorskip("matplotlib", reason="needs matplotlib")
pytest.importorskip("jinja2", reason="needs jinja2")

from pack_data.display.page import Figure, Page, Section
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


def test_a_page_read_back_is_what_was_put_in():
    text = PAGE.html()
    page = check_page(text)
    assert page.tables == json.loads(json.dumps(PAGE.to_json()["tables"]))
    assert page.tables["first"][2] == {"name": "not finite", "value": None, "list": [3], "other": -7}
    assert page.tables["first"][1]["other"] == {"a": None}
    for words, row in zip(page.shown["first"], TABLE.rows):
        assert words == {column.key: column.shown(row) for column in TABLE.columns}
    assert page.shown["first"][0] == {"name": ODD, "value": "2.50", "list": "1 + 2", "other": "yes"}
    assert page.pictures == PAGE.to_json()["pictures"] == [picture.title for picture in PICTURES]
    assert page.notes == 2 * ["Source: [a] computed; [b] the paper.", "A note " + ODD]
    assert "a <b>" not in text and unescape(text).count(ODD) > 12  # every word is escaped, and none is lost
    assert text == PAGE.html()


@pytest.mark.parametrize(
    "part", [PICTURES[0], TABLE, PICTURES[0]._replace(title="Edges")], ids=["picture", "table", "title"]
)
def test_two_of_one_name_are_refused(part):
    twice = PAGE._replace(sections=(*PAGE.sections, Section("more", (part,))))
    with refused("two (pictures|tables)", "Edges|" + re.escape(repr(part.title))):
        twice.html()


def test_a_page_that_cannot_be_made_leaves_the_former_file(tmp_path):
    PAGE.write(tmp_path / "page.html")
    before = (tmp_path / "page.html").read_bytes()
    wrong = Section("more", (PICTURES[0],))
    with pytest.raises(ValueError):
        PAGE._replace(sections=(*PAGE.sections, wrong)).write(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_bytes() == before == PAGE.html().encode()
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_the_answer_is_first_and_raw_keys_are_last():
    text = unescape(PAGE.html())
    words = ("Answer " + ODD, "1.5", "unit " + ODD, PICTURES[0].title, "Part " + ODD, "Words " + ODD, 'id="raw"')
    places = [text.index(each, text.index("<header")) for each in words]
    assert places == sorted(places)
    assert PAGE.to_json()["figures"] == [{"value": "1.5", "unit": "unit " + ODD, "words": "said " + ODD}]


def test_a_title_stands_once():
    """That of a part which is its section's stands above the section alone."""
    picture, table = PICTURES[1]._replace(title="One thing"), TABLE._replace(title="One thing")
    for part in (picture, table):
        text = Page("page", "answer", (Section("One thing", (part,)),)).html()
        assert text.count(">One thing<") == 2  # the section's, and the link to it
    text = Page("page", "answer", (Section("Another", (picture,)),)).html()
    assert text.count(">One thing<") == 1


@pytest.mark.parametrize(
    "rows, columns, beside, folded",
    [(10, 3, True, False), (11, 3, True, True), (2, 4, True, True), (20, 4, False, False), (21, 3, False, True)],
)
def test_large_tables_are_folded(rows, columns, beside, folded):
    names = [str(number) for number in range(columns)]
    table = Table("t", "table", tuple(Column(name, name) for name in names), [dict.fromkeys(names, 1)] * rows)
    parts = (PICTURES[0], table) if beside else (table,)
    text = Page("page", "answer", (Section("part", parts),)).html()
    assert text.count("<details") == folded and text.count("<tr>") == rows + 1
