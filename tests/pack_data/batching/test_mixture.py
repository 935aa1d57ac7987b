"""`PackMixture`: shares, passes, ranks and resume of several data sets as one."""

import pickle
from itertools import islice

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
    found = []
    for number, count in enumerate((50, 15, 110)):
        rows = [{"input_ids": [1000 * number + token for token in row]} for row in random_sequences(count, S, number)]
        found.append(pack_dataset(rows, max_sequence_length=S))
    return found


def source_of(mixture, numbers):
    return np.array([int(row["input_ids"][0]) // 1000 for row in mixture.__getitems__(numbers)])


@pytest.mark.parametrize("weights", [None, [1, 1, 1], [0.9, 0.05, 0.05], [5, 2e-3, 1]])
def test_shares_and_passes(data_sets, weights):
    mixture = PackMixture(data_sets, weights, seed=4)
    sizes = np.array([len(each) for each in data_sets])
    shares = np.array(sizes if weights is None else weights) / np.sum(sizes if weights is None else weights)
    numbers = mixture.order(0, 2000)
    source = source_of(mixture, numbers.tolist())
    for place in (*range(1, 200), 777, 2000):
        assert (abs(np.bincount(source[:place], minlength=3) - shares * place) <= 3).all()
    for each in range(3):
        own = numbers[source == each]
        for first in range(0, len(own) - sizes[each] + 1, sizes[each]):  # every pass shows every row once
            assert len(set(own[first : first + sizes[each]].tolist())) == sizes[each]
        if len(own) >= 2 * sizes[each]:
            assert own[: sizes[each]].tolist() != own[sizes[each] : 2 * sizes[each]].tolist()
    if weights is None:
        assert sorted(numbers[: len(mixture)].tolist()) == list(range(len(mixture)))
    assert numbers.tolist() != PackMixture(data_sets, weights, seed=5).order(0, 2000).tolist()


def test_any_place_is_computed_alone(data_sets):
    mixture = PackMixture(data_sets, [3, 1, 7.5], seed=1)
    whole = mixture.order(0, 500)
    rng = np.random.default_rng(0)
    for first, count in zip(rng.integers(0, 480, 50).tolist(), rng.integers(1, 20, 50).tolist()):
        assert mixture.order(first, count).tolist() == whole[first : first + count].tolist()
    far = 10**11
    assert mixture.order(far, 30).tolist() == [*mixture.order(far, 11), *mixture.order(far + 11, 19)]
    assert len(set(mixture.order(far, 8).tolist())) > 1


def test_the_order_does_not_change_with_versions_of_anything(data_sets):
    """A run that goes on in a year sees what it would have seen: the first places, written down."""
    assert PackMixture(data_sets, seed=0).order(0, 12).tolist() == ORDER


def test_any_ranks_and_a_resume_see_the_same_rows(data_sets):
    mixture = PackMixture(data_sets, [2, 1, 1], seed=3)
    alone = list(islice(mixture.batches(12), 9))
    for ranks in (2, 3, 12):
        shared = [list(islice(mixture.batches(12, rank=rank, ranks=ranks), 9)) for rank in range(ranks)]
        assert [[number for own in update for number in own] for update in zip(*shared)] == alone
    state = mixture.state_at(5 * 12)
    again = PackMixture(pickle.loads(pickle.dumps(data_sets)), [4, 2, 2], seed=3)  # the same shares
    parts = [next(again.batches(12, rank=rank, ranks=2, state=state)) for rank in range(2)]
    assert parts[0] + parts[1] == alone[5]


def test_places_are_shuffled_one_to_one():
    for size in (1, 2, 3, 4, 5, 63, 64, 65, 1000, 4097):
        places = np.arange(size)
        keys = np.full(size, 99, np.uint64)
        found = _shuffled(places, np.full(size, size), keys)
        assert sorted(found.tolist()) == places.tolist()
    # Where the first place goes, over keys: every place about as often.
    counts = np.bincount(_shuffled(np.zeros(64000, np.int64), np.full(64000, 64), np.arange(64000, dtype=np.uint64)))
    assert len(counts) == 64
    assert abs(counts - 1000).max() < 5 * np.sqrt(1000)


def test_rows_and_batches_of_a_data_loader(data_sets, tmp_path):
    torch = pytest.importorskip("torch")
    mixture = PackMixture(data_sets, seed=2)
    assert mixture.lengths.tolist() == [length for each in data_sets for length in each.lengths.tolist()]
    assert mixture[len(data_sets[0])]["input_ids"].tolist() == data_sets[1][0]["input_ids"].tolist()
    loader = torch.utils.data.DataLoader(
        mixture, batch_sampler=mixture.batches(4), collate_fn=mixture.collate, num_workers=1
    )
    for batch, numbers in zip(loader, islice(mixture.batches(4), 3)):
        rows = [row["input_ids"][row["input_mask"] > 0].tolist() for row in mixture.__getitems__(numbers)]
        assert batch["input_ids"][0].tolist() == [token for row in rows for token in row]
