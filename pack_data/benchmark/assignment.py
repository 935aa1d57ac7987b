"""`python -m pack_data.benchmark.assignment`: seconds, memory and disk for giving millions of sequences their packs.

Lengths alone, drawn from a published histogram, one run for each number of sequences, each in a process of its own. A
last row computes the same for a billion sequences: in proportion to the largest number that was run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from pack_data.building.assignment import IN_MEMORY, assign
from pack_data.building.assignment_on_disk import assign_on_disk
from pack_data.building.runner import open_runner
from pack_data.building.tasks import RunningTotals, SpillFormat, file_of
from pack_data.cli.command import (
    ArgumentParser,
    available_cores,
    depth_text,
    parse_depth,
    positive_int,
    process_count,
    run_main,
)
from pack_data.cli.memory import check_counted, cpu_seconds, peak_megabytes
from pack_data.cli.timing import timed
from pack_data.display.table import Cell, Column, Table, plain
from pack_data.histogram import LengthHistogram
from pack_data.packers import get_packer
from pack_data.store.packs import SLOT, PackSchema, StoredColumn

_HISTOGRAM = "wikipedia_512"
_PART = 1 << 15  # sequences, as in a build
_BILLION = 10**9


def _draw(work: Path, sequences: int) -> Tuple[PackSchema, List[RunningTotals], List[np.ndarray]]:
    """Parts of a build that hold lengths alone, with the totals and the counts by length of each."""
    weights = np.cumsum(LengthHistogram.published(_HISTOGRAM).counts / LengthHistogram.published(_HISTOGRAM).sequences)
    S = len(weights) - 1
    schema = PackSchema.of_tokens(S, 1, [StoredColumn("input_ids", SLOT, "|u1")])
    totals, counts = [], []
    for part, first in enumerate(range(0, sequences, _PART)):
        draws = np.random.default_rng([0, part]).random(min(_PART, sequences - first))
        lengths = np.minimum(np.searchsorted(weights, draws, side="right"), S)
        with open(work / file_of("examples", part, "bin"), "wb") as file:  # of a part's columns the first
            lengths.astype(SpillFormat.of(schema).lengths_type).tofile(file)
        totals.append(RunningTotals(len(lengths), int(lengths.sum()), 0))
        counts.append(np.bincount(lengths, minlength=S + 1).astype(np.int32))
    return schema, totals, counts


class _Disk(threading.Thread):
    """The most bytes that files of a folder held together, looked at ten times a second."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder, self._done, self.most = folder, threading.Event(), 0

    def run(self) -> None:
        while not self._done.wait(0.1):
            self._look()

    def _look(self) -> None:
        sizes = 0
        for path in self._folder.iterdir():
            try:
                sizes += path.stat().st_size
            except FileNotFoundError:  # a temporary file that has its name by now
                continue
        self.most = max(self.most, sizes)

    def stop(self) -> int:
        self._done.set()
        self.join()
        self._look()
        return self.most


def _measure(sequences: int, depth: Optional[int], workers: int) -> Dict[str, Any]:
    """One assignment. Memory is the most of this process and of its largest worker, from the start of the program."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        schema, totals, counts = _draw(work, sequences)
        histogram = LengthHistogram(np.asarray(np.sum(counts, axis=0, dtype=np.int64)), _HISTOGRAM)
        packing = get_packer("optimal")(histogram, max_sequences_per_pack=depth)
        replace(packing, solve_seconds=0.0).save(work / "recipe.json")
        given = sum(path.stat().st_size for path in work.iterdir())
        disk = _Disk(work)
        disk.start()
        used, on_disk = cpu_seconds(), sequences > IN_MEMORY

        def give_packs() -> None:
            if on_disk:
                runner = open_runner(workers)
                assign_on_disk(work, work / "recipe.json", schema, totals, lambda part: counts[part], (0, 0), runner)
                runner.close()
                return
            read = SpillFormat.of(schema).read_lengths
            lengths = [read(work / file_of("examples", part, "bin"), total) for part, total in enumerate(totals)]
            assign(np.concatenate(lengths), packing, (0, 0))

        seconds, _ = timed(give_packs)
        return {
            "sequences": sequences,
            "assigned": "on disk" if on_disk else "in memory",
            "seconds": seconds,
            "processor": cpu_seconds() - used,
            "own": peak_megabytes(),
            "worker": peak_megabytes(workers=True) if on_disk and workers > 1 else None,
            "disk": (disk.stop() - given) / 1e6,
        }


_COLUMNS = (
    Column("sequences", "sequences", form=","),
    Column("assigned", "assigned"),
    Column("seconds", "seconds", form=",.1f"),
    Column("processor", "of a core", form=",.1f"),
    Column("own", "MiB here", form=",.0f"),
    Column("worker", "MiB a worker", form=",.0f"),
    Column("disk", "MB of disk", form=",.0f"),
)


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(prog="python -m pack_data.benchmark.assignment", description=__doc__)
    parser.add_argument(
        "--sequences",
        type=positive_int,
        nargs="+",
        default=[10_000_000, 16_000_000, 33_000_000, 65_000_000, 100_000_000],
        metavar="N",
        help="how many, one run each (default: 10, 16, 33, 65 and 100 million)",
    )
    parser.add_argument("--max-sequences-per-pack", type=parse_depth, default=3, metavar="D")
    parser.add_argument(
        "--workers", type=process_count, default=available_cores(), metavar="N", help="processes (default: one a core)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of the table")
    args = parser.parse_args(argv)
    check_counted()
    depth = args.max_sequences_per_pack
    if args.json and len(args.sequences) == 1:
        print(json.dumps(_measure(args.sequences[0], depth, args.workers)))
        return 0
    rows: List[Dict[str, Any]] = []
    for sequences in sorted(args.sequences):
        print(f"{sequences:,} sequences ...", file=sys.stderr, flush=True)
        given = ["--sequences", sequences, "--workers", args.workers, "--max-sequences-per-pack", depth or "unlimited"]
        done = subprocess.run(
            [sys.executable, "-m", __spec__.name, "--json", *map(str, given)], stdout=subprocess.PIPE, text=True
        )
        if done.returncode:
            return done.returncode
        rows.append(json.loads(done.stdout))
    if sequences > IN_MEMORY:
        largest, more = rows[-1], _BILLION / sequences
        grown = {key: largest[key] * more for key in ("seconds", "processor", "disk")}
        rows.append({**largest, **grown, "sequences": Cell(_BILLION, f"{_BILLION:,} (computed)")})
    if args.json:
        print("\n".join(json.dumps(plain(row)) for row in rows))
        return 0
    processes = f"{args.workers} process{'' if args.workers == 1 else 'es'}"
    title = f"lengths drawn from {_HISTOGRAM}, depth {depth_text(depth)}, on disk in {processes}"
    print(Table("assignment", title, _COLUMNS, rows).text())
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(main))
