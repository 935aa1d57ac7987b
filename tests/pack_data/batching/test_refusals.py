"""Input that batching refuses, each in one line that names the field, the file and the value."""

import json

import numpy as np
import pytest

from pack_data import PackDataset, PackMixture, pack
from pack_data.batching.collators import padding_free_batch
from pack_data.batching.plans import BatchOptions, get_way
from pack_data.batching.sampler import IndexBatchSampler
from pack_data.batching.shard_files import ShardFiles
from pack_data.batching.share import Share
from tests.refusals import refused

EXAMPLES = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}, {"input_ids": [5, 6]}]
LENGTHS = [3, 1, 2]
SAMPLER = "RandomPacking+PosID"


def lines(directory, *examples):
    """A JSONL file of these lines."""
    path = directory / "a.jsonl"
    path.write_text("".join(line + "\n" for line in map(json.dumps, examples)))
    return path


def sampler(lengths=LENGTHS, rank=0, **options):
    return IndexBatchSampler(SAMPLER, lengths, BatchOptions(1, 4, 2, 3), rank, **options)


def sampler_with(**changed):
    made = sampler()
    return made.load_state_dict({**made.state_at(0, 1), **changed})


def after_a_state(epoch):
    made = sampler()
    made.load_state_dict(made.state_at(2, 0))
    made.set_epoch(epoch)


def rows(source=EXAMPLES, **options):
    return PackDataset(source, max_sequence_length=8, **options)


def rows_packed_as(lengths, slots, longer="raise"):
    data_set = PackDataset(EXAMPLES, packed=pack(lengths, max_sequence_length=slots, longer=longer))
    return data_set.__getitems__(range(len(data_set)))


def mixture(weights=None):
    return PackMixture([rows(), rows()], weights)


class Endless(list):
    restart_on_stop_iteration = True


