"""Reads a page back, and opens one in a browser where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest

SVG = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}href"


class ReadPage(HTMLParser):
    """What stands in a page's HTML.

    tables: by name, a row a dictionary of the columns' keys to the values that the cells hold. shown: the same with
    the words of the cells. references: every place that the page names.
    """

    def __init__(self, text: str):
        super().__init__()
        self.tables: Dict[str, List[Dict[str, Any]]] = {}
        self.shown: Dict[str, List[Dict[str, str]]] = {}
        self.notes: List[str] = []
        self.references: List[str] = []
        self._keys: Dict[str, List[str]] = {}
        self._name, self._words = "", None
        self.feed(text)
        self.close()
        start = 0
        self.drawings: List[ElementTree.Element] = []
        while (start := text.find("<svg", start)) >= 0:
            end = text.index("</svg>", start) + len("</svg>")
            self.drawings.append(ElementTree.fromstring(text[start:end]))
            start = end

    @property
    def pictures(self) -> List[str]:
        """The titles that are drawn."""
        return [drawing.get("aria-label") for drawing in self.drawings if drawing.get("aria-label")]

    def handle_starttag(self, tag: str, attributes: List[Tuple[str, Any]]) -> None:
        given = dict(attributes)
        self.references += [given[key] for key in ("href", "src", "xlink:href", "action") if key in given]
        if tag == "table":
            self._name = given["id"]
            self.tables[self._name], self.shown[self._name], self._keys[self._name] = [], [], []
        elif tag == "th":
            self._keys[self._name].append(given["data-key"])
        elif tag == "tr" and self._keys.get(self._name):
            self.tables[self._name].append({})
            self.shown[self._name].append({})
        elif tag == "td":
            row = self.tables[self._name][-1]
            row[self._keys[self._name][len(row)]] = json.loads(given["data-value"])
            self._words = ""
        elif tag == "p" and given.get("class") == "note":
            self._words = ""

    def handle_data(self, data: str) -> None:
        if self._words is not None:
            self._words += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "td":
            row = self.shown[self._name][-1]
            row[self._keys[self._name][len(row)]] = self._words
            self._words = None
        elif tag == "p" and self._words is not None:
            self.notes.append(self._words)
            self._words = None


def check_page(text: str) -> ReadPage:
    """What every page obeys: it names nothing outside itself, and no two pictures have one title."""
    page = ReadPage(text)
    assert page.references and all(each.startswith(("#", "data:")) for each in page.references)
    assert len(set(page.pictures)) == len(page.pictures) == len(page.drawings) - 1  # one holds what they share
    identities = [each.get("id") for drawing in page.drawings for each in drawing.iter() if each.get("id")]
    values = [value for drawing in page.drawings for each in drawing.iter() for value in each.attrib.values()]
    named = {name for value in values for name in re.findall(r"url\(#([\w.-]+)", value)}
    named |= {value[1:] for drawing in page.drawings for each in drawing.iter() if (value := each.get(LINK))}
    assert named == set(identities) and len(identities) == len(named)
    assert "<script src" not in text and text.count("<script>") == 1 and len(text) < 2_000_000
    return page


class Browser:
    """Headless Chromium; `opened` skips the test, counted, where none starts here."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._program = shutil.which("chromium")

    def _run(self, page: Path) -> Tuple[str, List[str]]:
        # A profile of its own: a process of the start before may still hold the former one's lock.
        profile = self._folder / f"profile-{page.stem}"
        options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --enable-logging=stderr --dump-dom"
        done = subprocess.run(
            [self._program, *options.split(), f"--user-data-dir={profile}", page.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
        )
        if not done.stdout.strip():
            raise OSError("it ended without a document")
        said = [line for line in done.stderr.splitlines() if "CONSOLE" in line.upper()]
        return done.stdout, said

    def opened(self, text: str) -> Tuple[str, List[str]]:
        """The document as it is after its script has run, and what its console said."""
        if self._program is None:
            pytest.skip("no chromium on the path")
        page = self._folder / "control.html"
        try:
            # Where the console of a page that complains stays empty, an empty one means nothing.
            page.write_text("<p id=control>there</p><script>console.error('complaint')</script>")
            document, said = self._run(page)
            if "there" not in document or not any("complaint" in line for line in said):
                pytest.skip("chromium does not start here")
            page = self._folder / "opened.html"
            page.write_text(text, encoding="utf-8")
            document, said = self._run(page)
            if (
                "</html>" not in document
            ):  # of whatever it has read: a browser that ended before says nothing of the page
                pytest.skip("chromium ended before it had the page")
            return document, said
        except (OSError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"chromium does not start here: {type(error).__name__}")
