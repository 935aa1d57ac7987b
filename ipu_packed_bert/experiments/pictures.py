"""Learning curves as figures: a line for the mean over seeds, a band for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import List, NamedTuple, Sequence

import numpy as np

from pack_data.plotting import new_figure, save


class Curve(NamedTuple):
    """One variant: the same points of every seed."""

    label: str
    x: np.ndarray  # [seeds, points]
    y: np.ndarray  # [seeds, points]
    dashed: bool = False


class Panel(NamedTuple):
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    logarithmic: bool = False


def draw(panels: Sequence[Panel], path: Path) -> Path:
    """Panels side by side. A band reaches from the lowest to the highest seed."""
    figure, axes = new_figure(5.2 * len(panels), 4.0, columns=len(panels))
    labels: List[str] = list({curve.label: None for panel in panels for curve in panel.curves})
    for panel, axis in zip(panels, axes):
        for curve in panel.curves:
            colour = f"C{labels.index(curve.label) % 10}"
            x, y = curve.x.mean(axis=0), curve.y
            axis.plot(x, y.mean(axis=0), color=colour, linestyle="--" if curve.dashed else "-", label=curve.label)
            axis.fill_between(x, y.min(axis=0), y.max(axis=0), color=colour, alpha=0.18, linewidth=0)
        if panel.logarithmic:
            axis.set_yscale("log")
        axis.set_title(panel.title)
        axis.set_xlabel(panel.x_label)
        axis.set_ylabel(panel.y_label)
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8)
    save(figure, path)
    return path