REFUSALS = [
    (lambda _: rows([[1, 2], [3]]), ["example 0", "input_ids"]),
    (lambda _: rows([{"text": "a"}]), ["example 0", "input_ids"]),
    (lambda _: rows([{"input_ids": [1]}, {"input_ids": 7}]), ["example 1", "input_ids"]),
    (lambda _: rows(iter(EXAMPLES)), ["list_iterator", "list(examples)"]),
    # plans and samplers
    (lambda _: get_way("Sorted"), ["'Sorted'", "RandomSampling"]),
    (lambda _: get_way(SAMPLER).plan([], BatchOptions(1, 32)), ["no examples"]),
    (lambda _: get_way(SAMPLER).plan([3, 0], BatchOptions(1, 32)), ["1 has length 0"]),
    (lambda _: get_way(SAMPLER).plan([3, 33], BatchOptions(1, 32)), ["1 has length 33", 32]),
    (lambda _: get_way(SAMPLER).plan([2.9], BatchOptions(1, 32)), ["whole numbers"]),
    (lambda _: BatchOptions(0, 4), ["batch_size", 0]),
    (lambda _: sampler(rank=2), ["rank", 2, "0 to 1"]),
    (lambda _: sampler([3, 33]), ["sequence 1", 33]),
    (lambda _: sampler(longer="drop").load_state_dict(sampler().state_dict()), ["longer", "raise", "drop"]),
    (lambda _: sampler([1, 2, 3]).load_state_dict(sampler().state_dict()), ["lengths_crc32"]),
    (lambda _: sampler_with(epoch=-1), ["epoch", -1]),
    (lambda _: sampler_with(step=1.5), ["step", 1.5]),
    (lambda _: sampler_with(step=10**6), ["step", 10**6, "epoch 0"]),
    (lambda _: after_a_state(0), [r"set_epoch\(0\)", "epoch 2"]),
    (lambda _: sampler().view(EXAMPLES[:2]), ["2 examples", 3]),
    # collators
    (lambda _: padding_free_batch([{"input_ids": []}]), ["example 0", "0 input_ids"]),
    (lambda _: padding_free_batch([{"input_ids": [1, 2], "labels": [1]}]), ["example 0", "2 input_ids", "1 labels"]),
    # rows of a packing
    (lambda path: PackDataset(lines(path, *EXAMPLES)), ["a.jsonl", "max_sequence_length"]),
    (lambda _: rows(max_sequences_per_pack=0), ["max_sequences_per_pack = 0", 1]),
    (lambda path: rows(lines(path, {"text": "x", "tokens": [1]})), ["a.jsonl", "input_ids"]),
    (lambda _: PackDataset(EXAMPLES, packed=pack([1], max_sequence_length=8)), ["packed", "3 examples", 1]),
    (lambda _: PackDataset([{"input_ids": [5, 6]}], packed=pack([3], max_sequence_length=8))[0], ["example 0", 2, 3]),
    (lambda _: rows_packed_as([3, 1, 1], 3), ["example 2", 2, 1]),
    (lambda _: rows_packed_as([3, 1, 1], 2, "drop"), ["example 2", 2, 1]),
    (lambda _: rows_packed_as([9, 1, 2], 3, "truncate"), ["example 0", 3, 9]),
    (lambda _: rows_packed_as([5, 1, 2], 3, "split"), ["example 0", 3, 5]),
    # mixtures
    (lambda _: PackMixture([]), ["data_sets", "row"]),
    (lambda _: mixture([1, 2, 3]), ["weights", r"\[1, 2, 3\]", "2 data sets"]),
    (lambda _: mixture([1, 0]), ["weights", r"\[1, 0\]"]),
    (lambda _: PackMixture([rows()], seed=2**64), ["seed", 2**64]),
    (lambda _: mixture([1, np.nan]), ["weights", "nan"]),
    (lambda _: mixture().batches(12, ranks=5), [12, "0 of 5"]),
    (lambda _: mixture().batches(12, rank=2, ranks=2), [12, "2 of 2"]),
    (lambda _: mixture([2, 1]).batches(12, state=mixture().state_at(0)), ["weights", "seed"]),
    # shares of a source
    (lambda _: Share(iter(EXAMPLES)), ["source", "iterator"]),
    (lambda _: Share(Endless(EXAMPLES)), ["source", "restart_on_stop_iteration=False"]),
    (lambda path: Share([path / "a.csv"]), ["a.csv", ".jsonl", "Parquet"]),
    (lambda _: Share([], 2, 2), ["number", 2]),
    (lambda path: Share(str(path / "none")), ["none", "no such file"]),
    (lambda path: list(Share([lines(path, *EXAMPLES), path / "b.jsonl"])), ["b.jsonl"]),
    (lambda path: list(Share([lines(path, EXAMPLES[0], 3)])), ["a.jsonl: line 2"]),
    (lambda _: Share(EXAMPLES, 0, 2).load_state_dict(Share(EXAMPLES, 1, 2).state_dict()), ["process 1 of 2"]),
    (lambda path: ShardFiles([lines(path)]).load_state_dict(ShardFiles([]).state_dict()), ["files", "same files"]),
]


@pytest.mark.parametrize("make, names", REFUSALS)
def test_invalid_input_is_refused(tmp_path, make, names):
    with refused(*names):
        make(tmp_path)


def test_a_line_that_is_no_json_is_named(tmp_path):
    path = lines(tmp_path, EXAMPLES[0])
    path.write_text(path.read_text() + "{\n")
    with refused("a.jsonl: line 2"):
        list(Share([path]))


@pytest.mark.parametrize("number", [3 * 5, -1])
def test_a_number_of_no_piece_is_refused(number):
    with refused(number, "3 examples", kind=IndexError):
        sampler().view(EXAMPLES)[number]


@pytest.mark.parametrize("data_set", [rows(), mixture()])
def test_a_row_beyond_the_last_is_refused(data_set):
    with refused(f"0 to {len(data_set) - 1}", len(data_set), kind=IndexError):
        data_set[len(data_set)]
