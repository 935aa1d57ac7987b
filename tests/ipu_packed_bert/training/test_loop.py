"""The loop: order of events, evaluation over batches, and what Ctrl-C and SIGTERM do."""

import contextlib
import io
import os
import signal
import time

import numpy as np
import pytest
import torch

from ipu_packed_bert.engine.base import StepResult
from ipu_packed_bert.model.optimizer import learning_rate
from ipu_packed_bert.processes.ranks import ONE, Processes
from ipu_packed_bert.run_files.checkpoints import checkpoints, load_checkpoint
from ipu_packed_bert.run_files.folder import EVALUATIONS, read_log
from ipu_packed_bert.settings.loading import config_from_tree
from ipu_packed_bert.tasks.pretraining import Pretraining
from ipu_packed_bert.training.log import RunLog
from ipu_packed_bert.training.loop import _Interruption, train
from pack_data.cli.command import NotFinite
from tests.pretraining import global_batches, host_engine
from tests.refusals import refused
from tests.tiny_runs import SLOTS, held_out_of, logged, tiny_settings


def result(*values):
    return StepResult(dict(zip(("loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy"), values)), 0.1)


class Recorder:
    """An engine that writes down what it is asked; its state is the number of updates made."""

    task = Pretraining(config_from_tree(tiny_settings(), "tiny.yml"))
    processes = ONE

    def __init__(self, at_step=None):
        self.calls = []
        self.steps = 0
        self.at_step = at_step or {}

    def step(self, batch, rate):
        self.steps += 1
        self.calls.append(("step", rate))
        if self.steps in self.at_step:
            self.at_step[self.steps]()
        return result(1.0 / self.steps, 0.5, 0.5, 0.25, 0.75)

    def evaluate(self, batch):
        self.calls.append(("evaluate", len(batch["input_ids"])))
        return result(2.0, 1.0, 1.0, 0.5, 0.5)

    def state(self):
        self.calls.append(("state", self.steps))
        return {"model": {}, "optimizer": {"step": self.steps, "exp_avg": {}, "exp_avg_sq": {}}}


def run(store, folder, engine, *overrides, first_step=0):
    config = config_from_tree(tiny_settings(), "tiny.yml", overrides)
    batches = global_batches(store, config, packing_factor=store.manifest.packing_factor, evaluation=held_out_of(store))
    log = RunLog(folder, steps=config.run.steps, first_step=first_step, max_sequence_length=SLOTS, stream=io.StringIO())
    with contextlib.closing(log), contextlib.closing(batches):
        steps = {"steps": config.run.steps, "first_step": first_step}
        outcome = train(config, engine, batches, log, folder / "checkpoints", **steps)
    return config, outcome


def test_steps_evaluations_and_checkpoints_come_when_they_are_due(store, tmp_path):
    engine = Recorder()
    config, outcome = run(store, tmp_path, engine)  # 12 steps, evaluation every 5, checkpoint every 3
    assert outcome == (12, None)
    names = [(name, value) for name, value in engine.calls if name != "step"]
    assert [value for name, value in names if name == "state"] == [3, 6, 9, 12]
    rates = [value for name, value in engine.calls if name == "step"]
    assert rates == [learning_rate(step, config) for step in range(12)]
    assert logged(tmp_path) == list(range(1, 13))
    assert logged(tmp_path, file=EVALUATIONS) == [5, 10, 12]
    assert [load_checkpoint(path).step for path in checkpoints(tmp_path / "checkpoints")] == [9, 12]


@pytest.mark.parametrize("first_step", [5, 3])
def test_a_resumed_run_makes_up_once_for_an_evaluation_that_was_cut_short(store, tmp_path, first_step):
    run(store, tmp_path, Recorder(), first_step=first_step)
    assert logged(tmp_path, file=EVALUATIONS) == [5, 10, 12]
    again = Recorder()
    run(store, tmp_path, again, first_step=5)
    assert again.calls[0][0] == "step"


