"""Whole runs whose updates have the same sequences, packed and alone; orders of the same sequences."""

from types import SimpleNamespace

import numpy as np
import pytest

from evidence import __main__ as command
from evidence import order
from evidence.arms import ARMS, ORDERS, changed
from evidence.packed_runs import QUICK, PretrainingSetup
from evidence.runner import RESULTS, Cell, Runner, read_results
from evidence.updates import START, START_SEED, Runs, Start, Updates
from ipu_packed_bert.data.global_batches import StoredPacks, in_order
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.model.hugging_face import SAFETENSORS, load_into, read_folder
from ipu_packed_bert.tasks.pretraining import Pretraining
from pack_data.store.sequences import Sequences
from tests.refusals import refused

pytestmark = pytest.mark.slow

SIZE = QUICK._replace(points=5, sequences=600)


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
        return changed(
            batch if change is None else change(batch),
            arm,
            SIZE.micro_batch,
        )

    regroup = order.regrouped(name, seed) if name in ORDERS else None
    return setup.run(config, own, alone=arm.alone, regroup=regroup, double=arm.double, keep=keep)


def test_packed_and_unpacked_runs_are_the_same_but_for_rounding(setup):
    """Also over the end of an epoch, whose last update is not full: 600 sequences of a data set that has fewer."""
    with setup.store("packed") as store:
        assert store.manifest.sequences < SIZE.sequences
    arms = "packed unpacked reordered no_mask means_float64 packed_float64 unpacked_float64".split()
    rows = {name: run(setup, name) for name in arms}
    losses = {name: np.array([row["loss"] for row in measured]) for name, measured in rows.items()}

    def apart(first, second):
        return np.abs(losses[first] - losses[second]).max()

    sequences = {tuple(row["sequences"] for row in measured) for measured in rows.values()}
    assert len(sequences) == 1
    assert apart("packed_float64", "unpacked_float64") < 1e-12
    assert apart("packed", "unpacked") < 1e-4
    assert apart("reordered", "packed") < 1e-4
    assert apart("means_float64", "unpacked_float64") > 1e-4  # another objective
    assert apart("no_mask", "unpacked") > 10 * apart("packed", "unpacked")
    assert losses["packed"][-1] < losses["packed"][0]


def test_the_order_of_packs_is_the_unpacked_run(setup):
    assert without_time(run(setup, "packs")) == without_time(run(setup, "unpacked"))


def test_each_held_out_sequence_is_scored_as_an_evaluation_scores_it(setup, tmp_path):
    """Without padding or with it."""
    rows = run(setup, "packed", keep=tmp_path / "weights")
    config = setup.config("packed", seed=1)
    with setup.store("held_out") as store:
        task = Pretraining(config.changed("data", max_sequences_per_pack=1), store.schema)
        engine = HostEngine(config, task, packing_factor=1.0)
        load_into(engine.model, read_folder(tmp_path / "weights").weights)
        layout = task.layout(config.changed("optimizer", packing_adjustment="none"), 1.0)
        actual = task.evaluate(engine, in_order(StoredPacks(store), layout))
    for name in ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"):
        assert rows[-1][name] == pytest.approx(actual.metrics[name], abs=2e-6)
    assert setup.facts()["sequences"]["held_out"] == actual.counts["sequences"]


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_has_every_sequence_of_the_packs_once(name):
    by_packs = np.split(
        np.arange(50),
        [7, 19, 24, 37],
    )
    lengths = np.random.default_rng(0).integers(5, 60, 50)
    tokens = np.random.default_rng(1).integers(
        2,
        12,
        int(lengths.sum()),
    )
    sequences = Sequences.of_tokens(lengths, {"input_ids": tokens})
    numbers = {}
    for seed in (3, 4):
        groups = order.regrouped(name, seed)(by_packs, sequences)
        numbers[seed] = np.concatenate(groups)
        assert len(groups) == 5
        assert sorted(numbers[seed]) == list(range(50))
    drawn_again = np.concatenate(order.regrouped(name, 3)(by_packs, sequences))
    assert np.array_equal(drawn_again, numbers[3])
    assert np.array_equal(numbers[3], numbers[4]) != name.startswith("random")
    if name == "sorted":
        assert (np.diff(lengths[numbers[3]]) >= 0).all()


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """An experiment that has its start."""
    out = tmp_path_factory.mktemp("updates") / "updates_quick"
    size = Updates(
        QUICK._replace(sequences=60),
        ((("packed", "unpacked"), (1,)),),
        Start(None, 4, 4.0e-3, 16),
    )
    options = SimpleNamespace(out=out, size="quick", data_dir=None)
    runner = Runner(out, {"size": "tiny"})
    experiment = Runs(size, options, runner)
    runner.run([Cell(START, START_SEED)], experiment.begin)
    return experiment, runner, size, options


def test_all_runs_begin_with_the_one_start(begun):
    experiment, runner, size, options = begun
    first = runner.results.cells[Cell(START, START_SEED)][-1]
    assert first["step"] == first["updates"] == 4
    again = Runs(size, options, Runner(runner.folder, {"size": "tiny"}))
    kept = read_folder(experiment.folder).weights
    for name, weights in again.weights().items():
        assert np.array_equal(weights, kept[name])
    packed = again.part(Cell("packed", 1))[-1]
    unpacked = again.part(Cell("unpacked", 1))[-1]
    assert packed["all_loss"] == pytest.approx(unpacked["all_loss"], abs=1e-4)
    assert packed["loss"] != packed["all_loss"]  # some sequences along the run, all at its end
    path = experiment.folder / SAFETENSORS
    whole = path.read_bytes()
    damaged = whole[:-1] + bytes([whole[-1] ^ 1])
    path.write_bytes(damaged)
    with refused("start", "weights"):
        Runs(size, options, runner).weights()
    path.write_bytes(whole)


def test_a_checkpoint_brings_its_vocabulary_and_its_weights(begun, tmp_path):
    """The start of one experiment is the checkpoint of the next."""
    experiment = begun[0]
    separate = QUICK._replace(vocabulary_size=100, hidden_size=8)
    created = PretrainingSetup(tmp_path, separate, None, checkpoint=experiment.folder)
    kept = read_folder(experiment.folder)
    with created.store("packed") as store:
        assert store.manifest.vocabulary_sha256 == kept.vocabulary.sha256
        assert store.manifest.vocabulary_size == kept.model.vocabulary_size > 100
    assert created.config("packed", seed=1).model.hidden_size == QUICK.hidden_size
    with refused("data made"):
        PretrainingSetup(tmp_path, created.size, None)


def test_the_smallest_runs_are_shown(tmp_path, capsys):
    for name in ("updates", "order"):
        out = tmp_path / f"{name}_quick"
        assert command.main([name, "--size", "quick", "--no-plot", "--out", str(out)]) == 0
        assert "unpacked" in capsys.readouterr().out
        assert read_results(out / RESULTS).settings["commit"]
    cells = read_results(out / RESULTS).cells
    assert {cell.variant for cell in cells} == set(ORDERS)
    out = tmp_path / "updates_quick"
    arguments = ["updates", "--size", "quick", "--arms", "packed", "--out", str(out)]
    assert command.main(arguments) == 0  # measures nothing
    assert {path.name for path in out.glob("*.png")} == {"apart.png", "curves.png"}
