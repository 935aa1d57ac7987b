"""README's picture says what the published histogram says, and draws it."""

import importlib.util
import xml.etree.ElementTree as ElementTree

import pytest

matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib")

from pack_data import LengthHistogram
from pack_data.display.picture import write
from tests.imports import ROOT

PICTURES = ROOT / "docs" / "pictures"


def script(name):
    """Load a script beside the pictures."""
    spec = importlib.util.spec_from_file_location(name, PICTURES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def paths_in(file):
    """Return the shapes of a picture, as the text of each path."""
    root = ElementTree.parse(file).getroot()
    return [path.get("d") for path in root.iter("{http://www.w3.org/2000/svg}path")]


def test_readme_s_picture_shows_the_published_histogram(tmp_path):
    """Draw as many shapes as the committed picture; the versions of matplotlib differ in the bytes."""
    before, after = halves = script("padding").halves()
    histogram = LengthHistogram.published("wikipedia_512")
    padding = (histogram.padding_share, 0.00116)
    assert f"{histogram.sequences:,} rows, {padding[0]:.1%} padding" in before.title
    assert "8,143,829 rows, 0.1% padding" in after.title
    for half, share in zip(halves, padding):
        columns = zip(*(series.values for series in half.series))
        stacks = [column for column in columns if column[0] is not None]
        assert all(sum(height or 0.0 for height in stack) == 512 for stack in stacks)
        empty = sum(stack[-1] or 0.0 for stack in stacks)
        assert empty / (512 * len(stacks)) == pytest.approx(share, abs=0.01)

    write(halves, tmp_path / "padding.svg")
    drawn = len(paths_in(tmp_path / "padding.svg"))
    assert drawn == pytest.approx(len(paths_in(PICTURES / "padding.svg")), rel=0.02)


def test_the_architecture_page_shows_the_packages_of_today(tmp_path):
    """Its tables are those of the imports; the same shapes where matplotlib is the one that drew the picture."""
    architecture = script("architecture")
    text = architecture.PAGE.read_text(encoding="utf-8")
    assert architecture.page(text) == text, f"run {architecture.COMMAND}"
    level_of, direct = architecture.plan()
    places = architecture.places(level_of, direct)
    assert architecture.hidden_lines(places, direct) == []
    architecture.draw(tmp_path / "architecture.svg")
    committed = architecture.PICTURE.read_text(encoding="utf-8")
    if matplotlib.__version__ in committed:
        assert paths_in(tmp_path / "architecture.svg") == paths_in(architecture.PICTURE)
