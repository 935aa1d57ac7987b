"""The training loop: next batch, learning rate, step, log; then evaluation, checkpoints and the non-finite guard."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, Dict, Iterator, NamedTuple, Optional

import torch

from ipu_packed_bert.data.global_batches import Batch, GlobalBatches
from ipu_packed_bert.engine.base import Engine, StepResult
from ipu_packed_bert.model.optimizer import learning_rate
from ipu_packed_bert.processes.ranks import STOPPING, Processes
from ipu_packed_bert.run_files.checkpoints import (
    Checkpoint,
    checkpoint_path,
    evict,
    save_checkpoint,
)
from ipu_packed_bert.run_files.vocabulary_identity import UNKNOWN, Identity
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.tasks.task import Counts, Evaluation
from pack_data.reading.words import NotFinite

_STDERR = 2  # file descriptor
_STOPPING = b"\nstopping after the current batch and saving a checkpoint"
_AT_ONCE = b"; Ctrl-C again stops at once without saving"
_LOWER_RATE = "--set optimizer.learning_rate=R --allow-change optimizer.learning_rate"


class Log:
    """Receiver of a run's results. This one writes nothing: in a run of several processes, rank 0 alone writes."""

    evaluated: Optional[int] = None  # the last update after which the held-out data were evaluated

    def step(self, step: int, learning_rate: float, counts: Counts, result: StepResult) -> None:
        """Record update ``step`` (1-based)."""

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Record the evaluation of the held-out packs after update ``step``."""
        self.evaluated = step

    def saved(self, step: int, seconds: float) -> None:
        """Record the time that the checkpoint after update ``step`` took."""

    def lacks_evaluation(self, step: int) -> bool:
        """Return True if an earlier process made update ``step`` but did not record its evaluation."""
        return False

    def sync(self) -> None:
        """Write all records through to the disk."""

    def watched(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the same held-out batches and show the progress of the evaluation."""
        return batches


class Outcome(NamedTuple):
    """State of a run when ``train`` returns."""

    step: int  # updates made, including those before a resumption
    stopped_by: Optional[int]  # the signal that ended it early, else None

    @property
    def status(self) -> int:
        """Exit status as shells report it: 128 + the signal (130 for Ctrl-C, 143 for SIGTERM), else 0."""
        return 128 + self.stopped_by if self.stopped_by else 0


def train(
    config: Config,
    engine: Engine,
    batches: GlobalBatches,
    log: Log,
    checkpoints: Optional[Path],
    *,
    steps: int,
    evaluate_every: Optional[int] = None,
    first_step: int = 0,
    vocabulary: Identity = UNKNOWN,
) -> Outcome:
    """Make the updates after ``first_step`` up to ``steps``.

    The signals ``STOPPING``, such as Ctrl-C and SIGTERM, let the current update or evaluation batch finish, save a
    checkpoint and return; a second Ctrl-C stops at once. With several processes, each one calls this function, and a
    signal to one of them stops all after the same update. If a signal cuts an evaluation short, the resumed run
    repeats it.

    Args:
        config: settings of the run, of any task.
        engine: makes the updates.
        batches: training batches, and held-out ones if ``evaluate_every`` is not 0.
        log: receives each update and evaluation.
        checkpoints: directory to save to; None saves nothing.
        steps: updates of the whole run.
        evaluate_every: updates between evaluations, 0 for none; default ``run.evaluate_every``.
        first_step: updates made before a resumption.
        vocabulary: identity of the vocabulary, stored in each checkpoint.

    Returns:
        The last update, and the signal that stopped the run.

    Raises:
        NotFinite: the loss or gradients of an update, a held-out loss, or the weights to save are not finite; the
            newest finite checkpoint stays.
        OSError: the log or a checkpoint cannot be written, for example because the disk is full.
    """
    task = engine.task
    every = config.run.evaluate_every if evaluate_every is None else evaluate_every
    with _Interruption(engine.processes) as interruption:
        run = _Run(config, engine, batches, log, checkpoints, steps, vocabulary)
        saver = _Saver(run, first_step)
        evaluator = _Evaluator(run, every, interruption, saver)
        evaluator.make_up(first_step)

        step = first_step
        while step < steps and not saver.stopped_by:
            step += 1
            batch = next(batches)
            rate = learning_rate(step - 1, config)
            result = engine.step(batch, rate)
            log.step(step, rate, result.counts or task.count(batch), result)

            saver.guard(step, result)
            evaluator.after_step(step)
            saver.after_step(step)
    return Outcome(step, saver.stopped_by if step < steps else None)


class _Run(NamedTuple):
    config: Config
    engine: Engine
    batches: GlobalBatches
    log: Log
    checkpoints: Optional[Path]  # directory to save to, None in processes that save nothing
    steps: int
    vocabulary: Identity


