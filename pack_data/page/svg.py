"""Draws a picture as SVG. Colours and fonts are classes of `style.DRAWING`; what is pointed at has a title."""

from __future__ import annotations

from html import escape
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from pack_data.page import style
from pack_data.page.axes import Scale, scale, short
from pack_data.page.charts import Axis, Bars, HeatMap, Line, Lines, Picture, Tiles, bar_limits, hint, thinned

WIDTH = 760.0
_LETTER = 6.6  # mean width of a character of 12 px
_MARKS = 60  # a line of more points is drawn without marks; they still answer to the pointer


def draw(picture: Picture, number: int = 0) -> str:
    """An `<svg>` element. number: makes the names inside it differ from those of other pictures on a page."""
    drawing = _Drawing(picture.title, number)
    _DRAWERS[type(picture)](drawing, picture)
    return drawing.finished()


def standalone(picture: Picture) -> str:
    """An SVG file, as the page's button saves it."""
    element = draw(picture)
    opened = element.index(">") + 1
    return f"{element[:opened]}<style>{style.DRAWING}</style>{element[opened:]}\n"


class _Box(NamedTuple):
    """Where values are drawn: pixels from the upper left corner."""

    left: float
    top: float
    right: float
    bottom: float


class _Drawing:
    """The elements of one picture, and how high it has become."""

    def __init__(self, title: str, number: int):
        self.title, self.number = title, number
        self.elements: List[str] = []
        self.height = 0.0
        self.hatched = False
        self.text(0, 18, title, kind="t")
        self.top = 30.0  # below the title and the legend

    def add(self, name: str, about: str = "", /, **attributes: Any) -> None:
        """An element; about: what is said when it is pointed at."""
        written = ""
        for key, value in attributes.items():
            words = _number(value) if isinstance(value, float) else escape(str(value))
            written += f' {key.rstrip("_").replace("_", "-")}="{words}"'
        inner = f"<title>{escape(about)}</title>" if about else ""
        self.elements.append(f"<{name}{written}>{inner}</{name}>" if inner else f"<{name}{written}/>")

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "start", kind: str = "", turn: bool = False
    ) -> None:
        attributes = f' class="{kind}"' if kind else ""
        if anchor != "start":
            attributes += f' text-anchor="{anchor}"'
        if turn:
            attributes += f' transform="rotate(-90 {_number(x)} {_number(y)})"'
        self.elements.append(f'<text x="{_number(x)}" y="{_number(y)}"{attributes}>{escape(words)}</text>')

    def box(self, left: float, top: float, right: float, bottom: float, series: int, about: str, *, edge: bool) -> None:
        """A filled rectangle; series -1: one without a colour, hatched."""
        width, height = max(right - left, 0.0), max(bottom - top, 0.0)
        place: Dict[str, Any] = {"x": float(left), "y": float(top), "width": float(width), "height": float(height)}
        if series < 0:
            self.hatched = True
            self.add("rect", class_="pad", **place)
            self.add("rect", about, class_="h", fill=f"url(#hatch{self.number})", **place)
        else:
            self.add("rect", about, class_=f"h s{series % len(style.FILLS)}" + (" edge" if edge else ""), **place)

    def legend(self, names: Sequence[Tuple[str, Callable[[float, float], None]]]) -> None:
        """Names with a drawn sample each; sample(x, y) draws one of 18 pixels, y its middle."""
        x, y = 2.0, self.top + 8
        for name, sample in names:
            width = 26 + _LETTER * len(name) + 16
            if x > 2.0 and x + width > WIDTH:
                x, y = 2.0, y + 18
            sample(x, y)
            self.text(x + 24, y + 4, name)
            x += width
        self.top = y + 18 if names else self.top

    def frame(self, x: Axis, y: Axis, box: _Box, across: Optional[Scale], upward: Optional[Scale]) -> None:
        """Grid, numbers and names of the axes; a scale that is None belongs to categories, named elsewhere."""
        if upward is not None:
            for tick in upward.ticks:
                place = upward.place(tick)
                self.add("line", class_="g", x1=box.left, x2=box.right, y1=place, y2=place)
                self.text(box.left - 6, place + 4, short(tick), anchor="end")
        if across is not None:
            last = -1e9
            for tick in across.ticks:
                place, half = across.place(tick), _LETTER * len(short(tick)) / 2
                self.add("line", class_="g", x1=place, x2=place, y1=box.top, y2=box.bottom)
                if place - half > last:
                    self.text(place, box.bottom + 16, short(tick), anchor="middle")
                    last = place + half + 6
        self.add(
            "path", class_="a", d=f"M{_number(box.left)} {_number(box.top)}V{_number(box.bottom)}H{_number(box.right)}"
        )
        if x.label:
            self.text((box.left + box.right) / 2, box.bottom + 34, x.label, anchor="middle")
        if y.label:
            self.text(12, (box.top + box.bottom) / 2, y.label, anchor="middle", turn=True)
        self.height = box.bottom + 42

    def finished(self) -> str:
        defined = ""
        if self.hatched:
            defined = (
                f'<defs><pattern id="hatch{self.number}" width="6" height="6" patternUnits="userSpaceOnUse" '
                'patternTransform="rotate(45)"><line class="hatch" x1="0" y1="0" x2="0" y2="6"/></pattern></defs>'
            )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_number(WIDTH)} {_number(self.height)}" '
            f'width="{_number(WIDTH)}" height="{_number(self.height)}" role="img" aria-label="{escape(self.title)}">'
            f"{defined}{''.join(self.elements)}</svg>"
        )


