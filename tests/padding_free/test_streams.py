"""PackedStream: each example in one pack of one worker of one rank, and the same packs after a restart."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader

from pack_data.batching.collators import padding_free_batch
from pack_data.batching.shard_files import ShardFiles
from padding_free.streams import PackedStream
from tests.refusals import refused

S = 64


def examples(n=120, seed=0):
    """The tokens of an example are its number."""
    lengths = np.random.default_rng(seed).integers(1, S + 1, n).tolist()
    return [{"input_ids": [number] * length} for number, length in enumerate(lengths)]


def stream(source, **options):
    return PackedStream(source, S, max_sequences_per_pack=4, buffer_sequences=16, **options)


def resumed(stream, first):
    """Load the state of another stream or loader as it is read from a file."""
    stream.load_state_dict(json.loads(json.dumps(first.state_dict())))
    return stream


def numbers(packs):
    return [[example["input_ids"][0] for example in pack] for pack in packs]


def check_all_once(packs, given):
    assert sorted(number for pack in packs for number in pack) == list(range(len(given)))


@pytest.mark.parametrize("ranks, workers", [(1, 1), (3, 1), (2, 2)])
def test_each_example_goes_to_one_worker_of_one_rank(ranks, workers, monkeypatch):
    given = examples()
    packs = []
    for rank, worker in itertools.product(range(ranks), range(workers)):
        info = SimpleNamespace(num_workers=workers, id=worker)
        monkeypatch.setattr("padding_free.streams.get_worker_info", lambda info=info: info)
        own = numbers(stream(given, rank=rank, ranks=ranks))
        assert {number % (ranks * workers) for pack in own for number in pack} == {rank * workers + worker}
        packs += own
    check_all_once(packs, given)
    for pack in packs:
        assert len(pack) <= 4
        assert sum(len(given[number]["input_ids"]) for number in pack) <= S


def test_a_state_taken_after_any_pack_gives_the_same_packs():
    given = examples()
    options = {"longer": "split", "rank": 1, "ranks": 2}
    first_of_all = {"input_ids": [len(given)] * 150}
    last_of_all = {"input_ids": [len(given) + 1] * 200}
    longer = [first_of_all, *given, last_of_all]
    whole = [[example["input_ids"] for example in pack] for pack in stream(longer, **options)]
    for stop in range(0, len(whole) + 1, 5):
        first = stream(longer, **options)
        begun = list(itertools.islice(iter(first), stop))
        second = resumed(stream(longer, **options), first)
        assert second.state_dict() == json.loads(json.dumps(first.state_dict()))
        assert [[example["input_ids"] for example in pack] for pack in [*begun, *second]] == whole
        assert second.longer.examples == 61


def files_of(folder, shards=5):
    given = examples()
    paths = []
    for shard in range(shards):
        path = folder / f"{shard}.jsonl"
        lines = map(json.dumps, given[shard::shards])
        path.write_text("\n".join(lines))
        paths.append(path)
    return given, paths


def lines_of(paths):
    for path in paths:
        yield from map(json.loads, Path(path).read_text().splitlines())


def of_hugging_face(paths):
    datasets = pytest.importorskip("datasets")
    return datasets.IterableDataset.from_generator(lines_of, gen_kwargs={"paths": [str(path) for path in paths]})


SOURCES = pytest.mark.parametrize("source_of", [ShardFiles, of_hugging_face])


@SOURCES
@pytest.mark.parametrize("workers", [0, 2])
def test_shards_go_to_ranks_and_workers_each_example_once(tmp_path, source_of, workers):
    given, paths = files_of(tmp_path)
    packs = []
    for rank in range(2):
        own = stream(source_of(paths), rank=rank, ranks=2)
        packs += numbers(DataLoader(own, batch_size=None, num_workers=workers))
    check_all_once(packs, given)


@SOURCES
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on_from_the_state_of_the_source(tmp_path, source_of, workers):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    given, paths = files_of(tmp_path)

    def loader():
        own = stream(source_of(paths), rank=0, ranks=1)
        return loaders.StatefulDataLoader(own, batch_size=None, num_workers=workers)

    whole = numbers(loader())
    check_all_once(whole, given)
    for stop in range(1, len(whole), 7):
        first = loader()
        second = loader()
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
    first = stream(source)
    whole = numbers(stream(source))
    packs = iter(first)
    assert numbers(itertools.islice(packs, len(whole))) == whole
    assert not is_ended or not list(packs)
    second = resumed(stream(source), first)
    assert numbers(second) == whole == numbers(first)
    assert vars(second.longer) == vars(first.longer)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_stateful_loader_begins_the_next_pass_after_the_last_pack(tmp_path, workers, persistent):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    given, paths = files_of(tmp_path)
    options = {"batch_size": None, "num_workers": workers, "persistent_workers": persistent and workers > 0}

    def loader():
        return loaders.StatefulDataLoader(stream(ShardFiles(paths), rank=0, ranks=1), **options)

    first = loader()
    second = loader()
    whole = numbers(first)
    second.load_state_dict(first.state_dict())
    assert numbers(second) == whole == numbers(second)
    check_all_once(whole, given)


def test_a_state_over_another_iterable_data_set_is_refused():
    """The examples that waited came from the first, the others from the second."""
    datasets = pytest.importorskip("datasets")

    def stream_from(begin):
        rows = {"input_ids": [[number] * (1 + number % 60) for number in range(begin, begin + 400)]}
        return stream(datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=2))

    first = stream_from(0)
    list(itertools.islice(first, 9))
    assert len(list(resumed(stream_from(0), first))) > 9
    with refused("state of the source"):
        list(resumed(stream_from(1000), first))


def test_a_source_with_a_state_is_not_read_ahead(tmp_path):
    (tmp_path / "0.jsonl").write_text('{"input_ids": [1]}')
    with refused("flush_after", "source"):
        PackedStream(ShardFiles([tmp_path / "0.jsonl"]), 8, flush_after=1.0)


def test_a_second_resume_goes_on_from_the_first_with_the_boundaries_of_waiting_rows():
    """The examples are rows of two sequences."""
    rows = []
    for size in (4, 2, 5, 1, 3, 4, 2, 1):
        rows.append({"input_ids": list(range(3 + size)), "seq_lengths": [3, size]})

    def fresh():
        return PackedStream(rows, 12, collate=lambda pack: padding_free_batch(pack)["cumulative_lengths"].tolist())

    whole = list(fresh())
    last = fresh()
    taken = []
    for _ in range(3):
        taken.append(next(iter(last)))
        last = resumed(fresh(), last)
    assert taken + list(last) == whole and len(whole) > 3
    sizes = sorted(size for bounds in whole for size in np.diff(bounds).tolist())
    assert sizes == sorted(size for row in rows for size in row["seq_lengths"])
