"""Reads a page back."""

import base64
import json
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

SVG = "{http://www.w3.org/2000/svg}"


class ReadPage(HTMLParser):
    """Content of the HTML of a page.

    tables: by name, a row a dictionary of the columns' keys to the values that the cells hold. shown: the same with
    the words of the cells. references: every place that the page names.
    """

    def __init__(self, text):
        super().__init__()
        self.tables = {}
        self.shown = {}
        self.notes = []
        self.references = []
        self._keys = {}
        self._name = ""
        self._words = None
        self.pictures = []  # titles
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        attribute_values = dict(attributes)
        for key in ("href", "src", "xlink:href", "action"):
            if key in attribute_values:
                self.references.append(attribute_values[key])
        if tag == "img":
            self.pictures.append(attribute_values["alt"])
            head, _, image = attribute_values["src"].partition(",")
            drawing = ElementTree.fromstring(base64.b64decode(image))
            assert head == "data:image/svg+xml;base64" and drawing.find(f"{SVG}title").text == attribute_values["alt"]
        elif tag == "table":
            self._name = attribute_values["id"]
            self.tables[self._name] = []
            self.shown[self._name] = []
            self._keys[self._name] = []
        elif tag == "th":
            self._keys[self._name].append(attribute_values["data-key"])
        elif tag == "tr" and self._keys.get(self._name):
            self.tables[self._name].append({})
            self.shown[self._name].append({})
        elif tag == "td":
            row = self.tables[self._name][-1]
            row[self._keys[self._name][len(row)]] = json.loads(attribute_values["data-value"])
            self._words = ""
        elif tag == "p" and attribute_values.get("class") == "note":
            self._words = ""

    def handle_data(self, data):
        if self._words is not None:
            self._words += data

    def handle_endtag(self, tag):
        if tag == "td":
            row = self.shown[self._name][-1]
            row[self._keys[self._name][len(row)]] = self._words
            self._words = None
        elif tag == "p" and self._words is not None:
            self.notes.append(self._words)
            self._words = None


def check_page(text):
    """Check the rules of every page: no external resources, and unique titles of pictures."""
    page = ReadPage(text)
    assert page.references
    for reference in page.references:
        assert reference.startswith("data:") or f'id="{reference[1:]}"' in text, reference
    assert len(set(page.pictures)) == len(page.pictures)
    assert "<script" not in text and len(text) < 2_000_000
    return page
