"""`python -m evidence.benches.packing`: time and memory for packing a large data set.

Draws sequences with the lengths of the paper's Wikipedia, and takes them the way of every build: assignment to packs,
sorting by shard, writing. A sixteenth of Wikipedia unless told otherwise. Then reads packs, with and without their
checksums.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from evidence.benches import cases as many_cases
from evidence.benches.usage import check_counted, cpu_seconds, peak_megabytes
from pack_data.batching.mixture import PackMixture
from pack_data.batching.pack_dataset import PackDataset
from pack_data.building.command import BuildOptions, build_and_report
from pack_data.cli.command import (
    ArgumentParser,
    available_cores,
    parse_depth,
    positive_int,
    process_count,
    run_main,
)
from pack_data.cli.timing import quartiles, seconds_in_turn
from pack_data.display.table import account
from pack_data.packers import PACKERS
from pack_data.packing.histogram import LengthHistogram
from pack_data.store.data_set import CheckedTable, PackStore

HISTOGRAM = "wikipedia_512"
Row = Tuple[str, str, str]
# Packs read, at least, where there are so many.
_READ = 1 << 15


def _time_reading(store: PackStore) -> List[Row]:
    """Time four ways of reading packs, in turn.

    In random order, by a reader that has read them all before and by a new one, which checks every block; through a
    mixture of two data sets; and the checks alone.  Processor time, so that other programs do not count; the files are
    in memory.
    """
    manifest = store.manifest
    ends = list(accumulate(entry.packs for entry in manifest.shards))
    shards = manifest.shards[: int(np.searchsorted(ends, _READ)) + 1]
    packs = sum(entry.packs for entry in shards)
    order = np.random.default_rng(0).permutation(packs)
    mixture = PackMixture([PackDataset(store), PackDataset(store)])

    def new_tables() -> List[CheckedTable]:
        dtype = store.schema.record_dtype
        places = zip(shards, [0, *ends])
        return [CheckedTable(store.folder, entry, dtype, first) for entry, first in places]

    def new_reader() -> PackStore:
        return PackStore(store.folder, replace(manifest, shards=shards, packs=packs), new_tables())

    def read(reader: Callable[[], PackStore]) -> None:
        batch = reader().batch
        for first in range(0, packs, 64):
            batch(order[first : first + 64])

    def check() -> None:
        for table in new_tables():
            table.checked()

    def mix() -> None:
        for numbers in islice(mixture.batches(64), packs // 64):
            mixture.collate(mixture.__getitems__(numbers))

    kept = new_reader()  # the round that warms up checks all
    ways: Dict[str, Callable[[], None]] = {
        "mixed": mix,
        "checksums": check,
        "first": partial(read, new_reader),
    }
    ways["again"] = partial(read, lambda: kept)
    times = seconds_in_turn(ways, 4, time.process_time)
    seconds = {way: quartiles(values).median for way, values in times.items()}
    rate = {way: packs / value for way, value in seconds.items()}
    million_tokens = manifest.tokens / manifest.packs / 1e6  # of a pack
    tokens = {}
    for way, value in rate.items():
        tokens[way] = f"{value * million_tokens:.1f} million tokens/s"
    checking = seconds["checksums"] / packs
    share = seconds["checksums"] / seconds["again"]
    return [
        (
            "reading",
            f"{rate['again']:,.0f} /s",
            f"packs decoded to int32 fields, in batches of 64, a second of one core: {tokens['again']}; "
            f"{rate['first']:,.0f} packs/s in the first pass, which checks every block",
        ),
        (
            "reading, mixed",
            f"{rate['mixed']:,.0f} /s",
            f"by a PackMixture of two data sets: {tokens['mixed']}",
        ),
        (
            "checksums",
            f"{checking * 1e6:.2f} us",
            f"a pack, once in a process: {share:.1%} of reading it, below 2 % of a training update up to "
            f"{0.02 / checking:,.0f} packs/s",
        ),
    ]


def _time_build(args: argparse.Namespace) -> List[Row]:
    """Time a whole build, and reading its packs."""
    before = cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        built = build_and_report(
            BuildOptions(
                out=Path(folder) / "data",
                synthetic=HISTOGRAM,
                sequences=args.sequences,
                packer=args.packer,
                max_sequences_per_pack=args.max_sequences_per_pack,
                vocabulary_size=30522,
                workers=args.workers,
            )
        )
        cpu = cpu_seconds() - before
        # Before reading: a memory map counts as memory of the process until the system takes it back.
        own = peak_megabytes()
        worker = peak_megabytes(workers=True)
        with built.store as store:
            packs = len(store)
            size = sum(entry.bytes for entry in store.manifest.shards)
            reading = _time_reading(store)
    seconds = built.seconds
    way = seconds["assignment"] + seconds["sorting"] + seconds["writing"] + seconds["commit"]
    workers = args.workers if args.workers > 1 else 0
    return [
        (
            "drawing",
            f"{seconds['examples']:.1f} s",
            f"{args.sequences / seconds['examples']:,.0f} sequences/s with random tokens, not counted below",
        ),
        (
            "packing",
            f"{built.packing.solve_seconds:.2f} s",
            f"{built.packing.algorithm}: {packs:,} packs, packing factor {built.packing.packing_factor:.3f}",
        ),
        (
            "assign and write",
            f"{way:.1f} s",
            f"{packs / way:,.0f} packs/s in {args.workers} processes: assignment {seconds['assignment']:.1f}, "
            f"sorting {seconds['sorting']:.1f}, writing {seconds['writing']:.1f}, manifest {seconds['commit']:.1f}",
        ),
        (
            "processors",
            f"{cpu:.1f} s",
            f"of one core for the whole build with its drawing: {packs / cpu:,.0f} packs a second of one core",
        ),
        ("size", f"{size / packs:,.0f} B", f"a pack; {size / 1e6:,.0f} MB in all"),
        (
            "memory",
            f"{own + workers * worker:,.0f} MiB",
            f"at most: this process {own:,.0f}, {workers} workers of up to {worker:,.0f} each",
        ),
        *reading,
    ]


def main(argv: Optional[Sequence[str]] = None) -> int:
    whole = LengthHistogram.published(HISTOGRAM)
    parser = ArgumentParser(
        prog="python -m evidence.benches.packing", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--sequences",
        type=positive_int,
        metavar="N",
        help=f"how many (default a sixteenth of the {whole.sequences:,} of Wikipedia; with "
        "--cases at most so many, 1,000,000)",
    )
    parser.add_argument(
        "--cases",
        type=positive_int,
        metavar="N",
        help="instead: N cases out of 1,344 of lengths, rows and depths, beside the packers of others that are "
        "installed (50: some minutes)",
    )
    parser.add_argument("--packer", choices=PACKERS, default="optimal")
    parser.add_argument("--max-sequences-per-pack", type=parse_depth, default=3, metavar="D")
    parser.add_argument(
        "--workers",
        type=process_count,
        default=available_cores(),
        metavar="N",
        help="processes (default: one a core)",
    )
    args = parser.parse_args(argv)
    if args.cases:
        many_cases.main(args.cases, args.sequences)
        return 0
    check_counted()
    args.sequences = args.sequences or whole.sequences // 16
    rows = _time_build(args)
    print(
        account(
            f"{args.sequences:,} sequences drawn from {HISTOGRAM}, packs of 512 at depth {args.max_sequences_per_pack}",
            rows,
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(main))
