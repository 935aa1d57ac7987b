"""The command line of the packers: `python -m pack_data.PACKER`."""

from __future__ import annotations

import argparse
import json
from typing import Any, Callable, Dict, Optional, Sequence

from pack_data.cli.command import ArgumentParser, check_output, counted, depth_text, parse_depth, positive_int
from pack_data.lengths.options import add_histogram_arguments, histogram_from


def run_packer(
    argv: Optional[Sequence[str]],
    pack: Callable,
    *,
    name: str,
    description: str,
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    options: Callable[[argparse.Namespace], Dict[str, Any]] = lambda args: {},
    default_depth: Optional[int] = 3,
    rare: Sequence[str] = (),
) -> int:
    """The main of a packer's module: parse, pack, save the recipe, print the table or the JSON object.

    add_options adds the packer's own options to the parser; options turns them into keywords of `pack`. rare: those of
    them that --help leaves out.
    """
    parser = ArgumentParser(prog=f"python -m pack_data.{name}", description=description)
    add_histogram_arguments(parser)
    parser.add_argument(
        "--max-sequences-per-pack",
        type=parse_depth,
        default=default_depth,
        metavar="D",
        help=f"packing depth, a number or 'unlimited'; default {depth_text(default_depth)}",
    )
    parser.add_argument(
        "--multiple-of",
        type=positive_int,
        default=1,
        metavar="M",
        help="round each length up to a multiple of M, as context parallelism or FP8 want it",
    )
    add_options(parser)
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write the recipe as JSON: lengths that share a pack, and how often; which of your texts: pack_data.pack",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.rare("--synthetic", "--multiple-of", *rare)
    args = parser.parse_args(argv)
    if args.out:
        check_output("--out", args.out, reads=[args.histogram])

    given = histogram_from(args)
    histogram = given.rounded_up(args.multiple_of)
    packing = pack(histogram, max_sequences_per_pack=args.max_sequences_per_pack, **options(args))
    packing.check(histogram)
    if args.out:
        packing.save(args.out)
    if args.json:
        print(json.dumps(packing.to_json()))
    else:
        print(packing.table(histogram.name))
        if args.multiple_of > 1:
            added = counted(histogram.tokens - given.tokens, "slot")
            print(f"\nrounded up to multiples of {args.multiple_of}: {added} of the tokens above are rounding")
        if args.out:
            print(f"\nrecipe written to {args.out}")
    return 0
