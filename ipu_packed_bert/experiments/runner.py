"""Cells: an experiment is a grid of variants and seeds, and a cell that is finished is never run again.

    runner = Runner(folder, settings)                                 # settings: all that decides what a cell measures
    rows = runner.run(cells, measure)                                 # measure(cell) -> rows, plain values by name
    runner.write_csv("curves.csv", rows)

`cells.jsonl` in the folder gets one line for each finished cell.  A run that was killed or interrupted leaves whole
lines and at most one cut one, which is dropped; the same command then runs the cells that are missing.
"""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence

from pack_data.command import progress_bar
from pack_data.files import locked, write_atomically

CELLS, SETTINGS = "cells.jsonl", "settings.json"

Row = Dict[str, Any]  # one measured point: names -> plain values; `variant` and `seed` come from its cell


class Cell(NamedTuple):
    """One run of an experiment."""

    variant: str
    seed: int


class Runner:
    """The folder of one experiment, held by one process at a time.

    Raises ValueError where the folder holds cells that were measured with other settings, or another process runs
    there.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, progress: Optional[bool] = None) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._progress = progress
        with ExitStack() as held:
            held.enter_context(
                locked(
                    self.folder / "lock",
                    f"{self.folder}: another process runs this experiment; wait for it or give another --out",
                )
            )
            self._settle(settings)
            self._lock = held.pop_all()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: Any) -> None:
        self._lock.close()

    def _settle(self, settings: Mapping[str, Any]) -> None:
        path = self.folder / SETTINGS
        wanted = json.loads(json.dumps(settings))
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            different = sorted(name for name in {**found, **wanted} if found.get(name) != wanted.get(name))
            if different and self.finished():
                changes = ", ".join(f"{name} {found.get(name)} (now {wanted.get(name)})" for name in different)
                raise ValueError(
                    f"{self.folder}: holds cells measured with {changes}; give another --out or remove the folder"
                )
        write_atomically(path, (json.dumps(wanted, indent=1) + "\n").encode())

    def finished(self) -> Dict[Cell, List[Row]]:
        """The rows of every finished cell."""
        path = self.folder / CELLS
        if not path.exists():
            return {}
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last line end was cut by a kill
        records = [json.loads(line) for line in lines]
        return {Cell(record["variant"], record["seed"]): record["rows"] for record in records}

    def run(self, cells: Sequence[Cell], measure: Callable[[Cell], Iterable[Row]]) -> List[Row]:
        """The rows of these cells, in their order; those that are not finished yet are measured, one after another."""
        finished = self.finished()
        missing = [cell for cell in cells if cell not in finished]
        if finished and missing != list(cells):
            print(f"{len(cells) - len(missing)} of {len(cells)} cells are in {self.folder} already", flush=True)
        self._drop_cut_line()
        with open(self.folder / CELLS, "a", encoding="utf-8") as out, progress_bar(
            len(cells), "cells", shown=self._progress, unit="cell"
        ) as bar:
            bar.update(len(cells) - len(missing))
            for done, cell in enumerate(missing):
                bar.set_postfix_str(f"{cell.variant}, seed {cell.seed}")
                start = time.perf_counter()
                try:
                    rows = [{"variant": cell.variant, "seed": cell.seed, **row} for row in measure(cell)]
                except KeyboardInterrupt:
                    kept = len(cells) - len(missing) + done
                    print(
                        f"\nstopped: {kept} of {len(cells)} cells are kept in {self.folder}; the same command goes on",
                        file=sys.stderr,
                    )
                    raise
                seconds = time.perf_counter() - start
                finished[cell] = rows
                out.write(
                    json.dumps({"variant": cell.variant, "seed": cell.seed, "seconds": round(seconds, 3), "rows": rows})
                    + "\n"
                )
                out.flush()
                os.fsync(out.fileno())
                bar.update(1)
                if bar.disable:
                    print(f"{cell.variant}, seed {cell.seed}: {seconds:.1f} s", flush=True)
        return [row for cell in cells for row in finished[cell]]

    def _drop_cut_line(self) -> None:
        path = self.folder / CELLS
        if path.exists():
            data = path.read_bytes()
            if not data.endswith(b"\n") and data:
                write_atomically(path, data[: data.rfind(b"\n") + 1])

    def write_csv(self, name: str, rows: Sequence[Row]) -> Path:
        """One line a row; the columns are those of all rows, in the order in which they first appear."""
        columns = list({column: None for row in rows for column in row})
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return self.write(name, text.getvalue())

    def write(self, name: str, text: str) -> Path:
        """A file in the experiment's folder, whole or not at all."""
        path = self.folder / name
        write_atomically(path, text.encode())
        return path
