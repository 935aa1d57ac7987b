"""`python -m pack_data.building.benchmark`: seconds, memory and disk for giving millions of sequences their packs.

Lengths alone, drawn from a published histogram, one run for each number of sequences, each in a process of its own. A
last row computes the same for a billion sequences: in proportion to the largest number that was run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from pack_data.building.assignment import IN_MEMORY, assign
from pack_data.building.assignment_on_disk import assign_on_disk
from pack_data.building.runner import open_runner
from pack_data.building.spill import RunningTotals, SpillFormat
from pack_data.building.tasks import examples_name
from pack_data.cli.command import ArgumentParser, parse_depth, positive_int, process_count, run_main
from pack_data.cli.cores import available_cores
from pack_data.cli.memory import check_counted, cpu_seconds, peak_megabytes
from pack_data.display.table import text_table
from pack_data.histogram import LengthHistogram
from pack_data.packers import get_packer
from pack_data.store.packs import SLOT, PackSchema, StoredColumn

HISTOGRAM = "wikipedia_512"
PART = 1 << 15  # sequences, as in a build
BILLION = 10**9


def _draw(work: Path, sequences: int) -> Tuple[PackSchema, List[RunningTotals], List[np.ndarray]]:
    """Parts of a build that hold lengths alone, with the totals and the counts by length of each."""
    weights = np.cumsum(LengthHistogram.published(HISTOGRAM).counts / LengthHistogram.published(HISTOGRAM).sequences)
    S = len(weights) - 1
    schema = PackSchema.of_tokens(S, 1, [StoredColumn("input_ids", SLOT, "|u1")])
    totals, counts = [], []
    for part, first in enumerate(range(0, sequences, PART)):
        draws = np.random.default_rng([0, part]).random(min(PART, sequences - first))
        lengths = np.minimum(np.searchsorted(weights, draws, side="right"), S)
        with open(work / f"{examples_name(part)}.bin", "wb") as file:  # of a part's columns the first
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


def measure(sequences: int, depth: Optional[int], workers: int, folder: Optional[str]) -> Dict[str, Any]:
    """One assignment. Memory is the most of this process and of its largest worker, from the start of the program."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        work = Path(name)
        schema, totals, counts = _draw(work, sequences)
        histogram = LengthHistogram(np.asarray(np.sum(counts, axis=0, dtype=np.int64)), HISTOGRAM)
        packing = get_packer("optimal")(histogram, max_sequences_per_pack=depth)
        replace(packing, solve_seconds=0.0).save(work / "recipe.json")
        given = sum(path.stat().st_size for path in work.iterdir())
        disk = _Disk(work)
        disk.start()
        start, used = time.perf_counter(), cpu_seconds()
        on_disk = sequences > IN_MEMORY
        if on_disk:
            runner = open_runner(workers, None)
            assign_on_disk(work, work / "recipe.json", schema, totals, lambda part: counts[part], (0, 0), runner)
            runner.close()
        else:
            read = SpillFormat.of(schema).read_lengths
            lengths = [read(work / f"{examples_name(part)}.bin", total) for part, total in enumerate(totals)]
            assign(np.concatenate(lengths), packing, (0, 0))
        return {
            "seconds": time.perf_counter() - start,
            "processor": cpu_seconds() - used,
            "own": peak_megabytes(),
            "worker": peak_megabytes(workers=True) if on_disk and workers > 1 else 0.0,
            "disk": (disk.stop() - given) / 1e6,
        }


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(prog="python -m pack_data.building.benchmark", description=__doc__)
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
    parser.add_argument("--folder", metavar="DIR", help="where to work (default: the system's place for such files)")
    parser.add_argument("--one", action="store_true", help="one number, here; prints JSON")
    args = parser.parse_args(argv)
    check_counted()
    if args.folder and not Path(args.folder).is_dir():
        raise ValueError(f"--folder {args.folder}: no such folder; make it first")
    if args.one:
        if len(args.sequences) > 1:
            raise ValueError("--one measures one number; give it with --sequences N")
        print(json.dumps(measure(args.sequences[0], args.max_sequences_per_pack, args.workers, args.folder)))
        return 0

    rows: List[Tuple[str, ...]] = [
        ("sequences", "assigned", "seconds", "of a core", "MiB here", "MiB a worker", "MB of disk")
    ]
    given = [
        "--workers",
        str(args.workers),
        "--max-sequences-per-pack",
        str(args.max_sequences_per_pack or "unlimited"),
    ]
    given += ["--folder", args.folder] if args.folder else []
    for sequences in sorted(args.sequences):
        print(f"{sequences:,} sequences ...", file=sys.stderr, flush=True)
        done = subprocess.run(
            [sys.executable, "-m", __spec__.name, "--one", "--sequences", str(sequences), *given],
            stdout=subprocess.PIPE,
            check=False,
            text=True,
        )
        if done.returncode:
            return done.returncode
        found = json.loads(done.stdout)
        rows.append(_row(f"{sequences:,}", sequences > IN_MEMORY, found))
    if sequences > IN_MEMORY:
        more = BILLION / sequences
        grown = {key: value * more for key, value in found.items() if key in ("seconds", "processor", "disk")}
        rows.append(_row(f"{BILLION:,} (computed)", True, {**found, **grown}))
    print(
        f"lengths drawn from {HISTOGRAM}, depth {args.max_sequences_per_pack or 'unlimited'}, "
        f"on disk in {args.workers} process{'' if args.workers == 1 else 'es'}"
    )
    print("\n".join(text_table(rows, left=(0, 1))))
    return 0


def _row(sequences: str, on_disk: bool, found: Dict[str, Any]) -> Tuple[str, ...]:
    return (
        sequences,
        "on disk" if on_disk else "in memory",
        f"{found['seconds']:.1f}",
        f"{found['processor']:.1f}",
        f"{found['own']:,.0f}",
        f"{found['worker']:,.0f}" if found["worker"] else "-",
        f"{found['disk']:,.0f}",
    )


if __name__ == "__main__":
    raise SystemExit(run_main(main))
