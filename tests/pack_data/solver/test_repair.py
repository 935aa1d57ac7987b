"""Packs mended: the same sequences in as many packs or fewer, near the bound where filling alone is not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.solver.free_slots import longest_first
from pack_data.solver.repair import mend
from tests.pack_data_strategies import histograms


def number(packs):
    return sum(count for _, count in packs)


def mended(histogram, depth, packs, target=0):
    S = histogram.max_sequence_length
    packs = mend(packs, np.arange(S + 1) / S, depth, target)
    Packing.of("mended", histogram, depth, packs).check(histogram)  # each sequence once, no pack too full or too deep
    return packs


@given(histograms(max_count=40), st.sampled_from([1, 2, 3, 4, 8]))
def test_the_same_sequences_in_no_more_packs(histogram, depth):
    if histogram.sequences:
        packs = longest_first(histogram, depth)
        assert number(mended(histogram, depth, packs)) <= number(packs)


@pytest.mark.parametrize("depth", [8, 16])
def test_mending_recovers_most_slots_that_filling_wastes(depth):
    lengths = np.random.default_rng(0).lognormal(np.log(300), 1.1, 4000)
    histogram = LengthHistogram.from_lengths(np.clip(np.rint(lengths), 1, 2048).astype(np.int64), 2048)
    least = -(-histogram.tokens // 2048)
    packs = longest_first(histogram, depth)
    assert number(packs) > least + 2
    assert number(mended(histogram, depth, packs, least)) <= least + 1
    assert mended(histogram, depth, packs, least) == mended(histogram, depth, packs, least)
    assert mended(histogram, depth, packs, number(packs)) == packs  # they are enough


def test_mending_stops_at_the_deadline():
    histogram = LengthHistogram.from_lengths([7, 6, 6, 5, 5, 5, 5, 4, 4], 16)
    packs = [((length,), int(histogram.counts[length])) for length in histogram.lengths.tolist()]
    assert mend(packs, np.arange(17) / 16, 4, 0, until=0.0) == packs
    assert number(mend(packs, np.arange(17) / 16, 4, 0)) == 3
