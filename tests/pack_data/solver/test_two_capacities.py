"""Two capacities: no pack above either, nothing lost, and a bound that holds whatever the search does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from pack_data import pack_with_capacity
from pack_data.solver.two_capacities import pack_two


def check_packed(lengths, weights, S, C, depth):
    """Pack, and check that each sequence stands once in a pack within all limits, and that the bound is proved."""
    limits = {
        "max_sequence_length": S,
        "capacity": C,
        "max_sequences_per_pack": depth,
    }
    packed = pack_two(lengths, weights, **limits)
    depths = np.bincount(packed.pack, minlength=packed.packs)
    assert depths.min(initial=1) >= 1
    assert depths.max(initial=0) <= (depth or len(lengths))
    for number in range(packed.packs):
        slots = packed.slot[packed.pack == number]
        assert sorted(slots.tolist()) == list(range(depths[number]))
    for amounts, most in ((lengths, S), (weights, C)):
        assert np.bincount(packed.pack, amounts).max(initial=0) <= most
    proof = packed.prices.prove(lengths, weights)
    assert proof.lower_bound == packed.lower_bound <= packed.packs
    return packed


@st.composite
def small(draw, most=40, sequences=25):
    """Lengths and weights of some sequences, both capacities, and a depth."""
    S = draw(st.integers(1, most))
    C = draw(st.integers(1, most))
    pair = st.tuples(st.integers(1, S), st.integers(0, C))
    pairs = draw(st.lists(pair, max_size=sequences))
    lengths, weights = np.array(pairs, np.int64).reshape(-1, 2).T
    return lengths, weights, S, C, draw(st.sampled_from([None, 1, 2, 3]))


@given(small())
def test_each_sequence_stands_once_in_a_pack_within_all_limits(case):
    lengths, weights, S, C, depth = case
    first = check_packed(*case)
    again = check_packed(*case)
    assert np.array_equal(first.pack, again.pack)
    assert np.array_equal(first.slot, again.slot)
    limits = {
        "max_sequence_length": S,
        "capacity": C,
        "max_sequences_per_pack": depth,
    }
    packed = pack_with_capacity(lengths, weights, **limits)
    assert all(weights[members].sum() <= C for members in packed.bins)
    assert packed.prove().lower_bound == packed.packing.lower_bound == first.lower_bound
    assert packed.packing.packs == len(packed.bins) >= first.lower_bound


def fewest_packs(lengths, weights, S, C, depth, most):
    """Solve the integer programme: x[pack, sequence] places a sequence, y[pack] opens one of `most` packs."""
    number = len(lengths)
    placed_once = np.hstack([np.tile(np.eye(number), most), np.zeros((number, most))])
    limits = []
    for amounts, capacity in (
        (lengths, S),
        (weights, C),
        (np.ones(number), depth or number),
    ):
        limits.append(np.hstack([np.kron(np.eye(most), amounts), -capacity * np.eye(most)]))
    constraints = [
        LinearConstraint(placed_once, 1, 1),
        LinearConstraint(np.vstack(limits), -np.inf, 0),
    ]
    cost = np.repeat([0.0, 1.0], [number * most, most])
    solution = milp(
        cost,
        constraints=constraints,
        integrality=np.ones(len(cost)),
        bounds=Bounds(0, 1),
    )
    assert solution.success
    return round(solution.fun)


def test_the_bound_is_below_an_integer_programme_and_the_packs_are_near_it():
    random = np.random.default_rng(3)
    totals = np.zeros(3)
    for number in range(40):
        S, C = random.integers(4, 30, 2).tolist()
        sequences = random.integers(1, 11)
        depth = (None, 2, 3)[number % 3]
        longest = S if number % 2 else S // 2
        heaviest = C if number % 4 < 2 else C // 2
        lengths = random.integers(1, longest + 1, sequences)
        weights = random.integers(0, heaviest + 1, sequences)
        packed = check_packed(lengths, weights, S, C, depth)
        optimum = fewest_packs(lengths, weights, S, C, depth, packed.packs)
        assert packed.lower_bound <= optimum
        totals += packed.lower_bound, optimum, packed.packs
    bounds, optima, packs = totals
    assert optima <= packs <= 1.02 * optima
    assert bounds >= 0.97 * optima


@settings(max_examples=50)
@given(small(most=14, sequences=12))
def test_no_pack_at_all_is_worth_more_than_one(case):
    """The dearest pack within the limits, of any number of each sequence, by a table over all three amounts."""
    lengths, weights, S, C, depth = case
    packed = check_packed(*case)
    certificate = packed.prices.certificate
    price = dict(zip(certificate.lengths, certificate.prices))
    sizes = packed.prices.sizes(lengths, weights)
    worth = [price.get(size, 0) for size in sizes.tolist()]
    assert -(-sum(worth) // certificate.denominator) == packed.lower_bound
    best = np.zeros((S + 1, C + 1), np.int64)
    for _ in range(min(depth or S, S)):
        deeper = best.copy()
        for length, weight, value in set(zip(lengths.tolist(), weights.tolist(), worth)):
            with_one_more = best[: S + 1 - length, : C + 1 - weight] + value
            room = deeper[length:, weight:]
            np.maximum(room, with_one_more, out=room)
        best = deeper
    assert best[S, C] <= certificate.denominator


def distribution(name, number, S):
    """Return log-normal lengths, one of the amounts that rows are limited by, and its capacity."""
    random = np.random.default_rng(0)
    lengths = np.exp(random.normal(np.log(400), 0.9, number)).astype(np.int64).clip(1, S)
    if name == "images":
        images = random.integers(1, 9, number)
        return lengths, np.where(random.random(number) < 0.7, 0, images), 16
    if name == "attention":
        lengths = np.minimum(lengths, int(0.77 * S))
        return lengths, lengths**2, int(0.6 * S * S)
    if name == "masked":
        capacity = int(0.16 * S)
        return (
            lengths,
            np.minimum(random.binomial(lengths, 0.15), capacity),
            capacity,
        )
    weights = random.integers(0, 1001, number)
    return (
        lengths,
        weights,
        round(S * weights.sum() / lengths.sum()),
    )  # both are as scarce


@pytest.mark.parametrize(
    "name, depth, gap",
    [
        ("uniform", None, 1),
        ("images", None, 0),
        ("attention", None, 0),
        ("masked", 4, 0),
    ],
)
def test_named_distributions_are_packed_at_the_bound_or_a_pack_above_it(name, depth, gap):
    lengths, weights, capacity = distribution(name, 1500, 4096)
    packed = check_packed(lengths, weights, 4096, capacity, depth)
    assert packed.packs - packed.lower_bound <= gap


def test_the_bound_accounts_for_weight_that_full_rows_leave_unused():
    """Four rows are full of tokens and hold no weight; the weight of the others fills four more. By tokens: 5 rows."""
    lengths = np.array([64] * 4 + [1] * 8)
    weights = np.array([0] * 4 + [5] * 8)
    packed = check_packed(lengths, weights, 64, 10, None)
    assert packed.packs == packed.lower_bound == 8
    assert packed.prices.k > 0


def test_weights_follow_their_sequences_where_some_are_dropped_or_cut():
    options = {"max_sequence_length": 4, "weights": [9, 1, 1], "capacity": 9}
    dropped = pack_with_capacity([9, 2, 2], longer="drop", **options)
    truncated = pack_with_capacity([9, 2, 2], longer="truncate", **options)
    assert dropped.fitted.example.tolist() == [1, 2]
    assert len(truncated.bins) == 2
