"""Pictures: values that say what is drawn, and their drawing by matplotlib, which is imported only then.

A picture is `Bars`, `Lines`, a `HeatMap` or `Tiles`. `write` makes a file of it, `drawings` the SVG of a page. A colour
has one meaning in all of them (`COLOURS`). Nothing depends on the date or the user's settings: the same input gives
the same bytes.
"""

from __future__ import annotations

import io
import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import cycle
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from pack_data.reading.files import write_atomically
from pack_data.reading.packages import load_package

_Values = Tuple[Optional[float], ...]  # None: there is no value


# ---- what is drawn ---------------------------------------------------------------------------------------------------


class Skip(NamedTuple):
    """Numbers of an axis that are not drawn, but for a gap."""

    start: float
    end: float
    about: str  # what is left out


class Axis(NamedTuple):
    """What an axis is of, with its unit.

    log: base of a logarithmic axis, 0 for a linear one. least, most: where it begins and ends; None: as the values
    need, with 0. The axis of bars begins at 0 or below. skips: what a linear axis of `Tiles` leaves out,
    ascending.
    """

    label: str
    log: int = 0
    least: Optional[float] = None
    most: Optional[float] = None
    skips: Tuple[Skip, ...] = ()


class Series(NamedTuple):
    """One value for each category.

    lower, upper: the interval of each value. hints: the words of each value under the pointer; none: its name and
    number. role: the name of its colour in `COLOURS`; none: the next of those without a meaning.
    """

    name: str
    values: _Values
    lower: _Values = ()
    upper: _Values = ()
    hints: Tuple[str, ...] = ()
    role: str = ""


class Bars(NamedTuple):
    """Bars of one or more series, from 0: beside each other, or stacked.

    across: the bars go to the right, each category on a line. edges: numbers that begin and end each bar, ascending,
    for bars without gaps over an axis of numbers. ends: a text at the end of each bar of a stack or a single series.
    levels: (name, place) of lines across bars with edges. limit: (name, value) of what no bar may exceed.
    """

    title: str
    categories: Tuple[str, ...]
    values: Axis
    series: Tuple[Series, ...]
    along: str = ""  # what the categories are
    stacked: bool = False
    across: bool = False
    edges: Tuple[float, ...] = ()
    ends: Tuple[str, ...] = ()
    notes: Tuple[str, ...] = ()
    levels: Tuple[Tuple[str, float], ...] = ()
    limit: Optional[Tuple[str, float]] = None

    def _reach(self) -> Tuple[float, float]:
        """The least and the largest value that the axis must hold, 0 among them."""
        found = [0.0] if self.limit is None else [0.0, self.limit[1]]
        found += [value for _, value in self.levels] if self.across else []
        if self.stacked:
            for stack in zip(*(series.values for series in self.series)):
                found += [sum(value for value in stack if value and value * sign > 0) for sign in (1, -1)]
        else:
            for series in self.series:
                found += [value for value in (*series.values, *series.lower, *series.upper) if value is not None]
        return min(found), max(found) if self.values.most is None else self.values.most


class Line(NamedTuple):
    """points: marks alone, without a line between them. lower, upper: the ends of a band around the line."""

    name: str
    x: Tuple[float, ...]
    y: _Values
    points: bool = False
    hints: Tuple[str, ...] = ()
    lower: _Values = ()
    upper: _Values = ()


class Lines(NamedTuple):
    """levels: (name, y) of lines across the whole picture."""

    title: str
    x: Axis
    y: Axis
    lines: Tuple[Line, ...]
    levels: Tuple[Tuple[str, float], ...] = ()
    notes: Tuple[str, ...] = ()


class HeatMap(NamedTuple):
    """values: [rows][columns]; the larger a value, the stronger its colour. form: format specification of the cells."""

    title: str
    rows: Tuple[str, ...]
    columns: Tuple[str, ...]
    values: Tuple[_Values, ...]
    form: str
    along: str  # what the columns are
    down: str  # what the rows are
    notes: Tuple[str, ...] = ()


