"""Columns of sequences, which the tokenizer makes and the packer uses.

A block of n sequences is a struct of arrays. A column with one value for each token is flat, one sequence after another
("ragged"), so that a step between text and pack is a few NumPy calls over all sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

# The most tokens of a sequence, and slots of a pack, that this package supports.
LONGEST = 1 << 24
# Types of stored columns, little endian, with the end of the values that fit; a batch is int32.
_UNSIGNED_TYPES = (("|u1", 1 << 8), ("<u2", 1 << 16), ("<u4", 1 << 31))
_SIGNED_TYPES = (("|i1", 1 << 7), ("<i2", 1 << 15), ("<i4", 1 << 31))
INTEGER_TYPES = tuple(name for name, _ in _UNSIGNED_TYPES + _SIGNED_TYPES)


class Example(NamedTuple):
    """One pre-training example of BERT: one sequence of a block, as Python values.

    `input_ids`: [CLS] A [SEP] B [SEP]; `first_segment_length`: tokens up to and with the first [SEP];
    `masked_lm_positions`: positions in the example, ascending; `masked_lm_ids`: the original tokens there;
    `next_sentence_label`: 1 if B is a random segment, 0 if it is the real next one.
    """

    input_ids: List[int]
    first_segment_length: int
    masked_lm_positions: List[int]
    masked_lm_ids: List[int]
    next_sentence_label: int


def starts_of(lengths: np.ndarray) -> np.ndarray:
    """Return the start of each ragged row, int64 [n], for lengths [n]."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return ends - lengths


def smallest_type(largest: int, smallest: int = 0) -> str:
    """Return the smallest integer type, little endian, that holds `smallest` to `largest`; unsigned if possible."""
    for name, limit in _SIGNED_TYPES if smallest < 0 else _UNSIGNED_TYPES:
        if -limit <= smallest and largest < limit:
            return name
    value = largest if largest >= 1 << 31 else smallest
    raise ValueError(
        f"a column holds {value}, beyond int32; store values from -2147483648 to 2147483647"
    )


def check_multiple(slots: int, multiple_of: int) -> None:
    """Raise ValueError unless rows of `slots` slots can hold sequences rounded up to multiples."""
    if slots % multiple_of:
        raise ValueError(
            f"max_sequence_length = {slots} is not a multiple of multiple_of = {multiple_of}; choose one that is"
        )


