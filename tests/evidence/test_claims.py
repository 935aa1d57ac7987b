"""Claims of the page: written before the runs, shown only if A/A passes and the control fails."""

import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy.ndimage import maximum_filter, minimum_filter

from evidence import claims, figures
from evidence.fine_tuning import FineTuningShown
from evidence.runner import RESULTS, Cell, Results, write_results
from evidence.statistics import (
    Interval,
    above,
    equivalence,
    holm,
    power,
    ratio,
    students,
)
from evidence.training_shown import OrderShown, UpdatesShown
from tests.evidence import recompute
from tests.imports import ROOT
from tests.refusals import refused
from tests.tiers import slow
from tests.tolerances import PICTURES_APART


def test_the_interval_of_some_values_is_students():
    found = students([0.0, 1.0, 2.0])
    assert found.mean == 1.0 and found.high - 1 == pytest.approx(1 - found.low)
    assert found.high - 1 == pytest.approx(2.9200 / 3**0.5, abs=1e-4)  # 95 % of Student's t, 2 degrees
    assert students([0.5]) == (0.5, -np.inf, np.inf, 1)
    assert students([1.0, 1.0]) == (1.0, 1.0, 1.0, 2)


@pytest.mark.parametrize("margin", [0.2, 0.3, 0.4])
def test_a_p_value_below_5_percent_is_an_interval_within_the_margin(margin):
    random, both = np.random.default_rng(0), set()
    for _ in range(300):
        values = random.normal(0.1, 0.2, 4)
        inside = students(values).within(margin)
        assert (equivalence(values, margin) < 0.05) == inside
        both.add(inside)
    assert both == {True, False}
    assert equivalence([0.1, 0.1], 0.2) == 0.0 and equivalence([0.3, 0.3], 0.2) == 1.0
    assert equivalence([0.1, float("nan")], 0.2) == 1.0  # of a run that diverged


@pytest.mark.parametrize("deviation, margin, seeds", [slow((0.03, 0.05, 8)), slow((0.01, 0.012, 6)), (0.01, 0.025, 3)])
def test_power_is_how_often_the_test_passes(deviation, margin, seeds):
    drawn = np.random.default_rng(1).normal(0, deviation, (4000, seeds))
    passed = np.mean([equivalence(values, margin) < 0.05 for values in drawn])
    assert power(deviation, margin, seeds) == pytest.approx(passed, abs=0.03)  # four standard errors of 4,000 draws
    assert 0.05 < passed < 0.999
    assert power(deviation / 1e4, margin, seeds) == pytest.approx(1.0)  # a narrow distribution is seen too


def test_holm_by_hand():
    """0.01 x 3, 0.02 x 2, and no smaller than the one before: 0.03 x 1 becomes 0.04."""
    assert holm({"b": 0.02, "c": 0.03, "a": 0.01}) == pytest.approx({"a": 0.03, "b": 0.04, "c": 0.04})
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0} and holm({}) == {}


def test_intervals_cover_the_ratio_as_often_as_they_say():
    random = np.random.default_rng(3)
    found = [ratio(np.exp(0.1 * random.standard_normal(4) + np.log(2.0))) for _ in range(1000)]
    assert 0.87 < np.mean([each.low < 2.0 < each.high for each in found]) < 0.93
    two = ratio([2.0] * 5 + [3.0] * 4)
    assert np.median([2.0] * 5 + [3.0] * 4) < two.low < two.mean < two.high  # why the middle is no median
    assert two.mean == pytest.approx(2.0 * 1.5 ** (4 / 9))
    assert ratio([2.0])[:3] == (pytest.approx(2.0), 0.0, float("inf"))
    assert ratio([1.0, -1.0]).high == float("inf")  # a difference of two times may be below 0
    for each in (1.7, 1.85, 1.95):
        assert (above([1.9, 2.0, 2.1], each) < 0.05) == (ratio([1.9, 2.0, 2.1]).low > each)


