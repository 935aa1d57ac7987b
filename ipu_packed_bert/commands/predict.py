"""Predict every record of a file with a fine-tuned model, packed: one line of JSON per record, in file order.

RUN is the directory of a fine-tuning run, used with the run's settings, or of a fine-tuned Hugging Face model. FILE has
the format of the task's training data; its labels are read only with --score:

  questions        SQuAD's JSON, version 1.1 or 2; or JSONL with a question and its context per line
  texts, pairs     CSV or TSV with a header, or JSONL: --set task.text_column=NAME, task.second_text_column=NAME
  words            CoNLL, one word per line, an empty line between sentences; CoNLL-U (.conllu) with the labels in the
                   column --set task.labels_column=upos; or JSONL with a list of words per line

Parquet (.parquet) is read where JSONL is. Files may be plain, .gz or .xz; - is standard input (CoNLL for words, else
JSONL). Examples that are too long for a row are truncated, as in training; paragraphs of questions are divided into
windows. Each output line has "record", counted from 1, and "prediction":

  squad            the text of the answer ("" for none), with "id", "probability" and, in version 2, "null_odds"
  single_label     the label, with "probability"
  multi_label      the labels, with "probabilities"
  regression       the number
  tokens           a label for each of "words"; null for words beyond the end of the row or without a token

Without --output, predictions go to standard output and progress to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

from ipu_packed_bert.commands.run_options import add_settings
from ipu_packed_bert.processes.ranks import refuse_several
from ipu_packed_bert.settings.command_line import RunOptions
from ipu_packed_bert.settings.finetuning import TOKENS, affects_predictions
from ipu_packed_bert.settings.reader import peek
from ipu_packed_bert.settings.user_task import trust_what_was_named
from ipu_packed_bert.tasks.files import STANDARD_INPUT, ExampleSource
from pack_data.cli.command import ArgumentParser, check_output, typed
from pack_data.cli.options import add_options
from pack_data.cli.terminal import progress_bar
from pack_data.cli.timing import time_text
from pack_data.display.facts import number, with_unit
from pack_data.reading.declare import settings_in
from pack_data.reading.durable import write_atomically
from pack_data.reading.words import counted
from pack_data.store.quantities import sequences_per_second


def _parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = ArgumentParser(prog=typed("predict"), description=__doc__)
    parser.accepts = affects_predictions
    parser.add_argument(
        "run", metavar="RUN", type=Path, help="a fine-tuning run, or a Hugging Face directory"
    )
    parser.add_argument("file", metavar="FILE", help="records to predict; - is standard input")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="file for the predictions, written only once complete (default: standard output)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file of --output")
    parser.add_argument(
        "--score",
        action="store_true",
        help="also read the labels of FILE; records without a valid label are predicted, counted and left out of the "
        "scores. Print scores as JSON, in percent except correlations. squad: exact, f1 "
        "and, with null_answers, the best of both and their thresholds; single_label: accuracy, "
        "majority_accuracy (of always predicting FILE's most frequent label), macro_f1, matthews and, for two labels, "
        "f1 of the second; multi_label: micro_f1, macro_f1, all_right; regression: pearson, "
        "spearman, mean_squared_error; tokens: accuracy, majority_accuracy, and precision, recall and f1 of spans "
        "(B-X I-X) like seqeval",
    )
    add_settings(
        parser,
        "override a setting of the run; may be repeated: --set data.packer=none predicts without packing",
    )
    add_options(parser, [settings_in(RunOptions)["trust_task"]])
    parser.set_defaults(trust_task=[])
    parser.rare("--engine")
    args = parser.parse_args(argv)
    if args.overwrite and args.output is None:
        parser.error("--overwrite needs --output")
    return args


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Predict the records of a file, and write or print the predictions."""
    refuse_several("the answers")
    args = _parse(argv)
    if args.output is not None:
        check_output("--output", args.output, reads=[args.file])
        if args.output.exists() and not args.overwrite:
            raise ValueError(
                f"--output {args.output}: exists; choose another file, or add --overwrite"
            )
    if args.file != STANDARD_INPUT and not Path(args.file).is_file():
        problem = "a directory" if Path(args.file).is_dir() else "no such file"
        raise ValueError(
            f"{args.file}: {problem}; pass a file with the records to predict, or - for standard input"
        )

    trust_what_was_named(args.trust_task, args.overrides)
    from ipu_packed_bert.tasks.examples import Asked
    from ipu_packed_bert.training import predictions

    say = partial(print, file=sys.stderr if args.output is None else sys.stdout, flush=True)
    trained = predictions.find_trained(args.run, peek("task.name", {}, args.overrides))
    say(f"model     {trained.description}")
    form = None
    if args.file == STANDARD_INPUT:  # has no file name that determines the format
        form = "conll" if trained.tree["task"]["name"] == TOKENS else "jsonl"
    asked = Asked(ExampleSource.of(args.file, form), labels=args.score)
    with contextlib.closing(progress_bar(None, "tokenising", unit=" texts")) as bar:
        prepared = predictions.prepare(trained, asked, args.overrides, read=bar.update)
    task = prepared.task
    packing = task.packs.packing
    with contextlib.closing(prepared.engine):
        if args.score and not task.scorable:
            reasons = "; ".join(task.sources["evaluation"].unlabelled[:1])
            raise ValueError(
                f"{reasons or asked.source}: no record has a label that can be scored; add labels, or leave out --score"
            )
        for note in task.notes:
            say(f"data      {note}")
        saved, padding = predictions.padding(task)
        say(
            f"packing   {counted(packing.sequences, 'sequence')} in {counted(packing.packs, 'row')} of"
            f" {packing.max_sequence_length}"
            f" ({packing.algorithm}), {number(packing.packing_factor, 'sequences per pack')} in a row; padding"
            f" {number(padding.alone, 'share')} of the slots unpacked, {number(padding.packed, 'share')} packed:"
            f" {counted(saved, 'row')} saved"
        )
        say(f"engine    {prepared.engine.description}")
        started = time.perf_counter()
        predictions.compile_program(prepared)
        if prepared.config.engine.kind == "ipu":
            say(f"compiled  in {time_text(time.perf_counter() - started)}")
        started = time.perf_counter()
        with contextlib.closing(progress_bar(packing.packs, "predicting", unit=" rows")) as bar:
            result = predictions.predict(prepared, seen=bar.update)
        seconds = time.perf_counter() - started

    text = "".join(f"{line}\n" for line in predictions.lines(result.answers)).encode()
    if args.output is None:
        sys.stdout.buffer.write(text)  # UTF-8 in every terminal
        sys.stdout.flush()
    else:
        write_atomically(args.output, text)
        say(f"answers   {args.output}, {counted(len(result.answers), 'line')}")
    pack_rate = packing.packs / result.seconds
    sequence_rate = sequences_per_second(result.sequences, result.seconds)
    say(
        f"speed     {with_unit(pack_rate, 'packs/s')}, {with_unit(sequence_rate, 'sequences/s')}"
        f" ({time_text(result.seconds)} in the network, {time_text(seconds)} including the answers)"
    )
    if args.score:
        accounts = task.accounts["evaluation"]
        scores = dict(result.metrics)
        scores["not_scored"] = sum(accounts["scored"].left_out.values())
        scores["accounts"] = {unit: dataclasses.asdict(accounts[unit]) for unit in accounts}
        say(_score_text(scores))
    return 0


def _score_text(metrics: Mapping[str, Any]) -> str:
    """Return the scores as JSON and, on a second line, the comparison with a constant answer."""
    from ipu_packed_bert.tasks.scores import verdict_of

    text = f"score     {json.dumps(metrics)}"
    verdict = verdict_of(metrics, "this file")
    return f"{text}\nverdict   {verdict}" if verdict else text
