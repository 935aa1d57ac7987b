"""First-fit and best-fit decreasing over sequences, computed on runs of equal packs instead of single packs.

Both rules take the sequences from the longest to the shortest. All sequences of one length meet the same choice: the
pack chosen for one is chosen for the next as well, until it is full for this length, because it stays the first with
room, or has become the fullest. So the packs with room, in the order in which the rule visits them, are filled one
after the other, each with as many sequences as fit. A run of equal packs that are neighbours in that order stays one
run, unless the sequences of a length end inside it: then it is split into three at most. The result is that of the
rule on single sequences, pack by pack, at a cost that depends on S alone
(tests/pack_data/solver/test_fit_decreasing.py compares the two).
"""

from __future__ import annotations

from typing import Callable, List, Optional

import numpy as np

from pack_data.packing.histogram import LengthHistogram
from pack_data.solver.free_slots import Packs, Strategy

# Free slots of the runs that have room, int64 [runs] -> the order in which the rule visits them.
_Visit = Callable[[np.ndarray], np.ndarray]


class _Runs:
    """Runs of equal packs, in the order in which their first packs were opened."""

    def __init__(self, most: int) -> None:
        self._free = np.zeros(most, np.int64)  # slots left in each pack of the run
        self._seats = np.zeros(most, np.int64)  # sequences that the depth still allows
        self._packs = np.zeros(most, np.int64)
        self._strategies: List[Strategy] = []

    @property
    def free(self) -> np.ndarray:
        return self._free[: len(self._strategies)]

    @property
    def seats(self) -> np.ndarray:
        return self._seats[: len(self._strategies)]

    @property
    def packs(self) -> np.ndarray:
        return self._packs[: len(self._strategies)]

    def insert(self, run: int, free: int, seats: int, packs: int, strategy: Strategy) -> None:
        """Insert a run at this index."""
        runs = len(self._strategies)
        for values, value in ((self._free, free), (self._seats, seats), (self._packs, packs)):
            values[run + 1 : runs + 1] = values[run:runs].copy()
            values[run] = value
        self._strategies.insert(run, strategy)

    def split(self, run: int, count: int) -> None:
        """Split the first packs off this run, if there are more."""
        others = int(self._packs[run]) - count
        if others:
            self.insert(
                run, int(self._free[run]), int(self._seats[run]), count, self._strategies[run]
            )
            self._packs[run + 1] = others

    def fill(self, run: int, length: int, times: int) -> None:
        """Add `times` sequences of this length to each pack of the run."""
        self._free[run] -= times * length
        self._seats[run] -= times
        self._strategies[run] += (length,) * times

    def all(self) -> Packs:
        """Return all runs."""
        return list(zip(self._strategies, self.packs.tolist()))


def fit_decreasing(
    histogram: LengthHistogram, max_sequences_per_pack: Optional[int], visit: _Visit
) -> Packs:
    """Return runs of equal packs, in the order in which their first packs were opened."""
    S = histogram.max_sequence_length
    depth = S if max_sequences_per_pack is None else max_sequences_per_pack
    # Each length makes at most two splits and two new runs.
    runs = _Runs(4 * len(histogram.lengths) + 1)
    for length in histogram.lengths[::-1].tolist():
        left = int(histogram.counts[length])
        has_room = (runs.free >= length) & (runs.seats > 0)
        fitting = np.flatnonzero(has_room)
        order = visit(runs.free[fitting])
        fitting = fitting[order]
        times = np.minimum(runs.free[fitting] // length, runs.seats[fitting])  # for each pack
        placed = np.concatenate([[0], np.cumsum(times * runs.packs[fitting])])
        # Number of runs whose packs are all filled.
        filled = int(np.searchsorted(placed, left, side="right")) - 1
        for run, number in zip(fitting[:filled].tolist(), times[:filled].tolist()):
            runs.fill(run, length, number)
        left -= int(placed[filled])
        if not left:
            continue

        if filled < len(fitting):  # the sequences end inside this run
            run = int(fitting[filled])
            number = int(times[filled])
        else:  # they need new packs, which come last
            run = len(runs.packs)
            number = min(S // length, depth)
            runs.insert(run, S, depth, -(-left // number), ())

        # Split the run into filled packs, one pack with the rest, and packs that are left as they were.
        full, rest = divmod(left, number)
        if full:
            runs.split(run, full)
            runs.fill(run, length, number)
            run += 1
        if rest:
            runs.split(run, 1)
            runs.fill(run, length, rest)
    return runs.all()
