"""Pack few sequences by a search over all packings, pack by pack.

The longest sequence left opens a pack, since it must go somewhere. Each set of others that completes the pack is tried,
the fullest pack first. A set that leaves room for another sequence is not needed: moving that sequence here does no
harm. The slots that all packs together may leave empty limit the sets. Source: Korf, "A new algorithm for optimal bin
packing" (2002).
"""

from __future__ import annotations

import math
from typing import Iterator, List, Optional, Set, Tuple

from pack_data.solver.free_slots import Packs, Strategy, count_packs

# Sequences up to which a call is searched, which must return within milliseconds. With 100, linear programmes take up
# to a second in calls of 100 to 200.
MOST_SEQUENCES = 200
# Sequences up to which the search is never cut short. With 24, 2,000 small calls need as many packs.
EXACT_SEQUENCES = 12
# Lengths that a longer search looks at, about 10 ms of one core. With half of them, 2,000 small calls need 7 more than
# 38,545 packs; with twice, 3 fewer.
_MOST_STEPS = 20_000


def search_fewer(packs: Packs, max_sequence_length: int, depth: int, target: int) -> Packs:
    """Return fewer packs of the same sequences if the search finds some; stop at `target` packs."""
    lengths: List[int] = []
    for strategy, number in packs:
        lengths += strategy * number
    left = tuple(sorted(lengths, reverse=True))
    search = _Search(max_sequence_length, depth, len(left) <= EXACT_SEQUENCES)
    while count_packs(packs) > target:
        fewer = search.fit(left, count_packs(packs) - 1)
        if fewer is None:
            break
        packs = [(strategy, 1) for strategy in fewer]
    return packs


class _Search:
    """A search for packs of S slots and at most `depth` sequences."""

    def __init__(self, S: int, depth: int, exact: bool) -> None:
        self._S = S
        self._depth = depth
        self._steps_left = math.inf if exact else float(_MOST_STEPS)
        self._failed: Set[Tuple[Strategy, int]] = set()

    def fit(self, left: Strategy, packs: int) -> Optional[List[Strategy]]:
        """Return at most this many packs of these sequences, longest first; None if the search finds none."""
        if not left:
            return []
        self._steps_left -= len(left) / 4
        empty = packs * self._S - sum(left)
        if empty < 0 or packs * self._depth < len(left):
            return None
        # One sequence more than packs, and none of these fits beside another.
        if len(left) > packs and left[packs - 1] + left[packs] > self._S:
            return None
        if (left, packs) in self._failed:
            return None

        for chosen in self._fullest_sets(left, empty):
            pack = tuple(left[index] for index in chosen)
            others = tuple(length for index, length in enumerate(left) if index not in chosen)
            rest = self.fit(others, packs - 1)
            if rest is not None:
                return [pack, *rest]
            if self._steps_left < 0:
                return None
        self._failed.add((left, packs))
        return None

    def _fullest_sets(self, left: Strategy, most_empty: int) -> List[Tuple[int, ...]]:
        """Return indices of packs with the longest sequence, the fullest pack first."""
        sets = []
        for others in self._sets(left, 1, self._S - left[0], self._depth - 1, most_empty):
            tokens = sum(left[index] for index in others)
            sets.append((-tokens, (0, *others)))
            self._steps_left -= len(others)
        sets.sort()
        return [chosen for _, chosen in sets]

    def _sets(
        self, left: Strategy, start: int, room: int, seats: int, most_empty: int, skipped: int = 0
    ) -> Iterator[Tuple[int, ...]]:
        """Yield indices from `start` on that fill the room but for `most_empty` slots, longest sequences first.

        skipped: length of the shortest sequence before `start` that stays out of the pack; 0 for none.
        """
        index = start
        while index < len(left) and seats:
            self._steps_left -= 1
            length = left[index]
            most_tokens = length * min(seats, len(left) - index)
            if room - most_tokens > most_empty or self._steps_left < 0:
                return
            if length <= room:
                within = self._sets(left, index + 1, room - length, seats - 1, most_empty, skipped)
                for others in within:
                    yield (index, *others)
            skipped = length
            while index < len(left) and left[index] == length:
                index += 1
        another_fits = seats and 0 < skipped <= room
        if room <= most_empty and not another_fits:
            yield ()
