"""Records that cannot be read: where they are, what is wrong with them, and how many may be left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, NamedTuple

from pack_data.decoding import one_line


class Origin(NamedTuple):
    """Where a record is: its file and its number there. Records count from 0, the lines of a text file from 1."""

    path: str
    record: int
    unit: str = "record"

    def __str__(self) -> str:
        return f"{self.path}: {self.unit} {self.record}"


class BadRecord(NamedTuple):
    origin: Origin
    reason: str
    records: int = 1  # more than one where records can only be read in blocks

    def __str__(self) -> str:
        if self.records == 1:
            return f"{self.origin}: {self.reason}"
        last = self.origin.record + self.records - 1
        return f"{self.origin.path}: records {self.origin.record} to {last}: {self.reason}"


@dataclass
class BadRecords:
    """The bad records found so far; up to `allowed` are skipped, one more is an error that names it."""

    allowed: int = 0
    found: List[BadRecord] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(bad.records for bad in self.found)

    def add(self, origin: Origin, reason: str, records: int = 1) -> None:
        """Count `records` bad ones from `origin` on.  Raises ValueError when they are more than allowed."""
        bad = BadRecord(origin, one_line(reason, 500), records)
        self.found.append(bad)
        if self.count > self.allowed:
            already = (
                f"{self.count} bad records, --skip-bad {self.allowed} allows fewer"
                if self.allowed
                else ("repair the file, or skip bad records with --skip-bad N")
            )
            raise ValueError(f"{bad} ({already})")

    def stop(self, origin: Origin, reason: str) -> None:
        """Raise ValueError whatever is allowed: it is not known how many records follow this place."""
        raise ValueError(f"{origin}: {one_line(reason, 500)}")
