"""One data set of a build: where it is made, where it goes, and what was there before."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Optional

from pack_data.building.atomic_replace import READY
from pack_data.building.tasks import examples_name
from pack_data.store.data_set import Manifest


class BuildSide:
    """A build makes one data set, or two: the training side and the held-out side (sides.py)."""

    def __init__(self, name: Optional[str], work: Path, out: Path, former: Optional[Manifest]) -> None:
        """name: one of sides.py, None for the only one; former: the data set in `out` that is appended to."""
        self.name, self.work, self.out, self.former = name, work, out, former
        # Parts are numbered on, so that what is appended draws other random numbers.
        self.first_stream: int = former.made_with["parts"] if former else 0
        # Of each part of what is new, see tasks.save_examples; known when all parts are made.
        self.notes: List[Dict[str, Any]] = []

    @property
    def ready(self) -> Path:
        """The folder of finished files."""
        return self.work / READY

    @property
    def sequences(self) -> int:
        """How many are new."""
        return sum(note["totals"][0] for note in self.notes)

    @property
    def digest(self) -> int:
        """Of all sequences of this side, the former ones included (sequences.py)."""
        former = self.former.digest if self.former else 0
        return (sum(note["digest"] for note in self.notes) + former) % (1 << 64)

    def is_missing(self, part: int) -> bool:
        """Whether the examples of a part are still to be made."""
        return not (self.work / f"{examples_name(part)}.json").exists()
