"""The training loop: next batch, step, record, maybe evaluate, maybe save."""

from __future__ import annotations

import abc
import math
import signal
import threading
from pathlib import Path
from typing import Any, Dict, Iterator, NamedTuple, Optional

import torch

from ipu_packed_bert.checkpoint import Checkpoint, save_checkpoint
from ipu_packed_bert.checkpoint import checkpoints as saved
from ipu_packed_bert.engine.base import Engine, StepResult
from ipu_packed_bert.identity import UNKNOWN, Identity
from ipu_packed_bert.loader import Batch, GlobalBatches
from ipu_packed_bert.optim import learning_rate
from ipu_packed_bert.tasks.task import Counts, Evaluation
from pack_data.command import NotFinite


class Log(abc.ABC):
    """What the training loop tells."""

    @abc.abstractmethod
    def step(self, step: int, learning_rate: float, counts: Counts, result: StepResult) -> None:
        """Update number ``step`` (the first is 1) was made."""

    @abc.abstractmethod
    def evaluation(self, step: int, found: Evaluation) -> None:
        """The held-out packs were evaluated after update number ``step``."""


class SilentLog(Log):
    """For the processes of a run that another one writes down."""

    def step(self, step: int, learning_rate: float, counts: Counts, result: StepResult) -> None:
        pass

    def evaluation(self, step: int, found: Evaluation) -> None:
        pass


class Outcome(NamedTuple):
    """Where a run stands when ``train`` returns."""

    step: int  # updates made, those before a resumption included
    stopped_by: Optional[int]  # the signal that ended it early, else None

    @property
    def status(self) -> int:
        """Exit status, as a shell reports a process that a signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.stopped_by if self.stopped_by else 0


def train(
    config: Any,
    engine: Engine,
    batches: GlobalBatches,
    log: Log,
    checkpoints: Optional[Path],
    *,
    steps: Optional[int] = None,
    evaluate_every: Optional[int] = None,
    first_step: int = 0,
    vocabulary: Identity = UNKNOWN,
) -> Outcome:
    """Make the updates after ``first_step`` up to ``steps``; ``checkpoints`` None saves none.

    ``config`` is that of any task; ``steps`` and ``evaluate_every`` are those of its section ``run`` where they are not
    given. ``vocabulary`` is what checkpoints record of it.

    Ctrl-C and SIGTERM let the update or the evaluation's batch under way finish, save a checkpoint and return; a second
    Ctrl-C stops at once. Raises NotFinite where a loss, or the weights of a checkpoint that is due, are no longer
    finite; those are not saved.
    """
    run, task = config.run, engine.task
    steps = run.steps if steps is None else steps
    evaluate_every = run.evaluate_every if evaluate_every is None else evaluate_every
    step = first_step
    with Interruption() as interruption:
        for step in range(first_step + 1, steps + 1):
            batch = next(batches)
            rate = learning_rate(step - 1, config)
            result = engine.step(batch, rate)
            log.step(step, rate, task.count(batch), result)
            check_loss(result.loss, step, "the loss", checkpoints)

            last = step == steps
            if evaluate_every and (last or step % evaluate_every == 0):
                # A signal ends an evaluation after its batch; half of one is not logged.
                found = task.evaluate(engine, interruption.ends(batches.held_out()))
                if found is not None and not interruption.signal:
                    log.evaluation(step, found)
                    check_loss(found.loss, step, "the held-out loss after it", checkpoints)
            due = last or interruption.signal or (run.checkpoint_every and step % run.checkpoint_every == 0)
            if due and checkpoints is not None:
                # The update may have broken the weights although its loss, taken before, is finite.
                state = engine.state()
                check_state(state, step, checkpoints)
                save_checkpoint(
                    checkpoints,
                    Checkpoint(step, state, batches.state(), config.to_yaml(), *vocabulary),
                    keep=run.keep_checkpoints,
                )
            if interruption.signal:
                break
    return Outcome(step, interruption.signal if step < steps else None)


def check_loss(loss: float, step: int, what: str, folder: Optional[Path]) -> None:
    """Raises NotFinite for a loss that is infinite or no number; ``folder``: the run's checkpoints."""
    if not math.isfinite(loss):
        raise NotFinite(f"update {step}: {what} is {loss}; {_way_out(step, folder)}")


def check_state(state: Dict[str, Any], step: int, folder: Path) -> None:
    """Raises NotFinite if a tensor of an engine's state has a value that is infinite or no number."""
    broken = _first_not_finite(state)
    if broken:
        raise NotFinite(
            f"update {step}: {broken} is no longer finite after it, so it is not saved; {_way_out(step, folder)}"
        )


def _first_not_finite(state: Dict[str, Any], prefix: str = "") -> Optional[str]:
    for name, value in state.items():
        if isinstance(value, dict):
            found = _first_not_finite(value, prefix + name + " ")
            if found:
                return found
        elif isinstance(value, torch.Tensor) and value.is_floating_point() and not torch.isfinite(value).all():
            return prefix + name
    return None


def _way_out(step: int, folder: Optional[Path]) -> str:
    """What to do where update number ``step`` broke the run."""
    found = saved(folder) if folder is not None else []
    if not found:
        earlier = f", and with run.checkpoint_every above 0 and below {step}" if step > 1 else ""
        return f"nothing was saved before; begin again with a lower optimizer.learning_rate{earlier}"
    return (
        f"the newest checkpoint is {found[-1]}, which is finite; --resume continues it, with a lower"
        " optimizer.learning_rate"
    )


class Interruption:
    """While entered, Ctrl-C and SIGTERM only leave their number in ``signal``; a second Ctrl-C acts as usual."""

    def __init__(self) -> None:
        self.signal: Optional[int] = None
        self._former: dict = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():  # Python handles signals in no other
            for number in (signal.SIGINT, signal.SIGTERM):
                self._former[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def ends(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches until a signal comes."""
        for batch in batches:
            if self.signal:
                return
            yield batch

    def _received(self, number: int, _frame: Any) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
