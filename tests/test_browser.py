"""The pages in a real browser: `make test-pages`, which needs chromium; `make test` skips and counts all of this."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import yaml

from pack_data.display.picture import Axis, Bars, Line, Lines, Series, drawing
from tests.imports import ROOT
from tests.pages import Browser
from tests.tiny_runs import tiny_data

pytestmark = [
    pytest.mark.skipif(not os.environ.get("PAGES"), reason="a browser opens the pages in `make test-pages`"),
    pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on the path (apt-get install chromium)"),
]

PHONE, DESK = (390, 844), (1600, 1000)

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


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def lengths(folder):
    path = folder / "lengths.npy"
    np.save(path, np.minimum(64, np.random.default_rng(3).gamma(1.0, 9.0, 900).astype(int) + 2))
    return ["look", path, "--depth", "unlimited"]


def run(folder):
    """A pre-training as its files say, compared with unpacked rows."""
    counts = dict(packs=4, sequences=8, tokens=380)
    log = [dict(step=n, loss=9 / n, mlm_loss=8 / n, seconds=0.5 + 1 / n, **counts) for n in range(1, 30)]
    evaluation = [dict(step=n, loss=9 / n, mlm_loss=8 / n, mlm_accuracy=n / 99, seconds=1.0, **counts) for n in (9, 29)]
    constant = dict(most_frequent_token_accuracy=0.05, unigram_loss=5.0)
    sides = dict(packed_sequences_per_second=90.0, unpacked_sequences_per_second=48.0, packing_factor=2.0)
    sides.update(speedup=2.1, speedup_quartiles=[2.0, 2.2], updates=5, loss_difference=0.0, gradient_difference=1e-7)
    made = folder / "run"
    made.mkdir()
    for name, lines in (("log.jsonl", log), ("evaluation.jsonl", evaluation)):
        (made / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = dict(task="pretraining", held_out={**evaluation[-1], **constant}, compare_unpacked=sides)
    (made / "summary.json").write_text(json.dumps(summary))
    (made / "environment.json").write_text(
        json.dumps({"device": "CPU", "commit": "9de14421137d2044e972c3c0a124d25aa1"})
    )
    (made / "config.yml").write_text(yaml.safe_dump({"data": {"max_sequence_length": 100}}))
    return ["look", made]


PAGES = {
    "histogram": lambda folder: ["look", "wikipedia_512"],
    "lengths": lengths,
    "data set": lambda folder: ["look", tiny_data(folder / "data")],
    "run": run,
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_a_page_is_silent_asks_for_nothing_fits_and_can_be_read(browser, page, size, scheme):
    browser.open(page, width=size[0], height=size[1], scheme=scheme)
    title, answer, figures, picture = browser.of(BOTTOMS)
    assert 0 < title < answer <= size[1] and figures <= size[1]
    assert 0 < picture <= size[1] or size == PHONE  # where the picture comes next
    browser.of("document.querySelectorAll('details').forEach(each => { each.open = true })")
    assert browser.of("document.documentElement.scrollWidth") <= size[0]
    assert browser.of("document.querySelectorAll('figure img').length") >= 4
    contrast = browser.of(FAINT)
    assert contrast["found"] == [] and contrast["read"] > 60
    assert browser.said == [] and browser.asked == [page.as_uri()]


def test_pictures_and_titles_are_whole(browser, page):
    """No cut title or text, no interval without its value, no empty chart, no "1 packs"."""
    browser.open(page, width=DESK[0], height=DESK[1])
    browser.of("document.querySelectorAll('details').forEach(each => { each.open = true })")
    drawings = browser.of(DRAWINGS)
    assert len(drawings) >= 4
    for each in drawings:
        assert each["cut"] == [] and each["shapes"] > 0 and each["missed"] == 0, each
    words = [browser.of("document.body.innerText"), *(text for each in drawings for text in each["words"])]
    assert [found.group() for text in words for found in PLURAL_OF_ONE.finditer(text)] == []
    for width in (PHONE[0], 820, DESK[0]):
        browser.resize(width, 1000)
        assert browser.of(CUT_TITLES) == []


def test_links_lead_to_their_sections(browser, page):
    browser.open(page, width=PHONE[0], height=PHONE[1])
    links = browser.of("[...document.querySelectorAll('a')].map(each => each.getAttribute('href'))")
    assert len(links) >= 2
    for number, link in enumerate(links):
        browser.of(f"document.querySelectorAll('a')[{number}].click()")
        assert browser.of("location.hash") == link
        top, height = browser.of("[document.querySelector(location.hash).getBoundingClientRect().top, innerHeight - 2]")
        assert -1 <= top < height  # scrolled to


def test_what_is_wrong_is_seen(browser, tmp_path):
    wrong = tmp_path / "wrong.html"
    wrong.write_text(
        "<body style='background: #fff; color: #000'><p>clear</p><p style='color: #999'>faint</p><img src='none.png'>"
        "<div style='width: 700px'>wide</div>"
        "<script>console.error('complaint')</script>"
    )
    browser.open(wrong, width=PHONE[0], height=PHONE[1])
    assert any("complaint" in each for each in browser.said) and any("none.png" in each for each in browser.asked)
    contrast = browser.of(FAINT)
    assert [words for words, _ in contrast["found"]] == ["faint"] and contrast["read"] == 3
    assert browser.of("document.documentElement.scrollWidth") > PHONE[0]


def test_faults_of_pictures_are_seen(browser, tmp_path):
    """An interval beside its value, a chart without data, a text beyond the edge, one pack in the plural."""
    axis = Axis("slots")
    missed = Bars("Missed", ("1 packs",), axis, (Series("a", (4.0,), (5.0,), (6.0,)),), across=True)
    met = Bars("Met", ("two",), axis, (Series("a", (4.0,), (3.0,), (6.0,)),))
    empty = Lines("Empty", axis, axis, (Line("a", (), ()),))
    svg = [drawing(each) for each in (missed, met, empty)]
    svg.append(re.sub(rb'viewBox="0 0 (\d+)', rb'viewBox="40 0 \1', svg[1]))
    images = [
        f"<figure><img src='data:image/svg+xml;base64,{base64.b64encode(each).decode()}'></figure>" for each in svg
    ]
    page = tmp_path / "faults.html"
    page.write_text("<!DOCTYPE html><h2 style='width: 50px; white-space: nowrap'>A long title</h2>" + "".join(images))
    browser.open(page, width=DESK[0], height=DESK[1])
    found = browser.of(DRAWINGS)
    assert [(each["intervals"], each["missed"]) for each in found] == [(1, 1), (1, 0), (0, 0), (1, 0)]
    assert [each["shapes"] > 0 for each in found] == [True, True, False, True]
    assert [bool(each["cut"]) for each in found] == [False, False, False, True]
    assert any(PLURAL_OF_ONE.search(text) for text in found[0]["words"])
    assert browser.of(CUT_TITLES) == ["A long title"]
