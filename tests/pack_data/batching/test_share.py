"""`Share`: each example is read by one process, and a state goes on without reading again."""

import gzip
import itertools
import json
from collections import abc
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from pack_data import PackStream
from pack_data.batching.shard_files import ShardFiles
from pack_data.batching.share import Share
from tests.refusals import refused

COUNT = 23  # examples


def numbered(count=COUNT, first=0):
    return [{"input_ids": [number] * (1 + number % 7)} for number in range(first, first + count)]


def number_of(example):
    return int(example["input_ids"][0])


class Shards:
    """A source with shards and a state; `read` counts the examples that were read, of all parts."""

    def __init__(self, parts, read=None):
        self.parts = parts
        self.at = 0
        self.read = [0] if read is None else read

    @property
    def num_shards(self):
        return len(self.parts)

    def shard(self, num_shards, index):
        return Shards(self.parts[index::num_shards], self.read)

    def __iter__(self):
        for number, example in enumerate(itertools.chain(*self.parts)):
            if number >= self.at:
                self.at = number + 1
                self.read[0] += 1
                yield example

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Node:
    """Like a node of torchdata: an iterator with `reset` and a state."""

    def __init__(self, count=COUNT, example=lambda number: {"input_ids": [number]}):
        self.count = count
        self.example = example
        self.at = 0
        self.read = 0

    def reset(self, state=None):
        self.at = 0 if state is None else state["at"]

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.count:
            raise StopIteration
        self.at += 1
        self.read += 1
        return self.example(self.at - 1)

    def state_dict(self):
        return {"at": self.at}


def files(folder, kind, shards=5):
    examples = numbered()
    paths = []
    for shard in range(shards):
        of_shard = examples[shard::shards]
        path = folder / f"part-{shard}.{kind}"
        if kind == "parquet":
            parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
            arrow = pytest.importorskip("pyarrow")
            parquet.write_table(arrow.Table.from_pylist(of_shard), path, row_group_size=2)
        else:
            text = ("\n".join(json.dumps(example) for example in of_shard) + "\n\n").encode()
            path.write_bytes(gzip.compress(text) if kind.endswith("gz") else text)
        paths.append(path)
    return paths


def hugging_face(folder, shards):
    datasets = pytest.importorskip("datasets")
    paths = [str(path) for path in files(folder, "jsonl", shards)]
    return datasets.IterableDataset.from_generator(_lines_of, gen_kwargs={"paths": paths})


def _lines_of(paths):
    for path in paths:
        yield from map(json.loads, Path(path).read_text().splitlines()[:-1])


def torchdata(kind):
    nodes = pytest.importorskip("torchdata.nodes")
    node = nodes.IterableWrapper(numbered())
    return nodes.Loader(node, restart_on_stop_iteration=False) if kind == "loader" else node


