"""Batch samplers go on behind what a DataLoader delivered; states name the data they were taken with."""

import json
from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data import BuildOptions, PackDataset, PackMixture, build, pack, pack_dataset
from pack_data.batching.plans import BatchOptions
from pack_data.batching.sampler import IndexBatchSampler
from tests.refusals import refused
from tests.resumes import InOneProcess
from tests.token_sequences import random_sequences

torch_data = pytest.importorskip("torch.utils.data")

S = 16
SEQUENCES = random_sequences(40, S)


def mixture(seed=0):
    rows = [pack_dataset([{"input_ids": tokens} for tokens in part], max_sequence_length=S) for part in parts()]
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


def in_processes(batch_sampler, workers, prefetched=None, loader=None):
    options = dict(prefetch_factor=prefetched, persistent_workers=prefetched == 3) if workers else {}
    loader = torch_data.DataLoader if loader is None else loader
    return loader(Numbers(), batch_sampler=batch_sampler, collate_fn=list, num_workers=workers, **options)


class Ahead:
    """A loader that reads one batch ahead, as Accelerate's does."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        batches = iter(self.loader)
        ahead = list(islice(batches, 1))
        for batch in batches:
            yield ahead.pop()
            ahead.append(batch)
        yield from ahead


def torchdatas(batch_sampler, *workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    return in_processes(batch_sampler, *workers, loader=stateful)


def accelerates(batch_sampler, *workers):
    accelerate = pytest.importorskip("accelerate")
    configuration = accelerate.utils.DataLoaderConfiguration(even_batches=False)
    prepared = accelerate.Accelerator(cpu=True, dataloader_config=configuration).prepare(
        in_processes(batch_sampler, *workers)
    )
    prepared.device = None
    return prepared


def delivered(sampler, loader, loops):
    """All batches of loops over one loader, each left after so many batches; yielded after each loop."""
    seen = []
    for count in loops:
        seen += islice(sampler.counted(loader), count)
        yield seen


def check_mixture(load, loops):
    mixed = mixture()
    expected = list(islice(mixed.batches(4), 40))
    batches = mixed.batches(4)
    for seen in delivered(batches, load(batches), loops):
        assert seen == expected[: len(seen)]
        state = json.loads(json.dumps(batches.state_dict()))
        assert state == mixed.state_at(4 * len(seen))
        assert next(mixture().batches(4, state=state)) == expected[len(seen)]
    assert len(seen) == sum(loops)


def epochs_of(fresh, number=8):
    return list(chain.from_iterable(list(fresh) for _ in range(number)))


def check_sampler(load, loops):
    """Each loop ends with its epoch at the latest; a state at its end begins the next epoch."""
    batches = sampler()
    expected = epochs_of(sampler())
    for seen in delivered(batches, load(batches), loops):
        assert seen == expected[: len(seen)]
        again = sampler()
        again.load_state_dict(json.loads(json.dumps(batches.state_dict())))
        following = list(again)
        assert following
        assert following == expected[len(seen) :][: len(following)]


@pytest.mark.parametrize("check", [check_mixture, check_sampler])
@given(
    in_advance=st.tuples(st.integers(0, 2), st.integers(1, 3)),
    ahead=st.booleans(),
    loops=st.lists(st.integers(0, 7), min_size=1, max_size=4),
)
def test_loops_go_on_behind_what_was_delivered(check, in_advance, ahead, loops):
    wrap = Ahead if ahead else lambda loader: loader
    check(lambda batches: wrap(InOneProcess(batches, *in_advance)), loops)


@pytest.mark.parametrize("load", [in_processes, torchdatas])
@pytest.mark.parametrize("check", [check_mixture, check_sampler])
@pytest.mark.parametrize("in_advance", [(0,), (2, 2)])
def test_loops_over_workers_go_on_behind_what_was_delivered(load, check, in_advance):
    check(lambda batches: load(batches, *in_advance), [3, 6, 1])


@pytest.mark.parametrize("in_advance", [(0,), (1, 3)])
def test_accelerates_loader_reads_ahead_of_the_state(in_advance):
    check_mixture(lambda batches: accelerates(batches, *in_advance), [5, 3])
    batches = sampler()
    seen = list(islice(batches.counted(accelerates(batches, *in_advance)), 5))
    again = sampler()
    again.load_state_dict(batches.state_dict())
    assert seen + list(again) == list(sampler())


@given(
    in_advance=st.tuples(st.integers(0, 2), st.integers(1, 3)),
    ahead=st.booleans(),
    taken=st.integers(1, 20),
    endless=st.booleans(),
)
def test_a_loop_that_nobody_counts_has_no_state(in_advance, ahead, taken, endless):
    """It may have read ahead.  Only a loop that requested every batch is followed by another one: the next epoch."""
    batches = mixture().batches(4) if endless else sampler()
    loader = InOneProcess(batches, *in_advance)
    under_way = iter(Ahead(loader) if ahead else loader)
    seen = list(islice(under_way, taken))
    for _ in range(2):
        with refused("state of the sampler", "counted(loader)"):
            batches.state_dict()
        under_way = None
    requested = taken + ahead + in_advance[0] * in_advance[1]
    if endless or requested < len(sampler()):
        with refused("counted(loader)"):
            list(islice(loader, 1))
        batches.load_state_dict(mixture().state_at(0) if endless else sampler().state_at(0, 0))
        assert list(islice(loader, taken)) == seen
    else:
        assert list(loader) == epochs_of(sampler(), 2)[len(sampler()) :]


@pytest.mark.parametrize("workers, counted, taken", [((1, 2), False, 4), ((2, 1), True, 1)])
def test_a_state_is_not_loaded_into_a_loop_under_way(workers, counted, taken):
    """prime-rl #3299: workers had read ahead from the beginning, and all of it came again."""
    for batches, state in ((sampler(), sampler().state_at(0, 5)), (mixture().batches(4), mixture().state_at(20))):
        loader = in_processes(batches, *workers)
        loop = iter(batches.counted(loader) if counted else loader)
        list(islice(loop, taken))
        with refused("under way"):
            batches.load_state_dict(state)
        del loop
        batches.load_state_dict(state)
        assert batches.state_dict() == state


