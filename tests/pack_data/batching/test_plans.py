"""The nine ways to make batches: laws on all of them, each one by hand."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data.batching.plans import WAYS, BatchOptions, get_way
from pack_data.optimal import pack
from pack_data.packing.histogram import LengthHistogram
from tests.batching_ways import MSL, batches, drawn, every_way

OPTIMAL = get_way("OptimalPacking+PosID")


def lengths_in(plan):
    """Return the lengths of the pieces, for each row of each batch."""
    return [[[piece.stop - piece.start for piece in row] for row in batch] for batch in batches(plan)]


@every_way
@given(
    lengths=st.lists(st.integers(1, MSL), min_size=1, max_size=60),
    batch_size=st.integers(1, 5),
    ranks=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_every_token_comes_once_and_nothing_is_overfull(way, lengths, batch_size, ranks, seed):
    options = BatchOptions(batch_size, MSL, ranks, seed)
    plan = way.plan(lengths, options)
    assert len(plan.batches) - 1 == plan.steps * ranks
    for rows in lengths_in(plan):
        assert sum(map(sum, rows)) <= options.capacity
        assert len(rows) <= batch_size
        assert all(rows)
    tokens = []
    for batch in batches(plan):
        for row in batch:
            for piece in row:
                assert 0 <= piece.start < piece.stop <= lengths[piece.example]
                tokens += [(piece.example, offset) for offset in range(piece.start, piece.stop)]
    assert sorted(tokens) == [(example, offset) for example, length in enumerate(lengths) for offset in range(length)]


@every_way
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_ranks_have_equal_steps_and_no_rank_is_idle_without_need(way, ranks):
    plan = way.plan(drawn(101), BatchOptions(2, MSL, ranks))
    assert all(any(plan.batch(step, rank) for rank in range(ranks)) for step in range(plan.steps))
    full = [all(plan.batch(step, rank) for rank in range(ranks)) for step in range(plan.steps)]
    assert all(full[:-1])
    if way.group.__name__ in (
        "_multipack",
        "_random_packing",
        "_optimal_packing",
    ):
        assert full[-1]  # 101 examples in a handful of bins: the last ones are shared out


@every_way
def test_the_seed_and_the_epoch_decide_everything(way):
    lengths = drawn(80)
    same = [batches(way.plan(lengths, BatchOptions(4, MSL, 2, 7), epoch=1)) for _ in range(2)]
    assert same[0] == same[1]
    assert same[0] != batches(way.plan(lengths, BatchOptions(4, MSL, 2, 7), epoch=2))
    assert same[0] != batches(way.plan(lengths, BatchOptions(4, MSL, 2, 8), epoch=1))


def test_fixed_length_packing_cuts_the_stream():
    """Lengths 3, 5, 4 in some order make a stream of 12: rows of 5, 5 and 2; a cut example goes on in the next row."""
    plan = get_way("FixedLengthPacking").plan([3, 5, 4], BatchOptions(3, 5))
    assert [list(map(sum, rows)) for rows in lengths_in(plan)] == [[5, 5, 2]]
    (rows,) = batches(plan)
    stream = [piece for row in rows for piece in row]
    assert len(stream) > 3
    for before, after in zip(stream, stream[1:]):
        assert after.start in (0, before.stop)
        assert (after.example == before.example) == (after.start != 0)


def test_group_by_length_begins_with_the_longest_and_sorts_within_groups():
    plan = get_way("GroupByLength+Padding").plan(np.arange(1, 33), BatchOptions(2, MSL))
    order = [length for rows in lengths_in(plan) for (length,) in rows]
    assert order[0] == 32
    for at in range(0, 32, 8):  # 32 // (4 * 2) = 4 batches of 2 are sorted together
        assert order[at + 1 : at + 8] == sorted(order[at + 1 : at + 8], reverse=True)


def test_sorted_packing_goes_from_the_longest_to_the_shortest():
    """Bins of 10: 7 | 6 3 | 3 2 2: the 3 that fits beside 6 goes there, the next opens a bin."""
    plan = get_way("SortedPacking+PosID").plan([2, 7, 3, 6, 2, 3], BatchOptions(1, 10))
    assert [sum(rows, []) for rows in lengths_in(plan)] == [
        [7],
        [6, 3],
        [3, 2, 2],
    ]


def test_multipack_fills_each_step_as_far_as_first_fit_decreasing_can():
    """Two ranks of 10 tokens and lengths 6 6 4 4 in any order fit one step: first-fit decreasing pairs 6 with 4."""
    plan = get_way("Multipack+PosID").plan([6, 4, 6, 4], BatchOptions(1, 10, ranks=2))
    assert plan.steps == 1
    assert [sorted(sum(rows, [])) for rows in lengths_in(plan)] == [
        [4, 6],
        [4, 6],
    ]


def test_optimal_packing_needs_the_fewest_rows():
    lengths = drawn(400, seed=4)
    names = (
        "OptimalPacking+PosID",
        "Multipack+PosID",
        "SortedPacking+PosID",
        "RandomPacking+PosID",
    )
    optimal, *others = (len(WAYS[name].plan(lengths, BatchOptions(1, MSL)).rows) - 1 for name in names)
    bound = pack(
        LengthHistogram.from_lengths(lengths, MSL),
        max_sequences_per_pack=None,
    ).lower_bound
    assert bound <= optimal <= bound + 1
    assert optimal <= min(others)


@pytest.mark.parametrize(
    "median, spread, slots, most_again",
    [
        (450, 1.2, 8192, 0.02),
        (18_000, 0.7, 131_072, 0.1),
        (12, 0.5, 64, 0.02),
        (12, 0.05, 64, 0.02),
    ],
    ids=["slots are left", "rows are full", "few lengths", "five lengths"],
)
def test_long_examples_seldom_meet_again_in_the_next_epoch(median, spread, slots, most_again):
    random = np.random.default_rng(1)
    lengths = np.clip(random.lognormal(np.log(median), spread, 1500), 1, slots).astype(np.int64)
    fewest = pack(
        LengthHistogram.from_lengths(lengths, slots),
        max_sequences_per_pack=None,
    ).packs
    long = set(np.flatnonzero(lengths > slots / 8).tolist())
    pairs = []
    for epoch in (0, 1):
        plan = OPTIMAL.plan(lengths, BatchOptions(1, slots), epoch)
        assert plan.steps == fewest
        met = set()
        for (row,) in batches(plan):
            members = sorted(piece.example for piece in row if piece.example in long)
            met.update(combinations(members, 2))
        pairs.append(met)
    assert len(pairs[0] & pairs[1]) <= most_again * len(pairs[0]) > 0


def balance_of(name, lengths, ranks=4):
    """Return the squared lengths of the busiest rank over the ranks' mean, the mean over the steps."""
    plan = get_way(name).plan(lengths, BatchOptions(4, MSL, ranks=ranks))
    work = [sum(np.square(row).sum() for row in rows) for rows in lengths_in(plan)]
    work_of_steps = np.reshape(work, (plan.steps, ranks))
    return np.mean(work_of_steps.max(axis=1) / work_of_steps.mean(axis=1))


