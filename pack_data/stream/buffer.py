"""The sequences that wait, and the packs of highest value among them.

Packs are chosen by their price (prices.py).  At the true prices many packs have value 1; which of them is closed
decides what later sequences find in the buffer.  So a length of which more sequences wait than usual counts a little
more, and one of which fewer wait a little less: `_STOCK` at most for each sequence above or below.

A pack begins with the sequence that is best together with what may go beside it, takes further ones in the same way,
and ends with the best pair among those that wait, found exactly.  A pack of lower value is taken back, its longest
length rests for a while, and another is tried.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Deque, Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np

from pack_data.stream.prices import Prices

_STOCK = 0.03
_GOOD = 1e-3  # value that a pack may lack
_TRIES = 4  # packs tried before the best of them is closed
_REST = (
    0.25  # of the buffer's size: sequences that arrive before a length that did not lead to a good pack is tried again
)
_HIDDEN = 2.0**20  # taken off the score of what is not there


class Waiting(NamedTuple):
    """A sequence in the buffer."""

    number: int  # in order of arrival
    since: int  # packs that were closed when it came
    example: Any


class Buffer:
    """Sequences waiting for a pack of S slots and at most `depth` sequences."""

    def __init__(self, S: int, depth: Optional[int]) -> None:
        self.S, self.depth = S, S if depth is None else min(depth, S)
        self.counts = np.zeros(S + 1, np.int64)
        self.sequences = self.tokens = 0
        self.queues: Dict[int, Deque[Waiting]] = {}
        self.rests_until = np.zeros(S + 1, np.int64)  # number of the sequence with whose arrival a length is back
        self._arrived: List[int] = []
        self._order: Deque[Tuple[int, int]] = deque()  # (number, length), oldest first; some have left

    def add(self, length: int, waiting: Waiting) -> None:
        queue = self.queues.get(length)
        if queue is None:
            queue = self.queues[length] = deque()
        queue.append(waiting)
        self._order.append((waiting.number, length))
        self._arrived.append(length)
        self.sequences += 1
        self.tokens += length

    def oldest(self) -> Tuple[int, Waiting]:
        """Length and sequence of the oldest."""
        while True:
            number, length = self._order[0]
            queue = self.queues[length]
            if queue and queue[0].number == number:
                return length, queue[0]
            self._order.popleft()

    def remove(self, lengths: List[int]) -> List[Waiting]:
        """Takes the oldest sequence of each of these lengths."""
        self.sequences -= len(lengths)
        self.tokens -= sum(lengths)
        return [self.queues[length].popleft() for length in lengths]

    def settle(self) -> List[int]:
        """Brings `counts` up to date with what has arrived since the last time: its lengths."""
        arrived, self._arrived = self._arrived, []
        if arrived:
            np.add.at(self.counts, arrived, 1)
        return arrived

    def in_order(self) -> Iterator[Tuple[int, Waiting]]:
        """(length, sequence) of all that wait, oldest first."""
        everything = [(waiting, length) for length, queue in self.queues.items() for waiting in queue]
        for waiting, length in sorted(everything, key=lambda each: each[0].number):
            yield length, waiting


class Round:
    """Packs from what waits now; what arrives afterwards belongs to the next round."""

    def __init__(self, buffer: Buffer, prices: Prices, usual: int, now: int) -> None:
        """usual: sequences that the buffer holds when it is full; now: sequences that have arrived.

        The buffer has to be settled.
        """
        self._buffer, self._prices, self._now, self._usual = buffer, prices, now, usual
        self._S, self._depth = buffer.S, buffer.depth
        lengths = np.flatnonzero(buffer.counts)
        left = buffer.counts[lengths]
        self._lengths, self._length, self._left = lengths, lengths.tolist(), left.tolist()
        self._worth, self._price = prices.worth[lengths].tolist(), prices.price[lengths].tolist()
        group = prices.group[lengths]
        target = prices.share * usual
        gain = _STOCK / (target + 1.0)
        stock = np.bincount(group, weights=left, minlength=len(target))
        self._group, self._gain = group.tolist(), gain.tolist()
        self._span = np.searchsorted(group, np.arange(len(target) + 1)).tolist()
        m = len(lengths)
        self._score = np.zeros(m + 1)  # price, and what the stock makes of it; the last one: no sequence
        self._score[:m] = prices.price[lengths] + ((stock - target) * gain)[group]
        self._rest = prices.table(self._depth - 1)[self._S - lengths]  # what goes beside each as the first
        awake = np.flatnonzero(buffer.rests_until[lengths] <= now)
        self._hidden = [True] * m
        self._score[:m] -= _HIDDEN
        self._fits = np.full(self._S + 1, m, np.intp)  # index of the longest that fits into so many slots
        self._wake(awake if len(awake) else np.arange(m))

    def _wake(self, some: np.ndarray) -> None:
        """Shows what is at these indices, where nothing was shown before."""
        m, lengths = len(self._lengths), self._lengths[some]
        self._score[some] += _HIDDEN
        self._fits[:] = m
        self._fits[lengths[0] :] = np.repeat(some, np.diff(np.append(lengths, self._S + 1)))
        for x in some.tolist():
            self._hidden[x] = False

    def end(self) -> None:
        """Hands the numbers that are left back to the buffer."""
        self._buffer.counts[self._lengths] = self._left

    def pack(self, first: Optional[int] = None) -> List[int]:
        """Lengths of the next pack, which are taken; `first`: a length that it has to hold."""
        if first is not None:
            x = self._length.index(first)
            if self._hidden[x]:
                self._show(x)
            return [self._length[y] for y in self._build(x)[0]]
        m, highest = len(self._length), -1.0
        best: List[int] = []
        for _ in range(_TRIES):
            score = self._score[:m] + self._rest
            x = int(score.argmax())
            if self._hidden[x]:
                if best:
                    break
                self._wake(np.flatnonzero(self._left))  # all that are left rest
                continue
            taken, value = self._build(x)
            if value >= 1.0 - _GOOD:
                return [self._length[y] for y in taken]
            for y in reversed(taken):
                self._put_back(y)
            if value > highest:
                best, highest = taken, value
            longest = max(taken)
            self._hide(longest)
            self._buffer.rests_until[self._length[longest]] = self._now + max(1, int(_REST * self._usual))
        for y in best:
            self._take(y)
        return [self._length[y] for y in best]

    def _build(self, first: int) -> Tuple[List[int], float]:
        """Takes a pack that begins with index `first`: its indices, and its worth."""
        score, fits, lengths, length, left = self._score, self._fits, self._lengths, self._length, self._left
        worth, price, m = self._worth, self._price, len(self._length)
        self._take(first)
        taken, value = [first], worth[first]
        free, seats = self._S - length[first], self._depth - 1
        while free > 0 and seats > 0:
            top = int(fits[free])
            if top == m:
                break
            enough = self._prices.table(seats)[free] - _GOOD if seats > 2 else 0.0
            if seats == 1:
                some: Tuple[int, ...] = (top,)
            elif 2 * price[top] < enough:  # no pair is worth so much
                beside = self._prices.table(seats - 1)[free - lengths[: top + 1]]
                some = (int((score[: top + 1] + beside).argmax()),)
            else:
                # The best pair: `one` takes at least half of what the two take, so it is the longer.
                half = int(fits[free >> 1])
                low = 0 if half == m else half
                partners = fits[free - lengths[low : top + 1]]
                both = score[low : top + 1] + score[partners]
                at = int(both.argmax())
                one, other = low + at, int(partners[at])
                if other == one and left[one] < 2:
                    other = int(fits[length[one] - 1])
                some = (one,) if other == m else (one, other)
                if seats > 2:
                    pair = price[one] + (0.0 if other == m else price[other])
                    if pair < enough:
                        beside = self._prices.table(seats - 1)[free - lengths[: top + 1]]
                        some = (int((score[: top + 1] + beside).argmax()),)
            for x in some:
                self._take(x)
                taken.append(x)
                value += worth[x]
                free -= length[x]
                seats -= 1
            if len(some) == 2 and value >= 1.0 - 1e-9:
                break
        return taken, value

    def _take(self, x: int) -> None:
        self._left[x] -= 1
        group = self._group[x]
        self._score[self._span[group] : self._span[group + 1]] -= self._gain[group]
        if not self._left[x]:
            self._hide(x)

    def _put_back(self, x: int) -> None:
        self._left[x] += 1
        group = self._group[x]
        self._score[self._span[group] : self._span[group + 1]] += self._gain[group]
        if self._left[x] == 1:
            self._show(x)

    def _hide(self, x: int) -> None:
        if not self._hidden[x]:
            self._hidden[x] = True
            self._score[x] -= _HIDDEN
            start = self._length[x]
            self._fits[start : self._above(x)] = self._fits[start - 1]

    def _show(self, x: int) -> None:
        self._hidden[x] = False
        self._score[x] += _HIDDEN
        self._fits[self._length[x] : self._above(x)] = x

    def _above(self, x: int) -> int:
        """The next longer length that is there; S + 1: none."""
        try:
            return self._length[self._hidden.index(False, x + 1)]
        except ValueError:
            return self._S + 1
