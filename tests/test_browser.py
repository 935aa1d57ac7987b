"""The pages in a real browser: `make test-pages`, which needs chromium; `make test` skips and counts all of this."""

import html
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.imports import ROOT
from tests.tiny_runs import tiny_data

pytestmark = [
    pytest.mark.skipif(not os.environ.get("PAGES"), reason="a browser opens the pages in `make test-pages`"),
    pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on the path (apt-get install chromium)"),
]

PHONE = (500, 844)  # headless Chromium has no narrower window
DESK = (1600, 1000)

# What cannot be read: [words, contrast] of each text whose contrast with what lies below it is under 4.5 (AA).
FAINT = """(() => {
  const numbers = text => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const linear = each => each <= 10.31 ? each / 3294.6 : ((each / 255 + 0.055) / 1.055) ** 2.4;
  const light = rgb => 0.2126 * linear(rgb[0]) + 0.7152 * linear(rgb[1]) + 0.0722 * linear(rgb[2]) + 0.05;
  const page = numbers(getComputedStyle(document.body).backgroundColor);
  const found = [];
  let read = 0;
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].filter(each => each.nodeType === 3);
    const words = own.map(each => each.textContent).join("").trim();
    const box = element.getBoundingClientRect();
    if (!words || !box.width || element.matches("title, style, script")) continue;
    const style = getComputedStyle(element);
    let back = page;
    for (let each = element; each; each = each.parentElement) {
      const colour = numbers(getComputedStyle(each).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) { back = colour; break; }
    }
    const pair = [light(numbers(style.color)), light(back)].sort((a, b) => b - a);
    read += 1;
    if (pair[0] / pair[1] < 4.5) found.push([words, pair[0] / pair[1]]);
  }
  return {found, read};
})()"""
# The pictures by matplotlib's names of elements: text_N holds its words in a comment, LineCollection_N the whiskers of
# intervals. Sizes in CSS pixels, a tolerance of 1.
DRAWINGS = """[...document.querySelectorAll("figure img")].map(image => {
  const holder = document.createElement("div");
  holder.innerHTML = atob(image.src.split(",")[1]).replace(/^[^]*?<svg/, "<svg");
  document.body.append(holder);
  const box = each => each.getBoundingClientRect();
  const sheet = box(holder.firstChild);
  const inside = each => each.left > sheet.left - 1 && each.right < sheet.right + 1
    && each.top > sheet.top - 1 && each.bottom < sheet.bottom + 1;
  const texts = [...holder.querySelectorAll("g[id^=text_]")].map(each => [
    [...each.childNodes].filter(node => node.nodeType === 8).map(node => node.data.trim()).join(" "), inside(box(each))
  ]);
  const direct = [...holder.querySelectorAll("g[id^=axes_] > g")];
  const named = (...names) => direct.filter(each => names.some(name => each.id.startsWith(name)));
  const bars = named("patch_").flatMap(each => [...each.querySelectorAll("path[clip-path]")]).map(box);
  const data = named("line2d_", "QuadMesh_").map(box).concat(bars).filter(each => each.width + each.height > 1);
  const holds = (low, value, high) => low - 1 <= value && value <= high + 1;
  const met = whisker => bars.some(bar => whisker.width > whisker.height
    ? holds(bar.top, whisker.top, bar.bottom) && holds(whisker.left, bar.right, whisker.right)
    : holds(bar.left, whisker.left, bar.right) && holds(whisker.top, bar.top, whisker.bottom));
  const whiskers = named("LineCollection_").flatMap(each => [...each.querySelectorAll("path")]).map(box)
    .filter(each => each.width + each.height > 1);
  holder.remove();
  return {title: image.alt, words: texts.map(each => each[0]), cut: texts.filter(each => !each[1]).map(each => each[0]),
    shapes: data.length, intervals: whiskers.length, missed: whiskers.filter(each => !met(each)).length};
})"""
# Titles and tables' names that are wider than their place.
CUT_TITLES = """[...document.querySelectorAll("h1, h2, h3, summary, .answer, nav a, dt, dd, th")].filter(each =>
  each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).display !== "inline"
).map(each => each.textContent)"""
# "1 packs", but neither "0.1 packs" nor "1 as".
PLURAL_OF_ONE = re.compile(r"(?<!Table )(?<![\w.,:+-])1 (?!as\b|is\b|less\b|unless\b)[a-z]+s\b")
BOTTOMS = """["h1", ".answer", "dl", "header figure"].map(each => {
  const found = document.querySelector(each);
  return found ? found.getBoundingClientRect().bottom : 0;
})"""