class _Saver:
    """Observer that saves checkpoints and decides when the run stops: a run stops only in a state that it has saved.

    It also ends the run at an update that is not finite.

    Two kinds of checkpoint are kept: the newest ``run.keep_checkpoints``, and the newest good one. A checkpoint is good
    once an update from its weights, or their held-out loss, was finite. Finite weights alone do not show that: they
    may be so large that every product overflows.
    """

    def __init__(self, run: _Run, first_step: int):
        self.stopped_by: Optional[int] = None
        self._run = run
        self._newest = first_step  # step of the newest checkpoint, 0 for none
        self._good = 0  # step of the newest good checkpoint, 0 for none
        self._proven = 0  # the weights after this update gave a finite loss

    def guard(self, step: int, result: StepResult) -> None:
        """Raise NotFinite if the loss or the gradients of an update are not finite."""
        if not result.finite:
            raise NotFinite(f"update {step}: {_describe_not_finite(result)}; {self.advice()}")
        self.prove(step - 1)

    def after_step(self, step: int) -> None:
        """Save a checkpoint if one is due or the run is to stop."""
        run = self._run
        # Read once, so that the saved state is the last one.
        self.stopped_by = run.engine.processes.stop
        every = run.config.run.checkpoint_every
        due = step == run.steps or (every and step % every == 0)
        if not due and not self.stopped_by:
            return
        if run.checkpoints is None:
            run.engine.join_state()
        else:
            self._save(run.checkpoints, step)

    def prove(self, step: int) -> None:
        """Record that the weights after update ``step`` gave a finite loss."""
        self._proven = step
        if self._good < self._newest <= step:
            self._good = self._newest
            if self._run.checkpoints is not None:
                evict(
                    self._run.checkpoints,
                    newest=self._newest,
                    keep=self._run.config.run.keep_checkpoints,
                )

    def advice(self) -> str:
        """Return which checkpoint a diverged run continues from, for an error message."""
        folder = self._run.checkpoints
        if folder is None:
            return "rank 0 names the checkpoint to continue from"
        if not self._newest:
            return "no checkpoint was saved; start again with a lower optimizer.learning_rate"
        good = checkpoint_path(folder, self._good or self._newest)
        delete_newer = "delete the newer ones, then " if 0 < self._good < self._newest else ""
        return f"the newest good checkpoint is {good}; {delete_newer}--resume {folder.parent} {_LOWER_RATE}"

    def _save(self, folder: Path, step: int) -> None:
        run = self._run
        start = time.perf_counter()
        state = run.engine.state()
        # An update can break the weights although its loss, computed before, is finite.
        broken = _first_not_finite(state)
        if broken:
            raise NotFinite(f"update {step}: {broken} is not finite after it; {self.advice()}")

        run.log.sync()  # first, because a checkpoint without the log of its updates would leave a gap
        checkpoint = Checkpoint(
            step, state, run.batches.state(), run.config.to_yaml(), *run.vocabulary
        )
        try:
            with run.engine.processes.shielded():
                save_checkpoint(
                    folder, checkpoint, keep=run.config.run.keep_checkpoints, protect=self._good
                )
        except OSError as error:
            raise OSError(
                f"{error}; free some space, then continue with --resume {folder.parent}"
            ) from None
        run.log.saved(step, time.perf_counter() - start)
        self._newest = step
        self.prove(self._proven)


class _Evaluator:
    """Observer that evaluates the held-out packs every ``every`` updates and after the last one; 0: never."""

    def __init__(self, run: _Run, every: int, interruption: _Interruption, saver: _Saver):
        self._run = run
        self._every = every
        self._interruption = interruption
        self._saver = saver

    def make_up(self, first_step: int) -> None:
        """Make the evaluation that a signal cut short before the run was resumed."""
        run = self._run
        due = self._every and 0 < first_step < run.steps and first_step % self._every == 0
        if due and run.engine.processes.of_first(run.log.lacks_evaluation, first_step):
            self._evaluate(first_step)

    def after_step(self, step: int) -> None:
        """Evaluate if it is due."""
        if self._every and (step == self._run.steps or step % self._every == 0):
            self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        run = self._run
        batches = self._interruption.ends(run.log.watched(run.batches.held_out()))
        evaluation = run.engine.task.evaluate(run.engine, batches)
        if evaluation is None or run.engine.processes.stop:  # half an evaluation is not recorded
            return
        run.log.evaluation(step, evaluation)
        if not math.isfinite(evaluation.loss):
            raise NotFinite(
                f"update {step}: the held-out loss is {evaluation.loss}; {self._saver.advice()}"
            )
        if "loss" in evaluation.metrics:
            self._saver.prove(step)


def _describe_not_finite(result: StepResult) -> str:
    """Name the values of an update that are not finite."""
    values = {"loss": result.loss, "gradient norm": result.gradient_norm or 0.0}
    problems = [
        f"the {name} is {value}" for name, value in values.items() if not math.isfinite(value)
    ]
    return " and ".join(problems)


def _first_not_finite(state: Dict[str, Any], prefix: str = "") -> Optional[str]:
    """Return the name of the first tensor in an engine's state with an infinite value or NaN, else None."""
    for name, value in state.items():
        if isinstance(value, dict):
            broken = _first_not_finite(value, f"{prefix}{name} ")
            if broken:
                return broken
        elif (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and not torch.isfinite(value).all()
        ):
            return prefix + name
    return None


class _Interruption:
    """Context in which the signals ``STOPPING`` only leave their number in ``Ranks.received``.

    SIGHUP is still ignored under nohup. A second Ctrl-C acts as usual, but not in one of several processes: their
    launcher passes on the first one, which the terminal may have sent to them already.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._handlers_before: Dict[int, Any] = {}

    def __enter__(self) -> _Interruption:
        self._processes.received = None
        # Python handles signals in the main thread only.
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._handlers_before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)

    def ends(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches until the run is to stop."""
        for batch in batches:
            if self._processes.stop:
                return
            yield batch

    def _received(self, number: int, _frame: Any) -> None:
        processes = self._processes
        if processes.received is not None and number == signal.SIGINT and processes.size == 1:
            raise KeyboardInterrupt
        if processes.received is None and processes.rank == 0:
            # Not by print: the signal may come while Python writes to the same file.
            os.write(_STDERR, _STOPPING + (_AT_ONCE if processes.size == 1 else b"") + b"\n")
        processes.received = number
