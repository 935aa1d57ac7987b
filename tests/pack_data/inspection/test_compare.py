"""Comparing packers: the rows account for themselves, and the commands print what a user needs."""

import csv
import gc
import io
import json

import pytest

from pack_data.cli.command import depth_text, run_main
from pack_data.inspection import compare as command
from pack_data.inspection.compare import ALGORITHMS, Case, compare, gap_map, padding_map, plan, table
from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram
from tests.pack_data_strategies import SPECIAL


@pytest.fixture(scope="module", autouse=True)
def _loaded_stays():
    """A measurement begins with a garbage collection, which need not look at what other tests have loaded."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def case():
    # SQuAD in units of 8 tokens
    whole = LengthHistogram.published("squad_1_1_384")
    lengths = [-(-length // 8) for length in whole.lengths.tolist()]
    counts = [0] * 49
    for length, number in zip(lengths, whole.counts[whole.lengths].tolist()):
        counts[length] += number
    return Case(LengthHistogram(counts, "squad_48"), (2, 3, None))


@pytest.fixture(scope="module")
def rows(case):
    return compare(case)


def test_every_packer_at_every_depth_it_knows():
    jobs = plan(ALGORITHMS, (2, 4, None))
    assert len(jobs) == len(set(jobs))
    assert {("none", 1), ("sort", 1), ("greedy", None), ("nnlshp", 2), ("spfhp", 4), ("optimal", None)} <= set(jobs)
    assert ("nnlshp", 4) not in jobs and ("nnlshp", None) not in jobs
    assert plan(["spfhp"], (3,)) == [("optimal", 3), ("spfhp", 3)]  # the bound comes from optimal


def test_rows_are_the_packings(case, rows):
    S, sequences, tokens = 48, case.histogram.sequences, case.histogram.tokens
    checked = 0
    for row in rows:
        assert row.padding_tokens == row.slots - tokens
        assert row.speedup == pytest.approx(S * sequences / row.slots)
        assert row.efficiency == pytest.approx(tokens / row.slots)
        if row.algorithm == "sort":
            continue
        packing = get_packer(row.algorithm)(case.histogram, max_sequences_per_pack=row.max_sequences_per_pack)
        assert (row.packs, row.strategies, row.largest_depth) == (
            packing.packs,
            len(packing.strategies),
            packing.largest_depth,
        )
        checked += 1
    assert checked == len(rows) - 1 == 1 + 1 + 3 * 5 + 2  # NONE, GREEDY, five packers at three depths, NNLSHP at two


def test_all_packers_of_a_depth_share_the_proven_bound(rows):
    for depth in (2, 3, None):
        members = [row for row in rows if row.max_sequences_per_pack == depth and row.algorithm != "none"]
        assert len({row.lower_bound for row in members}) == 1
        assert all(row.gap == row.packs - row.lower_bound >= 0 for row in members)
    assert next(row for row in rows if row.algorithm == "sort").gap is None


def test_the_bound_comes_along_when_optimal_is_not_asked_for(case):
    only = compare(Case(case.histogram, (3,)), ["spfhp"])
    assert [row.algorithm for row in only] == ["spfhp"]
    assert only[0].gap > 0


def test_memory_is_measured_apart(case):
    apart = compare(Case(case.histogram, (3,)), ["spfhp", "optimal"], isolated=True)
    together = compare(Case(case.histogram, (3,)), ["spfhp", "optimal"])
    assert [row.packs for row in apart] == [row.packs for row in together]
    assert all(row.peak_memory is None or 0 <= row.peak_memory < 2**30 for row in apart)


def test_a_mistake_in_another_process_is_told_here(case, monkeypatch):
    monkeypatch.setattr(command, "packs_at_depth", lambda name, depth: True)
    with pytest.raises(ValueError, match="nnlshp packs at most 3 sequences together, not 5"):
        compare(Case(case.histogram, (5,)), ["nnlshp"], isolated=True)


def test_the_table_marks_the_best(case, rows):
    lines = table(case, rows).splitlines()
    marked = [line for line in lines if line.startswith(" * ")]
    assert any("OPTIMAL" in line for line in marked) and not any("NNLSHP" in line for line in marked)
    assert any(line.startswith("depth 3: no packing has fewer than") for line in lines)
    for special in SPECIAL.values():
        small = Case(special, (3,))
        assert "OPTIMAL" in table(small, compare(small))


def test_the_paper_stands_beside_wikipedia(case, rows):
    assert "paper" not in table(case, rows)
    named = Case(LengthHistogram(case.histogram.counts, "wikipedia_512"), case.depths)
    line = next(line for line in table(named, rows).splitlines() if "NNLSHP" in line and line.endswith("1.913"))
    assert "99.7  2.00" in line


def test_the_pictures_hold_the_rows(rows):
    own = {(row.algorithm.upper(), depth_text(row.max_sequences_per_pack)): row for row in rows}
    for picture, value in (
        (padding_map(rows), lambda row: 100 * (1 - row.efficiency)),
        (gap_map(rows), lambda row: 100 * row.gap / row.lower_bound),
    ):
        assert len(picture.rows) > 2 and len(picture.columns) > 1
        for name, cells in zip(picture.rows, picture.values):
            for depth, cell in zip(picture.columns, cells):
                assert cell is None or cell == pytest.approx(value(own[name, depth]))


# ---- the commands ----------------------------------------------------------------------------------------------------


def run(module, *arguments):
    return run_main(module.main, list(arguments))


def test_compare_command(capsys, tmp_path, case):
    case.histogram.to_csv(tmp_path / "h.csv")
    options = ["--histogram", str(tmp_path / "h.csv"), "--max-sequence-length", "48", "--depths", "2,unlimited"]
    assert run(command, *options, "--packers", "none,spfhp,optimal") == 0
    assert "depth unlimited: no packing has fewer than" in capsys.readouterr().out
    assert run(command, *options, "--packers", "lpfhp", "--json", "--csv", str(tmp_path / "rows.csv")) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert [row["max_sequences_per_pack"] for row in report["rows"]] == [2, None]
    assert (report["histogram"], report["sequences"]) == ("h", case.histogram.sequences)
    read = list(csv.DictReader(io.StringIO((tmp_path / "rows.csv").read_text())))
    assert [(row["histogram"], row["algorithm"], row["packs"]) for row in read] == [
        ("h", row["algorithm"], str(row["packs"])) for row in report["rows"]
    ]
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    assert run(command, *options, "--packers", "lpfhp", "--plot", str(tmp_path / "padding.svg")) == 0
    assert "<svg" in (tmp_path / "padding.svg").read_text()
