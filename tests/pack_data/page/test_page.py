"""Pages: what is read back is what was put in, pictures have the sizes of their numbers, nothing is loaded."""

import json
import math
import random
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pack_data.page import style
from pack_data.page.axes import powers, scale, short, ticks
from pack_data.page.charts import Axis, Bars, HeatMap, Line, Lines, Series, Skip, Tile, Tiles, thinned
from pack_data.page.document import Page, Section, Words
from pack_data.page.svg import draw, standalone
from pack_data.table import COMPUTED, HOST, Cell, Column, Table
from tests.pages import SVG, Browser, check_page

ODD = "a <b> & 'c' \"d\" </script> é"
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
PICTURES = (
    Bars("Upward", ("one", "two"), Axis("slots"),
         (Series("a", (1.0, None)), Series("b", (2.0, 3.0), (1.5, 2.0), (4.0, 3.5)))),
    Bars("Across", (ODD, "two"), Axis("slots"), (Series("a", (1.0, 4.0)), Series("rest", (2.0, 0.0), padding=True)),
         stacked=True, across=True, ends=("x", "y")),
    Bars("Edges", ("0 to 2", "2 to 8"), Axis("slots"), (Series("a", (1.0, 2.0)),),
         edges=(0.0, 2.0, 8.0), along="tokens"),
    Lines("Lines", Axis("x"), Axis("y"),
          (Line("a", (0.0, 1.0), (1.0, None)), Line("b", (0.0, 2.0), (3.0, 1.0), points=True)),
          levels=(("level", 2.0),)),
    Lines("Powers", Axis("devices", log=2), Axis("cycles", log=10), (Line("a", (1.0, 64.0), (0.02, 300.0)),)),
    HeatMap("Heat", ("r", ODD), ("2", "3"), ((0.0, 1.0), (None, 4.0)), ".1f", "depth", "packer"),
    Tiles("Tiles", Axis("slot"), Axis("slot"), ("a", "padding"), (Tile(0, 2, 0, 2, 0, ODD), Tile(2, 3, 2, 3, 1, "p")),
          padding=(1,), square=True),
    Tiles("Rows", Axis("cycle"), Axis("IPU"), ("a",), (Tile(0, 2, 0.1, 0.9, 0, "x"),), rows=("IPU 0", "IPU 1")),
)  # fmt: skip
PAGE = Page("Title " + ODD, "Lead " + ODD, (Section("Part " + ODD, (Words("Words " + ODD), TABLE, *PICTURES)),))


def rectangles(drawing, number):
    """The rectangles of one series of a drawing."""
    found = [each for each in drawing.iter(f"{SVG}rect") if f"s{number}" in each.get("class", "").split()]
    return [{key: float(each.get(key)) for key in ("x", "y", "width", "height")} for each in found]


def test_a_page_read_back_is_what_was_put_in():
    page = check_page(PAGE.html())
    assert page.tables == json.loads(json.dumps(PAGE.to_json()["tables"]))
    assert page.tables["first"][2] == {"name": "not finite", "value": None, "list": [3], "other": -7}
    assert page.tables["first"][1]["other"] == {"a": None}
    for words, row in zip(page.shown["first"], TABLE.rows):
        assert words == {column.key: column.shown(row) for column in TABLE.columns}
    assert page.shown["first"][0] == {"name": ODD, "value": "2.50", "list": "1 + 2", "other": "yes"}
    assert page.pictures == PAGE.to_json()["pictures"] == [picture.title for picture in PICTURES]
    assert page.notes == ["Source: [a] computed; [b] seconds of this host.", "A note " + ODD]


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


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.title)
def test_a_saved_picture_is_whole(picture):
    root = ElementTree.fromstring(standalone(picture))
    assert root.tag == f"{SVG}svg" and root.find(f"{SVG}style").text == style.DRAWING
    width, height = (float(each) for each in root.get("viewBox").split()[2:])
    classes = {name for each in root.iter() for name in each.get("class", "").split()}
    ruled = set(re.findall(r"\.([a-z]\w*)", style.DRAWING))
    assert classes <= ruled
    for each in root.iter(f"{SVG}rect"):
        if not {"width", "height"} <= set(each.keys()) or each.get("patternUnits"):
            continue
        assert float(each.get("x")) >= -1 and float(each.get("x")) + float(each.get("width")) <= width + 1
        assert float(each.get("y")) >= -1 and float(each.get("y")) + float(each.get("height")) <= height + 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.01, 1e7), min_size=1, max_size=8), st.booleans())
def test_bars_are_as_long_as_their_numbers(values, across):
    names = tuple(map(str, range(len(values))))
    bars = Bars("bars", names, Axis("slots"), (Series("a", tuple(values)),), across=across)
    drawn = rectangles(ElementTree.fromstring(draw(bars)), 0)
    long = [each["width" if across else "height"] for each in drawn]
    assert len(long) == len(values)
    longest = max(long)
    assert longest > 50
    for pixels, value in zip(long, values):  # from 0, to a tenth of a pixel
        assert pixels == pytest.approx(longest * value / max(values), abs=0.3)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(*[st.floats(0, 1000)] * 3), min_size=1, max_size=5), st.booleans())
def test_stacks_stand_on_each_other(stacks, across):
    series = tuple(Series(str(number), tuple(stack[number] for stack in stacks)) for number in range(3))
    names = tuple(map(str, range(len(stacks))))
    axis = Axis("slots", most=3000.0)
    drawn = ElementTree.fromstring(draw(Bars("stacks", names, axis, series, stacked=True, across=across)))
    first, second, third = (rectangles(drawn, number)[1:] for number in range(3))  # without the legend's
    start, length = ("x", "width") if across else ("y", "height")
    for a, b, c, stack in zip(first, second, third, stacks):
        low, high = (a, c) if across else (c, a)
        assert low[start] + low[length] <= high[start] + 0.3 or sum(stack) == 0
        assert b[start] == pytest.approx(a[start] + a[length] if across else a[start] - b[length], abs=0.3)
        full = 280 if not across else None
        if full:
            assert a[length] + b[length] + c[length] == pytest.approx(full * sum(stack) / 3000, abs=0.5)


