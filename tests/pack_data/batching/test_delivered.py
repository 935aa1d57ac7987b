"""Batch samplers go on behind what a DataLoader delivered; states name the data they were taken with."""

import json
from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data import BuildOptions, PackDataset, PackMixture, build, pack
from pack_data.batching.plans import BatchOptions
from pack_data.batching.sampler import IndexBatchSampler
from pack_data.batching.share import Share
from tests.refusals import refused
from tests.resumes import InOneProcess
from tests.token_sequences import random_sequences

torch_data = pytest.importorskip("torch.utils.data")

S = 16
SEQUENCES = random_sequences(40, S)


def mixture(seed=0):
    rows = [PackDataset([{"input_ids": tokens} for tokens in part], max_sequence_length=S) for part in parts()]
    return PackMixture(rows, seed=seed)


def parts():
    return SEQUENCES[:25], SEQUENCES[25:]


def sampler(ranks=1, rank=0):
    return IndexBatchSampler("RandomPacking+PosID", list(map(len, SEQUENCES)), BatchOptions(2, S, ranks, 3), rank)


class Numbers:
    """A data set whose items are their numbers."""

    def __len__(self):
        return 10**6

    def __getitem__(self, number):
        return number


def in_processes(batch_sampler, workers, prefetched=None):
    options = dict(prefetch_factor=prefetched, persistent_workers=prefetched == 3) if workers else {}
    return torch_data.DataLoader(
        Numbers(), batch_sampler=batch_sampler, collate_fn=list, num_workers=workers, **options
    )


def delivered(loader, loops):
    """All batches of loops over one loader, each left after so many batches; yielded after each loop."""
    seen = []
    for count in loops:
        seen += [batch for _, batch in zip(range(count), loader)]
        yield seen


def check_mixture(load, loops):
    mixed = mixture()
    expected = list(islice(mixed.batches(4), 40))
    batches = mixed.batches(4)
    for seen in delivered(load(batches), loops):
        assert seen == expected[: len(seen)]
        state = json.loads(json.dumps(batches.state_dict()))
        assert state == mixed.state_at(4 * len(seen))
        assert next(mixture().batches(4, state=state)) == expected[len(seen)]
    assert len(seen) == sum(loops)


def check_sampler(load, loops):
    fresh, batches = sampler(), sampler()
    expected = list(chain.from_iterable(list(fresh) for _ in range(8)))
    for seen in delivered(load(batches), loops):
        assert seen == expected[: len(seen)]
        again = sampler()
        again.load_state_dict(json.loads(json.dumps(batches.state_dict())))
        following = list(again) or list(again)
        assert following and following == expected[len(seen) :][: len(following)]


@pytest.mark.parametrize("check", [check_mixture, check_sampler])
@given(
    in_advance=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    loops=st.lists(st.integers(0, 7), min_size=1, max_size=4),
)
def test_loops_go_on_behind_what_was_delivered(check, in_advance, loops):
    check(lambda batches: InOneProcess(batches, *in_advance), loops)


@pytest.mark.parametrize("check", [check_mixture, check_sampler])
@pytest.mark.parametrize("in_advance", [(0,), (1, 3), (2, 2)])
def test_loops_over_workers_go_on_behind_what_was_delivered(check, in_advance):
    check(lambda batches: in_processes(batches, *in_advance), [3, 6, 1])


def test_an_epoch_of_which_nothing_is_left_ends_when_it_is_read():
    fresh, left = sampler(), sampler()
    first, second = list(fresh), list(fresh)
    assert list(islice(iter(left), len(left))) == first
    again = sampler()
    again.load_state_dict(left.state_dict())
    assert list(again) == [] and list(again) == second


@pytest.mark.parametrize("missing, goes_on", [(0, True), (1, False)])
def test_after_a_state_the_next_epoch_begins_only_if_nothing_was_left(missing, goes_on):
    """A caller that counts epochs calls set_epoch(epoch + 1) after the last batch; `missing` batches were not taken."""
    fresh, left = sampler(), sampler()
    batches, following = list(fresh), list(fresh)
    list(islice(iter(left), len(batches) - missing))
    again = sampler()
    again.load_state_dict(left.state_dict())
    if goes_on:
        again.set_epoch(1)
        assert list(again) == following
    else:
        with refused("set_epoch(1)", "epoch 0"):
            again.set_epoch(1)


