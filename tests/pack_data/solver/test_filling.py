"""Packs filled to the last slot or seat: nothing lost, no limit broken, near the bound where decreasing fit is not."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.solver.filling import fill_exactly, fill_seats
from pack_data.solver.free_slots import longest_first
from tests.pack_data_strategies import histograms


def filled(histogram, depth, target=0):
    packs = fill_exactly(histogram.counts, depth or histogram.max_sequence_length, target)
    packing = Packing.of("filled", histogram, depth, packs, solve_seconds=0.0)
    packing.check(histogram)  # each sequence once, no pack too full or too deep
    return packing


def lognormal(center, sigma, S, number, seed=0):
    lengths = np.random.default_rng(seed).lognormal(np.log(center) - sigma**2 / 2, sigma, number)
    return LengthHistogram.from_lengths(np.clip(np.rint(lengths), 1, S).astype(np.int64), S)


@given(histograms(max_count=40), st.sampled_from([1, 2, 3, 4, 8, None]))
def test_every_sequence_is_packed_within_the_limits(histogram, depth):
    if histogram.sequences:
        filled(histogram, depth)


def test_a_case_worked_by_hand():
    # S = 16. The longest, 7, leaves 9 slots, which 5 + 4 fill. 6 leaves 10: 5 + 5 is nearer than 6 + 4. 6 5 4 are left.
    histogram = LengthHistogram.from_lengths([7, 6, 6, 5, 5, 5, 5, 4, 4], 16)
    packing = filled(histogram, None)
    assert packing.packs == 3 and {(7, 5, 4), (6, 5, 5), (6, 5, 4)} == set(packing.strategies)


def test_sequences_of_a_third_of_a_pack_waste_nothing():
    # Decreasing best fit leaves 0.5 % more packs than the tokens need; the rule leaves less than 0.05 %.
    histogram = lognormal(4096 / 3.5, 0.5, 4096, 20_000)
    least = -(-histogram.tokens // 4096)
    assert filled(histogram, None).packs <= 1.0005 * least
    assert sum(count for _, count in longest_first(histogram, None)) > 1.004 * least


def seated(histogram, depth, least=1):
    packs = fill_seats(histogram.counts, depth, least, 10**18)
    packing = Packing.of("seated", histogram, depth, packs)
    packing.check(histogram)
    return packing


@given(histograms(max_count=40), st.sampled_from([1, 2, 3, 4, 8]))
def test_seats_hold_every_sequence_once(histogram, depth):
    if histogram.sequences:
        seated(histogram, min(depth, histogram.max_sequence_length // histogram.shortest))


def test_all_seats_are_filled_if_sequences_are_many():
    # 8 packs of 10 sequences use a quarter of the slots; the four longest leave room for short ones only.
    lengths = np.concatenate([np.random.default_rng(0).integers(1, 40, 76), [700, 710, 720, 730]])
    histogram = LengthHistogram.from_lengths(lengths, 1000)
    assert seated(histogram, 10).packs == 8
    assert fill_seats(histogram.counts, 10, 7, 8) == []  # eight are not worth trying
