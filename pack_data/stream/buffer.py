"""The sequences that wait, and the packs of highest value among them.

Packs are chosen by their price (prices.py). At the true prices many packs have value 1; the choice among them decides
what later sequences find in the buffer. So a length of which more sequences wait than usual counts a little more, and
one of which fewer wait a little less: `_STOCK` at most for each sequence above or below.

A pack begins with the sequence that is best together with its possible companions, takes further ones in the same way,
and ends with the best pair among those that wait, found exactly. A pack of lower value is taken back, its longest
length rests for a while, and another is tried.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Deque, Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np

from pack_data.stream.prices import Prices

_STOCK = 0.03  # largest effect of one waiting sequence more on the score of its length
_SHORTFALL = 1e-3  # by which the value of a good pack may be below 1
_FULL_SHORTFALL = 1e-9  # the same for a pack that takes no further sequence
_TRIES = 4  # packs tried before the best of them is closed
# Sequences, as a share of the buffer, that arrive before a length that led to no good pack is tried again.
_REST_SHARE = 0.25
_HIDDEN = 2.0**20  # subtracted from the score of a length that must not be chosen


class Waiting(NamedTuple):
    """A sequence in the buffer."""

    number: int  # in order of arrival
    since: int  # packs that were closed when it came
    example: Any


class Buffer:
    """Sequences waiting for a pack of S slots and at most `depth` sequences."""

    def __init__(self, S: int, depth: Optional[int]) -> None:
        self.S = S
        self.depth = S if depth is None else min(depth, S)
        self.counts = np.zeros(S + 1, np.int64)  # up to the last `settle`
        self.sequences = 0
        self.tokens = 0
        # Number of the sequence with whose arrival each length may begin a pack again.
        self.rests_until = np.zeros(S + 1, np.int64)
        self._queues: Dict[int, Deque[Waiting]] = {}
        self._arrived: List[int] = []
        # (number, length), oldest first, also of sequences that were removed.
        self._order: Deque[Tuple[int, int]] = deque()

    def add(self, length: int, waiting: Waiting) -> None:
        """Add a sequence."""
        self._queues.setdefault(length, deque()).append(waiting)
        self._order.append((waiting.number, length))
        self._arrived.append(length)
        self.sequences += 1
        self.tokens += length

    def oldest(self) -> Tuple[int, Waiting]:
        """Return length and sequence of the oldest."""
        while True:
            number, length = self._order[0]
            queue = self._queues[length]
            if queue and queue[0].number == number:
                return length, queue[0]
            self._order.popleft()

    def remove(self, lengths: List[int]) -> List[Waiting]:
        """Remove the oldest sequence of each of these lengths, and return them."""
        self.sequences -= len(lengths)
        self.tokens -= sum(lengths)
        return [self._queues[length].popleft() for length in lengths]

    def settle(self) -> List[int]:
        """Bring `counts` up to date, and return the lengths that have arrived since the last time."""
        arrived = self._arrived
        self._arrived = []
        if arrived:
            np.add.at(self.counts, arrived, 1)
        return arrived

    def in_order(self) -> Iterator[Tuple[int, Waiting]]:
        """Yield length and sequence of all that wait, oldest first."""
        everything = []
        for length, queue in self._queues.items():
            everything += [(waiting.number, length, waiting) for waiting in queue]
        for _, length, waiting in sorted(everything, key=lambda entry: entry[0]):
            yield length, waiting


class Round:
    """Packs from the sequences that wait now; those that arrive afterwards belong to the next round.

    In this class lengths are named by their index among the lengths that wait.
    """

    def __init__(self, buffer: Buffer, prices: Prices, usual: int, now: int) -> None:
        """Begin a round with a settled buffer.

        usual: sequences that the buffer holds when it is full. now: sequences that have arrived.
        """
        self._buffer = buffer
        self._prices = prices
        self._now = now
        self._rest_period = max(1, int(_REST_SHARE * usual))
        self._S = buffer.S
        self._depth = buffer.depth
        self._lengths = np.flatnonzero(buffer.counts)
        waiting = buffer.counts[self._lengths]
        self._length = self._lengths.tolist()
        self._left = waiting.tolist()
        self._worth = prices.worth[self._lengths].tolist()
        self._price = prices.price[self._lengths].tolist()

        # Neighbouring lengths form a group, which shares one stock.
        group = prices.group[self._lengths]
        usual_stock = prices.share * usual
        gain = _STOCK / (usual_stock + 1.0)
        stock = np.bincount(group, weights=waiting, minlength=len(usual_stock))
        self._group = group.tolist()
        self._gain = gain.tolist()
        self._span = np.searchsorted(group, np.arange(len(gain) + 1)).tolist()

        self._none = len(self._length)  # stands for no length
        score_of_stock = (stock - usual_stock) * gain
        self._score = np.zeros(self._none + 1)
        self._score[:-1] = prices.price[self._lengths] + score_of_stock[group] - _HIDDEN
        # Highest value of the other sequences of a pack, by its first length.
        room_after_first = self._S - self._lengths
        self._companions = prices.table(self._depth - 1)[room_after_first]
        self._hidden = [True] * self._none
        # The longest available length that fits, by free slots.
        self._fits = np.full(self._S + 1, self._none, np.intp)
        awake = np.flatnonzero(buffer.rests_until[self._lengths] <= now)
        self._show_all(awake if len(awake) else np.arange(self._none))

    def _show_all(self, indices: np.ndarray) -> None:
        """Make these lengths available; none was before."""
        lengths = self._lengths[indices]
        self._score[indices] += _HIDDEN
        self._fits[:] = self._none
        self._fits[lengths[0] :] = np.repeat(indices, np.diff(np.append(lengths, self._S + 1)))
        for index in indices.tolist():
            self._hidden[index] = False

    def end(self) -> None:
        """Hand the numbers that are left back to the buffer."""
        self._buffer.counts[self._lengths] = self._left

    def pack(self, first: Optional[int] = None) -> List[int]:
        """Take the next pack, and return its lengths; `first`: a length that it must hold."""
        if first is None:
            pack = self._best_pack()
        else:
            index = self._length.index(first)
            if self._hidden[index]:
                self._show(index)
            pack, _ = self._build(index)
        return [self._length[index] for index in pack]

    def _best_pack(self) -> List[int]:
        """Take the first good pack, or the best of `_TRIES` packs."""
        best: List[int] = []
        highest = -1.0
        for _ in range(_TRIES):
            first = int((self._score[:-1] + self._companions).argmax())
            if self._hidden[first]:
                if best:
                    break
                # All lengths that are left rest.
                self._show_all(np.flatnonzero(self._left))
                continue
            pack, value = self._build(first)
            if value >= 1.0 - _SHORTFALL:
                return pack
            for index in reversed(pack):
                self._put_back(index)
            if value > highest:
                best = pack
                highest = value
            longest = max(pack)
            self._hide(longest)
            self._buffer.rests_until[self._length[longest]] = self._now + self._rest_period
        for index in best:
            self._take(index)
        return best

    def _build(self, first: int) -> Tuple[List[int], float]:
        """Take a pack whose first length is `first`, and return it with its worth."""
        pack: List[int] = []
        value = 0.0
        free = self._S
        seats = self._depth
        chosen: Tuple[int, ...] = (first,)
        while chosen:
            for index in chosen:
                self._take(index)
                pack.append(index)
                value += self._worth[index]
                free -= self._length[index]
                seats -= 1
            if len(chosen) == 2 and value >= 1.0 - _FULL_SHORTFALL:
                break
            chosen = self._next(free, seats) if free > 0 and seats > 0 else ()
        return pack, value

    def _next(self, free: int, seats: int) -> Tuple[int, ...]:
        """Return the next one or two lengths for these free slots and seats; () if none fits."""
        longest = int(self._fits[free])
        if longest == self._none:
            return ()
        if seats == 1:
            return (longest,)
        # Price from which a pair is good although more seats are free.
        enough = 0.0
        if seats > 2:
            enough = self._prices.table(seats)[free] - _SHORTFALL
        if 2 * self._price[longest] >= enough:
            pair = self._pair(free, longest)
            if sum(self._price[index] for index in pair) >= enough:
                return pair
        companions = self._prices.table(seats - 1)[free - self._lengths[: longest + 1]]
        return (int((self._score[: longest + 1] + companions).argmax()),)

    def _pair(self, free: int, longest: int) -> Tuple[int, ...]:
        """Return the best two lengths for these slots, or one if no second one fits."""
        half = int(self._fits[free >> 1])
        # The longer of the two takes at least half of their slots.
        low = 0 if half == self._none else half
        partners = self._fits[free - self._lengths[low : longest + 1]]
        scores = self._score[low : longest + 1] + self._score[partners]
        place = int(scores.argmax())
        longer = low + place
        shorter = int(partners[place])
        if shorter == longer and self._left[longer] < 2:
            shorter = int(self._fits[self._length[longer] - 1])
        return (longer,) if shorter == self._none else (longer, shorter)

    def _take(self, index: int) -> None:
        self._change_stock(index, -1)
        if not self._left[index]:
            self._hide(index)

    def _put_back(self, index: int) -> None:
        self._change_stock(index, 1)
        if self._left[index] == 1:
            self._show(index)

    def _change_stock(self, index: int, change: int) -> None:
        self._left[index] += change
        group = self._group[index]
        self._score[self._span[group] : self._span[group + 1]] += change * self._gain[group]

    def _hide(self, index: int) -> None:
        if not self._hidden[index]:
            self._hidden[index] = True
            self._score[index] -= _HIDDEN
            start = self._length[index]
            self._fits[start : self._above(index)] = self._fits[start - 1]

    def _show(self, index: int) -> None:
        self._hidden[index] = False
        self._score[index] += _HIDDEN
        self._fits[self._length[index] : self._above(index)] = index

    def _above(self, index: int) -> int:
        """Return the next longer length that is available; S + 1 if there is none."""
        try:
            return self._length[self._hidden.index(False, index + 1)]
        except ValueError:
            return self._S + 1
