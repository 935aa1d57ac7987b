"""A run's log while it trains: records of updates and evaluations, and the line that people watch."""

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
from ipu_packed_bert.training.picture import padding_avoided
from ipu_packed_bert.training.trackers import Tracker
from pack_data.cli.command import bare_stderr
from pack_data.cli.timing import left_text
from pack_data.reading.files import write_atomically

# Steps over which the watched line averages its rates.
_RECENT = 20

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
        return self.sequences / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def packing_factor(self) -> float:
        return self.sequences / self.packs if self.packs else 1.0


class RunLog(Log):
    """Writes one run's steps, as they are made, to its folder and to the terminal.

    A terminal gets a live line, anything else about twenty lines in all.  After a resumption the lines of steps that
    were made after the checkpoint, and lost with it, are taken out first.
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
        self._lines_every = max(1, steps // 20)
        self._first: Optional[Tuple[Counts, float]] = None
        self._began = 0, 0.0  # that step, and when it was done
        self._totals = Totals()
        self._bar: Any = None
        forget_after(self._folder / LOG, first_step, self.say)
        evaluations = forget_after(self._folder / EVALUATIONS, first_step, self.say)
        self._evaluated_before = {record["step"] for record in evaluations}
        self._log = JsonlWriter(self._folder / LOG)
        self._evaluations = JsonlWriter(self._folder / EVALUATIONS)
        self._events = Events(self._folder, first_step, self.say, tracker)
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
        # The first step of a process warms up caches and allocators: it counts for the rates only where it is alone.
        if self._first is None:
            self.say(_PADDING_AVOIDED)
            self._first = (counts, result.seconds)
            self._began = step, time.perf_counter()
        else:
            self._totals = self._totals._plus(counts, result.seconds)
        recent = Totals()
        for each in self._recent:
            recent = recent._plus(*each)
        avoided = padding_avoided(
            recent.packs, recent.sequences, recent.tokens, self._max_sequence_length
        )
        self._events.add(
            step,
            {
                **{_tag(name): value for name, value in result.metrics.items()},
                "learning_rate": learning_rate,
                "gradient_norm": result.gradient_norm,
                "rate/sequences_per_second": recent.sequences_per_second,
                "rate/tokens_per_second": recent.tokens_per_second,
                "packing/sequences_per_pack": recent.packing_factor,
                "packing/padding_avoided": avoided,
            },
        )
        line = (
            f"{in_words(result.metrics)}  {recent.sequences_per_second:,.1f} seq/s"
            f"  {recent.tokens_per_second:,.0f} tok/s  padding avoided {avoided:.2%}"
        )
        if self._bar is not None:
            self._bar.set_postfix_str(line, refresh=False)
            self._bar.update(1)
        elif step == 1 or step == self._steps or step % self._lines_every == 0:
            self.say(
                f"step {step:>{len(str(self._steps))}}/{self._steps}  {line}{self._left(step)}"
            )

    def _left(self, step: int) -> str:
        """Return the time left, at the speed of this process so far, including its evaluations and checkpoints."""
        began, since = self._began
        if not began < step < self._steps:
            return ""
        return (
            f"  {left_text((time.perf_counter() - since) / (step - began) * (self._steps - step))}"
        )

    def watched(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for number, batch in enumerate(batches, start=1):
            if self._bar is not None:
                self._bar.set_postfix_str(f"evaluating, batch {number:,}", refresh=True)
            yield batch

    def evaluation(self, step: int, found: Evaluation) -> None:
        """Files first, so that a line in evaluation.jsonl means that they are there, unless the disk was full."""
        self.evaluated = step
        for name, content in found.files.items():
            path, text = (
                self._folder / name,
                json.dumps(content, indent=1, ensure_ascii=False) + "\n",
            )
            try:
                write_atomically(path, text.encode())
            except OSError as error:
                self.say(f"note      {path} is not written ({error.strerror or error})")
        self._evaluations.append(
            {
                "step": step,
                **found.metrics,
                **{name: found.counts[name] for name in COUNTS},
                "seconds": found.seconds,
            }
        )
        self._events.add(
            step, {f"evaluation/{name}": value for name, value in found.metrics.items()}
        )
        self.say(
            f"held out after step {step}: {in_words(found.metrics)}  ({found.counts['sequences']:,} sequences)"
        )

    def lacks_evaluation(self, step: int) -> bool:
        return step not in self._evaluated_before

    def sync(self) -> None:
        self._log.sync()
        self._evaluations.sync()

    @property
    def totals(self) -> Totals:
        """Return the totals of the steps of this process without its first, unless there is no other."""
        if self._totals.packs or self._first is None:
            return self._totals
        return Totals()._plus(*self._first)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._events.close()
        self._log.close()
        self._evaluations.close()

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)


def _tag(name: str) -> str:
    """TensorBoard's name of a metric: `mlm_loss` is "loss/mlm", `loss` is "loss/total"."""
    what, _, kind = name.rpartition("_")
    return f"{kind}/{what or 'total'}"


def in_words(metrics: Mapping[str, Any]) -> str:
    """Metrics as people read them.

    Means, which begin with a loss: `loss 5.436  mlm 4.681 12.0%  nsp 0.755 51.9%`, accuracies as fractions.  Scores of
    predictions are written as they are: `exact 55.10  f1 61.25  questions 240`.
    """
    if "loss" not in metrics:
        words = (
            f"{name} {'none' if value is None else f'{value:,}' if isinstance(value, int) else f'{value:.2f}'}"
            for name, value in metrics.items()
        )
        return "  ".join(words) or "no labels in the file"
    groups: Dict[str, List[str]] = {}
    for name, value in metrics.items():
        what, _, kind = name.rpartition("_")
        groups.setdefault(what or kind, []).append(
            "none" if value is None else f"{value:.1%}" if kind == "accuracy" else f"{value:.3f}"
        )
    return "  ".join(" ".join([what, *values]) for what, values in groups.items())
