"""`PackMixture`: shares, passes, ranks and resume of several data sets as one."""

import pickle
from itertools import chain, islice

import numpy as np
import pytest

from pack_data import PackMixture, pack_dataset
from pack_data.batching.mixture import _shuffled
from tests.token_sequences import random_sequences

S = 16
ORDER = [46, 3, 71, 70, 14, 93, 34, 88, 19, 62, 68, 22]


@pytest.fixture(scope="module")
def data_sets():
    """26, 8 and 60 rows or so; the tokens of a row say whose it is."""
    data_sets = []
    for number, count in enumerate((50, 15, 110)):
        rows = []
        for sequence in random_sequences(count, S, number):
            tokens = [1000 * number + token for token in sequence]
            rows.append({"input_ids": tokens})
        data_sets.append(pack_dataset(rows, max_sequence_length=S))
    return data_sets


def source_of(mixture, numbers):
    rows = mixture.__getitems__(numbers)
    first_tokens = [int(row["input_ids"][0]) for row in rows]
    return np.array(first_tokens) // 1000


@pytest.mark.parametrize("weights", [None, [1, 1, 1], [0.9, 0.05, 0.05], [5, 2e-3, 1]])
def test_shares_and_passes(data_sets, weights):
    mixture = PackMixture(data_sets, weights, seed=4)
    sizes = [len(data_set) for data_set in data_sets]
    shares = np.array(weights or sizes)
    shares = shares / shares.sum()
    numbers = mixture.order(0, 2000)
    source = source_of(mixture, numbers.tolist())
    for place in (*range(1, 200), 777, 2000):
        drawn = np.bincount(source[:place], minlength=3)
        assert np.abs(drawn - shares * place).max() <= 3
    for which, size in enumerate(sizes):
        rows_of_source = numbers[source == which]
        whole_passes = len(rows_of_source) // size
        passes = rows_of_source[: whole_passes * size].reshape(-1, size)
        # Every pass shows every row once, in another order.
        assert all(len(np.unique(rows)) == size for rows in passes)
        orders = {tuple(rows) for rows in passes.tolist()}
        assert len(orders) == len(passes)
    if weights is None:
        epoch = numbers[: len(mixture)]
        assert np.array_equal(np.sort(epoch), np.arange(len(mixture)))
    other = PackMixture(data_sets, weights, seed=5)
    other_numbers = other.order(0, 2000)
    assert not np.array_equal(numbers, other_numbers)


@pytest.mark.parametrize("begin", [0, 10**11])
def test_any_place_is_computed_alone(data_sets, begin):
    mixture = PackMixture(data_sets, [3, 1, 7.5], seed=1)
    whole = mixture.order(begin, 500)
    assert len(np.unique(whole)) > 8
    rng = np.random.default_rng(0)
    places = rng.integers(1, [480, 20], (50, 2))
    for first, count in places.tolist():
        order = mixture.order(begin + first, count)
        assert np.array_equal(order, whole[first : first + count])


def test_the_order_does_not_change_with_versions_of_anything(data_sets):
    """A run that goes on in a year sees what it would have seen: the first places, written down."""
    mixture = PackMixture(data_sets, seed=0)
    assert mixture.order(0, 12).tolist() == ORDER


def test_any_ranks_and_a_resume_see_the_same_rows(data_sets):
    mixture = PackMixture(data_sets, [2, 1, 1], seed=3)
    alone = list(islice(mixture.batches(12), 9))
    for ranks in (2, 3, 12):
        shared = []
        for rank in range(ranks):
            batches = mixture.batches(12, rank=rank, ranks=ranks)
            shared.append(list(islice(batches, 9)))
        joined = [list(chain(*update)) for update in zip(*shared)]
        assert joined == alone
    state = mixture.state_at(5 * 12)
    copies = pickle.loads(pickle.dumps(data_sets))
    again = PackMixture(copies, [4, 2, 2], seed=3)  # the same shares
    update = []
    for rank in range(2):
        batches = again.batches(12, rank=rank, ranks=2, state=state)
        update += next(batches)
    assert update == alone[5]


def test_places_are_shuffled_one_to_one():
    for size in (1, 2, 3, 4, 5, 63, 64, 65, 1000, 4097):
        places = np.arange(size)
        shuffled = _shuffled(
            places,
            np.full(size, size),
            np.full(size, 99, np.uint64),
        )
        assert np.array_equal(np.sort(shuffled), places)
    # Where the first place goes, over keys: every place about as often.
    keys = np.arange(64_000, dtype=np.uint64)
    firsts = _shuffled(np.zeros(64_000, np.int64), np.full(64_000, 64), keys)
    counts = np.bincount(firsts)
    assert len(counts) == 64
    largest_deviation = abs(counts - 1000).max()
    assert largest_deviation < 5 * np.sqrt(1000)


def test_rows_and_batches_are_those_of_the_data_sets(data_sets):
    mixture = PackMixture(data_sets, seed=2)
    lengths = np.concatenate([data_set.lengths for data_set in data_sets])
    assert np.array_equal(mixture.lengths, lengths)
    first_of_second = mixture[len(data_sets[0])]
    row_of_second = data_sets[1][0]
    assert np.array_equal(first_of_second["input_ids"], row_of_second["input_ids"])
    numbers = next(mixture.batches(4))
    rows = mixture.__getitems__(numbers)
    batch = mixture.collate(rows)
    tokens = []
    for row in rows:
        is_token = row["input_mask"] > 0
        tokens.append(row["input_ids"][is_token])
    assert np.array_equal(batch["input_ids"][0], np.concatenate(tokens))
