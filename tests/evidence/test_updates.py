"""Whole runs whose updates have the same sequences, packed and alone; orders of the same sequences."""

import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest

from evidence import __main__ as command
from evidence import order, updates
from evidence.arms import ARMS, ORDERS, Arm, changed
from evidence.packed_runs import QUICK, PretrainingSetup
from evidence.runner import RESULTS, Cell, Runner, read_results
from evidence.updates import START, START_SEED, Runs, Start, Updates
from ipu_packed_bert.data.global_batches import StoredPacks, in_order
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.model.hugging_face import SAFETENSORS, load_into, read_folder
from ipu_packed_bert.tasks.pretraining import Pretraining
from pack_data.store.sequences import Sequences

SIZE = QUICK._replace(points=5, sequences=600)
from tests.refusals import refused


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    return PretrainingSetup(tmp_path_factory.mktemp("data") / "data", SIZE, None)


def without_time(rows):
    return [{name: value for name, value in row.items() if "seconds" not in name} for row in rows]


def run(setup, name, *, seed=1, change=None, keep=None):
    """One arm of `updates`, or one order of `order`."""
    arm = ARMS.get(name, ARMS["unpacked"])
    config = setup.config("packed", seed=seed, attention=arm.attention)

    def own(batch):
        return changed(batch if change is None else change(batch), arm, SIZE.micro_batch)

    regroup = order.regrouped(name, seed) if name in ORDERS else None
    return setup.run(config, own, alone=arm.alone, regroup=regroup, double=arm.double, keep=keep)


def test_packed_and_unpacked_runs_are_the_same_but_for_rounding(setup):
    """Also over the end of an epoch, whose last update is not full: 600 sequences of a data set that has fewer."""
    with setup.store("packed") as store:
        assert store.manifest.sequences < SIZE.sequences
    rows = {name: run(setup, name) for name in ("packed", "unpacked", "reordered", "no_mask", "means_float64")}
    rows.update({name: run(setup, name) for name in ("packed_float64", "unpacked_float64")})

    def apart(first, second):
        return max(abs(one["loss"] - other["loss"]) for one, other in zip(rows[first], rows[second]))

    for found in rows.values():
        assert [row["sequences"] for row in found] == [row["sequences"] for row in rows["packed"]]
    assert apart("packed_float64", "unpacked_float64") < 1e-12
    assert apart("packed", "unpacked") < 1e-4 and apart("reordered", "packed") < 1e-4
    assert apart("means_float64", "unpacked_float64") > 1e-4  # another objective
    assert apart("no_mask", "unpacked") > 10 * apart("packed", "unpacked")
    assert rows["packed"][-1]["loss"] < rows["packed"][0]["loss"]


def test_the_order_of_packs_is_the_unpacked_run(setup):
    assert without_time(run(setup, "packs")) == without_time(run(setup, "unpacked"))


def test_a_stopped_run_ends_the_experiment(setup):
    seen = []

    def kill(batch):
        seen.append(batch)
        if len(seen) == 3:  # the first one compiles
            os.kill(os.getpid(), signal.SIGTERM)
        return batch

    with pytest.raises(KeyboardInterrupt):
        run(setup, "packed", change=kill)


def test_each_held_out_sequence_is_scored_as_an_evaluation_scores_it(setup, tmp_path):
    """Without padding or with it."""
    rows = run(setup, "packed", keep=tmp_path / "weights")
    config = setup.config("packed", seed=1)
    with setup.store("held_out") as store:
        task = Pretraining(config.changed("data", max_sequences_per_pack=1), store.schema)
        engine = HostEngine(config, task, packing_factor=1.0)
        load_into(engine.model, read_folder(tmp_path / "weights").weights)
        layout = task.layout(config.changed("optimizer", packing_adjustment="none"), 1.0)
        found = task.evaluate(engine, in_order(StoredPacks(store), layout))
    for name in ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"):
        assert rows[-1][name] == pytest.approx(found.metrics[name], abs=2e-6)
    assert setup.facts()["sequences"]["held_out"] == found.counts["sequences"]


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_has_every_sequence_of_the_packs_once(name):
    by_packs = np.split(np.arange(50), [7, 19, 24, 37])
    lengths = np.random.default_rng(0).integers(5, 60, 50)
    tokens = np.random.default_rng(1).integers(2, 12, int(lengths.sum()))
    sequences = Sequences.of_tokens(lengths, {"input_ids": tokens})
    found = order.regrouped(name, 3)(by_packs, sequences)
    assert len(found) == 5 and sorted(np.concatenate(found)) == list(range(50))
    if name != "packs":
        assert {len(each) for each in found} == {10}
    if name == "sorted":
        assert (np.diff(lengths[np.concatenate(found)]) >= 0).all()
    if name == "by_word":
        words = [np.bincount(each[each >= 5]).argmax() for each in np.split(tokens, np.cumsum(lengths)[:-1])]
        assert (np.diff(np.array(words)[np.concatenate(found)]) >= 0).all()
    again, other = order.regrouped(name, 3)(by_packs, sequences), order.regrouped(name, 4)(by_packs, sequences)
    assert all(np.array_equal(one, two) for one, two in zip(found, again))
    if name.startswith("random"):
        assert any(not np.array_equal(one, two) for one, two in zip(found, other))
        twin = {"random": "random_again", "random_again": "random"}[name]
        twins = order.regrouped(twin, 3)(by_packs, sequences)
        assert any(not np.array_equal(one, two) for one, two in zip(found, twins))


