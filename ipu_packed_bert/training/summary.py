"""The results of a run: summary.json, the same as lines of text, and the picture of its curves."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Optional, Sequence, Tuple

from ipu_packed_bert.data.constant_baseline import BESIDE
from ipu_packed_bert.run_files.folder import EVALUATIONS, LOG, PICTURE, SUMMARY, read_log
from ipu_packed_bert.tasks.scores import verdict_of
from ipu_packed_bert.training.compare_unpacked import EXPECTED, SideBySide, compare_unpacked
from ipu_packed_bert.training.log import RunLog, Totals, metric_unit
from ipu_packed_bert.training.loop import Outcome
from ipu_packed_bert.training.picture import draw_curves
from ipu_packed_bert.training.prepared import Prepared, resume_command
from pack_data.cli.parser import runnable
from pack_data.cli.timing import time_text
from pack_data.display.facts import (
    Fact,
    Facts,
    number,
    printed,
    quantity,
    quantity_with_unit,
    with_unit,
)
from pack_data.display.lines import plain
from pack_data.reading.durable import write_atomically
from pack_data.reading.fields import one_line
from pack_data.reading.words import NotFinite, counted
from pack_data.store import quantities

_NOT_FINITE = "not finite"

# Fields of a record of evaluation.jsonl that a summary leaves out.
_NO_METRICS = ("packs", "tokens", "seconds")


@dataclass(frozen=True)
class _RunSummary:
    """The fields of summary.json."""

    task: str
    # A signal such as SIGTERM, or "not finite"; None: all updates were made.
    stopped_by: Optional[str]
    steps: int  # updates made, including those before a resumption
    steps_planned: int
    packs: int
    sequences: int
    tokens: int
    seconds: float  # spent in these updates, also by earlier processes
    sequences_per_second: float  # in the last process, without its first update, which warms up
    tokens_per_second: float
    packing_factor: float  # sequences per pack
    padding_avoided: float  # a fraction, see quantities.padding_avoided
    first_loss: Optional[float]
    loss: Optional[float]  # of the last update
    # Step, sequences and metrics of the last evaluation, and those of constant predictions.
    held_out: Optional[Mapping[str, Any]]
    compare_unpacked: Optional[Mapping[str, Any]]  # SideBySide.to_json
    accounts: Optional[Mapping[str, Any]]  # ExampleTask.accounts

    def facts(self, *, precision: str) -> Facts:
        """Return the summary for users: losses, speed, and the comparison with unpacked training."""
        rows = {}
        if self.stopped_by:
            last = f"after update {self.steps:,} of {self.steps_planned:,}"
            rows["stopped"] = Fact("stopped", f"by {self.stopped_by} {last}; saved")
        if self.steps:
            work = f"{counted(self.sequences, 'sequence')} in {time_text(self.seconds)}"
            first = f"{_number(self.first_loss, 'nats')} in the first update"
            tokens = quantity_with_unit("tokens_per_second", self.tokens_per_second)
            factor = quantity_with_unit("packing_factor", self.packing_factor)
            rows["steps"] = Fact("updates", self.steps, note=work)
            rows["loss"] = Fact("loss", _or_none(self.loss), "nats", note=first)
            rates = quantity("sequences_per_second", self.sequences_per_second, tokens)
            rows["sequences_per_second"] = rates._replace(name="speed")
            rows["padding_avoided"] = quantity("padding_avoided", self.padding_avoided, factor)
        if self.held_out is not None:
            rows.update(_held_out(self.held_out, self.steps))
            verdict = verdict_of(self.held_out, "the training file") or _beside_unigram(
                self.held_out
            )
            if verdict:
                rows["verdict"] = Fact("verdict", verdict)
        if self.compare_unpacked is not None:
            rows.update(_compared(self.compare_unpacked, precision))
        return Facts("", rows)


def finish(run: Prepared, folder: Path, log: RunLog, outcome: Outcome) -> None:
    """Write the summary and the picture of a run after its last update, and print the summary.

    With `run.compare_unpacked`, a run that was not stopped is first compared with unpacked training. The last
    checkpoint is saved already.
    """
    complete = outcome.step == run.steps
    compared = None
    problem = ""
    if complete and run.config.run.compare_unpacked:
        compared, problem = _compare(run)
    records = read_log(folder / LOG)
    evaluations = read_log(folder / EVALUATIONS)
    stopped_by = signal.Signals(outcome.stopped_by).name if outcome.stopped_by else None
    summary = _summarise(
        run,
        log.totals,
        records,
        evaluations,
        stopped_by,
        baseline=run.baseline(),
        compared=compared,
    )
    _write(summary, folder)

    print()
    print(printed(summary.facts(precision=run.config.engine.precision)))
    if problem:
        print(f"unpacked  not compared: {problem}")
    if summary.steps:
        picture = _picture(summary, folder, records, evaluations, run.task.max_sequence_length)
        print(f"picture   {picture}")
    quoted = shlex.quote(str(folder))
    print(f"run       {folder}  (tensorboard --logdir {quoted})")
    if not summary.steps:  # nothing was trained
        return
    resume = resume_command(run.config, folder)
    print(f"continue  {resume} {run.longer}" if complete else f"resume    {resume}")
    if run.config.command == "pretrain":
        print(f"use it    {runnable('export')} {quoted} DIR  (a directory for transformers)")


@contextlib.contextmanager
def summary_if_not_finite(run: Prepared, folder: Path, log: RunLog) -> Iterator[None]:
    """Write the summary of a run if a value that is not finite ends it inside the context."""
    try:
        yield
    except NotFinite:
        with contextlib.suppress(OSError):
            records = read_log(folder / LOG)
            evaluations = read_log(folder / EVALUATIONS)
            # Without a baseline, which would read data while other ranks wait.
            _write(_summarise(run, log.totals, records, evaluations, _NOT_FINITE), folder)
        raise


def _summarise(
    run: Prepared,
    totals: Totals,
    records: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    stopped_by: Optional[str],
    *,
    baseline: Optional[Mapping[str, float]] = None,
    compared: Optional[SideBySide] = None,
) -> _RunSummary:
    """Return the summary of a run from its logs; ``totals`` are those of this process."""
    first: Mapping[str, Any] = records[0] if records else {}
    last: Mapping[str, Any] = records[-1] if records else {}
    counts = {}
    for name in ("packs", "sequences", "tokens", "seconds"):
        counts[name] = sum(record[name] for record in records)
    seconds = counts.pop("seconds")
    held_out = None
    if evaluations:
        held_out = {**evaluations[-1], **(baseline or {})}
        for name in _NO_METRICS:
            held_out.pop(name, None)
    return _RunSummary(
        task=run.config.task.name,
        stopped_by=stopped_by,
        steps=last.get("step", 0),
        steps_planned=run.steps,
        **counts,
        seconds=seconds,
        sequences_per_second=totals.sequences_per_second,
        tokens_per_second=totals.tokens_per_second,
        packing_factor=quantities.packing_factor(counts["sequences"], counts["packs"]),
        padding_avoided=quantities.padding_avoided(
            **counts, max_sequence_length=run.task.max_sequence_length
        ),
        first_loss=first.get("loss"),
        loss=last.get("loss"),
        held_out=held_out,
        compare_unpacked=None if compared is None else compared.to_json(),
        accounts=getattr(run.task, "accounts", None),
    )


def _write(summary: _RunSummary, folder: Path) -> None:
    text = json.dumps(plain(asdict(summary)), indent=1, allow_nan=False)
    write_atomically(folder / SUMMARY, (text + "\n").encode())


def _compare(run: Prepared) -> Tuple[Optional[SideBySide], str]:
    """Return the comparison with unpacked rows, or why there is none."""
    if run.engine.share[1] > 1:
        return None, "needs one process"
    try:
        compared = compare_unpacked(
            run.engine, run.batches, updates=run.config.run.compare_unpacked
        )
    # The run is complete, so a lack of memory or an interruption must not prevent its summary.
    except (ValueError, KeyboardInterrupt) as error:
        return None, one_line(error) or "interrupted"
    if compared is None:
        return None, "IPUs would need a second program"
    return compared, ""


def _picture(
    summary: _RunSummary,
    folder: Path,
    records: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    max_sequence_length: int,
) -> str:
    """Draw the picture; return its path, or why there is none."""
    unigram = (summary.held_out or {}).get("unigram_loss")
    title = f"{summary.task}, {folder.name}"
    try:
        draw_curves(
            folder / PICTURE,
            records,
            evaluations,
            title=title,
            max_sequence_length=max_sequence_length,
            unigram=unigram,
        )
    except (ValueError, OSError) as error:
        return f"not drawn: {error}"
    return str(folder / PICTURE)


def _or_none(value: Optional[float]) -> Any:
    return "none" if value is None else value


def _number(value: Optional[float], unit: str) -> str:
    return "none" if value is None else number(value, unit)


def _held_out(evaluation: Mapping[str, Any], steps: int) -> Dict[str, Fact]:
    """Return the metrics of the last evaluation, each with that of a constant prediction if there is one.

    A run that was stopped after `steps` updates may have been evaluated earlier; then the names state the update.
    """
    step = evaluation.get("step")
    about = "held out" if step in (None, steps) else f"held out after update {step:,}"
    baselines = {name: (label, key, words) for label, name, key, words in BESIDE}
    constants = [key for _, key, _ in baselines.values()]
    rows = {}
    for name, value in evaluation.items():
        if name in ("step", "sequences", *constants):
            continue
        unit = metric_unit(name, evaluation)
        label, key, words = baselines.get(name, (name.replace("_", " "), "", ""))
        note = f"{words}: {_number(evaluation[key], unit)}" if key in evaluation else ""
        rows[f"held out {name}"] = Fact(f"{about}: {label}", _or_none(value), unit, note=note)
    return rows


def _beside_unigram(evaluation: Mapping[str, Any]) -> str:
    """Compare the loss of masked tokens with the unigram baseline in a sentence; "" without both."""
    loss = evaluation.get("mlm_loss")
    unigram = evaluation.get("unigram_loss")
    if loss is None or unigram is None:
        return ""
    relation = "better" if loss < unigram else "no better"
    return (
        f"{with_unit(loss, 'nats')} per masked token: {relation} than the unigram baseline, {number(unigram, 'nats')}, "
        "which knows only how frequent each token is"
    )


def _compared(comparison: Mapping[str, Any], precision: str) -> Dict[str, Fact]:
    """Return the speeds and the differences of packed and unpacked updates."""
    packed = with_unit(comparison["packed_sequences_per_second"], "sequences/s")
    unpacked = number(comparison["unpacked_sequences_per_second"], "sequences/s")
    low, high = (number(ratio, "times") for ratio in comparison["speedup_quartiles"])
    factor = quantity_with_unit("packing_factor", comparison["packing_factor"])
    # Not the quotient of the two medians beside it. Other work on the machine spreads the quartiles.
    speeds = (
        f"quartiles of {counted(comparison['updates'], 'pair')}: {low} to {high}; {packed} packed, {unpacked} "
        f"unpacked; {factor}"
    )
    gradients = comparison["gradient_difference"]
    limit = EXPECTED[precision]
    verdict = f"MORE than {number(limit, 'relative')}, the rounding of {precision}"
    if gradients <= limit:
        verdict = "the same updates"
    largest = "largest relative difference"
    return {
        "speedup": Fact("speed-up of packing", comparison["speedup"], "times", note=speeds),
        "loss_difference": Fact(
            "loss, packed and unpacked", comparison["loss_difference"], "relative", note=largest
        ),
        "gradient_difference": Fact(
            "gradients, packed and unpacked", gradients, "relative", note=f"{largest}: {verdict}"
        ),
    }
