"""Few sequences: as few packs as exist for up to 12, and the bound for known cases of up to 200."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data import optimal
from pack_data.packing.histogram import LengthHistogram
from pack_data.solver import programmes
from pack_data.solver.free_slots import count_packs
from pack_data.solver.search import Limits, ProvedPacks, pack_quickly
from tests.pack_data_strategies import fewest_packs


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12).map(sorted), st.integers(30, 64), st.integers(2, 5))
def test_up_to_12_sequences_are_in_the_fewest_packs(lengths, S, depth):
    histogram = LengthHistogram.from_lengths(lengths, S)
    packing = optimal.pack(histogram, max_sequences_per_pack=depth)
    packing.check(histogram)
    assert packing.packs == fewest_packs(lengths, S, depth)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12).map(sorted), st.integers(30, 64))
def test_pairs_by_decreasing_fit_are_optimal_so_no_search_follows(lengths, S):
    histogram = LengthHistogram.from_lengths(lengths, S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProvedPacks, "mended", None)  # a search would raise an error
        patch.setattr(ProvedPacks, "exchanged", None)
        packs = pack_quickly(histogram, Limits.of(histogram, 2, None))
    assert count_packs(packs.packs) == fewest_packs(lengths, S, 2)


def cut_rows(rows, depth, S, seed):
    """Sequences that fill these rows to the last slot."""
    random = np.random.default_rng(seed)
    cuts = [np.sort(random.choice(np.arange(1, S), depth - 1, replace=False)) for _ in range(rows)]
    return np.diff([[0, *row, S] for row in cuts]).ravel()


@pytest.mark.parametrize(
    "lengths, S, depth, packs",
    [
        ([10, 18, 23, 26, 40, 40, 47, 52], 128, None, 2),
        (cut_rows(20, 3, 1000, 0), 1000, 3, 20),
        (cut_rows(12, 4, 4096, 1), 4096, 4, 12),
        (cut_rows(25, 4, 200, 2), 200, 4, 25),
    ],
)
def test_few_sequences_reach_their_bound(lengths, S, depth, packs):
    packing = optimal.pack(LengthHistogram.from_lengths(lengths, S), max_sequences_per_pack=depth)
    assert packing.packs == packing.lower_bound == packs


@pytest.mark.parametrize("seed", range(4))
def test_few_sequences_near_a_third_of_a_row_are_packed_without_a_programme(seed, monkeypatch):
    # Exchanges that always help stop one or two packs above the bound.
    monkeypatch.setattr(programmes, "relax", None)
    lengths = np.random.default_rng(seed).normal(8192 / 3 - 20, 250, 150).round().astype(int)
    packing = optimal.pack(LengthHistogram.from_lengths(lengths, 8192), max_sequences_per_pack=None)
    assert packing.packs == packing.lower_bound