def written(path, losses, **settings):
    """The results of runs that end with these losses: arm -> seed -> (masked tokens, next sentence)."""
    cells = {}
    for arm, of in losses.items():
        for seed, (mlm, nsp) in of.items():
            row = {"loss": mlm + nsp, "mlm_loss": mlm, "nsp_loss": nsp}
            cells[Cell(arm, seed)] = [row]
    write_results(path, Results({"corpus": "topics", "commit": "0123456789", **settings}, cells, {}))
    return path


def order(folder, *, packs=0.0, again=0.0, control=0.5, spread=0.002):
    random, seeds = np.random.default_rng(4), [*range(1, 8), 101, 102, 103]
    base = {seed: (5.0 + random.normal(0, 0.1), 0.5) for seed in seeds}

    def shifted(by):
        return {seed: (mlm + by + random.normal(0, spread), nsp) for seed, (mlm, nsp) in base.items()}

    losses = {"random": base, "packs": shifted(packs), "random_again": shifted(again), "sorted": shifted(control)}
    return OrderShown(written(folder, losses))


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
    found = claims.findings({"order_wikipedia": order(tmp_path / "run", **change)})
    assert found["order_wikipedia"].kept is kept
    assert all(found[name].kept is None for name in found if name != "order_wikipedia")
    words = claims.verdicts(found)
    assert words["order_wikipedia"].startswith("shown" if kept else "not shown")
    assert not kept or "of 5 tests" in words["order_wikipedia"]  # those that are not measured yet count too
    assert words["rival"] == "not measured" and found["order_wikipedia"].picture is not None


def test_a_missing_seed_is_no_verdict(tmp_path):
    shown = order(tmp_path / "run")
    for cell in (Cell("packs", 6), Cell("sorted", 3), Cell("random", 102)):
        rows = shown.cells.pop(cell)
        assert claims.findings({"order_wikipedia": shown})["order_wikipedia"].kept is None
        shown.cells[cell] = rows
    assert claims.findings({"order_wikipedia": shown})["order_wikipedia"].kept


@pytest.mark.parametrize(
    "apart, means, no_mask, kept",
    [(1e-10, 1e-3, 0.1, True), (2e-6, 1e-3, 0.1, False), (1e-10, 1e-7, 0.1, False), (1e-10, 1e-3, 0.01, False)],
)
def test_a_limit_is_kept_by_every_run_and_broken_by_both_controls(tmp_path, apart, means, no_mask, kept):
    def at(loss):
        return dict.fromkeys((11, 12, 13), (loss, 0.0))

    losses = {"packed_float64": at(5.0 + apart), "unpacked_float64": at(5.0), "means_float64": at(5.0 + means)}
    losses.update(no_mask=at(5.0 + no_mask), unpacked=at(5.0))
    shown = UpdatesShown(written(tmp_path / "updates_topics", losses))
    assert claims.findings({"updates_topics": shown})["same_update"].kept is kept
    assert claims.findings({"updates_wikipedia": shown})["same_update"].kept is None
    del losses["means_float64"]  # a control of the first alone
    shown = UpdatesShown(written(tmp_path / "updates_wikipedia", losses))
    found = claims.findings({"updates_wikipedia": shown, "updates_topics": shown})
    assert found["same_update"].kept is None
    assert found["same_update_wikipedia"].kept is (apart < 1e-6 and no_mask > 0.05)


