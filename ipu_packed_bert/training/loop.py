"""The training loop: next batch, step, record, maybe evaluate, maybe save."""

from __future__ import annotations

import math
import signal
import threading
from pathlib import Path
from typing import Any, Dict, Iterator, NamedTuple, Optional

import torch

from ipu_packed_bert.data.global_batches import Batch, GlobalBatches
from ipu_packed_bert.engine.base import Engine, StepResult
from ipu_packed_bert.model.optimizer import learning_rate
from ipu_packed_bert.processes.ranks import Processes
from ipu_packed_bert.run_files.checkpoints import (
    Checkpoint,
    NotSaved,
    checkpoint_path,
    evict,
    evict_set_aside,
    save_checkpoint,
    set_aside,
)
from ipu_packed_bert.run_files.checkpoints import checkpoints as saved
from ipu_packed_bert.run_files.vocabulary_identity import UNKNOWN, Identity
from ipu_packed_bert.settings.schema import Configuration
from ipu_packed_bert.tasks.task import Counts, Evaluation
from pack_data.cli.command import NotFinite

_PATIENCE = 10  # skipped updates in a row that end a run


class Log:
    """What the training loop tells; this one writes nothing, for the processes of a run that another writes down."""

    evaluated: Optional[int] = None  # the update after which it was evaluated last

    def step(self, step: int, learning_rate: float, counts: Counts, result: StepResult) -> None:
        """Update number ``step`` (the first is 1) was made."""

    def evaluation(self, step: int, found: Evaluation) -> None:
        """The held-out packs were evaluated after update number ``step``."""
        self.evaluated = step

    def lacks_evaluation(self, step: int) -> bool:
        """Whether the evaluation after update number ``step``, which a former process made, is not written down."""
        return False

    def sync(self) -> None:
        """All that was told is on the disk when this returns."""

    def watched(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same held-out batches, one after another, as they are evaluated."""
        return batches

    def say(self, text: str) -> None:
        """A line for people."""
        print(text, flush=True)


class Outcome(NamedTuple):
    """Where a run stands when ``train`` returns."""

    step: int  # updates made, those before a resumption included
    stopped_by: Optional[int]  # the signal that ended it early, else None
    not_saved: Optional[str] = None  # why there is no checkpoint of the last state, else None

    @property
    def status(self) -> int:
        """Exit status: 1 where the last state is not saved, whatever ended the run; else 128 + the signal that did.

        A shell reports so a process that a signal ended: 130 for Ctrl-C, 143 for SIGTERM.
        """
        if self.not_saved:
            return 1
        return 128 + self.stopped_by if self.stopped_by else 0


def train(
    config: Configuration,
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
    """Make the updates after ``first_step`` up to ``steps``; ``checkpoints`` None saves none.

    ``evaluate_every`` is ``run.evaluate_every`` where it is not given. ``vocabulary`` is what checkpoints record of it.

    Ctrl-C and SIGTERM let the update or the evaluation's batch under way finish, save a checkpoint and return; a second
    Ctrl-C stops at once. Of several processes each calls this, and those that give no ``checkpoints`` write none; a
    signal that one of them got ends all after the same update. An evaluation that a signal cut short is made up for by
    the process that goes on.

    An update whose loss or gradients are not finite ends the run, or is left out and counted: ``run.on_nonfinite``.
    Raises NotFinite where such an update, a held-out loss or the weights of a checkpoint that is due end the run; the
    last finite checkpoint stays.

    A checkpoint that cannot be written, for want of room above all, does not end the run: one line says so, and the
    next one is saved when it is due.
    """
    run, task, processes = config.run, engine.task, engine.processes
    evaluate_every = run.evaluate_every if evaluate_every is None else evaluate_every
    kept = _Kept(checkpoints, keep=run.keep_checkpoints, newest=first_step)
    step, skipped, stop, not_saved = first_step, 0, None, None
    with Interruption(processes) as interruption:

        def evaluate(step: int) -> bool:
            """Whether the held-out loss shows that the weights are good."""
            # A signal ends an evaluation after its batch; half of one is not logged.
            found = task.evaluate(engine, interruption.ends(log.watched(batches.held_out())))
            if found is None or processes.stop:
                return False
            log.evaluation(step, found)
            if not math.isfinite(found.loss):
                raise NotFinite(f"update {step}: the held-out loss after it is {found.loss}; {kept.way_out(step)}")
            return "loss" in found.metrics

        missed = 0 < first_step < steps and evaluate_every and first_step % evaluate_every == 0
        if missed and processes.of_first(log.lacks_evaluation, first_step) and evaluate(first_step):
            kept.shown_good()
        for step in range(first_step + 1, steps + 1):
            batch = next(batches)
            rate = learning_rate(step - 1, config)
            result = engine.step(batch, rate)
            log.step(step, rate, result.counts or task.count(batch), result)
            if result.finite:
                skipped = 0
                kept.shown_good()
            else:
                skipped += 1
                if run.on_nonfinite == "stop" or skipped >= _PATIENCE:
                    row = f", and so it was {skipped} times in a row" if skipped > 1 else ""
                    raise NotFinite(f"update {step}: {not_finite(result)}{row}; {kept.way_out(step)}")

            last = step == steps
            evaluated = bool(evaluate_every and (last or step % evaluate_every == 0)) and evaluate(step)
            stop = processes.stop  # read once: what is saved and what ends the run must not differ
            due = last or stop or (run.checkpoint_every and step % run.checkpoint_every == 0)
            if due and checkpoints is not None:
                # The update may have broken the weights although its loss, taken before, is finite.
                state = engine.state()
                broken = _first_not_finite(state)
                if broken:
                    raise NotFinite(
                        f"update {step}: {broken} is no longer finite after it, so it is not saved; "
                        + kept.way_out(step)
                    )
                try:
                    kept.save(Checkpoint(step, state, batches.state(), config.to_yaml(), *vocabulary), log)
                    not_saved = None
                except NotSaved as error:
                    not_saved = str(error)
                    over = last or stop
                    then = kept.after_the_end() if over else "the run goes on, and saves again when it is next due"
                    log.say(f"note      update {step}: {error}; {then}")
                if evaluated and not not_saved:
                    kept.shown_good()
            elif due:
                engine.join_state()
            if stop:
                break
    return Outcome(step, stop if step < steps else None, not_saved)


_LOWER = (
    "--resume continues it, with a lower rate: --set optimizer.learning_rate=R --allow-change optimizer.learning_rate"
)


class _Kept:
    """The checkpoints of a run under way: the newest ones, and the newest one that is known to be good.

    A checkpoint is known to be good once an update from its weights, or their held-out loss, was finite. Its weights
    being finite does not say so: they may be so large that every product overflows.
    """

    def __init__(self, folder: Optional[Path], *, keep: int, newest: int):
        """newest: the step of the checkpoint that the run goes on from, 0 for none."""
        self._folder, self._keep, self._newest = folder, keep, newest
        self._good: Optional[int] = None

    def save(self, checkpoint: Checkpoint, log: Log) -> None:
        """Raises NotSaved where the disk is full, of log or checkpoint."""
        assert self._folder is not None
        log.sync()  # a checkpoint without the log of its updates would leave a hole
        save_checkpoint(self._folder, checkpoint, keep=self._keep, protect=self._good)
        self._newest = checkpoint.step

    def after_the_end(self) -> str:
        """What is lost where the last state of a run is not saved, and the way out."""
        if self._newest:
            return f"the last state is not saved: make room, and --resume goes on from update {self._newest}"
        return "the last state is not saved, and no other: make room, and begin again"

    def shown_good(self) -> None:
        """An update from the newest checkpoint, or an evaluation of it, was finite."""
        if self._newest and self._good != self._newest:
            self._good = self._newest
            if self._folder is not None:
                evict(self._folder, newest=self._newest, keep=self._keep)
                evict_set_aside(self._folder, good=self._newest)

    def way_out(self, step: int) -> str:
        """What to do where update number ``step`` ended the run.

        Checkpoints that are newer than one known to be good are set aside: each update from them would fail again.
        """
        if self._folder is None:
            return "no checkpoint is this process's own"
        found = saved(self._folder)
        if not found:
            earlier = f", and with run.checkpoint_every above 0 and below {step}" if step > 1 else ""
            return f"nothing was saved before; begin again with a lower optimizer.learning_rate{earlier}"
        if self._newest == self._good:
            return f"the newest checkpoint is {found[-1]}, which is finite; {_LOWER}"
        if self._good is None:
            others = f", move it away to continue from {found[-2].name}," if len(found) > 1 else ""
            return (
                f"no update from {found[-1]} was finite, and none will be as things are: undo a change of settings"
                f"{others} or begin again with a lower optimizer.learning_rate"
            )
        good = checkpoint_path(self._folder, self._good)
        aside = [set_aside(path) for path in found if path.name > good.name]
        return (
            f"no update from {found[-1].name} was finite, so it is set aside as {aside[-1].name} until the run is past"
            f" it; the newest checkpoint is {good}, which is finite; {_LOWER}"
        )


def not_finite(result: StepResult) -> str:
    """What of an update is not finite, in words."""
    norm = result.gradient_norm
    words = [] if math.isfinite(result.loss) else [f"the loss is {result.loss}"]
    if norm is not None and not math.isfinite(norm):
        words.append(f"the gradient norm is {norm}")
    return " and ".join(words)


def _first_not_finite(state: Dict[str, Any], prefix: str = "") -> Optional[str]:
    """The name of a tensor in an engine's state that has a value that is infinite or no number; None if none has."""
    for name, value in state.items():
        if isinstance(value, dict):
            found = _first_not_finite(value, prefix + name + " ")
            if found:
                return found
        elif isinstance(value, torch.Tensor) and value.is_floating_point() and not torch.isfinite(value).all():
            return prefix + name
    return None


class Interruption:
    """While entered, Ctrl-C and SIGTERM only leave their number in ``processes.received``.

    A second Ctrl-C acts as usual, but not in one of several processes: their launcher passes on the first, which the
    terminal may have sent them as well.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._former: dict = {}

    def __enter__(self) -> Interruption:
        self._processes.received = None
        if threading.current_thread() is threading.main_thread():  # Python handles signals in no other
            for number in (signal.SIGINT, signal.SIGTERM):
                self._former[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def ends(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches until the run is to stop."""
        for batch in batches:
            if self._processes.stop:
                return
            yield batch

    def _received(self, number: int, _frame: Any) -> None:
        processes = self._processes
        if processes.received is not None and number == signal.SIGINT and processes.size == 1:
            raise KeyboardInterrupt
        processes.received = number