def lengths(folder):
    path = folder / "lengths.npy"
    np.save(path, np.minimum(64, np.random.default_rng(3).gamma(1.0, 9.0, 900).astype(int) + 2))
    return ["look", path, "--depth", "unlimited"]


PAGES = {
    "histogram": lambda folder: ["look", "wikipedia_512"],
    "lengths": lengths,
    "data set": lambda folder: ["look", tiny_data(folder / "data")],
    "report": lambda folder: ["report"],
    "part of a report": lambda folder: ["report", "--table", "1", "--figure", "1", "--packing-factor", "1.996"],
}


@pytest.fixture(scope="module", params=PAGES)
def page(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    path = folder / "page.html"
    command = [sys.executable, "-m", "ipu_packed_bert", *PAGES[request.param](folder), "--html", path]
    subprocess.run(list(map(str, command)), check=True, cwd=ROOT)
    return path


MEASURES = {
    "bottoms": BOTTOMS,
    "width": "(opened(), document.documentElement.scrollWidth)",
    "faint": FAINT,
    "drawings": DRAWINGS,
    "cut": CUT_TITLES,
    "words": "document.body.innerText",
    # A resource that fails has no entry in `performance`, so every address counts as asked for.
    "asked": "[...document.querySelectorAll('[src], link[href]')].map(each => each.src || each.href)"
    ".concat(performance.getEntriesByType('resource').map(each => each.name))"
    ".filter(each => !each.startsWith('data:'))",
}
# Measures the page when it is loaded, and leaves the values in it.
SCRIPT = """<script>addEventListener("load", () => {
  const opened = () => document.querySelectorAll("details").forEach(each => { each.open = true });
  const found = {MEASURES};
  const holder = document.createElement("pre");
  holder.id = "found";
  holder.textContent = JSON.stringify(found);
  document.body.append(holder);
})</script>"""


def measured(page, folder, size, *options):
    """Open a page in a window of this size, and return its `MEASURES`."""
    terms = ", ".join(f"{name}: {script}" for name, script in MEASURES.items())
    copy = folder / "measured.html"
    script = SCRIPT.replace("MEASURES", terms)
    # The policy of a page allows no script.
    text = page.read_text(encoding="utf-8").replace("default-src 'none'", "script-src 'unsafe-inline'")
    copy.write_text(text + script, encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={folder}", "--window-size={},{}".format(*size), *options]
    done = subprocess.run([*command, "--dump-dom", copy.as_uri()], capture_output=True, text=True, timeout=120)
    result = re.search('<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert result, done.stderr
    return json.loads(html.unescape(result[1]))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_a_page_asks_for_nothing_fits_and_can_be_read(page, tmp_path, size, scheme):
    """No cut title or text, no interval without its value, no empty chart, no "1 packs"."""
    width, height = size
    preferred = int(scheme == "light")
    sizes = measured(page, tmp_path, size, f"--blink-settings=preferredColorScheme={preferred}")
    title, answer, figures, picture = sizes["bottoms"]
    assert 0 < title < answer <= height
    assert figures <= height
    assert 0 < picture <= height or size == PHONE  # where the picture comes next
    assert sizes["width"] <= width
    assert sizes["asked"] == sizes["cut"] == sizes["faint"]["found"] == []
    assert sizes["faint"]["read"] > 60
    drawings = sizes["drawings"]
    assert len(drawings) >= 4
    words = [sizes["words"]]
    for drawing in drawings:
        assert drawing["cut"] == [] and drawing["shapes"] > 0 and drawing["missed"] == 0, drawing
        words += drawing["words"]
    assert [plural.group() for text in words for plural in PLURAL_OF_ONE.finditer(text)] == []


def test_what_is_wrong_is_measured(tmp_path):
    page = tmp_path / "wrong.html"
    page.write_text(
        "<body style='background: #fff; color: #000'><p>clear</p><p style='color: #999'>faint</p>"
        "<h1 style='width: 50px; white-space: nowrap'>A long title</h1>"
        "<img src='none.png'><div style='width: 700px'>wide</div>"
    )
    sizes = measured(page, tmp_path, PHONE)
    assert [words for words, _ in sizes["faint"]["found"]] == ["faint"]
    assert any("none.png" in name for name in sizes["asked"])
    assert sizes["cut"] == ["A long title"]
    assert sizes["width"] > PHONE[0]