class Tile(NamedTuple):
    """A rectangle from (left, top) to (right, bottom), of the series with this number."""

    left: float
    right: float
    top: float
    bottom: float
    series: int
    hint: str


class Tiles(NamedTuple):
    """Rectangles on two axes, y from the top down.

    rows: names of the rows [0, 1), [1, 2), ... instead of numbers. roles: of the series, as `Series.role`; none: all
    without a meaning. square: as high as wide.
    """

    title: str
    x: Axis
    y: Axis
    series: Tuple[str, ...]
    tiles: Tuple[Tile, ...]
    rows: Tuple[str, ...] = ()
    roles: Tuple[str, ...] = ()
    square: bool = False
    notes: Tuple[str, ...] = ()


Picture = Union[Bars, Lines, HeatMap, Tiles]


# ---- files and drawings ----------------------------------------------------------------------------------------------

# What each colour means, everywhere, on a white page and on a dark one. The three sequences stay apart for readers who
# do not see red or green; neighbours in a stack differ in lightness by at least 12 of 100, as those of `_PLAIN` do.
COLOURS = {
    "page": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#59636e", "#9198a1"),  # notes, and levels that are no limits
    "line": ("#d5d9de", "#30363d"),
    "link": ("#0b57a4", "#6cb0ff"),
    "limit": ("#b3261e", "#ff8a80"),
    "padding": ("#c3cad3", "#444c56"),  # empty slots, idle time
    "first": ("#0b5fa5", "#4c9be8"),  # sequence of a pack
    "second": ("#cf7a00", "#f0a63c"),
    "third": ("#0f7752", "#3fb98a"),
    "further": ("#c46f9a", "#e59abf"),  # all after the third
    "tokens": ("#2496a3", "#55c3cf"),  # of any sequence
    "plum": ("#5b3a8e", "#ab8ee6"),
    "sand": ("#a88f4f", "#dcc78e"),
    "brown": ("#6b4423", "#c79a6b"),
    "lilac": ("#9a78cf", "#d3bdf5"),
    "maroon": ("#7a2b3f", "#e08aa0"),
    "olive": ("#86862a", "#c3c35a"),
    "night": ("#2b2f45", "#a0a6c8"),
    "stone": ("#737a83", "#c2c8d0"),
    "slate": ("#44546a", "#8496b0"),
}
SEQUENCES = ("first", "second", "third", "further")  # roles
_PLAIN = tuple(COLOURS)[tuple(COLOURS).index("plum") :]  # of what has no role
DASHES = ("-", "--", ":", "-.", (0, (7, 2)), (0, (3, 3)), (0, (1, 2)), (0, (6, 2, 1, 2, 1, 2)), (0, (9, 2, 2, 2)))
_MARKERS = "osDv^P*Xp"
_MARKS = 60  # a line of more points is drawn without marks; they still answer to the pointer
_POINTS = 400  # of a line, about
_INK, _PAGE = COLOURS["ink"][0], COLOURS["page"][0]
_SETTINGS = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.parse_math": False,  # a name may have dollars
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
    "grid.color": COLOURS["line"][0],
    "grid.linewidth": 0.5,
    "legend.frameon": False,
}


class _Sheet(NamedTuple):
    """What pictures are drawn on.

    width: inches. letters: points. page: as a part of a page, which writes the titles, and has letters and colours of
    its own; else a file, which looks alike everywhere.
    """

    width: float
    letters: float
    page: bool

    def holds(self, letters: int) -> int:
        """How many letters stand where a file holds so many."""
        return int(letters * self.width / _FILE.width * _FILE.letters / self.letters)

    def settings(self, pictures: Sequence[Picture]) -> Any:
        found = {**_SETTINGS, "font.size": self.letters, "svg.fonttype": "path", "svg.hashsalt": pictures[0].title}
        if self.page:
            found.update({"svg.fonttype": "none", "figure.facecolor": "none", "axes.facecolor": "none"})
        return load_package("matplotlib.style", "drawing").context(["default", found])


_FILE = _Sheet(6.5, 7.0, False)  # as wide as the text of a page of a paper
_PART = _Sheet(5.0, 9.0, True)  # so that its letters can be read on a phone, where all of it is as wide as a hand
_UNDATED = {"pdf": {"CreationDate": None}, "png": {"Software": None}}
_SVG, _LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"


