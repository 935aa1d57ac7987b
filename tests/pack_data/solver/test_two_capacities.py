"""Two capacities: no pack above either, nothing lost, and a bound that holds whatever the search does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pack_data import pack_with_capacity
from pack_data.solver.two_capacities import pack_two


def distribution(name, sequences, S=4096, seed=0):
    """(lengths, weights, capacity): log-normal lengths, and one of the amounts that rows are limited by."""
    random = np.random.default_rng(seed)
    lengths = np.clip(np.exp(random.normal(np.log(400), 0.9, sequences)).astype(np.int64), 1, S)
    if name == "images":
        return lengths, np.where(random.random(sequences) < 0.7, 0, random.integers(1, 9, sequences)), 16
    if name == "attention":
        lengths = np.minimum(lengths, int(0.77 * S))
        return lengths, lengths**2, int(0.6 * S * S)
    if name == "masked":
        return lengths, np.minimum(random.binomial(lengths, 0.15), int(0.16 * S)), int(0.16 * S)
    weights = random.integers(0, 1001, sequences)
    return lengths, weights, round(S * int(weights.sum()) / int(lengths.sum()))  # both are as scarce


def held(found, amounts):
    return np.bincount(found.pack, amounts, minlength=found.packs)


@st.composite
def small(draw, most=40, sequences=25):
    S = draw(st.integers(1, most))
    C = draw(st.integers(1, most))
    pairs = draw(st.lists(st.tuples(st.integers(1, S), st.integers(0, C)), max_size=sequences))
    lengths, weights = np.array(pairs, np.int64).reshape(-1, 2).T
    depth = draw(st.sampled_from([None, 1, 2, 3]))
    return lengths, weights, {"max_sequence_length": S, "capacity": C, "max_sequences_per_pack": depth}


@given(small())
def test_each_sequence_stands_once_in_a_pack_within_all_limits(drawn):
    lengths, weights, limits = drawn
    found = pack_two(lengths, weights, **limits)
    assert sorted(set(found.pack.tolist())) == list(range(found.packs))
    places = list(zip(found.pack.tolist(), found.slot.tolist()))
    depths = np.bincount(found.pack, minlength=found.packs)
    assert sorted(places) == [(number, slot) for number, depth in enumerate(depths) for slot in range(depth)]
    assert held(found, lengths).max(initial=0) <= limits["max_sequence_length"]
    assert held(found, weights).max(initial=0) <= limits["capacity"]
    assert depths.max(initial=0) <= (limits["max_sequences_per_pack"] or len(lengths))
    again = pack_two(lengths, weights, **limits)
    assert np.array_equal(found.pack, again.pack)
    assert np.array_equal(found.slot, again.slot)
    packed = pack_with_capacity(lengths, weights, **limits)
    assert all(weights[members].sum() <= limits["capacity"] for members in packed.bins)
    assert packed.prove().lower_bound == packed.packing.lower_bound <= packed.packing.packs


@settings(max_examples=50)
@given(small(most=14, sequences=12))
def test_no_pack_at_all_is_worth_more_than_one(drawn):
    """The dearest pack within the limits, of any number of each sequence, by a table over all three amounts."""
    lengths, weights, limits = drawn
    found = pack_two(lengths, weights, **limits)
    certificate = found.prices.certificate
    price = dict(zip(certificate.lengths, certificate.prices))
    worth = [price.get(size, 0) for size in found.prices.sizes(lengths, weights).tolist()]
    S, C = limits["max_sequence_length"], limits["capacity"]
    depth = min(limits["max_sequences_per_pack"] or S, S)
    best = np.zeros((S + 1, C + 1), np.int64)
    for _ in range(depth):
        deeper = best.copy()
        for length, weight, value in set(zip(lengths.tolist(), weights.tolist(), worth)):
            beside = best[: S + 1 - length, : C + 1 - weight] + value
            deeper[length:, weight:] = np.maximum(deeper[length:, weight:], beside)
        best = deeper
    assert best[S, C] <= certificate.denominator
    assert -(-sum(worth) // certificate.denominator) == found.lower_bound <= found.packs
    assert found.prices.prove(lengths, weights).lower_bound == found.lower_bound


@pytest.mark.parametrize(
    "name, depth, gap",
    [("uniform", None, 0.005), ("images", None, 0.005), ("attention", None, 0.005), ("masked", 4, 0.01)],
)
def test_named_distributions_are_packed_near_the_bound(name, depth, gap):
    lengths, weights, capacity = distribution(name, 1500)
    limits = {"max_sequence_length": 4096, "capacity": capacity, "max_sequences_per_pack": depth}
    found = pack_two(lengths, weights, **limits)
    assert held(found, lengths).max() <= 4096
    assert held(found, weights).max() <= capacity
    assert np.bincount(found.pack).max() <= (depth or 1500)
    assert found.packs - found.lower_bound <= max(2, gap * found.lower_bound)
    assert found.prices.prove(lengths, weights).lower_bound == found.lower_bound


def test_the_bound_accounts_for_weight_that_full_rows_leave_unused():
    """Four rows are full of tokens and hold no weight; the weight of the others fills four more. By tokens: 5 rows."""
    lengths, weights = np.array([64] * 4 + [1] * 8), np.array([0] * 4 + [5] * 8)
    found = pack_two(lengths, weights, max_sequence_length=64, capacity=10, max_sequences_per_pack=None)
    assert found.packs == found.lower_bound == 8 and found.prices.k > 0


def test_weights_follow_their_sequences_where_some_are_dropped_or_cut():
    options = {"max_sequence_length": 4, "weights": [9, 1, 1], "capacity": 9}
    assert pack_with_capacity([9, 2, 2], longer="drop", **options).fitted.example.tolist() == [1, 2]
    assert len(pack_with_capacity([9, 2, 2], longer="truncate", **options).bins) == 2
