"""Batches of numbers in a DataLoader: with workers every example is counted, and a stopped epoch goes on."""

from collections import Counter

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader

from pack_data.batching.plans import BatchOptions
from pack_data.batching.sampler import IndexBatchSampler
from tests.batching_ways import MSL, drawn, every_way

LENGTHS = drawn(60, longest=2 * MSL)
BEGINS = np.cumsum(LENGTHS) - LENGTHS
DATASET = [{"input_ids": np.arange(begin, begin + length)} for begin, length in zip(BEGINS, LENGTHS)]
EVERY_TOKEN = Counter(range(int(LENGTHS.sum())))


def ids_of(examples):
    """A collator that shows which tokens are in a batch."""
    return sorted(int(token) for example in examples for token in example["input_ids"])


def a_sampler(way="OptimalPacking+PosID", rank=0, ranks=2):
    return IndexBatchSampler(way, LENGTHS, BatchOptions(2, MSL, ranks, seed=3), rank, longer="split")


def a_loader(loader, sampler, workers, **options):
    return loader(sampler.view(DATASET), batch_sampler=sampler, collate_fn=ids_of, num_workers=workers, **options)


def two_epochs(of_ranks, loaders):
    epochs = []
    for epoch in range(2):
        for sampler in of_ranks:
            sampler.set_epoch(epoch)
        steps = {len(loader) for loader in loaders}
        epochs.append([list(loader) for loader in loaders])
        assert {len(batches) for batches in epochs[-1]} == steps and len(steps) == 1
    return epochs


def checked(epochs):
    for batches_of_ranks in epochs:
        assert Counter(token for batches in batches_of_ranks for ids in batches for token in ids) == EVERY_TOKEN
    assert epochs[0] != epochs[1]
    return epochs


@every_way
def test_every_token_comes_once_an_epoch(way):
    of_ranks = [a_sampler(way.name, rank) for rank in range(2)]
    loaders = [a_loader(DataLoader, sampler, 0) for sampler in of_ranks]
    checked(two_epochs(of_ranks, loaders))


@pytest.mark.parametrize("way, workers", [("OptimalPacking+PosID", 1), ("FixedLengthPacking+PosID", 4)])
def test_workers_change_nothing(way, workers):
    """The same workers serve both epochs, so that nothing they hold may belong to one epoch."""
    of_ranks = [a_sampler(way, rank) for rank in range(2)]
    plain = two_epochs(of_ranks, [a_loader(DataLoader, sampler, 0) for sampler in of_ranks])
    loaders = [a_loader(DataLoader, sampler, workers, persistent_workers=True) for sampler in of_ranks]
    assert checked(two_epochs(of_ranks, loaders)) == plain


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_goes_on_inside_an_epoch(workers):
    """Its workers read ahead; the state is of the batches that were used.  The next epoch follows as it would have."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def fresh():
        return a_loader(stateful, a_sampler(), workers)

    def counted(loader):
        return loader.batch_sampler.counted(loader)

    uninterrupted = fresh()
    epochs = [list(counted(uninterrupted)), list(counted(uninterrupted))]
    assert len(epochs[0]) > 3 and epochs[0] != epochs[1]
    for stop in (1, 2, len(epochs[0]) - 1, len(epochs[0])):
        first = fresh()
        source = iter(counted(first))
        assert [next(source) for _ in range(stop)] == epochs[0][:stop]
        second = fresh()
        second.load_state_dict(first.state_dict())
        left = epochs[0][stop:]  # nothing: the next epoch begins
        assert list(counted(second)) == (left or epochs[1])
        assert not left or list(counted(second)) == epochs[1]
