"""Records that cannot be read: their place, the reason, and the number that may be skipped."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any, Iterator, List, NamedTuple, Tuple

from pack_data.reading.fields import one_line
from pack_data.reading.words import counted

# The most bytes of one record or one line of JSON, which is read or unpacked at once: 64 MiB.
MOST_RECORD_BYTES = 64 << 20
# Bytes per read of a line that is skipped.
_CHUNK = 1 << 20


class Origin(NamedTuple):
    """The place of a record: its file and its number. Records count from 0, lines of text files from 1."""

    path: str
    record: int
    unit: str = "record"

    def __str__(self) -> str:
        return f"{self.path}: {self.unit} {self.record}"


class _BadRecord(NamedTuple):
    origin: Origin
    reason: str
    records: int = 1  # more than one if the format can only be read in blocks

    def __str__(self) -> str:
        if self.records == 1:
            return f"{self.origin}: {self.reason}"
        last = self.origin.record + self.records - 1
        return f"{self.origin.path}: records {self.origin.record} to {last}: {self.reason}"


@dataclass
class BadRecords:
    """The bad records so far: up to `allowed` are skipped, and the next one is an error that names it.

    A record of more than `longest` bytes is bad and is never read whole. `count`: bad records, and bad lines of texts.
    `lines`: the latter. `empty`: the texts without words, which are left out and not bad.
    """

    allowed: int = 0
    longest: int = MOST_RECORD_BYTES
    found: List[_BadRecord] = field(default_factory=list)
    count: int = field(default=0, init=False)
    lines: int = field(default=0, init=False)
    empty: int = field(default=0, init=False)

    def add(self, origin: Origin, reason: str, records: int = 1) -> None:
        """Count `records` bad records from `origin` on; raise ValueError if there are more than allowed."""
        bad = _BadRecord(origin, one_line(reason, 500), records)
        self.found.append(bad)
        self.count += records
        if self.count > self.allowed:
            way_out = "repair the file, or skip bad records and lines with --skip-bad N"
            if self.allowed:
                way_out = f"{self.counted}, --skip-bad {self.allowed} allows fewer"
            raise ValueError(f"{bad} ({way_out})")

    def add_line(self, origin: Origin, reason: str) -> None:
        """Count a bad line of a text, of which the other lines are read; raise ValueError as `add` does."""
        self.lines += 1
        self.add(origin, reason)

    @property
    def counted(self) -> str:
        """The number of bad records and of bad lines."""
        counts = {"bad record": self.count - self.lines, "bad line": self.lines}
        return " and ".join(counted(number, noun) for noun, number in counts.items() if number)

    def nothing_left(self, source: object) -> ValueError:
        """Return the error for a source without a record that can be read, with the first reason."""
        if not self.found:
            return ValueError(f"{source}: has no record; nothing to pack")
        return ValueError(
            f"{source}: nothing is left without the {self.counted}; the first: {self.found[0]}"
        )

    def too_long(self) -> str:
        """Return the reason for a record of more than `longest` bytes."""
        return f"it is longer than {self.longest:,} bytes; raise --max-record-bytes if the memory suffices"

    def short_lines(self, file: Any, path: str, first: int = 1) -> Iterator[Tuple[Origin, Any]]:
        """Yield the lines of a text or binary file that are not blank; a line above `longest` bytes is a bad record.

        `first` is the number of the first line.
        """
        for number in count(first):
            line = file.readline(self.longest + 1)
            if not line:
                return
            origin = Origin(path, number, "line")
            if len(line) > self.longest and not _ends(line):
                while line and not _ends(line):
                    line = file.readline(_CHUNK)
                self.add(origin, self.too_long())
            elif line.strip():
                yield origin, line

    def stop(self, origin: Origin, reason: str) -> None:
        """Raise ValueError whatever is allowed, because nobody knows how many records follow."""
        raise ValueError(f"{origin}: {one_line(reason, 500)}")


def _ends(line: Any) -> bool:
    """Return True if a line of text or bytes is complete."""
    return line[-1:] in ("\n", b"\n")
