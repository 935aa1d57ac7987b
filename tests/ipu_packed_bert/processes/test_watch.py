"""A run that watches itself: the gradient's norm and its bound, updates that are not finite, checkpoints known good."""

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from ipu_packed_bert.commands import pretrain
from ipu_packed_bert.engine.base import StepResult
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.model.optimizer import build_optimizer, gradient_norm
from ipu_packed_bert.processes.ranks import ONE
from ipu_packed_bert.run_files.checkpoints import checkpoints, load_checkpoint
from ipu_packed_bert.run_files.folder import CHECKPOINTS, LOG, read_log
from ipu_packed_bert.settings.config import ConfigError
from ipu_packed_bert.settings.loading import config_from_tree
from ipu_packed_bert.settings.rules import check_on_ipus
from ipu_packed_bert.tasks.pretraining import Pretraining
from ipu_packed_bert.training.log import RunLog
from ipu_packed_bert.training.loop import train
from pack_data.cli.command import NotFinite, run_main
from pack_data.store.data_set import PackStore
from tests.packed_examples import fill_up, lay_out, random_packs, random_sequences, with_scales
from tests.pretraining import global_batches, host_engine
from tests.refusals import refused
from tests.tiny_runs import SLOTS, held_out_of, logged, tiny_settings
from tests.tolerances import relative_error


@pytest.fixture(scope="module")
def store(tiny):
    with PackStore.open(Path(tiny).parent / "data") as store:
        yield store


def configured(*overrides):
    return config_from_tree(tiny_settings(), "tiny.yml", ["model.hidden_dropout=0", *overrides])


