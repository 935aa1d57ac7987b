"""Convert between a run and a Hugging Face directory.

packed-bert export RUN DIR              # the newest checkpoint of pre-training -> a directory for transformers
packed-bert export --import DIR RUN     # a directory -> a run to start from
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Optional, Sequence

from ipu_packed_bert.run_files.folder import CONFIG
from pack_data.cli.parser import ArgumentParser, runnable, typed
from pack_data.cli.terminal import progress_bar
from pack_data.reading.words import counted


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Convert a run to a Hugging Face directory or, with --import, back."""
    parser = ArgumentParser(prog=typed("export"), description=__doc__)
    parser.add_argument(
        "--import",
        action="store_true",
        dest="reverse",
        help="convert a Hugging Face directory to a run",
    )
    parser.add_argument("source", type=Path, help="a run; with --import a Hugging Face directory")
    parser.add_argument("target", type=Path, help="the directory to write")
    parser.add_argument(
        "--vocabulary",
        type=Path,
        metavar="FILE",
        help="vocab.txt or tokenizer.json of the run, if its data set no longer has it",
    )
    args = parser.parse_args(argv)
    if not args.source.is_dir():
        kind = "a Hugging Face model" if args.reverse else "a run (by default in runs/)"
        raise ValueError(f"{args.source}: no such directory; pass the directory of {kind}")
    from ipu_packed_bert.training.export import export_run, import_folder  # torch

    if args.reverse:
        if args.vocabulary:
            parser.error("--vocabulary does not apply to --import, which reads the directory's own")
        with progress_bar(None, f"reading {args.source}", at_once=True):
            loaded = import_folder(args.source, args.target)
        run = shlex.quote(str(args.target))
        config = shlex.quote(str(args.target / CONFIG))
        print(
            f"{args.target}: to train it, use {runnable('pretrain')} --config {config} --data DATA --start-from {run}"
        )
        if loaded.fresh:
            print(f"not in the directory, initialised: {', '.join(loaded.fresh)}")
        if loaded.unused:
            print(f"in the directory, not used: {', '.join(loaded.unused)}")
        return 0

    with progress_bar(None, f"writing {args.target}", at_once=True):
        exported = export_run(args.source, args.target, vocabulary=args.vocabulary)
    print(
        f"{args.target}: the model after {counted(exported.step, 'update')}, for transformers; "
        "README.md is its model card"
    )
    if exported.note:
        print(f"note: {exported.note}")
    return 0
