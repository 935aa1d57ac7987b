"""Records that cannot be read: where they are, what is wrong with them, and how many may be left out."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from itertools import count
from typing import IO, Any, Iterator, List, NamedTuple, Tuple

from pack_data.cli.command import byte_count, count_from_zero
from pack_data.reading.fields import one_line

# The most bytes of one record, or of one line of JSON: what is read, or unpacked, at once.
MOST_RECORD_BYTES = 64 << 20
_CHUNK = 1 << 20  # of a line that is left out


class Origin(NamedTuple):
    """Where a record is: its file and its number there. Records count from 0, the lines of a text file from 1."""

    path: str
    record: int
    unit: str = "record"

    def __str__(self) -> str:
        return f"{self.path}: {self.unit} {self.record}"


class _BadRecord(NamedTuple):
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
    """The bad records found so far; up to `allowed` are skipped, one more is an error that names it.

    longest: bytes; a longer record is a bad one, which is never read whole.
    """

    allowed: int = 0
    longest: int = MOST_RECORD_BYTES
    found: List[_BadRecord] = field(default_factory=list)
    count: int = field(default=0, init=False)

    def add(self, origin: Origin, reason: str, records: int = 1) -> None:
        """Count `records` bad ones from `origin` on.  Raises ValueError when they are more than allowed."""
        bad = _BadRecord(origin, one_line(reason, 500), records)
        self.found.append(bad)
        self.count += records
        if self.count > self.allowed:
            already = (
                f"{self.count} bad records, --skip-bad {self.allowed} allows fewer"
                if self.allowed
                else ("repair the file, or skip bad records with --skip-bad N")
            )
            raise ValueError(f"{bad} ({already})")

    def too_long(self) -> str:
        """The reason for a record of more than `longest` bytes."""
        return f"it is longer than {self.longest:,} bytes; raise --max-record-bytes where the memory is there"

    def short_lines(self, file: IO, path: str, more: str = "") -> Iterator[Tuple[Origin, Any]]:
        """The lines of a file, of text or of bytes, that are not blank; a longer one than `longest` is a bad record.

        more: words for the message of that one.
        """
        for number in count(1):
            line, origin = file.readline(self.longest + 1), Origin(path, number, "line")
            if not line:
                return
            if len(line) > self.longest and line[-1:] not in ("\n", b"\n"):
                while line and line[-1:] not in ("\n", b"\n"):
                    line = file.readline(_CHUNK)
                self.add(origin, self.too_long() + more)
            elif line.strip():
                yield origin, line

    def stop(self, origin: Origin, reason: str) -> None:
        """Raise ValueError whatever is allowed: it is not known how many records follow this place."""
        raise ValueError(f"{origin}: {one_line(reason, 500)}")


def add_reading_options(parser: argparse.ArgumentParser) -> None:
    """`--skip-bad` and `--max-record-bytes`, of every command that reads sequences or text."""
    parser.add_argument(
        "--skip-bad",
        type=count_from_zero,
        default=0,
        metavar="N",
        help="leave out up to N bad records, or lines of text (default 0: the first is an error)",
    )
    add_record_limit(parser)


def add_record_limit(parser: argparse.ArgumentParser) -> None:
    """`--max-record-bytes` alone."""
    parser.add_argument(
        "--max-record-bytes",
        type=byte_count,
        default=MOST_RECORD_BYTES,
        metavar="N",
        help="a record, or a line of JSON, of more bytes is a bad one, however small it is compressed; "
        f"such as 1GiB (default {MOST_RECORD_BYTES >> 20}MiB)",
    )