def ragged_index(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return indices start, ..., start + length - 1 of every row, concatenated, int64 [sum of lengths]."""
    lengths = np.asarray(lengths, dtype=np.int64)
    index = np.repeat(np.asarray(starts, dtype=np.int64) - starts_of(lengths), lengths)
    index += np.arange(len(index))
    return index


# Values handled at a time, so that intermediate results stay in the processor's cache.
_BLOCK = 1 << 16


def _rows_by_length(lengths: np.ndarray) -> Iterator[Tuple[int, np.ndarray]]:
    """Yield a length and the numbers of rows that have it, _BLOCK values at a time; every row once but empty ones.

    Rows of one length are a table, whose rows NumPy copies and sums whole; rows of any lengths need an index per value.
    """
    order = np.argsort(lengths)
    unique, first = np.unique(lengths[order], return_index=True)
    for length, rows in zip(unique.tolist(), np.split(order, first[1:])):
        if length:
            step = max(1, _BLOCK // length)
            for at in range(0, len(rows), step):
                yield length, rows[at : at + step]


def _windows(values: np.ndarray, length: int) -> np.ndarray:
    """Return the windows of `length` values that begin at each place, each as one item; nothing is copied."""
    size = values.itemsize
    return np.ndarray(max(0, len(values) - length + 1), f"V{length * size}", values, 0, (size,))


def ragged_copy(
    target: np.ndarray,
    target_starts: np.ndarray,
    source: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
) -> None:
    """Copy rows of these lengths, each from its start in one flat column to its start in another of the same type."""
    assert target.dtype == source.dtype, (target.dtype, source.dtype)
    source = np.ascontiguousarray(source)
    for length, rows in _rows_by_length(lengths):
        _windows(target, length)[target_starts[rows]] = _windows(source, length)[starts[rows]]


def _values_of_rows(lengths: np.ndarray, first: int, end: int) -> slice:
    """Return the place of the values of rows `first` to `end` in a flat column."""
    return slice(int(lengths[:first].sum(dtype=np.int64)), int(lengths[:end].sum(dtype=np.int64)))


@dataclass(frozen=True, eq=False)
class Sequences:
    """n sequences in columns.

    `lengths`: tokens of each, [n]; `tokens`: name -> one value a token, flat, [sum of lengths];
    `prediction_counts`: masked tokens of each, [n]; `predictions`: name -> one value a masked token, flat;
    `scalars`: name -> one value a sequence, [n].
    """

    lengths: np.ndarray
    tokens: Dict[str, np.ndarray]
    prediction_counts: np.ndarray
    predictions: Dict[str, np.ndarray]
    scalars: Dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def of_tokens(
        cls,
        lengths: np.ndarray,
        tokens: Mapping[str, np.ndarray],
        scalars: Optional[Mapping[str, np.ndarray]] = None,
    ) -> Sequences:
        """Return sequences of any integer columns, without masked tokens.

        Args:
            lengths: Tokens of each sequence, integers [n].
            tokens: Columns with one value for each token, flat [sum of lengths], by name.
            scalars: Columns with one value for each sequence, [n], by name.
        """
        lengths = np.asarray(lengths)
        return cls(lengths, dict(tokens), np.zeros(len(lengths), np.int64), {}, dict(scalars or {}))

    @classmethod
    def from_examples(cls, examples: Iterable[Example]) -> Sequences:
        """Return the columns of examples, in their order.

        Args:
            examples: BERT pre-training examples.
        """
        examples = list(examples)

        def column(name: str) -> np.ndarray:
            return np.array([getattr(example, name) for example in examples], dtype=np.int64)

        def flat_column(name: str) -> np.ndarray:
            rows = (getattr(example, name) for example in examples)
            return np.array(list(chain.from_iterable(rows)), dtype=np.int64)

        def sizes(name: str) -> np.ndarray:
            return np.array([len(getattr(example, name)) for example in examples], dtype=np.int64)

        predictions = ("masked_lm_positions", "masked_lm_ids")
        return cls(
            sizes("input_ids"),
            {"input_ids": flat_column("input_ids")},
            sizes("masked_lm_ids"),
            {name: flat_column(name) for name in predictions},
            {
                "first_segment_lengths": column("first_segment_length"),
                "next_sentence_labels": column("next_sentence_label"),
            },
        )

    def to_examples(self) -> List[Example]:
        """Return the examples: the inverse of `from_examples`."""
        ids = np.split(self.tokens["input_ids"], np.cumsum(self.lengths))
        ends = np.cumsum(self.prediction_counts)
        positions = np.split(self.predictions["masked_lm_positions"], ends)
        labels = np.split(self.predictions["masked_lm_ids"], ends)
        examples = []
        for row in range(len(self)):
            example = Example(
                ids[row].tolist(),
                int(self.scalars["first_segment_lengths"][row]),
                positions[row].tolist(),
                labels[row].tolist(),
                int(self.scalars["next_sentence_labels"][row]),
            )
            examples.append(example)
        return examples

    def part(self, first: int, end: int) -> Sequences:
        """Return a range of the sequences, as views.

        Args:
            first: Number of the first sequence.
            end: Number after the last sequence.
        """
        tokens = _values_of_rows(self.lengths, first, end)
        predictions = _values_of_rows(self.prediction_counts, first, end)
        return Sequences(
            self.lengths[first:end],
            {name: values[tokens] for name, values in self.tokens.items()},
            self.prediction_counts[first:end],
            {name: values[predictions] for name, values in self.predictions.items()},
            {name: values[first:end] for name, values in self.scalars.items()},
        )

    def take(self, order: np.ndarray) -> Sequences:
        """Return copies of some sequences.

        Args:
            order: Numbers of the sequences, integers [m], in the order of the result; a number may be repeated.
        """
        lengths = self.lengths[order]
        counts = self.prediction_counts[order]

        def taken(
            columns: Mapping[str, np.ndarray], before: np.ndarray, after: np.ndarray
        ) -> Dict[str, np.ndarray]:
            copies = {}
            for name, values in columns.items():
                copies[name] = np.empty(int(after.sum()), values.dtype)
                ragged_copy(copies[name], starts_of(after), values, starts_of(before)[order], after)
            return copies

        tokens = taken(self.tokens, self.lengths, lengths)
        predictions = taken(self.predictions, self.prediction_counts, counts)
        scalars = {name: values[order] for name, values in self.scalars.items()}
        return Sequences(lengths, tokens, counts, predictions, scalars)

    @staticmethod
    def concatenate(blocks: Sequence[Sequences]) -> Sequences:
        """Join blocks of sequences.

        Args:
            blocks: At least one block; all have the same columns.
        """

        def joined(columns: Sequence[Mapping[str, np.ndarray]]) -> Dict[str, np.ndarray]:
            return {
                name: np.concatenate([column[name] for column in columns]) for name in columns[0]
            }

        return Sequences(
            np.concatenate([block.lengths for block in blocks]),
            joined([block.tokens for block in blocks]),
            np.concatenate([block.prediction_counts for block in blocks]),
            joined([block.predictions for block in blocks]),
            joined([block.scalars for block in blocks]),
        )


def mix_bits(values: np.ndarray) -> np.ndarray:
    """Mix all bits in place, uint64, by the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _weights(count: int, stream: int) -> np.ndarray:
    """Return at least `count` odd pseudo-random multipliers, uint64, the same in every process."""
    return _weights_of(1 << (count - 1).bit_length() if count else 1, stream)


@lru_cache(maxsize=64)
def _weights_of(count: int, stream: int) -> np.ndarray:
    numbers = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(
        stream << 32
    )
    return mix_bits(numbers) | np.uint64(1)


@lru_cache(maxsize=64)
def _sums_of_weights(count: int, stream: int) -> np.ndarray:
    """Return the sums of the first 0, 1, ... `count` weights, modulo 2**64."""
    sums: np.ndarray = np.append(np.uint64(0), np.cumsum(_weights_of(count, stream)))
    return sums


def digest(sequences: Sequences) -> int:
    """Return a number below 2**64 that depends on the content of the sequences and not on their order.

    The digest of a data set is the sum of its blocks' digests modulo 2**64. It shows that every sequence is there
    exactly once without holding the sequences: a lost, repeated or changed one gives another sum (with a probability of
    2**-64 to the contrary).
    """
    lengths = sequences.lengths.astype(np.int64)
    counts = sequences.prediction_counts.astype(np.int64)
    total = mix_bits(lengths.astype(np.uint64) + np.uint64(1))
    stream = 0
    for columns, sizes in ((sequences.tokens, lengths), (sequences.predictions, counts)):
        starts = starts_of(sizes)
        longest = int(sizes.max(initial=0))
        for name in sorted(columns):
            stream += 1
            values = np.ascontiguousarray(columns[name])
            weights = _weights(longest, stream)
            # The sum of weight times value + 1, so that a value of 0 counts too.
            total += _sums_of_weights(len(weights), stream)[sizes]
            for length, rows in _rows_by_length(sizes):
                table = (
                    _windows(values, length)[starts[rows]].view(values.dtype).reshape(-1, length)
                )
                total[rows] += table.astype(np.uint64) @ weights[:length]
            mix_bits(total)
    for name in sorted(sequences.scalars):
        stream += 1
        total += (sequences.scalars[name].astype(np.uint64) + np.uint64(1)) * _weights(1, stream)[0]
        mix_bits(total)
    return int(np.add.reduce(total))
