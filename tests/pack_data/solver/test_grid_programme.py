"""Packs in the shape of a fractional packing: nothing lost, no limit broken, near the bound."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data.packing.certificate import best_pack_value
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.solver.column_generation import with_dearest_long
from pack_data.solver.grid_programme import Shape
from tests.pack_data_strategies import histograms


def checked(histogram, depth, packs):
    packing = Packing.of("made", histogram, depth, packs)
    packing.check(histogram)  # each sequence once, no pack too full or too deep
    return packing


def room(histogram, depth):
    most = histogram.max_sequence_length // histogram.shortest
    return most if depth is None else min(depth, most)


@given(histograms(max_count=40), st.sampled_from([1, 2, 3, 8, None]))
def test_shaped_packs_hold_every_sequence_once(histogram, depth):
    if histogram.sequences:
        checked(histogram, depth, Shape(histogram.counts, room(histogram, depth)).packs(0))


def test_counts_of_10_to_the_15_are_whole():
    counts = np.zeros(65, np.int64)
    counts[[5, 11, 20, 33, 47]] = [10**15 + 1, 10**14 + 3, 10**14 + 7, 10**13 + 9, 10**13 + 11]
    histogram = LengthHistogram(counts)
    assert checked(histogram, 3, Shape(counts, 3).packs(0)).sequences == counts.sum()


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=6, unique_by=lambda pair: pair[0]),
    st.integers(20, 40),
    st.sampled_from([1, 2, 3, 5]),
)
def test_long_sequences_are_as_dear_as_can_be(priced, slots, depth):
    lengths = np.array(sorted(length for length, _ in priced))
    prices = np.maximum.accumulate([price for _, price in sorted(priced)]).astype(float)
    depth = min(depth, slots // int(lengths[0]))
    lifted = with_dearest_long(lengths, prices, slots, depth)
    assert (lifted >= 0).all()

    def value(given):
        return best_pack_value(lengths.tolist(), np.floor(given * 2**40).astype(int).tolist(), slots, depth) / 2**40

    assert value(lifted) <= 1 + 1e-9
    for index in np.flatnonzero(lengths > slots // 2):
        assert value(lifted + 1e-6 * (np.arange(len(lengths)) == index)) > 1 + 1e-7  # none can cost more


@pytest.mark.parametrize("depth", [3, 6])
def test_the_shape_comes_near_the_bound(depth):
    lengths = np.clip(np.rint(np.random.default_rng(0).lognormal(6, 0.8, 8000)), 1, 4096).astype(int)
    histogram = LengthHistogram.from_lengths(lengths, 4096)
    shape = Shape(histogram.counts, depth)
    prices = with_dearest_long(histogram.lengths, shape.prices(histogram.lengths), 4096, depth)
    bound = prices @ histogram.counts[histogram.lengths]
    assert checked(histogram, depth, shape.packs(0)).packs <= 1.01 * bound