@pytest.mark.parametrize("packed, no_mask, kept", [(0, 500, True), (1, 500, False), (0, 50, False)])
def test_answers_are_the_same_in_packs_and_others_without_the_mask(tmp_path, packed, no_mask, kept):
    cells = {}
    for seed in (1, 2, 3):
        ways = {"packed": packed, "no_mask": no_mask}
        row = {f"answered_{way}": {"different": each, "answers": 850} for way, each in ways.items()}
        cells[Cell("squad_packed", seed)] = [row]
    write_results(tmp_path / "answers.jsonl", Results({"commit": "0123456789"}, cells, {}))
    shown = FineTuningShown(tmp_path / "answers.jsonl")
    found = claims.findings({"fine_tuning_answers": shown})["same_answers"]
    assert found.kept is kept and f"{3 * no_mask:,}" in found.figures and "2,550" in found.figures
    del shown.cells[Cell("squad_packed", 3)]
    assert claims.findings({"fine_tuning_answers": shown})["same_answers"].kept is None


def test_cells_of_no_recorded_commit_decide_nothing(tmp_path):
    run = order(tmp_path / "run")
    del run.settings["commit"]
    assert claims.findings({"order_wikipedia": run})["order_wikipedia"].kept is None


def test_many_tests_need_smaller_p_values(monkeypatch):
    found = {name: claims.Finding("", True, p) for name, p in zip("abcd", (0.04, 0.001, 0.001, 0.001))}
    assert all(words.startswith("shown") for words in claims.verdicts(found).values())
    found["e"] = claims.Finding("", True, 0.03)  # two tests above 0.025
    words = claims.verdicts(found)
    assert [name for name in words if words[name].startswith("not shown")] == ["a", "e"]
    assert claims.verdicts({"limit": claims.Finding("", True)}) == {"limit": "shown"}


def test_the_page_says_what_the_committed_results_say():
    text, shown = (ROOT / figures.PAGE).read_text(encoding="utf-8"), figures.results(ROOT)
    assert figures.page(text, claims.findings(shown)) == text
    pages = {path.stem: path for path in (ROOT / figures.PICTURES).glob("*.md")}
    assert pages.keys() == shown.keys()
    assert all(pages[name].read_text(encoding="utf-8") == figures.tables(name, each) for name, each in shown.items())
    linked = set(re.findall(r"\(evidence/(\w+)\.png\)", text))
    linked |= {name for path in pages.values() for name in re.findall(r"\((\w+)\.png\)", path.read_text("utf-8"))}
    assert linked == {path.stem for path in (ROOT / figures.PICTURES).glob("*.png")}
    assert not any("/" in str(each.settings) for each in shown.values()), "a path in committed settings"


def read_png(path):
    """Return the title of a picture and its pixels."""
    image = pytest.importorskip("matplotlib.image", reason="needs matplotlib")
    content = path.read_bytes()
    start = content.index(b"tEXtTitle\0")
    (length,) = struct.unpack(">I", content[start - 4 : start])
    return content[start + 4 :][:length].decode("latin-1"), image.imread(path)


def share_elsewhere(pixels, others):
    """Return the share of pixels whose colour is not between those of the other picture's pixels, 4 around."""
    lowest, highest = (extreme(others, (9, 9, 1)) for extreme in (minimum_filter, maximum_filter))
    return ((pixels < lowest - 0.1) | (pixels > highest + 0.1)).any(axis=2).mean()


def test_a_committed_picture_shows_the_results(tmp_path):
    """One is drawn again: the same titles and size, and labels and curves in the same places."""
    shown = figures.results(ROOT)["updates_topics"]
    drawn = next(path for path in shown.draw(tmp_path, "updates_topics_") if "curves" in path.name)
    title, pixels = read_png(drawn)
    committed_title, committed = read_png(ROOT / figures.PICTURES / drawn.name)
    assert title == committed_title == "Title\0masked tokens; next sentence" and pixels.shape == committed.shape
    assert share_elsewhere(pixels, committed) < PICTURES_APART > share_elsewhere(committed, pixels)
    # So small a part is the curve of an arm whose losses differ by 0.05 nats.
    for seed in (11, 12, 13):
        for row in shown.cells[Cell("no_mask", seed)]:
            row["mlm_loss"] += 0.05
    _, other = read_png(next(path for path in shown.draw(tmp_path, "other_") if "curves" in path.name))
    assert share_elsewhere(other, committed) > PICTURES_APART


