"""Pictures have the sizes of their numbers, and are the same bytes each time."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("matplotlib", reason="needs matplotlib")

from pack_data.display import picture
from pack_data.display.picture import Axis, Bars, HeatMap, Line, Lines, MaskPicture, Series, write

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
        levels=(("most", 6.0),),
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


# Each picture once: drawing takes most of the time.
KINDS = {"svg": PICTURES[:3], "png": PICTURES[3:5], "pdf": PICTURES[5:]}


def axes_of(drawn):
    """matplotlib's axes with one picture drawn."""
    (axes,) = picture._figure([drawn], picture._FILE).subfigs[0].axes
    return axes


def write_each_kind(folder):
    """Write one picture of each kind into a file of each kind."""
    for kind, pictures in KINDS.items():
        write(pictures, Path(folder, f"picture.{kind}"))


def test_the_same_picture_is_the_same_bytes(tmp_path):
    """In another process, whatever its hashes are seeded with, and whatever the user has set."""
    (tmp_path / "matplotlibrc").write_text("font.size: 20\nsvg.fonttype: none\n")
    code = "import sys; from tests.pack_data.display.test_picture import write_each_kind; write_each_kind(sys.argv[1])"
    environment = {"PYTHONHASHSEED": "7", "MATPLOTLIBRC": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    here = tmp_path / "here"
    path = tmp_path / "there"
    for folder in (here, path):
        folder.mkdir()
    subprocess.run([sys.executable, "-c", code, str(path)], env=environment, check=True)
    write_each_kind(here)
    for kind in KINDS:
        name = f"picture.{kind}"
        assert (here / name).read_bytes() == (path / name).read_bytes()


@settings(max_examples=10, deadline=None, phases=(Phase.generate,))  # half a second each
@given(
    st.lists(st.tuples(*[st.floats(1, 1000)] * 3), min_size=2, max_size=5),
    st.booleans(),
    st.booleans(),
)
def test_bars_are_as_long_as_their_numbers_and_stand_on_each_other(stacks, across, stacked):
    series = []
    for number in range(3):
        series.append(Series(str(number), tuple(stack[number] for stack in stacks)))
    names = tuple(map(str, range(len(stacks))))
    bars = Bars("bars", names, Axis("slots"), tuple(series), stacked=stacked, across=across)
    axes = axes_of(bars)
    side = 0 if across else 1
    low, high = (axes.get_xlim if across else axes.get_ylim)()
    longest = max(sum(stack) if stacked else max(stack) for stack in stacks)
    assert low <= 0.0
    assert longest <= high < 1.1 * longest
    bases = [0.0] * len(stacks)
    for container, drawn in zip(axes.containers, series):
        for place, (bar, value) in enumerate(zip(container, drawn.values)):
            ends = bar.get_bbox().get_points().T[side]
            assert ends == pytest.approx((bases[place], bases[place] + value))
            if stacked:
                bases[place] += value


def test_intervals_and_levels_have_room():
    low, high = axes_of(PICTURES[0]).get_ylim()
    assert low == 0.0
    assert high > 4.0
    band = Line("a", (0.0, 1.0, 2.0), (1.0, 2.0, 1.0), (0.5, 1.0, None), (4.0, 3.0, 2.0))
    assert axes_of(Lines("Lines", Axis("x"), Axis("x"), (band,))).get_ylim()[1] > 4.0
    series = (Series("a", (5.0,)),)
    bars = Bars("b", ("$5e-4_$",), Axis("MiB"), series, across=True, levels=(("all there is", 8.0),))
    axes = axes_of(bars)
    assert axes.get_xlim()[1] > 8.0
    assert [label.get_text() for label in axes.get_yticklabels()] == ["$5e-4_$"]
    (legend,) = axes.figure.legends
    assert [words.get_text() for words in legend.get_texts()] == ["a", "all there is"]


def test_what_is_empty_is_drawn_too():
    axis = Axis("nothing")
    axes_of(Bars("Right", (), axis, (Series("a", ()),), across=True, stacked=True))
    axes_of(Lines("No line", axis, axis, ()))
    axes_of(Lines("No point", axis, axis, (Line("a", (), ()), Line("b", (0.0,), (None,)))))
    axes_of(HeatMap("No row", (), (), (), ".1f", "", ""))


def test_masks_and_heat_maps_show_every_value():
    squares = []
    for patch in axes_of(PICTURES[-1]).patches:
        squares.append((patch.get_bbox().get_points().tolist(), patch.get_label()))
    assert squares == [
        ([[0, 0], [2, 2]], "sequence 1"),
        ([[2, 2], [3, 3]], "sequence 2"),
        ([[3, 3], [5, 5]], "padding"),
    ]
    heat = HeatMap("h", ("r",), ("2", "3", "4"), ((-1.0, None, 4.0),), ".1f", "depth", "packer")
    assert [text.get_text() for text in axes_of(heat).texts] == ["-1.0", "4.0"]
