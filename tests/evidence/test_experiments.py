"""Experiments: cells are measured once, ablations change what they say, a control that passes shows nothing."""

import pytest

from evidence.packed_runs import QUICK, PretrainingSetup
from evidence.runner import RESULTS, Cell, Runner, read_results
from tests.refusals import refused

pytestmark = pytest.mark.slow

CELLS_WANTED = [Cell("packed", 0), Cell("packed", 1), Cell("unpacked, all", 0)]


def test_a_stopped_experiment_goes_on_with_the_missing_cells(tmp_path):
    measured = []

    def measure(cell, stop_at=None):
        if cell == stop_at:
            raise KeyboardInterrupt
        measured.append(cell)
        return [{"loss": cell.seed + 0.5}]

    with pytest.raises(KeyboardInterrupt):
        Runner(tmp_path / "run", {"size": 1}).run(CELLS_WANTED, lambda cell: measure(cell, CELLS_WANTED[2]))
    rows = Runner(tmp_path / "run", {"size": 1}).run(CELLS_WANTED, measure)
    assert measured == CELLS_WANTED
    assert [Cell(row["variant"], row["seed"]) for row in rows] == CELLS_WANTED
    assert [row["loss"] for row in rows] == [0.5, 1.5, 0.5]
    assert set(read_results(tmp_path / "run" / RESULTS).cells) == set(CELLS_WANTED)


def test_no_topic_document_is_on_both_sides(tmp_path):
    setup = PretrainingSetup(tmp_path / "data", QUICK, None)
    builds = []
    for name in ("unpacked", "held_out"):
        with setup.store(name) as store:
            builds.append(store.manifest.made_with)
    assert builds[0]["sources"] == builds[1]["sources"]
    assert [build["side"] for build in builds] == ["training", "held-out"]
    with refused("amount", "151"):
        PretrainingSetup(tmp_path / "data", QUICK._replace(amount=151), None)
