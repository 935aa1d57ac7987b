"""Cells: an experiment is a grid of variants and seeds, and a cell that is finished is never run again.

    runner = Runner(folder, settings)                                 # settings: all that decides what a cell measures
    rows = runner.run(cells, measure)                                 # measure(cell) -> rows, plain values by name

Each finished cell is a file in `cells/`, written whole or not at all. Several processes may run one experiment in one
folder: each takes the next cell that nobody has, and the lock of a cell ends with its process, however that ends. So a
run that was killed goes on with the same command.
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
from pack_data.cli.command import counted, progress_bar
from pack_data.reading.files import locked, write_atomically

CELLS, SETTINGS = "cells", "settings.json"
FACTS = "facts.json"  # what the cells do not say: of the data, the machine
_LOCKS, _UNFINISHED = "locks", "unfinished"
_WAIT = 1.0  # seconds between two looks at a cell that another process has

Row = Dict[str, Any]  # one measured point: names -> plain values; `variant` and `seed` come from its cell


class Cell(NamedTuple):
    """One run of an experiment."""

    variant: str
    seed: int

    @property
    def stem(self) -> str:
        """Of its files: the variant may have any characters."""
        return f"{quote(self.variant, safe='')}-{self.seed}"


class Runner:
    """The folder of one experiment, which several processes may share.

    Raises ValueError where the folder holds cells that were measured with other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        for name in (CELLS, _LOCKS):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        from ipu_packed_bert.training.run_folder import commit_here  # only now: it needs torch

        # Every cell of a run comes from one commit: its settings say which.
        settings = {**settings, "commit": commit_here()}
        with alone(self.folder, "settings"):
            settle(self.folder / SETTINGS, settings, "cells measured" if finished_cells(self.folder) else "")

    def keep_facts(self, facts: Mapping[str, Any]) -> None:
        """What the cells do not say, beside what is kept already; the machine is added."""
        path = self.folder / FACTS
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.write(FACTS, json.dumps({**before, **facts, "machine": machine()}) + "\n")

    def run(self, cells: Sequence[Cell], measure: Callable[[Cell], Iterable[Row]]) -> List[Row]:
        """The rows of these cells, in their order; those that are not finished yet are measured, one after another.

        Cells that other processes have are waited for, and taken over where their process ends without them.
        """
        finished = finished_cells(self.folder)
        missing = [cell for cell in cells if cell not in finished]
        if len(missing) < len(cells):
            print(f"{len(cells) - len(missing)} of {counted(len(cells), 'cell')} are in {self.folder} already")
        with progress_bar(len(cells), "cells", unit=" cells", done=len(cells) - len(missing)) as bar:
            while missing:
                taken = [cell for cell in missing if self._finish(cell, measure, bar)]
                missing = [cell for cell in missing if cell not in taken]
                if missing and not taken:
                    time.sleep(_WAIT)
        finished = finished_cells(self.folder)
        return [row for cell in cells for row in finished[cell]]

    def _finish(self, cell: Cell, measure: Callable[[Cell], Iterable[Row]], bar: Any) -> bool:
        """Whether the cell is finished, by this process or by another one; False while another one has it."""
        path = self.folder / CELLS / f"{cell.stem}.json"
        with _free(self.folder / _LOCKS / f"{cell.stem}.lock") as free:
            if not free:
                return False
            if not path.exists():  # else another process has finished it meanwhile
                bar.set_postfix_str(f"{cell.variant}, seed {cell.seed}")
                start = time.perf_counter()
                try:
                    rows = [{"variant": cell.variant, "seed": cell.seed, **row} for row in measure(cell)]
                except KeyboardInterrupt:
                    kept = counted(len(finished_cells(self.folder)), "finished cell")
                    print(f"\nstopped: {kept} in {self.folder}; the same command goes on", file=sys.stderr)
                    raise
                seconds = round(time.perf_counter() - start, 3)
                record = {"variant": cell.variant, "seed": cell.seed, "seconds": seconds, "rows": rows}
                write_atomically(path, (json.dumps(record) + "\n").encode())
                shutil.rmtree(self.unfinished(cell), ignore_errors=True)
                if not (sys.stderr and sys.stderr.isatty()):
                    print(f"{cell.variant}, seed {cell.seed}: {seconds:.1f} s", flush=True)
        bar.update(1)
        return True

    def unfinished(self, cell: Cell) -> Path:
        """A folder for what a cell under way keeps, to go on from; it is removed when the cell is finished."""
        return self.folder / _UNFINISHED / cell.stem

    def show(self, shown: Any, *, plot: bool) -> int:
        """Prints what the cells say (`writer.Shown`) and keeps it as table.md, draws the pictures."""
        text = shown.text()
        self.write("table.md", text)
        print("\n" + text)
        for picture in shown.draw(self.folder) if plot else ():
            print(picture)
        return 0

    def write(self, name: str, text: str) -> Path:
        """A file in the experiment's folder, whole or not at all."""
        path = self.folder / name
        write_atomically(path, text.encode())
        return path


def settle(path: Path, settings: Mapping[str, Any], holds: str) -> None:
    """Notes what decides the contents of a folder. ValueError where it `holds` what was made with other settings."""
    wanted = json.loads(json.dumps(settings))
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    different = sorted(name for name in {**found, **wanted} if found.get(name) != wanted.get(name))
    if found and different and holds:
        changes = ", ".join(f"{name} {found.get(name)} (now {wanted.get(name)})" for name in different)
        raise ValueError(f"{path.parent}: holds {holds} with {changes}; give another --out or remove the folder")
    if found != wanted or not path.exists():
        write_atomically(path, (json.dumps(wanted, indent=1) + "\n").encode())


def finished_cells(folder: Path) -> Dict[Cell, List[Row]]:
    """The rows of every finished cell of an experiment's folder."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((Path(folder) / CELLS).glob("*.json"))]
    return {Cell(record["variant"], record["seed"]): record["rows"] for record in records}


class RunFolder(NamedTuple):
    """What the folder of an experiment's run holds."""

    settings: Dict[str, Any]
    facts: Dict[str, Any]
    cells: Dict[Cell, List[Row]]  # the finished ones


def read_run(folder: Path) -> RunFolder:
    settings, facts = (json.loads((Path(folder) / name).read_text(encoding="utf-8")) for name in (SETTINGS, FACTS))
    return RunFolder(settings, facts, finished_cells(folder))


@contextmanager
def alone(folder: Path, name: str) -> Iterator[None]:
    """What processes that share a folder do one after another."""
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
    """Holds the lock file where it is free, and says whether it is."""
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
