"""Figures through matplotlib (the extra `plot`), imported only when one is drawn."""
from __future__ import annotations

from typing import Any, Tuple


def new_figure(width: float = 8.0, height: float = 4.5) -> Tuple[Any, Any]:
    """A figure with one pair of axes, drawn without a display."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("drawing needs the package matplotlib: pip install 'ipu_packed_bert[plot]'") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def save(figure: Any, path: str) -> None:
    """Writes the figure; the suffix of the name says how."""
    figure.savefig(path, dpi=150)
