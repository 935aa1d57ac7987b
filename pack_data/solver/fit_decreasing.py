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


def fit_decreasing(histogram: LengthHistogram, max_sequences_per_pack: Optional[int], visit: _Visit) -> Packs:
    """Return runs of equal packs, in the order in which their first packs were opened."""
    S = histogram.max_sequence_length
    depth = S if max_sequences_per_pack is None else max_sequences_per_pack
    most_runs = 4 * len(histogram.lengths) + 1  # a length makes at most two splits, and one new run or two
    free = np.zeros(most_runs, np.int64)  # slots left in each pack of the run
    seats = np.zeros(most_runs, np.int64)  # sequences that the depth still allows
    packs = np.zeros(most_runs, np.int64)
    strategies: List[Strategy] = []

    def insert(run: int) -> None:
        """Make room for a run at this index."""
        runs = len(strategies)
        for values in (free, seats, packs):
            values[run + 1 : runs + 1] = values[run:runs].copy()
        strategies.insert(run, ())

    def fill(run: int, length: int, times: int) -> None:
        """Add `times` sequences of this length to each pack of the run."""
        free[run] -= times * length
        seats[run] -= times
        strategies[run] += (length,) * times

    for length in histogram.lengths[::-1].tolist():
        left = int(histogram.counts[length])
        runs = len(strategies)
        has_room = (free[:runs] >= length) & (seats[:runs] > 0)
        fitting = np.flatnonzero(has_room)
        fitting = fitting[visit(free[fitting])]
        times = np.minimum(free[fitting] // length, seats[fitting])  # sequences of this length for each pack
        placed = np.concatenate([[0], np.cumsum(times * packs[fitting])])
        places = int(np.searchsorted(placed, left, side="right"))
        filled = places - 1  # runs of which every pack is filled
        for run, number in zip(fitting[:filled].tolist(), times[:filled].tolist()):
            fill(run, length, number)
        left -= int(placed[filled])
        if not left:
            continue

        if filled < len(fitting):  # the sequences end inside this run
            run = int(fitting[filled])
            number = int(times[filled])
        else:  # they need new packs, which come last
            run = len(strategies)
            number = min(S // length, depth)
            insert(run)
            free[run] = S
            seats[run] = depth
            packs[run] = -(-left // number)

        # Split the run into filled packs, one pack with the rest, and packs that are left as they were.
        full, rest = divmod(left, number)
        for count, inside in ((full, number), (int(rest > 0), rest)):
            if 0 < count < packs[run]:
                insert(run)
                for values in (free, seats):
                    values[run] = values[run + 1]
                strategies[run] = strategies[run + 1]
                packs[run] = count
                packs[run + 1] -= count
            if count:
                fill(run, length, inside)
                run += 1
    return list(zip(strategies, packs[: len(strategies)].tolist()))
