"""The batches of one rank: stopped anywhere and continued, refused for other data."""

from __future__ import annotations

import pytest

from pack_data.batching.plans import BatchOptions
from pack_data.batching.sampler import BatchSampler
from tests.batching_ways import MSL, drawn, every_way


@every_way
def test_stopping_anywhere_and_going_on_gives_the_same_batches(way):
    lengths, options = drawn(40), BatchOptions(2, MSL, 2, 3)

    def two_epochs(sampler):
        for batch in sampler:
            yield batch
        for batch in sampler:
            yield batch

    uninterrupted = list(two_epochs(BatchSampler(way.name, lengths, options, rank=1)))
    assert len(uninterrupted) > 2
    for stop in range(1, len(uninterrupted)):
        first = BatchSampler(way.name, lengths, options, rank=1)
        source = two_epochs(first)
        for _ in range(stop):
            next(source)
        second = BatchSampler(way.name, lengths, options, rank=1)
        second.load_state(first.state())
        rest = list(second)
        assert rest == uninterrupted[stop : stop + len(rest)] and rest
        assert second.epoch == first.epoch + (1 if rest else 0)


def test_a_state_of_another_data_set_or_setting_is_refused():
    options = BatchOptions(2, MSL, 2, 3)
    state = BatchSampler("RandomPacking+PosID", drawn(40), options).state()
    with pytest.raises(ValueError, match="the state was taken with examples 40, this sampler has 41"):
        BatchSampler("RandomPacking+PosID", drawn(41), options).load_state(state)
    with pytest.raises(ValueError, match="taken with ranks 2, this sampler has 4"):
        BatchSampler("RandomPacking+PosID", drawn(40), BatchOptions(2, MSL, 4, 3)).load_state(state)
    with pytest.raises(ValueError, match="taken with way RandomPacking"):
        BatchSampler("SortedPacking+PosID", drawn(40), options).load_state(state)


def test_alone_there_is_one_rank():
    lengths = drawn(9)
    sampler = BatchSampler("RandomPacking+PosID", lengths, BatchOptions(2, MSL))
    assert sorted(piece.example for batch in sampler for row in batch for piece in row) == list(range(len(lengths)))
