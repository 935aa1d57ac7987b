"""Pictures as files of a size for a paper: one each, bars from 0, the same numbers as on the page."""

import pytest

from pack_data.page import figures
from pack_data.page.charts import Axis, Bars, HeatMap, Series, names_of
from pack_data.page.svg import standalone
from tests.pack_data.page.test_page import PICTURES


@pytest.fixture
def axes(monkeypatch):
    """The axes of what is drawn."""
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    found = []
    new = figures.new_figure

    def record(*arguments, **options):
        figure, every = new(*arguments, **options)
        found.extend(every)
        return figure, every

    monkeypatch.setattr(figures, "new_figure", record)
    return found


def test_each_has_a_file_and_a_size_for_a_paper(axes, tmp_path):
    written = figures.write_all(PICTURES, tmp_path / "all.png")
    assert [path.name for path in written] == [f"all_{name}.png" for name in names_of(PICTURES)]
    assert len(set(written)) == len(PICTURES) == len(axes)
    for path, drawn, picture in zip(written, axes, PICTURES):
        assert path.stat().st_size > 3000 and drawn.get_title(loc="left") == picture.title
        assert drawn.figure.get_figwidth() == figures.WIDTH


@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize("values", [(3.0, 5.0), (1.9, 2.0), (-1.0, 4.0)])
def test_bars_start_at_0(axes, tmp_path, across, values):
    bars = Bars("b", ("one", "two"), Axis("slots"), (Series("a", values),), across=across)
    figures.write(bars, tmp_path / "bars.png")
    low, high = axes[0].get_xlim() if across else axes[0].get_ylim()
    assert low <= min(0.0, *values) and high >= max(values) and (low == 0.0) == (min(values) > 0)
    drawn = sorted(each.get_width() if across else each.get_height() for each in axes[0].patches)
    assert drawn == sorted(values)


def test_svg_files_need_no_package(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "new_figure", None)
    (path,) = figures.write_all(PICTURES[:1], tmp_path / "one.svg")
    assert path.name == "one.svg" and path.read_text(encoding="utf-8") == standalone(PICTURES[0])


def test_long_titles_have_names_of_their_own():
    long = [PICTURES[0]._replace(title="x" * 70 + end) for end in "abc"]
    assert len(set(names_of(long))) == 3
    alike = [PICTURES[0]._replace(title=title) for title in ("x", "x 3", "X", "X 3")]
    assert len(set(names_of(alike))) == 4


def test_a_heat_map_takes_values_below_0(axes, tmp_path):
    heat = HeatMap("h", ("r",), ("2", "3", "4"), ((-1.0, None, 4.0),), ".1f", "depth", "packer")
    figures.write(heat, tmp_path / "heat.png")
    (image,) = axes[0].images
    assert image.get_array().filled(-9.0).tolist() == [[0.0, -9.0, 1.0]]
    assert heat._replace(values=((-1.0, -2.0),)).shades() == [(0.0, 0.0)]
