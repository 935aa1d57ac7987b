"""The length histogram: how many sequences there are of each length, which is all that a packer needs.

Histograms of parts can be added: `packed-bert look FILES` counts files apart and adds them.
"""

from __future__ import annotations

import csv
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Union

import numpy as np

from pack_data.reading.fields import Fields, said_of, shown, whole_number
from pack_data.reading.files import open_regular, short_lines, write_atomically
from pack_data.store.sequences import LONGEST, check_multiple, rounded_up

PUBLISHED = ("wikipedia_512", "squad_1_1_384")  # shipped with this package; the number at the end is S

_FOLDER = Path(__file__).parents[1] / "published"


@dataclass(frozen=True, eq=False)
class LengthHistogram:
    """Sequences by length.

    counts: int64 [S + 1], read-only; counts[l] = sequences of l tokens, counts[0] = 0.  S is the slots of one pack.
    """

    counts: np.ndarray
    name: str = ""  # for tables

    def __post_init__(self) -> None:
        counts = np.array(_as_array("counts", self.counts))  # a copy: the caller's array stays writable
        if counts.ndim != 1 or len(counts) < 2 or not np.issubdtype(counts.dtype, np.integer):
            raise ValueError(
                f"a histogram needs whole numbers for the lengths 0 to S, S >= 1; got {counts.dtype} of shape "
                f"{counts.shape}"
            )
        if counts.max() >= 2**62:
            raise ValueError(
                f"{_of(self.name)}length {counts.argmax()} occurs {counts.max()} times; too many to account for"
            )
        counts = counts.astype(np.int64, copy=False)
        if counts.min() < 0:
            length = int(np.argmax(counts < 0))
            raise ValueError(f"length {length} occurs {int(counts[length])} times; a count is at least 0")
        if counts[0]:
            raise ValueError(
                f"{int(counts[0])} sequences have length 0; a sequence has at least one token, drop them first"
            )
        # Slots are counted in int64; this sum is a float, which cannot overflow.
        if float(counts.sum(dtype=np.float64)) * (len(counts) - 1) >= 2.0**62:
            raise ValueError(
                f"{_of(self.name)}the counts add up to 2^62 slots or more, too many to account for; correct the counts"
            )
        counts.flags.writeable = False
        object.__setattr__(self, "counts", counts)

    # ---- constructors -----------------------------------------------------------------------------------------------

    @classmethod
    def from_lengths(cls, lengths: Any, max_sequence_length: int, name: str = "") -> LengthHistogram:
        """Counts the lengths (array-like of whole numbers, any shape), each from 1 to max_sequence_length."""
        lengths, max_sequence_length = _as_array("lengths", lengths).ravel(), whole_slots(max_sequence_length)
        if lengths.size == 0:
            return cls(np.zeros(max_sequence_length + 1, np.int64), name)
        if not np.issubdtype(lengths.dtype, np.integer):
            raise ValueError(f"lengths are whole numbers of tokens; got {lengths.dtype}")
        low, high = int(lengths.min()), int(lengths.max())
        if low < 1 or high > max_sequence_length:
            bad = low if low < 1 else high
            raise ValueError(
                f"{_of(name)}sequence {int(np.argmax(lengths == bad))} has length {bad}; "
                f"lengths go from 1 to max_sequence_length = {max_sequence_length}: drop or cut it first"
            )
        # NumPy before 2 refuses to count uint64.
        return cls(np.bincount(lengths.astype(np.int64, copy=False), minlength=max_sequence_length + 1), name)

    @classmethod
    def from_csv(
        cls, path: Union[str, os.PathLike], max_sequence_length: int, name: Optional[str] = None
    ) -> LengthHistogram:
        """Reads a table with the header `length,count`, each length at most once, in any order."""
        S = whole_slots(max_sequence_length)
        counts = np.zeros(S + 1, np.int64)
        seen = set()
        rows = _csv_rows(path)
        first = next(rows, [])
        if [field.strip() for field in first] != ["length", "count"]:
            raise ValueError(
                f"{path}: the first line is {ascii(','.join(first)[:60])}; a histogram starts with the line "
                "'length,count'"
            )
        for line, row in enumerate(rows, start=2):
            if not row:
                continue
            try:
                length, count = (int(field) for field in row)
            except ValueError:
                raise ValueError(
                    f"{path} line {line}: {ascii(','.join(row)[:60])} is not two whole numbers 'length,count'"
                ) from None
            if not 1 <= length <= S:
                raise ValueError(
                    f"{path} line {line}: length {shown(length)}; lengths go from 1 to max_sequence_length = {S}"
                )
            if length in seen:
                raise ValueError(f"{path} line {line}: length {length} stands there twice; give each length once")
            if not 0 <= count < 2**62:
                raise ValueError(f"{path} line {line}: count {shown(count)}; a count goes from 0 to 2^62")
            seen.add(length)
            counts[length] = count
        with said_of(path):
            return cls(counts, Path(path).stem if name is None else name)

    @classmethod
    def published(cls, name: str) -> LengthHistogram:
        """One of `PUBLISHED`, the histograms of the paper (sources in published/NOTICE)."""
        if name not in PUBLISHED:
            raise ValueError(f"no published histogram is called {name!r}; there are {', '.join(PUBLISHED)}")
        return cls.from_csv(_FOLDER / f"{name}.csv", int(name.rsplit("_", 1)[1]), name)

    @classmethod
    def from_json(cls, value: Union[Dict[str, Any], Fields]) -> LengthHistogram:
        """Inverse of `to_json`. ValueError for anything else."""
        fields = Fields.of(value, "histogram", "make it with `to_json`")
        S = fields.integer("max_sequence_length", least=1, most=LONGEST)
        lengths = fields.integers("lengths", least=1, most=S)
        numbers = fields.list_of("counts", Fields.integer, length=len(lengths), least=0, most=2**62)
        # A repeated length would lose sequences.
        if len(set(lengths)) != len(lengths):
            raise fields.error("lengths", "each length stands once")
        counts = np.zeros(S + 1, np.int64)
        counts[lengths] = numbers
        with fields.refusing():
            return cls(counts, fields.text("name") if "name" in fields else "")

    # ---- conversions -------------------------------------------------------------------------------------------------

    def to_json(self) -> Dict[str, Any]:
        """Plain values: name, max_sequence_length, and two lists, the lengths that occur and their counts."""
        return {
            "name": self.name,
            "max_sequence_length": self.max_sequence_length,
            "lengths": self.lengths.tolist(),
            "counts": self.counts[self.lengths].tolist(),
        }

    def to_csv(self, path: Union[str, os.PathLike]) -> None:
        """Writes `length,count`, the lengths that occur in ascending order.  Atomic."""
        rows = "".join(f"{length},{self.counts[length]}\n" for length in self.lengths.tolist())
        write_atomically(Path(path), ("length,count\n" + rows).encode())

    def with_max_sequence_length(self, max_sequence_length: int) -> LengthHistogram:
        """The same sequences for packs of another size, at least the longest sequence."""
        max_sequence_length = whole_slots(max_sequence_length)
        if max_sequence_length == self.max_sequence_length:
            return self
        if self.longest > max_sequence_length:
            raise ValueError(
                f"{_of(self.name)}the longest sequence has {self.longest} tokens; "
                f"max_sequence_length = {max_sequence_length} is too short for it"
            )
        counts = np.zeros(max_sequence_length + 1, np.int64)
        counts[: self.longest + 1] = self.counts[: self.longest + 1]
        return LengthHistogram(counts, self.name)

    def rounded_up(self, multiple_of: int) -> LengthHistogram:
        """Each length rounded up to a multiple, which max_sequence_length must be as well."""
        check_multiple(self.max_sequence_length, multiple_of)
        counts = np.zeros_like(self.counts)
        np.add.at(counts, rounded_up(self.lengths, multiple_of), self.counts[self.lengths])
        return LengthHistogram(counts, self.name)

    def __add__(self, other: LengthHistogram) -> LengthHistogram:
        """Both data sets together; S must agree."""
        if not isinstance(other, LengthHistogram):
            return NotImplemented
        if other.max_sequence_length != self.max_sequence_length:
            raise ValueError(
                f"histograms of max_sequence_length {self.max_sequence_length} and {other.max_sequence_length} "
                "do not add up; bring both to one length with with_max_sequence_length"
            )
        names = [name for name in (self.name, other.name) if name]
        return LengthHistogram(self.counts + other.counts, " + ".join(dict.fromkeys(names)))

    def __eq__(self, other: object) -> bool:
        """Equal counts over equal S; the name does not matter."""
        return isinstance(other, LengthHistogram) and np.array_equal(self.counts, other.counts)

    def __hash__(self) -> int:
        return hash((self.max_sequence_length, self.counts.tobytes()))

    # ---- totals ------------------------------------------------------------------------------------------------------

    @property
    def max_sequence_length(self) -> int:
        """Slots of a pack, S."""
        return len(self.counts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """int64, ascending: the lengths that occur."""
        return np.flatnonzero(self.counts).astype(np.int64)

    @property
    def sequences(self) -> int:
        """How many there are, of all lengths."""
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        """Real tokens of all sequences."""
        return int(self.counts[self.lengths] @ self.lengths)

    @property
    def longest(self) -> int:
        """The longest length that occurs, 0 where none does."""
        return int(self.lengths.max(initial=0))

    @property
    def shortest(self) -> int:
        """The shortest length that occurs, 0 where none does."""
        return int(self.lengths[0]) if self.sequences else 0

    @property
    def mean_length(self) -> float:
        """Tokens of a sequence, 0 where there is none."""
        return self.tokens / self.sequences if self.sequences else 0.0

    @property
    def median_length(self) -> int:
        """The length of the middle sequence (the lower of two), 0 where there is none."""
        if not self.sequences:
            return 0
        return int(self.lengths[np.searchsorted(np.cumsum(self.counts[self.lengths]), (self.sequences + 1) // 2)])

    @property
    def padding_share(self) -> float:
        """Slots that hold no token when every sequence is padded to S, a fraction."""
        slots = self.max_sequence_length * self.sequences
        return 1.0 - self.tokens / slots if slots else 0.0

    @property
    def theoretical_speedup(self) -> float:
        """S x sequences / tokens: the packing factor of a packing without any padding (1 for no sequences)."""
        return self.max_sequence_length * self.sequences / self.tokens if self.sequences else 1.0


def whole_slots(max_sequence_length: Any) -> int:
    """The argument `max_sequence_length`: the slots of a pack."""
    return whole_number("max_sequence_length", max_sequence_length, least=1, most=LONGEST)


def _as_array(name: str, values: Any) -> np.ndarray:
    """An argument that NumPy reads as an array. ValueError, in one line, where it does not."""
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:  # rows of different lengths
        raise ValueError(f"{name} = {shown(values)}; must be whole numbers in rows of equal length ({error})") from None


def _csv_rows(path: Union[str, os.PathLike]) -> Iterator[List[str]]:
    """The rows of a table, one at a time. ValueError where it is no text, or has a line that no histogram has."""
    way_out = "a histogram is a CSV file 'length,count'"
    with open_regular(path, way_out=way_out) as raw, io.TextIOWrapper(raw, "utf-8-sig", newline="") as file:
        try:
            yield from csv.reader(short_lines(file, path, way_out=way_out))
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path}: not a text table ({error}); {way_out}") from None


def _of(name: str) -> str:
    return f"{name}: " if name else ""
