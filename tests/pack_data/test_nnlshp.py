"""NNLSHP: the paper's figures, its strategies, rounds, padding, and what it refuses."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pack_data import nnlshp
from pack_data.packing.histogram import LengthHistogram
from tests.pack_data_strategies import histograms


@pytest.fixture(scope="module")
def wikipedia():
    histogram = LengthHistogram.published("wikipedia_512")
    return histogram, nnlshp.pack(histogram, max_sequences_per_pack=3)


def test_table_1_of_the_paper(wikipedia):
    """Efficiency 99.7 %, packing factor 1.996; to three digits, because solvers choose among equal mixtures."""
    histogram, packing = wikipedia
    packing.check(histogram)
    assert round(packing.packing_factor, 3) == 1.996
    assert round(100 * packing.efficiency, 1) == 99.7
    assert packing.largest_depth == 3
    assert packing.packs == pytest.approx(8_155_059, rel=1e-5)  # the published program with SciPy 1.17


def test_squad():
    histogram = LengthHistogram.published("squad_1_1_384")
    packing = nnlshp.pack(histogram, max_sequences_per_pack=3)
    packing.check(histogram)
    assert packing.packs == pytest.approx(40_778, rel=1e-3)


@pytest.mark.parametrize("S, depth", [(7, 3), (12, 3), (9, 2)])
def test_strategies_by_exhaustive_search(S, depth):
    expected = {tuple(sorted((a, b, S - a - b), reverse=True)) for a in range(S + 1) for b in range(S + 1 - a)}
    expected = {lengths for lengths in expected if sum(length > 0 for length in lengths) <= depth}
    assert set(map(tuple, nnlshp._strategies_filling(S, depth).tolist())) == expected


@settings(max_examples=20)
@given(
    histogram=histograms(max_sequence_length=24, max_count=3000),
    rounds=st.sampled_from([2, 20]),
    depth=st.integers(1, 3),
)
def test_more_rounds_place_everything_too(histogram, rounds, depth):
    packing = nnlshp.pack(histogram, max_sequences_per_pack=depth, rounds=rounds)
    packing.check(histogram)
