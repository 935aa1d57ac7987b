"""The command line of sorted batching: `python -m pack_data.sort`."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Callable, Optional, Sequence

from pack_data.cli.command import ArgumentParser, count_from_zero, positive_int, run_main
from pack_data.display.facts import Facts, number, printed, quantities
from pack_data.lengths.options import add_histogram_arguments, histogram_from


def run(batch: Callable[..., Any]) -> int:
    """Run the command with the arguments of this process; print errors, return the exit status."""
    return run_main(partial(main, batch))


def main(batch: Callable[..., Any], argv: Optional[Sequence[str]] = None) -> int:
    """Parse, sort with `batch` of sort.py, and print the table or the JSON object; return the exit status."""
    parser = ArgumentParser(
        prog="python -m pack_data.sort", description="Sorted batching: batches of similar lengths."
    )
    add_histogram_arguments(parser)
    parser.add_argument(
        "--batch-size",
        type=positive_int,
        default=256,
        metavar="N",
        help="rows in a batch; default 256",
    )
    parser.add_argument(
        "--seed", type=count_from_zero, default=0, help="draws the order of the batches; default 0"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    args = parser.parse_args(argv)
    histogram = histogram_from(args)
    batching = batch(histogram, batch_size=args.batch_size, seed=args.seed)
    if args.json:
        print(json.dumps(batching.to_json()))
    else:
        print(printed(_facts(batching, histogram.name)))
    return 0


def _facts(batching: Any, name: str) -> Facts:
    title = f"SORT  batches of {batching.batch_size}, each padded to its longest sequence"
    if name:
        title += f"  ({name})"
    notes = {
        "sequences": "",
        "tokens": "",
        "batches": f"of {number(batching.shapes)} different lengths: a static engine compiles each",
        "slots": "",
        "padding_tokens": f"{number(batching.padding_share, '%')} of all slots",
        "efficiency": "",
        "speedup": "fewer slots than unsorted; recompilation is not counted",
    }
    return Facts(title, quantities(batching, notes))
