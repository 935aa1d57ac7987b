"""README's picture says what the published histogram says, and draws it."""

import importlib.util
import re
from pathlib import Path

import pytest

from pack_data import LengthHistogram, Packing

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
NUMBERS = r"([\d,]+) rows, ([\d.]+)% padding</text>"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("padding", PICTURES / "padding.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn_padding(svg, width):
    """Share of padding in the area of each half: what its widest layer, drawn last but one, leaves of the block."""
    halves = []
    for left, height, path in re.findall(
        r'class="padding" x="(\d+)" y="64" width="\d+" height="(\d+)"/>\n<path class="s\d" d="M\d+ 64(.+?)H\d+z"', svg
    ):
        covered = sum((float(end) - int(left)) * int(lines) for end, lines in re.findall(r"H([\d.]+)v(\d+)", path))
        halves.append((1 - covered / (width * int(height)), int(height)))
    return halves


def test_the_committed_picture_has_the_numbers_of_today(script):
    committed = (PICTURES / "padding.svg").read_text(encoding="utf-8")
    found = re.findall(NUMBERS, committed)
    assert found == re.findall(NUMBERS, script.draw())
    (rows, padding), (packed_rows, packed_padding) = found
    histogram = LengthHistogram.published("wikipedia_512")
    assert rows == f"{histogram.sequences:,}" and padding == f"{100 * histogram.padding_share:.1f}"
    assert packed_rows == "8,143,829" and float(packed_padding) < 0.2
    assert len(committed) < 100_000


def test_the_areas_are_as_large_as_the_numbers_say(script):
    committed = (PICTURES / "padding.svg").read_text(encoding="utf-8")
    (before, lines), (after, packed_lines) = drawn_padding(committed, script.WIDTH)
    assert before == pytest.approx(LengthHistogram.published("wikipedia_512").padding_share, abs=0.005)
    assert after == pytest.approx(0.00116, abs=0.005)
    assert lines == 2 * packed_lines


def test_lines_are_the_rows_at_even_distances(script):
    packing = Packing("by hand", 8, 3, ((8,), (4, 4), (3, 3, 2)), (20, 10, 10))
    assert script.lines(packing, 4) == [(8,), (8,), (4, 4), (3, 3, 2)]