def test_what_is_pointed_at_says_its_number():
    drawn = ElementTree.fromstring(draw(PICTURES[0]))
    said = [each.text for each in drawn.iter(f"{SVG}title")]
    assert said == ["one, a: 1; slots", "one, b: 2 (1.5 to 4); slots", "two, b: 3 (2 to 3.5); slots"]


@settings(max_examples=200, deadline=None)
@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_hold_the_values(low, span):
    high = low + span
    if not high > low or span < 1e-9 * abs(low):
        return
    marks = ticks(low, high)
    assert marks == sorted(set(marks)) and 2 <= len(marks) <= 9
    assert marks[0] <= low + 1e-6 * span and marks[-1] >= high - 1e-6 * span


@given(st.floats(1e-6, 1e6), st.floats(1.0, 1e9), st.sampled_from([2, 10]))
def test_powers_hold_the_values(low, factor, base):
    marks = powers(low, low * factor, base)
    assert marks[0] <= low * (1 + 1e-6) and marks[-1] >= low * factor * (1 - 1e-6) and 2 <= len(marks) <= 15


def test_a_skip_is_a_gap_of_the_axis():
    skips = (Skip(30.0, 900.0, "alike"), Skip(950.0, 970.0, "long"))
    line = scale(Axis("x", skips=skips), [1000.0], 100.0, 700.0, whole=True)
    places = [line.place(value) for value in (0.0, 30.0, 900.0, 950.0, 970.0, 1000.0)]
    assert (places[0], places[-1]) == pytest.approx((100.0, 700.0))
    drawn = 30.0 + 50.0 + 30.0
    gap = 600.0 * 0.03 / 1.06
    widths = [600.0 * kept / drawn / 1.06 for kept in (30.0, 50.0, 30.0)]
    expected = [widths[0], gap, widths[1], gap, widths[2]]
    assert [after - before for before, after in zip(places, places[1:])] == pytest.approx(expected)
    assert line.ticks == sorted(line.ticks) and len(line.ticks) > 3
    assert not any(skip.start < tick < skip.end for tick in line.ticks for skip in skips)


def test_an_axis_begins_at_0_unless_told_otherwise():
    assert scale(Axis("x"), [5.0, 9.0], 0.0, 100.0).place(0.0) == 0.0
    assert scale(Axis("x", least=5.0), [5.0, 9.0], 0.0, 100.0).place(5.0) == 0.0
    assert scale(Axis("x"), [-5.0], 0.0, 100.0).place(0.0) == 100.0
    assert scale(Axis("x", most=512.0), [3.0], 0.0, 100.0).place(512.0) == 100.0
    assert scale(Axis("x", log=2), [1.0, 16.0], 0.0, 100.0).place(4.0) == pytest.approx(50.0)


@pytest.mark.parametrize(
    "value, text",
    [(0, "0"), (0.02, "0.02"), (1500, "1,500"), (9999.4, "9,999"), (20_000, "20 k"), (1.5e6, "1.5 M"), (-3e9, "-3 G")],
)
def test_short_numbers(value, text):
    assert short(value) == text


def test_thinning_keeps_the_extremes():
    numbers = random.Random(0)
    y = [numbers.random() for _ in range(10_000)]
    y[1234], y[5678], y[77] = 9.0, -9.0, None
    kept = thinned(range(len(y)), y)
    assert kept == sorted(set(kept)) and len(kept) <= 402
    assert {0, 1234, 5678, 9999} <= set(kept) and 77 not in kept
    assert thinned(range(400), y) == list(range(400))


def lightness(colour):
    """L* of a colour, 0 to 100 (CIE 1976)."""
    linear = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in linear]
    light = sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear))
    return 116 * light ** (1 / 3) - 16 if light > 0.008856 else 903.3 * light


def test_neighbouring_colours_differ_in_grey():
    for fills in (style.FILLS, style.DARK_FILLS):
        light = [lightness(fill) for fill in fills]
        assert all(abs(one - other) >= 12 for one, other in zip(light, light[1:])), light
    assert len(set(style.DASHES)) == len(style.FILLS)


# Presses every head of the table twice and the first button, and says what came of it in the page itself.
PRESSED = """
<script>
const names = () => [...document.querySelectorAll("#first tbody tr")].map(row => row.cells[1].dataset.value);
const found = {};
const head = document.querySelectorAll("#first th button")[1];
head.click(); found.up = names(); head.click(); found.down = names();
const made = [];
URL.createObjectURL = blob => { made.push(blob); return "data:,"; };
HTMLAnchorElement.prototype.click = function() { found.file = this.download; };
document.querySelector("figure button").click();
document.title = JSON.stringify({...found, files: made.length, kind: made[0].type, size: made[0].size});
</script>
"""


def test_a_browser_opens_it_in_silence(tmp_path):
    document, said = Browser(tmp_path).opened(PAGE.html().replace("</body>", PRESSED + "</body>"))
    assert said == []
    pressed = json.loads(re.search("<title>(.*?)</title>", document)[1].replace("&quot;", '"'))
    assert pressed["up"] == ["2.5", "null", "null"] == pressed["down"]
    assert (pressed["file"], pressed["files"], pressed["kind"]) == ("upward.svg", 1, "image/svg+xml")
    assert pressed["size"] > len(style.DRAWING)
