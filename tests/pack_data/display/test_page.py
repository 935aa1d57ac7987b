"""Pages: what is read back is what was put in, words are escaped, and nothing is loaded from anywhere."""

import json
import math
import re
from html import unescape

import pytest

pytest.importorskip("matplotlib", reason="needs matplotlib")
pytest.importorskip("jinja2", reason="needs jinja2")

from pack_data.display.page import Page, Section
from pack_data.display.table import COMPUTED, HOST, Cell, Column, Table
from tests.pack_data.display.test_picture import ODD, PICTURES
from tests.pages import Browser, check_page

TABLE = Table(
    "first",
    "A table " + ODD,
    (
        Column("name", "name", COMPUTED),
        Column("value", "value, %", HOST, ".2f"),
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
PAGE = Page("Title " + ODD, "Lead " + ODD, (Section("Part " + ODD, ("Words " + ODD, TABLE, *PICTURES)),))


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
    assert page.notes == ["Source: [a] computed; [b] seconds of this host.", "A note " + ODD]
    assert "<b>" not in text and unescape(text).count(ODD) > 8  # every word is escaped, and none is lost
    assert text == PAGE.html()


@pytest.mark.parametrize(
    "part", [PICTURES[0], TABLE, PICTURES[0]._replace(title="Edges")], ids=["picture", "table", "title"]
)
def test_two_of_one_name_are_refused(part):
    twice = PAGE._replace(sections=(*PAGE.sections, Section("more", (part,))))
    with pytest.raises(ValueError, match="give each its own"):
        twice.html()


def test_a_page_that_cannot_be_made_leaves_the_former_file(tmp_path):
    PAGE.write(tmp_path / "page.html")
    before = (tmp_path / "page.html").read_bytes()
    wrong = Section("more", (PICTURES[0],))
    with pytest.raises(ValueError):
        PAGE._replace(sections=(*PAGE.sections, wrong)).write(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_bytes() == before == PAGE.html().encode()
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


# Presses the head of a column twice, and says what came of it in the page itself.
PRESSED = """
<script>
const names = () => [...document.querySelectorAll("#first tbody tr")].map(row => row.cells[1].dataset.value);
const found = {};
const head = document.querySelectorAll("#first th button")[1];
head.click(); found.up = names(); head.click(); found.down = names();
document.title = JSON.stringify(found);
</script>
"""


def test_a_browser_opens_it_in_silence(tmp_path):
    document, said = Browser(tmp_path).opened(PAGE.html().replace("</body>", PRESSED + "</body>"))
    assert said == []
    pressed = json.loads(re.search("<title>(.*?)</title>", document)[1].replace("&quot;", '"'))
    assert pressed["up"] == ["2.5", "null", "null"] == pressed["down"]
