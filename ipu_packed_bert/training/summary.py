"""What a run came to: summary.json, the last lines a person reads, which say the same, and the picture."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Iterator, List, Mapping, Optional, Sequence, Tuple

from ipu_packed_bert.data.constant_baseline import BESIDE
from ipu_packed_bert.run_files.folder import EVALUATIONS, LOG, PICTURE, SUMMARY, read_log
from ipu_packed_bert.training.compare_unpacked import EXPECTED, SideBySide, compare_unpacked
from ipu_packed_bert.training.log import RunLog, Totals, in_words
from ipu_packed_bert.training.loop import Outcome
from ipu_packed_bert.training.picture import draw_curves, padding_avoided
from ipu_packed_bert.training.prepared import Prepared, resume_command
from pack_data.cli.command import NotFinite, typed
from pack_data.display.table import text_table
from pack_data.reading.fields import one_line
from pack_data.reading.files import write_atomically

_NOT_FINITE = "not finite"

# Of a record of evaluation.jsonl: what is no metric.
_NO_METRICS = ("packs", "tokens", "seconds")
_WIDTHS = (20, 10, 8, 0)  # of the columns of the tables that are printed below each other


@dataclass(frozen=True)
class _RunSummary:
    """The fields of summary.json."""

    task: str
    stopped_by: Optional[str]  # SIGINT, SIGTERM or "not finite"; None: all updates were made
    steps: int  # updates made, those before a resumption included
    steps_planned: int
    packs: int
    sequences: int
    tokens: int
    seconds: float  # of these updates, in all processes that made them
    sequences_per_second: float  # of the last process, without its first update, which warms up
    tokens_per_second: float
    packing_factor: float  # sequences in a pack
    padding_avoided: float  # a fraction: see run_picture.padding_avoided
    first_loss: Optional[float]
    loss: Optional[float]  # of the last update
    held_out: Optional[
        Mapping[str, Any]
    ]  # step, sequences and metrics of the last evaluation, and a baseline's
    compare_unpacked: Optional[Mapping[str, Any]]  # SideBySide.to_json

    def lines(self, *, precision: str) -> List[str]:
        """For people: what was learnt, how fast, and what the same sequences take unpacked."""
        made = f"{self.steps:,} updates, {self.sequences:,} sequences, {_time(self.seconds)}"
        losses = " -> ".join(
            "none" if loss is None else f"{loss:.3f}" for loss in (self.first_loss, self.loss)
        )
        speed = (
            f"{self.sequences_per_second:,.1f} sequences/s, {self.tokens_per_second:,.0f} tokens/s"
        )
        padding = (
            f"{self.padding_avoided:.2%} avoided: {self.packing_factor:.3f} sequences in a pack"
        )
        rows = []
        if self.stopped_by:
            where = f"after update {self.steps:,} of {self.steps_planned:,}"
            rows.append(("stopped", f"by {self.stopped_by} {where}; saved"))
        if self.steps:
            rows += [
                ("trained", f"loss {losses} in {made}"),
                ("speed", speed),
                ("padding", padding),
            ]
        if self.held_out is not None:
            rows += _labelled("held out", _held_out(self.held_out))
            right, constant = (
                self.held_out.get(name) for name in ("mlm_accuracy", "most_frequent_token_accuracy")
            )
            if right is not None and constant is not None and right < constant:
                rows.append(
                    (
                        "note",
                        "nothing is learnt yet: always the most frequent token is right more often",
                    )
                )
        if self.compare_unpacked is not None:
            rows += _labelled("unpacked", _compared(self.compare_unpacked, precision))
        return [f"{label:<9} {text}".rstrip() for label, text in rows]


def finish(run: Prepared, folder: Path, log: RunLog, outcome: Outcome) -> None:
    """Write the summary and the picture of a run after its last update, and print what it came to.

    It is compared with unpacked rows before that if the configuration says so. The last checkpoint is saved already
    and stays as it is. A run that was stopped is not compared.
    """
    complete = outcome.step == run.steps
    compared, problem = (
        _compare(run) if complete and run.config.run.compare_unpacked else (None, "")
    )
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
    for line in summary.lines(precision=run.config.engine.precision):
        print(line)
    if problem:
        print(f"unpacked  not compared: {problem}")
    if summary.steps:
        print(
            f"picture   {_picture(summary, folder, records, evaluations, run.task.max_sequence_length)}"
        )
    quoted = shlex.quote(str(folder))
    print(f"run       {folder}  (tensorboard --logdir {quoted})")
    if not summary.steps:  # there was nothing to learn from
        return
    resume = resume_command(run.config, folder)
    print(f"continue  {resume} {run.longer}" if complete else f"resume    {resume}")
    if run.config.command == "pretrain":
        print(f"use it    {typed('export')} {quoted} DIR  (a folder for transformers)")


@contextlib.contextmanager
def summary_if_not_finite(run: Prepared, folder: Path, log: RunLog) -> Iterator[None]:
    """Write the summary of a run that ends inside because a value is not finite; its error says the rest."""
    try:
        yield
    except NotFinite:
        with contextlib.suppress(OSError):
            records, evaluations = read_log(folder / LOG), read_log(folder / EVALUATIONS)
            # Without a baseline: other ranks wait, so no data are read.
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
    packs, sequences, tokens, seconds = (
        sum(record[name] for record in records)
        for name in ("packs", "sequences", "tokens", "seconds")
    )
    held_out = None
    if evaluations:
        metrics = {
            name: value for name, value in evaluations[-1].items() if name not in _NO_METRICS
        }
        held_out = {**metrics, **(baseline or {})}
    return _RunSummary(
        task=run.config.task.name,
        stopped_by=stopped_by,
        steps=records[-1]["step"] if records else 0,
        steps_planned=run.steps,
        packs=packs,
        sequences=sequences,
        tokens=tokens,
        seconds=seconds,
        sequences_per_second=totals.sequences_per_second,
        tokens_per_second=totals.tokens_per_second,
        packing_factor=sequences / packs if packs else 1.0,
        padding_avoided=padding_avoided(packs, sequences, tokens, run.task.max_sequence_length),
        first_loss=records[0].get("loss") if records else None,
        loss=records[-1].get("loss") if records else None,
        held_out=held_out,
        compare_unpacked=None if compared is None else compared.to_json(),
    )


def _write(summary: _RunSummary, folder: Path) -> None:
    text = json.dumps(_finite(asdict(summary)), indent=1, allow_nan=False)
    write_atomically(folder / SUMMARY, (text + "\n").encode())


def _compare(run: Prepared) -> Tuple[Optional[SideBySide], str]:
    """Return the comparison with unpacked rows, or why there is none."""
    if run.engine.share[1] > 1:
        return None, "takes one process"
    try:
        compared = compare_unpacked(
            run.engine, run.batches, updates=run.config.run.compare_unpacked
        )
    # Unpacked rows may need more memory, or more time than somebody has; the run is done, and has its summary.
    except (ValueError, KeyboardInterrupt) as error:
        return None, one_line(error) or "interrupted"
    return compared, "" if compared else "IPUs need a second program for that"


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


def _labelled(label: str, lines: List[str]) -> List[Tuple[str, str]]:
    return [(label if not number else "", line) for number, line in enumerate(lines)]


def _held_out(found: Mapping[str, Any]) -> List[str]:
    """Return the metrics of the last evaluation, with the scores of a baseline if there are any."""
    if found.get("unigram_loss") is None:
        metrics = {
            name: value for name, value in found.items() if name not in ("step", "sequences")
        }
        return [in_words(metrics)]
    cells = [("", "this model", "baseline", "")]
    for what, model, constant, words in BESIDE:
        cells.append((what, _number(found, model), _number(found, constant), words))
    return text_table(cells, left=(0, 3), widths=_WIDTHS)


def _number(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    if value is None:
        return "none"
    return f"{value:.1%}" if name.endswith("accuracy") else f"{value:.3f}"


def _compared(found: Mapping[str, Any], precision: str) -> List[str]:
    packed, unpacked = (found[f"{side}_sequences_per_second"] for side in ("packed", "unpacked"))
    words = (
        f"{found['speedup']:.3f} times as fast; the packing factor is {found['packing_factor']:.3f}"
    )
    loss, gradients = found["loss_difference"], found["gradient_difference"]
    rows = text_table(
        [
            ("", "packed", "unpacked", ""),
            ("sequences/s", f"{packed:,.1f}", f"{unpacked:,.1f}", words),
        ],
        left=(0, 3),
        widths=_WIDTHS,
    )
    limit = EXPECTED[precision]
    verdict = (
        "the same updates"
        if gradients <= limit
        else f"MORE than {limit:.0e}, the rounding of {precision}"
    )
    return [
        *rows,
        f"largest relative difference: loss {loss:.0e}, gradients {gradients:.0e}: {verdict}",
    ]


def _time(seconds: float) -> str:
    minutes, rest = divmod(int(round(seconds)), 60)
    return f"{minutes:,} min {rest} s" if minutes else f"{seconds:.1f} s"


def _finite(value: Any) -> Any:
    """With null for what JSON has no word for."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
