"""Micro-batches over ranks: equally many, within the budget, none empty; bounds hold; the sampler resumes anywhere."""

from itertools import chain, islice, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data import micro_batches, prove
from pack_data.batching import MicroBatchSampler


def check_plan(plan, lengths, ranks, max_tokens, max_sequences=None):
    """Check everything but the number of steps and the work."""
    assert [len(of_rank) for of_rank in plan.of] == [plan.steps] * ranks
    lengths = np.array(lengths, np.int64)
    batches = list(chain.from_iterable(plan.of))
    indices = np.array(list(chain.from_iterable(batches)), np.int64)
    assert np.array_equal(np.sort(indices), np.arange(len(lengths)))
    for batch in batches:
        assert lengths[batch].sum() <= max_tokens
        assert len(batch) <= (max_sequences or len(lengths))
    empty = sum(len(batch) == 0 for batch in batches)
    assert empty == plan.empty == max(0, plan.steps * ranks - len(lengths))


@given(
    st.lists(st.integers(1, 50), max_size=40),
    st.integers(1, 8),
    st.sampled_from([None, 1, 2, 5]),
    st.integers(0, 3),
    st.integers(0, 2),
    st.booleans(),
)
def test_laws(
    lengths,
    ranks,
    max_sequences,
    token_work,
    square_work,
    synchronised,
):
    options = {
        "token_work": token_work,
        "square_work": square_work,
        "synchronised": synchronised,
    }
    limits = {
        "ranks": ranks,
        "max_tokens": 50,
        "max_sequences": max_sequences,
        **options,
    }
    plan = micro_batches(lengths, **limits)
    check_plan(plan, lengths, ranks, 50, max_sequences)

    tokens = np.array(lengths, np.int64)
    work = token_work * tokens + square_work * tokens**2
    work_of = [work[indices].sum() for indices in chain.from_iterable(plan.of)]
    assert plan.slowest == slowest(work_of, ranks, synchronised) >= plan.least_slowest
    assert plan.least_steps == -(-prove(plan.packing).lower_bound // ranks) <= plan.steps <= plan.least_steps + 1

    again = micro_batches(np.array(lengths, np.uint16), **limits)
    assert str(again) == str(plan)
    for batches, batches_again in zip(plan.of, again.of):
        assert list(map(list, batches)) == list(map(list, batches_again))


def slowest(work_of, ranks, synchronised):
    """Return the work of the slowest rank, or of the slowest of each step; work_of: of each rank's micro-batches."""
    table = np.array(work_of, np.int64).reshape(ranks, -1)
    if synchronised:
        return table.max(axis=0, initial=0).sum()
    return table.sum(axis=1).max()


def best_plan(work, lengths, ranks, max_tokens, synchronised):
    """Return the fewest steps, and the least work of the slowest rank with so many, by trying every assignment."""
    for steps in range(1, len(lengths) + 1):
        batches = steps * ranks
        slowest_ranks = []
        for places in product(range(batches), repeat=len(lengths)):
            tokens_of = np.bincount(places, lengths, batches)
            if tokens_of.max() <= max_tokens:
                work_of = np.bincount(places, work, batches)
                slowest_ranks.append(slowest(work_of, ranks, synchronised))
        if slowest_ranks:
            return steps, min(slowest_ranks)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("synchronised", [False, True])
def test_small_plans_are_the_best_of_all(seed, synchronised):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 10, 6).tolist()
    work = [2 * length + length**2 for length in lengths]
    plan = micro_batches(
        lengths,
        ranks=2,
        max_tokens=12,
        token_work=2,
        square_work=1,
        synchronised=synchronised,
    )
    steps, least = best_plan(work, lengths, 2, 12, synchronised)
    assert plan.least_steps <= steps == plan.steps
    assert plan.least_slowest <= least <= plan.slowest <= 1.25 * least


