"""Pictures have the sizes of their numbers, and are the same bytes each time."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("matplotlib", reason="needs matplotlib")

from pack_data.display import picture
from pack_data.display.picture import Axis, Bars, HeatMap, Line, Lines, MaskPicture, Series, drawing, write

SVG = "{http://www.w3.org/2000/svg}"
ODD = "a <b> & 'c' \"d\" </script> é"
# Fmt: skip.
PICTURES = (
    Bars(
        "Upward",
        ("one", "two"),
        Axis("slots"),
        (Series("a", (1.0, None)), Series("b", (2.0, 3.0), (1.5, 2.0), (4.0, 3.5))),
    ),
    Bars(
        "Across",
        (ODD, "two"),
        Axis("slots"),
        (Series("a", (1.0, 4.0)), Series("rest", (2.0, 0.0), role="padding")),
        stacked=True,
        across=True,
        ends=("x", "y"),
        limit=("most", 6.0),
    ),
    Bars(
        "Edges",
        ("0 to 2", "2 to 8"),
        Axis("slots"),
        (Series("a", (1.0, 2.0)),),
        edges=(0.0, 2.0, 8.0),
        along="tokens",
        levels=(("mean", 3.0), ("median", 4.0)),
    ),
    Lines(
        "Lines",
        Axis("x"),
        Axis("y"),
        (Line("a", (0.0, 1.0), (1.0, None)), Line("b", (0.0, 2.0), (3.0, 1.0))),
        levels=(("level", 2.0),),
    ),
    Lines("Powers", Axis("devices", log=2), Axis("cycles", log=10), (Line("a", (1.0, 64.0), (0.02, 300.0)),)),
    HeatMap("Heat", ("r", ODD), ("2", "3"), ((0.0, 1.0), (None, 4.0)), ".1f", "depth", "packer"),
    MaskPicture("Mask", ((0, 2, 1), (2, 3, 2), (3, 5, 0))),
)


def axes_of(each):
    """matplotlib's axes with one picture drawn."""
    (axes,) = picture._figure([each], picture._FILE).subfigs[0].axes
    return axes


def boxes(each):
    """Left, right, bottom and top of each bar of a picture, by series."""
    return [[bar.get_bbox().get_points().T for bar in series] for series in axes_of(each).containers]


def write_each_kind(folder):
    for ending in ("svg", "png", "pdf"):
        write(PICTURES, Path(folder, f"picture.{ending}"))


