"""Figures through matplotlib, imported only when one is drawn."""
from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Tuple

from pack_data.files import write_atomically
from pack_data.packages import load_package


def new_figure(width: float = 8.0, height: float = 4.5) -> Tuple[Any, Any]:
    """A figure with one pair of axes, drawn without a display."""
    figure = load_package("matplotlib.figure", "drawing").Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def save(figure: Any, path: str) -> None:
    """Writes the figure, whole or not at all; the suffix of the name says how, .png where there is none."""
    image = io.BytesIO()
    figure.savefig(image, dpi=150, format=Path(path).suffix[1:] or "png")
    write_atomically(Path(path), image.getvalue())