S = 16384  # tokens of a micro-batch
DRAWN = {
    "uniform": lambda random, n: random.uniform(1, S, n),
    "bimodal": lambda random, n: (
        S
        * np.where(
            random.random(n) < 0.7,
            random.normal(0.1, 0.03, n),
            0.55,
        )
    ),
    "triplets": lambda random, n: random.uniform(0.25 * S, 0.5 * S, n),
    "around S / 3.5": lambda random, n: random.lognormal(np.log(S / 3.5), 0.6, n),
    "log-normal": lambda random, n: random.lognormal(np.log(S / 8), 1.0, n),
    "one short": lambda random, n: np.append(random.normal(0.5 * S, 0.08 * S, n - 1), 1),
}


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("sequences, ranks", [(64, 4), (512, 8)])
def test_the_slowest_rank_is_near_its_bound(kind, sequences, ranks):
    drawn = DRAWN[kind](np.random.default_rng(1), sequences)
    lengths = np.clip(np.rint(drawn), 1, S).astype(int).tolist()
    plan = micro_batches(lengths, ranks=ranks, max_tokens=S)
    check_plan(plan, lengths, ranks, S)
    assert plan.slowest <= 1.002 * plan.least_slowest


@given(st.lists(st.integers(1, 50), max_size=30), st.booleans())
def test_work_in_other_units_gives_the_same_plan(lengths, synchronised):
    options = {
        "ranks": 3,
        "max_tokens": 50,
        "synchronised": synchronised,
    }
    whole = micro_batches(lengths, token_work=512, square_work=2, **options)
    scaled = micro_batches(lengths, token_work=1.0, square_work=1 / 256, **options)
    assert scaled.steps == whole.steps
    assert scaled.slowest == pytest.approx(whole.slowest / 512)
    assert whole.least_slowest - 1 < 512 * scaled.least_slowest <= whole.least_slowest  # the mean is rounded up


LENGTHS = np.random.default_rng(0).integers(1, 60, 101)


def sampler_of(rank, **options):
    return MicroBatchSampler(
        LENGTHS,
        32,
        rank,
        **{"ranks": 3, "max_tokens": 128, "seed": 5, **options},
    )


def test_every_rank_gets_equally_many_micro_batches_of_each_update():
    samplers = [sampler_of(rank) for rank in range(3)]
    orders = []
    for epoch in range(2):
        updates = [list(sampler.updates()) for sampler in samplers]
        batches = [list(sampler) for sampler in samplers]
        assert updates[0] == updates[1] == updates[2]
        assert {len(of_rank) for of_rank in batches} == {sum(updates[0])}
        assert sorted(index for of_rank in batches for batch in of_rank for index in batch) == list(range(101))
        begin = 0
        for number, steps in enumerate(updates[0]):
            update = [batch for of_rank in batches for batch in of_rank[begin : begin + steps]]
            assert sum(map(len, update)) == (32 if number < 3 else 5)
            assert all(LENGTHS[batch].sum() <= 128 for batch in update)
            begin += steps
        assert samplers[0].epoch == epoch + 1
        orders.append(batches)
    assert orders[0] != orders[1]


def test_the_batches_of_all_ranks_in_turn():
    in_turn = list(sampler_of(None))
    assert [in_turn[rank::3] for rank in range(3)] == [list(sampler_of(rank)) for rank in range(3)]
    assert len(sampler_of(None)) == len(in_turn) == 3 * len(sampler_of(1))


def test_updates_asked_for_inside_a_loop_begin_with_the_micro_batches_that_are_left():
    sampler = sampler_of(1)
    updates = list(sampler.updates())
    steps = sum(updates)
    for taken, _ in enumerate(sampler.counted(sampler), start=1):
        left = list(sampler.updates())
        assert sum(left) == steps - taken
        assert left[1:] == updates[len(updates) - len(left) + 1 :]
        if taken == steps - 1:
            break


def test_stopping_anywhere_and_going_on_gives_the_same_batches():
    sampler = sampler_of(1)
    updates = list(sampler.updates())
    epochs = [list(sampler), list(sampler)]
    for stop in range(len(epochs[0])):
        first = sampler_of(1)
        assert list(islice(first.counted(first), stop)) == epochs[0][:stop]
        second = sampler_of(1)
        second.load_state_dict(first.state_dict())
        assert second.state_dict() == sampler_of(2).state_at(0, stop)
        left = list(second.updates())
        assert sum(left) == len(epochs[0]) - stop
        assert left[1:] == updates[len(updates) - len(left) + 1 :]
        second.set_epoch(0)
        assert list(second) == epochs[0][stop:]
        assert list(second) == epochs[1]
