"""Exchanges between balanced packs: every sequence once, in exactly the packs asked for, or nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data import optimal
from pack_data.packing.certificate import proven_bound
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.solver.exchange import exchange
from tests.pack_data_strategies import histograms


@given(histograms(max_count=40), st.sampled_from([1, 2, 3, 8]), st.integers(0, 8))
def test_exactly_the_packs_asked_for_or_nothing(histogram, depth, excess):
    if histogram.sequences:
        least = -(-histogram.tokens // histogram.max_sequence_length)
        packs = exchange(histogram.counts, depth, least + excess)
        if packs:
            packing = Packing.of("exchanged", histogram, depth, packs)
            packing.check(histogram)
            assert packing.packs <= least + excess


def chats_and_documents(number, seed, slots=32768):
    """Many chats, some documents, and a few sequences that fill a row: a trimmed family of the benchmarks."""
    random = np.random.default_rng(seed)
    kind = random.random(number)
    lengths = random.lognormal(np.log(450), 0.9, number)
    lengths = np.where(kind > 0.70, random.lognormal(np.log(2600), 0.7, number), lengths)
    lengths = np.where(kind > 0.95, random.uniform(8000, 1.2 * slots, number), lengths)
    return LengthHistogram.from_lengths(np.clip(np.rint(lengths), 1, slots).astype(int), slots)


@pytest.mark.parametrize("depth", [8, 12, 14, 16, 24])
@pytest.mark.parametrize("seed", [1, 2])
def test_long_rows_of_any_depth_are_packed_near_the_bound(depth, seed):
    histogram = chats_and_documents(8000, seed)
    packing = optimal.pack(histogram, max_sequences_per_pack=depth)
    packing.check(histogram)
    assert proven_bound(packing.certificate, histogram.counts).lower_bound == packing.lower_bound
    assert packing.gap <= 1


@pytest.mark.parametrize("seed", [1, 5, 9])
def test_sequences_near_a_third_of_a_row_are_packed_at_the_bound(seed):
    lengths = np.random.default_rng(seed).normal(32768 / 3, 0.03 * 32768, 900).round().astype(int)
    lengths = np.minimum(lengths, 32768)
    packing = optimal.pack(LengthHistogram.from_lengths(lengths - 30, 32768), max_sequences_per_pack=None)
    assert packing.packs == packing.lower_bound
