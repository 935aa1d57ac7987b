"""Experiments: cells are measured once, ablations change what they say, the equivalence test knows the answer."""

import importlib
import json

import numpy as np
import pytest

from ipu_packed_bert.experiments import __main__ as command
from ipu_packed_bert.experiments.ablation import separators_only, without_mask, without_position_reset
from ipu_packed_bert.experiments.learning_curves import equivalence, lag
from ipu_packed_bert.experiments.runner import CELLS, Cell, Runner

CELLS_WANTED = [Cell("packed", 0), Cell("packed", 1), Cell("unpacked", 0)]


def test_a_stopped_experiment_goes_on_with_the_missing_cells(tmp_path):
    measured = []

    def measure(cell, stop_at=None):
        if cell == stop_at:
            raise KeyboardInterrupt
        measured.append(cell)
        return [{"loss": cell.seed + 0.5}]

    with Runner(tmp_path / "run", {"size": 1}) as runner, pytest.raises(KeyboardInterrupt):
        runner.run(CELLS_WANTED, lambda cell: measure(cell, CELLS_WANTED[2]))
    with open(tmp_path / "run" / CELLS, "a") as file:
        file.write('{"variant": "unpa')  # what a kill -9 in the middle of a line leaves
    with Runner(tmp_path / "run", {"size": 1}) as runner:
        rows = runner.run(CELLS_WANTED, measure)
    assert measured == CELLS_WANTED
    assert [(row["variant"], row["seed"], row["loss"]) for row in rows] == [
        ("packed", 0, 0.5),
        ("packed", 1, 1.5),
        ("unpacked", 0, 0.5),
    ]
    assert all(json.loads(line) for line in (tmp_path / "run" / CELLS).read_text().splitlines())
    with pytest.raises(ValueError, match="measured with size"):
        Runner(tmp_path / "run", {"size": 2})


def test_every_name_is_an_experiment(capsys):
    assert command.EXPERIMENTS
    for name in command.EXPERIMENTS:
        module = importlib.import_module("ipu_packed_bert.experiments." + name)
        assert module.SUMMARY and callable(module.run) and callable(module.settings)
    assert command.main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in command.EXPERIMENTS)
    with pytest.raises(ValueError, match="no such experiment"):
        command.main(["nonsense"])


def test_ablations_change_the_mask_and_the_positions_and_nothing_else():
    batch = {
        "input_mask": np.array([[1, 1, 2, 2, 2, 0]], np.int32),
        "positions": np.array([[0, 1, 0, 1, 2, 0]], np.int32),
        "input_ids": np.array([[2, 3, 2, 5, 3, 0]], np.int32),
    }
    assert without_mask(batch)["input_mask"].tolist() == [[1, 1, 1, 1, 1, 0]]
    assert without_position_reset(batch)["positions"].tolist() == [[0, 1, 2, 3, 4, 0]]
    both = separators_only(batch)
    assert both["input_mask"].tolist() == [[1, 1, 1, 1, 1, 0]] and both["positions"].tolist() == [[0, 1, 2, 3, 4, 0]]
    assert both["input_ids"] is batch["input_ids"] and batch["positions"].tolist() == [[0, 1, 0, 1, 2, 0]]
    assert {name: array.dtype for name, array in both.items()} == {name: array.dtype for name, array in batch.items()}


def test_two_one_sided_tests_on_a_worked_example():
    """Spread 0.01 in each of two groups of three: standard error 0.01 sqrt(2/3) = 0.008165, 4 degrees of freedom."""
    first, second = np.array([0.99, 1.00, 1.01]), np.array([1.00, 1.01, 1.02])
    found = equivalence(first, second, margin=0.05)
    assert found.difference == pytest.approx(-0.01)
    assert found.interval == pytest.approx(2.1318468 * 0.00816497, rel=1e-5)  # t quantile 0.95, 4 degrees
    assert found.equivalent and found.power > 0.99
    assert not equivalence(first, second + 0.1, margin=0.05).equivalent  # really apart
    assert not equivalence(first * 10, second * 10, margin=0.05).equivalent  # too much spread to tell
    with pytest.raises(ValueError, match="two seeds"):
        equivalence(first[:1], second)


def test_the_lag_of_a_run_that_stands_where_the_reference_was_halfway():
    sequences, losses = np.array([0.0, 50.0, 100.0]), np.array([8.0, 6.0, 4.0])
    assert lag(sequences, losses, 6.0) == pytest.approx(0.5)
    assert lag(sequences, losses, 3.0) == 0.0


def test_exactness_at_its_smallest(tmp_path):
    """Packed and unpacked float64 weights agree after the updates; with means over micro-batches they part."""
    assert command.main(["exactness", "--quick", "--seeds", "1", "--no-plot", "--out", str(tmp_path / "out")]) == 0
    lines = (tmp_path / "out" / CELLS).read_text().splitlines()
    apart = {cell["variant"]: max(row["distance"] for row in cell["rows"]) for cell in map(json.loads, lines)}
    assert apart["update_float64"] < 1e-12 and apart["update_float32"] < 1e-5  # rounding, through five updates
    assert apart["micro_batch_float64"] > 1e-3  # another objective
