"""Predict every record of a file with a fine-tuned model, packed: one line of JSON per record, in file order.

RUN is the folder of a fine-tuning run, whose model/ answers with the run's settings, or a Hugging Face folder of a
fine-tuned model.  FILE has the form that the task learns from; labels in it are read with --score alone:

  questions        SQuAD's JSON, version 1.1 or 2; or JSONL, a question and its context a line
  texts, pairs     CSV, TSV with a header, or JSONL: --set task.text_column=NAME, task.second_text_column=NAME
  words            CoNLL, a word a line, sentences apart by an empty line; or JSONL with a list of words a line

each plain, .gz or .xz, or - for standard input (CoNLL for words, else JSONL).  What is too long for a row loses its
end, as in training; a question's paragraph is cut into windows.  A line of the answers has "record", from 1, and
"prediction":

  squad            the answer's text ("" for none), with "id", "probability" and, in version 2, "null_odds"
  single_label     the label, with "probability"
  multi_label      the labels, with "probabilities"
  regression       the number
  tokens           a label for each of "words"; null for a word beyond the row's end, or without a token

Without --output the answers go to standard output, and what is said about them to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Optional, Sequence

from ipu_packed_bert.commands.run_options import add_settings, add_trust
from ipu_packed_bert.processes.ranks import refuse_several
from ipu_packed_bert.settings.finetuning import TOKENS
from ipu_packed_bert.settings.reader import peek
from ipu_packed_bert.settings.user_task import trust_what_was_named
from ipu_packed_bert.tasks.files import STANDARD_INPUT, ExampleSource
from pack_data.cli.command import ArgumentParser, check_output, counted, progress_bar, typed
from pack_data.reading.files import write_atomically


def _parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = ArgumentParser(prog=typed("predict"), description=__doc__)
    parser.add_argument(
        "run", metavar="RUN", type=Path, help="a fine-tuning run, or a Hugging Face folder"
    )
    parser.add_argument("file", metavar="FILE", help="what to answer; - is standard input")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where the answers go, whole or not at all; else standard output",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file of --output")
    parser.add_argument(
        "--score",
        action="store_true",
        help="read the labels of FILE too, and print the scores as JSON, in percent but for correlations: of squad "
        "exact and f1, with null_answers also the best ones and their thresholds; single_label accuracy, macro_f1, "
        "matthews, and of two labels f1 of the second; multi_label micro_f1, macro_f1, all_right; regression pearson, "
        "spearman, mean_squared_error; tokens accuracy, and precision, recall and f1 of spans (B-X I-X), as seqeval's",
    )
    add_settings(
        parser,
        "override one setting of the run, any number of times: --set data.packer=none answers unpacked",
    )
    add_trust(parser)
    parser.rare("--engine", "--trust-task")
    args = parser.parse_args(argv)
    if args.overwrite and args.output is None:
        parser.error("--overwrite goes with --output")
    return args


def main(argv: Optional[Sequence[str]] = None) -> int:
    refuse_several("the answers")
    args = _parse(argv)
    if args.output is not None:
        check_output("--output", args.output, reads=[args.file])
        if args.output.exists() and not args.overwrite:
            raise ValueError(
                f"--output {args.output}: exists; name another file, or add --overwrite"
            )
    if args.file != STANDARD_INPUT and not Path(args.file).is_file():
        problem = "a folder" if Path(args.file).is_dir() else "no such file"
        raise ValueError(
            f"{args.file}: {problem}; name the records to answer, or - for standard input"
        )

    trust_what_was_named(args.trust_task, args.overrides)
    from ipu_packed_bert.tasks.examples import Asked
    from ipu_packed_bert.training import predictions

    say = partial(print, file=sys.stderr if args.output is None else sys.stdout, flush=True)
    trained = predictions.find_trained(args.run, peek("task.name", {}, args.overrides))
    say(f"model     {trained.description}")
    form = None
    if args.file == STANDARD_INPUT:  # which has no name that says what it holds
        form = "conll" if trained.tree["task"]["name"] == TOKENS else "jsonl"
    asked = Asked(ExampleSource.of(args.file, form), labels=args.score)
    with contextlib.closing(progress_bar(None, "tokenising", unit=" texts")) as bar:
        prepared = predictions.prepare(trained, asked, args.overrides, read=bar.update)
    task, packing = prepared.task, prepared.task.packs.packing
    with contextlib.closing(prepared.engine):
        if args.score and not task.scorable:
            raise ValueError(
                f"{asked.source}: has no labels to score by, or not for every record; leave out --score"
            )
        for note in task.notes:
            say(f"data      {note}")
        saved, padding = predictions.padding(task)
        say(
            f"packing   {counted(packing.sequences, 'sequence')} in {counted(packing.packs, 'row')} of"
            f" {packing.max_sequence_length}"
            f" ({packing.algorithm}), {packing.packing_factor:.3f} in a row; padding {padding.alone:.1%} of the slots"
            f" unpacked, {padding.packed:.1%} packed: {saved:,} rows saved"
        )
        say(f"engine    {prepared.engine.description}")
        started = time.perf_counter()
        predictions.compile_program(prepared)
        if prepared.config.engine.kind == "ipu":
            say(f"compiled  in {time.perf_counter() - started:.1f} s")
        started = time.perf_counter()
        with contextlib.closing(progress_bar(packing.packs, "answering", unit=" rows")) as bar:
            found = predictions.predict(prepared, seen=bar.update)
        seconds = time.perf_counter() - started
    text = "".join(f"{line}\n" for line in predictions.lines(found.answers)).encode()
    if args.output is None:
        sys.stdout.buffer.write(text)  # UTF-8, whatever the terminal's encoding
        sys.stdout.flush()
    else:
        write_atomically(args.output, text)
        say(f"answers   {args.output}, {len(found.answers):,} lines")
    say(
        f"speed     {packing.packs / found.seconds:,.1f} packs/s, {found.sequences / found.seconds:,.1f} sequences/s"
        f" ({found.seconds:.1f} s in the network, {seconds:.1f} s with the answers)"
    )
    if args.score:
        say(f"score     {json.dumps(found.metrics)}")
    return 0
