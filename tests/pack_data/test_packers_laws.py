"""Laws of every packer on every histogram."""

import re

import numpy as np
import pytest
from hypothesis import assume, example, given

from pack_data.packers import PACKERS, get_packer, packs_at_depth
from pack_data.packing.histogram import LengthHistogram
from pack_data.solver.free_slots import cost_of_depth
from tests.pack_data_strategies import DEPTHS, SPECIAL, depths, histograms, lengths_of

KEYS = (
    "algorithm max_sequence_length max_sequences_per_pack sequences tokens packs slots padding_tokens efficiency "
    "packing_factor theoretical_speedup strategies largest_depth lower_bound lp_bound gap solve_seconds"
).split()


def assert_lawful(packing, histogram, depth):
    """Recomputes everything from the packs written out one by one, with none of Packing's own formulas."""
    S = histogram.max_sequence_length
    packs = [strategy for strategy, repeat in zip(packing.strategies, packing.repeats) for _ in range(repeat)]
    placed = sorted(length for pack in packs for length in pack)
    assert placed == lengths_of(histogram).tolist()  # every sequence exactly once
    assert all(sum(pack) <= S for pack in packs)
    assert depth is None or all(len(pack) <= depth for pack in packs)

    report = packing.to_json()
    assert list(report) == KEYS
    assert report["packs"] == len(packs)
    assert report["sequences"] == len(placed)
    assert report["tokens"] == sum(placed)
    assert report["slots"] == S * len(packs)
    assert report["padding_tokens"] == sum(S - sum(pack) for pack in packs)
    assert report["strategies"] == len(set(packs))
    assert report["largest_depth"] == max(map(len, packs), default=0)
    if packs:
        assert report["efficiency"] == pytest.approx(sum(placed) / (S * len(packs)))
        assert report["packing_factor"] == pytest.approx(len(placed) / len(packs))
        assert report["packing_factor"] <= report["theoretical_speedup"] * (1 + 1e-12)
    if report["lower_bound"] is not None:
        assert report["gap"] == len(packs) - report["lower_bound"] >= 0
    assert packing.strategies == tuple(sorted(set(packing.strategies), reverse=True))
    packing.check(histogram)


@pytest.mark.parametrize("name", PACKERS)
@given(histogram=histograms(), depth=depths())
def test_nothing_is_lost_and_nothing_overfull(name, histogram, depth):
    assume(packs_at_depth(name, depth))
    assert_lawful(get_packer(name)(histogram, max_sequences_per_pack=depth), histogram, depth)


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("name", PACKERS)
def test_histograms_that_break_packers(name, special):
    tried = 0
    for depth in DEPTHS:
        if packs_at_depth(name, depth):
            assert_lawful(
                get_packer(name)(SPECIAL[special], max_sequences_per_pack=depth),
                SPECIAL[special],
                depth,
            )
            tried += 1
    assert tried >= 3


@pytest.mark.parametrize("name", PACKERS)
@given(histogram=histograms(), depth=depths(3))
def test_the_same_input_gives_the_same_packing(name, histogram, depth):
    first = get_packer(name)(histogram, max_sequences_per_pack=depth)
    again = get_packer(name)(LengthHistogram(histogram.counts.copy(), "another name"), max_sequences_per_pack=depth)
    assert first == again


@given(histogram=histograms(), depth=depths())
def test_no_packer_beats_the_certified_bound(histogram, depth):
    bound = get_packer("optimal")(histogram, max_sequences_per_pack=depth).lower_bound
    for name in PACKERS:
        if packs_at_depth(name, depth):
            assert get_packer(name)(histogram, max_sequences_per_pack=depth).packs >= bound, name


@pytest.mark.parametrize(
    "name, packs",
    [
        # S = 10, depth 3, one sequence each of 8, 6, 5, 3, 2, 2.
        ("none", {(8,): 1, (6,): 1, (5,): 1, (3,): 1, (2,): 2}),
        # The first pack with room: 8; 6; 5; 3 behind 6 (4 left); 2 behind 8 (2 left); 2 behind 5 (5 left).
        ("first_fit", {(8, 2): 1, (6, 3): 1, (5, 2): 1}),
        # The fullest with room gives the same: 3 to 6 (4 left, 5 has 5 left), 2 to 8, and the other 2 to 5, as 6+3 has
        # 1 left.
        ("best_fit", {(8, 2): 1, (6, 3): 1, (5, 2): 1}),
        ("lpfhp", {(8, 2): 1, (6, 3): 1, (5, 2): 1}),
        # The emptiest with room: 3 behind 5 (5 left); the first 2 behind 6 (4 left); then 8, 5+3 and 6+2 have 2 slots
        # left each, and among equals the pack touched last comes first.
        ("spfhp", {(8,): 1, (6, 2, 2): 1, (5, 3): 1}),
    ],
)
def test_hand_worked(name, packs):
    histogram = LengthHistogram.from_lengths([2, 3, 5, 8, 2, 6], 10)
    packing = get_packer(name)(histogram, max_sequences_per_pack=3)
    assert dict(zip(packing.strategies, packing.repeats)) == packs


def test_spfhp_opens_a_pack_for_each_sequence_that_fits_nowhere():
    # As published: no second sequence of the same length joins a pack that was opened for it only now.
    packing = get_packer("spfhp")(LengthHistogram.from_lengths([2, 2, 2, 2], 10), max_sequences_per_pack=None)
    assert packing.strategies == ((2,),)


def test_counts_beyond_32_bits():
    histogram = LengthHistogram(np.array([0, 2**40, 0, 2**40, 2**41]), "huge")
    for name in ("none", "first_fit", "best_fit", "spfhp", "lpfhp", "nnlshp"):
        packing = get_packer(name)(histogram, max_sequences_per_pack=3)
        packing.check(histogram)
        assert packing.slots == 4 * packing.packs
        assert packing.tokens == histogram.tokens == 2**40 + 3 * 2**40 + 4 * 2**41


FEW_SEATS = LengthHistogram.from_lengths([20] * 30 + [1] * 200, 40)


@pytest.mark.parametrize("name", [name for name in PACKERS if name != "none"])
@given(histogram=histograms(), depth=depths(3))
@example(histogram=FEW_SEATS, depth=2)
def test_the_advice_to_lift_the_depth_keeps_its_promise(name, histogram, depth):
    advice = cost_of_depth(get_packer(name)(histogram, max_sequences_per_pack=depth))
    if not advice:
        assert histogram != FEW_SEATS
        return
    promised = int(re.search(r"at most ([\d,]+);", advice)[1].replace(",", ""))
    advised = re.search(r"the packer (\w+)", advice)
    packer = advised[1] if advised else name
    assert packs_at_depth(packer, None)
    assert get_packer(packer)(histogram, max_sequences_per_pack=None).packs <= promised
