"""Figures of experiments: curves with a band over seeds, and differences with their intervals.

Colours and dashes are chosen so that the lines differ in grey and for people who see few colours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ipu_packed_bert.experiments.statistics import Interval
from pack_data.display.picture import new_figure, save

# Colours of Okabe and Ito, from dark to light, each with dashes of its own.
STYLES = (
    ("#000000", "-"),
    ("#0072B2", "--"),
    ("#D55E00", "-."),
    ("#CC79A7", (0, (1, 1))),
    ("#009E73", (0, (5, 1, 1, 1, 1, 1))),
    ("#E69F00", "-"),
    ("#56B4E9", "--"),
)


class Curve(NamedTuple):
    """One variant: the same points of every seed."""

    label: str
    x: np.ndarray  # [seeds, points]
    y: np.ndarray  # [seeds, points]


class Line(NamedTuple):
    """A value to compare with."""

    y: float
    label: str


class Panel(NamedTuple):
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    line: Optional[Line] = None
    logarithmic: bool = False
    digits: int = 3  # of the last values
    marked: bool = False  # a mark at each point


class Bar(NamedTuple):
    """A difference with its interval."""

    label: str
    interval: Interval
    control: bool = False


class Dots(NamedTuple):
    """One pair of axes with a line of values for each label of a picture."""

    title: str
    x_label: str
    values: Mapping[str, Sequence[Sequence[float]]]  # group -> for each label, the values of its seeds
    lines: Mapping[str, float] = {}  # group -> a value to compare with


def draw(panels: Sequence[Panel], path: Path, *, caption: str = "", width: float = 5.4) -> Path:
    """Panels side by side, each of so many inches.

    A band reaches from the lowest to the highest seed; last values stand at the right edge.
    """
    figure, axes = new_figure(width * len(panels), 4.2, columns=len(panels))
    labels: List[str] = list({curve.label: None for panel in panels for curve in panel.curves})
    for panel, axis in zip(panels, axes):
        ends = []
        for curve in panel.curves:
            colour, dashes = STYLES[labels.index(curve.label) % len(STYLES)]
            x, y = curve.x.mean(axis=0), curve.y
            mark = "o" if panel.marked else ""
            axis.plot(x, y.mean(axis=0), color=colour, linestyle=dashes, linewidth=1.8, marker=mark, markersize=4)
            axis.fill_between(x, y.min(axis=0), y.max(axis=0), color=colour, alpha=0.15, linewidth=0)
            ends.append((float(y.mean(axis=0)[-1]), colour))
        if panel.logarithmic:
            axis.set_yscale("log")
        if panel.line is not None:
            axis.axhline(panel.line.y, color="#777777", linewidth=1.0, linestyle=":")
            axis.annotate(
                panel.line.label,
                (0.99, panel.line.y),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="bottom",
                fontsize=8,
                color="#555555",
            )
            low, high = axis.get_ylim()
            if not panel.logarithmic:  # its label stands above it, and below the title
                axis.set_ylim(low, max(high, panel.line.y + 0.08 * (high - low)))
        axis.set_title(panel.title)
        axis.set_xlabel(panel.x_label)
        axis.set_ylabel(panel.y_label)
        axis.grid(alpha=0.25)
        _last_values(axis, ends, ".1e" if panel.logarithmic else f".{panel.digits}f")
    styles = [STYLES[number % len(STYLES)] for number in range(len(labels))]
    handles = [_handle(colour, dashes) for colour, dashes in styles]
    columns = max(1, min(5, len(labels), int(width * len(panels) // 2.8)))
    return finish(figure, path, handles, labels, columns=columns, caption=caption)


def draw_differences(
    bars: Sequence[Bar], path: Path, *, margin: Optional[float], title: str, x_label: str, caption: str
) -> Path:
    """One line a difference, its mean, hollow where it is of one seed, and its interval; the margin around 0.

    All means are there. An interval that goes on outside ends with an arrow.
    """
    figure, (axis,) = new_figure(8.0, 1.6 + 0.36 * len(bars))
    left, right = limits(bars, margin or 0.0)
    axis.set_xlim(left, right)
    if margin is not None:
        axis.axvspan(-margin, margin, color="#dddddd", linewidth=0)
    axis.axvline(0.0, color="#777777", linewidth=1.0)
    for place, bar in enumerate(bars):
        interval, colour = bar.interval, "#D55E00" if bar.control else "#000000"
        axis.plot([max(interval.low, left), min(interval.high, right)], [place, place], color=colour, linewidth=2.4)
        for outside, end, arrow in ((interval.low < left, left, "<"), (interval.high > right, right, ">")):
            if outside:
                axis.plot([end], [place], marker=arrow, color=colour, markersize=8, clip_on=False)
        filled = colour if interval.seeds > 1 else "white"
        marker = "s" if bar.control else "o"
        axis.plot([interval.mean], [place], marker=marker, color=colour, markerfacecolor=filled, markersize=6)
        axis.annotate(
            f"{interval.mean:+.3f}", (1.03, place), xycoords=("axes fraction", "data"), va="center", fontsize=8
        )
    axis.set_yticks(range(len(bars)), [bar.label + (" (control)" if bar.control else "") for bar in bars], fontsize=9)
    axis.invert_yaxis()
    axis.set_title(title, fontsize=11)
    axis.set_xlabel(x_label)
    axis.grid(axis="x", alpha=0.25)
    return finish(figure, path, caption=caption)


def limits(bars: Sequence[Bar], margin: float) -> Tuple[float, float]:
    """From left to right: all means, twice the margin, and the intervals, but none far wider than the others."""
    means = [each.interval.mean for each in bars]
    low, high = min(*means, -2 * margin), max(*means, 2 * margin)
    room = max(0.3 * (high - low), float(np.median([each.interval.high - each.interval.low for each in bars])))
    low = min(low, *(max(each.interval.low, low - room) for each in bars))
    high = max(high, *(min(each.interval.high, high + room) for each in bars))
    return low - 0.05 * (high - low), high + 0.05 * (high - low)


def draw_dots(labels: Sequence[str], panels: Sequence[Dots], path: Path, *, caption: str) -> Path:
    """A line a label, panels side by side; groups differ in colour and mark."""
    figure, axes = new_figure(5.4 * len(panels), 1.4 + 0.3 * len(labels), columns=len(panels))
    marks = ("o", "s", "^", "D")
    for panel, axis in zip(panels, axes):
        for number, (group, values) in enumerate(panel.values.items()):
            colour, mark = STYLES[2 * number % len(STYLES)][0], marks[number % len(marks)]
            if group in panel.lines:
                axis.axvline(panel.lines[group], color=colour, linewidth=1.0, linestyle=":")
            shift = 0.3 * ((number + 0.5) / len(panel.values) - 0.5)
            for place, seeds in enumerate(values):
                if not len(seeds):
                    continue
                axis.plot(seeds, [place + shift] * len(seeds), mark, color=colour, markersize=2.5, alpha=0.7)
                axis.plot([np.mean(seeds)], [place + shift], mark, color=colour, markersize=6)
        axis.set_yticks(range(len(labels)), labels if axis is axes[0] else [""] * len(labels), fontsize=9)
        axis.invert_yaxis()
        axis.set_title(panel.title, fontsize=11)
        axis.set_xlabel(panel.x_label)
        axis.grid(alpha=0.25)
    groups = list(panels[0].values)
    handles = [
        _handle(STYLES[2 * number % len(STYLES)][0], "none", marks[number % len(marks)])
        for number in range(len(groups))
    ]
    return finish(figure, path, handles, groups, columns=len(groups), caption=caption)


def finish(
    figure: Any, path: Path, handles: Sequence[Any] = (), labels: Sequence[str] = (), *, columns: int = 1, caption: str
) -> Path:
    """The legend above the panels, the caption below them; saves the picture."""
    if handles:
        figure.legend(handles, labels, loc="outside upper center", ncols=columns, fontsize=9, frameon=False)
    if caption:
        figure.supxlabel(caption, fontsize=8, color="#444444")
    save(figure, path)
    return path


def _handle(colour: str, dashes: Any, marker: str = "") -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, linestyle=dashes, linewidth=1.8, marker=marker)


def _last_values(axis: Any, ends: Sequence[Any], form: str) -> None:
    """The last value of each curve at the right edge, moved apart where they would lie on each other."""
    placed = 0.0
    for y, colour in sorted(ends):
        share = axis.transAxes.inverted().transform(axis.transData.transform((0.0, y)))[1]  # of the axis' height
        height = max(share, placed)
        placed = height + 0.055
        axis.annotate(f"{y:{form}}", (1.01, height), xycoords="axes fraction", color=colour, fontsize=8, va="center")
