"""README's picture says what the published histogram says, and draws it."""

import importlib.util
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib")

from pack_data import LengthHistogram
from pack_data.display.picture import write
from pack_data.inspection.page_sections import _MOST_ROW_BARS
from tests.imports import ROOT

PICTURES = ROOT / "docs" / "pictures"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("padding", PICTURES / "padding.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_picture_is_that_of_today(script, tmp_path):
    """The same titles, and as many shapes; the versions of matplotlib differ in the bytes."""
    write(script.halves(), tmp_path / "padding.svg")
    committed, today = (ElementTree.parse(path / "padding.svg").getroot() for path in (PICTURES, tmp_path))
    svg = "{http://www.w3.org/2000/svg}"
    assert committed.find(f"{svg}title").text == today.find(f"{svg}title").text
    assert len(list(committed.iter(f"{svg}path"))) == pytest.approx(len(list(today.iter(f"{svg}path"))), rel=0.02)
    assert (PICTURES / "padding.svg").stat().st_size < 300_000


def test_the_numbers_are_those_of_the_histogram(script):
    histogram = LengthHistogram.published("wikipedia_512")
    before, after = script.halves()
    assert f"{histogram.sequences:,} rows, {100 * histogram.padding_share:.1f}% padding" in before.title
    assert "8,143,829 rows, 0.1% padding" in after.title


def test_the_areas_are_as_large_as_the_numbers_say(script):
    halves = script.halves()
    for half, share in zip(halves, (LengthHistogram.published("wikipedia_512").padding_share, 0.00116)):
        stacks = [stack for stack in zip(*(series.values for series in half.series)) if stack[0] is not None]
        assert all(sum(part or 0.0 for part in stack) == 512 for stack in stacks)
        assert sum(stack[-1] or 0.0 for stack in stacks) / (512 * len(stacks)) == pytest.approx(share, abs=0.01)
    bars = [sum(value is not None for value in half.series[0].values) for half in halves]
    assert bars[0] == 2 * bars[1] == _MOST_ROW_BARS and halves[0].edges == halves[1].edges


def test_the_architecture_page_shows_the_packages_of_today(tmp_path):
    """Its tables are those of the imports; the same bytes of the picture where matplotlib is the one that drew it."""
    spec = importlib.util.spec_from_file_location("architecture_picture", PICTURES / "architecture.py")
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    text = picture.PAGE.read_text(encoding="utf-8")
    assert picture.page(text) == text, f"run {picture.COMMAND}"
    level_of, direct = picture.plan()
    assert picture.hidden_lines(picture.places(level_of, direct), direct) == []
    picture.draw(tmp_path / "architecture.svg")
    drawn, kept = (ElementTree.parse(path).getroot() for path in (tmp_path / "architecture.svg", picture.PICTURE))
    # Lines lead from the middle of a package to that of another: they connect if none is clipped.
    rectangle = kept.find(".//{http://www.w3.org/2000/svg}clipPath/*")
    x, y, width, height = (float(rectangle.get(name)) for name in ("x", "y", "width", "height"))
    ends = re.findall(r'"M (\S+) (\S+) \nL (\S+) (\S+) \n" clip', picture.PICTURE.read_text(encoding="utf-8"))
    assert len(ends) == len(direct)
    for left, above, right, below in np.array(ends, float):
        assert x <= min(left, right) <= max(left, right) <= x + width and y <= min(above, below) < below <= y + height
    shapes = "{http://www.w3.org/2000/svg}path"
    assert [each.get("d") for each in drawn.iter(shapes)] == [each.get("d") for each in kept.iter(shapes)] or (
        matplotlib.__version__ not in (picture.PICTURE).read_text(encoding="utf-8")
    )
