"""Examples that are longer than a row: one rule for `pack`, the batch samplers and the stream, and its counts.

    longer = Longer("split", 512)
    longer.spans(1300, "line 7")           # [(0, 512), (512, 1024), (1024, 1300)]: begin and end of each piece
    print(longer)                          # 1 of 1 examples is longer than 512 tokens: split into 3 pieces

The rules:
- raise: a ValueError names the example.
- truncate: its first max_sequence_length tokens stay.
- split: it becomes pieces of max_sequence_length tokens and a rest.  No token is lost, but a piece does not see the
  pieces before it.
- drop: the whole example is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, NamedTuple, Optional, Tuple

import numpy as np

from pack_data.packing.histogram import whole_slots
from pack_data.reading.fields import shown

RULES = ("raise", "truncate", "split", "drop")


class Span(NamedTuple):
    """Tokens start..stop - 1 of an example."""

    start: int
    stop: int


@dataclass
class Longer:
    """A rule for the examples that are longer than a row, and what it has done so far."""

    rule: str
    max_sequence_length: int  # tokens of a row
    examples: int = 0  # seen
    longer: int = 0  # of them, those longer than a row
    pieces: int = 0  # made of those
    tokens: int = 0  # of all examples seen
    lost_tokens: int = 0  # cut off or left out

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"longer = {shown(self.rule)}; choose one of {', '.join(RULES)}")
        self.max_sequence_length = whole_slots(self.max_sequence_length)

    def spans(self, length: int, name: str) -> List[Span]:
        """What is used of an example of `length` tokens: one span, several where it is split, none where it is dropped.

        name: of the example, for the ValueError about one that is empty, or longer where the rule is "raise".
        """
        row = self.max_sequence_length
        if length < 1 or (length > row and self.rule == "raise"):
            way_out = (
                "leave it out" if length < 1 else "drop or cut it first, or choose longer = truncate, split or drop"
            )
            raise ValueError(f"{name} has length {length}; lengths go from 1 to max_sequence_length = {row}: {way_out}")
        self.examples += 1
        self.tokens += length
        if length <= row:
            return [Span(0, length)]
        spans = {
            "truncate": [Span(0, row)],
            "split": [Span(start, min(start + row, length)) for start in range(0, length, row)],
            "drop": [],
        }[self.rule]
        self.longer += 1
        self.pieces += len(spans)
        self.lost_tokens += length - sum(stop - start for start, stop in spans)
        return spans

    def __str__(self) -> str:
        """One sentence: how many examples are longer than a row, and what became of them."""
        which = f"{self.longer:,} of {self.examples:,} examples {'is' if self.longer == 1 else 'are'} longer than "
        which += f"{self.max_sequence_length:,} tokens"
        if not self.longer:
            return which
        lost = f"{self.lost_tokens:,} of {self.tokens:,} tokens"
        done = {
            "truncate": f"truncated, which cuts off {lost}",
            "split": f"split into {self.pieces:,} pieces",
            "drop": f"dropped, with {lost}",
        }
        return f"{which}: {done[self.rule]}"


@dataclass(frozen=True, eq=False)
class Fitted:
    """Examples of any lengths as pieces that fit a row, in the order of the examples."""

    lengths: np.ndarray  # integers [pieces], tokens of each piece
    longer: Longer  # the rule and its counts
    # int64 [pieces]; None where piece i is the beginning of example i
    _example: Optional[np.ndarray] = None
    _start: Optional[np.ndarray] = None

    def beginning(self, piece: int) -> Tuple[int, int]:
        """The example that one piece is of, and the token at which it begins there."""
        if self._example is None or self._start is None:
            return piece, 0
        return int(self._example[piece]), int(self._start[piece])

    @property
    def example(self) -> np.ndarray:
        """The example that each piece is of: integers [pieces]."""
        return np.arange(len(self.lengths)) if self._example is None else self._example

    @property
    def start(self) -> np.ndarray:
        """The token at which each piece begins in its example: integers [pieces]."""
        return np.zeros(len(self.lengths), np.int64) if self._start is None else self._start

    @property
    def stop(self) -> np.ndarray:
        """The token behind each piece: integers [pieces]."""
        return self.start + self.lengths.astype(np.int64)


def fit(lengths: Any, max_sequence_length: int, longer: str = "raise") -> Fitted:
    """The pieces of examples of these lengths (integers [n]) by the rule `longer`.

    Raises ValueError, which names the sequence, for a length below 1, and for one above max_sequence_length where the
    rule is "raise".
    """
    counts = Longer(longer, max_sequence_length)
    lengths = np.asarray(lengths)
    if not lengths.size:
        return Fitted(np.zeros(0, np.int64), counts)
    if lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError(f"lengths are whole numbers of tokens, one for each sequence; got {lengths.dtype}")
    unusual = np.flatnonzero((lengths < 1) | (lengths > counts.max_sequence_length)).tolist()
    spans = {number: counts.spans(int(lengths[number]), f"sequence {number}") for number in unusual}
    counts.examples, counts.tokens = len(lengths), int(lengths.sum(dtype=np.int64))
    if not unusual:
        return Fitted(lengths, counts)
    pieces = np.ones(len(lengths), np.int64)
    pieces[unusual] = [len(spans[number]) for number in unusual]
    example = np.repeat(np.arange(len(lengths)), pieces)
    start, made = np.zeros(len(example), np.int64), lengths.astype(np.int64)[example]
    firsts = np.cumsum(pieces) - pieces
    for number in unusual:
        for piece, span in enumerate(spans[number], start=int(firsts[number])):
            start[piece], made[piece] = span.start, span.stop - span.start
    return Fitted(made, counts, example, start)
