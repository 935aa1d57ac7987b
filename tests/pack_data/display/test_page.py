"""Pages: what is read back is what was put in, words are escaped, and nothing is loaded from anywhere."""

import json
import math
from html import unescape

import pytest

pytest.importorskip("matplotlib", reason="needs matplotlib")
pytest.importorskip("jinja2", reason="needs jinja2")

from pack_data.display.facts import Fact, Facts, columns_of, notes_of
from pack_data.display.page import Figure, Page, Section, _folded
from tests.pack_data.display.test_picture import ODD, PICTURES
from tests.pages import check_page
from tests.refusals import refused

TABLE = Facts(
    "A table " + ODD,
    [
        {
            "name": Fact("name", ODD, source="computed"),
            "value": Fact("value", 2.5, "times", "quoted"),
            "list": Fact("list", (1, 2), note="1 + 2"),
            "other": Fact("other", True),
        },
        {
            "name": Fact("name", "nothing"),
            "value": Fact("value", None, "times"),
            "other": Fact("other", {"a": math.nan}),
        },
        {"name": Fact("name", "not finite"), "value": Fact("value", math.inf, "times"), "other": Fact("other", -7)},
    ],
    ("A note " + ODD,),
    "first",
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
    assert page.tables["first"][2] == {"name": "not finite", "value": None, "list": None, "other": -7}
    assert page.tables["first"][1]["other"] == {"a": None}
    for column in columns_of(TABLE):
        assert [words[column.key] for words in page.shown["first"]] == list(column.cells)
    assert page.pictures == PAGE.to_json()["pictures"] == [picture.title for picture in PICTURES]
    assert page.notes == 2 * notes_of(TABLE)


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
    row = {name: Fact(name, 1) for name in names}
    table = Facts("table", [row] * rows)
    section = Section("part", (PICTURES[-1], table) if beside else (table,))
    assert _folded(table, section) == folded