def test_the_same_picture_is_the_same_bytes(tmp_path):
    """In another process, whatever its hashes are seeded with, and whatever the user has set."""
    (tmp_path / "matplotlibrc").write_text("font.size: 20\nsvg.fonttype: none\n")
    code = "import sys; from tests.pack_data.display.test_picture import write_each_kind; write_each_kind(sys.argv[1])"
    environment = {"PYTHONHASHSEED": "7", "MATPLOTLIBRC": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
    subprocess.run([sys.executable, "-c", code, str(other)], env=environment, check=True)
    write_each_kind(one)
    kinds = sorted(path.name for path in one.iterdir())
    assert kinds == ["picture.pdf", "picture.png", "picture.svg"]
    assert [name for name in kinds if (one / name).read_bytes() != (other / name).read_bytes()] == []


def test_each_has_a_size_for_a_paper(tmp_path):
    for number, each in enumerate(PICTURES):
        path = tmp_path / f"{number}.svg"
        write([each], path)
        root = ElementTree.fromstring(path.read_bytes())
        assert root.find(f"{SVG}title").text == each.title and root.get("width") == f"{72 * 6.5:g}pt"
        assert root.find(f".//{SVG}text") is None  # fonts are paths
    one = tmp_path / "one.png"
    write(PICTURES[:1], one)
    assert one.read_bytes().startswith(b"\x89PNG") and one.stat().st_size > 3000


def test_a_page_has_its_own_letters():
    assert ElementTree.fromstring(drawing(PICTURES[0])).get("width") == f"{72 * 5:g}pt"


@settings(max_examples=10, deadline=None, phases=(Phase.generate,))  # half a second each
@given(st.lists(st.floats(0.01, 1e7), min_size=2, max_size=8), st.booleans())
def test_bars_are_as_long_as_their_numbers(values, across):
    names = tuple(map(str, range(len(values))))
    bars = Bars("bars", names, Axis("slots"), (Series("a", tuple(values)),), across=across)
    (drawn,) = boxes(bars)
    assert [tuple(box[0 if across else 1]) for box in drawn] == [(0.0, value) for value in values]
    axes = axes_of(bars)
    low, high = axes.get_xlim() if across else axes.get_ylim()
    assert low <= 0.0 and max(values) <= high < 1.1 * max(values)


@settings(max_examples=10, deadline=None, phases=(Phase.generate,))  # half a second each
@given(st.lists(st.tuples(*[st.floats(1, 1000)] * 3), min_size=2, max_size=5), st.booleans())
def test_stacks_stand_on_each_other(stacks, across):
    series = tuple(Series(str(number), tuple(stack[number] for stack in stacks)) for number in range(3))
    bars = Bars("s", tuple(map(str, stacks)), Axis("slots", most=3000.0), series, stacked=True, across=across)
    found = boxes(bars)
    side = 0 if across else 1
    for place, stack in enumerate(stacks):
        base = 0.0
        for number, value in enumerate(stack):
            assert tuple(found[number][place][side]) == pytest.approx((base, base + value))
            base += value


@pytest.mark.parametrize(
    "values, axis, ends",
    [
        ((3.0, 5.0), Axis("slots"), (0.0, 5.2)),
        ((-1.0, 4.0), Axis("slots"), (-1.04, 4.2016)),
        ((1.9, 2.0), Axis("slots", most=1.5), (0.0, 1.5)),
        ((1.0, 2.0), Axis("slots", least=-3.0, most=3.0), (-3.0, 3.0)),
    ],
)
def test_the_axis_of_bars_holds_0(values, axis, ends):
    assert axes_of(Bars("b", ("one", "two"), axis, (Series("a", values),))).get_ylim() == pytest.approx(ends)


def test_intervals_and_bands_are_drawn_and_have_room():
    low, high = axes_of(PICTURES[0]).get_ylim()
    assert low == 0.0 and high > 4.0
    axis, band = Axis("x"), Line("a", (0.0, 1.0, 2.0), (1.0, 2.0, 1.0), lower=(0.5, 1.0, None), upper=(4.0, 3.0, 2.0))
    alone, with_band = (
        axes_of(Lines("Lines", axis, axis, (line,))) for line in (band._replace(lower=(), upper=()), band)
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
    )
    assert all(drawing(each).count(b"<svg") == 1 for each in empty)


def test_limits_and_levels_have_room():
    bars = Bars("b", ("$5e-4_$",), Axis("MiB"), (Series("a", (5.0,)),), across=True, limit=("all that there is", 8.0))
    axes = axes_of(bars)
    line = [each for each in axes.lines if each.get_color() == picture.COLOURS["limit"]]
    assert len(line) == 1 and set(line[0].get_xdata()) == {8.0} and axes.get_xlim()[1] > 8.0
    assert [each.get_text() for each in axes.get_yticklabels()] == ["$5e-4_$"]
    (legend,) = axes.figure.legends
    assert [words.get_text() for words in legend.get_texts()] == ["a", "all that there is"]
    assert axes_of(bars._replace(limit=None, levels=(("twice", 10.0),))).get_xlim()[1] > 10.0


def test_the_squares_of_a_mask_are_its_sequences():
    found = [(patch.get_bbox().get_points().tolist(), patch.get_label()) for patch in axes_of(PICTURES[-1]).patches]
    assert found == [
        ([[0, 0], [2, 2]], "sequence 1"),
        ([[2, 2], [3, 3]], "sequence 2"),
        ([[3, 3], [5, 5]], "padding"),
    ]


def test_a_heat_map_says_every_value():
    heat = HeatMap("h", ("r",), ("2", "3", "4"), ((-1.0, None, 4.0),), ".1f", "depth", "packer")
    assert [text.get_text() for text in axes_of(heat).texts] == ["-1.0", "4.0"]
    assert len(axes_of(heat._replace(values=((-1.0, None, -2.0),))).texts) == 2


@pytest.mark.parametrize(
    "value, text",
    [(0, "0"), (0.02, "0.02"), (1500, "1,500"), (9999.4, "9,999"), (20_000, "20 k"), (1.5e6, "1.5 M"), (-3e9, "-3 G")],
)
def test_short_numbers(value, text):
    assert picture._short(value) == text


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
    for colours in (picture._PLAIN, [picture.COLOURS[name] for name in (*picture.SEQUENCES, "padding")]):
        light = [lightness(colour) for colour in colours]
        assert all(abs(one - other) >= 12 for one, other in zip(light, light[1:])), light
    assert len(set(picture._DASHES)) == len(picture._PLAIN)


def test_colours_are_seen_on_white():
    """Contrast by WCAG 2: 4.5 for words, 3 for what is drawn; padding is what is not there."""
    least = {"page": 1.0, "line": 1.2, "padding": 1.5, "ink": 4.5, "soft": 4.5}
    for name, colour in [*picture.COLOURS.items(), *(("", colour) for colour in picture._PLAIN)]:
        assert 1.05 / (luminance(linear(colour)) + 0.05) >= least.get(name, 3.0), colour


# What is left of light for eyes without the cones of red, or of green: Vienot, Brettel and Mollon (1999), linear RGB.
PROTAN = ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0))
DEUTAN = ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0))


def lab(light):
    """CIE L*a*b* of linear RGB, under D65."""
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(a * b for a, b in zip(row, light)) / white for row, white in zip(to_xyz, (0.9505, 1.0, 1.089))]
    x, y, z = (each ** (1 / 3) if each > 0.008856 else 7.787 * each + 16 / 116 for each in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("eyes", [((1, 0, 0), (0, 1, 0), (0, 0, 1)), PROTAN, DEUTAN], ids=["all", "no red", "no green"])
def test_sequences_and_padding_stay_apart_for_every_reader(eyes):
    """A difference of 2.3 is just seen."""
    seen = {}
    for name in ("first", "second", "third", "padding"):
        light = linear(picture.COLOURS[name])
        seen[name] = lab([max(0.0, sum(a * b for a, b in zip(row, light))) for row in eyes])
    for one in seen:
        for other in seen:
            assert one == other or sum((a - b) ** 2 for a, b in zip(seen[one], seen[other])) ** 0.5 > 20, (one, other)
