"""Columns of sequences: made by the tokenizer, consumed by the packer.

A block of n sequences is a struct of arrays. A column with one value for each token is flat, one sequence after another
("ragged"), so that a step between text and pack is a few NumPy calls over all sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

# The most tokens of a sequence and slots of a pack that anything here is made for.
LONGEST = 1 << 24


class Example(NamedTuple):
    """One pre-training example of BERT: one sequence of a block, as Python values.

    `input_ids`: [CLS] A [SEP] B [SEP]; `first_segment_length`: tokens up to and with the first [SEP];
    `masked_lm_positions`: positions in the example, ascending; `masked_lm_ids`: the original tokens there;
    `next_sentence_label`: 1 where B is a random segment, 0 where it is the real next one.
    """

    input_ids: List[int]
    first_segment_length: int
    masked_lm_positions: List[int]
    masked_lm_ids: List[int]
    next_sentence_label: int


def starts_of(lengths: np.ndarray) -> np.ndarray:
    """Where each ragged row starts, int64 [n] for lengths [n]."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return ends - lengths


def rounded_up(lengths: np.ndarray, multiple_of: int) -> np.ndarray:
    """Slots that sequences of these lengths take: the lengths, rounded up to a multiple as int64."""
    return lengths if multiple_of == 1 else -(-np.asarray(lengths, np.int64) // multiple_of) * multiple_of


def check_multiple(slots: int, multiple_of: int) -> None:
    """ValueError unless rows of so many slots can hold sequences rounded up to multiples."""
    if slots % multiple_of:
        raise ValueError(f"max_sequence_length = {slots} is no multiple of {multiple_of} = multiple_of; choose another")


def ragged_index(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Indices start, start + 1, ..., start + length - 1 of every row, one row after another, int64 [sum of lengths]."""
    lengths = np.asarray(lengths, dtype=np.int64)
    index = np.repeat(np.asarray(starts, dtype=np.int64) - starts_of(lengths), lengths)
    index += np.arange(len(index))
    return index


# Values handled at a time, so that what is computed of them stays in the processor's cache.
_BLOCK = 1 << 16


def _alike(lengths: np.ndarray) -> Iterator[Tuple[int, np.ndarray]]:
    """A length and the numbers of rows that have it, _BLOCK values at a time; every row once but the empty ones.

    Rows of one length are a table, whose rows NumPy copies and sums whole; rows of any lengths need an index a value.
    """
    order = np.argsort(lengths)
    found, first = np.unique(lengths[order], return_index=True)
    for length, rows in zip(found.tolist(), np.split(order, first[1:])):
        if length:
            step = max(1, _BLOCK // length)
            yield from ((length, rows[at : at + step]) for at in range(0, len(rows), step))


def _cells(values: np.ndarray, length: int) -> np.ndarray:
    """At every place the value there and those behind it, `length` of them, as one value; not copied."""
    size = values.itemsize
    return np.ndarray(max(0, len(values) - length + 1), f"V{length * size}", values, 0, (size,))


def ragged_copy(
    target: np.ndarray, target_starts: np.ndarray, source: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> None:
    """Copies rows of these lengths, each from its place in one flat column to its place in another of the same type."""
    assert target.dtype == source.dtype, (target.dtype, source.dtype)
    source = np.ascontiguousarray(source)
    for length, rows in _alike(lengths):
        _cells(target, length)[target_starts[rows]] = _cells(source, length)[starts[rows]]


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
        cls, lengths: np.ndarray, tokens: Mapping[str, np.ndarray], scalars: Optional[Mapping[str, np.ndarray]] = None
    ) -> Sequences:
        """Sequences of any integer columns of equal length, without masked tokens."""
        lengths = np.asarray(lengths)
        return cls(lengths, dict(tokens), np.zeros(len(lengths), np.int64), {}, dict(scalars or {}))

    @classmethod
    def from_examples(cls, examples: Iterable[Example]) -> Sequences:
        """Columns from examples, in their order."""
        examples = list(examples)

        def flat(rows: Sequence[Sequence[int]]) -> np.ndarray:
            return np.array([value for row in rows for value in row], dtype=np.int64)

        return cls(
            lengths=np.array([len(example.input_ids) for example in examples], dtype=np.int64),
            tokens={"input_ids": flat([example.input_ids for example in examples])},
            prediction_counts=np.array([len(example.masked_lm_ids) for example in examples], dtype=np.int64),
            predictions={
                "masked_lm_positions": flat([example.masked_lm_positions for example in examples]),
                "masked_lm_ids": flat([example.masked_lm_ids for example in examples]),
            },
            scalars={
                "first_segment_lengths": np.array([e.first_segment_length for e in examples], dtype=np.int64),
                "next_sentence_labels": np.array([e.next_sentence_label for e in examples], dtype=np.int64),
            },
        )

    def to_examples(self) -> List[Example]:
        """Inverse of `from_examples`."""
        token_ends, prediction_ends = np.cumsum(self.lengths), np.cumsum(self.prediction_counts)
        return (
            [
                Example(ids.tolist(), int(first), positions.tolist(), labels.tolist(), int(label))
                for ids, first, positions, labels, label in zip(
                    np.split(self.tokens["input_ids"], token_ends[:-1]),
                    self.scalars["first_segment_lengths"],
                    np.split(self.predictions["masked_lm_positions"], prediction_ends[:-1]),
                    np.split(self.predictions["masked_lm_ids"], prediction_ends[:-1]),
                    self.scalars["next_sentence_labels"],
                )
            ]
            if len(self)
            else []
        )

    def part(self, first: int, end: int) -> Sequences:
        """The sequences from number `first` up to `end`, which is not among them; not copied."""
        token, last_token, masked, last_masked = (
            int(counts[:row].sum(dtype=np.int64))
            for counts in (self.lengths, self.prediction_counts)
            for row in (first, end)
        )
        return Sequences(
            self.lengths[first:end],
            {name: values[token:last_token] for name, values in self.tokens.items()},
            self.prediction_counts[first:end],
            {name: values[masked:last_masked] for name, values in self.predictions.items()},
            {name: values[first:end] for name, values in self.scalars.items()},
        )

    def take(self, order: np.ndarray) -> Sequences:
        """The sequences with the numbers `order` [m], in that order; each may come any number of times."""
        lengths, counts = self.lengths[order], self.prediction_counts[order]

        def taken(columns: Mapping[str, np.ndarray], before: np.ndarray, after: np.ndarray) -> Dict[str, np.ndarray]:
            found = {name: np.empty(int(after.sum()), values.dtype) for name, values in columns.items()}
            for name, values in columns.items():
                ragged_copy(found[name], starts_of(after), values, starts_of(before)[order], after)
            return found

        tokens = taken(self.tokens, self.lengths, lengths)
        predictions = taken(self.predictions, self.prediction_counts, counts)
        return Sequences(lengths, tokens, counts, predictions, {name: v[order] for name, v in self.scalars.items()})

    @staticmethod
    def concatenate(blocks: Sequence[Sequences]) -> Sequences:
        """One block after another; all have the same columns, and there is at least one."""

        def joined(columns: Sequence[Mapping[str, np.ndarray]]) -> Dict[str, np.ndarray]:
            return {name: np.concatenate([column[name] for column in columns]) for name in columns[0]}

        return Sequences(
            np.concatenate([block.lengths for block in blocks]),
            joined([block.tokens for block in blocks]),
            np.concatenate([block.prediction_counts for block in blocks]),
            joined([block.predictions for block in blocks]),
            joined([block.scalars for block in blocks]),
        )


def _mixed(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), in place on uint64: a mixture of all bits."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _weights(count: int, stream: int) -> np.ndarray:
    """Odd pseudo-random multipliers, uint64, at least `count` of them, the same in every process."""
    return _weights_of(1 << (count - 1).bit_length() if count else 1, stream)


@lru_cache(maxsize=64)
def _weights_of(count: int, stream: int) -> np.ndarray:
    numbers = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(stream << 32)
    return _mixed(numbers) | np.uint64(1)


@lru_cache(maxsize=64)
def _sums_of_weights(count: int, stream: int) -> np.ndarray:
    """Of the first 0, 1, ... `count` weights, modulo 2**64."""
    sums: np.ndarray = np.append(np.uint64(0), np.cumsum(_weights_of(count, stream)))
    return sums


def digest(sequences: Sequences) -> int:
    """A number below 2**64 that depends on the content of the sequences and not on their order.

    The digest of a data set is the sum of its blocks' digests modulo 2**64. It shows that every sequence is there
    exactly once without holding the sequences: a lost, repeated or changed one gives another sum (but for a chance of
    2**-64).
    """
    lengths, counts = sequences.lengths.astype(np.int64), sequences.prediction_counts.astype(np.int64)
    total = _mixed(lengths.astype(np.uint64) + np.uint64(1))
    stream = 0
    for columns, rows in ((sequences.tokens, lengths), (sequences.predictions, counts)):
        starts, most = starts_of(rows), int(rows.max(initial=0))
        for name in sorted(columns):
            stream += 1
            values, weights = np.ascontiguousarray(columns[name]), _weights(most, stream)
            # The sum of weight times value + 1, so that a value of 0 counts too.
            total += _sums_of_weights(len(weights), stream)[rows]
            for length, alike in _alike(rows):
                table = _cells(values, length)[starts[alike]].view(values.dtype).reshape(-1, length)
                total[alike] += table.astype(np.uint64) @ weights[:length]
            _mixed(total)
    for name in sorted(sequences.scalars):
        stream += 1
        total += (sequences.scalars[name].astype(np.uint64) + np.uint64(1)) * _weights(1, stream)[0]
        _mixed(total)
    return int(np.add.reduce(total))
