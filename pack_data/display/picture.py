"""Pictures as values, and how matplotlib draws them.

A picture is a `Bars`, `Lines`, `HeatMap` or `MaskPicture`. `write` draws pictures into a file, `drawing` draws one
for a page. matplotlib is imported only to draw. The same pictures give the same bytes: no date, no user settings.
"""

from __future__ import annotations

import io
import math
from itertools import cycle
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from pack_data.display.facts import with_unit
from pack_data.reading.durable import write_atomically
from pack_data.reading.packages import load_package
from pack_data.store.quantities import padding_share, padding_tokens

_Values = Tuple[Optional[float], ...]  # None: no value


class Axis(NamedTuple):
    """The label of an axis, with its unit, and its range.

    log: base of a logarithmic axis, 0 for a linear one. least, most: ends of a linear axis; None: those of the values,
    and 0.
    """

    label: str
    log: int = 0
    least: Optional[float] = None
    most: Optional[float] = None


class Series(NamedTuple):
    """One value per category. lower, upper: ends of the interval of each value. role: a key of `COLOURS`."""

    name: str
    values: _Values
    lower: _Values = ()
    upper: _Values = ()
    role: str = ""


class Bars(NamedTuple):
    """Bars from 0, side by side or stacked.

    across: the bars are horizontal. edges: boundaries of adjacent bars on an axis of numbers. ends: a text at the end
    of each bar. levels: (name, value) of vertical lines.
    """

    title: str
    categories: Tuple[str, ...]
    values: Axis
    series: Tuple[Series, ...]
    along: str = ""  # label of the axis of categories
    stacked: bool = False
    across: bool = False
    edges: Tuple[float, ...] = ()
    ends: Tuple[str, ...] = ()
    notes: Tuple[str, ...] = ()
    levels: Tuple[Tuple[str, float], ...] = ()


class Line(NamedTuple):
    """lower, upper: ends of a band around the line."""

    name: str
    x: Tuple[float, ...]
    y: _Values
    lower: _Values = ()
    upper: _Values = ()


class Lines(NamedTuple):
    """levels: (name, y) of horizontal lines across the picture."""

    title: str
    x: Axis
    y: Axis
    lines: Tuple[Line, ...]
    levels: Tuple[Tuple[str, float], ...] = ()
    notes: Tuple[str, ...] = ()


class HeatMap(NamedTuple):
    """values: [rows][columns]; a larger value has a stronger colour. form: format specification of the cells."""

    title: str
    rows: Tuple[str, ...]
    columns: Tuple[str, ...]
    values: Tuple[_Values, ...]
    form: str
    along: str  # label of the columns
    down: str  # label of the rows
    notes: Tuple[str, ...] = ()


class MaskPicture(NamedTuple):
    """The attention mask of one pack.

    runs: (first slot, slot after the last, sequence) of each run of slots; sequence 0 is padding. Tokens see the tokens
    of their own sequence.
    """

    title: str
    runs: Tuple[Tuple[int, int, int], ...]
    notes: Tuple[str, ...] = ()


Picture = Union[Bars, Lines, HeatMap, MaskPicture]

# A colour has one meaning in all pictures. The three sequences stay apart for readers who do not see red or green;
# neighbours in a stack differ in lightness by at least 12 of 100, as those of `_PLAIN` do.
COLOURS = {
    "page": "#ffffff",
    "ink": "#1f2328",
    "soft": "#59636e",  # levels
    "line": "#d5d9de",
    "padding": "#c3cad3",  # empty slots
    "first": "#0b5fa5",  # sequence of a pack
    "second": "#cf7a00",
    "third": "#0f7752",
    "further": "#c46f9a",  # all after the third
    "tokens": "#2496a3",  # of any sequence
}
SEQUENCES = ("first", "second", "third", "further")  # roles
_PLAIN = (
    "#5b3a8e",
    "#a88f4f",
    "#6b4423",
    "#9a78cf",
    "#7a2b3f",
    "#86862a",
    "#2b2f45",
    "#737a83",
    "#44546a",
)
_DASHES = (
    "-",
    "--",
    ":",
    "-.",
    (0, (7, 2)),
    (0, (3, 3)),
    (0, (1, 2)),
    (0, (6, 2, 1, 2, 1, 2)),
    (0, (9, 2, 2, 2)),
)
_MARKERS = "osDv^P*Xp"
_MOST_MARKS = 60  # points of a line; a line of more is drawn without marks
_MOST_OUTLINED = 80  # bars; the outlines of more would hide them
_LONGEST_NAME = 48  # letters of a name beside the axis
_LETTERS_ACROSS = 110  # letters that fit into a line of a file

