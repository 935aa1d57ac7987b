"""Examples that are longer than a row: one rule for `pack`, the batch samplers and the stream, and its counts.

    longer = Longer("split", 512)
    longer.spans(1300, "line 7")           # [(0, 512), (512, 1024), (1024, 1300)]: begin and end of each piece
    print(longer)                          # 1 of 1 examples is longer than 512 tokens: split into 3 pieces

The rules:
- raise: a ValueError names the example.
- truncate: its first max_sequence_length tokens stay.
- split: it becomes pieces of max_sequence_length tokens and a rest. No token is lost, but a piece does not see the
  pieces before it.
- drop: the whole example is left out, and with `groups` its whole group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, List, NamedTuple, Optional, Tuple

import numpy as np

from pack_data.packing.histogram import unfit, whole_slots
from pack_data.reading.fields import shown

RULES = ("raise", "truncate", "split", "drop")
_WAYS_OUT = "truncate, split or drop"


class _Span(NamedTuple):
    """Tokens start..stop - 1 of an example."""

    start: int
    stop: int


@dataclass
class Longer:
    """A rule for the examples that are longer than a row, and counts of what it did."""

    rule: str
    max_sequence_length: int  # tokens of a row
    examples: int = 0  # seen
    longer: int = 0  # of them, those longer than a row
    pieces: int = 0  # made of those
    tokens: int = 0  # of all examples seen
    lost_tokens: int = 0  # cut off or left out
    partners: int = 0  # examples that fit a row and were dropped with the rest of their group

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"longer = {shown(self.rule)}; choose one of {', '.join(RULES)}")
        self.max_sequence_length = whole_slots(self.max_sequence_length)

    def spans(self, length: int, name: str) -> List[_Span]:
        """Return what is used of an example, and count it.

        Args:
            length: tokens of the example.
            name: of the example, for the error.

        Returns:
            One span; several if the example is split, none if it is dropped.

        Raises:
            ValueError: the example is empty, or longer than a row under the rule "raise".
        """
        row = self.max_sequence_length
        limits = f"{name} has length {length}; lengths go from 1 to max_sequence_length = {row}"
        if length < 1:
            raise ValueError(f"{limits}: leave it out")
        if length > row and self.rule == "raise":
            raise ValueError(f"{limits}: drop or cut it first, or pass longer: {_WAYS_OUT}")
        self.examples += 1
        self.tokens += length
        if length <= row:
            return [_Span(0, length)]

        spans = []
        if self.rule == "truncate":
            spans = [_Span(0, row)]
        elif self.rule == "split":
            spans = [_Span(start, min(start + row, length)) for start in range(0, length, row)]
        self.longer += 1
        self.pieces += len(spans)
        self.lost_tokens += length - sum(stop - start for start, stop in spans)
        return spans

    def __str__(self) -> str:
        """Return one sentence: the number of examples longer than a row, and what became of them."""
        verb = "is" if self.longer == 1 else "are"
        sentence = (
            f"{self.longer:,} of {self.examples:,} examples {verb} longer than "
            f"{self.max_sequence_length:,} tokens"
        )
        lost = f"{self.lost_tokens:,} of {self.tokens:,} tokens"
        if self.partners:
            return (
                f"{sentence}: dropped with {self.partners:,} more of the same groups, {lost} in all"
            )
        if not self.longer:
            return sentence
        outcomes = {
            "truncate": f"truncated, which cuts off {lost}",
            "split": f"split into {self.pieces:,} pieces",
            "drop": f"dropped, with {lost}",
        }
        return f"{sentence}: {outcomes[self.rule]}"


@dataclass(frozen=True, eq=False)
class Fitted:
    """Examples of any lengths as pieces that fit a row, in the order of the examples."""

    lengths: np.ndarray  # integers [pieces], tokens of each piece
    longer: Longer  # the rule and its counts
    example_lengths: np.ndarray  # integers [examples], tokens of each example before the rule
    # int64 [pieces]; None if piece i is the beginning of example i
    _example: Optional[np.ndarray] = None
    _start: Optional[np.ndarray] = None

    def beginning(self, piece: int) -> Tuple[int, int]:
        """Return the example of one piece, and the token at which it begins there."""
        if self._example is None or self._start is None:
            return piece, 0
        return int(self._example[piece]), int(self._start[piece])

    @property
    def example(self) -> np.ndarray:
        """The example of each piece, integers [pieces]."""
        return np.arange(len(self.lengths)) if self._example is None else self._example

    @property
    def start(self) -> np.ndarray:
        """The token at which each piece begins in its example, integers [pieces]."""
        return np.zeros(len(self.lengths), np.int64) if self._start is None else self._start

    @property
    def stop(self) -> np.ndarray:
        """The token behind each piece, integers [pieces]."""
        return self.start + self.lengths.astype(np.int64)

    def without_groups(self, group: np.ndarray, dropped: np.ndarray) -> Fitted:
        """Drop groups of examples under the rule "drop", and count the examples.

        Args:
            group: group of each example, integers [examples], numbered from 0.
            dropped: True for each group to drop, bool [groups].
        """
        counts = replace(self.longer)
        is_dropped = dropped[group]
        counts.partners = int(is_dropped.sum()) - counts.longer
        counts.lost_tokens = int(self.example_lengths[is_dropped].sum(dtype=np.int64))
        kept = ~is_dropped[self.example]
        return Fitted(
            self.lengths[kept], counts, self.example_lengths, self.example[kept], self.start[kept]
        )


def fit(lengths: Any, max_sequence_length: int, longer: str = "raise") -> Fitted:
    """Cut examples into pieces that fit a row.

    Args:
        lengths: tokens of each example, integers [n].
        max_sequence_length: tokens of a row.
        longer: the rule for examples that are longer.

    Raises:
        ValueError: a length is below 1, or above max_sequence_length under the rule "raise"; it names three sequences.
    """
    counts = Longer(longer, max_sequence_length)
    row = counts.max_sequence_length
    lengths = np.asarray(lengths)
    if not lengths.size:
        return Fitted(np.zeros(0, np.int64), counts, np.zeros(0, np.int64))
    if lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError(
            f"lengths must be whole numbers of tokens, one for each sequence; got {lengths.dtype}"
        )
    is_longer = lengths > row
    problem = unfit(lengths if longer == "raise" else np.where(is_longer, 1, lengths), row)
    if problem:
        way_out = "leave them out"
        if longer == "raise" and is_longer.any():
            way_out = f"drop or cut them first, or pass longer: {_WAYS_OUT}"
        raise ValueError(f"{problem}; {way_out}")
    counts.examples = len(lengths)
    counts.tokens = int(lengths.sum(dtype=np.int64))
    if not is_longer.any():
        return Fitted(lengths, counts, lengths)

    tokens = lengths.astype(np.int64)
    pieces_of_longer = {"truncate": 1, "drop": 0}.get(longer, -(-tokens // row))
    pieces = np.where(is_longer, pieces_of_longer, 1)
    example = np.repeat(np.arange(len(lengths)), pieces)
    firsts = np.cumsum(pieces) - pieces
    start = (np.arange(len(example)) - firsts[example]) * row
    fitted = np.minimum(tokens[example] - start, row)
    counts.longer = int(is_longer.sum())
    counts.pieces = int(pieces[is_longer].sum())
    counts.lost_tokens = counts.tokens - int(fitted.sum())
    return Fitted(fitted, counts, lengths, example, start)
