"""SPFHP and LPFHP against the published packers, to the pack."""

import pytest

from pack_data import lpfhp, spfhp
from pack_data.histogram import LengthHistogram


@pytest.fixture(scope="module")
def wikipedia():
    return LengthHistogram.published("wikipedia_512")


@pytest.fixture(scope="module")
def squad():
    return LengthHistogram.published("squad_1_1_384")


# The published programs (graphcore/examples, tutorials/blogs_code/packedBERT) on the published histograms.
@pytest.mark.parametrize(
    "depth, packs",
    [
        (1, 16_279_552),
        (2, 10_101_683),
        (3, 9_094_695),
        (4, 8_658_996),
        (6, 8_324_436),
        (8, 8_224_673),
        (10, 8_176_869),
        (12, 8_166_708),
        (16, 8_166_708),
        (None, 8_166_708),
    ],
)
def test_spfhp_on_wikipedia(wikipedia, depth, packs):
    packing = spfhp.pack(wikipedia, max_sequences_per_pack=depth)
    packing.check(wikipedia)
    assert packing.packs == packs
    assert packing.largest_depth == min(depth or 16, 16 if packs == 8_166_708 else depth)


def test_spfhp_on_wikipedia_without_a_limit(wikipedia):
    packing = spfhp.pack(wikipedia, max_sequences_per_pack=None)
    assert (packing.largest_depth, len(packing.strategies), packing.padding_tokens) == (16, 508, 16_558_323)


# Table 1 of the paper, to its printed digits.
@pytest.mark.parametrize(
    "depth, efficiency, factor",
    [(2, 80.5, 1.61), (3, 89.4, 1.79), (4, 93.9, 1.88), (8, 98.9, 1.98), (None, 99.6, 1.99)],
)
def test_table_1(wikipedia, depth, efficiency, factor):
    packing = spfhp.pack(wikipedia, max_sequences_per_pack=depth)
    assert round(100 * packing.efficiency, 1) == efficiency
    assert round(packing.packing_factor, 2) == factor


@pytest.mark.parametrize("depth, packs", [(2, 45_335), (3, 40_711), (None, 40_711)])
def test_spfhp_on_squad(squad, depth, packs):
    packing = spfhp.pack(squad, max_sequences_per_pack=depth)
    packing.check(squad)
    assert packing.packs == packs
    assert packing.largest_depth == min(depth or 3, 3)


@pytest.mark.parametrize(
    "depth, packs",
    [
        (2, 10_099_081),
        (3, 9_090_154),
        (4, 8_657_119),
        (8, 8_207_569),
        (12, 8_149_619),
        (16, 8_140_006),
        (None, 8_138_483),
    ],
)
def test_lpfhp_on_wikipedia(wikipedia, depth, packs):
    packing = lpfhp.pack(wikipedia, max_sequences_per_pack=depth)
    packing.check(wikipedia)
    assert packing.packs == packs
    assert packing.largest_depth == (29 if depth is None else depth)


def test_lpfhp_on_squad(squad):
    assert lpfhp.pack(squad, max_sequences_per_pack=None).packs == 40_631