_INK = COLOURS["ink"]
_SETTINGS = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.parse_math": False,  # a name may contain dollars
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": COLOURS["line"],
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "svg.fonttype": "path",
}


class _Sheet(NamedTuple):
    width: float  # inches
    letters: float  # size of the font, points
    titled: bool

    @property
    def scale(self) -> float:
        """Size of the letters relative to those of a file."""
        return self.letters / _FILE.letters

    def letters_across(self) -> int:
        """Return the number of letters that fit into a line."""
        return int(_LETTERS_ACROSS * self.width / _FILE.width / self.scale)


_FILE = _Sheet(6.5, 7.0, titled=True)  # as wide as the text of a paper
_PAGE = _Sheet(5.0, 9.0, titled=False)  # legible on a phone; the page itself shows the title


def padding_bars(
    title: str,
    names: Sequence[str],
    tokens: int,
    paddings: Sequence[int],
    *,
    unit: str = "share",
    notes: Tuple[str, ...] = (),
) -> Bars:
    """Draw tokens and padding of the same sequences, arranged in several ways.

    Args:
        title: title of the picture.
        names: one for each arrangement.
        tokens: of all sequences.
        paddings: empty slots of each arrangement.
        unit: of the share of padding that stands at the end of each bar.
        notes: sentences below the picture.
    """
    shares = [padding_share(tokens, tokens + padding) for padding in paddings]
    return Bars(
        title,
        tuple(names),
        Axis("slots"),
        (
            Series("tokens", (float(tokens),) * len(paddings), role="tokens"),
            Series("padding", tuple(map(float, paddings)), role="padding"),
        ),
        stacked=True,
        across=True,
        ends=tuple(f"{with_unit(share, unit)} padding" for share in shares),
        notes=notes,
    )


def packing_bars(
    title: str, tokens: int, sequences: int, packs: int, max_sequence_length: int
) -> Bars:
    """Draw tokens and padding with one sequence per row and in packs."""
    rows = {"one sequence a row": sequences, "in packs": packs}
    paddings = [padding_tokens(count * max_sequence_length, tokens) for count in rows.values()]
    return padding_bars(title, list(rows), tokens, paddings)


# ---- files and drawings ----------------------------------------------------------------------------------------------


def write(pictures: Sequence[Picture], path: Union[str, Path]) -> None:
    """Write the pictures below each other into one .png, .pdf or .svg file, atomically."""
    path = Path(path)
    form = path.suffix[1:].lower() or "png"
    write_atomically(path, _image(pictures, _FILE, form))


def drawing(picture: Picture) -> bytes:
    """Return the picture as an SVG image for a page, without its title."""
    return _image([picture], _PAGE, "svg")


def _image(pictures: Sequence[Picture], sheet: _Sheet, form: str) -> bytes:
    title = "; ".join(picture.title for picture in pictures)
    # The defaults of matplotlib contain a date and its version.
    undated: Dict[str, Any] = {
        "svg": {"Date": None, "Creator": None},
        "pdf": {"CreationDate": None},
    }.get(form, {})
    metadata = {**undated, "Title": title}
    if form == "png":
        metadata["Software"] = None

    settings = {**_SETTINGS, "font.size": sheet.letters, "svg.hashsalt": title}
    image = io.BytesIO()
    with load_package("matplotlib.style", "drawing").context(["default", settings]):
        _figure(pictures, sheet).savefig(image, dpi=200, format=form, metadata=metadata)
    return image.getvalue()


