"""Figures through matplotlib, imported only when one is drawn."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, List, Tuple, Union

from pack_data.files import write_atomically
from pack_data.packages import load_package


def new_figure(width: float = 8.0, height: float = 4.5, *, rows: int = 1, columns: int = 1) -> Tuple[Any, List[Any]]:
    """A figure of so many inches, drawn without a display, and its axes, row by row."""
    figure = load_package("matplotlib.figure", "drawing").Figure(figsize=(width, height), layout="constrained")
    every = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in every:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure, every


def save(figure: Any, path: Union[str, Path], *, dots_per_inch: int = 150) -> None:
    """Writes the figure, whole or not at all; the suffix of the name says how, .png where there is none."""
    image = io.BytesIO()
    figure.savefig(image, dpi=dots_per_inch, format=Path(path).suffix[1:] or "png")
    write_atomically(Path(path), image.getvalue())