def batch_of(depth, *, micro_batch=2, seed=0, dtype=np.float64):
    """A global batch of the same eight sequences for every depth."""
    rng = np.random.default_rng(seed)
    lengths = [int(length) for length in rng.integers(2, 20, 8)]
    examples = random_sequences(rng, lengths=lengths, vocabulary=128)
    packs = fill_up(random_packs(np.random.default_rng(seed), lengths, slots=SLOTS, depth=depth), micro_batch)
    batch = lay_out(packs, examples, slots=SLOTS, depth=depth, predictions=4 + depth)
    return with_scales(batch, micro_batches=len(packs) // micro_batch, normalisation="token", dtype=dtype)


def in_float64(config):
    engine = host_engine(config, device="cpu")
    engine.model.double()
    engine.optimizer = build_optimizer(engine.model, config.optimizer, betas=config.betas(1.0))
    return engine


def bits(state):
    """Return copies of the weights and moments of a state, by kind and name."""
    copies = {}
    for kind, tensors in {"model": state["model"], **state["optimizer"]}.items():
        for name, tensor in tensors.items() if kind != "step" else ():
            copies[kind, name] = tensor.clone()
    return copies


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", ["lamb", "adamw"])
def test_a_clipped_packed_update_equals_the_unpacked_one(name):
    """In float64: the norm is that of the whole update, so packing changes neither it nor what is clipped."""
    config = configured("optimizer.max_gradient_norm=0.01", f"optimizer.name={name}", "engine.attention=eager")
    results = []
    ends = []
    for depth in (1, 3):
        engine = in_float64(config)
        results.append([engine.step(batch_of(depth, seed=seed), 1e-3) for seed in range(2)])
        ends.append(bits(engine.state()))
    for packed, unpacked in zip(*results):
        assert packed.gradient_norm == pytest.approx(unpacked.gradient_norm, rel=1e-12)
        assert packed.gradient_norm > 0.02
        assert packed.loss == pytest.approx(unpacked.loss, rel=1e-12)
    clipped = in_float64(config)
    clipped.step(batch_of(1), 1e-3)
    # The first moment is a tenth of the gradient, which was clipped to its bound.
    moments = clipped.state()["optimizer"]["exp_avg"].values()
    assert float(gradient_norm(list(moments))) == pytest.approx(1e-3, rel=1e-3)
    # Without the key biases: their gradient is zero but for rounding, which both optimisers blow up.
    names = [name for name in ends[0] if not name[1].endswith("key.bias")]
    assert relative_error(*([end[name] for name in names] for end in ends)) <= 1e-12


def poison(engine, monkeypatch, value, what="gradient", at=(1,)):
    """The engine's updates of these numbers find ``value`` in a gradient, or in their loss."""
    original = engine._accumulate
    calls = []

    def accumulate(batch):
        totals = original(batch)
        calls.append(True)
        if len(calls) in at:
            if what == "loss":
                totals[0] = value
            else:
                list(engine.model.parameters())[-1].grad.view(-1)[0] = value
        return totals

    monkeypatch.setattr(engine, "_accumulate", accumulate)


@pytest.mark.parametrize("what, value", [("gradient", float("nan")), ("gradient", 1e30), ("loss", float("inf"))])
def test_an_update_that_is_not_finite_changes_nothing_but_the_random_stream(monkeypatch, what, value):
    """1e30 is finite, but its square is not: the norm overflows."""
    config = configured("model.hidden_dropout=0.2")
    engine = host_engine(config, device="cpu")
    undisturbed = host_engine(config, device="cpu")
    batches = [batch_of(3, seed=seed, dtype=np.float32) for seed in range(3)]
    for item in (engine, undisturbed):
        item.step(batches[0], 1e-2)
    before = engine.state()
    with monkeypatch.context() as patch:
        poison(engine, patch, value, what)
        result = engine.step(batches[1], 1e-2)
    assert not result.finite
    after = engine.state()
    assert same(bits(before), bits(after))
    assert before["optimizer"]["step"] == after["optimizer"]["step"] == 1
    # The stream goes on, as if the update had been made; and no gradient is left for the next one.
    undisturbed.accumulate(batches[1])
    undisturbed.optimizer.zero_grad(set_to_none=True)
    actual = engine.step(batches[2], 1e-2)
    expected = undisturbed.step(batches[2], 1e-2)
    assert actual.metrics == expected.metrics
    assert actual.gradient_norm == expected.gradient_norm
    assert same(bits(engine.state()), bits(undisturbed.state()))


class Told:
    """An engine whose updates have these losses; its state is the number of updates applied."""

    task = Pretraining(config_from_tree(tiny_settings(), "tiny.yml"))
    processes = ONE

    def __init__(self, losses, norm=1.0):
        self.losses = list(losses)
        self.norm = norm
        self.applied = 0

    def step(self, batch, rate):
        loss = self.losses.pop(0)
        metrics = dict.fromkeys(("loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy"), loss)
        result = StepResult(metrics, 0.1, gradient_norm=self.norm)
        self.applied += result.finite
        return result

    def state(self):
        return {"model": {}, "optimizer": {"step": self.applied, "exp_avg": {}, "exp_avg_sq": {}}}


NAN = float("nan")


def run(store, folder, losses, *overrides, first_step=0):
    config = configured(f"run.steps={first_step + len(losses)}", "run.evaluate_every=0", *overrides)
    batches = global_batches(store, config, packing_factor=2.0, evaluation=held_out_of(store))
    stream = io.StringIO()
    log = RunLog(
        folder,
        steps=config.run.steps,
        first_step=first_step,
        max_sequence_length=SLOTS,
        stream=stream,
    )
    try:
        train(
            config,
            Told(losses),
            batches,
            log,
            folder / CHECKPOINTS,
            steps=config.run.steps,
            first_step=first_step,
        )
    finally:
        log.close()
        batches.close()
    return stream.getvalue()


def steps_saved(folder):
    return [load_checkpoint(path).step for path in checkpoints(folder / CHECKPOINTS)]


def test_an_update_that_is_not_finite_ends_the_run_before_any_checkpoint(store, tmp_path):
    with pytest.raises(NotFinite, match="update 3: the loss is nan; no checkpoint .*optimizer.learning_rate"):
        run(store, tmp_path, [3.0, 2.0, NAN, 1.0])
    assert logged(tmp_path, "loss") == [3.0, 2.0, None]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_checkpoint_known_to_be_good_is_never_evicted(store, tmp_path, keep):
    """Weights may be finite and useless: the update from them shows it. The error names the one to go on from."""
    options = ("run.checkpoint_every=2", f"run.keep_checkpoints={keep}")
    with pytest.raises(NotFinite, match=r"update 7: .*step_00000004; delete the newer ones, then --resume "):
        run(store, tmp_path, [6.0, 5.0, 4.0, 3.0, 2.0, 1.0, NAN], *options)
    assert steps_saved(tmp_path) == [4, 6]
    # Once an update from the newest one is finite, that is the good one, and the others go.
    run(store, tmp_path, [1.0], *options, first_step=6)
    assert steps_saved(tmp_path) == [6, 7]


def test_the_first_checkpoint_may_be_the_good_one(store, tmp_path):
    with pytest.raises(NotFinite, match=r"update 3: .*step_00000001; delete the newer ones, then --resume "):
        run(store, tmp_path, [3.0, 2.0, NAN], "run.checkpoint_every=1", "run.keep_checkpoints=1")


@pytest.mark.parametrize("losses, first_step", [([6.0, 5.0, 4.0, 3.0, 2.0, NAN], 0), ([NAN], 4)])
def test_the_newest_checkpoint_is_where_a_run_goes_on_if_it_is_good_or_none_is_known_to_be(
    store, tmp_path, losses, first_step
):
    options = ("run.checkpoint_every=2", "run.keep_checkpoints=1")
    if first_step:
        run(store, tmp_path, [4.0, 3.0, 2.0, 1.0], *options)
    with pytest.raises(NotFinite, match="step_00000004; --resume .* --allow-change optimizer.learning_rate"):
        run(store, tmp_path, losses, *options, first_step=first_step)
    assert steps_saved(tmp_path)[-1] == 4


@pytest.mark.parametrize("evaluate", [0, 4])
def test_a_held_out_loss_shows_that_a_checkpoint_is_good(store, tmp_path, evaluate, monkeypatch):
    """At the end of a run nothing else does."""
    monkeypatch.setattr(Told, "evaluate", lambda engine, batch: Told([1.0]).step(batch, 0.0), raising=False)
    options = ("run.checkpoint_every=2", "run.keep_checkpoints=1", f"run.evaluate_every={evaluate}")
    run(store, tmp_path, [4.0, 3.0, 2.0, 1.0], *options)
    assert steps_saved(tmp_path) == ([4] if evaluate else [2, 4])


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks the file's name up in /proc")
def test_a_kill_while_a_checkpoint_is_saved_leaves_the_log_of_all_its_updates(store, tmp_path, monkeypatch):
    """Data that was not synced to disk is lost, as when a machine fails."""
    synced = {}
    original = os.fsync

    def fsync(descriptor):
        original(descriptor)
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced[name] = Path(f"/proc/self/fd/{descriptor}").read_bytes() if name == LOG else None

    def killed(*_, **__):
        lines = synced[LOG].decode().splitlines()
        seen.append([json.loads(line)["step"] for line in lines])
        if len(seen) == 2:
            raise MemoryError("killed")

    seen = []
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr("ipu_packed_bert.training.loop.save_checkpoint", killed)
    with pytest.raises(MemoryError):
        run(store, tmp_path, [4.0, 3.0, 2.0, 1.0], "run.checkpoint_every=2")
    assert seen == [[1, 2], [1, 2, 3, 4]]


def test_what_ipus_do_not_have_is_refused():
    clipped = "optimizer.max_gradient_norm=1.0"
    undecided = configured("engine.kind=auto", clipped)  # until a device is chosen
    for call in (lambda: configured("engine.kind=ipu", clipped), lambda: check_on_ipus(undecided)):
        with refused("optimizer.max_gradient_norm", "1.0", "null", kind=ConfigError):
            call()
    check_on_ipus(configured("engine.kind=ipu", "optimizer.name=adamw", clipped))


def breaking(monkeypatch, at):
    """The updates of these numbers, of this process, have a gradient that is no number."""
    original = HostEngine._accumulate
    made = []

    def accumulate(engine, batch):
        totals = original(engine, batch)
        if len(batch["input_ids"]) > 2:  # compiling takes one micro-batch
            made.append(True)
            if len(made) in at:
                next(engine.model.parameters()).grad.view(-1)[0] = NAN
        return totals

    monkeypatch.setattr(HostEngine, "_accumulate", accumulate)


def losses_of(folder):
    return [(record["step"], record["loss"]) for record in read_log(folder / LOG)]


def test_a_broken_gradient_ends_a_run_with_status_3_and_it_resumes(tiny, tmp_path, monkeypatch, capsys):
    options = [
        "--config",
        tiny,
        "--steps",
        "6",
        "--set",
        "run.evaluate_every=0",
        "--set",
        "run.checkpoint_every=2",
    ]
    assert pretrain.main([*options, "--out", str(tmp_path / "undisturbed")]) == 0
    with monkeypatch.context() as patch:
        breaking(patch, at=(4,))
        assert run_main(pretrain.main, [*options, "--out", str(tmp_path / "run")]) == 3
    error = capsys.readouterr().err
    assert error.startswith("error: update 4: the gradient norm is nan; ")
    assert error.count("\n") == 1
    last = read_log(tmp_path / "run" / LOG)[-1]
    assert last["step"] == 4
    assert last["gradient_norm"] is None
    assert last["loss"] is not None
    assert pretrain.main(["--resume", str(tmp_path / "run")]) == 0
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "undisturbed")
