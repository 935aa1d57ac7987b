"""How Sphinx builds docs/ (`make docs`).  Nothing is fetched: no other project's index, no font, no script."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, List

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from ipu_packed_bert import __version__  # noqa: E402

project = "ipu_packed_bert"
author = "the authors of ipu_packed_bert"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# Docstrings mark code with single backticks, and name types of other projects.
default_role = "code"
nitpick_ignore_regex = [("py:.*", ".*")]
autodoc_typehints = "none"
autodoc_class_signature = "separated"
autodoc_default_options = {"exclude-members": "__init__, __new__"}
exclude_patterns = ["**/__pycache__"]

html_theme = "furo"
html_title = f"ipu_packed_bert {release}"
html_copy_source = False
html_show_sourcelink = False

# The pages' own anchors for links such as data.md#size.
myst_heading_anchors = 3


def prepare(app: Any, name: str, source: List[str]) -> None:
    """Link the files of the root that are pages here, and take out comments."""
    text = source[0]
    text = re.sub(
        r"\]\((\.\./)+CONTRIBUTING\.md", f"]({'../' * name.count('/')}contributing.md", text
    )
    text = re.sub(r"\]\((\.\./)+CHANGELOG\.md", f"]({'../' * name.count('/')}changelog.md", text)
    # Marks of blocks are for docs/run_blocks.py; as many lines stay.
    source[0] = re.sub(r"(?ms)^ *<!--.*?-->$", lambda found: "\n" * found[0].count("\n"), text)


def setup(app: Any) -> None:
    app.connect("source-read", prepare)
