"""How Sphinx builds docs/ (`make docs`).  Nothing is fetched: no other project's index, no font, no script."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any, List

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]

from reference import as_rst, fields_of, names_page, options_page, setting_sections, settings_tables  # noqa: E402

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

autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
# Types of others are plain text: no index of theirs is fetched.
nitpick_ignore_regex = [("py:.*", ".*")]

# The pages' own anchors for links such as data.md#size.
myst_heading_anchors = 3


def generate(app: Any, name: str, source: List[str]) -> None:
    """Put what is generated in the place of its comment, and link the files of the root that are pages here."""
    text = source[0]
    text = re.sub(r"\]\((\.\./)+CONTRIBUTING\.md", f"]({'../' * name.count('/')}contributing.md", text)
    text = re.sub(r"\]\((\.\./)+CHANGELOG\.md", f"]({'../' * name.count('/')}changelog.md", text)
    sections = setting_sections()
    text = re.sub(r"<!-- generated: settings of ([\w-]+) -->", lambda found: settings_tables(sections[found[1]]), text)
    text = re.sub(r"<!-- generated: names of ([\w.]+) -->", lambda found: names_page(found[1]), text)
    if "<!-- generated: options -->" in text:
        text = text.replace("<!-- generated: options -->", options_page())
    # Marks of blocks are for docs/run_blocks.py; as many lines stay.
    source[0] = re.sub(r"(?ms)^ *<!--.*?-->$", lambda found: "\n" * found[0].count("\n"), text)


def docstring(app: Any, what: str, name: str, value: Any, options: Any, lines: List[str]) -> None:
    """Turn a docstring into reStructuredText, and add the fields of a dataclass."""
    parameters: List[str] = []
    if callable(value):
        try:
            parameters = list(inspect.signature(value).parameters)
        except (TypeError, ValueError):
            parameters = []
    lines[:] = as_rst(lines, parameters)
    if what == "class":
        fields = [f"- ``{field}`` ({kind}): {comment}" for field, kind, comment in fields_of(value) if comment]
        lines += ["", *fields, ""] if fields else []


def signature(app: Any, what: str, name: str, value: Any, options: Any, given: str, returns: str) -> Any:
    """Types by their last names: `Packing`, not `pack_data.packing.Packing`."""
    return tuple(text and re.sub(r"~?\b(?:[a-z_]\w*\.)+(?=[A-Z]|ndarray)|~", "", text) for text in (given, returns))


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", signature)
    app.connect("source-read", generate)
    app.connect("autodoc-process-docstring", docstring)
