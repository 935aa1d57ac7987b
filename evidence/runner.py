"""Cells: an experiment is a grid of variants and seeds, and a finished cell is never run again.

    runner = Runner(folder, settings)                                 # settings: all that determine a cell
    rows = runner.run(cells, measure)                                 # measure(cell) -> rows, plain values by name

Each finished cell is a file in `cells/`, which is written atomically.  Several processes may run one experiment in one
directory: each measures the next free cell, and the lock of a cell ends with its process in any case.  So a killed run
continues with the same command.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Sequence
from urllib.parse import quote

from ipu_packed_bert.benchmarks.work import machine
from pack_data.cli.command import progress_bar
from pack_data.reading.durable import write_atomically
from pack_data.reading.files import locked
from pack_data.reading.words import counted

CELLS = "cells"
SETTINGS = "settings.json"
FACTS = "facts.json"  # about the data and the machine
_LOCKS = "locks"
_UNFINISHED = "unfinished"
_WAIT = 1.0  # seconds between two checks of a cell of another process

# One measured point: names -> plain values; `variant` and `seed` are those of its cell.
Row = Dict[str, Any]


class Cell(NamedTuple):
    """One run of an experiment."""

    variant: str
    seed: int

    @property
    def stem(self) -> str:
        """The stem of its files; the variant may have any characters."""
        return f"{quote(self.variant, safe='')}-{self.seed}"


Measure = Callable[[Cell], Iterable[Row]]


class Runner:
    """The directory of one experiment, which several processes may share.

    Raises:
        ValueError: The directory has cells that were measured with other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        for name in (CELLS, _LOCKS):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        from ipu_packed_bert.training.run_folder import commit_here  # imports torch

        # All cells of a run have the commit of its settings.
        settings = {**settings, "commit": commit_here()}
        with alone(self.folder, "settings"):
            contents = "cells measured" if finished_cells(self.folder) else ""
            settle(self.folder / SETTINGS, settings, contents)

    def keep_facts(self, facts: Mapping[str, Any]) -> None:
        """Add facts to the stored ones, and the machine."""
        path = self.folder / FACTS
        stored = read_json(path) if path.exists() else {}
        text = json.dumps({**stored, **facts, "machine": machine()})
        self.write(FACTS, f"{text}\n")

    def run(self, cells: Sequence[Cell], measure: Measure) -> List[Row]:
        """Measure the unfinished cells, one after another; return the rows of all cells, in their order.

        Wait for the cells of other processes, and measure them if their process ends before they are finished.
        """
        finished = finished_cells(self.folder)
        missing = [cell for cell in cells if cell not in finished]
        done = len(cells) - len(missing)
        if done:
            print(f"{done} of {counted(len(cells), 'cell')} are already in {self.folder}")
        with progress_bar(len(cells), "cells", unit=" cells", done=done) as bar:
            while missing:
                unfinished = [cell for cell in missing if not self._finish(cell, measure, bar)]
                if len(unfinished) == len(missing):
                    time.sleep(_WAIT)
                missing = unfinished
        finished = finished_cells(self.folder)
        return [row for cell in cells for row in finished[cell]]

    def _finish(self, cell: Cell, measure: Measure, bar: Any) -> bool:
        """Return True if this or another process has finished the cell; False while another process has it."""
        path = self.folder / CELLS / f"{cell.stem}.json"
        with _free(self.folder / _LOCKS / f"{cell.stem}.lock") as free:
            if not free:
                return False
            if not path.exists():  # unless another process has finished it in the meantime
                bar.set_postfix_str(f"{cell.variant}, seed {cell.seed}")
                start = time.perf_counter()
                identity = cell._asdict()
                try:
                    rows = [{**identity, **row} for row in measure(cell)]
                except KeyboardInterrupt:
                    finished = counted(len(finished_cells(self.folder)), "finished cell")
                    print(
                        f"\nstopped: {finished} in {self.folder}; the same command continues",
                        file=sys.stderr,
                    )
                    raise
                seconds = round(time.perf_counter() - start, 3)
                record = {**identity, "seconds": seconds, "rows": rows}
                write_atomically(path, (json.dumps(record) + "\n").encode())
                shutil.rmtree(self.unfinished(cell), ignore_errors=True)
                if not (sys.stderr and sys.stderr.isatty()):
                    print(f"{cell.variant}, seed {cell.seed}: {seconds:.1f} s", flush=True)
        bar.update(1)
        return True

    def unfinished(self, cell: Cell) -> Path:
        """Return the directory of the checkpoints of a running cell, which is removed when the cell is finished."""
        return self.folder / _UNFINISHED / cell.stem

    def show(self, shown: Any, *, plot: bool) -> int:
        """Print the results of the cells (`writer.Shown`), write them to table.md, and draw the pictures."""
        text = shown.text()
        self.write("table.md", text)
        print("\n" + text)
        for picture in shown.draw(self.folder) if plot else ():
            print(picture)
        return 0

    def write(self, name: str, text: str) -> Path:
        """Write a file in the directory of the experiment atomically."""
        path = self.folder / name
        write_atomically(path, text.encode())
        return path


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def settle(path: Path, settings: Mapping[str, Any], contents: str) -> None:
    """Store the settings of the contents of a directory.

    Args:
        path: The file of the settings.
        settings: The settings.
        contents: Name of the existing contents; empty if there are none.

    Raises:
        ValueError: There are contents of other settings.
    """
    text = json.dumps(settings, indent=1)
    wanted = json.loads(text)
    stored = read_json(path) if path.exists() else {}
    changes = []
    for name in sorted({**stored, **wanted}):
        before = stored.get(name)
        now = wanted.get(name)
        if before != now:
            changes.append(f"{name} {before} (now {now})")

    if stored and changes and contents:
        words = ", ".join(changes)
        raise ValueError(
            f"{path.parent}: has {contents} with {words}; pass another --out or remove the directory"
        )
    if stored != wanted or not path.exists():
        write_atomically(path, f"{text}\n".encode())


def finished_cells(folder: Path) -> Dict[Cell, List[Row]]:
    """Return the rows of every finished cell in the directory of an experiment."""
    records = map(read_json, sorted((Path(folder) / CELLS).glob("*.json")))
    return {Cell(record["variant"], record["seed"]): record["rows"] for record in records}


@contextmanager
def alone(folder: Path, name: str) -> Iterator[None]:
    """Let the processes of a directory run the block one after another."""
    path = Path(folder) / _LOCKS / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with _free(path) as free:
            if free:
                yield
                return
        time.sleep(_WAIT)


@contextmanager
def _free(path: Path) -> Iterator[bool]:
    """Hold the lock file if it is free; the block gets True if it is."""
    held = locked(path, "")
    try:
        held.__enter__()
    except ValueError:
        yield False
        return
    try:
        yield True
    finally:
        held.__exit__(None, None, None)
