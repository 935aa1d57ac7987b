"""Hypothesis strategies and small helpers for everything that packs."""

from functools import lru_cache
from itertools import combinations

import numpy as np
from hypothesis import strategies as st

from pack_data.packing.histogram import LengthHistogram

DEPTHS = (1, 2, 3, 4, 8, None)

# Where packers break: nothing, one length, nothing to share a pack with, next to nothing, and the shortest sequences.
SPECIAL = {
    "empty": LengthHistogram.from_lengths([], 12),
    "one_length": LengthHistogram.from_lengths([5] * 100, 12),
    "all_full": LengthHistogram.from_lengths([12] * 7, 12),
    "seven": LengthHistogram.from_lengths([3, 12, 7, 7, 1, 11, 2], 12),
    "ones": LengthHistogram.from_lengths([1] * 50, 12),
    "single_slot": LengthHistogram.from_lengths([1] * 5, 1),
}


@st.composite
def histograms(draw, max_sequence_length=40, max_count=200, max_lengths=12):
    """Any S up to the given one, a few lengths that occur, small and large counts; the empty histogram too."""
    S = draw(st.integers(1, max_sequence_length))
    counts = np.zeros(S + 1, np.int64)
    occurring = st.lists(st.integers(1, S), max_size=max_lengths, unique=True)
    for length in draw(occurring):
        counts[length] = draw(st.integers(1, max_count))
    return LengthHistogram(counts, "random")


def depths(largest=None):
    """Packing depths, unlimited (None) among them unless there is a largest."""
    return st.sampled_from([depth for depth in DEPTHS if largest is None or (depth is not None and depth <= largest)])


def lengths_of(histogram):
    """The lengths one by one, ascending."""
    return np.repeat(np.arange(len(histogram.counts)), histogram.counts)


def fewest_packs(lengths, slots, depth):
    """The true optimum, by every set that may share a pack with the longest sequence left; for a few sequences."""

    @lru_cache(None)
    def fewest(left):
        if not left:
            return 0
        others = range(1, len(left))
        best = len(left)
        for size in range(min(depth or len(left), len(left))):
            for chosen in combinations(others, size):
                if left[0] + sum(left[index] for index in chosen) <= slots:
                    rest = tuple(left[index] for index in others if index not in chosen)
                    best = min(best, 1 + fewest(rest))
        return best

    return fewest(tuple(sorted(lengths, reverse=True)))
