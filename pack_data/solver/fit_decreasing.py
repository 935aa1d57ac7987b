"""First-fit and best-fit decreasing over samples, computed on runs of equal packs instead of single ones.

Both rules take the samples from the longest to the shortest.  All samples of one length meet the same choice: the pack
chosen for one is chosen for the next as well, until it is full for this length, because it stays the first with room,
or has become the fullest.  So the packs with room, in the order in which the rule visits them, are filled one after the
other, each with as many as fit.  A run of equal packs that are neighbours in that order stays one run: only where the
samples of a length end inside a run is it split, in three at most.  The result is the per-sample one, pack by pack
(tests/pack_data/solver/test_fit_decreasing.py places sample by sample and compares), at a cost that depends on S alone.
"""

from __future__ import annotations

from typing import Callable, List, Optional, Tuple

import numpy as np

from pack_data.packing.histogram import LengthHistogram

_Visit = Callable[
    [np.ndarray], np.ndarray
]  # free slots of the runs that have room -> the order in which they are visited


def fit_decreasing(
    histogram: LengthHistogram, max_sequences_per_pack: Optional[int], visit: _Visit
) -> List[Tuple[Tuple[int, ...], int]]:
    """(strategy, packs) of the runs, in the order in which their first packs were opened."""
    S = histogram.max_sequence_length
    D = S if max_sequences_per_pack is None else max_sequences_per_pack
    # Runs of equal packs.  There are at most two splits and one new run or two for each length.
    room = 4 * len(histogram.lengths) + 1
    free = np.zeros(room, np.int64)  # slots left in each pack of the run
    seats = np.zeros(room, np.int64)  # sequences that the depth still allows
    packs = np.zeros(room, np.int64)
    held: List[Tuple[int, ...]] = []
    runs = 0

    def insert(at: int, new_free: int, new_seats: int, new_packs: int, strategy: Tuple[int, ...]) -> None:
        nonlocal runs
        for array, value in ((free, new_free), (seats, new_seats), (packs, new_packs)):
            array[at + 1 : runs + 1] = array[at:runs].copy()
            array[at] = value
        held.insert(at, strategy)
        runs += 1

    for length in histogram.lengths[::-1].tolist():
        left = int(histogram.counts[length])
        able = np.flatnonzero((free[:runs] >= length) & (seats[:runs] > 0))
        able = able[visit(free[able])]
        times = np.minimum(free[able] // length, seats[able])  # how many of this length one pack of the run takes
        filled_before = np.concatenate([[0], np.cumsum(times * packs[able])])
        whole = int(np.searchsorted(filled_before, left, side="right")) - 1  # runs that are filled in every pack
        for run, number in zip(able[:whole].tolist(), times[:whole].tolist()):
            held[run] += (length,) * number
        free[able[:whole]] -= length * times[:whole]
        seats[able[:whole]] -= times[:whole]
        left -= int(filled_before[whole])
        if not left:
            continue
        if whole < len(able):  # the samples end inside this run
            run, number = int(able[whole]), int(times[whole])
            one_free, one_seats, count, strategy = int(free[run]), int(seats[run]), int(packs[run]), held[run]
        else:  # they fill new packs, which come last
            run, number = runs, min(S // length, D)
            one_free, one_seats, count, strategy = S, D, -(-left // number), ()
            insert(run, one_free, one_seats, count, strategy)
        full, rest = divmod(left, number)
        pieces = [(full, number), (1, rest)] if rest else [(full, number)]
        pieces.append((count - full - bool(rest), 0))
        pieces = [(amount, inside) for amount, inside in pieces if amount]
        for position, (amount, inside) in enumerate(pieces):
            values = one_free - inside * length, one_seats - inside, amount, strategy + (length,) * inside
            if position == 0:
                free[run], seats[run], packs[run], held[run] = values
            else:
                insert(run + position, *values)
    return list(zip(held, packs[:runs].tolist()))
