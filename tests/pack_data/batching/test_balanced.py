"""Ranks that take equally long: every example once, no row over its slots, and near the least that is possible."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data.batching import plans
from pack_data.batching import ranks as ranks_command
from pack_data.batching.balanced import StepCost, karmarkar_karp, lower_bound, step_bound
from pack_data.batching.plans import BatchOptions, get_way
from pack_data.batching.ranks import WAY, differencing, evenness, within_slots
from pack_data.batching.sampler import BatchSampler

COST = StepCost(100.0, 1.0)


def levelled(lengths, options, epoch=0):
    return get_way(WAY).plan(lengths, options, epoch)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=150),
    st.integers(60, 80),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([COST, StepCost(1, 0), StepCost(0, 1)]),
)
def test_every_example_once_and_no_row_over_its_slots(lengths, S, batch_size, ranks, cost):
    options = BatchOptions(batch_size, S, ranks, cost=cost)
    plan = levelled(np.array(lengths), options)
    assert sorted(plan.example.tolist()) == list(range(len(lengths)))
    for step in range(plan.steps):
        batches = [plan.batch(step, rank) for rank in range(ranks)]
        assert all(len(batch) <= batch_size for batch in batches)
        for row in itertools.chain(*batches):
            assert row and sum(piece.stop - piece.start for piece in row) <= S
        if len(lengths) >= ranks * plan.steps * 2 and 2 * max(lengths) <= S:
            assert all(batches), "an idle rank"


def made_up(count, S, seed=0):
    return np.clip(np.rint(np.random.default_rng(seed).lognormal(4.5, 1.0, count)), 1, S).astype(np.int64)


@pytest.mark.parametrize("ranks, batch_size", [(4, 4), (32, 1)])
def test_the_longest_rank_is_near_its_lower_bound(ranks, batch_size):
    lengths, cost = made_up(8000, 1024), StepCost(3000.0, 1.0)
    options = BatchOptions(batch_size, 1024, ranks, cost=cost)
    before = evenness(levelled(lengths, replace(options, cost=None)), lengths, options, cost)
    after = evenness(levelled(lengths, options), lengths, options, cost)
    assert after.idle <= before.idle and after.near > 0.8 and after.over == 0
    if ranks == 32:
        assert after.near > 3 * before.near and after.excess < before.excess / 2


@pytest.mark.parametrize("ranks, seed", [(8, 0), (8, 1), (16, 2)])
def test_a_step_with_fewer_rows_than_the_others_is_level_too(ranks, seed):
    """Rows that are no whole number a rank are taken apart, or some ranks would have a row more than others."""
    lengths, cost = made_up(4000, 1024, seed), StepCost(3000.0, 1.0)
    options = BatchOptions(4, 1024, ranks, cost=cost)
    plan = levelled(lengths, options)
    costs = cost.of(lengths)
    loads = plan.loads(costs)[-2:]
    bounds = [max(step.mean(), float(costs.max())) for step in loads]
    assert (loads.max(axis=1) <= 1.02 * np.array(bounds)).all()


def test_differencing_overflows_where_these_rows_do_not():
    lengths, cost = made_up(4000, 1024), StepCost(0.0, 1.0)
    options = BatchOptions(1, 1024, 8, cost=cost)
    plan = levelled(lengths, options)
    assert (
        differencing(plan, lengths, options, cost, most_steps=10).over
        > 0
        == evenness(plan, lengths, options, cost).over
    )


def test_the_lower_bound_is_one_and_is_met():
    """Beside every way to deal a few sequences."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        costs, ranks = COST.of(rng.integers(1, 30, 6)), int(rng.integers(1, 4))
        least = min(
            max(sum(costs[i] for i in range(6) if to[i] == rank) for rank in range(ranks))
            for to in itertools.product(range(ranks), repeat=6)
        )
        assert lower_bound(costs, ranks) <= least * (1 + 1e-12)
        parts = karmarkar_karp(costs.tolist(), ranks)
        assert sorted(itertools.chain(*parts)) == list(range(6)) and len(parts) == ranks
        assert max(costs[part].sum() for part in parts) >= least * (1 - 1e-12)
    assert lower_bound(np.array([9.0, 1.0]), 2) == 9 and lower_bound(np.array([5.0, 5.0, 5.0, 5.0]), 2) == 10


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_with_slots_is_one(seed):
    """Beside every way to deal a few sequences to ranks that have so many slots."""
    rng = np.random.default_rng(seed)
    lengths, ranks, cost = rng.integers(1, 30, 6), int(rng.integers(2, 4)), StepCost(float(rng.integers(60)), 1.0)
    slots = max(int(lengths.max()), -(-int(lengths.sum()) // ranks) + int(rng.integers(0, 9)))
    dealt = []
    for to in itertools.product(range(ranks), repeat=6):
        parts = [lengths[np.array(to) == rank] for rank in range(ranks)]
        if max(int(part.sum()) for part in parts) <= slots:
            dealt.append(max(float(cost.of(part).sum()) for part in parts))
    if dealt:
        bound = step_bound(lengths, cost, ranks, slots)
        assert lower_bound(cost.of(lengths), ranks) <= bound <= min(dealt) * (1 + 1e-12)


def test_what_slots_force_is_in_the_bound():
    # The rank with 8 tokens also has 2 of the others, because the other rank has 10 slots: 2 x 10 + 8 x 8.
    lengths = np.array([8] + [1] * 12)
    assert (
        step_bound(lengths, StepCost(2, 1), 2, 10) == 2 * 10 + 64 and step_bound(lengths, StepCost(2, 1), 2, 20) == 80
    )


def test_differencing_within_slots():
    lengths, cost = made_up(400, 256), StepCost(0.0, 1.0)
    costs = cost.of(lengths)
    slots = -(-int(lengths.sum()) // 8) + 40
    before = karmarkar_karp(costs.tolist(), 8)
    after = within_slots(before, lengths, costs, slots)
    assert sorted(itertools.chain(*after)) == list(range(400))
    assert max(lengths[part].sum() for part in before) > slots >= max(lengths[part].sum() for part in after)


def test_steps_of_few_long_sequences_are_level_too(monkeypatch):
    """Where three percent in short sequences are not enough, more of them are kept back."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.rint(rng.lognormal(np.log(2000), 1.5, 12_000)), 1, 131_072).astype(np.int64)
    options = BatchOptions(1, 131_072, 16, cost=StepCost(24576.0, 1.0))
    more = evenness(levelled(lengths, options), lengths, options, options.cost)
    monkeypatch.setattr(plans, "LEVELLING", plans.LEVELLING[:1])
    few = evenness(levelled(lengths, options), lengths, options, options.cost)
    assert more.excess < 2e-3 and more.excess < few.excess / 2 and more.over == 0


def test_differencing_by_hand():
    # Karmarkar and Karp's own example: 8, 7, 6, 5, 4 in two parts leaves a difference of 2.
    parts = karmarkar_karp([8.0, 7.0, 6.0, 5.0, 4.0], 2)
    assert sorted(sum([8, 7, 6, 5, 4][number] for number in part) for part in parts) == [14, 16]
    assert karmarkar_karp([], 2) == [[], []]


def test_a_cost_is_part_of_the_state():
    lengths = made_up(300, 512)
    sampler = BatchSampler(WAY, lengths, BatchOptions(1, 512, 2, cost=COST))
    expected = list(sampler)
    sampler = BatchSampler(WAY, lengths, BatchOptions(1, 512, 2, cost=COST))
    batches = iter(sampler)
    next(batches)
    state = json.loads(json.dumps(sampler.state()))
    again = BatchSampler(WAY, lengths, BatchOptions(1, 512, 2, cost=COST))
    again.load_state(state)
    assert list(again) == expected[1:]
    with pytest.raises(ValueError, match="cost"):
        BatchSampler(WAY, lengths, BatchOptions(1, 512, 2)).load_state(state)


@pytest.mark.parametrize("values", [(0, 0), (-1, 1), (float("nan"), 1), (1, float("inf"))])
def test_a_cost_that_is_none_is_one_line(values):
    with pytest.raises(ValueError, match="give finite numbers of at least 0"):
        StepCost(*values)


def test_the_command(capsys):
    given = ["--synthetic", "lognormal:median=60,sigma=1,max=512,n=10000", "--examples", "1500", "--ranks", "4"]
    assert ranks_command.main([*given, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["plan"] for each in found] == ["by rows", "levelled", "differencing", "within slots"]
    assert found[1]["idle"] <= found[0]["idle"] + 1e-9 and found[1]["over"] == 0
    assert ranks_command.main(given) == 0
    assert "levelled" in capsys.readouterr().out