def test_optimal_packing_spreads_the_attention_work():
    lengths = drawn(600, seed=5)
    assert balance_of("OptimalPacking+PosID", lengths) < 1.03
    names = (
        "OptimalPacking+PosID",
        "RandomPacking+PosID",
        "RandomSampling+Padding",
    )
    best, random, padded = (balance_of(name, lengths) for name in names)
    assert best < random < padded


def test_optimal_packing_gives_ranks_equally_many_rows_whatever_their_work():
    """One row of a long example and five rows of 32 short ones, 1,024 units of work and 32 each: three rows a rank."""
    plan = OPTIMAL.plan([MSL] + [1] * 5 * MSL, BatchOptions(3, MSL, ranks=2))
    assert plan.steps == 1
    assert list(map(len, batches(plan))) == [3, 3]


def test_optimal_packing_shares_out_a_last_step_with_fewer_rows_than_ranks():
    """Three rows of 10 for two ranks: the last step has one row, and its two examples go to a rank each."""
    plan = OPTIMAL.plan([5] * 6, BatchOptions(1, 10, ranks=2))
    assert lengths_in(plan) == [[[5, 5]], [[5, 5]], [[5]], [[5]]]


def test_optimal_packing_leaves_no_rank_idle_for_a_row_of_one_example():
    """Rows 7, 6 + 4 and 5 + 5 for two ranks: the row of one example, which has the least work, cannot be shared."""
    for seed in range(5):
        plan = OPTIMAL.plan([7, 6, 4, 5, 5], BatchOptions(1, 10, ranks=2, seed=seed))
        assert plan.steps == 2
        rows = [row for (row,) in lengths_in(plan)]
        assert sorted(sum(rows, [])) == [4, 5, 5, 6, 7]
