"""Two capacities: no pack above either, nothing lost, and a bound that holds whatever the search does."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from pack_data import pack_with_capacity
from pack_data.solver.two_capacities import TwoPrices, _Mix, pack_two
from tests.refusals import refused

NAMES = ("uniform", "images", "attention", "masked", "anti-correlated")


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
    if name == "uniform":
        weights = random.integers(0, 1001, sequences)
    else:
        weights = np.minimum(1500, np.round(200 * (400 / lengths) ** 0.7)).astype(np.int64)
    return lengths, weights, round(S * int(weights.sum()) / int(lengths.sum()))  # both are as scarce


def held(found, amounts):
    return np.bincount(found.pack, amounts, minlength=found.packs)


@st.composite
def small(draw, most=40, sequences=25):
    S, C = draw(st.integers(1, most)), draw(st.integers(1, most))
    pairs = draw(st.lists(st.tuples(st.integers(1, S), st.integers(0, C)), max_size=sequences))
    lengths, weights = (np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))
    limits = {"max_sequence_length": S, "capacity": C, "max_sequences_per_pack": draw(st.sampled_from([None, 1, 2, 3]))}
    return lengths, weights, limits


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
    assert np.array_equal(found.pack, again.pack) and np.array_equal(found.slot, again.slot)


def fewest(lengths, weights, S, C, depth, most):
    """The number of packs that an integer programme finds: x[pack, sequence], and y[pack] where it is used."""
    n = len(lengths)
    each = np.hstack([np.tile(np.eye(n), most), np.zeros((n, most))])
    limits = [
        np.hstack([np.kron(np.eye(most), amounts), -capacity * np.eye(most)])
        for amounts, capacity in ((lengths, S), (weights, C), (np.ones(n), depth or n))
    ]
    cost = np.concatenate([np.zeros(n * most), np.ones(most)])
    constraints = [LinearConstraint(each, 1, 1), LinearConstraint(np.vstack(limits), -np.inf, 0)]
    solved = milp(cost, constraints=constraints, integrality=np.ones(len(cost)), bounds=Bounds(0, 1))
    assert solved.success
    return round(solved.fun)


def test_the_bound_is_below_an_integer_programme_and_the_packs_are_near_it():
    random, packs, optima, bounds = np.random.default_rng(3), 0, 0, 0
    for number in range(60):
        S, C = random.integers(4, 30, 2).tolist()
        n, depth = int(random.integers(1, 11)), (None, 2, 3)[number % 3]
        lengths = random.integers(1, (S if number % 2 else S // 2) + 1, n)
        weights = random.integers(0, (C if number % 4 < 2 else C // 2) + 1, n)
        found = pack_two(lengths, weights, max_sequence_length=S, capacity=C, max_sequences_per_pack=depth)
        optimum = fewest(lengths, weights, S, C, depth, found.packs)
        assert found.lower_bound <= optimum <= found.packs
        packs, optima, bounds = packs + found.packs, optima + optimum, bounds + found.lower_bound
    assert packs <= 1.02 * optima and bounds >= 0.97 * optima


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


@pytest.mark.parametrize("name", NAMES)
def test_named_distributions_are_packed_near_the_bound(name):
    lengths, weights, capacity = distribution(name, 3000)
    found = pack_two(lengths, weights, max_sequence_length=4096, capacity=capacity, max_sequences_per_pack=None)
    assert held(found, lengths).max() <= 4096 and held(found, weights).max() <= capacity
    assert found.packs - found.lower_bound <= max(2, 0.005 * found.lower_bound)
    assert found.prices.prove(lengths, weights).lower_bound == found.lower_bound


def test_the_depth_is_kept_where_it_matters():
    lengths, weights, capacity = distribution("masked", 3000)
    found = pack_two(lengths, weights, max_sequence_length=4096, capacity=capacity, max_sequences_per_pack=4)
    assert np.bincount(found.pack).max() == 4 and found.packs <= 1.01 * found.lower_bound


def test_the_bound_accounts_for_weight_that_full_rows_leave_unused():
    """Four rows are full of tokens and hold no weight; the weight of the others fills four more. By tokens: 5 rows."""
    lengths, weights = np.array([64] * 4 + [1] * 8), np.array([0] * 4 + [5] * 8)
    found = pack_two(lengths, weights, max_sequence_length=64, capacity=10, max_sequences_per_pack=None)
    assert found.packs == found.lower_bound == 8 and found.prices.k > 0


def proven():
    lengths, weights, capacity = distribution("uniform", 300)
    found = pack_two(lengths, weights, max_sequence_length=4096, capacity=capacity, max_sequences_per_pack=None)
    return lengths, weights, found.prices


def test_a_dearer_price_is_refused():
    lengths, weights, prices = proven()
    certificate = prices.certificate
    for factor in (1.01, 2):
        dearer = replace(certificate, prices=tuple(int(factor * price) + 1 for price in certificate.prices))
        with refused("certificate", "more than 1"):
            replace(prices, certificate=dearer).prove(lengths, weights)


@pytest.mark.parametrize(
    "changed, names",
    [
        ({"k": 4096}, ["k = 4096", "half a pack"]),
        ({"k": -1}, ["k = -1"]),
        ({"capacity": 7}, ["max_sequence_length", 7]),
        ({"second": _Mix(2, 3, 1)}, ["max_sequence_length"]),
        ({"first": _Mix(1, 0, 0)}, ["parts"]),
        ({"first": _Mix(1 << 60, 0, 1)}, ["first", "64-bit"]),
    ],
)
def test_changed_prices_are_refused(changed, names):
    _, _, prices = proven()
    certificate = replace(prices.certificate, max_sequence_length=prices.capacity)
    prices = TwoPrices(4096, prices.capacity, _Mix(1, 0, 1), 10, _Mix(0, 1, 1), certificate)
    with refused("certificate", *names):
        replace(prices, **changed)


@given(small(), st.integers(0, 3))
def test_pack_takes_weights(drawn, seed):
    lengths, weights, limits = drawn
    packed = pack_with_capacity(lengths, weights, seed=seed, **limits)
    assert sorted(index for members in packed.bins for index in members) == list(range(len(lengths)))
    assert all(weights[members].sum() <= limits["capacity"] for members in packed.bins)
    packing = packed.packing
    assert len(packed.bins) == packing.packs >= packing.lower_bound and packing.sequences == len(lengths)
    packing._check_form()
    assert packing.tokens == lengths.sum() and packing.certificate is None
    assert packed.prove() == packed.prices.prove(lengths, weights)
    assert packed.prove().lower_bound == packing.lower_bound


def test_the_seed_decides_which_sequences_share_a_pack():
    lengths, weights, capacity = distribution("images", 500)
    one, again, other = (
        pack_with_capacity(lengths, weights, capacity=capacity, max_sequence_length=4096, seed=seed)
        for seed in (0, 0, 1)
    )
    assert np.array_equal(one.pack, again.pack) and np.array_equal(one.slot, again.slot)
    assert not np.array_equal(one.pack, other.pack) and one.packing == other.packing


def test_weights_follow_their_sequences_where_some_are_dropped_or_cut():
    options = {"max_sequence_length": 4, "weights": [9, 1, 1], "capacity": 9}
    assert pack_with_capacity([9, 2, 2], longer="drop", **options).fitted.example.tolist() == [1, 2]
    assert len(pack_with_capacity([9, 2, 2], longer="truncate", **options).bins) == 2


@pytest.mark.parametrize(
    "options, names",
    [
        ({"weights": [1, 5, 0], "capacity": 4}, ["sequence 1", "weight 5", "capacity = 4"]),
        ({"weights": [1, -1, 0], "capacity": 4}, ["sequence 1", "weight -1"]),
        ({"weights": [1, 2], "capacity": 4}, ["2 weights", "3 lengths"]),
        ({"weights": [1, 2, 0.5], "capacity": 4}, ["weights", "float64"]),
        ({"weights": [[1], [2, 3]], "capacity": 4}, ["weights", "each sequence"]),
        ({"weights": [1, 2, 0], "capacity": 0}, ["capacity", 0]),
        ({"weights": [], "capacity": 4}, ["0 weights", "3 lengths"]),
        ({"weights": [5, 1, 9], "capacity": 4, "longer": "drop", "max_sequence_length": 2}, ["sequence 2", "weight 9"]),
        ({"weights": [1, 1, 1], "capacity": 4, "longer": "split", "max_sequence_length": 2}, ["weight", "piece"]),
    ],
)
def test_refusals_name_the_sequence_and_the_limit(options, names):
    with refused(*names):
        pack_with_capacity([3, 2, 2], **{"max_sequence_length": 8, **options})
