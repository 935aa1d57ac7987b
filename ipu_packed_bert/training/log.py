"""The log of a run in training: records of updates and evaluations, and the progress line."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, Deque, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

from ipu_packed_bert.data.global_batches import Batch
from ipu_packed_bert.engine.base import StepResult
from ipu_packed_bert.run_files.folder import COUNTS, EVALUATIONS, LOG
from ipu_packed_bert.tasks.task import Counts, Evaluation
from ipu_packed_bert.training.log_files import Events, JsonlWriter, forget_after
from ipu_packed_bert.training.loop import Log
from ipu_packed_bert.training.trackers import Tracker
from pack_data.cli.terminal import bare_stderr
from pack_data.cli.timing import time_text
from pack_data.display.facts import number
from pack_data.reading.durable import write_atomically
from pack_data.store import quantities

_RECENT = 20  # steps over which the progress line averages its rates
_LONG_SAVE = 2.0  # seconds of a checkpoint above which its time is printed
_LINES = 20  # progress lines of a run without a terminal

_MEASURES = {"mlm_loss": "masked tokens (mlm)", "nsp_loss": "the next sentence (nsp)"}
_PADDING_AVOIDED = "padding avoided: the share of the padding of unpacked rows (one sequence each) that packing removes"


class Totals(NamedTuple):
    """Counts and seconds of several steps."""

    packs: int = 0
    sequences: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def _plus(self, counts: Counts, seconds: float) -> Totals:
        return Totals(
            self.packs + counts["packs"],
            self.sequences + counts["sequences"],
            self.tokens + counts["tokens"],
            self.seconds + seconds,
        )

    @property
    def sequences_per_second(self) -> float:
        """Sequences per second, 0 if there are no steps."""
        return quantities.sequences_per_second(self.sequences, self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, 0 if there are no steps."""
        return quantities.tokens_per_second(self.tokens, self.seconds)

    @property
    def packing_factor(self) -> float:
        """Sequences per pack, 1 if there are no packs."""
        return quantities.packing_factor(self.sequences, self.packs)


