"""A trained BERT goes on in packs: one start for all runs, runs that survive a kill, packs scored by sequence."""

import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest

from evidence import __main__ as command
from evidence import packed_runs, trained
from evidence.packed_runs import PretrainingSetup
from evidence.runner import Cell, Runner, finished_cells
from evidence.trained import AT_ONCE, START, START_SEED, Trained, TrainedSize
from ipu_packed_bert.model.hugging_face import SAFETENSORS, read_folder

TINY = TrainedSize(
    None, packed_runs.SIZES["quick"]._replace(amount=100, sequences=60, points=2, resumable=True), 4, 4.0e-3, 16
)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """An experiment that has its start."""
    out = tmp_path_factory.mktemp("trained") / "trained_quick"
    options = SimpleNamespace(out=out, size="quick", data_dir=None, progress=None, checkpoint=None)
    runner = Runner(out, {"size": "tiny"})
    experiment = Trained(TINY, options, runner)
    runner.run([Cell(START, START_SEED)], experiment.start)
    return experiment, runner, options


def without_time(rows):
    return [{name: value for name, value in row.items() if "seconds" not in name} for row in rows]


def test_all_runs_begin_with_the_one_start(begun):
    experiment, runner, options = begun
    first = finished_cells(runner.folder)[Cell(START, START_SEED)][-1]
    again = Trained(TINY, options, Runner(runner.folder, {"size": "tiny"}))
    assert first["step"] == TINY.start and first["updates"] == TINY.start
    kept = read_folder(experiment.folder)
    for name, weights in again.weights().items():
        assert np.array_equal(weights, kept.weights[name])
    # What it scores unpacked is what the start scored at its end.
    with again.setup.store("held_out") as store:
        engine, task = engine_of(again.setup, kept.weights)
        found = task.scored(engine, packed_runs.trimmed(store))
    assert {f"all_{name}": value for name, value in found.items()} == {
        name: value for name, value in first.items() if name.startswith("all_")
    }
    path = experiment.folder / SAFETENSORS
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="begin anew"):
        Trained(TINY, options, runner).weights()
    path.write_bytes(whole)


def engine_of(setup, weights):
    config = setup.config("unpacked", seed=1)
    with setup.store("unpacked") as store:
        task = packed_runs.ScoredPretraining(config, store.schema)
    engine = packed_runs.HostEngine(config, task, packing_factor=1.0)
    packed_runs.load_into(engine.model, weights)
    return engine, task


def test_packs_score_each_sequence_as_it_scores_alone(begun):
    """At once: the same with mask and positions, another loss without them; all have the same sequences."""
    experiment, runner, _ = begun
    alone = finished_cells(runner.folder)[Cell(START, START_SEED)][-1]
    rows = {row["change"]: row for row in experiment.at_once(Cell(AT_ONCE, START_SEED))}
    assert set(rows) == {"packed", "no_mask", "no_positions", "separators"}
    assert rows["packed"]["loss"] == pytest.approx(alone["all_loss"], abs=1e-5)
    for name in ("mlm_centinats", "nsp_millinats"):
        assert np.abs(np.subtract(rows["packed"][name], alone[name])).max() <= 1
        assert len(rows["no_mask"][name]) == len(alone[name])
    for name in ("no_mask", "no_positions", "separators"):
        assert rows[name]["loss"] != rows["packed"]["loss"]


def test_a_killed_run_ends_as_if_it_had_not_been(begun, monkeypatch):
    """It goes on from its own checkpoint, not from the start again."""
    experiment, runner, _ = begun
    cell, other = Cell("no_mask", 1), Cell("no_mask", 2)
    whole = experiment.part(cell)
    change, updates = trained.changed, []

    def kill(batch, variant, micro_batch):
        updates.append(batch)
        if len(updates) == whole[-1]["updates"] // 2 + 1:  # the first call is no update: before the last one
            os.kill(os.getpid(), signal.SIGTERM)
        return change(batch, variant, micro_batch)

    monkeypatch.setattr(runner, "unfinished", lambda _: runner.folder / "killed")
    monkeypatch.setattr(trained, "changed", kill)
    with pytest.raises(KeyboardInterrupt):
        experiment.part(cell)
    monkeypatch.setattr(trained, "changed", change)
    monkeypatch.setattr(Trained, "weights", lambda _: None)  # a run from nothing would end elsewhere
    assert without_time(experiment.part(cell)) == without_time(whole)
    monkeypatch.setattr(runner, "unfinished", lambda _: runner.folder / "other")
    assert experiment.part(other)[-1]["loss"] != whole[-1]["loss"]


def test_a_checkpoint_brings_its_vocabulary_and_its_weights(begun, tmp_path):
    """The start of one experiment is the checkpoint of the next."""
    experiment, _, _ = begun
    setup = PretrainingSetup(
        tmp_path, TINY.runs._replace(vocabulary_size=100, hidden_size=8), None, checkpoint=experiment.folder
    )
    kept = read_folder(experiment.folder)
    with setup.store("packed") as store:
        assert store.manifest.vocabulary_sha256 == kept.vocabulary.sha256
        assert store.manifest.vocabulary_size == kept.model.vocabulary_size > 100
    assert setup.config("packed", seed=1).model.hidden_size == TINY.runs.hidden_size
    with pytest.raises(ValueError, match="made with"):
        PretrainingSetup(tmp_path, setup.size, None)


def test_what_its_cells_say(begun, monkeypatch, capsys):
    """Nothing: too small to be misled. Exit status 1; what is finished is not run again."""
    _, runner, _ = begun
    monkeypatch.setitem(trained.SIZES, "quick", TINY)
    monkeypatch.setattr(trained, "IN_TABLE", trained.TESTED)
    out = runner.folder.parent / "again"
    arguments = ["trained", "--size", "quick", "--seeds", "2", "--no-plot", "--out", str(out)]
    assert command.main(arguments) == 1
    text = capsys.readouterr().out
    assert "shows nothing" in text and "At once" in text and "building" not in text
    assert set(finished_cells(out)) == {
        Cell(START, START_SEED),
        Cell(AT_ONCE, START_SEED),
        *(Cell(name, 101) for name in ("packed", "no_mask")),
        *(Cell(name, seed) for seed in (1, 2) for name in trained.TESTED),
    }
    found = trained.shown(out)
    assert found.columns("packed", "step").shape == (2, 1 + TINY.runs.points)
    assert found.columns("packed", "loss")[0, 0] == found.columns("no_mask", "loss")[1, 0]
    with pytest.raises(ValueError, match="--data-dir"):
        command.main(["trained", "--out", str(out)])
