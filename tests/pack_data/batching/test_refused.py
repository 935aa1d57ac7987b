"""Input that batching refuses, each in one line that names the field, the file and the value."""

# ruff: noqa: F401  names that the table uses

import json

import numpy as np

from pack_data import BuildOptions, PackDataset, PackMixture, build, micro_batches, pack, pack_dataset
from pack_data.batching.collators import padding_free_batch
from pack_data.batching.plans import BatchOptions, get_way
from pack_data.batching.sampler import IndexBatchSampler, MicroBatchSampler
from pack_data.batching.shard_files import ShardFiles
from pack_data.batching.share import Share
from tests.refusals import faults_of_refusals, rows_of

EXAMPLES = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}, {"input_ids": [5, 6]}]
LENGTHS = [3, 1, 2]
SAMPLER = "RandomPacking+PosID"


def lines(directory, *examples):
    """A JSONL file of these lines."""
    path = directory / "a.jsonl"
    path.write_text("".join(line + "\n" for line in map(json.dumps, examples)))
    return path


def damaged(directory):
    """A file whose second line is no JSON."""
    path = lines(directory, EXAMPLES[0])
    path.write_text(path.read_text() + "{\n")
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
    return pack_dataset(source, max_sequence_length=8, **options)


def built(directory):
    """A built data set."""
    options = BuildOptions(directory / "built", source=lines(directory, *EXAMPLES), max_sequence_length=8)
    build(options).close()
    return options.out


def rows_packed_as(lengths, slots, longer="raise"):
    data_set = PackDataset(EXAMPLES, packed=pack(lengths, max_sequence_length=slots, longer=longer))
    return data_set.__getitems__(range(len(data_set)))


def mixture(weights=None):
    return PackMixture([rows(), rows()], weights)


def with_labels():
    return rows([{"input_ids": [1], "labels": [2]}])


def planned(lengths, **options):
    return micro_batches(lengths, **{"ranks": 2, "max_tokens": 8, **options})


def micro_sampler(lengths=LENGTHS, rank=0, **options):
    return MicroBatchSampler(lengths, 2, rank, **{"ranks": 2, "max_tokens": 8, **options})


class Endless(list):
    restart_on_stop_iteration = True


