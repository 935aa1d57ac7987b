"""Reads a page back, and opens one in a browser."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Dict, List, Tuple

SVG = "{http://www.w3.org/2000/svg}"


class ReadPage(HTMLParser):
    """Content of the HTML of a page.

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
        self.pictures: List[str] = []  # titles
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: List[Tuple[str, Any]]) -> None:
        given = dict(attributes)
        self.references += [given[key] for key in ("href", "src", "xlink:href", "action") if key in given]
        if tag == "img":
            self.pictures.append(given["alt"])
            head, _, image = given["src"].partition(",")
            drawing = ElementTree.fromstring(base64.b64decode(image))
            assert head == "data:image/svg+xml;base64" and drawing.find(f"{SVG}title").text == given["alt"]
        elif tag == "table":
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
    """Check the rules of every page: no external resources, and unique titles of pictures."""
    page = ReadPage(text)
    assert page.references and all(each.startswith(("#", "data:")) for each in page.references)
    assert len(set(page.pictures)) == len(page.pictures)
    assert "<script" not in text and len(text) < 2_000_000
    return page


class Browser:
    """Headless Chromium, spoken to over the pipe of its DevTools protocol; a context manager.

    said: what the console and the log said since the last `open`. asked: the addresses that were asked for.
    """

    def __init__(self, folder: Path):
        options = f"--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --user-data-dir={folder}"
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        # The browser reads from its descriptor 3 and writes to 4.
        command = f"exec chromium {options} --remote-debugging-pipe about:blank 3<&{to_browser} 4>&{from_browser}"
        self._process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._rest, self._session = 0, b"", None
        self.said: List[str] = []
        self.asked: List[str] = []
        (target,) = [each for each in self.tell("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        attached = self.tell("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.tell(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def _read(self) -> Dict[str, Any]:
        """The next message; EOFError where the browser has ended, TimeoutError where it says nothing for a minute."""
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], 60)[0]:
                raise TimeoutError("the browser does not answer")
            more = os.read(self._from, 1 << 16)
            if not more:
                raise EOFError("the browser has ended")
            self._rest += more
        message, self._rest = self._rest.split(b"\0", 1)
        found = json.loads(message)
        method, about = found.get("method"), found.get("params", {})
        if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.said.append(json.dumps(about))
        elif method == "Network.requestWillBeSent" and not about["request"]["url"].startswith("data:"):
            # Newer Chromium reports the pictures inside the page as well, which are left out.
            self.asked.append(about["request"]["url"])
        return found

    def tell(self, method: str, **parameters: Any) -> Any:
        """Return the answer of the browser."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]

    def open(self, page: Path, *, width: int, height: int, scheme: str = "light") -> None:
        """Opens a page in a window of this size, in CSS pixels, whose reader prefers a light or a dark scheme."""
        self.resize(width, height)
        self.tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.tell("Page.navigate", url="about:blank")
        self.said.clear()
        self.asked.clear()
        self.tell("Page.navigate", url=page.as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def resize(self, width: int, height: int) -> None:
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.tell("Emulation.setDeviceMetricsOverride", **sizes)

    def of(self, script: str) -> Any:
        """The value of an expression in the page."""
        return self.tell("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def picture(self, path: Path) -> None:
        """Return the content of the window as PNG."""
        path.write_bytes(base64.b64decode(self.tell("Page.captureScreenshot")["data"]))
