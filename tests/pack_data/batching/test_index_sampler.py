"""Batches as lists of numbers: every token of every example once an epoch, on any ranks; stopped and continued."""

import itertools
from collections import Counter

import numpy as np
import pytest

from pack_data.batching.plans import BatchOptions
from pack_data.batching.sampler import IndexBatchSampler
from tests.batching_ways import MSL, drawn, every_way


def tokens_of(lengths):
    """A data set in which each token is its own number, so that every token of a batch says where it comes from."""
    begins = np.cumsum(lengths) - lengths
    return [{"input_ids": np.arange(begin, begin + length)} for begin, length in zip(begins, lengths)]


def samplers(way, lengths, ranks, **options):
    return [IndexBatchSampler(way, lengths, BatchOptions(2, MSL, ranks, 3), rank, **options) for rank in range(ranks)]


@every_way
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_every_token_comes_once_an_epoch_and_ranks_have_equal_steps(way, ranks):
    lengths = drawn(101)
    dataset = tokens_of(lengths)
    every = Counter(range(int(lengths.sum())))
    of_ranks = samplers(way.name, lengths, ranks)
    dealt = IndexBatchSampler(way.name, lengths, BatchOptions(2, MSL, ranks, 3), rank=None)
    orders = []
    for _ in range(2):
        steps = len(of_ranks[0])
        length = len(dealt)
        batches = [list(sampler) for sampler in of_ranks]
        assert {len(of_rank) for of_rank in batches} == {steps}
        assert length == steps * ranks
        view = of_ranks[0].view(dataset)
        items = [view.__getitems__(batch) for of_rank in batches for batch in of_rank]
        assert Counter(int(token) for batch in items for item in batch for token in item["input_ids"]) == every
        assert all(sum(len(item["input_ids"]) for item in batch) <= 2 * MSL for batch in items)
        # What Accelerate deals out: batch number n goes to rank n % ranks.
        in_turn = list(dealt)
        assert [in_turn[rank::ranks] for rank in range(ranks)] == batches
        orders.append(batches)
    assert orders[0] != orders[1]


@every_way
def test_the_numbers_are_the_examples_where_none_is_broken(way):
    """The plain data set is enough then; the batches are those of the plan."""
    lengths = drawn(60)
    options = BatchOptions(2, MSL, 2, 3)
    plan = way.plan(lengths, options)
    rows = [plan.batch(step, 1) for step in range(plan.steps)]
    numbers = list(IndexBatchSampler(way.name, lengths, options, rank=1))
    assert all(type(number) is int for batch in numbers for number in batch)
    if way.name.startswith("FixedLengthPacking"):
        assert max(number for batch in numbers for number in batch) >= len(lengths)  # a plain list raises IndexError
    else:
        assert numbers == [[piece.example for row in batch for piece in row] for batch in rows]


@every_way
def test_stopping_anywhere_and_going_on_gives_the_same_batches(way):
    lengths = drawn(40)

    def fresh():
        return samplers(way.name, lengths, 2)[1]

    whole = fresh()
    epochs = [list(whole), list(whole)]
    for stop in range(len(epochs[0])):
        first = fresh()
        assert list(itertools.islice(first.counted(first), stop)) == epochs[0][:stop]
        second = fresh()
        second.load_state_dict(first.state_dict())
        assert second.state_dict() == first.state_dict() == fresh().state_at(0, stop)
        second.set_epoch(0)  # as a loop over the epochs does
        assert list(second) == epochs[0][stop:]
        assert second.epoch == 1
        assert list(second) == epochs[1]


@every_way
@pytest.mark.parametrize("longer", ["truncate", "split", "drop"])
def test_longer_examples_are_truncated_split_or_dropped(way, longer):
    lengths = drawn(50, longest=3 * MSL)
    dataset = tokens_of(lengths)
    of_ranks = samplers(way.name, lengths, 2, longer=longer)
    view = of_ranks[0].view(dataset)
    assert [len(example["input_ids"]) for example in view] == lengths.tolist()  # and there it ends
    items = [view[number]["input_ids"] for sampler in of_ranks for batch in sampler for number in batch]
    counts = Counter(int(token) for ids in items for token in ids)
    kept = {
        "truncate": np.minimum(lengths, MSL),
        "split": lengths,
        "drop": np.where(lengths > MSL, 0, lengths),
    }[longer]
    begins = np.cumsum(lengths) - lengths
    assert counts == Counter(int(begin) + at for begin, count in zip(begins, kept) for at in range(count))
    assert max(map(len, items)) <= MSL
    assert of_ranks[0].longer.longer == (lengths > MSL).sum() > 10
    assert of_ranks[0].longer.lost_tokens == (lengths - kept).sum()


class TogetherOnly(list):
    """A data set whose examples are read together, a batch at a time."""

    def __getitem__(self, number):
        raise AssertionError("read one by one")

    def __getitems__(self, numbers):
        return [list.__getitem__(self, number) for number in numbers]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", [list, TogetherOnly])
def test_only_columns_with_a_value_for_each_token_are_cut(kind, together):
    """Every piece of examples that are split is read under its own number."""
    if kind is TogetherOnly and not together:
        return
    texts = [np.arange(100 * number, 100 * number + length) for number, length in enumerate((7, 50, 3 * MSL))]
    dataset = [
        {
            "input_ids": text.tolist(),
            "labels": text,
            "text": "four",
            "name": [1],
        }
        for text in texts
    ]
    sampler = IndexBatchSampler(
        "Multipack+PosID",
        list(map(len, texts)),
        BatchOptions(2, MSL),
        longer="split",
    )
    view = sampler.view(kind(dataset))
    tokens = []
    for numbers in sampler:
        for item in view.__getitems__(numbers) if together else map(view.__getitem__, numbers):
            assert item["input_ids"] == item["labels"].tolist()
            assert item["text"] == "four"
            assert item["name"] == [1]
            tokens += item["input_ids"]
    assert sorted(tokens) == np.concatenate(texts).tolist()
    assert [len(example["input_ids"]) for example in dataset] == list(map(len, texts))
