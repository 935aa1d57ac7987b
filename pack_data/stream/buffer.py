"""The sequences that wait, and rows that are built from them: `Buffer` and `Rows`.

A row begins with one sequence and gets as many as rows hold on average: each the longest of at most an even share of
the room that is left, and at last a pair that fills the room exactly. A row of two takes a second sequence that nearly
fills it, if there is one, because short sequences, three of which fill any room, are scarce.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from itertools import islice
from typing import Any, Deque, Dict, Iterator, List, NamedTuple, Tuple

import numpy as np


class Waiting(NamedTuple):
    """A sequence in the buffer."""

    number: int  # in order of arrival
    since: int  # packs that were closed when it came
    length: int
    example: Any


class Buffer:
    """Sequences that wait for a row; those of one length leave in order of arrival."""

    def __init__(self) -> None:
        self.tokens = 0
        self.numbers: Dict[int, Deque[int]] = {}  # of the sequences, by length; none is empty
        self._waiting: OrderedDict[int, Waiting] = OrderedDict()  # by number, oldest first

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        """Yield all that wait, oldest first; sequences may be removed meanwhile."""
        for number in list(self._waiting):
            if number in self._waiting:
                yield self._waiting[number]

    def add(self, sequence: Waiting) -> None:
        """Add a sequence."""
        self.numbers.setdefault(sequence.length, deque()).append(sequence.number)
        self._waiting[sequence.number] = sequence
        self.tokens += sequence.length

    def remove(self, lengths: List[int]) -> List[Waiting]:
        """Remove the oldest sequence of each of these lengths, and return them."""
        removed = []
        for length in lengths:
            numbers = self.numbers[length]
            removed.append(self._waiting.pop(numbers.popleft()))
            if not numbers:
                del self.numbers[length]
        self.tokens -= sum(lengths)
        return removed

    def oldest(self) -> Waiting:
        """Return the oldest sequence."""
        return next(iter(self._waiting.values()))


class Rows:
    """Builds rows of S slots and at most `depth` sequences from a buffer, which must not get sequences meanwhile.

    A row of value `enough` is good; `worth` is the value of each length. Of the pairs that fill the room, the pair that
    has waited longest is taken if rows begin with the longest sequence, so that no length piles up. If they begin with
    the oldest, this is certain already, and the most similar pair spares long and short sequences.
    """

    def __init__(
        self,
        buffer: Buffer,
        S: int,
        depth: int,
        most: int,
        worth: List[float],
        enough: float,
        by_age: bool,
    ) -> None:
        """Begin with the oldest `most` sequences that wait; by_age: take the pair that has waited longest."""
        self._numbers = buffer.numbers
        self._S = S
        self._depth = depth
        self._worth = worth
        self._enough = enough
        self._spare = int((1.0 - enough) * S)
        self._by_age = by_age
        self.left = {length: len(numbers) for length, numbers in buffer.numbers.items()}
        if most < len(buffer):
            self.left = Counter(sequence.length for sequence in islice(buffer, most))
        self._present = bytearray(S + 1)  # 1 at each length of which sequences are left
        for length in self.left:
            self._present[length] = 1
        lengths = np.fromiter(self.left, np.int64, len(self.left))
        self._bits = _bits_at(lengths, S)  # bit l: length l is left
        self._reversed_bits = _bits_at(S - lengths, S)  # bit S - l

    def longest(self, most: int) -> int:
        """Return the longest length that is left and at most `most`; below 1 if there is none."""
        return self._present.rfind(1, 0, most + 1)

    def build(self, first: int, wanted: int) -> List[int]:
        """Take a row that begins with this length and gets `wanted` sequences, if they fit."""
        row: List[int] = []
        room = self._S
        lacks = self._enough
        chosen: Tuple[int, ...] = (first,)
        while chosen:
            for length in chosen:
                row.append(length)
                room -= length
                lacks -= self._worth[length]
                self._take(length)
            seats = self._depth - len(row)
            chosen = ()
            if room and seats:
                chosen = self._next(room, seats, min(wanted - len(row), seats), lacks)
        return row

    def _take(self, length: int) -> None:
        self.left[length] -= 1
        if not self.left[length]:
            self._present[length] = 0
            self._bits ^= 1 << length
            self._reversed_bits ^= 1 << (self._S - length)

    def _next(self, room: int, seats: int, wanted: int, lacks: float) -> Tuple[int, ...]:
        """Return the next one or two lengths of a row for this room, () if none fits."""
        longest = self.longest(room)
        if longest <= 0:
            return ()
        if wanted > 2:
            fitting = min(wanted, room // self._present.find(1))
            if fitting > 2:
                return (self.longest(room // fitting),)
            wanted = 2

        nearly_fills = room - longest <= self._spare and self._worth[longest] >= lacks
        if seats == 1 or (wanted < 2 and nearly_fills):
            return (longest,)
        shorter = self._pair(room, lacks)
        if shorter:
            return room - shorter, shorter
        half = self.longest(room // 2) if wanted == 2 else 0
        return (half if half > 0 else longest,)

    def _pair(self, room: int, lacks: float) -> int:
        """Return the shorter length of a pair that fills the room, 0 if there is none.

        By age, three pairs are compared: the most and the least similar, and one between them. A pair of the value that
        the row lacks goes first, then the pair that has waited longest.
        """
        half = room // 2
        pairs = self._bits & (self._reversed_bits >> (self._S - room)) & ((2 << half) - 1)
        if 2 * half == room and self.left.get(half) == 1:
            pairs &= ~(1 << half)
        if not pairs:
            return 0
        most_similar = pairs.bit_length() - 1
        if not self._by_age:
            return most_similar
        least_similar = (pairs & -pairs).bit_length() - 1
        candidates = [most_similar, least_similar]
        worth, left, numbers = self._worth, self.left, self._numbers
        between = pairs & ((1 << (most_similar // 2)) - 1)
        if between:
            candidates.append(between.bit_length() - 1)

        def rank(shorter: int) -> Tuple[bool, int]:
            longer = room - shorter
            value = worth[shorter] + worth[longer]
            age = numbers[shorter][-left[shorter]] + numbers[longer][-left[longer]]
            return value < lacks, age

        return min(candidates, key=rank)


def _bits_at(places: np.ndarray, most: int) -> int:
    """Return the number whose bits are 1 at these places, each from 0 to `most`."""
    octets = np.zeros(most // 8 + 1, np.uint8)
    np.bitwise_or.at(octets, places >> 3, np.left_shift(1, places & 7).astype(np.uint8))
    return int.from_bytes(octets.tobytes(), "little")
