"""Claims of the page: shown only if A/A passes and the control fails; the page has what the committed results show."""

import re
import struct
from pathlib import Path

import numpy as np
import pytest
from scipy.ndimage import maximum_filter, minimum_filter

from evidence import claims, figures
from evidence.__main__ import main
from evidence.runner import RESULTS, Cell, Results, Runner, read_results, write_results
from evidence.statistics import Interval, equivalence, holm, power, students
from evidence.training_shown import OrderShown, UpdatesShown
from tests.evidence import recompute
from tests.imports import ROOT
from tests.refusals import faults_of_refusals
from tests.tolerances import PICTURES_APART

PAGES = ROOT / figures.PICTURES


@pytest.fixture(scope="module")
def committed():
    """The committed results by run; no test changes them."""
    return figures.results(ROOT)


# ---- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_holm_by_hand():
    """0.01 x 3, 0.02 x 2, and no smaller than the one before: 0.03 x 1 becomes 0.04."""
    adjusted = holm({"b": 0.02, "c": 0.03, "a": 0.01})
    assert adjusted == pytest.approx({"a": 0.03, "b": 0.04, "c": 0.04})
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}


# ---- claims ----------------------------------------------------------------------------------------------------------


def written(path, losses):
    """Write runs that end with these losses: arm -> seed -> (masked tokens, next sentence)."""
    cells = {}
    for arm, by_seed in losses.items():
        for seed, (mlm, nsp) in by_seed.items():
            cells[Cell(arm, seed)] = [{"loss": mlm + nsp, "mlm_loss": mlm, "nsp_loss": nsp}]
    write_results(path, Results({"corpus": "topics", "commit": "0123456789"}, cells, {}))
    return path


def order(path, *, packs=0.0, again=0.0, control=0.5, spread=0.002):
    """Runs of `order` whose losses are shifted by chance and by these amounts."""
    random = np.random.default_rng(4)
    base = {}
    for seed in (*range(1, 8), 101, 102, 103):
        base[seed] = (5.0 + random.normal(0, 0.1), 0.5)

    def shifted(amount):
        return {seed: (mlm + amount + random.normal(0, spread), nsp) for seed, (mlm, nsp) in base.items()}

    losses = {"random": base, "packs": shifted(packs), "random_again": shifted(again), "sorted": shifted(control)}
    return OrderShown(written(path, losses))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, kept",
    [
        ({}, True),
        ({"packs": 0.03}, False),
        ({"again": 0.03}, False),  # A/A fails: chance alone is as large
        ({"control": 0.02}, False),  # the control passes
        ({"control": -0.5}, False),  # the control is better
        ({"spread": 0.05}, False),  # too few seeds for so much chance
    ],
)
def test_a_claim_is_kept_only_if_a_a_passes_and_the_control_fails(tmp_path, change, kept):
    shown = order(tmp_path / "run", **change)
    judged = claims.findings({"order_wikipedia": shown})
    assert judged["order_wikipedia"].kept is kept
    words = claims.verdicts(judged)
    assert words["order_wikipedia"].startswith("shown" if kept else "not shown")
    assert words["rival"] == "not measured"
    del shown.cells[Cell("packs", 6)]
    assert claims.findings({"order_wikipedia": shown})["order_wikipedia"].kept is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "apart, means, no_mask, kept",
    [(1e-10, 1e-3, 0.1, True), (2e-6, 1e-3, 0.1, False), (1e-10, 1e-7, 0.1, False), (1e-10, 1e-3, 0.01, False)],
)
def test_a_limit_is_kept_by_every_run_and_broken_by_both_controls(tmp_path, apart, means, no_mask, kept):
    ends = {
        "packed_float64": 5.0 + apart,
        "unpacked_float64": 5.0,
        "means_float64": 5.0 + means,
        "no_mask": 5.0 + no_mask,
        "unpacked": 5.0,
    }
    losses = {arm: dict.fromkeys((11, 12, 13), (loss, 0.0)) for arm, loss in ends.items()}
    shown = UpdatesShown(written(tmp_path / "updates_topics", losses))
    assert claims.findings({"updates_topics": shown})["same_update"].kept is kept
    assert claims.findings({"updates_wikipedia": shown})["same_update"].kept is None


