"""Whole packs out of a fractional mixture: nothing lost, nothing overfull."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pack_data.solver import column_generation
from pack_data.solver.rounding import _fill, _round
from tests.pack_data_strategies import histograms


def test_rounding_takes_half_however_many_slots_are_empty():
    # 4 packs, so 2 are wanted: the 7 is whole, and 6 3 has the largest fraction and its sequences.
    relaxation = column_generation.Relaxation(
        4.0,
        4.0,
        np.zeros(5),
        np.array([[7, 0], [6, 3], [5, 4], [5, 3], [6, 4]]),
        np.array([1.0, 0.9, 0.8, 0.7, 0.6]),
        exact=True,
    )
    assert _round(relaxation, np.bincount([7, 6, 6, 5, 5, 4, 3], minlength=10)).tolist() == [1, 1, 0, 0, 0]


@given(histograms(max_count=40), st.data())
def test_filling_slots_loses_nothing_and_respects_them(histogram, data):
    S = histogram.max_sequence_length
    strategies = np.array(
        data.draw(st.lists(st.lists(st.integers(0, S), min_size=3, max_size=3), min_size=1, max_size=6))
    )
    repeats = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(strategies), max_size=len(strategies))))
    packs, left = _fill(strategies, repeats, histogram.counts)
    assert (placed(packs, S) + left == histogram.counts).all() and (left >= 0).all()
    # Slots of at least a length hold all sequences of at least that length but those left, or all of them are full.
    assert sum(count for _, count in packs) <= repeats.sum()


def placed(packs, S):
    counts = np.zeros(S + 1, np.int64)
    for lengths, count in packs:
        np.add.at(counts, list(lengths), count)
    return counts