def test_readme_claims_what_is_shown_word_for_word():
    text, found = (ROOT / "README.md").read_text(encoding="utf-8"), claims.findings(figures.results(ROOT))
    part = text.split("Experiments with negative controls")[1].split("\n\n")[1]
    said = [line[2:] for line in part.splitlines()]
    words = claims.verdicts(found)
    shown = {claim["sentence"].strip() for name, claim in claims.told().items() if words[name].startswith("shown")}
    assert len(said) >= 2 and set(said) <= shown


def test_the_cells_of_a_claim_come_from_one_commit():
    shown = figures.results(ROOT)
    for name, found in claims.findings(shown).items():
        if found.kept is not None:  # of a work tree without changes
            assert re.fullmatch(r"[0-9a-f]{40}", shown[claims.told()[name]["run"]].settings["commit"]), name


def test_others_compute_the_same_intervals():
    """`recompute.py` shares no line with `evidence`."""
    results = ROOT / figures.COMMITTED
    shown, told = figures.results(ROOT), claims.told()
    found = claims.findings(shown)
    assert recompute.TESTS.keys() == {name for name, claim in told.items() if claim["kind"] == "equivalence"}
    recomputed = recompute.recomputed(results)
    assert recomputed.keys() == {name for name in recompute.TESTS if found[name].kept is not None}
    for name, (p, ends) in recomputed.items():
        assert found[name].p == pytest.approx(p, rel=1e-6)
        for metric, (mean, low, high) in ends.items():
            form = "+.1e" if max(map(abs, (mean, low, high))) < 5e-4 else "+.4f"
            assert Interval(mean, low, high, 2).words(form) in found[name].figures, (name, metric)


def test_a_finished_run_is_taken_into_the_page(tmp_path, capsys):
    """Committed cells give the same table and the same block; the claims of other runs are not measured."""
    page, name = tmp_path / figures.PAGE, "order_topics"
    page.parent.mkdir()
    page.write_text((ROOT / figures.PAGE).read_text(encoding="utf-8"))
    run = tmp_path / name
    run.mkdir()
    committed = figures.read_results(ROOT / figures.COMMITTED / f"{name}.jsonl")
    write_results(run / RESULTS, committed._replace(cells=dict(list(committed.cells.items())[3:])))
    (tmp_path / figures.COMMITTED).mkdir(parents=True)
    write_results(
        tmp_path / figures.COMMITTED / f"{name}.jsonl",
        committed._replace(cells=dict(list(committed.cells.items())[:5])),
    )
    (tmp_path / figures.PICTURES).mkdir()
    assert figures.main(["--root", str(tmp_path), "--take", str(run)]) == 0
    written = [path.relative_to(tmp_path) for path in (tmp_path / figures.PICTURES).glob("*.md")]
    assert written == [Path(figures.PICTURES, f"{name}.md")]
    assert (tmp_path / written[0]).read_text() == (ROOT / written[0]).read_text()
    blocks = page.read_text().split("<!-- results: ")[1:]
    told = {block.split(" -->")[0]: "Not measured: no finished run." not in block for block in blocks}
    assert told == {claim: claim == name for claim in claims.told()}
    with refused("order_none", "--take"):
        figures.main(["--root", str(tmp_path), "--take", str(tmp_path / "order_none")])


def test_a_page_without_a_block_of_each_claim_is_refused(tmp_path, capsys):
    with refused("docs/evidence.md", "claims.yml"):
        figures.page("# Evidence\n", {})
    assert "evidence" not in {name.split(".")[0] for name in _imports(Path(recompute.__file__))}
    assert yaml.safe_load(claims.FILE.read_text())["claims"] == claims.told() and sys.modules[recompute.__name__]


def _imports(path):
    return re.findall(r"^(?:from|import) (\S+)", path.read_text(), re.MULTILINE)
