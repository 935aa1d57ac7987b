"""`python -m evidence.benches.batching`: properties and costs of the nine ways, measured on their batches."""

from __future__ import annotations

import json
from functools import partial
from typing import Optional, Sequence

import numpy as np

from evidence.batching_report import COLUMNS, report
from pack_data.batching.plans import WAYS, BatchOptions
from pack_data.cli.command import (
    ArgumentParser,
    count_from_zero,
    positive_int,
    progress_bar,
    run_main,
)
from pack_data.display.table import text_table
from pack_data.lengths.options import add_histogram_arguments, histogram_from

JSON_VALUES = ("steps", "rows", "tokens", "slots", "efficiency", "fill", "attention_balance")
LEGEND = """
kernel: a variable-length attention kernel can be used; positions: position ids are right; isolated: no attention
between examples; unbroken: no example is cut; unsorted: the data set is not sorted by length. efficiency: real tokens
/ computed slots; fill: real tokens / (bs x msl) of every batch; balance: sum of squared lengths, busiest rank over
mean."""


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(
        prog="python -m evidence.benches.batching",
        description="Nine ways to make batches of examples of different lengths.",
    )
    add_histogram_arguments(parser)
    number = partial(parser.add_argument, type=positive_int)
    number("--examples", default=4000, metavar="N", help="drawn from the histogram (default 4000)")
    number(
        "--batch-size",
        default=4,
        metavar="BS",
        help="examples or rows of a rank's batch (default 4)",
    )
    number("--ranks", default=2, metavar="R", help="processes that share each step (default 2)")
    parser.add_argument("--seed", type=count_from_zero, default=0)
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a line instead of the table"
    )
    args = parser.parse_args(argv)

    histogram = histogram_from(args)
    weights = histogram.counts / histogram.sequences
    lengths = np.random.default_rng(args.seed).choice(len(weights), args.examples, p=weights)
    options = BatchOptions(args.batch_size, histogram.max_sequence_length, args.ranks, args.seed)
    reports = []
    with progress_bar(len(WAYS), "ways") as bar:
        for way in WAYS.values():
            reports.append(report(way, lengths, options))
            bar.update(1)
    if args.json:
        for measured in reports:
            values = {name: getattr(measured, name) for name in JSON_VALUES}
            properties = measured.properties._asdict()
            print(json.dumps({"way": measured.way, **properties, **values}))
        return 0
    print(
        f"{args.examples:,} examples, {int(lengths.sum()):,} tokens, from {histogram.name}; "
        f"bs {options.batch_size}, msl {options.max_sequence_length}, {options.ranks} ranks\n"
    )
    rows = [["way", *COLUMNS, "steps", "efficiency", "fill", "balance"]]
    for measured in reports:
        marks = ["yes" if value else "no" for value in measured.properties]
        costs = [
            f"{measured.steps:,}",
            f"{measured.efficiency:.2%}",
            f"{measured.fill:.1%}",
            f"{measured.attention_balance:.3f}",
        ]
        rows.append([measured.way, *marks, *costs])
    print("\n".join(text_table(rows, widths=(26, 9, 9, 9, 9, 9, 7, 10, 6, 7))))
    print(LEGEND)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(main))
