"""Claims of the page: shown only if A/A passes and the control fails; the page has what the committed results show."""

import re
from pathlib import Path

import numpy as np
import pytest

from evidence import claims, figures
from evidence.__main__ import main
from evidence.runner import RESULTS, Cell, Results, Runner, read_results, write_results
from evidence.statistics import Interval, holm
from evidence.training_shown import OrderShown, UpdatesShown
from tests.evidence import recompute
from tests.imports import ROOT
from tests.refusals import faults_of_refusals

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
