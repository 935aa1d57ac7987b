"""Packs that still have room, grouped by how much: what the histogram-packing heuristics search."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Dict, List, Optional, Tuple

from pack_data.packing.histogram import LengthHistogram

Strategy = Tuple[int, ...]


class PacksByFreeSlots:
    """Groups of equal packs, stacked by free slots; a pack that is full or at its depth is closed for good.

    Working on groups instead of single packs is what makes the cost depend on S, not on the number of sequences.
    """

    def __init__(self, max_sequences_per_pack: Optional[int]) -> None:
        self._limit = max_sequences_per_pack
        self._stacks: Dict[int, List[Tuple[Strategy, int]]] = {}
        self._free: List[int] = []  # the keys of _stacks, ascending
        self.closed: List[Tuple[Strategy, int]] = []

    def add(self, strategy: Strategy, count: int, free: int) -> None:
        """Puts in `count` packs of this strategy with `free` slots left in each."""
        if free == 0 or len(strategy) == self._limit:
            self.closed.append((strategy, count))
        elif free in self._stacks:
            self._stacks[free].append((strategy, count))
        else:
            self._stacks[free] = [(strategy, count)]
            insort(self._free, free)

    def most_free(self) -> int:
        """Free slots of the emptiest pack; 0 where none is open."""
        return self._free[-1] if self._free else 0

    def _least_free(self, length: int) -> Optional[int]:
        """Free slots of the fullest pack that still has room for `length`."""
        index = bisect_left(self._free, length)
        return self._free[index] if index < len(self._free) else None

    def pop(self, free: int) -> Tuple[Strategy, int]:
        """Takes out the group that came last among those with `free` slots."""
        stack = self._stacks[free]
        group = stack.pop()
        if not stack:
            del self._stacks[free]
            del self._free[bisect_left(self._free, free)]
        return group

    def all(self) -> List[Tuple[Strategy, int]]:
        """Every group, closed or not."""
        return self.closed + [group for stack in self._stacks.values() for group in stack]


def longest_first(histogram: LengthHistogram, max_sequences_per_pack: Optional[int]) -> List[Tuple[Strategy, int]]:
    """Best fit, longest sequences first: (strategy, packs); max_sequences_per_pack None is unlimited."""
    S = histogram.max_sequence_length
    packs = PacksByFreeSlots(max_sequences_per_pack)
    for length in histogram.lengths[::-1].tolist():
        left = int(histogram.counts[length])
        while left:
            free = packs._least_free(length)
            strategy, count = ((), left) if free is None else packs.pop(free)
            room = S if free is None else free
            times = min(room // length, left)  # how many of this length go into each of these packs
            if max_sequences_per_pack is not None:
                times = min(times, max_sequences_per_pack - len(strategy))
            used = min(count, left // times)
            if free is not None and count > used:
                packs.add(strategy, count - used, free)
            packs.add(strategy + (length,) * times, used, room - times * length)
            left -= used * times
    return packs.all()
