"""Pictures have the sizes of their numbers, say them under the pointer, and are the same bytes each time."""

import random
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("matplotlib", reason="needs matplotlib")

from pack_data.display import picture
from pack_data.display.picture import Axis, Bars, HeatMap, Line, Lines, Series, Skip, Tile, Tiles, drawings, write

SVG = "{http://www.w3.org/2000/svg}"
ODD = "a <b> & 'c' \"d\" </script> é"
PICTURES = (
    Bars("Upward", ("one", "two"), Axis("slots"),
         (Series("a", (1.0, None)), Series("b", (2.0, 3.0), (1.5, 2.0), (4.0, 3.5)))),
    Bars("Across", (ODD, "two"), Axis("slots"), (Series("a", (1.0, 4.0)), Series("rest", (2.0, 0.0), role="padding")),
         stacked=True, across=True, ends=("x", "y"), limit=("most", 6.0)),
    Bars("Edges", ("0 to 2", "2 to 8"), Axis("slots"), (Series("a", (1.0, 2.0)),),
         edges=(0.0, 2.0, 8.0), along="tokens", levels=(("mean", 3.0), ("median", 4.0))),
    Lines("Lines", Axis("x"), Axis("y"),
          (Line("a", (0.0, 1.0), (1.0, None)), Line("b", (0.0, 2.0), (3.0, 1.0), points=True)),
          levels=(("level", 2.0),)),
    Lines("Powers", Axis("devices", log=2), Axis("cycles", log=10), (Line("a", (1.0, 64.0), (0.02, 300.0)),)),
    HeatMap("Heat", ("r", ODD), ("2", "3"), ((0.0, 1.0), (None, 4.0)), ".1f", "depth", "packer"),
    Tiles("Tiles", Axis("slot"), Axis("slot"), ("a", "padding"), (Tile(0, 2, 0, 2, 0, ODD), Tile(2, 3, 2, 3, 1, "p")),
          roles=("", "padding"), square=True),
    Tiles("Rows", Axis("cycle", skips=(Skip(1.0, 9.0, "alike"),)), Axis("IPU"), ("a",),
          (Tile(0, 10, 0.1, 0.9, 0, "x"),), rows=("IPU 0", "IPU 1")),
)  # fmt: skip


def drawn(each):
    """The SVG of one picture."""
    return ElementTree.fromstring(drawings([each])[0])


def shapes(root):
    """What answers to the pointer: its words, and the rectangle that it fills, as (left, right, top, bottom)."""
    found = []
    for each in root.iter():
        words = each.find(f"{SVG}title")
        if words is not None:
            ends = [float(number) for number in re.findall(r"[-\d.]+(?:e-?\d+)?", each.get("d") or "0 0")]
            found.append((words.text, (min(ends[::2]), max(ends[::2]), min(ends[1::2]), max(ends[1::2]))))
    return found


@pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
def test_the_same_picture_is_the_same_bytes(tmp_path, ending):
    """In another process, whatever its hashes are seeded with, and whatever the user has set."""
    (tmp_path / "matplotlibrc").write_text("font.size: 20\nsvg.fonttype: none\n")
    code = "import sys; from tests.pack_data.display.test_picture import PICTURES, write; write(PICTURES, sys.argv[1])"
    environment = {"PYTHONHASHSEED": "7", "MATPLOTLIBRC": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    other = tmp_path / f"other.{ending}"
    subprocess.run([sys.executable, "-c", code, str(other)], env=environment, check=True)
    write(PICTURES, tmp_path / f"one.{ending}")
    assert (tmp_path / f"one.{ending}").read_bytes() == other.read_bytes()


def test_each_has_a_size_for_a_paper(tmp_path):
    for number, each in enumerate(PICTURES):
        path = tmp_path / f"{number}.svg"
        write([each], path)
        root = ElementTree.fromstring(path.read_bytes())
        assert root.get("aria-label") == each.title and root.get("width") == f"{72 * 6.5:g}pt"
        assert root.find(f".//{SVG}text") is None  # fonts are paths
    one = tmp_path / "one.png"
    write(PICTURES[:1], one)
    assert one.read_bytes().startswith(b"\x89PNG") and one.stat().st_size > 3000


@settings(max_examples=10, deadline=None, phases=(Phase.generate,))  # half a second each
@given(st.lists(st.floats(0.01, 1e7), min_size=2, max_size=8), st.booleans())
def test_bars_are_as_long_as_their_numbers(values, across):
    names = tuple(map(str, range(len(values))))
    bars = Bars("bars", names, Axis("slots"), (Series("a", tuple(values), hints=names),), across=across)
    found = shapes(drawn(bars))
    assert [words for words, _ in found] == list(names)
    long = [right - left if across else bottom - top for _, (left, right, top, bottom) in found]
    assert max(long) > 50
    for points, value in zip(long, values):  # from 0
        assert points == pytest.approx(max(long) * value / max(values), abs=0.01)


@settings(max_examples=10, deadline=None, phases=(Phase.generate,))  # half a second each
@given(st.lists(st.tuples(*[st.floats(1, 1000)] * 3), min_size=2, max_size=5), st.booleans())
def test_stacks_stand_on_each_other(stacks, across):
    series = tuple(
        Series(str(number), tuple(stack[number] for stack in stacks), hints=tuple(f"{number}" for _ in stacks))
        for number in range(3)
    )
    bars = Bars("s", tuple(map(str, stacks)), Axis("slots", most=3000.0), series, stacked=True, across=across)
    found = shapes(drawn(bars))
    start, end = (0, 1) if across else (3, 2)
    for place, stack in enumerate(stacks):
        boxes = [found[number * len(stacks) + place][1] for number in range(3)]
        for lower, upper in zip(boxes, boxes[1:]):
            assert upper[start] == pytest.approx(lower[end], abs=0.01)
        long = [abs(box[end] - box[start]) for box in boxes]
        for points, value in zip(long, stack):
            assert points / sum(long) == pytest.approx(value / sum(stack), abs=1e-3)


@pytest.mark.parametrize("values, least", [((3.0, 5.0), 0.0), ((1.9, 2.0), 0.0), ((-1.0, 4.0), -1.0)])
def test_the_axis_of_bars_holds_0(values, least):
    bars = Bars("b", ("one", "two"), Axis("slots"), (Series("a", values),))
    assert bars._reach() == (least, max(values))
    assert bars._replace(values=Axis("slots", most=2.0))._reach() == (least, 2.0)


def test_what_is_pointed_at_says_its_number():
    assert [words for words, _ in shapes(drawn(PICTURES[0]))] == [
        "one, a: 1; slots",
        "one, b: 2 (1.5 to 4); slots",
        "two, b: 3 (2 to 3.5); slots",
    ]
    said = [words for each in PICTURES[3:] for words, _ in shapes(drawn(each))]
    assert said[:3] == ["a: 1 at 0 (y; x)", "b: 3 at 0 (y; x)", "b: 1 at 2 (y; x)"]
    assert said[-3:] == ["x", "alike", "alike"] and {ODD, "p", "r, 3: 1.0", f"{ODD}, 3: 4.0"} <= set(said)


def test_a_band_is_drawn_and_has_room():
    axis, band = Axis("x"), Line("a", (0.0, 1.0, 2.0), (1.0, 2.0, 1.0), lower=(0.5, 1.0, None), upper=(4.0, 3.0, 2.0))
    alone, with_band = (
        picture._figure([Lines("Lines", axis, axis, (line,))], []).axes[0]
        for line in (band._replace(lower=(), upper=()), band)
    )
    assert alone.get_ylim()[1] < 3.0 < 4.0 < with_band.get_ylim()[1]
    assert len(with_band.collections) == len(alone.collections) + 1


def test_what_is_empty_is_drawn_too():
    axis = Axis("nothing")
    empty = (
        Bars("Up", (), axis, (Series("a", ()),)),
        Bars("Right", (), axis, (Series("a", ()), Series("b", ())), across=True, stacked=True),
        Lines("No line", axis, axis, ()),
        Lines("No point", axis, axis, (Line("a", (), ()), Line("b", (0.0,), (None,)))),
        HeatMap("No row", (), (), (), ".1f", "", ""),
        Tiles("No tile", axis, axis, ("a",), ()),
    )
    assert [shapes(ElementTree.fromstring(each)) for each in drawings(empty)] == [[]] * len(empty)


def test_a_skip_is_a_gap_of_the_axis():
    place = picture._without((Skip(30.0, 900.0, "alike"), Skip(950.0, 970.0, "long")), 0.0, 1000.0)
    gap = 0.03 * (30 + 50 + 30)
    expected = [0.0, 30.0, 30.0 + gap, 80.0 + gap, 80.0 + 2 * gap, 110.0 + 2 * gap]
    assert [place(value) for value in (0.0, 30.0, 900.0, 950.0, 970.0, 1000.0)] == pytest.approx(expected)


def test_pictures_of_a_page_have_its_letters_and_colours():
    for each, text in zip(PICTURES, drawings(PICTURES)):
        root = ElementTree.fromstring(text)
        assert root.find(f".//{SVG}text") is not None
        assert all(words != each.title for words in (text.text for text in root.iter(f"{SVG}text")))  # the page's own
        styles = " ".join(part.get("style") or "" for part in root.iter())
        assert not re.findall("#[0-9a-f]{6}", styles) and "var(--ink)" in styles


def test_limits_and_levels_have_room():
    bars = Bars("b", ("one",), Axis("MiB"), (Series("a", (5.0,)),), across=True, limit=("all that there is", 8.0))
    assert bars._reach() == (0.0, 8.0)
    assert "$5e-4_$" in drawings([bars._replace(categories=("$5e-4_$",))])[0]  # no formula
    assert bars._replace(limit=None, levels=(("twice", 10.0),))._reach() == (0.0, 10.0)
    for across in (True, False):
        axes = picture._figure([bars._replace(across=across)], []).axes[0]
        ends = axes.get_xlim() if across else axes.get_ylim()
        line = [each for each in axes.lines if each.get_color() == picture.COLOURS["limit"][0]]
        assert len(line) == 1 and set(line[0].get_xdata() if across else line[0].get_ydata()) == {8.0} and ends[1] > 8.0
        assert [words.get_text() for words in axes.get_legend().get_texts()] == ["a", "all that there is"]


@pytest.mark.parametrize(
    "value, text",
    [(0, "0"), (0.02, "0.02"), (1500, "1,500"), (9999.4, "9,999"), (20_000, "20 k"), (1.5e6, "1.5 M"), (-3e9, "-3 G")],
)
def test_short_numbers(value, text):
    assert picture._short(value) == text


def test_thinning_keeps_the_extremes():
    numbers = random.Random(0)
    y = [numbers.random() for _ in range(10_000)]
    y[1234], y[5678], y[77] = 9.0, -9.0, None
    for count, most in ((10_000, 402), (400, 399)):
        line = Line("a", tuple(map(float, range(count))), tuple(y[:count]), hints=tuple(map(str, range(count))))
        kept = [int(words) for words, _ in shapes(drawn(Lines("Many", Axis("x"), Axis("y"), (line,))))]
        assert kept == sorted(set(kept)) and most / 2 < len(kept) <= most
        assert {0, 1234, 5678, count - 1} & set(range(count)) <= set(kept) and 77 not in kept


def test_a_heat_map_takes_values_below_0():
    heat = HeatMap("h", ("r",), ("2", "3", "4"), ((-1.0, None, 4.0),), ".1f", "depth", "packer")
    assert [words for words, _ in shapes(drawn(heat))] == ["r, 2: -1.0", "r, 4: 4.0"]
    assert len(shapes(drawn(heat._replace(values=((-1.0, None, -2.0),))))) == 2


def linear(colour):
    """Red, green and blue of a colour as light, 0 to 1."""
    found = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in found]


