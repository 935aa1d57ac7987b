"""Cells: an experiment is a grid of variants and seeds, and a finished cell is never run again.

    runner = Runner(folder, settings)                                 # settings: all that determine a cell
    rows = runner.run(cells, measure)                                 # measure(cell) -> rows, plain values by name

The directory has one file of results in JSON lines, which is written as a whole after each cell: first the settings,
then a line for each finished cell, last the facts.  So a killed run continues with the same command.  Cells of the same
settings in several directories of one name are joined by `evidence.figures --take`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Sequence

from ipu_packed_bert.benchmarks.work import machine
from pack_data.reading.durable import write_atomically
from pack_data.reading.words import counted

RESULTS = "results.jsonl"

# One measured point: names -> plain values; `variant` and `seed` are those of its cell.
Row = Dict[str, Any]


class Cell(NamedTuple):
    """One run of an experiment."""

    variant: str
    seed: int


Measure = Callable[[Cell], Iterable[Row]]


class Results(NamedTuple):
    """The contents of a file of results."""

    settings: Dict[str, Any]
    cells: Dict[Cell, List[Row]]
    facts: Dict[str, Any]  # about the data and the machine


class Runner:
    """The directory of one experiment.

    Raises:
        ValueError: The directory has cells that were measured with other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / RESULTS
        from ipu_packed_bert.training.run_folder import commit_here  # imports torch

        # All cells of a run have the commit of its settings.
        settings = as_json({**settings, "commit": commit_here()})
        self.results = Results(settings, {}, {})
        if self.path.exists():
            stored = read_results(self.path)
            if stored.cells:
                refuse_other(stored.settings, settings, self.folder, "cells measured")
            self.results = stored._replace(settings=settings)

    def keep_facts(self, facts: Mapping[str, Any]) -> None:
        """Add facts to the stored ones, and the machine."""
        added = {**self.results.facts, **facts, "machine": machine()}
        self.results = self.results._replace(facts=added)
        write_results(self.path, self.results)

    def run(self, cells: Sequence[Cell], measure: Measure) -> List[Row]:
        """Measure the unfinished cells, one after another; return the rows of all cells, in their order."""
        finished = self.results.cells
        missing = [cell for cell in cells if cell not in finished]
        done = len(cells) - len(missing)
        if done:
            print(f"{done} of {counted(len(cells), 'cell')} are already in {self.folder}")
        for cell in missing:
            self._measure(cell, measure)
        return [row for cell in cells for row in finished[cell]]

    def _measure(self, cell: Cell, measure: Measure) -> None:
        """Measure a cell and store its rows."""
        start = time.perf_counter()
        identity = cell._asdict()
        finished = self.results.cells
        try:
            rows = [{**identity, **row} for row in measure(cell)]
        except KeyboardInterrupt:
            print(
                f"\nstopped: {counted(len(finished), 'finished cell')} in {self.folder}; the same command continues",
                file=sys.stderr,
            )
            raise
        finished[cell] = rows
        write_results(self.path, self.results)
        seconds = time.perf_counter() - start
        print(f"{cell.variant}, seed {cell.seed}: {seconds:.1f} s", flush=True)

    def show(self, shown: Any, *, plot: bool) -> int:
        """Print the results of the cells (`writer.Shown`), write them to table.md, and draw the pictures."""
        text = shown.text()
        write_atomically(self.folder / "table.md", text.encode())
        print("\n" + text)
        for picture in shown.draw(self.folder) if plot else ():
            print(picture)
        return 0


def read_results(path: Path) -> Results:
    """Read a file of results; raise ValueError if it does not begin with settings and end with facts."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if len(lines) < 2 or "settings" not in lines[0] or "facts" not in lines[-1]:
        raise ValueError(
            f"{path}: not a file of results, whose first line has settings and whose last line has facts; remove it"
        )
    cells = {Cell(line["variant"], line["seed"]): line["rows"] for line in lines[1:-1]}
    return Results(lines[0]["settings"], cells, lines[-1]["facts"])


def write_results(path: Path, results: Results) -> None:
    """Write a file of results as a whole, with its cells in order."""
    lines: List[Any] = [{"settings": results.settings}]
    for cell, rows in sorted(results.cells.items()):
        lines.append({**cell._asdict(), "rows": rows})
    lines.append({"facts": results.facts})
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    write_atomically(path, text.encode())


def as_json(values: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the values as they are read from a file."""
    read: Dict[str, Any] = json.loads(json.dumps(values))
    return read


def refuse_other(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path, contents: str
) -> None:
    """Raise ValueError if the contents of a directory were made with other settings, as `as_json` returns them."""
    changes = []
    for name in sorted({**stored, **wanted}):
        before = stored.get(name)
        now = wanted.get(name)
        if before != now:
            changes.append(f"{name} {before} (now {now})")
    if changes:
        words = ", ".join(changes)
        raise ValueError(
            f"{folder}: has {contents} with {words}; pass another --out or remove the directory"
        )
