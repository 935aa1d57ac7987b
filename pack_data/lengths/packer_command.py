"""The command line of the packers: `python -m pack_data.PACKER`."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence

from pack_data.cli.command import (
    ArgumentParser,
    check_output,
    count_from_zero,
    depth_text,
    parse_depth,
    positive_int,
    positive_seconds,
    run_main,
)
from pack_data.display.accounting import table
from pack_data.lengths.options import add_histogram_arguments, histogram_from
from pack_data.packers import get_packer
from pack_data.packing.histogram import PUBLISHED
from pack_data.packing.packing import Packing, statement
from pack_data.reading.words import counted
from pack_data.solver.free_slots import cost_of_depth


class _Command(NamedTuple):
    """A packer's command line: its description, its own options and default depths."""

    description: str
    # The packer's own options, with the arguments of `add_argument`. Each is a keyword of `pack`.
    options: Mapping[str, Mapping[str, Any]] = {}
    default_depth: Optional[int] = 3  # of a bundled or synthetic histogram, as in the paper
    own_depth: Optional[int] = None  # of the user's own lengths; None is unlimited
    rare: Sequence[str] = ()  # options that --help leaves out
    statement: Optional[Callable[[Packing], str]] = None  # proves the packing in a sentence


_COMMANDS = {
    "none": _Command(
        "The baseline: one sequence in each pack.",
        default_depth=1,
        own_depth=1,
    ),
    "greedy": _Command(
        "Concatenates sequences as they arrive, in a random order.",
        options={
            "--seed": dict(
                type=count_from_zero,
                default=0,
                help="draws the order in which the sequences arrive; default 0",
            )
        },
    ),
    "first_fit": _Command("First-fit decreasing over samples."),
    "best_fit": _Command("Best-fit decreasing over samples."),
    "spfhp": _Command("Shortest-pack-first histogram-packing: fast, worst fit."),
    "lpfhp": _Command("Longest-pack-first histogram-packing: fast, best fit."),
    "nnlshp": _Command(
        "Non-negative least squares histogram-packing: strategies that fill a pack.",
        own_depth=3,
        options={
            "--rounds": dict(
                type=positive_int,
                default=1,
                metavar="N",
                help="solve again for what is left, N times at most: 1 is the paper (default), 20 the MLPerf variant",
            )
        },
    ),
    "optimal": _Command(
        "As few packs as possible, with a proof: the cutting-stock linear programme, rounded.",
        options={
            "--budget": dict(
                type=positive_seconds,
                metavar="SECONDS",
                help="stop improving after this time, with the best packing so far and its proven gap; the result "
                "then depends on how fast the machine is",
            )
        },
        rare=["--budget"],
        statement=statement,
    ),
}


def run(name: str) -> int:
    """Run the command of a packer with the arguments of this process; print errors, return the exit status."""
    return run_main(partial(main, name))


def main(name: str, argv: Optional[Sequence[str]] = None) -> int:
    """Parse, pack, save the recipe, and print the table or the JSON object; return the exit status.

    Args:
        name: one of `PACKERS`. One without an entry in `_COMMANDS` is described by the first line of its `pack`.
        argv: the arguments of the command; None for those of the process.
    """
    pack = get_packer(name)
    summary = (pack.__doc__ or "").partition("\n")[0]
    command = _COMMANDS.get(name, _Command(summary))
    parser = _parser(name, command)
    args = parser.parse_args(argv)
    if args.out:
        check_output("--out", args.out, reads=[args.histogram])

    unrounded = histogram_from(args)
    histogram = unrounded.rounded_up(args.multiple_of)
    is_published = args.synthetic is not None or args.histogram in PUBLISHED
    default = command.default_depth if is_published else command.own_depth
    depth = getattr(args, "max_sequences_per_pack", default)
    values = {option[2:]: getattr(args, option[2:]) for option in command.options}
    packing = pack(histogram, max_sequences_per_pack=depth, **values)
    stated = command.statement(packing) if command.statement else ""
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


def _parser(name: str, command: _Command) -> ArgumentParser:
    depths = depth_text(command.own_depth)
    if command.default_depth != command.own_depth:
        depths += f"; {depth_text(command.default_depth)} for a bundled or synthetic histogram"
    parser = ArgumentParser(prog=f"python -m pack_data.{name}", description=command.description)
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
    for option, details in command.options.items():
        parser.add_argument(option, **details)
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write the recipe as JSON: lengths that share a pack, and how often; which of your texts: pack_data.pack",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    parser.rare("--synthetic", "--multiple-of", *command.rare)
    return parser
