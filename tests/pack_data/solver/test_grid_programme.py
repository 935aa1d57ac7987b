"""Prices on a grid of lengths: no pack is worth more than 1, and together they are worth nearly the bound."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data import optimal
from pack_data.packing.certificate import best_pack_value
from pack_data.packing.histogram import LengthHistogram
from pack_data.solver.column_generation import with_dearest_long
from pack_data.solver.grid_programme import grid_prices


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
def test_prices_on_the_grid_come_near_the_bound(depth):
    lengths = np.clip(np.rint(np.random.default_rng(0).lognormal(6, 0.8, 8000)), 1, 4096).astype(int)
    histogram = LengthHistogram.from_lengths(lengths, 4096)
    lengths = histogram.lengths
    prices = with_dearest_long(lengths, grid_prices(histogram.counts, depth, lengths), 4096, depth)
    worth = prices @ histogram.counts[lengths]
    packs = optimal.pack(histogram, max_sequences_per_pack=depth).packs
    assert packs / 1.01 <= worth <= packs
