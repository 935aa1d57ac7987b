"""`python -m evidence.benches.assignment`: seconds, memory and disk for giving millions of sequences their packs.

The stages `count` and `recipe` of a build whose parts hold lengths alone, drawn from a published histogram: one run for
each number of sequences, each in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from evidence.benches.usage import check_counted, cpu_seconds, peak_megabytes
from pack_data.building.assignment import IN_MEMORY
from pack_data.building.options import BuildOptions
from pack_data.building.runner import open_runner
from pack_data.building.stages import Stages, TaskShare
from pack_data.building.tasks import SpillFormat, SyntheticTask, file_of, write_json
from pack_data.cli.command import (
    ArgumentParser,
    available_cores,
    depth_text,
    parse_depth,
    positive_int,
    process_count,
    run_main,
)
from pack_data.display.table import Column, Table, plain

_HISTOGRAM = "wikipedia_512"


def _make_lengths(task: SyntheticTask) -> Dict[str, Any]:
    """Write a part as `make_synthetic_part` does, but only its lengths, which come first in its file."""
    note = Path(task.work) / file_of("examples", task.part, "json")
    weights = np.cumsum(task.weights) / sum(task.weights)
    draws = np.random.default_rng([0, task.part]).random(task.count)
    lengths = np.minimum(np.searchsorted(weights, draws, side="right"), len(weights) - 1)
    with open(note.with_suffix(".bin"), "wb") as file:
        lengths.astype(SpillFormat.of(task.schema).lengths_type).tofile(file)
        file.truncate(2 * file.tell())  # none is masked
    write_json(note, {"totals": [task.count, int(lengths.sum()), 0], "digest": 0, "documents": 0})
    return {}


class _Disk(threading.Thread):
    """The largest growth of the files in a directory, in bytes, sampled ten times a second."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder = folder
        self._done = threading.Event()
        self._most = 0
        self._look()
        self._first = self._most
        self.start()

    def run(self) -> None:
        while not self._done.wait(0.1):
            self._look()

    def _look(self) -> None:
        with suppress(FileNotFoundError):  # a temporary file that has its name by now
            sizes = sum(path.stat().st_size for path in self._folder.iterdir() if path.is_file())
            self._most = max(self._most, sizes)

    def stop(self) -> int:
        self._done.set()
        self.join()
        return self._most - self._first


def _measure(sequences: int, depth: Optional[int], workers: int) -> Dict[str, Any]:
    """Measure one recipe; memory is the peak of this process and of its largest worker since the program started."""
    with tempfile.TemporaryDirectory() as name, closing(open_runner(workers)) as runner:
        work = Path(name)
        options = BuildOptions(
            work / "data",
            synthetic=_HISTOGRAM,
            sequences=sequences,
            max_sequences_per_pack=depth,
            workers=workers,
        )
        stages = Stages(options, work, runner)
        stages.input.make = _make_lengths
        stages.input.need = lambda: 0.0  # type: ignore[method-assign]
        stages.begin()
        stages.count(TaskShare())
        disk = _Disk(work)
        before = cpu_seconds()
        (packing,) = stages.recipe()
        runner.close()  # its processes count once they have ended
        return {
            "sequences": sequences,
            "packs": packing.packs,
            "assigned": "on disk" if sequences > IN_MEMORY else "in memory",
            **{name: stages.seconds[name] for name in ("examples", "packing", "assignment")},
            "processor": cpu_seconds() - before,
            "own": peak_megabytes(),
            "worker": peak_megabytes(workers=True) if workers > 1 else None,
            "disk": disk.stop() / 1e6,
        }


_COLUMNS = (
    Column("sequences", "sequences", form=","),
    Column("packs", "packs", form=","),
    Column("assigned", "assigned"),
    Column("examples", "count", form=",.1f"),
    Column("packing", "recipe", form=",.1f"),
    Column("assignment", "places", form=",.1f"),
    Column("processor", "of a core", form=",.1f"),
    Column("own", "MiB here", form=",.0f"),
    Column("worker", "MiB a worker", form=",.0f"),
    Column("disk", "MB of disk", form=",.0f"),
)


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(prog="python -m evidence.benches.assignment", description=__doc__)
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
        "--workers",
        type=process_count,
        default=available_cores(),
        metavar="N",
        help="processes (default: one a core)",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a line instead of the table"
    )
    args = parser.parse_args(argv)
    check_counted()
    depth = args.max_sequences_per_pack
    if args.json and len(args.sequences) == 1:
        print(json.dumps(_measure(args.sequences[0], depth, args.workers)))
        return 0
    rows: List[Dict[str, Any]] = []
    for sequences in sorted(args.sequences):
        print(f"{sequences:,} sequences ...", file=sys.stderr, flush=True)
        options = [
            "--sequences",
            sequences,
            "--workers",
            args.workers,
            "--max-sequences-per-pack",
            depth or "unlimited",
        ]
        done = subprocess.run(
            [sys.executable, "-m", __spec__.name, "--json", *map(str, options)],
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            return done.returncode
        rows.append(json.loads(done.stdout))
    if args.json:
        print("\n".join(json.dumps(plain(row)) for row in rows))
        return 0
    processes = f"{args.workers} process{'' if args.workers == 1 else 'es'}"
    title = f"lengths drawn from {_HISTOGRAM}, depth {depth_text(depth)}, on disk in {processes}"
    print(Table("assignment", title, _COLUMNS, rows).text())
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(main))
