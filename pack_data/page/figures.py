"""Draws a picture through matplotlib, as a file of a size for a paper; matplotlib is imported only then."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Union

from pack_data.files import write_atomically
from pack_data.page import style
from pack_data.page.axes import scale, short
from pack_data.page.charts import Axis, Bars, HeatMap, Lines, Picture, Tiles, bar_limits, names_of
from pack_data.page.svg import standalone
from pack_data.plotting import new_figure, save

WIDTH = 6.5  # inches: the text of a page of a paper
_MARKERS = "osDv^P*X"
_DASHES = ("-", "--", ":", "-.", (0, (7, 2)), (0, (3, 3)), (0, (1, 2)), (0, (6, 2, 1, 2, 1, 2)))


def write(picture: Picture, path: Path) -> None:
    """Writes the picture, whole or not at all; .svg by our own hand, .png and .pdf through matplotlib."""
    if path.suffix == ".svg":
        write_atomically(path, standalone(picture).encode())
        return
    figure, (axes,) = new_figure(WIDTH, _height(picture))
    _DRAWERS[type(picture)](axes, picture)
    axes.set_title(picture.title, fontsize=9, loc="left")
    axes.tick_params(labelsize=7)
    save(figure, path, dots_per_inch=300)


def _height(picture: Picture) -> float:
    """Inches."""
    if isinstance(picture, Bars) and picture.across:
        thick = 0.2 if picture.stacked else 0.1 + 0.09 * len(picture.series)
        return 1.2 + thick * len(picture.categories)
    if isinstance(picture, Tiles):
        return 5.5 if picture.square else 1.3 + 0.25 * len(picture.rows)
    return 3.2


def _colours(padding: Sequence[bool]) -> List[Dict[str, Any]]:
    """What each series is filled with: those of padding with a hatch alone."""
    found: List[Dict[str, Any]] = []
    coloured = 0
    for each in padding:
        if each:
            found.append({"facecolor": "white", "edgecolor": "grey", "hatch": "////", "linewidth": 0.3})
        else:
            found.append(
                {"facecolor": style.FILLS[coloured % len(style.FILLS)], "edgecolor": "white", "linewidth": 0.3}
            )
            coloured += 1
    return found


def _axis(axis: Axis, line: Any, set_label: Any, set_scale: Any) -> None:
    set_label(axis.label, fontsize=8)
    if axis.log:
        set_scale("log", base=axis.log)
    line.set_major_formatter(lambda value, _: short(value))


def _bars(axes: Any, bars: Bars) -> None:
    fills = _colours([series.padding for series in bars.series])
    count = len(bars.series)
    width = 0.8 if bars.stacked else 0.8 / count
    places = list(range(len(bars.categories)))
    widths: Any = width
    if bars.edges:
        places = [(first + last) / 2 for first, last in zip(bars.edges, bars.edges[1:])]  # type: ignore[misc]
        widths = [last - first for first, last in zip(bars.edges, bars.edges[1:])]
    ends = [0.0] * len(bars.categories)
    for number, (series, fill) in enumerate(zip(bars.series, fills)):
        values = [value or 0.0 for value in series.values]
        shift = 0.0 if bars.stacked or bars.edges else (number - (count - 1) / 2) * width
        at = [place + shift for place in places]
        start = list(ends) if bars.stacked else [0.0] * len(values)
        draw = axes.barh if bars.across else axes.bar
        draw(at, values, widths, start, label=series.name, **fill)
        ends = [a + b for a, b in zip(ends, values)] if bars.stacked else [max(a, b) for a, b in zip(ends, values)]
        for place, low, high in zip(at, series.lower, series.upper):
            if low is not None and high is not None and high > low:
                line = ([low, high], [place, place]) if bars.across else ([place, place], [low, high])
                axes.plot(*line, color="black", linewidth=0.9, marker="|" if bars.across else "_", markersize=4)
    limits = bar_limits(bars)
    values_axis = (axes.xaxis, axes.set_xlabel, axes.set_xscale) if bars.across else (
        axes.yaxis, axes.set_ylabel, axes.set_yscale)  # fmt: skip
    _axis(bars.values, *values_axis)
    room = (
        1.0
        if bars.values.most is not None and not bars.ends
        else 1.04
        if not bars.ends
        else 1.3
        if bars.across
        else 1.1
    )
    (axes.set_xlim if bars.across else axes.set_ylim)(limits[0] * 1.04, limits[1] * room)
    if not bars.edges:
        (axes.set_yticks if bars.across else axes.set_xticks)(places)
        (axes.set_yticklabels if bars.across else axes.set_xticklabels)(bars.categories)
    if bars.across:
        axes.invert_yaxis()
        axes.set_ylabel(bars.along, fontsize=8)
    else:
        axes.set_xlabel(bars.along, fontsize=8)
    for place, end, words in zip(places, ends, bars.ends):
        if bars.across:
            axes.text(end, place, f" {words}", va="center", fontsize=6)
        else:
            axes.text(place, end, words, ha="center", va="bottom", fontsize=6)
    if limits[0] < 0:
        (axes.axvline if bars.across else axes.axhline)(0.0, color="black", linewidth=0.6)
    if count > 1:
        _legend(axes)


def _legend(axes: Any) -> None:
    axes.legend(fontsize=6, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _lines(axes: Any, lines: Lines) -> None:
    for number, line in enumerate(lines.lines):
        colour = style.FILLS[number % len(style.FILLS)]
        values = [float("nan") if value is None else value for value in line.y]
        axes.plot(
            line.x,
            values,
            color=colour,
            linestyle="none" if line.points else _DASHES[number % len(_DASHES)],
            marker=_MARKERS[number % len(_MARKERS)] if line.points or len(line.x) <= 60 else None,
            markersize=4,
            linewidth=1.2,
            label=line.name,
        )
    for name, level in lines.levels:
        axes.axhline(level, color="grey", linestyle="--", linewidth=0.9, label=name)
    _axis(lines.x, axes.xaxis, axes.set_xlabel, axes.set_xscale)
    _axis(lines.y, axes.yaxis, axes.set_ylabel, axes.set_yscale)
    for axis, limit in ((lines.x, axes.set_xlim), (lines.y, axes.set_ylim)):
        if not axis.log:
            limit(axis.least if axis.least is not None else min(0.0, limit()[0]), axis.most)
    if len(lines.lines) + len(lines.levels) > 1:
        _legend(axes)


def _heat_map(axes: Any, heat: HeatMap) -> None:
    shades = [[float("nan") if shade is None else shade for shade in row] for row in heat.shades()]
    axes.imshow(shades, cmap="Blues", vmin=0.0, vmax=1.25, aspect="auto")
    for down, row in enumerate(heat.values):
        for along, value in enumerate(row):
            if value is not None:
                axes.text(along, down, format(value, heat.form), ha="center", va="center", fontsize=7)
    axes.set_xticks(range(len(heat.columns)))
    axes.set_xticklabels(heat.columns)
    axes.set_yticks(range(len(heat.rows)))
    axes.set_yticklabels(heat.rows)
    axes.set_xlabel(heat.along, fontsize=8)
    axes.set_ylabel(heat.down, fontsize=8)


def _tiles(axes: Any, tiles: Tiles) -> None:
    fills = _colours([number in tiles.padding for number in range(len(tiles.series))])
    named = set()
    skipped, edges = None, []
    if tiles.x.skips:
        skipped = scale(tiles.x, [tile.right for tile in tiles.tiles], 0.0, 1.0)
        edges = [skipped.place(edge) for skip in tiles.x.skips for edge in (skip.start, skip.end)]
        tiles = tiles._replace(
            x=Axis(tiles.x.label, most=1.0),
            tiles=tuple(t._replace(left=skipped.place(t.left), right=skipped.place(t.right)) for t in tiles.tiles),
        )
    for tile in tiles.tiles:
        label = None if tile.series in named else tiles.series[tile.series]
        named.add(tile.series)
        axes.barh(
            tile.top, tile.right - tile.left, tile.bottom - tile.top, tile.left, align="edge", label=label,
            **fills[tile.series],
        )  # fmt: skip
    _axis(tiles.x, axes.xaxis, axes.set_xlabel, axes.set_xscale)
    if skipped is not None:
        axes.set_xticks([skipped.place(mark) for mark in skipped.ticks])
        axes.set_xticklabels([short(mark) for mark in skipped.ticks])
        for place in edges:
            axes.axvline(place, color="grey", linestyle="--", linewidth=0.7)
    axes.set_ylabel(tiles.y.label, fontsize=8)
    axes.set_xlim(0, tiles.x.most)
    if tiles.rows:
        axes.set_yticks([number + 0.5 for number in range(len(tiles.rows))])
        axes.set_yticklabels(tiles.rows)
        axes.set_ylim(0, len(tiles.rows))
    if tiles.square:
        axes.set_aspect("equal")
    axes.invert_yaxis()
    _legend(axes)


_DRAWERS: Dict[type, Callable[[Any, Any], None]] = {Bars: _bars, Lines: _lines, HeatMap: _heat_map, Tiles: _tiles}


def write_all(pictures: Sequence[Picture], path: Union[str, Path]) -> List[Path]:
    """A file for each picture: `path` itself for a single one, else its name with that of the picture."""
    path = Path(path)
    paths = [path.with_name(f"{path.stem}_{name}{path.suffix}") for name in names_of(pictures)]
    paths = [path] if len(pictures) == 1 else paths
    for picture, each in zip(pictures, paths):
        write(picture, each)
    return paths