# ---- the committed results -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_states_what_the_committed_results_show(committed):
    text = (ROOT / figures.PAGE).read_text(encoding="utf-8")
    assert figures.page(text, claims.findings(committed)) == text
    linked = set(re.findall(r"\(evidence/(\w+)\.png\)", text))
    assert {path.stem for path in PAGES.glob("*.md")} == committed.keys()
    for name, shown in committed.items():
        page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
        assert page == figures.tables(name, shown)
        linked.update(re.findall(r"\((\w+)\.png\)", page))
        assert "/" not in str(shown.settings), "a path in committed settings"
    assert linked == {path.stem for path in PAGES.glob("*.png")}


@pytest.mark.slow
def test_readme_claims_what_is_shown_word_for_word(committed):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    part = readme.split("Experiments with negative controls")[1].split("\n\n")[1]
    stated = {line[2:] for line in part.splitlines()}
    words = claims.verdicts(claims.findings(committed))
    shown = {claim["sentence"].strip() for name, claim in claims.told().items() if words[name].startswith("shown")}
    assert len(stated) >= 2
    assert stated <= shown


@pytest.mark.slow
def test_the_cells_of_a_claim_come_from_one_commit(committed):
    for name, finding in claims.findings(committed).items():
        if finding.kept is not None:  # of a work tree without changes
            run = claims.told()[name]["run"]
            assert re.fullmatch("[0-9a-f]{40}", committed[run].settings["commit"]), name


@pytest.mark.slow
def test_others_compute_the_same_intervals(committed):
    """`recompute.py` shares no line with `evidence`."""
    definitions = claims.told()
    judged = claims.findings(committed)
    assert recompute.TESTS.keys() == {name for name, claim in definitions.items() if claim["kind"] == "equivalence"}
    recomputed = recompute.recomputed(ROOT / figures.COMMITTED)
    assert recomputed.keys() == {name for name in recompute.TESTS if judged[name].kept is not None}
    for name, (p, ends) in recomputed.items():
        assert judged[name].p == pytest.approx(p, rel=1e-6)
        for metric, (mean, low, high) in ends.items():
            form = "+.1e" if max(map(abs, (mean, low, high))) < 5e-4 else "+.4f"
            interval = Interval(mean, low, high, 2)
            assert interval.words(form) in judged[name].figures, (name, metric)
    imported = re.findall(r"^(?:from|import) (\w+)", Path(recompute.__file__).read_text(), re.MULTILINE)
    assert "evidence" not in imported


@pytest.mark.slow
def test_a_finished_run_is_taken_into_the_page(tmp_path, capsys):
    """Committed cells and those of the run give the committed table and the block of its claim."""
    name = "order_topics"
    file = f"{name}.jsonl"
    page = tmp_path / figures.PAGE
    for folder in (tmp_path / figures.PICTURES, tmp_path / figures.COMMITTED, tmp_path / name):
        folder.mkdir(parents=True)
    page.write_text((ROOT / figures.PAGE).read_text(encoding="utf-8"))
    results = read_results(ROOT / figures.COMMITTED / file)
    cells = list(results.cells.items())
    write_results(tmp_path / name / RESULTS, results._replace(cells=dict(cells[3:])))
    write_results(tmp_path / figures.COMMITTED / file, results._replace(cells=dict(cells[:5])))
    assert figures.main(["--root", str(tmp_path), "--take", str(tmp_path / name)]) == 0
    (table,) = (tmp_path / figures.PICTURES).glob("*.md")
    assert table.read_text() == (PAGES / f"{name}.md").read_text()
    measured = set()
    for block in page.read_text().split("<!-- results: ")[1:]:
        if "Not measured: no finished run." not in block:
            measured.add(block.split(" -->")[0])
    assert measured == {name}


def test_calls_are_refused(tmp_path):
    path = tmp_path / RESULTS
    write_results(path, Results({"size": 1}, {Cell("packed", 0): [{"loss": 1.5}]}, {"machine": "here"}))
    lines = path.read_text().splitlines(keepends=True)
    (tmp_path / "cut").write_text("".join(lines[:2]))
    (tmp_path / "headless").write_text("".join(lines[1:]))
    scope = {
        "Runner": Runner,
        "figures": figures,
        "main": main,
        "read_results": read_results,
        "folder": tmp_path,
        "out": f"--out={tmp_path / 'out'}",
        "data": f"--data-dir={tmp_path}",
    }
    faults = faults_of_refusals(REFUSED, scope)
    assert not faults, "\n".join(faults)


