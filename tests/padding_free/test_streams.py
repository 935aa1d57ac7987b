"""PackedStream: each example in one pack of one worker of one rank, and the same packs after a restart."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader

from ipu_packed_bert.processes.ranks import _end_group
from pack_data.batching.collators import padding_free_batch
from pack_data.batching.shard_files import ShardFiles
from padding_free.streams import PackedStream, least_of_ranks
from tests.refusals import refused

S = 64


def examples(n=240, seed=0):
    """The tokens of an example are its number."""
    lengths = np.random.default_rng(seed).integers(1, S + 1, n).tolist()
    return [{"input_ids": [number] * length} for number, length in enumerate(lengths)]


def stream(source, **options):
    return PackedStream(source, S, max_sequences_per_pack=4, buffer_sequences=16, **options)


def numbers(packs):
    return [[example["input_ids"][0] for example in pack] for pack in packs]


def check_all_once(packs, given):
    assert sorted(number for pack in packs for number in pack) == list(range(len(given)))


@pytest.mark.parametrize("ranks", [1, 3])
def test_each_example_goes_to_one_rank(ranks):
    given = examples()
    packs = [numbers(stream(given, rank=rank, ranks=ranks)) for rank in range(ranks)]
    check_all_once([pack for own in packs for pack in own], given)
    for rank, own in enumerate(packs):
        assert {number % ranks for pack in own for number in pack} == {rank}
        assert all(sum(len(given[number]["input_ids"]) for number in pack) <= S and len(pack) <= 4 for pack in own)


def test_each_example_goes_to_one_worker_of_one_rank(monkeypatch):
    from padding_free import streams

    class Worker:
        num_workers = 2

        def __init__(self, number):
            self.id = number

    given, packs = examples(), []
    for rank, worker in itertools.product(range(2), range(2)):
        monkeypatch.setattr(streams, "get_worker_info", lambda worker=worker: Worker(worker))
        packs += numbers(stream(given, rank=rank, ranks=2))
    check_all_once(packs, given)


def test_a_data_loader_reads_it():
    given = examples()
    loaded = list(DataLoader(stream(given), batch_size=None))
    assert numbers(loaded) == numbers(stream(given))
    collated = stream(given, collate=padding_free_batch)
    rows = list(DataLoader(collated, batch_size=None))
    assert all(torch.is_tensor(row["input_ids"]) and row["input_ids"].shape[1] <= S for row in rows)
    assert sum(row["input_ids"].shape[1] for row in rows) == sum(len(each["input_ids"]) for each in given)


def test_every_iteration_begins_anew():
    one = stream(examples(60))
    assert numbers(one) == numbers(one)


def test_a_state_taken_after_any_pack_gives_the_same_packs():
    given = examples(120)
    options = {"longer": "split", "rank": 1, "ranks": 2}
    longer = [{"input_ids": [len(given)] * 150}, *given, {"input_ids": [len(given) + 1] * 200}]
    whole = [[example["input_ids"] for example in pack] for pack in stream(longer, **options)]
    for stop in range(0, len(whole) + 1, 5):
        first = stream(longer, **options)
        begun = list(itertools.islice(iter(first), stop))
        state = json.loads(json.dumps(first.state_dict()))
        second = stream(longer, **options)
        second.load_state_dict(state)
        assert second.state_dict() == state
        both = [*begun, *second]
        assert [[example["input_ids"] for example in pack] for pack in both] == whole
        assert second.longer.examples == 61


def files_of(folder, shards=5):
    given, paths = examples(120), []
    for shard in range(shards):
        paths.append(folder / f"{shard}.jsonl")
        paths[-1].write_text("".join(json.dumps(each) + "\n" for each in given[shard::shards]))
    return given, paths


def of_hugging_face(paths):
    datasets = pytest.importorskip("datasets")
    return datasets.IterableDataset.from_generator(lines_of, gen_kwargs={"paths": [str(path) for path in paths]})


def lines_of(paths):
    for path in paths:
        yield from map(json.loads, Path(path).read_text().splitlines())


@pytest.mark.parametrize("kind", ["files", "datasets"])
@pytest.mark.parametrize("workers", [0, 2])
def test_shards_go_to_ranks_and_workers_each_example_once(tmp_path, kind, workers):
    given, paths = files_of(tmp_path)
    source = ShardFiles(paths) if kind == "files" else of_hugging_face(paths)
    packs = []
    for rank in range(2):
        loader = DataLoader(stream(source, rank=rank, ranks=2), batch_size=None, num_workers=workers)
        packs += numbers(loader)
    check_all_once(packs, given)


@pytest.mark.parametrize("kind", ["files", "datasets"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on_from_the_state_of_the_source(tmp_path, kind, workers):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    given, paths = files_of(tmp_path)

    def loader():
        source = ShardFiles(paths) if kind == "files" else of_hugging_face(paths)
        return loaders.StatefulDataLoader(stream(source, rank=0, ranks=1), batch_size=None, num_workers=workers)

    whole = numbers(loader())
    check_all_once(whole, given)
    for stop in range(1, len(whole), 7):
        first, second = loader(), loader()
        begun = numbers(itertools.islice(iter(first), stop))
        second.load_state_dict(first.state_dict())
        assert begun + numbers(second) == whole


@pytest.mark.parametrize("kind", ["list", "iterable", "files", "datasets"])
@pytest.mark.parametrize("is_ended", [False, True])
def test_a_state_after_the_last_pack_begins_the_next_pass(tmp_path, kind, is_ended):
    """It gave an empty pass."""
    given, paths = files_of(tmp_path)
    sources = {"list": given, "iterable": dict(enumerate(given)).values(), "files": ShardFiles(paths)}
    source = of_hugging_face(paths) if kind == "datasets" else sources[kind]
    first, second = stream(source), stream(source)
    whole = numbers(stream(source))
    packs = iter(first)
    assert numbers(itertools.islice(packs, len(whole))) == whole
    assert not is_ended or not list(packs)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert numbers(second) == whole == numbers(first)
    assert vars(second.longer) == vars(first.longer)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_stateful_loader_begins_the_next_pass_after_the_last_pack(tmp_path, workers, persistent):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    given, paths = files_of(tmp_path)
    options = dict(batch_size=None, num_workers=workers, persistent_workers=persistent and workers > 0)
    first, second = (
        loaders.StatefulDataLoader(stream(ShardFiles(paths), rank=0, ranks=1), **options) for _ in range(2)
    )
    whole = numbers(first)
    second.load_state_dict(first.state_dict())
    assert numbers(second) == whole == numbers(second)
    check_all_once(whole, given)


def test_a_state_over_another_iterable_data_set_is_refused():
    """The examples that waited came from the first, the others from the second."""
    datasets = pytest.importorskip("datasets")

    def of(begin):
        rows = {"input_ids": [[number] * (1 + number % 60) for number in range(begin, begin + 400)]}
        return stream(datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=2))

    first = of(0)
    list(itertools.islice(first, 9))
    same, other = of(0), of(1000)
    same.load_state_dict(first.state_dict())
    assert len(list(same)) > 9
    other.load_state_dict(first.state_dict())
    with refused("state of the source"):
        list(other)


def test_a_state_of_another_process_is_refused():
    first = stream(examples(), rank=0, ranks=2)
    next(iter(first))
    second = stream(examples(), rank=1, ranks=2)
    second.load_state_dict(first.state_dict())
    with refused("state", "ranks and workers"):
        next(iter(second))


def _least_of_two(rank, path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    assert least_of_ranks(7 + rank) == least_of_ranks(9 - 2 * rank) == 7
    _end_group()


def test_the_least_of_two_ranks(tmp_path):
    assert least_of_ranks(7) == 7  # without torch.distributed
    torch.multiprocessing.spawn(_least_of_two, (tmp_path / "store",), nprocs=2)


def test_a_second_resume_goes_on_from_the_first_with_the_boundaries_of_waiting_rows():
    """The examples are rows of two sequences."""
    rows = [{"input_ids": list(range(3 + size)), "seq_lengths": [3, size]} for size in (4, 2, 5, 1, 3, 4, 2, 1)]

    def lengths_of(pack):
        return padding_free_batch(pack)["cumulative_lengths"].tolist()

    whole = list(PackedStream(rows, 12, collate=lengths_of))
    stream, taken = PackedStream(rows, 12, collate=lengths_of), []
    for _ in range(3):
        source = iter(stream)
        taken.append(next(source))
        state = json.loads(json.dumps(stream.state_dict()))
        stream = PackedStream(rows, 12, collate=lengths_of)
        stream.load_state_dict(state)
    assert taken + list(stream) == whole and len(whole) > 3
    sizes = sorted(size for bounds in whole for size in np.diff(bounds).tolist())
    assert sizes == sorted(size for row in rows for size in row["seq_lengths"])
