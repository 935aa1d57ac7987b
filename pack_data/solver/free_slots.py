"""Groups of equal packs by their free slots: the state of the histogram-packing heuristics SPFHP and LPFHP."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Dict, List, Optional, Tuple

from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing

# A limit on depth is reported if it needs more packs than this multiple of those needed without it.
_MOST_EXCESS_PACKS = 1.05

# Error of a number of packs in floating point, in packs: HiGHS solves programmes to about 1e-9.
PACKS_ERROR = 1e-6

Strategy = Tuple[int, ...]  # lengths of the sequences in one pack
Packs = List[Tuple[Strategy, int]]  # (strategy, number of packs with it)


def count_packs(packs: Packs) -> int:
    """Return the total number of packs."""
    return sum(number for _, number in packs)


class PacksByFreeSlots:
    """Groups of equal packs, stacked by free slots; a pack that is full or at its depth is closed for good.

    The cost depends on S and not on the number of sequences, because equal packs are handled together.
    """

    def __init__(self, max_sequences_per_pack: Optional[int]) -> None:
        self._depth = max_sequences_per_pack
        self._stacks: Dict[int, Packs] = {}
        self._free: List[int] = []  # the keys of _stacks, ascending
        self._closed: Packs = []

    def add(self, strategy: Strategy, count: int, free: int) -> None:
        """Add `count` packs of this strategy with `free` slots left in each."""
        if free == 0 or len(strategy) == self._depth:
            self._closed.append((strategy, count))
        elif free in self._stacks:
            self._stacks[free].append((strategy, count))
        else:
            self._stacks[free] = [(strategy, count)]
            insort(self._free, free)

    def most_free(self) -> int:
        """Return the free slots of the emptiest open pack, 0 if no pack is open."""
        return self._free[-1] if self._free else 0

    def _least_free(self, length: int) -> Optional[int]:
        """Return the free slots of the fullest pack with room for `length`, None if there is none."""
        index = bisect_left(self._free, length)
        return self._free[index] if index < len(self._free) else None

    def pop(self, free: int) -> Tuple[Strategy, int]:
        """Remove the group added last among those with `free` slots, and return it."""
        stack = self._stacks[free]
        group = stack.pop()
        if not stack:
            del self._stacks[free]
            del self._free[bisect_left(self._free, free)]
        return group

    def all(self) -> Packs:
        """Return every group, closed ones first."""
        return self._closed + [group for stack in self._stacks.values() for group in stack]


def longest_first(histogram: LengthHistogram, max_sequences_per_pack: Optional[int]) -> Packs:
    """Pack by best fit, longest sequences first; max_sequences_per_pack None is unlimited."""
    S = histogram.max_sequence_length
    packs = PacksByFreeSlots(max_sequences_per_pack)
    for length in histogram.lengths[::-1].tolist():
        left = int(histogram.counts[length])
        while left:
            free = packs._least_free(length)
            if free is None:
                strategy: Strategy = ()
                count = left
                room = S
            else:
                strategy, count = packs.pop(free)
                room = free

            times = min(room // length, left)  # sequences of this length for each of these packs
            if max_sequences_per_pack is not None:
                times = min(times, max_sequences_per_pack - len(strategy))
            used = min(count, left // times)
            if free is not None and count > used:
                packs.add(strategy, count - used, free)
            packs.add(strategy + (length,) * times, used, room - times * length)
            left -= used * times
    return packs.all()


# Packers that need at most as many packs as `longest_first`.
_AS_FEW_AS_LONGEST_FIRST = ("lpfhp", "optimal")


def cost_of_depth(packing: Packing) -> str:
    """Return a sentence on a limit on depth that costs many packs, with the way out; "" if it does not."""
    depth = packing.max_sequences_per_pack
    if depth is None or packing.largest_depth < depth:
        return ""
    fewest = count_packs(longest_first(LengthHistogram(packing.placed()), None))
    if packing.packs <= _MOST_EXCESS_PACKS * fewest:
        return ""
    way_out = "add --max-sequences-per-pack unlimited"
    if packing.algorithm not in _AS_FEW_AS_LONGEST_FIRST:
        way_out = "use the packer lpfhp with --max-sequences-per-pack unlimited"
    return (
        f"the limit of {depth} sequences per pack costs packs: {packing.packs:,} instead of at most {fewest:,}; to "
        f"lift it, {way_out}"
    )