def test_lengths_of_loaders_are_those_of_an_epoch():
    mixed = mixture()
    assert len(torch_data.DataLoader(mixed, batch_sampler=mixed.batches(4))) == -(-len(mixed) // 4)
    assert len(torch_data.DataLoader(mixed, batch_sampler=mixed.batches(4, rank=1, ranks=2))) == -(-len(mixed) // 4)
    one = sampler()
    assert len(torch_data.DataLoader(Numbers(), batch_sampler=one)) == len(list(one))


def written(path, sequences):
    path.write_text("".join(json.dumps({"input_ids": tokens}) + "\n" for tokens in sequences))
    return path


ROTATED = [*SEQUENCES[1:], SEQUENCES[0]]
OTHER_TOKEN = [*SEQUENCES[:-1], [*SEQUENCES[-1][:-1], 9999]]
CHANGES = {
    "shuffled": (ROTATED, {}),
    "one token": (OTHER_TOKEN, {}),
    "lengthened": ([*SEQUENCES, [5]], {}),
    "seed of the packing": (SEQUENCES, {"seed": 1}),
    "packing": (SEQUENCES, {"max_sequences_per_pack": 2}),
    "length of a row": (SEQUENCES, {"max_sequence_length": S + 1}),
}


@pytest.mark.parametrize("kind", ["file", "examples", "built"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_state_of_other_data_is_refused(tmp_path, kind, change):
    def rows(sequences, **options):
        options = {"max_sequence_length": S, **options}
        if kind == "examples":
            return PackDataset([{"input_ids": tokens} for tokens in sequences], **options)
        path = written(tmp_path / "a.jsonl", sequences)
        if kind == "file":
            return PackDataset(path, **options)
        depth = {"max_sequences_per_pack": None, **options}
        return PackDataset(build(BuildOptions(tmp_path / "built", source=path, overwrite=True, **depth)))

    def over(data_set):
        return IndexBatchSampler("RandomSampling+Padding", data_set, BatchOptions(2, S + 1))

    data_set = rows(SEQUENCES)
    state = PackMixture([data_set]).state_at(8)
    state_of_sampler = over(data_set).state_at(0, 1)
    sequences, options = CHANGES[change]
    same = rows(SEQUENCES)
    PackMixture([same]).batches(4, state=state)
    over(same).load_state_dict(state_of_sampler)
    changed = rows(sequences, **options)
    with refused("mixture", PackMixture([changed]).identity):
        PackMixture([changed]).batches(4, state=state)
    with refused("the state was taken with"):
        over(changed).load_state_dict(state_of_sampler)


def test_an_identity_does_not_depend_on_the_type_of_the_numbers():
    lists = [{"input_ids": tokens, "words": ["x"] * len(tokens)} for tokens in SEQUENCES]
    arrays = [{**row, "input_ids": np.array(row["input_ids"], np.int32)} for row in lists]
    packed = pack(list(map(len, SEQUENCES)), max_sequence_length=S)
    identities = {PackDataset(rows, packed=packed).identity for rows in (lists, arrays)}
    assert len(identities) == 1
    with_mask = [{**row, "loss_mask": [1] * len(row["input_ids"])} for row in lists]
    assert PackDataset(with_mask, packed=packed).identity not in identities


class Anew:
    """Examples that are read again from the first one."""

    def __init__(self, sequences):
        self.sequences = sequences

    def __iter__(self):
        return ({"input_ids": tokens} for tokens in self.sequences)


@pytest.mark.parametrize("kind", [Anew, lambda sequences: list(Anew(sequences))])
@pytest.mark.parametrize("of", [1, 3])
@pytest.mark.parametrize("other", [ROTATED, SEQUENCES[:5], random_sequences(40, S, 9)])
def test_a_share_of_another_source_is_refused(kind, of, other):
    first = Share(kind(SEQUENCES), of - 1, of)
    begun = list(islice(first, 8))
    state = json.loads(json.dumps(first.state_dict()))
    again = Share(kind(SEQUENCES), of - 1, of)
    again.load_state_dict(state)
    assert begun + list(again) == list(Share(kind(SEQUENCES), of - 1, of))
    changed = Share(kind(other), of - 1, of)
    with refused("state of the source", state["identity"]):
        changed.load_state_dict(state)
        list(changed)
