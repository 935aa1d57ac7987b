"""Experiments: cells are measured once, ablations change what they say, a control that passes shows nothing."""

import importlib

import numpy as np
import pytest

from evidence import __main__ as command
from evidence.packed_runs import QUICK, PretrainingSetup
from evidence.runner import RESULTS, Cell, Results, Runner, read_results, write_results
from evidence.statistics import Interval
from evidence.writer import Table, bars, curve
from pack_data.cli.command import run_main
from pack_data.reading import files

CELLS_WANTED = [Cell("packed", 0), Cell("packed", 1), Cell("unpacked, all", 0)]
from tests.refusals import refusal_of, refused


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
    assert [(row["variant"], row["seed"], row["loss"]) for row in rows] == [
        ("packed", 0, 0.5),
        ("packed", 1, 1.5),
        ("unpacked, all", 0, 0.5),
    ]
    assert set(read_results(tmp_path / "run" / RESULTS).cells) == set(CELLS_WANTED)
    with refused("size 1", "now 2", "--out"):
        Runner(tmp_path / "run", {"size": 2})


def test_one_process_measures_in_a_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(files, "LOCK_PATIENCE", 0.0)
    arguments = ["order", "--size", "quick", "--out", str(tmp_path)]
    with files.locked(tmp_path / "lock", ""):
        refusal_of(command.main, arguments, capsys, str(tmp_path), "another process", "--out")


def test_a_damaged_file_of_results_is_refused(tmp_path):
    path = tmp_path / RESULTS
    write_results(path, Results({"size": 1}, {CELLS_WANTED[0]: [{"loss": 1.5}]}, {"machine": "here"}))
    assert read_results(path) == ({"size": 1}, {CELLS_WANTED[0]: [{"loss": 1.5}]}, {"machine": "here"})
    lines = path.read_text().splitlines(keepends=True)
    for damaged in ("", lines[0], "".join(lines[:2]), "".join(lines[1:])):
        path.write_text(damaged)
        with refused(str(path), "first line", "settings"):
            read_results(path)


def test_no_topic_document_is_on_both_sides(tmp_path, capsys):
    setup = PretrainingSetup(tmp_path / "data", QUICK, None)
    with setup.store("unpacked") as training, setup.store("held_out") as held_out:
        made = [store.manifest.made_with for store in (training, held_out)]
    assert made[0]["sources"] == made[1]["sources"] and [each["side"] for each in made] == ["training", "held-out"]
    with refused("amount", "151"):
        PretrainingSetup(tmp_path / "data", QUICK._replace(amount=151), None)


def test_every_name_is_an_experiment(capsys):
    assert command.EXPERIMENTS
    for name in command.EXPERIMENTS:
        module = importlib.import_module("evidence." + name)
        assert module.SUMMARY and callable(module.run) and callable(module.settings)
        assert {"quick", getattr(module, "DEFAULT", "default")} <= set(module.SIZES)
    assert command.main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in command.EXPERIMENTS)
    assert run_main(command.main, ["nonsense"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and all(name in message for name in ("nonsense", *command.EXPERIMENTS))


@pytest.mark.parametrize("name", ["updates", "order", "fine_tuning"])
def test_an_experiment_is_made_by_one_process(name, tmp_path, monkeypatch, capsys):
    torchrun = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    monkeypatch.chdir(tmp_path)
    for variable, value in torchrun.items():
        monkeypatch.setenv(variable, value)
    assert run_main(command.main, [name]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: WORLD_SIZE is 2, but each process of torchrun") and text.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_declared_values_are_drawn_and_written_as_they_are():
    table = Table([("n", str), ("half", lambda n: None if n % 2 else str(n // 2))], [1, 4], [["last"]])
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.markdown().splitlines()]
    assert [cells[0], *cells[2:]] == [["n", "half"], ["1", ""], ["4", "2"], ["last", ""]]
    line = curve("seeds", np.array([[1, 2], [1, 2]]), np.array([[3.0, 5.0], [5.0, 4.0]]))
    assert line[1:3] == ((1.0, 2.0), (4.0, 4.5)) and (line.lower, line.upper) == ((3.0, 4.0), (5.0, 5.0))
    drawn = bars("", "s", {"a": {"x": Interval(1.0, 0.5, 2.0, 3)}, "b": {"y": None}})
    assert drawn.categories == ("x", "y") and [each.values for each in drawn.series] == [(1.0, None), (None, None)]
    assert (drawn.series[0].lower, drawn.series[0].upper) == ((0.5, None), (2.0, None))
