"""How Sphinx builds docs/ (`make docs`).  Nothing is fetched: no other project's index, no font, no script."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]

from ipu_packed_bert import __version__  # noqa: E402

project = "ipu_packed_bert"
author = "the authors of ipu_packed_bert"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["**/__pycache__"]

html_theme = "furo"
html_title = f"ipu_packed_bert {release}"
html_copy_source = False
html_show_sourcelink = False

# The pages' own anchors for links such as data.md#size.
myst_heading_anchors = 3