def test_an_iteration_has_the_state_of_what_it_requested():
    """StatefulDataLoader of torchdata asks for it after each request."""
    for batches, state_at in (
        (sampler(), sampler().state_at),
        (mixture().batches(4), lambda _, updates: mixture().state_at(4 * updates)),
    ):
        requests = iter(batches)
        assert requests.state_dict() == state_at(0, 0)
        next(requests)
        next(requests)
        assert requests.state_dict() == state_at(0, 2)


def test_a_second_loop_ends_the_first_one_and_another_loader_is_refused():
    batches = sampler()
    expected = list(sampler())
    first = batches.counted(batches)
    second = batches.counted(batches)
    begun = iter(first)
    assert [next(begun), *islice(second, 2)] == expected[:3]
    with refused("another loop"):
        next(begun)
    assert list(second) == expected[3:]
    assert batches.state_dict() == batches.state_at(1, 0)
    with refused("does not read this sampler"):
        list(sampler().counted([[1]]))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("taken", [1, 4])
def test_batches_of_all_ranks_are_counted_in_steps(shared, taken):
    """Deal batches out as Accelerate's BatchSamplerShard does, or keep all in one process."""
    batches = sampler(2, None)

    class Dealt(list):
        def __iter__(self):
            return islice(iter(batches), 1, None, 2)

    loader = Dealt(range(len(batches) // 2)) if shared else batches
    seen = list(islice(batches.counted(loader), taken))
    assert seen == (list(sampler(2, 1))[:taken] if shared else list(sampler(2, None))[:taken])
    assert batches.state_dict()["step"] == (taken if shared else taken // 2)
    with refused("counted", "3 batches", "2 ranks"):
        list(batches.counted(range(3)))


@pytest.mark.parametrize("missing, goes_on", [(0, True), (1, False)])
def test_after_a_state_the_next_epoch_begins_only_if_nothing_was_left(missing, goes_on):
    """A caller that counts epochs calls set_epoch(epoch + 1) after the last batch; `missing` batches were not taken."""
    fresh = sampler()
    left = sampler()
    batches = list(fresh)
    following = list(fresh)
    list(islice(left.counted(left), len(batches) - missing))
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
    batches = sampler()
    assert len(torch_data.DataLoader(Numbers(), batch_sampler=batches)) == len(list(batches))


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
            return pack_dataset([{"input_ids": tokens} for tokens in sequences], **options)
        path = written(tmp_path / "a.jsonl", sequences)
        if kind == "file":
            return pack_dataset(path, **options)
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