def _number(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".") if value else "0"


def _fits(words: str, pixels: float) -> str:
    most = max(4, int(pixels / _LETTER))
    return words if len(words) <= most else words[: most - 1] + "…"


def _left_of(labels: Sequence[str]) -> float:
    """Pixels that marks of a vertical axis and its name need."""
    return 30 + _LETTER * max((len(label) for label in labels), default=1)


def _sample_box(drawing: _Drawing, series: int) -> Callable[[float, float], None]:
    return lambda x, y: drawing.box(x, y - 6, x + 18, y + 6, series, "", edge=False)


def _bars(drawing: _Drawing, bars: Bars) -> None:
    colours, coloured = [], 0
    for series in bars.series:
        colours.append(-1 if series.padding else coloured)
        coloured += not series.padding
    if len(bars.series) > 1:
        drawing.legend([(series.name, _sample_box(drawing, colour)) for series, colour in zip(bars.series, colours)])
    (_bars_across if bars.across else _bars_upward)(drawing, bars, colours)


def _drawn_bars(bars: Bars) -> List[Tuple[int, int, float, float, float, float]]:
    """(category, series, from, to, first, last): from, to in values; first, last in 0..1 of the category's place."""
    found = []
    for place in range(len(bars.categories)):
        above = below = 0.0
        for number, series in enumerate(bars.series):
            value = series.values[place]
            if value is None:
                continue
            if bars.stacked:
                start = above if value >= 0 else below
                above, below = (above + value, below) if value >= 0 else (above, below + value)
                found.append((place, number, start, start + value, 0.0, 1.0))
            else:
                count = len(bars.series)
                found.append((place, number, 0.0, value, number / count, (number + 1) / count))
    return found


def _intervals(bars: Bars) -> List[Tuple[int, float, float, float]]:
    """(category, lower, upper, middle of the bar's place in 0..1)."""
    found = []
    for number, series in enumerate(bars.series):
        for place, (low, high) in enumerate(zip(series.lower, series.upper)):
            if low is not None and high is not None and high > low:
                found.append((place, low, high, 0.5 if bars.stacked else (number + 0.5) / len(bars.series)))
    return found