REFUSED = rows_of(
    r"""
rows([[1, 2], [3]]) => example 0 | input_ids
rows([{"text": "a"}]) => example 0 | input_ids
rows([{"input_ids": [1]}, {"input_ids": 7}]) => example 1 | input_ids
rows([{"input_ids": [[1, 2], [3, 4]]}])[0] => example 0 | input_ids | (2, 2)
rows(iter(EXAMPLES)) => list_iterator | list(examples)
# plans and samplers
get_way("Sorted") => 'Sorted' | RandomSampling
get_way(SAMPLER).plan([], BatchOptions(1, 32)) => no examples
get_way(SAMPLER).plan([3, 0], BatchOptions(1, 32)) => 1 has length 0
get_way(SAMPLER).plan([3, 33], BatchOptions(1, 32)) => 1 has length 33 | 32
get_way(SAMPLER).plan([2.9], BatchOptions(1, 32)) => whole numbers
BatchOptions(0, 4) => batch_size | 0
sampler(rank=2) => rank | 2 | 0 to 1
sampler([3, 33]) => sequence 1 | 33
sampler(longer="drop").load_state_dict(sampler().state_dict()) => longer | raise | drop
sampler([1, 2, 3]).load_state_dict(sampler().state_dict()) => lengths_crc32
sampler_with(epoch=-1) => epoch | -1
sampler_with(step=1.5) => step | 1.5
sampler_with(step=10**6) => step | 1000000 | epoch 0
after_a_state(0) => set_epoch\(0\) | epoch 2
sampler().view(EXAMPLES[:2]) => 2 examples | 3
# collators
padding_free_batch([{"input_ids": []}]) => example 0 | 0 input_ids
padding_free_batch([{"input_ids": [1, 2], "labels": [1]}]) => example 0 | 2 input_ids | labels
padding_free_batch([{'input_ids': [1]}] * 3, max_examples=2) => 3 examples | max_examples is 2
padding_free_batch([{'input_ids': [1]}], slots=3, multiple_of=2) => slots is 3 | multiple_of = 2
padding_free_batch([{'input_ids': [1, 2]}], slots=1) => 2 tokens | slots is 1
# micro-batches
planned([9, 3, 12, 30, 11]) => 4 of 5 | max_tokens = 8 | sequence 0 has length 9 | 3 has length 30
planned([0]) => sequence 0 | length 0
planned([1.5]) => lengths | whole numbers
planned([1], ranks=0) => ranks = 0 | 1
planned([1], max_tokens=0) => max_tokens = 0 | 1
planned([1], max_sequences=0) => max_sequences = 0 | 1
planned([1], token_work=-0.5) => token_work = -0.5 | 0
planned([1], square_work=np.nan) => square_work = nan | 0
planned([1], square_work='1') => square_work | 1
planned([8], square_work=2**57) => square_work | 64-bit
micro_sampler(lengths=[9]) => max_tokens = 8 | length 9
micro_sampler(seed=-1) => seed = -1 | 0
micro_sampler(max_sequences=0) => max_sequences = 0 | 1
micro_sampler(rank=3) => rank is 3 | 0 to 1
micro_sampler(max_tokens=9).load_state_dict(micro_sampler().state_dict()) => max_tokens | 8 | 9
micro_sampler().load_state_dict({**micro_sampler().state_dict(), 'step': 999}) => step 999 | epoch 0
# rows of a packing
pack_dataset(lines(directory, *EXAMPLES)) => a.jsonl | max_sequence_length
rows(max_sequences_per_pack=0) => max_sequences_per_pack = 0 | 1
rows(lines(directory, {"text": "x", "tokens": [1]})) => a.jsonl | input_ids
PackDataset(EXAMPLES) => not packed | pack_dataset\(source, max_sequence_length
PackDataset(EXAMPLES, max_sequence_length=8) => not packed | pack_dataset
PackDataset(directory / "a.jsonl", packed=pack([1], max_sequence_length=8)) => a.jsonl | pack_dataset
rows(packed=pack([1], max_sequence_length=8)) => packed | max_sequence_length
rows(built(directory)) => built | packed already | PackDataset
PackDataset(built(directory), seed=1) => built | packed already | seed
PackDataset(built(directory), packed=pack([1], max_sequence_length=8)) => packed already
PackDataset(EXAMPLES, packed=pack([1], max_sequence_length=8)) => packed | 3 examples | 1
PackDataset(EXAMPLES, packed=pack([1], max_sequence_length=8), tensor=1) => tensor | pack_dataset => TypeError
PackDataset([{"input_ids": [5, 6]}], packed=pack([3], max_sequence_length=8))[0] => example 0 | 2 | 3
rows_packed_as([3, 1, 1], 3) => example 2 | 2 | 1
rows_packed_as([3, 1, 1], 2, "drop") => example 2 | 2 | 1
rows_packed_as([9, 1, 2], 3, "truncate") => example 0 | 3 | 9
rows_packed_as([5, 1, 2], 3, "split") => example 0 | 3 | 5
# mixtures
PackMixture([]) => data_sets | row
mixture([1, 2, 3]) => weights | \[1, 2, 3\] | 2 data sets
mixture([1, 0]) => weights | \[1, 0\]
PackMixture([rows()], seed=2**64) => seed | 18446744073709551616
mixture([1, np.nan]) => weights | nan
mixture().batches(12, ranks=5) => 12 | 0 of 5
mixture().batches(12, rank=2, ranks=2) => 12 | 2 of 2
mixture([2, 1]).batches(12, state=mixture().state_at(0)) => weights | seed
PackMixture([rows(), with_labels()]) => data set 1 | columns
# shares of a source
Share(iter(EXAMPLES)) => source | iterator
Share(Endless(EXAMPLES)) => source | restart_on_stop_iteration=False
Share([directory / "a.csv"]) => a.csv | ShardFiles\(paths\)
Share("none/a.jsonl") => none/a.jsonl | ShardFiles
Share(ShardFiles([directory / "a.csv"])) => a.csv | .jsonl | Parquet
Share([], 2, 2) => number | 2
ShardFiles(str(directory / "none")) => none | no such file
list(Share(ShardFiles([lines(directory, *EXAMPLES), directory / "b.jsonl"]))) => b.jsonl
list(Share(ShardFiles([lines(directory, EXAMPLES[0], 3)]))) => a.jsonl: line 2
Share(EXAMPLES, 0, 2).load_state_dict(Share(EXAMPLES, 1, 2).state_dict()) => process 1 of 2
list(Share(ShardFiles([damaged(directory)]))) => a.jsonl: line 2
# numbers of no row
sampler().view(EXAMPLES)[15] => 15 | 3 examples => IndexError
sampler().view(EXAMPLES)[-1] => -1 | 3 examples => IndexError
rows()[1] => row 1 | 0 to 0 => IndexError
mixture()[2] => 2 | 0 to 1 => IndexError
ShardFiles([lines(directory)]).load_state_dict(ShardFiles([]).state_dict()) => files | same files
"""
)


def test_calls_are_refused(tmp_path):
    faults = faults_of_refusals(REFUSED, {**globals(), "directory": tmp_path})
    assert not faults, "\n".join(faults)