def _figure(pictures: Sequence[Picture], sheet: _Sheet) -> Any:
    heights = [sheet.scale * _height(picture) for picture in pictures]
    size = (sheet.width, sum(heights))
    figure = load_package("matplotlib.figure", "drawing").Figure(figsize=size, layout="constrained")
    parts = figure.subfigures(len(pictures), 1, squeeze=False, height_ratios=heights)
    for part, picture in zip(parts.flat, pictures):
        draw = _DRAWERS[type(picture)]
        handles = draw(part.subplots(), picture, sheet)
        title = picture.title if sheet.titled else None
        _add_legend(part, title, handles, sheet)
    return figure


def _height(picture: Picture) -> float:
    """Return the height of a picture in a file, in inches."""
    if isinstance(picture, Bars) and picture.across:
        thickness = 0.2 if picture.stacked else 0.1 + 0.09 * len(picture.series)
        return 1.1 + thickness * len(picture.categories)
    if isinstance(picture, HeatMap):
        return 1.0 + 0.22 * len(picture.rows)
    if isinstance(picture, MaskPicture):
        return 3.6  # square on a page
    return 2.6


def _add_legend(part: Any, title: Optional[str], handles: Sequence[Any], sheet: _Sheet) -> None:
    """Write the title and, unless there is only one name, the names of what is drawn above a picture."""
    names = [handle.get_label() for handle in handles]
    if len(names) < 2:
        handles, names = [], []
    if not names and not title:
        return

    widths = [len(name) + 7 for name in names]  # 7 letters: the mark and the space around it
    columns = max(1, len(names))
    if sum(widths) > sheet.letters_across():
        columns = max(1, sheet.letters_across() // max(widths))
    legend = part.legend(
        handles,
        names,
        title=title,
        loc="outside upper left",
        alignment="left",
        ncols=columns,
        title_fontproperties={"weight": "bold", "size": "x-large"},
        borderpad=0.2,
        borderaxespad=0.2,
        handlelength=2.4,
        columnspacing=1.4,
        labelspacing=0.3,
    )
    legend.set_zorder(5)


# ---- how it is drawn -------------------------------------------------------------------------------------------------


def _bars(axes: Any, bars: Bars, sheet: _Sheet) -> List[Any]:
    count = len(bars.categories)
    starts = np.arange(count) + 0.1
    widths = np.full(count, 0.8)
    if bars.edges:
        starts = np.array(bars.edges[:-1])
        widths = np.diff(bars.edges)

    handles, tops = _draw_series(axes, bars, starts, widths)
    for number, (name, value) in enumerate(bars.levels):
        handles.append(axes.axvline(value, label=name, **_level_style(number)))

    value_axis, category_axis = ("x", "y") if bars.across else ("y", "x")
    _set_axis(axes, value_axis, bars.values, room=0.04)
    if bars.edges:
        _set_axis(axes, category_axis, Axis(bars.along, least=bars.edges[0], most=bars.edges[-1]))
    else:
        _set_names(axes, category_axis, bars.along, bars.categories, sheet)
    if bars.across:
        axes.invert_yaxis()
        if axes.get_xlim()[0] < 0:
            axes.axvline(0.0, color=_INK, linewidth=0.6)
    for place, top, text in zip(starts + widths / 2, tops, bars.ends):
        if bars.across:
            axes.text(1.01, place, text, transform=axes.get_yaxis_transform(), va="center")
        else:
            axes.text(place, top, text, ha="center", va="bottom")
    return handles


def _draw_series(
    axes: Any, bars: Bars, starts: np.ndarray, widths: np.ndarray
) -> Tuple[List[Any], np.ndarray]:
    """Draw the bars at these starts; return their artists, and the ends of the last series."""
    count = len(starts)
    handles = []
    tops = np.zeros(count)
    plain_colours = cycle(_PLAIN)
    for number, series in enumerate(bars.series):
        values = _floats(series.values)
        colour = COLOURS[series.role] if series.role else next(plain_colours)
        outlined = len(bars.edges) <= _MOST_OUTLINED
        thickness = widths
        places = starts
        base = tops
        if not bars.stacked:
            thickness = widths / len(bars.series)
            places = starts + number * thickness
            base = np.zeros(count)
        draw, side = (axes.barh, "left") if bars.across else (axes.bar, "bottom")
        drawn = draw(
            places,
            values,
            thickness,
            align="edge",
            label=series.name,
            facecolor=colour,
            edgecolor=COLOURS["page"] if outlined else colour,
            linewidth=0.3 if outlined else 0.6,
            **{side: base},
        )
        handles.append(drawn)
        tops = base + np.nan_to_num(values)
        if series.lower:
            _draw_intervals(axes, places + thickness / 2, series, bars.across)
    return handles, tops


def _floats(values: _Values) -> np.ndarray:
    return np.array([math.nan if value is None else value for value in values], float)


def _draw_intervals(axes: Any, places: np.ndarray, series: Series, across: bool) -> None:
    low = _floats(series.lower)
    high = _floats(series.upper)
    style = {"fmt": "none", "ecolor": _INK, "elinewidth": 0.9, "capsize": 2}
    middle = (low + high) / 2
    reach = np.abs(high - low) / 2
    if across:
        axes.errorbar(middle, places, xerr=reach, **style)
    else:
        axes.errorbar(places, middle, yerr=reach, **style)


def _lines(axes: Any, lines: Lines, sheet: _Sheet) -> List[Any]:
    handles = []
    for number, line in enumerate(lines.lines):
        colour = _PLAIN[number % len(_PLAIN)]
        marker = _MARKERS[number % len(_MARKERS)] if len(line.x) <= _MOST_MARKS else None
        handles += axes.plot(
            line.x,
            _floats(line.y),
            label=line.name,
            color=colour,
            linestyle=_DASHES[number % len(_DASHES)],
            linewidth=1.2,
            marker=marker,
            markersize=4,
            clip_on=False,
        )
        if line.lower:
            lower = _floats(line.lower)
            axes.fill_between(
                line.x, lower, _floats(line.upper), color=colour, alpha=0.15, linewidth=0
            )
    for number, (name, value) in enumerate(lines.levels):
        handles.append(axes.axhline(value, label=name, **_level_style(number)))

    whole_numbers = all(float(x).is_integer() for line in lines.lines for x in line.x)
    _set_axis(axes, "x", lines.x, integer=whole_numbers)
    _set_axis(axes, "y", lines.y, room=0.04)
    return handles


def _heat_map(axes: Any, heat: HeatMap, sheet: _Sheet) -> List[Any]:
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_rgba

    values = np.array([_floats(row) for row in heat.values]).reshape(
        len(heat.rows), len(heat.columns)
    )
    largest = values[values > 0].max(initial=0.0) or 1.0
    # Ink can still be read on half of the colour. The square root shows small differences between small values.
    colours = LinearSegmentedColormap.from_list(
        "plum", [to_rgba(_PLAIN[0], share) for share in (0.04, 0.5)]
    )
    axes.pcolormesh(
        np.ma.masked_invalid(values),
        cmap=colours,
        norm=PowerNorm(0.5, 0.0, largest),
        edgecolors=COLOURS["page"],
        linewidth=0.8,
    )
    for row, column in zip(*np.nonzero(np.isfinite(values))):
        text = format(values[row, column], heat.form)
        axes.text(column + 0.5, row + 0.5, text, ha="center", va="center")
    _set_names(axes, "x", heat.along, heat.columns, sheet)
    _set_names(axes, "y", heat.down, heat.rows, sheet)
    axes.invert_yaxis()
    return []


def _attention_mask(axes: Any, mask: MaskPicture, sheet: _Sheet) -> List[Any]:
    from matplotlib.patches import Rectangle

    handles: Dict[str, Any] = {}
    for top, bottom, sequence in mask.runs:
        role = SEQUENCES[min(sequence, len(SEQUENCES)) - 1] if sequence else "padding"
        name = (
            "further sequences"
            if role == "further"
            else f"sequence {sequence}"
            if sequence
            else "padding"
        )
        for left, right, other in mask.runs:
            if other == sequence:
                square = Rectangle(
                    (left, top), right - left, bottom - top, facecolor=COLOURS[role], label=name
                )
                handles.setdefault(role, axes.add_patch(square))

    slots = mask.runs[-1][1]
    _set_axis(axes, "x", Axis("slot that is seen (key)", most=slots))
    _set_axis(axes, "y", Axis("slot that sees (query)", most=slots))
    axes.set_aspect("equal", anchor="NW")
    axes.invert_yaxis()
    return list(handles.values())


_DRAWERS: Dict[type, Callable[[Any, Any, _Sheet], List[Any]]] = {  # -> the artists of the legend
    Bars: _bars,
    Lines: _lines,
    HeatMap: _heat_map,
    MaskPicture: _attention_mask,
}


# ---- axes ------------------------------------------------------------------------------------------------------------


def _level_style(number: int) -> Dict[str, Any]:
    dashes = ("--", ":", "-.")
    return {"color": COLOURS["soft"], "linestyle": dashes[number % len(dashes)], "linewidth": 1.0}


def _set_axis(
    axes: Any, which: str, axis: Axis, *, room: float = 0.0, integer: bool = False
) -> None:
    """Set label, scale, ticks and limits of the "x" or "y" axis. room: share of the range left free at its end."""
    from matplotlib.ticker import MaxNLocator

    ruler = getattr(axes, f"{which}axis")
    ruler.set_label_text(axis.label)
    axes.grid(True, axis=which)
    if axis.log:
        getattr(axes, f"set_{which}scale")("log", base=axis.log)
        ruler.set_major_formatter(lambda value, _: _short(value))
        return

    low, high = getattr(axes.dataLim, f"interval{which}")
    if not low <= high:  # nothing is drawn
        low, high = 0.0, 1.0
    least = min(0.0, low * (1.0 + room)) if axis.least is None else axis.least
    most = axis.most
    if most is None:
        most = max(0.0, high)
        most += room * (most - least)
    if most <= least:
        most = least + 1.0
    axes.set(**{f"{which}lim": (least, most)})
    ruler.set_major_locator(MaxNLocator(6, integer=integer, steps=[1, 2, 5, 10]))
    ruler.set_major_formatter(lambda value, _: _short(value))


def _set_names(axes: Any, which: str, label: str, names: Sequence[str], sheet: _Sheet) -> None:
    """Set names in place of numbers; below a picture only every n-th, as many as fit."""
    step = 1
    if which == "x":
        letters = sum(len(name) + 2 for name in names)
        step = max(1, -(-letters // sheet.letters_across()))
    shown = [
        name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…" for name in names
    ]
    places = np.arange(len(names)) + 0.5
    ruler = getattr(axes, f"{which}axis")
    ruler.set_ticks(places[::step], labels=shown[::step])
    ruler.set_tick_params(length=0)
    ruler.set_label_text(label)
    axes.set(**{f"{which}lim": (0, max(1, len(names)))})


def _short(value: float) -> str:
    """Return a number in few characters: `0.02`, `1,500`, `20 k`, `1.5 M`."""
    size = abs(value)
    if size < 1000:
        return f"{value:.4g}"
    if size < 10_000:
        return f"{value:,.0f}"
    power = min(int(math.log10(size)) // 3, 4)
    return f"{value / 1000**power:.4g} {' kMGT'[power]}"
