"""Comparing packers: the rows account for themselves, and the commands print what a user needs."""

import csv
import gc
import io
import json
import os

import pytest

from pack_data.cli.command import depth_text, run_main
from pack_data.inspection import compare as command
from pack_data.inspection import one_packer
from pack_data.inspection.compare import ALGORITHMS, _jobs, _printed, compare, heat_maps
from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram
from tests.pack_data_strategies import SPECIAL
from tests.refusals import refused


@pytest.fixture(scope="module", autouse=True)
def _loaded_stays():
    """A measurement begins with a garbage collection, which need not look at what other tests have loaded."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def histogram():
    # SQuAD in units of 8 tokens
    whole = LengthHistogram.published("squad_1_1_384")
    lengths = [-(-length // 8) for length in whole.lengths.tolist()]
    counts = [0] * 49
    for length, number in zip(lengths, whole.counts[whole.lengths].tolist()):
        counts[length] += number
    return LengthHistogram(counts, "squad_48")


@pytest.fixture(scope="module")
def rows(histogram):
    return compare(histogram, (2, 3, None))


def test_every_packer_at_every_depth_it_knows():
    jobs = _jobs(ALGORITHMS, (2, 4, None))
    assert len(jobs) == len(set(jobs))
    assert {("none", 1), ("sort", 1), ("greedy", None), ("nnlshp", 2), ("spfhp", 4), ("optimal", None)} <= set(jobs)
    assert ("nnlshp", 4) not in jobs and ("nnlshp", None) not in jobs
    assert _jobs(["spfhp"], (3,)) == [("optimal", 3), ("spfhp", 3)]  # the bound comes from optimal


def test_rows_are_the_packings(histogram, rows):
    S, sequences, tokens = 48, histogram.sequences, histogram.tokens
    checked = 0
    for row in rows:
        assert row.padding_tokens == row.slots - tokens
        assert row.speedup == pytest.approx(S * sequences / row.slots)
        assert row.efficiency == pytest.approx(tokens / row.slots)
        if row.algorithm == "sort":
            continue
        packing = get_packer(row.algorithm)(histogram, max_sequences_per_pack=row.max_sequences_per_pack)
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


def test_the_bound_comes_along_when_optimal_is_not_asked_for(histogram):
    only = compare(histogram, (3,), ["spfhp"])
    assert [row.algorithm for row in only] == ["spfhp"]
    assert only[0].gap > 0


def test_memory_is_measured_apart(histogram):
    apart = compare(histogram, (3,), ["spfhp", "optimal"], isolated=True)
    together = compare(histogram, (3,), ["spfhp", "optimal"])
    assert [row.packs for row in apart] == [row.packs for row in together]
    assert all(row.peak_memory is None or 0 <= row.peak_memory < 2**30 for row in apart)


def test_a_mistake_in_another_process_is_told_here(histogram, monkeypatch):
    monkeypatch.setattr(command, "packs_at_depth", lambda name, depth: True)
    with refused("nnlshp", 3, 5):
        compare(histogram, (5,), ["nnlshp"], isolated=True)


def _end(pipe, *_):
    os._exit(9)


def test_a_packer_whose_process_is_killed_is_named(histogram, monkeypatch):
    monkeypatch.setattr(one_packer, "_send_row", _end)
    with refused("spfhp", "depth 3", "--packers"):
        list(one_packer.measure_each([("spfhp", 3)], histogram, 256, isolated=True))


def test_the_printed_table_holds_the_rows(histogram, rows):
    printed = _printed(histogram, rows)
    assert "paper" not in printed
    for row in rows:
        depth = depth_text(row.max_sequences_per_pack)
        lines = [line.split() for line in printed.splitlines() if line.split()[:2] == [row.algorithm.upper(), depth]]
        cells = [cell for line in lines for cell in line]
        gap = "-" if row.gap is None else f"{row.gap:,}"
        assert {f"{row.packs:,}", f"{row.padding_tokens:,}", f"{row.efficiency:.3%}", gap} <= set(cells)
    for special in SPECIAL.values():
        assert "OPTIMAL" in _printed(special, compare(special, (3,)))


def test_the_paper_stands_beside_wikipedia(histogram, rows):
    printed = _printed(LengthHistogram(histogram.counts, "wikipedia_512"), rows)
    (line,) = [line for line in printed.splitlines() if line.endswith("1.913")]
    assert "NNLSHP" in line and "99.7  2.00" in line


def test_the_pictures_hold_the_rows(rows):
    own = {(row.algorithm.upper(), depth_text(row.max_sequences_per_pack)): row for row in rows}
    values = (lambda row: 100 * (1 - row.efficiency), lambda row: 100 * row.gap / row.lower_bound)
    for picture, value in zip(heat_maps(rows), values):
        assert len(picture.rows) > 2 and len(picture.columns) > 1
        for name, cells in zip(picture.rows, picture.values):
            for depth, cell in zip(picture.columns, cells):
                assert cell is None or cell == pytest.approx(value(own[name, depth]))


def run(module, *arguments):
    return run_main(module.main, list(arguments))


def test_compare_command(capsys, tmp_path, histogram):
    histogram.to_csv(tmp_path / "h.csv")
    options = ["--histogram", str(tmp_path / "h.csv"), "--max-sequence-length", "48", "--depths", "2,unlimited"]
    assert run(command, *options, "--packers", "none,spfhp,optimal") == 0
    assert "h  " in capsys.readouterr().out
    assert run(command, *options, "--packers", "lpfhp", "--json", "--csv", str(tmp_path / "rows.csv")) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert [row["max_sequences_per_pack"] for row in report["rows"]] == [2, None]
    assert (report["histogram"], report["sequences"]) == ("h", histogram.sequences)
    read = list(csv.DictReader(io.StringIO((tmp_path / "rows.csv").read_text())))
    assert [(row["histogram"], row["algorithm"], row["packs"]) for row in read] == [
        ("h", row["algorithm"], str(row["packs"])) for row in report["rows"]
    ]
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    assert run(command, *options, "--packers", "lpfhp", "--plot", str(tmp_path / "padding.svg")) == 0
    assert "<svg" in (tmp_path / "padding.svg").read_text()
