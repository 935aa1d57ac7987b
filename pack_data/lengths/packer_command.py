"""The command line of the packers: `python -m pack_data.PACKER`."""

from __future__ import annotations

import argparse
import json
from typing import Any, Callable, Mapping, Optional, Sequence

from pack_data.cli.command import (
    ArgumentParser,
    check_output,
    depth_text,
    parse_depth,
    positive_int,
)
from pack_data.display.accounting import table
from pack_data.lengths.options import add_histogram_arguments, histogram_from
from pack_data.packing.histogram import PUBLISHED
from pack_data.packing.packing import Packing
from pack_data.reading.words import counted
from pack_data.solver.free_slots import cost_of_depth


def run_packer(
    argv: Optional[Sequence[str]] = None,
    *,
    pack: Callable[..., Packing],
    name: str,
    description: str,
    options: Mapping[str, Mapping[str, Any]] = {},
    default_depth: Optional[int] = 3,
    own_depth: Optional[int] = None,
    rare: Sequence[str] = (),
    statement: Optional[Callable[[Packing], str]] = None,
) -> int:
    """Run a packer's command: parse, pack, save the recipe, print the table or the JSON object.

    Args:
        argv: the arguments of the command; None for those of the process.
        pack: the packer.
        name: its module in `pack_data`.
        description: of the command, for --help.
        options: the packer's own options (`--seed`), with the arguments of `add_argument`. Each is a keyword of `pack`.
        default_depth: packing depth of a bundled or synthetic histogram without an option, as in the paper.
        own_depth: packing depth of the user's own lengths without an option; None is unlimited.
        rare: those of its own options that --help leaves out.
        statement: checks the packing and returns a sentence that is printed after the table.
    """
    depths = depth_text(own_depth)
    if default_depth != own_depth:
        depths += f"; {depth_text(default_depth)} for a bundled or synthetic histogram"
    parser = ArgumentParser(prog=f"python -m pack_data.{name}", description=description)
    add_histogram_arguments(parser)
    parser.add_argument(
        "--max-sequences-per-pack",
        type=parse_depth,
        default=argparse.SUPPRESS,
        metavar="D",
        help=f"packing depth, a number or 'unlimited'; default {depths}",
    )
    parser.add_argument(
        "--multiple-of",
        type=positive_int,
        default=1,
        metavar="M",
        help="round each length up to a multiple of M, as context parallelism or FP8 want it",
    )
    for option, details in options.items():
        parser.add_argument(option, **details)
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write the recipe as JSON: lengths that share a pack, and how often; which of your texts: pack_data.pack",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    parser.rare("--synthetic", "--multiple-of", *rare)
    args = parser.parse_args(argv)
    if args.out:
        check_output("--out", args.out, reads=[args.histogram])

    unrounded = histogram_from(args)
    histogram = unrounded.rounded_up(args.multiple_of)
    is_published = args.synthetic is not None or args.histogram in PUBLISHED
    default = default_depth if is_published else own_depth
    depth = getattr(args, "max_sequences_per_pack", default)
    values = {option[2:]: getattr(args, option[2:]) for option in options}
    packing = pack(histogram, max_sequences_per_pack=depth, **values)
    stated = statement(packing) if statement else ""
    packing.check(histogram)
    if args.out:
        packing.save(args.out)
    if args.json:
        print(json.dumps(packing.to_json()))
        return 0

    print(table(packing, histogram.name))
    if args.multiple_of > 1:
        added = counted(histogram.tokens - unrounded.tokens, "slot")
        print(
            f"\nrounded up to multiples of {args.multiple_of}: {added} of the tokens above are rounding"
        )
    cost = cost_of_depth(packing) if name != "none" else ""
    if cost:
        print(f"\n{cost}")
    if args.out:
        print(f"\nrecipe written to {args.out}")
    if stated:
        print(f"\n{stated}")
    return 0