REFUSED = [
    ("read_results(folder / 'cut')", ["cut", "settings", "facts"]),
    ("read_results(folder / 'headless')", ["headless", "settings"]),
    ("Runner(folder, {'size': 2})", ["size 1", "now 2", "--out"]),
    ("figures.page('# Evidence', {})", ["docs/evidence.md", "claims.yml"]),
    ("figures.take(folder / 'nothing_here', folder)", ["nothing_here", "order"]),
    ("figures.take(folder / 'order_none', folder)", ["order_none", "--take"]),
    ("figures.main(['--root', str(folder)])", ["docs/evidence.md", "--root"]),
    ("main(['nonsense'])", ["nonsense", "updates", "position_ids"]),
    ("main(['updates', '--size', 'trained', out])", ["--data-dir", "wikipedia/"]),
    ("main(['order', '--size', 'wikipedia', data, out])", ["wikipedia", "--data-dir"]),
    ("main(['position_ids', out])", ["--data-dir", "gsm8k/"]),
    ("main(['position_ids', '--size', 'quick', data, out])", ["gsm8k/train.jsonl.xz", "--data-dir"]),
    ("main(['fine_tuning', out])", ["--data-dir", "squad/"]),
]


def read_png(path):
    """Return the title of a picture and its pixels."""
    image = pytest.importorskip("matplotlib.image", reason="needs matplotlib")
    content = path.read_bytes()
    start = content.index(b"tEXtTitle\0")
    (length,) = struct.unpack(">I", content[start - 4 : start])
    title = content[start + 4 :][:length]
    return title.decode("latin-1"), image.imread(path)


def share_elsewhere(pixels, others):
    """Return the share of pixels whose colour is not between those of the other picture's pixels, 4 around."""
    around = (9, 9, 1)
    darker = pixels < minimum_filter(others, around) - 0.1
    lighter = pixels > maximum_filter(others, around) + 0.1
    return (darker | lighter).any(axis=2).mean()


def test_a_committed_picture_shows_the_results(tmp_path):
    pytest.importorskip(
        "matplotlib", minversion="3.8", reason="3.7 draws other letters than the committed pictures have"
    )
    """One is drawn again: the same titles and size, and labels and curves in the same places."""
    path = ROOT / figures.COMMITTED / "updates_topics.jsonl"
    shown = figures.shown_by(path.stem)(path)

    def curves(stem):
        (drawn,) = [picture for picture in shown.draw(tmp_path, stem) if "curves" in picture.name]
        return read_png(drawn)

    title, pixels = curves("again_")
    committed_title, committed_pixels = read_png(PAGES / "updates_topics_curves.png")
    assert title == committed_title == "Title\0masked tokens; next sentence"
    assert pixels.shape == committed_pixels.shape
    assert share_elsewhere(pixels, committed_pixels) < PICTURES_APART
    assert share_elsewhere(committed_pixels, pixels) < PICTURES_APART
    # So small a part is the curve of an arm whose losses differ by 0.05 nats.
    for seed in (11, 12, 13):
        for row in shown.cells[Cell("no_mask", seed)]:
            row["mlm_loss"] += 0.05
    _, other_pixels = curves("other_")
    assert share_elsewhere(other_pixels, committed_pixels) > PICTURES_APART


@pytest.mark.slow
def test_the_interval_of_some_values_is_students():
    """95 % of Student's t with 2 degrees of freedom is 2.9200."""
    interval = students([0.0, 1.0, 2.0])
    assert interval.mean == 1.0
    assert interval.high - 1 == pytest.approx(1 - interval.low) == pytest.approx(2.9200 / 3**0.5, abs=1e-4)
    assert students([0.5]) == (0.5, -np.inf, np.inf, 1)


@pytest.mark.slow
@pytest.mark.parametrize("margin", [0.2, 0.3, 0.4])
def test_a_p_value_below_5_percent_is_an_interval_within_the_margin(margin):
    random = np.random.default_rng(0)
    both = set()
    for _ in range(300):
        values = random.normal(0.1, 0.2, 4)
        inside = students(values).within(margin)
        assert (equivalence(values, margin) < 0.05) == inside
        both.add(inside)
    assert both == {True, False}
    assert equivalence([0.1, float("nan")], 0.2) == 1.0  # of a run that diverged


@pytest.mark.slow
@pytest.mark.parametrize("deviation, margin, seeds", [(0.03, 0.05, 8), (0.01, 0.012, 6), (0.01, 0.025, 3)])
def test_power_is_how_often_the_test_passes(deviation, margin, seeds):
    draws = np.random.default_rng(1).normal(0, deviation, (4000, seeds))
    passed = np.mean([equivalence(values, margin) < 0.05 for values in draws])
    assert power(deviation, margin, seeds) == pytest.approx(passed, abs=0.03)  # four standard errors of 4,000 draws