def _bars_upward(drawing: _Drawing, bars: Bars, colours: Sequence[int]) -> None:
    low, high = bar_limits(bars)
    top = drawing.top + (14 if bars.ends else 0)
    bottom = top + 280
    scaled = scale(bars.values, [low, high], bottom, top)
    box = _Box(_left_of([short(tick) for tick in scaled.ticks]), top, WIDTH - 12, bottom)
    if bars.edges:
        numbers = Axis(bars.along, least=bars.edges[0], most=bars.edges[-1])
        across = scale(numbers, [], box.left, box.right, whole=True)
        drawing.frame(numbers, bars.values, box, across, scaled)
        places = [(across.place(first), across.place(last)) for first, last in zip(bars.edges, bars.edges[1:])]
    else:
        drawing.frame(Axis(bars.along), bars.values, box, None, scaled)
        step = (box.right - box.left) / max(1, len(bars.categories))
        places = [(box.left + (n + 0.1) * step, box.left + (n + 0.9) * step) for n in range(len(bars.categories))]
        last = -1e9
        for name, (start, end) in zip(bars.categories, places):
            middle, half = (start + end) / 2, _LETTER * len(name) / 2
            if middle - half > last:
                drawing.text(middle, box.bottom + 16, name, anchor="middle")
                last = middle + half + 6
    for place, number, start, end, first, final in _drawn_bars(bars):
        left, right = places[place]
        ends = sorted((scaled.place(start), scaled.place(end)))
        about = hint(bars.series[number], place, bars.categories[place], bars.values.label)
        drawing.box(
            left + (right - left) * first, ends[0], left + (right - left) * final, ends[1], colours[number], about,
            edge=bars.stacked and len(places) < 80 or bool(bars.edges) and len(places) < 80,
        )  # fmt: skip
    for place, lower, upper, middle in _intervals(bars):
        left, right = places[place]
        x = left + (right - left) * middle
        ends = sorted((scaled.place(lower), scaled.place(upper)))
        drawing.add("path", class_="e", d=f"M{_number(x)} {_number(ends[0])}V{_number(ends[1])}" + "".join(
            f"M{_number(x - 3)} {_number(y)}h6" for y in ends))  # fmt: skip
    for place, words in enumerate(bars.ends):
        left, right = places[place]
        most = max((max(start, end) for p, _, start, end, _, _ in _drawn_bars(bars) if p == place), default=0.0)
        drawing.text((left + right) / 2, scaled.place(most) - 4, words, anchor="middle")


def _bars_across(drawing: _Drawing, bars: Bars, colours: Sequence[int]) -> None:
    high_row = 20.0 if bars.stacked or len(bars.series) == 1 else 6.0 + 11.0 * len(bars.series)
    widest = min(300.0, _LETTER * max((len(name) for name in bars.categories), default=1))
    ends = 10 + _LETTER * max((len(words) for words in bars.ends), default=1)
    box = _Box(widest + 34, drawing.top, WIDTH - ends, drawing.top + high_row * len(bars.categories) + 4)
    scaled = scale(bars.values, list(bar_limits(bars)), box.left, box.right)
    drawing.frame(bars.values, Axis(bars.along), box, scaled, None)
    furthest = [0.0] * len(bars.categories)
    for place, name in enumerate(bars.categories):
        drawing.text(box.left - 6, box.top + 2 + (place + 0.5) * high_row + 4, _fits(name, 300), anchor="end")
    for place, number, start, end, first, final in _drawn_bars(bars):
        top = box.top + 2 + place * high_row + 2
        depth = high_row - 4
        reach = sorted((scaled.place(start), scaled.place(end)))
        about = hint(bars.series[number], place, bars.categories[place], bars.values.label)
        drawing.box(
            reach[0], top + depth * first, reach[1], top + depth * final, colours[number], about, edge=bars.stacked
        )
        furthest[place] = max(furthest[place], start, end)
    for place, lower, upper, middle in _intervals(bars):
        y = box.top + 2 + place * high_row + 2 + (high_row - 4) * middle
        reach = sorted((scaled.place(lower), scaled.place(upper)))
        drawing.add("path", class_="e", d=f"M{_number(reach[0])} {_number(y)}H{_number(reach[1])}" + "".join(
            f"M{_number(x)} {_number(y - 3)}v6" for x in reach))  # fmt: skip
        furthest[place] = max(furthest[place], upper)
    for place, words in enumerate(bars.ends):
        y = box.top + 2 + (place + 0.5) * high_row + 4
        drawing.text(scaled.place(furthest[place]) + 5, y, words)