def test_the_control_is_run_on_some_seeds_alone_and_the_pilot_has_what_is_compared():
    cells = order.cells(order.SIZES["topics"], 5)
    for control in order.CONTROLS:
        assert {cell.seed for cell in cells if cell.variant == control} == {1, 2, 3}
    for arm in ("packs", "random"):
        assert {cell.seed for cell in cells if cell.variant == arm} == {101, 102, 103, 1, 2, 3, 4, 5}
    assert {cell.seed for cell in cells if cell.variant == "random_again"} == {1, 2, 3, 4, 5}


def test_arms_change_the_mask_and_the_positions_and_nothing_else():
    batch = {
        "input_mask": np.array([[1, 1, 2, 2, 2, 0]], np.int32),
        "positions": np.array([[0, 1, 0, 1, 2, 0]], np.int32),
        "input_ids": np.array([[2, 3, 2, 5, 3, 0]], np.int32),
    }
    no_mask, no_positions, both = (changed(batch, ARMS[name], 1) for name in ("no_mask", "no_positions", "separators"))
    assert no_mask["input_mask"].tolist() == [[1, 1, 1, 1, 1, 0]] and no_mask["positions"] is batch["positions"]
    assert no_positions["positions"].tolist() == [[0, 1, 2, 3, 4, 0]]
    assert no_positions["input_mask"] is batch["input_mask"]
    assert both["input_mask"].tolist() == [[1, 1, 1, 1, 1, 0]] and both["positions"].tolist() == [[0, 1, 2, 3, 4, 0]]
    assert both["input_ids"] is batch["input_ids"] and batch["positions"].tolist() == [[0, 1, 0, 1, 2, 0]]
    assert {name: array.dtype for name, array in both.items()} == {name: array.dtype for name, array in batch.items()}
    assert changed(batch, Arm("as it is"), 1) is batch
    two = {name: np.concatenate([array, array + 1]) for name, array in batch.items()}
    reversed_ = changed(two, ARMS["reordered"], 1)
    assert all((reversed_[name] == two[name][::-1]).all() for name in two)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """An experiment that has its start."""
    out = tmp_path_factory.mktemp("updates") / "updates_quick"
    size = Updates(QUICK._replace(sequences=60), ((("packed", "unpacked"), (1,)),), Start(None, 4, 4.0e-3, 16))
    options = SimpleNamespace(out=out, size="quick", data_dir=None)
    runner = Runner(out, {"size": "tiny"})
    experiment = Runs(size, options, runner)
    runner.run([Cell(START, START_SEED)], experiment.begin)
    return experiment, runner, size, options


def test_all_runs_begin_with_the_one_start(begun):
    experiment, runner, size, options = begun
    first = runner.results.cells[Cell(START, START_SEED)][-1]
    again = Runs(size, options, Runner(runner.folder, {"size": "tiny"}))
    assert first["step"] == 4 and first["updates"] == 4
    kept = read_folder(experiment.folder)
    assert all(np.array_equal(weights, kept.weights[name]) for name, weights in again.weights().items())
    packed, unpacked = (again.part(Cell(name, 1)) for name in ("packed", "unpacked"))
    assert packed[-1]["all_loss"] == pytest.approx(unpacked[-1]["all_loss"], abs=1e-4)
    assert packed[-1]["loss"] != packed[-1]["all_loss"]  # some sequences along the run, all at its end
    path = experiment.folder / SAFETENSORS
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with refused("start", "weights"):
        Runs(size, options, runner).weights()
    path.write_bytes(whole)


def test_a_checkpoint_brings_its_vocabulary_and_its_weights(begun, tmp_path):
    """The start of one experiment is the checkpoint of the next."""
    experiment = begun[0]
    own = QUICK._replace(vocabulary_size=100, hidden_size=8)
    made = PretrainingSetup(tmp_path, own, None, checkpoint=experiment.folder)
    kept = read_folder(experiment.folder)
    with made.store("packed") as store:
        assert store.manifest.vocabulary_sha256 == kept.vocabulary.sha256
        assert store.manifest.vocabulary_size == kept.model.vocabulary_size > 100
    assert made.config("packed", seed=1).model.hidden_size == QUICK.hidden_size
    with refused("data made"):
        PretrainingSetup(tmp_path, made.size, None)


def test_the_smallest_runs_are_shown(tmp_path, capsys):
    for name, folder in (("updates", "updates_quick"), ("order", "order_quick")):
        assert command.main([name, "--size", "quick", "--no-plot", "--out", str(tmp_path / folder)]) == 0
        text = capsys.readouterr().out
        settings = read_results(tmp_path / folder / RESULTS).settings
        assert "unpacked" in text and "222 sequences" not in text and settings["commit"]
    assert {cell.variant for cell in read_results(tmp_path / "order_quick" / RESULTS).cells} == set(ORDERS)
    again = ["updates", "--size", "quick", "--arms", "packed", "--out", str(tmp_path / "updates_quick")]
    assert command.main(again) == 0  # measures nothing
    assert {path.name for path in (tmp_path / "updates_quick").glob("*.png")} == {"apart.png", "curves.png"}
    with refused("--data-dir", "wikipedia/"):
        command.main(["updates", "--size", "trained", "--out", str(tmp_path / "no")])


def test_full_is_one_command():
    assert updates.cells(updates.SIZES["full"], None) == [Cell("packed", 1), Cell("unpacked", 1)]
    assert updates.SIZES["full"].size.precision == "bfloat16"