def test_never_evaluated_and_saved_only_at_the_end(store, tmp_path):
    engine = Recorder()
    run(store, tmp_path, engine, "run.evaluate_every=0", "run.checkpoint_every=0", "run.steps=4")
    assert [name for name, _ in engine.calls] == ["step"] * 4 + ["state"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"])
def test_a_signal_lets_the_update_finish_and_saves(store, tmp_path, name):
    number = getattr(signal, name)
    engine = Recorder({5: lambda: os.kill(os.getpid(), number)})
    actual = signal.getsignal(number)
    before = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    signal.signal(number, before)  # below nohup, SIGHUP is ignored
    try:
        _, outcome = run(store, tmp_path, engine)
        assert signal.getsignal(number) is before
    finally:
        signal.signal(number, actual)
    assert outcome == (5, number)
    assert engine.calls[-1] == ("state", 5)
    assert ("evaluate", 4) not in engine.calls
    assert load_checkpoint(checkpoints(tmp_path / "checkpoints")[-1]).step == 5
    assert logged(tmp_path) == [1, 2, 3, 4, 5]
    assert outcome.status == 128 + number


def test_nohup_keeps_a_run_alive_that_outlives_its_terminal(store, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        _, outcome = run(store, tmp_path, Recorder({5: lambda: os.kill(os.getpid(), signal.SIGHUP)}))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert outcome == (12, None)


def test_a_signal_ends_an_evaluation_after_its_batch_and_half_of_one_is_not_logged(store, tmp_path):
    class Interrupted(Recorder):
        def evaluate(self, batch):
            os.kill(os.getpid(), signal.SIGINT)
            return super().evaluate(batch)

    engine = Interrupted()
    _, outcome = run(store, tmp_path, engine)  # several batches, the first time after update 5
    assert outcome == (5, signal.SIGINT)
    assert [name for name, _ in engine.calls].count("evaluate") == 1
    assert engine.calls[-1] == ("state", 5)
    assert read_log(tmp_path / EVALUATIONS) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_held_out_loss_that_is_not_finite_ends_the_run_before_its_checkpoint(store, tmp_path, value):
    class Broken(Recorder):
        def evaluate(self, batch):
            return result(2.0, value, 1.0, 0.5, 0.5)

    with refused("update 5", "held-out loss", str(value), kind=NotFinite):
        run(store, tmp_path, Broken())
    assert [load_checkpoint(path).step for path in checkpoints(tmp_path / "checkpoints")] == [3]


def test_weights_that_are_not_finite_are_not_saved(store, tmp_path):
    """An update can break the weights although its loss, computed before, is finite."""

    class Broken(Recorder):
        def state(self):
            weights = {"bert.weight": torch.tensor([1.0, float("inf")])}
            return {**super().state(), "model": weights}

    with refused("update 3", "model bert.weight", "no checkpoint was saved", kind=NotFinite):
        run(store, tmp_path, Broken())
    assert checkpoints(tmp_path / "checkpoints") == []


def test_a_signal_in_the_last_update_is_a_run_that_ended(store, tmp_path):
    _, outcome = run(store, tmp_path, Recorder({12: lambda: os.kill(os.getpid(), signal.SIGTERM)}))
    assert outcome == (12, None)


def test_a_second_ctrl_c_stops_at_once_as_the_first_says(capfd):
    processes = Processes()
    with _Interruption(processes):
        os.kill(os.getpid(), signal.SIGINT)
        assert processes.stop == signal.SIGINT
        assert "Ctrl-C again" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)


@pytest.mark.parametrize("normalisation", ["token", "sequence"])
def test_evaluation_over_batches_is_that_of_one_large_batch(store, normalisation):
    overrides = ["loss.normalisation=" + normalisation]
    small = config_from_tree(tiny_settings(), "tiny.yml", overrides)
    large = config_from_tree(tiny_settings(), "tiny.yml", overrides + ["batch.gradient_accumulation=30"])
    parts = []
    evaluations = []
    for config in (small, large):
        batches = global_batches(store, config, packing_factor=2.0, evaluation=held_out_of(store))
        engine = host_engine(config, store.schema, packing_factor=2.0)
        parts.append(list(batches.held_out()))
        evaluations.append(engine.task.evaluate(engine, parts[-1]))
        batches.close()
    small_batches, large_batch = evaluations
    assert len(parts[0]) > 1 == len(parts[1])
    assert small_batches.counts == large_batch.counts
    assert large_batch.counts["sequences"] > 10
    assert small_batches.metrics == pytest.approx(large_batch.metrics, rel=1e-6)


def counted_batch(sequences, masked):
    """A batch of a pack with some sequences and masked tokens."""
    return {
        "input_mask": np.ones((1, 8)),
        "masked_lm_weights": np.arange(4)[None] < masked,
        "next_sentence_weights": np.arange(3)[None] < sequences,
    }


class Told:
    """An engine that returns results one after another."""

    def __init__(self, *results):
        self.results = iter(results)

    def evaluate(self, batch):
        return next(self.results)


def test_evaluation_weighs_batches_by_what_they_hold():
    """Two batches, the second one without any masked token; and one without any sequence, a result of nonsense."""
    first = (counted_batch(3, 4), result(5.0, 4.0, 1.0, 0.25, 0.5))
    second = (counted_batch(1, 0), result(2.0, 0.0, 2.0, 0.0, 1.0))
    empty = (counted_batch(0, 0), result(9.0, 8.0, 1.0, 1.0, 1.0))

    def evaluated(task, *parts):
        batches, results = zip(*parts)
        return task.evaluate(Told(*results), batches)

    # 4 x 4 + 0 over 4 masked tokens; 3 x 4 + 1 x 0 over 4 sequences.
    for normalisation, mlm_loss in (("token", 4.0), ("sequence", 3.0)):
        override = f"loss.normalisation={normalisation}"
        task = Pretraining(config_from_tree(tiny_settings(), "tiny.yml", [override]))
        evaluation = evaluated(task, first, second, empty)
        assert (evaluation.counts["sequences"], evaluation.counts["masked_tokens"]) == (4, 4)
        assert evaluation.metrics == pytest.approx(result(mlm_loss + 1.25, mlm_loss, 1.25, 0.25, 0.625).metrics)
        assert evaluation.loss == evaluation.metrics["loss"]
        assert evaluation.seconds == pytest.approx(0.3)
        # Nothing masked, or nothing at all: no loss, and no division by zero.
        assert evaluated(task, second).metrics == second[1].metrics
        assert set(evaluated(task, empty).metrics.values()) == {0.0}
        assert task.evaluate(Told(), []) is None