def _mark(drawing: _Drawing, number: int, x: float, y: float, about: str, kind: str, size: float = 4.0) -> None:
    """A circle, square, diamond or triangle, by the number of the line."""
    classes = f"h s{number % len(style.FILLS)}{kind}"
    shape = number % 4
    if shape == 0:
        drawing.add("circle", about, class_=classes, cx=x, cy=y, r=size)
        return
    s = size * 1.2
    corners = {
        1: [(-size, -size), (size, -size), (size, size), (-size, size)],
        2: [(0, -s), (s, 0), (0, s), (-s, 0)],
        3: [(0, -s), (s, size), (-s, size)],
    }[shape]
    drawing.add(
        "path",
        about,
        class_=classes,
        d="M" + "L".join(f"{_number(x + dx)} {_number(y + dy)}" for dx, dy in corners) + "Z",
    )


def _lines(drawing: _Drawing, lines: Lines) -> None:
    def sample(number: int, line: Line) -> Callable[[float, float], None]:
        def drawn(x: float, y: float) -> None:
            if not line.points:
                path = f"M{_number(x)} {_number(y)}h18"
                drawing.add("path", class_=f"l l{number % len(style.FILLS)}", d=path)
            if line.points or len(line.x) <= _MARKS:
                _mark(drawing, number, x + 9, y, "", "")

        return drawn

    def level_sample(x: float, y: float) -> None:
        drawing.add("path", class_="v", d=f"M{_number(x)} {_number(y)}h18")

    names = [(line.name, sample(number, line)) for number, line in enumerate(lines.lines)]
    names += [(name, level_sample) for name, _ in lines.levels]
    if len(names) > 1:
        drawing.legend(names)
    ys = [y for line in lines.lines for y in line.y if y is not None] + [level for _, level in lines.levels]
    top, bottom = drawing.top, drawing.top + 280
    upward = scale(lines.y, ys, bottom, top)
    box = _Box(_left_of([short(tick) for tick in upward.ticks]), top, WIDTH - 20, bottom)
    numbers = [x for line in lines.lines for x in line.x]
    across = scale(lines.x, numbers, box.left, box.right, whole=True)
    if all(float(x).is_integer() for x in numbers):
        across = across._replace(ticks=[tick for tick in across.ticks if float(tick).is_integer()])
    drawing.frame(lines.x, lines.y, box, across, upward)
    for name, level in lines.levels:
        place = upward.place(level)
        drawing.add("line", f"{name}: {level:,.6g}", class_="v", x1=box.left, x2=box.right, y1=place, y2=place)
    for number, line in enumerate(lines.lines):
        kept = thinned(line.x, line.y)
        path, pen = [], "M"
        for place in kept:
            value = line.y[place]
            if value is None:
                pen = "M"
                continue
            path.append(f"{pen}{_number(across.place(line.x[place]))} {_number(upward.place(value))}")
            pen = "L"
        if path and not line.points:
            drawing.add("path", class_=f"l l{number % len(style.FILLS)}", d="".join(path))
        for place in kept:
            value = line.y[place]
            if value is None:
                continue
            about = (
                line.hints[place]
                if line.hints
                else f"{line.name}: {value:,.6g} at {line.x[place]:,.6g} ({lines.y.label}; {lines.x.label})"
            )
            kind = "" if line.points or len(line.x) <= _MARKS else " far"
            _mark(drawing, number, across.place(line.x[place]), upward.place(value), about, kind)