def luminance(light):
    return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), light))


def lightness(colour):
    """L* of a colour, 0 to 100 (CIE 1976)."""
    light = luminance(linear(colour))
    return 116 * light ** (1 / 3) - 16 if light > 0.008856 else 903.3 * light


def test_neighbouring_colours_differ_in_grey():
    for names in (picture._PLAIN, (*picture.SEQUENCES, "padding")):
        light = [lightness(picture.COLOURS[name][0]) for name in names]
        assert all(abs(one - other) >= 12 for one, other in zip(light, light[1:])), light
    assert len(set(picture.DASHES)) == len(picture._PLAIN)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_are_seen_on_their_page(scheme):
    """Contrast by WCAG 2: 4.5 for words, 3 for what is drawn; padding is what is not there."""
    page = luminance(linear(picture.COLOURS["page"][scheme])) + 0.05
    for name, pair in picture.COLOURS.items():
        own = luminance(linear(pair[scheme])) + 0.05
        least = {"page": 1.0, "line": 1.2, "padding": 1.5, **dict.fromkeys(("ink", "soft", "link"), 4.5)}.get(name, 3.0)
        assert max(own, page) / min(own, page) >= least, name


# What is left of light for eyes without the cones of red, or of green: Vienot, Brettel and Mollon (1999), linear RGB.
PROTAN = ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0))
DEUTAN = ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0))


def lab(light):
    """CIE L*a*b* of linear RGB, under D65."""
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(a * b for a, b in zip(row, light)) / white for row, white in zip(to_xyz, (0.9505, 1.0, 1.089))]
    x, y, z = (each ** (1 / 3) if each > 0.008856 else 7.787 * each + 16 / 116 for each in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("eyes", [((1, 0, 0), (0, 1, 0), (0, 0, 1)), PROTAN, DEUTAN], ids=["all", "no red", "no green"])
def test_sequences_and_padding_stay_apart_for_every_reader(eyes, scheme):
    """A difference of 2.3 is just seen."""
    seen = {}
    for name in ("first", "second", "third", "padding"):
        light = linear(picture.COLOURS[name][scheme])
        seen[name] = lab([max(0.0, sum(a * b for a, b in zip(row, light))) for row in eyes])
    for one in seen:
        for other in seen:
            assert one == other or sum((a - b) ** 2 for a, b in zip(seen[one], seen[other])) ** 0.5 > 20, (one, other)
