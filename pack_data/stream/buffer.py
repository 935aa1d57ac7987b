"""The sequences that wait, and rows that are built from them: `Buffer` and `Rows`.

A row begins with one sequence and gets as many as rows hold on average: each the longest of at most an even share of
the room that is left, and at last a pair that fills the room exactly. A row of two takes a second sequence that nearly
fills it, if there is one, because short sequences, three of which fill any room, are scarce.

Of the pairs that fill the room, one order takes the pair that has waited longest and another the most similar pair: see
`Rows`.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import islice
from typing import Any, Deque, Dict, Iterator, List, NamedTuple, Tuple

import numpy as np

_MIN_REMOVED = 64  # entries of removed sequences that are kept in any case


class Waiting(NamedTuple):
    """A sequence in the buffer."""

    number: int  # in order of arrival
    since: int  # packs that were closed when it came
    example: Any


class Buffer:
    """Sequences that wait for a row, by length; those of one length leave in order of arrival."""

    def __init__(self) -> None:
        self.sequences = 0
        self.tokens = 0
        self.queues: Dict[int, Deque[Waiting]] = {}  # by length, none of them empty
        # (number, length), oldest first, also of sequences that were removed; those before `_start` all were.
        self._order: List[Tuple[int, int]] = []
        self._start = 0

    def add(self, length: int, waiting: Waiting) -> None:
        """Add a sequence."""
        queue = self.queues.get(length)
        if queue is None:
            queue = self.queues[length] = deque()
        queue.append(waiting)
        if len(self._order) > 2 * self.sequences + _MIN_REMOVED:
            self._order = [entry for entry in self._order if self._waits(*entry)]
            self._start = 0
        self._order.append((waiting.number, length))
        self.sequences += 1
        self.tokens += length

    def remove(self, lengths: List[int]) -> List[Waiting]:
        """Remove the oldest sequence of each of these lengths, and return them."""
        removed = []
        for length in lengths:
            queue = self.queues[length]
            removed.append(queue.popleft())
            if not queue:
                del self.queues[length]
        self.sequences -= len(lengths)
        self.tokens -= sum(lengths)
        return removed

    def oldest(self) -> Tuple[int, Waiting]:
        """Return length and sequence of the oldest."""
        while not self._waits(*self._order[self._start]):
            self._start += 1
        length = self._order[self._start][1]
        return length, self.queues[length][0]

    def _waits(self, number: int, length: int) -> bool:
        queue = self.queues.get(length)
        return queue is not None and queue[0].number <= number

    def lengths_in_order(self) -> Iterator[int]:
        """Yield the lengths of all that wait, oldest first; sequences may be removed meanwhile."""
        for place in range(self._start, len(self._order)):
            number, length = self._order[place]
            if self._waits(number, length):
                yield length

    def in_order(self) -> Iterator[Tuple[int, Waiting]]:
        """Yield length and sequence of all that wait, oldest first."""
        everything = []
        for length, queue in self.queues.items():
            everything += [(waiting.number, length, waiting) for waiting in queue]
        for _, length, waiting in sorted(everything, key=lambda entry: entry[0]):
            yield length, waiting


class Rows:
    """Builds rows of S slots and at most `depth` sequences from a buffer, which must not get sequences meanwhile.

    If rows begin with the longest sequence, the pair that has waited longest is taken, so that no length piles up. If
    they begin with the oldest, this is certain already, and the most similar pair spares long and short sequences.
    """

    def __init__(
        self, buffer: Buffer, S: int, depth: int, most: int, spare: int, by_age: bool
    ) -> None:
        """Begin with the oldest `most` sequences that wait.

        spare: slots that a row of two may leave empty. by_age: take the pair that has waited longest.
        """
        self._queues = buffer.queues
        self._S = S
        self._depth = depth
        self._spare = spare
        self._by_age = by_age
        self.left = {length: len(queue) for length, queue in buffer.queues.items()}
        self._newer: Dict[int, int] = {}  # sequences of a length that are too new
        if most < buffer.sequences:
            everything = self.left
            self.left = Counter(islice(buffer.lengths_in_order(), most))
            for length, number in self.left.items():
                self._newer[length] = everything[length] - number
        self._present = bytearray(S + 1)  # 1 at each length of which sequences are left
        for length in self.left:
            self._present[length] = 1
        present = np.frombuffer(self._present, np.uint8)
        # Bit l of the first, and bit S - l of the second: length l is left. Lengths that were used up since are struck
        # out when they are met.
        self._bits = _bits_of(present)
        self._reversed_bits = _bits_of(present[::-1])

    def longest(self, most: int) -> int:
        """Return the longest length that is left and at most `most`; below 1 if there is none."""
        return self._present.rfind(1, 0, most + 1)

    def build(self, first: int, wanted: int) -> List[int]:
        """Take a row that begins with this length and gets `wanted` sequences, if they fit."""
        row: List[int] = []
        room = self._S
        chosen: Tuple[int, ...] = (first,)
        while chosen:
            for length in chosen:
                row.append(length)
                room -= length
                self.left[length] -= 1
                if not self.left[length]:
                    self._present[length] = 0
            seats = self._depth - len(row)
            chosen = ()
            if room and seats:
                chosen = self._next(room, seats, min(wanted - len(row), seats))
        return row

    def _next(self, room: int, seats: int, wanted: int) -> Tuple[int, ...]:
        """Return the next one or two lengths of a row for this room, () if none fits."""
        longest = self.longest(room)
        if longest <= 0:
            return ()
        if wanted > 2:
            fitting = min(wanted, room // self._present.find(1))
            if fitting > 2:
                return (self.longest(room // fitting),)
            wanted = 2

        if seats == 1 or (wanted < 2 and room - longest <= self._spare):
            return (longest,)
        shorter = self._pair(room)
        if shorter:
            return room - shorter, shorter
        half = self.longest(room // 2) if wanted == 2 else 0
        return (half if half > 0 else longest,)

    def _pair(self, room: int) -> int:
        """Return the shorter length of a pair that fills the room, 0 if there is none.

        By age, three pairs are compared: the most and the least similar, and one between them.
        """
        pairs = self._bits & (self._reversed_bits >> (self._S - room))
        half = room // 2
        pairs &= (2 << half) - 1
        most_similar = self._last_pair(pairs, room)
        if not most_similar or not self._by_age:
            return most_similar

        candidates = [most_similar]
        below = pairs & ((1 << most_similar) - 1)
        between = self._last_pair(below & ((1 << (most_similar // 2)) - 1), room)
        if between:
            candidates.append(between)
        while below:
            least_similar = (below & -below).bit_length() - 1
            if self._is_left(least_similar, room):
                candidates.append(least_similar)
                break
            below ^= 1 << least_similar
        return min(candidates, key=lambda shorter: self._age(shorter) + self._age(room - shorter))

    def _last_pair(self, pairs: int, room: int) -> int:
        """Return the highest of these shorter lengths of which a pair is left, 0 if there is none."""
        while pairs:
            shorter = pairs.bit_length() - 1
            if self._is_left(shorter, room):
                return shorter
            pairs ^= 1 << shorter
        return 0

    def _is_left(self, shorter: int, room: int) -> bool:
        """Return True if this pair is left; strike out a length that is used up."""
        longer = room - shorter
        for length in (shorter, longer):
            if not self.left[length]:
                self._bits &= ~(1 << length)
                self._reversed_bits &= ~(1 << (self._S - length))
                return False
        return shorter < longer or self.left[shorter] > 1

    def _age(self, length: int) -> int:
        """Return the number of the oldest sequence of this length that is left."""
        queue = self._queues[length]
        newer = self._newer.get(length, 0)
        return queue[len(queue) - newer - self.left[length]].number


def _bits_of(present: np.ndarray) -> int:
    return int.from_bytes(np.packbits(present, bitorder="little").tobytes(), "little")
