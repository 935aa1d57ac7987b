"""Convert between a run and a Hugging Face directory.

packed-bert export RUN DIR              # the newest checkpoint of pre-training -> a directory for transformers
packed-bert export --import DIR RUN     # a directory -> a run to start from
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Optional, Sequence

from ipu_packed_bert.run_files.folder import CONFIG
from ipu_packed_bert.training.export import export_run, import_folder
from pack_data.cli.command import ArgumentParser, progress_bar, typed


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(prog=typed("export"), description=__doc__)
    parser.add_argument(
        "--import",
        action="store_true",
        dest="reverse",
        help="read the first folder from Hugging Face's form, write a run",
    )
    parser.add_argument("source", type=Path, help="a run; with --import a Hugging Face folder")
    parser.add_argument("target", type=Path, help="a new folder")
    parser.add_argument(
        "--vocabulary",
        type=Path,
        metavar="FILE",
        help="vocab.txt or tokenizer.json of the run, where it is no longer beside its data set",
    )
    args = parser.parse_args(argv)
    if args.reverse:
        if args.vocabulary:
            parser.error("--vocabulary is for writing a folder; one that is read has its own")
        with progress_bar(None, f"reading {args.source}", at_once=True):
            loaded = import_folder(args.source, args.target)
        print(
            f"{args.target}: begin with it by {typed('pretrain')} --config "
            f"{shlex.quote(str(args.target / CONFIG))} --data DATA --start-from {shlex.quote(str(args.target))}"
        )
        for names, what in (
            (loaded.fresh, "initialised, not in the folder"),
            (loaded.unused, "in the folder, left out"),
        ):
            if names:
                print(f"{what}: {', '.join(names)}")
        return 0
    with progress_bar(None, f"writing {args.target}", at_once=True):
        exported = export_run(args.source, args.target, vocabulary=args.vocabulary)
    print(
        f"{args.target}: the model after {exported.step:,} updates, as transformers loads it; README.md is its card"
    )
    if exported.note:
        print(f"note: {exported.note}")
    return 0