class RunLog(Log):
    """Writer of a run's steps, to its directory and to the terminal.

    A terminal gets a live line, any other output about twenty lines. A resumed run first removes the records of steps
    after the checkpoint, which are lost.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        first_step: int = 0,
        max_sequence_length: int,
        stream: Any = None,
        tracker: Optional[Tracker] = None,
    ):
        self._folder = Path(folder)
        self._steps = steps
        self._max_sequence_length = max_sequence_length
        self._stream = sys.stdout if stream is None else stream
        self._recent: Deque[Tuple[Counts, float]] = deque(maxlen=_RECENT)
        self._lines_every = max(1, steps // _LINES)
        self._first: Optional[Tuple[Counts, float]] = None
        self._began = 0, 0.0  # the first step of this process, and its time
        self._totals = Totals()
        self._bar: Any = None
        forget_after(self._folder / LOG, first_step, self._say, of_updates=True)
        evaluations = forget_after(self._folder / EVALUATIONS, first_step, self._say)
        self._evaluated_before = {record["step"]: record for record in evaluations}
        self._log = JsonlWriter(self._folder / LOG)
        self._evaluations = JsonlWriter(self._folder / EVALUATIONS)
        self._events = Events(self._folder, first_step, self._say, tracker)
        if sys.stderr and sys.stderr.isatty():
            from pack_data.cli.bars import DelayedBar

            self._bar = DelayedBar(
                terminal=True,
                total=steps,
                initial=first_step,
                file=bare_stderr(),
                unit="step",
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}",
            )
            self._bar.announce()

    def step(self, step: int, learning_rate: float, counts: Counts, result: StepResult) -> None:
        record = {
            "step": step,
            **result.metrics,
            "learning_rate": learning_rate,
            "gradient_norm": result.gradient_norm,
            **{name: counts[name] for name in COUNTS},
            "seconds": result.seconds,
            "cycles": result.cycles,
        }
        self._log.append(record)
        self._recent.append((counts, result.seconds))
        # The first step of a process warms up caches and allocators; rates exclude it if there is another step.
        if self._first is None:
            measures = [words for name, words in _MEASURES.items() if name in result.metrics]
            if measures:
                self._say(f"loss in nats and accuracy of {' and '.join(measures)}")
            self._say(_PADDING_AVOIDED)
            self._first = (counts, result.seconds)
            self._began = step, time.perf_counter()
        else:
            self._totals = self._totals._plus(counts, result.seconds)
        recent = Totals()
        for recent_counts, seconds in self._recent:
            recent = recent._plus(recent_counts, seconds)
        avoided = quantities.padding_avoided(
            recent.packs, recent.sequences, recent.tokens, self._max_sequence_length
        )
        values = {
            **{_tag(name): value for name, value in result.metrics.items()},
            "learning_rate": learning_rate,
            "gradient_norm": result.gradient_norm,
            "rate/sequences_per_second": recent.sequences_per_second,
            "rate/tokens_per_second": recent.tokens_per_second,
            "packing/sequences_per_pack": recent.packing_factor,
            "packing/padding_avoided": avoided,
        }
        self._events.add(step, values)

        line = (
            f"{metrics_text(result.metrics)}  {number(recent.sequences_per_second, 'sequences/s')} seq/s"
            f"  {number(recent.tokens_per_second, 'tokens/s')} tok/s  padding avoided {number(avoided, '%')}"
        )
        if self._bar is not None:
            self._bar.set_postfix_str(line, refresh=False)
            self._bar.update(1)
        elif step == 1 or step == self._steps or step % self._lines_every == 0:
            width = len(str(self._steps))
            self._say(f"step {step:>{width}}/{self._steps}  {line}{self._left(step)}")

    def _left(self, step: int) -> str:
        """Return the time left, at the speed of this process including its evaluations and checkpoints."""
        first_step, start = self._began
        if not first_step < step < self._steps:
            return ""
        seconds_per_step = (time.perf_counter() - start) / (step - first_step)
        return f"  {time_text(seconds_per_step * (self._steps - step))} left"

    def watched(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for count, batch in enumerate(batches, start=1):
            if self._bar is not None:
                self._bar.set_postfix_str(f"evaluating, batch {number(count)}", refresh=True)
            yield batch

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Write the evaluation's files, then its record, so that a record means that its files exist.

        A file that does not fit on the disk is noted and left out.
        """
        self.evaluated = step
        metrics = evaluation.metrics
        counts = evaluation.counts
        for name, content in evaluation.files.items():
            path = self._folder / name
            text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
            try:
                write_atomically(path, text.encode())
            except OSError as error:
                self._say(f"note      {path} cannot be written ({error.strerror or error})")
        record = {
            "step": step,
            **metrics,
            **{name: counts[name] for name in COUNTS},
            "seconds": evaluation.seconds,
        }
        # A finished run that is resumed is evaluated again.
        former = self._evaluated_before.get(step, {})
        if {**record, "seconds": former.get("seconds")} != former:
            self._evaluations.append(record)
            values = {f"evaluation/{name}": value for name, value in metrics.items()}
            self._events.add(step, values)
        self._say(
            f"held out after step {step}: {metrics_text(metrics)}  ({counts['sequences']:,} sequences)"
        )

    def saved(self, step: int, seconds: float) -> None:
        if seconds > _LONG_SAVE:
            self._say(f"saved     step {step} in {time_text(seconds)}")

    def lacks_evaluation(self, step: int) -> bool:
        return step not in self._evaluated_before

    def sync(self) -> None:
        self._log.sync()
        self._evaluations.sync()

    @property
    def totals(self) -> Totals:
        """Totals of the steps of this process, without the first one if there is another."""
        if self._totals.packs or self._first is None:
            return self._totals
        return Totals()._plus(*self._first)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._events.close()
        self._log.close()
        self._evaluations.close()

    def _say(self, text: str) -> None:
        # tqdm's own `write` does not clear the bar, which is drawn on the bare stream of stderr.
        if self._bar is not None:
            self._bar.clear()
        print(text, file=self._stream, flush=True)
        if self._bar is not None:
            self._bar.refresh()


def _tag(name: str) -> str:
    """Return TensorBoard's name of a metric: "loss/mlm" for `mlm_loss`, "loss/total" for `loss`."""
    part, _, kind = name.rpartition("_")
    return f"{kind}/{part or 'total'}"


def metric_unit(name: str, metrics: Mapping[str, Any]) -> str:
    """Return the unit of a metric; scores of predictions, which have no loss, are percentages or counts."""
    if "loss" not in metrics:
        return "score"
    return "share" if name.endswith("accuracy") else "nats"


def metrics_text(metrics: Mapping[str, Any]) -> str:
    """Format metrics for users, in one line.

    Losses and accuracies are grouped: `loss 5.436  mlm 4.681 12.0%  nsp 0.755 51.9%`. Scores of predictions have no
    loss and are listed: `exact 55.10  f1 61.25  questions 240`.
    """
    groups: Dict[str, List[str]] = {}
    for name, value in metrics.items():
        part, _, kind = name.rpartition("_")
        if "loss" not in metrics:
            part = name
        text = "none" if value is None else number(value, metric_unit(name, metrics))
        groups.setdefault(part or kind, []).append(text)
    if not groups:
        return "no labels in the file"
    return "  ".join(" ".join([part, *values]) for part, values in groups.items())
