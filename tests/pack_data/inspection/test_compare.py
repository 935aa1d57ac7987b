"""Comparing packers: the rows account for themselves, and the commands print what a user needs."""

import csv
import gc
import io
import json
import os

import pytest

from pack_data.cli.command import run_main
from pack_data.inspection import compare as command
from pack_data.inspection import one_packer
from pack_data.inspection.compare import ALGORITHMS, _jobs, compare, heat_maps
from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram
from tests.refusals import refused


@pytest.fixture(scope="module", autouse=True)
def _loaded_stays():
    """A measurement begins with a garbage collection, which need not look at what other tests have loaded."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def histogram():
    # SQuAD in units of 8 tokens
    return LengthHistogram.published("squad_1_1_384").rounded_up(8)


@pytest.fixture(scope="module")
def rows(histogram):
    return compare(histogram, (2, 3, None), [name for name in ALGORITHMS if name != "nnlshp"])


def test_every_packer_at_every_depth_it_knows():
    jobs = _jobs(ALGORITHMS, (2, 4, None))
    assert len(jobs) == len(set(jobs))
    expected = {("none", 1), ("sort", 1), ("greedy", None), ("nnlshp", 2), ("optimal", None)}
    assert expected <= set(jobs)
    assert not {("nnlshp", 4), ("nnlshp", None)} & set(jobs)
    assert _jobs(["spfhp"], (3,)) == [("optimal", 3), ("spfhp", 3)]  # the bound comes from optimal


def test_rows_are_the_packings(histogram, rows):
    checked = 0
    for row in rows:
        assert row.padding_tokens == row.slots - histogram.tokens
        assert row.speedup == pytest.approx(384 * histogram.sequences / row.slots)
        assert row.efficiency == pytest.approx(histogram.tokens / row.slots)
        if row.algorithm in ("sort", "greedy"):
            continue
        depth = row.max_sequences_per_pack
        packing = get_packer(row.algorithm)(histogram, max_sequences_per_pack=depth)
        assert row.packs == packing.packs
        assert row.strategies == len(packing.strategies)
        assert row.largest_depth == packing.largest_depth
        checked += 1
    assert checked == len(rows) - 2 == 1 + 3 * 5  # NONE, and five packers at three depths


def test_all_packers_of_a_depth_share_the_proven_bound(rows):
    for depth in (2, 3, None):
        of_depth = [row for row in rows if row.max_sequences_per_pack == depth]
        members = [row for row in of_depth if row.algorithm not in ("none", "sort")]
        assert len({row.lower_bound for row in members}) == 1
        assert all(row.gap == row.packs - row.lower_bound >= 0 for row in members)
    assert next(row for row in rows if row.algorithm == "sort").gap is None
    padding, gap = heat_maps(rows)
    shown = dict(zip(gap.rows, gap.values))
    assert gap.columns == padding.columns == ("2", "3", "unlimited")
    assert shown["OPTIMAL"] == tuple(100 * row.gap / row.lower_bound for row in rows if row.algorithm == "optimal")


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


def test_the_command_writes_its_rows_as_json_and_csv(capsys, tmp_path, histogram):
    """Each packer runs in a process of its own, whose memory is measured alone."""
    table = tmp_path / "h.csv"
    histogram.to_csv(table)
    arguments = ["--histogram", str(table), "--max-sequence-length", "384", "--depths", "2"]
    arguments += ["--packers", "lpfhp", "--json", "--csv", str(tmp_path / "rows.csv")]
    assert run_main(command.main, arguments) == 0
    (report,) = json.loads(capsys.readouterr().out)
    (expected,) = compare(histogram, (2,), ["lpfhp"])
    (row,) = report["rows"]
    assert (report["histogram"], report["sequences"]) == ("h", histogram.sequences)
    for name in ("packs", "lower_bound", "efficiency", "max_sequences_per_pack"):
        assert row[name] == getattr(expected, name)
    assert row["peak_memory"] is None or 0 <= row["peak_memory"] < 2**30
    (read,) = csv.DictReader(io.StringIO((tmp_path / "rows.csv").read_text()))
    assert (read["histogram"], read["packs"]) == ("h", str(row["packs"]))