def write(pictures: Sequence[Picture], path: Union[str, Path]) -> None:
    """Writes the pictures below each other as one file, whole or not at all: .png, .pdf or .svg."""
    path = Path(path)
    if path.suffix.lower() == ".svg":
        write_atomically(path, ElementTree.tostring(_svg(pictures)) + b"\n")
        return
    image, form = io.BytesIO(), path.suffix[1:].lower() or "png"
    with _FILE.settings(pictures):
        _figure(pictures, []).savefig(image, dpi=200, format=form, metadata=_UNDATED.get(form))
    write_atomically(path, image.getvalue())


def drawings(pictures: Sequence[Picture]) -> List[str]:
    """The SVG of pictures of a page, without titles; no two have one id in them where no two have one title."""
    return [ElementTree.tostring(_svg([picture], _PART), encoding="unicode") for picture in pictures]


def _svg(pictures: Sequence[Picture], sheet: _Sheet = _FILE) -> ElementTree.Element:
    """The drawing with a <title> in each part that has a hint, and without names that nothing refers to."""
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _LINK)
    hints: List[Sequence[str]] = []
    text = io.BytesIO()
    with sheet.settings(pictures):
        figure = _figure(pictures, hints, sheet)
        # `savefig` would draw all twice.
        canvas = load_package("matplotlib.backends.backend_svg", "drawing").FigureCanvasSVG(figure)
        canvas.print_svg(text, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    root = ElementTree.fromstring(text.getvalue())
    root.set("role", "img")
    root.set("aria-label", "; ".join(picture.title for picture in pictures))
    defined = {id(each) for definitions in root.iter(f"{{{_SVG}}}defs") for each in definitions.iter()}
    used = " ".join(value for each in root.iter() for name, value in each.attrib.items() if "#" in value)
    named = set(re.findall(r"#([\w.-]+)", used))
    for group in list(root.iter()):
        group.text, group.tail = ((words or "").strip() or None for words in (group.text, group.tail))
        name = group.get("id", "")
        if name.startswith("hints"):
            shapes = [each for each in group.iter() if each.tag[-4:] in ("path", "}use") and id(each) not in defined]
            for shape, words in zip(shapes, hints[int(name[5:])]):
                ElementTree.SubElement(shape, f"{{{_SVG}}}title").text = words
        if name and name not in named:
            del group.attrib["id"]
        style = group.get("style")
        if sheet.page and style:  # the page's own colours, which follow the reader's choice of light or dark
            group.set("style", re.sub("#[0-9a-f]{6}", lambda found: _VARIABLES.get(found[0], found[0]), style))
    return root


_VARIABLES = {light: f"var(--{name})" for name, (light, _) in COLOURS.items()}


def _figure(pictures: Sequence[Picture], hints: List[Sequence[str]], sheet: _Sheet = _FILE) -> Any:
    """hints: filled with the words of each group that is drawn; its id is "hints" and its place in the list."""
    from matplotlib.transforms import blended_transform_factory

    large = sheet.letters / _FILE.letters
    heads = [0.08 + 0.15 * _legend_lines(picture, sheet)[1] for picture in pictures]
    heights = [large * (_height(picture) + head) for picture, head in zip(pictures, heads)]
    size = (sheet.width, sum(heights))
    figure = load_package("matplotlib.figure", "drawing").Figure(figsize=size, layout="constrained")
    every = list(figure.subplots(len(pictures), 1, squeeze=False, height_ratios=heights).flat)
    for axes, picture, head in zip(every, pictures, heads):
        handles = _DRAWERS[type(picture)](_Axes(axes, hints, sheet), picture)
        # Title and legend begin at the figure's edge, not at that of the axes, which long names move to the right. The
        # layout knows nothing of them: a blank title keeps their place.
        at_edge = blended_transform_factory(figure.transFigure, axes.transAxes)
        axes.set_title(" ", y=1.0, pad=72 * large * head, fontsize=1.0 if sheet.page else "large")
        if not sheet.page:
            axes.annotate(
                picture.title, (0.005, 1.0), (0, 72 * large * head), xycoords=at_edge, textcoords="offset points",
                fontsize="x-large", fontweight="bold", annotation_clip=False,
            ).set_in_layout(False)  # fmt: skip
        columns, lines = _legend_lines(picture, sheet)
        if lines:
            axes.legend(
                *zip(*handles), loc="lower left", bbox_to_anchor=(0.0, 1.0), bbox_transform=at_edge, ncols=columns,
                borderpad=0.3, borderaxespad=0.0, handlelength=2.4, columnspacing=1.4, labelspacing=0.3,
            ).set_in_layout(False)  # fmt: skip
    return figure


def _legend_lines(picture: Picture, sheet: _Sheet) -> Tuple[int, int]:
    """Columns and lines of the legend; no line for a single name."""
    names: Sequence[str] = ()
    if isinstance(picture, Tiles):
        names = picture.series
    elif isinstance(picture, (Bars, Lines)):
        drawn = picture.series if isinstance(picture, Bars) else picture.lines
        names = [each.name for each in drawn] + [name for name, _ in picture.levels]
        names += [picture.limit[0]] if isinstance(picture, Bars) and picture.limit else []
    if len(names) < 2:
        return 0, 0
    widths = [len(name) + 7 for name in names]
    columns = len(names) if sum(widths) <= sheet.holds(115) else max(1, sheet.holds(115) // max(widths))
    return columns, -(-len(names) // columns)


def _height(picture: Picture) -> float:
    """Inches, without title and legend."""
    if isinstance(picture, Bars) and picture.across:
        thick = 0.2 if picture.stacked else 0.1 + 0.09 * len(picture.series)
        return 0.8 + thick * len(picture.categories)
    if isinstance(picture, HeatMap):
        return 0.8 + 0.22 * len(picture.rows)
    if isinstance(picture, Tiles):
        return 4.4 if picture.square else 0.8 + 0.25 * len(picture.rows)
    return 2.4


# ---- how it is drawn -------------------------------------------------------------------------------------------------

_Handles = List[Tuple[Any, str]]  # of a legend
_Corners = Tuple[float, float, float, float]  # left, right, bottom, top


class _Axes(NamedTuple):
    """matplotlib's axes, and the hints of what is drawn on them."""

    axes: Any
    hints: List[Sequence[str]]
    sheet: _Sheet

    def said(self, artist: Any, words: Sequence[str]) -> None:
        artist.set_gid(f"hints{len(self.hints)}")
        self.hints.append(words)

    def boxes(self, corners: Sequence[_Corners], words: Sequence[str], **style: Any) -> None:
        """Filled rectangles that say these words."""
        from matplotlib.collections import PolyCollection

        shapes = [[(a, c), (b, c), (b, d), (a, d)] for a, b, c, d in corners]
        self.said(self.axes.add_collection(PolyCollection(shapes, **style), autolim=False), words)

    def axis(self, which: str, axis: Axis, low: float, high: float, integers: bool = False) -> None:
        """Name, scale, limits and numbers of the x or y axis."""
        line = getattr(self.axes, f"{which}axis")
        getattr(self.axes, f"set_{which}label")(axis.label)
        if axis.log:
            getattr(self.axes, f"set_{which}scale")("log", base=axis.log)
        else:
            line.set_major_locator(_ticks(integers))
            getattr(self.axes, f"set_{which}lim")(low, high if high > low else low + 1.0)
        line.set_major_formatter(lambda value, _: _short(value))
        self.axes.grid(True, axis=which)

    def names(self, which: str, places: Sequence[float], names: Sequence[str]) -> None:
        """Names instead of numbers; below the picture only as many as have room."""
        room = 1 if which == "y" else max(1, -(-sum(len(name) + 2 for name in names) // self.sheet.holds(110)))
        getattr(self.axes, f"set_{which}ticks")(places[::room])
        longest = self.sheet.holds(48)
        kept = [name if len(name) <= longest else name[: longest - 1] + "…" for name in names[::room]]
        getattr(self.axes, f"set_{which}ticklabels")(kept)
        getattr(self.axes, f"{which}axis").set_tick_params(length=0)


def _ticks(integers: bool = False) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(6, integer=integers, steps=[1, 2, 5, 10])


def _short(value: float) -> str:
    """`0.02`, `1,500`, `20 k`, `1.5 M`: a number of few characters."""
    size = abs(value)
    if size >= 10_000:
        for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size >= unit:
                return f"{value / unit:.4g} {letter}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def _fills(roles: Sequence[str]) -> List[Dict[str, Any]]:
    """What each series is filled with, by its role."""
    plain = cycle(_PLAIN)
    return [{"facecolor": COLOURS[role or next(plain)][0], "edgecolor": _PAGE, "linewidth": 0.3} for role in roles]


def _patches(names: Sequence[str], fills: Sequence[Dict[str, Any]]) -> _Handles:
    from matplotlib.patches import Patch

    return [(Patch(**fill), name) for name, fill in zip(names, fills)]


def _bars(on: _Axes, bars: Bars) -> _Handles:
    places = list(zip(bars.edges, bars.edges[1:])) or [(n + 0.1, n + 0.9) for n in range(len(bars.categories))]
    fills = _fills([series.role for series in bars.series])
    reached = [[0.0, 0.0] for _ in places]  # the ends of each stack, below and above 0
    furthest = [0.0] * len(places)
    for number, (series, fill) in enumerate(zip(bars.series, fills)):
        corners, words = [], []
        share = (0, 1) if bars.stacked else (number / len(bars.series), (number + 1) / len(bars.series))
        for place, value in enumerate(series.values):
            if value is None:
                continue
            left, right = places[place]
            near, far = (left + (right - left) * part for part in share)
            start = reached[place][value >= 0] if bars.stacked else 0.0
            reached[place][value >= 0] = start + value
            furthest[place] = max(furthest[place], start + value)
            ends = (start, start + value)
            corners.append((*ends, near, far) if bars.across else (near, far, *ends))
            words.append(_hint(series, place, bars.categories[place], bars.values.label))
        if len(bars.edges) > 80:  # lines between the bars would hide them
            fill = {**fill, "edgecolor": fill["facecolor"], "linewidth": 0.6}
        on.boxes(corners, words, **fill)
        for place, low, high in zip(range(len(places)), series.lower, series.upper):
            if low is not None and high is not None and high > low:
                left, right = places[place]
                middle = left + (right - left) * sum(share) / 2
                line = ([low, high], [middle] * 2) if bars.across else ([middle] * 2, [low, high])
                on.axes.plot(*line, color=_INK, linewidth=0.9, marker="|" if bars.across else "_", markersize=4)
    values, others = ("x", "y") if bars.across else ("y", "x")
    low, high = bars._reach()
    room = 1.0 if high == bars.values.most else 1.1 if bars.ends and not bars.across else 1.04
    on.axis(values, bars.values, low * 1.04, high * room)
    if bars.edges:
        on.axis(others, Axis(bars.along), bars.edges[0], bars.edges[-1])
    else:
        middles = [(left + right) / 2 for left, right in places]
        on.names(others, middles, bars.categories)
        getattr(on.axes, f"set_{others}label")(bars.along)
        getattr(on.axes, f"set_{others}lim")(0, max(1, len(places)))
        if bars.across and bars.ends:
            beside = on.axes.secondary_yaxis("right")
            beside.set_yticks(middles)
            beside.set_yticklabels(bars.ends)
            beside.tick_params(length=0)
            beside.spines["right"].set_visible(False)
        else:
            for middle, end, text in zip(middles, furthest, bars.ends):
                on.axes.text(middle, end, text, ha="center", va="bottom")
    if bars.across:
        on.axes.invert_yaxis()
    if low < 0:
        (on.axes.axvline if bars.across else on.axes.axhline)(0.0, color=_INK, linewidth=0.6)
    handles = _patches([series.name for series in bars.series], fills)
    handles += [(on.axes.axvline(x, **_level(n)), name) for n, (name, x) in enumerate(bars.levels)]
    if bars.limit is not None:
        line = on.axes.axvline if bars.across else on.axes.axhline
        handles.append((line(bars.limit[1], color=COLOURS["limit"][0], linewidth=1.6), bars.limit[0]))
    return handles


def _hint(series: Series, place: int, category: str, unit: str) -> str:
    if series.hints:
        return series.hints[place]
    interval = ""
    if series.lower and series.lower[place] is not None and series.upper[place] is not None:
        interval = f" ({series.lower[place]:,.6g} to {series.upper[place]:,.6g})"
    return f"{category}, {series.name}: {series.values[place]:,.6g}{interval}; {unit}"


def _level(number: int) -> Dict[str, Any]:
    return {"color": COLOURS["soft"][0], "linestyle": ("--", ":", "-.")[number % 3], "linewidth": 1.0}


def _thinned(x: Sequence[float], y: Sequence[Any]) -> List[int]:
    """Places of at most about `_POINTS` points that look like all of them: of each range the lowest and the highest."""
    count = len(x)
    if count <= _POINTS:
        return list(range(count))
    kept = {0, count - 1}
    ranges = _POINTS // 2
    for number in range(ranges):
        places = [
            place for place in range(number * count // ranges, (number + 1) * count // ranges) if y[place] is not None
        ]
        if places:
            kept |= {min(places, key=lambda place: y[place]), max(places, key=lambda place: y[place])}
    return sorted(kept)


def _lines(on: _Axes, lines: Lines) -> _Handles:
    handles: _Handles = []
    for number, line in enumerate(lines.lines):
        kept = _thinned(line.x, line.y)
        few = line.points or len(line.x) <= _MARKS
        style = {
            "color": COLOURS[_PLAIN[number % len(_PLAIN)]][0],
            "linestyle": "none" if line.points else DASHES[number % len(DASHES)],
            "marker": _MARKERS[number % len(_MARKERS)] if few else None,
        }
        values = [math.nan if line.y[place] is None else line.y[place] for place in kept]
        (drawn,) = on.axes.plot(
            [line.x[place] for place in kept], values, markersize=4, linewidth=1.2, clip_on=False, **style
        )
        handles.append((drawn, line.name))
        if line.lower:
            band = [[math.nan if ends[place] is None else ends[place] for place in kept] for ends in line[-2:]]
            on.axes.fill_between(
                [line.x[place] for place in kept], *band, color=style["color"], alpha=0.15, linewidth=0
            )
        marked = [place for place in kept if line.y[place] is not None]
        # Over the marks circles that can be pointed at, and are hardly seen.
        points = on.axes.scatter(
            [line.x[place] for place in marked],
            [line.y[place] for place in marked],
            s=30,
            color=style["color"],
            alpha=0.004,
            linewidth=0,
            clip_on=False,
        )
        on.said(points, [_point(lines, line, place) for place in marked])
    for number, (name, level) in enumerate(lines.levels):
        handles.append((on.axes.axhline(level, **_level(number)), name))
    xs = [x for line in lines.lines for x in line.x]
    ys = [y for line in lines.lines for y in (*line.y, *line.lower, *line.upper) if y is not None]
    ys += [level for _, level in lines.levels]
    on.axis("x", lines.x, *_ends(lines.x, xs), all(float(x).is_integer() for x in xs))
    low, high = _ends(lines.y, ys)
    on.axis("y", lines.y, low, high if lines.y.most is not None else high + 0.04 * (high - low))
    return handles


def _ends(axis: Axis, values: Sequence[float]) -> Tuple[float, float]:
    found = [value for value in values if math.isfinite(value)]
    low = axis.least if axis.least is not None else min([0.0, *found])
    return low, axis.most if axis.most is not None else max([0.0, *found])


def _point(lines: Lines, line: Line, place: int) -> str:
    if line.hints:
        return line.hints[place]
    return f"{line.name}: {line.y[place]:,.6g} at {line.x[place]:,.6g} ({lines.y.label}; {lines.x.label})"


def _heat_map(on: _Axes, heat: HeatMap) -> _Handles:
    from matplotlib.colors import to_rgba

    corners, words, colours = [], [], []
    most = max([value for row in heat.values for value in row if value is not None and value > 0], default=1.0)
    for down, (name, row) in enumerate(zip(heat.rows, heat.values)):
        for along, value in enumerate(row):
            if value is None:
                continue
            corners.append((float(along), along + 1.0, float(down), down + 1.0))
            words.append(f"{name}, {heat.columns[along]}: {format(value, heat.form)}")
            # The square root shows small differences between small values; half is where ink can still be read.
            colours.append(to_rgba(COLOURS["plum"][0], 0.04 + 0.46 * (max(0.0, value) / most) ** 0.5))
            on.axes.text(along + 0.5, down + 0.5, format(value, heat.form), ha="center", va="center")
    on.boxes(corners, words, facecolor=colours, edgecolor=_PAGE, linewidth=0.8)
    for which, names, label in (("x", heat.columns, heat.along), ("y", heat.rows, heat.down)):
        on.names(which, [number + 0.5 for number in range(len(names))], names)
        getattr(on.axes, f"set_{which}label")(label)
        getattr(on.axes, f"set_{which}lim")(0, max(1, len(names)))
    on.axes.invert_yaxis()
    return []


_GAP = 0.03  # of what is drawn, for each skip


def _without(skips: Sequence[Skip], least: float, most: float) -> Callable[[float], float]:
    """Where a number stands on an axis from least to most on which each skip is a gap."""
    drawn = most - least - sum(skip.end - skip.start for skip in skips)

    def place(value: float) -> float:
        for skip in reversed(skips):
            inside = min(max((value - skip.start) / (skip.end - skip.start), 0.0), 1.0)
            value += inside * (_GAP * drawn - (skip.end - skip.start))
        return value

    return place


def _tiles(on: _Axes, tiles: Tiles) -> _Handles:
    most = tiles.x.most if tiles.x.most is not None else max((tile.right for tile in tiles.tiles), default=1.0)
    place = _without(tiles.x.skips, 0.0, most)
    fills = _fills(tiles.roles or [""] * len(tiles.series))
    for number, fill in enumerate(fills):
        own = [tile for tile in tiles.tiles if tile.series == number]
        on.boxes(
            [(place(tile.left), place(tile.right), tile.top, tile.bottom) for tile in own],
            [tile.hint for tile in own],
            **fill,
        )
    on.axis("x", tiles.x, 0.0, place(most))
    if tiles.x.skips:
        edges = [0.0, *(edge for skip in tiles.x.skips for edge in skip[:2]), most]
        located = _ticks().tick_values(0.0, place(most))
        step = located[1] - located[0]
        marks = [
            number * step
            for first, last in zip(edges[::2], edges[1::2])
            for number in range(math.ceil(first / step - 1e-9), math.floor(last / step + 1e-9) + 1)
        ]
        on.axes.set_xticks([place(mark) for mark in marks])
        on.axes.set_xticklabels([_short(mark) for mark in marks])
        for skip in tiles.x.skips:
            line = on.axes.vlines([place(skip.start), place(skip.end)], 0, 1, transform=on.axes.get_xaxis_transform(),
                                  color=COLOURS["soft"][0], linestyle="--", linewidth=0.7)  # fmt: skip
            on.said(line, [skip.about] * 2)
    if tiles.rows:
        on.names("y", [number + 0.5 for number in range(len(tiles.rows))], tiles.rows)
        on.axes.set_ylim(0, len(tiles.rows))
        on.axes.set_ylabel(tiles.y.label)
    else:
        lowest = max((tile.bottom for tile in tiles.tiles), default=1.0)
        on.axis("y", tiles.y, 0.0, tiles.y.most if tiles.y.most is not None else lowest)
    if tiles.square:
        on.axes.set_aspect("equal")
    on.axes.invert_yaxis()
    return _patches(tiles.series, fills)


_DRAWERS: Dict[type, Callable[[_Axes, Any], _Handles]] = {Bars: _bars, Lines: _lines, HeatMap: _heat_map, Tiles: _tiles}
