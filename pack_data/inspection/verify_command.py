"""Verify a packed data set, or prove the lower bound of a packing: `packed-bert verify DIR|RECIPE`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Optional, Sequence

from pack_data.building.account import ACCOUNT, tokens_line
from pack_data.building.verify import verify
from pack_data.building.work_folder import check_not_half_replaced
from pack_data.cli.command import ArgumentParser, process_count, typed
from pack_data.cli.reading_options import add_columns, add_split
from pack_data.display.facts import with_unit
from pack_data.formats.detect import suffix_format
from pack_data.lengths.options import named_histogram
from pack_data.packing.packing import Packing, statement
from pack_data.reading.compressed import open_unpacked
from pack_data.reading.fields import said_of
from pack_data.reading.words import counted
from pack_data.store.data_set import MANIFEST

# Bytes at the beginning of a file that are looked at: white space may come first.
_HEAD_BYTES = 256


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Verify what the first argument names and print what was proved."""
    parser = ArgumentParser(
        prog=typed("verify"),
        description="Read a packed data set again and prove that every sequence is in it exactly once.\n\n"
        "Given a recipe (the file that `python -m pack_data.optimal --out` writes) instead of a data set, proves the\n"
        "recipe's lower bound in exact arithmetic and, with --histogram, that it packs exactly those sequences.\n"
        "pack_data/packing/checker.py does the same without any package, in about 200 lines.",
    )
    parser.add_argument("what", metavar="DIR|RECIPE", help="a packed data set, or a recipe")
    parser.add_argument(
        "--workers", type=process_count, metavar="N", help="processes (default: one per core)"
    )
    parser.add_argument(
        "--histogram",
        metavar="NAME|FILE|DIR",
        help="the lengths that the recipe packs: anything that `packed-bert look` takes",
    )
    add_columns(parser)
    add_split(parser)
    args = parser.parse_args(argv)
    if Path(args.what).name == MANIFEST:
        raise ValueError(f"{args.what}: the manifest of a data set; pass its directory")
    if Path(args.what).is_file():
        if args.workers is not None:
            raise ValueError(
                "--workers: applies to a data set, not to a recipe; leave the option out"
            )
        _refuse_data(args.what)
        _prove_recipe(args)
        return 0
    if args.histogram or args.columns or args.split:
        raise ValueError(
            "--histogram, --columns, --split: apply to a recipe; a data set is checked against its own packs"
        )
    _verify_data_set(args.what, args.workers)
    return 0


def _verify_data_set(directory: str, workers: Optional[int]) -> None:
    try:
        verified = verify(directory, workers)
    except ValueError:
        check_not_half_replaced(Path(directory))
        raise
    manifest = verified.manifest
    account = manifest.made_with.get(ACCOUNT)
    proof_begins = f"{tokens_line(account)}. Every sequence is there: " if account else ""
    bound = ""
    if manifest.lower_bound is not None:
        excess = manifest.packs - manifest.lower_bound
        bound = f", {excess:,} above the lower bound of {manifest.lower_bound:,}"
    print(
        f"{directory}: intact. {proof_begins}{counted(manifest.sequences, 'sequence')}, each exactly once, in "
        f"{counted(manifest.packs, 'pack')}{bound}; "
        f"{with_unit(manifest.efficiency, 'of the slots')} used; {with_unit(verified.bytes, 'bytes')} in "
        f"{counted(len(manifest.shards), 'shard')} read"
    )


def _refuse_data(path: str) -> None:
    """Raise ValueError for a file that is no recipe but holds sequences, lengths or text."""
    with open_unpacked(path) as file:
        begins_as_recipe = file.read(_HEAD_BYTES).lstrip()[:1] in (b"{", b"")
    is_jsonl = suffix_format(path) == "jsonl" and not path.lower().endswith(".json")
    if is_jsonl or not begins_as_recipe:
        raise ValueError(
            f"{path}: neither a packed data set nor a recipe; packed-bert look shows the lengths of its sequences, and "
            "packed-bert build packs it: --from for tokens, --corpus for texts"
        )


def _prove_recipe(args: argparse.Namespace) -> None:
    """Prove the recipe's bound; with a source of lengths, prove that the recipe packs exactly those."""
    packing = Packing.load(args.what)
    histogram = None
    if args.histogram is not None:
        S = packing.max_sequence_length
        histogram = named_histogram(args.histogram, S, args.columns, args.split)
    with said_of(args.what):
        proved = statement(packing)
        if histogram is not None:
            packing.check(histogram)
    print(proved)
    if histogram is not None:
        sequences = counted(histogram.sequences, "sequence")
        print(f"it packs exactly the {sequences} of {args.histogram}")