def _heat_map(drawing: _Drawing, heat: HeatMap) -> None:
    widest = min(260.0, _LETTER * max((len(name) for name in heat.rows), default=1))
    left, top = widest + 34, drawing.top + 4
    wide = min(96.0, (WIDTH - 12 - left) / max(1, len(heat.columns)))
    high = 26.0
    for down, (name, row, shades) in enumerate(zip(heat.rows, heat.values, heat.shades())):
        y = top + down * high
        drawing.text(left - 6, y + high / 2 + 4, _fits(name, 260), anchor="end")
        for along, (value, shade) in enumerate(zip(row, shades)):
            if value is None or shade is None:
                continue
            share = 0.04 + 0.96 * shade
            x = left + along * wide
            words = format(value, heat.form)
            about = f"{name}, {heat.columns[along]}: {words}"
            drawing.add(
                "rect", about, class_="h s0", x=x, y=y, width=wide - 1, height=high - 1, fill_opacity=f"{share:.3f}"
            )
            drawing.text(x + wide / 2, y + high / 2 + 4, words, anchor="middle", kind="on" if share > 0.5 else "")
    bottom = top + high * len(heat.rows)
    for along, name in enumerate(heat.columns):
        drawing.text(left + (along + 0.5) * wide, bottom + 14, _fits(name, wide), anchor="middle")
    drawing.text(left + wide * len(heat.columns) / 2, bottom + 32, heat.along, anchor="middle")
    drawing.text(12, (top + bottom) / 2, heat.down, anchor="middle", turn=True)
    drawing.height = bottom + 40


def _tiles(drawing: _Drawing, tiles: Tiles) -> None:
    colours, coloured = [], 0
    for number in range(len(tiles.series)):
        colours.append(-1 if number in tiles.padding else coloured)
        coloured += number not in tiles.padding
    drawing.legend([(name, _sample_box(drawing, colour)) for name, colour in zip(tiles.series, colours)])
    lowest = max((tile.bottom for tile in tiles.tiles), default=1.0)
    left = 34 + min(300.0, _LETTER * max((len(name) for name in tiles.rows), default=5))
    top = drawing.top
    right = min(WIDTH - 14, left + 420) if tiles.square else WIDTH - 14
    high = right - left if tiles.square else (22.0 * len(tiles.rows) if tiles.rows else 260.0)
    box = _Box(left, top, right, top + high)
    across = scale(tiles.x, [tile.right for tile in tiles.tiles], box.left, box.right, whole=True)
    if tiles.rows:
        downward = Scale([], lambda value: box.top + high * value / len(tiles.rows))
        drawing.frame(tiles.x, tiles.y, box, across, None)
        for number, name in enumerate(tiles.rows):
            drawing.text(box.left - 6, downward.place(number + 0.5) + 4, _fits(name, 300), anchor="end")
    else:
        downward = scale(tiles.y, [lowest], box.top, box.bottom, whole=True)
        drawing.frame(tiles.x, tiles.y, box, across, downward)
    for tile in tiles.tiles:
        drawing.box(
            across.place(tile.left), downward.place(tile.top), across.place(tile.right), downward.place(tile.bottom),
            colours[tile.series], tile.hint, edge=bool(tiles.rows),
        )  # fmt: skip
    for skip in tiles.x.skips:
        for place in (across.place(skip.start), across.place(skip.end)):
            drawing.add("line", skip.about, class_="v", x1=place, x2=place, y1=box.top, y2=box.bottom)
        drawing.text((across.place(skip.start) + across.place(skip.end)) / 2, box.top - 4, "…", anchor="middle")


_DRAWERS: Dict[type, Callable[[_Drawing, Any], None]] = {
    Bars: _bars,
    Lines: _lines,
    HeatMap: _heat_map,
    Tiles: _tiles,
}
