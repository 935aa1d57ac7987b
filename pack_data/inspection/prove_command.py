"""`packed-bert verify RECIPE`: proves a recipe's lower bound again, and that it packs the data given.

`checker.py` beside this file does the same in about 100 lines of plain Python, for those who trust no package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Optional, Sequence

import numpy as np

from pack_data.cli.command import ArgumentParser, run_main
from pack_data.lengths.options import named_histogram
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing, prove, statement
from pack_data.reading.fields import said_of
from pack_data.store.data_set import PackStore


def _stored_histogram(folder: Path) -> LengthHistogram:
    """The lengths of the sequences in a data set, counted in its packs, which are checked as they are read."""
    with PackStore.open(folder) as store:
        counts = np.zeros(store.schema.max_sequence_length + 1, np.int64)
        for shard in store.shards():
            counts += np.bincount(shard["lengths"].ravel(), minlength=len(counts))
    counts[0] = 0  # places without a sequence
    return LengthHistogram(counts, folder.name)


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = ArgumentParser(
        prog="packed-bert verify",
        description="Proves again the lower bound of a recipe that the optimal packer wrote, and, where the data is\n"
        "given, that the recipe packs exactly its sequences.",
    )
    parser.add_argument(
        "recipe",
        nargs="?",
        help="a recipe, written with `python -m pack_data.optimal --out`; with --data it may be left out, for the data "
        "set's own",
    )
    data = parser.add_mutually_exclusive_group()
    data.add_argument(
        "--histogram",
        metavar="NAME|FILE|DIR",
        help="what the recipe packs: anything that `packed-bert look` takes",
    )
    data.add_argument("--data", metavar="DIR", type=Path, help="what the recipe packs: the packs of this data set")
    args = parser.parse_args(argv)
    if args.recipe is None and args.data is None:
        raise ValueError("give a recipe, or --data and a data set that has one")
    recipe = args.recipe or args.data / "recipe.json"
    packing = Packing.load(recipe)
    histogram = None
    if args.data is not None:
        histogram = _stored_histogram(args.data)
    elif args.histogram is not None:
        histogram = named_histogram(args.histogram, packing.max_sequence_length)
    with said_of(recipe):
        proof = prove(packing)
        if histogram is not None:
            packing.check(histogram)
    print(statement(packing, proof))
    if histogram is not None:
        print(f"it packs exactly the {histogram.sequences:,} sequences of {args.data or args.histogram}")


if __name__ == "__main__":
    raise SystemExit(run_main(main))