SOURCES = {
    "list": lambda folder: numbered(),
    "iterable": lambda folder: dict(enumerate(numbered())).values(),
    "jsonl": lambda folder: ShardFiles(files(folder, "jsonl")),
    "folder": lambda folder: ShardFiles([files(folder, "jsonl"), str(folder)][1]),
    "jsonl.gz": lambda folder: ShardFiles(files(folder, "jsonl.gz")),
    "parquet": lambda folder: ShardFiles([str(path) for path in files(folder, "parquet")]),
    "one file": lambda folder: ShardFiles(files(folder, "jsonl", 1)),
    "shards": lambda folder: Shards([numbered()[start::4] for start in range(4)]),
    "node": lambda folder: Node(),
    "datasets": lambda folder: hugging_face(folder, 4),
    "datasets, one shard": lambda folder: hugging_face(folder, 1),
    "datasets, shuffled": lambda folder: hugging_face(folder, 4).shuffle(seed=0, buffer_size=10),
    "datasets, shards shuffled": lambda folder: hugging_face(folder, 4).shuffle(seed=0, buffer_size=1),
    "datasets in memory": lambda folder: pytest.importorskip("datasets").Dataset.from_list(numbered()),
    "torchdata node": lambda folder: torchdata("node"),
    "torchdata loader": lambda folder: torchdata("loader"),
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("of", [1, 2, 3])
def test_each_example_is_read_by_one_process_at_every_pass_and_after_every_state(tmp_path, kind, of):
    source = SOURCES[kind](tmp_path)
    every = []
    for number in range(of):
        share = Share(source, number, of)
        whole = [number_of(example) for example in share]
        assert [number_of(example) for example in share] == whole
        every += whole
        for stop in range(0, len(whole) + 1, 3):
            first = Share(source, number, of)
            begun = [number_of(example) for example in itertools.islice(first, stop)]
            state = json.loads(json.dumps(first.state_dict()))
            second = Share(source, number, of)
            second.load_state_dict(state)
            assert second.state_dict() == state
            assert begun + [number_of(example) for example in second] == whole
            assert [number_of(example) for example in second] == whole  # and the pass after that is a whole one
        ended = Share(source, number, of)
        assert len(list(ended)) == len(whole)
        second.load_state_dict(ended.state_dict())
        assert list(second) == []
    assert sorted(every) == list(range(COUNT))


def test_each_process_reads_its_own_shards():
    source = Shards([numbered()[start::4] for start in range(4)])
    assert {number_of(example) % 4 for example in Share(source, 1, 2)} == {1, 3}
    assert source.read == [len(numbered()[1::2])]
    list(Share(source, 1, 5))  # fewer shards than processes: each reads all
    assert source.read == [len(numbered()[1::2]) + COUNT]


def test_a_stream_reads_nothing_again():
    """The sequences that wait are in the stream's state; the source goes on behind them."""

    def both(source):
        return Share(source), PackStream(64, buffer_sequences=8)

    def packs(share, stream):
        return stream.packs((example, len(example["input_ids"])) for example in share)

    parts = [numbered(50, 100 * part) for part in range(4)]
    expected = list(packs(*both(Shards(parts))))
    for stop in range(1, len(expected), 3):
        share, stream = both(Shards(parts))
        begun = list(itertools.islice(packs(share, stream), stop))
        state = json.loads(json.dumps([share.state_dict(), stream.state_dict()]))
        source = Shards(parts)
        share_again, stream_again = both(source)
        share_again.load_state_dict(state[0])
        stream_again.load_state_dict(state[1])
        assert begun + list(packs(share_again, stream_again)) == expected
        assert source.read == [201 - share.seen]  # the first one again, to recognise the source


def test_it_goes_on_after_a_hundred_million_examples_and_reads_none_of_them():
    node = Node(100_000_100)
    share = Share(node, 3, 4)
    process = {"process": [3, 4], "seen": 100_000_000, "ended": False}
    share.load_state_dict({**process, "source": {"at": 100_000_000}})
    assert [number_of(example) for example in itertools.islice(share, 2)] == [100_000_003, 100_000_007]
    assert node.read == 8
    numbers = MagicMock(spec=abc.Sequence, **{"__len__.return_value": 100_000_100})
    share = Share(numbers, 3, 4)
    share.load_state_dict({**process, "source": None})
    next(iter(share))
    numbers.__getitem__.assert_called_once_with(100_000_003)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
@pytest.mark.parametrize("rewritten", [0, 1, 2])  # the file that was read, that is being read, and one to come
def test_a_state_is_refused_after_a_file_was_written_again(tmp_path, kind, rewritten):
    paths = files(tmp_path, kind, 3)
    source = ShardFiles(paths)
    begun = list(itertools.islice(source, 10))
    state = json.loads(json.dumps(source.state_dict()))
    again = ShardFiles(paths)
    again.load_state_dict(state)
    assert begun + list(again) == list(ShardFiles(paths))
    paths[rewritten].write_bytes(paths[rewritten - 1].read_bytes())
    with refused("state of the files", paths[rewritten]):
        ShardFiles(paths).load_state_dict(state)


def test_a_state_of_another_iterable_data_set_is_refused():
    datasets = pytest.importorskip("datasets")

    def streamed(column, shards):
        return datasets.Dataset.from_dict({column: list(range(12))}).to_iterable_dataset(num_shards=shards)

    share = Share(streamed("a", 2))
    next(iter(share))
    state = json.loads(json.dumps(share.state_dict()))
    Share(streamed("a", 2)).load_state_dict(state)
    Share(streamed("a", 3)).load_state_dict({**state, "identity": ""})  # a state of an earlier release
    for other in (streamed("b", 2), streamed("a", 3)):
        with refused("state of the source", state["identity"]):
            Share(other).load_state_dict(state)


@pytest.mark.parametrize("taken", [1, 5, COUNT])
@pytest.mark.parametrize("kind", [kind for kind in SOURCES if kind not in ("jsonl.gz", "folder")])
def test_a_state_is_refused_over_other_examples_of_the_same_form(tmp_path, monkeypatch, kind, taken):
    """Also at the end: more examples may wait in a stream."""
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    share = Share(SOURCES[kind](tmp_path / "a"))
    begun = list(itertools.islice(share, taken + (taken == COUNT)))
    state = json.loads(json.dumps(share.state_dict()))
    again = Share(SOURCES[kind](tmp_path / "a"))
    again.load_state_dict(state)
    whole = list(Share(SOURCES[kind](tmp_path / "a")))
    assert begun + list(again) == whole
    others = [{"input_ids": [number + 100] * (1 + number % 7)} for number in range(COUNT)]
    monkeypatch.setattr("tests.pack_data.batching.test_share.numbered", lambda *_: others)
    other = Share(SOURCES[kind](tmp_path / "b") if kind != "node" else Node(example=lambda number: others[number]))
    if taken == COUNT and not (hasattr(other._source, "num_shards") or isinstance(other._source, list)):
        return  # nothing is read again
    with refused("state of the "):
        other.load_state_dict(state)
        list(other)


def test_the_part_of_a_process_is_in_the_epoch_of_its_source():
    class Epochs(Shards):
        epoch = 3

        def shard(self, num_shards, index):
            part = Epochs(self.parts[index::num_shards])
            part.epoch = 0
            return part

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([{"input_ids": [self.epoch]}])

    share = Share(Epochs([numbered(2), numbered(2)]))
    assert [number_of(example) for example in share] == [3]


def test_a_file_without_a_suffix_is_read_by_its_content(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    arrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    parquet.write_table(arrow.Table.from_pylist(numbered(3)), tmp_path / "part-0")
    assert list(ShardFiles([tmp_path / "part-0"])) == numbered(3)
