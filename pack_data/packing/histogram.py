"""The length histogram: the number of sequences of each length, which is all that a packer needs.

Histograms of parts can be added: `packed-bert look FILES` counts files apart and adds them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Union

import numpy as np

from pack_data.packing import PUBLISHED as PUBLISHED
from pack_data.reading.durable import write_atomically
from pack_data.reading.encodings import lines_of_numbers
from pack_data.reading.fields import Fields, said_of, shown, whole_number
from pack_data.store import quantities
from pack_data.store.quantities import rounded_up
from pack_data.store.sequences import LONGEST, check_multiple

# Histograms shipped with this package, with the slots of a pack: the data sets of the paper's Figure 1.
BUNDLED = {
    "wikipedia_mixed_128": 128,
    "wikipedia_mixed_384": 384,
    "wikipedia_512": 512,
    "squad_1_1_384": 384,
    "glue_cola_train_128": 128,
    "glue_sst2_train_128": 128,
    "glue_mrpc_train_128": 128,
    "glue_stsb_train_128": 128,
    "glue_qnli_dev_128": 128,
    "glue_rte_train_128": 128,
    "glue_wnli_train_128": 128,
    "librispeech_text_chars": 576,  # as long as the longest text
    "librispeech_audio_40ms": 874,  # as long as the longest utterance
    "qm9_atoms": 29,  # as long as the largest molecule
}

_DIRECTORY = Path(__file__).parents[1] / "published"
_COLUMNS = ["count", "length"]  # of a table, sorted
_SHOWN = 3  # lengths that a message names
_ZERO_FRACTION = re.compile(r"(?<=\d)\.0*\s*$")  # spreadsheets and pandas write 11 as 11.0
_SHOWN_LETTERS = 60  # of a wrong line, so that the message stays one line
_MOST_SLOTS = 1 << 62  # of all sequences, each padded to S; they are counted in int64


@dataclass(frozen=True, eq=False)
class LengthHistogram:
    """Sequences by length.

    counts: int64 [S + 1], read-only; counts[l] = sequences of l tokens, counts[0] = 0.  S is the slots of one pack.
    """

    counts: np.ndarray
    name: str = ""  # for tables

    def __post_init__(self) -> None:
        # A copy, so that the caller's array stays writable.
        counts = np.array(_as_array("counts", self.counts))
        if counts.ndim != 1 or len(counts) < 2 or not np.issubdtype(counts.dtype, np.integer):
            raise ValueError(
                f"a histogram needs whole numbers for the lengths 0 to S, S >= 1; got {counts.dtype} of shape "
                f"{counts.shape}"
            )
        for length in (int(counts.argmin()), int(counts.argmax())):
            if not 0 <= counts[length] < _MOST_SLOTS:
                raise _error(
                    self.name,
                    f"length {length} occurs {counts[length]} times; a count must be from 0 to 2^62",
                )
        if counts[0]:
            raise _error(
                self.name,
                f"{counts[0]} sequences have length 0; drop them first, a sequence has at least one token",
            )
        # This sum is a float, which cannot overflow.
        if float(counts.sum(dtype=np.float64)) * (len(counts) - 1) >= _MOST_SLOTS:
            raise _error(
                self.name,
                "the counts add up to 2^62 slots or more, too many to account for; correct the counts",
            )
        counts = counts.astype(np.int64, copy=False)
        counts.flags.writeable = False
        object.__setattr__(self, "counts", counts)

    # ---- constructors -----------------------------------------------------------------------------------------------

    @classmethod
    def from_lengths(
        cls, lengths: Any, max_sequence_length: int, name: str = ""
    ) -> LengthHistogram:
        """Count lengths.

        Args:
            lengths: whole numbers of any shape, each from 1 to max_sequence_length: what NumPy reads as an array.
            max_sequence_length: slots of a pack.
            name: of the histogram, for tables.

        Raises:
            ValueError: a length is out of range, or not a whole number.
        """
        max_sequence_length = whole_slots(max_sequence_length)
        lengths = _as_array("lengths", lengths).ravel()
        if not lengths.size:
            return cls(np.zeros(max_sequence_length + 1, np.int64), name)
        if not np.issubdtype(lengths.dtype, np.integer):
            raise _error(name, f"lengths must be whole numbers of tokens, not {lengths.dtype}")
        problem = unfit(lengths, max_sequence_length)
        if problem:
            raise _error(name, f"{problem}; drop or cut them first")
        # NumPy before 2 refuses to count uint64.
        return cls(
            np.bincount(lengths.astype(np.int64, copy=False), minlength=max_sequence_length + 1),
            name,
        )

    @classmethod
    def from_csv(
        cls, path: Union[str, os.PathLike], max_sequence_length: int, name: Optional[str] = None
    ) -> LengthHistogram:
        """Read a table with the columns length and count in its header, each length at most once, in any order.

        Commas or tabs separate the columns; a file whose name ends in .gz, .xz or .bz2 is decompressed.

        Args:
            path: the file.
            max_sequence_length: slots of a pack.
            name: of the histogram, for tables; None for the name of the file.

        Raises:
            ValueError: the file is not such a table.
        """
        S = whole_slots(max_sequence_length)
        counts: Dict[int, int] = {}
        rows = map(
            _fields, lines_of_numbers(path, way_out="a histogram is a CSV file 'length,count'")
        )
        header = next(rows, [])
        names = [name.lower() for name in header]
        if sorted(names) != _COLUMNS:
            text = ascii(",".join(header)[:_SHOWN_LETTERS])
            raise ValueError(
                f"{path}: the first line is {text}; a histogram starts with the line 'length,count'"
            )
        for line, row in enumerate(rows, start=2):
            if row == [""]:
                continue
            try:
                first, second = map(whole_of, row)
            except ValueError:
                text = ascii(",".join(row)[:_SHOWN_LETTERS])
                raise ValueError(
                    f"{path} line {line}: {text} is not two whole numbers 'length,count'"
                ) from None
            length, count = (first, second) if names[0] == "length" else (second, first)
            problem = ""
            if not 1 <= length <= S:
                problem = f"length {shown(length)}; lengths go from 1 to max_sequence_length = {S}"
            elif length in counts:
                problem = f"length {length} occurs twice; give each length once"
            elif not 0 <= count < _MOST_SLOTS:
                problem = f"count {shown(count)}; a count must be from 0 to 2^62"
            if problem:
                raise ValueError(f"{path} line {line}: {problem}")
            counts[length] = count
        with said_of(path):
            return cls(
                _dense(S, counts.keys(), counts.values()), Path(path).stem if name is None else name
            )

    @classmethod
    def published(cls, name: str) -> LengthHistogram:
        """Return one of `BUNDLED`, the histograms of the paper's data sets.

        Their sources are in `published/NOTICE`.

        Args:
            name: of the histogram.

        Raises:
            ValueError: no bundled histogram has this name.
        """
        if name not in BUNDLED:
            raise ValueError(
                f"no bundled histogram is called {name!r}; use one of {', '.join(BUNDLED)}"
            )
        return cls.from_csv(_DIRECTORY / f"{name}.csv", BUNDLED[name], name)

    @classmethod
    def from_json(cls, value: Union[Dict[str, Any], Fields]) -> LengthHistogram:
        """Read a histogram.

        Args:
            value: an object that `to_json` returned.

        Raises:
            ValueError: a field is missing, or its value is out of range.
        """
        fields = Fields.of(value, "histogram", "make it with `to_json`")
        S = fields.integer("max_sequence_length", least=1, most=LONGEST)
        lengths = fields.integers("lengths", least=1, most=S)
        numbers = fields.list_of("counts", Fields.integer, length=len(lengths), least=0, most=2**62)
        # A repeated length would lose sequences.
        if len(set(lengths)) != len(lengths):
            raise fields.error("lengths", "each length must occur once")
        with fields.refusing():
            return cls(_dense(S, lengths, numbers), fields.text("name") if "name" in fields else "")

    # ---- conversions -------------------------------------------------------------------------------------------------

    def to_json(self) -> Dict[str, Any]:
        """Return plain values: name, max_sequence_length, and two lists, the lengths that occur and their counts."""
        return {
            "name": self.name,
            "max_sequence_length": self.max_sequence_length,
            "lengths": self.lengths.tolist(),
            "counts": self.counts[self.lengths].tolist(),
        }

    def to_csv(self, path: Union[str, os.PathLike]) -> None:
        """Write `length,count`, atomically, with the lengths that occur in ascending order.

        Args:
            path: the file; it is replaced if it exists.
        """
        rows = "".join(f"{length},{self.counts[length]}\n" for length in self.lengths.tolist())
        write_atomically(Path(path), ("length,count\n" + rows).encode())

    def with_max_sequence_length(self, max_sequence_length: int) -> LengthHistogram:
        """Return the histogram of the same sequences for packs of another size.

        Args:
            max_sequence_length: slots of a pack, at least the longest sequence.

        Raises:
            ValueError: a sequence is longer.
        """
        max_sequence_length = whole_slots(max_sequence_length)
        if max_sequence_length == self.max_sequence_length:
            return self
        if self.longest > max_sequence_length:
            raise _error(
                self.name,
                f"the longest sequence has {self.longest} tokens; max_sequence_length = {max_sequence_length} is too "
                "short for it",
            )
        counts = np.zeros(max_sequence_length + 1, np.int64)
        counts[: self.longest + 1] = self.counts[: self.longest + 1]
        return LengthHistogram(counts, self.name)

    def rounded_up(self, multiple_of: int) -> LengthHistogram:
        """Return the histogram with each length rounded up to a multiple.

        Args:
            multiple_of: divides max_sequence_length.

        Raises:
            ValueError: max_sequence_length is no multiple of it.
        """
        check_multiple(self.max_sequence_length, multiple_of)
        counts = np.zeros_like(self.counts)
        np.add.at(counts, rounded_up(self.lengths, multiple_of), self.counts[self.lengths])
        return LengthHistogram(counts, self.name)

    def __add__(self, other: LengthHistogram) -> LengthHistogram:
        """Return the histogram of both data sets together; S must agree."""
        if not isinstance(other, LengthHistogram):
            return NotImplemented
        if other.max_sequence_length != self.max_sequence_length:
            raise ValueError(
                f"histograms of max_sequence_length {self.max_sequence_length} and {other.max_sequence_length} cannot "
                "be added; bring both to one length with with_max_sequence_length"
            )
        names = [name for name in (self.name, other.name) if name]
        return LengthHistogram(self.counts + other.counts, " + ".join(dict.fromkeys(names)))

    def __eq__(self, other: object) -> bool:
        """Compare counts and S; the name does not matter."""
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
        """The lengths that occur, int64, ascending."""
        return np.flatnonzero(self.counts).astype(np.int64)

    @property
    def sequences(self) -> int:
        """Sequences of all lengths."""
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        """Real tokens of all sequences."""
        return int(self.counts[self.lengths] @ self.lengths)

    @property
    def longest(self) -> int:
        """The longest length that occurs, 0 for no sequences."""
        return int(self.lengths.max(initial=0))

    @property
    def shortest(self) -> int:
        """The shortest length that occurs, 0 for no sequences."""
        return int(self.lengths[0]) if self.sequences else 0

    @property
    def mean_length(self) -> float:
        """Tokens of a sequence on average, 0 for no sequences."""
        return self.tokens / self.sequences if self.sequences else 0.0

    @property
    def median_length(self) -> int:
        """The length of the middle sequence (the lower of two), 0 for no sequences."""
        up_to = np.cumsum(self.counts)
        return int(np.searchsorted(up_to, (self.sequences + 1) // 2))

    @property
    def padding_share(self) -> float:
        """Fraction of the slots that hold no token if every sequence is padded to S."""
        return quantities.padding_share(self.tokens, self.max_sequence_length * self.sequences)

    @property
    def theoretical_speedup(self) -> float:
        """S x sequences / tokens: the packing factor of a packing without any padding; 1 for no sequences."""
        return quantities.theoretical_speedup(self.max_sequence_length, self.sequences, self.tokens)


def whole_slots(max_sequence_length: Any) -> int:
    """Return the argument `max_sequence_length`, the slots of a pack, as an int; ValueError if it is out of range."""
    return whole_number("max_sequence_length", max_sequence_length, least=1, most=LONGEST)


def unfit(lengths: np.ndarray, most: int, limit: str = "", before: Optional[int] = None) -> str:
    """Describe the lengths that are not from 1 to `most`: how many they are, and the first of them.

    Args:
        lengths: integers [n].
        most: the longest length that is allowed.
        limit: its name in the sentence; empty for max_sequence_length.
        before: number of sequences of the file before these; None if these are all.

    Returns:
        A clause without a way out; empty if all lengths fit.
    """
    wrong = np.flatnonzero((lengths < 1) | (lengths > most))
    if not len(wrong):
        return ""
    first = before or 0
    examples = ", ".join(f"sequence {first + at} has length {lengths[at]}" for at in wrong[:_SHOWN])
    total = f"{first + len(lengths):,}"
    everything = total if before is None else f"the first {total}"
    verb = "is" if len(wrong) == 1 else "are"
    return (
        f"{len(wrong):,} of {everything} lengths {verb} not from 1 to "
        f"{limit or 'max_sequence_length'} = {most} (counted from 0, {examples})"
    )


def _error(name: str, problem: str) -> ValueError:
    return ValueError(f"{name}: {problem}" if name else problem)


def _dense(S: int, lengths: Iterable[int], counts: Iterable[int]) -> np.ndarray:
    """Return int64 [S + 1]: the count of each length, 0 for others."""
    dense = np.zeros(S + 1, np.int64)
    dense[list(lengths)] = list(counts)
    return dense


def _as_array(name: str, values: Any) -> np.ndarray:
    """Return an argument as an array; ValueError, in one line, if NumPy cannot read it."""
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:  # rows of different lengths
        raise ValueError(
            f"{name} = {shown(values)}; must be whole numbers in rows of equal length ({error})"
        ) from None


def is_heading(line: str) -> bool:
    """Return True if a line is the header of a histogram: length and count, in any order and case."""
    return sorted(_fields(line.lower())) == _COLUMNS


def _fields(line: str) -> List[str]:
    """Return the fields of a line of a table, without quotation marks; commas or tabs separate them."""
    unquoted = re.sub('"([^"]*)"', r"\1", line)
    return [field.strip() for field in re.split("[,\t]", unquoted)]


def whole_of(text: str) -> int:
    """Return the whole number in a text, such as 11 or 11.0. ValueError if there is none."""
    try:
        return int(text)
    except ValueError:
        return int(_ZERO_FRACTION.sub("", text))
