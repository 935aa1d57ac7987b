"""Files that no reader of a format reads: each is refused in one line that names the file, the place and the way out.

A row is a call and the names in its message. `file(name, writer)` writes a file in a directory of its own.
"""

# ruff: noqa: F401  (names of the calls)
import gzip
import itertools
import json
import struct
import zlib

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="needs the formats extra (pyarrow)")
pytest.importorskip("google.protobuf", reason="needs the formats extra (protobuf)")
pytest.importorskip("google_crc32c", reason="needs the formats extra (google-crc32c)")
h5py = pytest.importorskip("h5py", reason="needs the formats extra (h5py)")

import pyarrow as pa

from pack_data.building.command import BuildOptions, build
from pack_data.building.convert import main as convert
from pack_data.formats import sequence_output, tfrecord
from pack_data.formats.records import Record, RowWidths, integers
from pack_data.formats.rows import read_rows
from pack_data.formats.source import open_source
from pack_data.reading.bad_records import BadRecords, Origin
from tests.format_samples import (
    PACKED,
    example,
    frame,
    mlperf_row,
    pack_from_examples,
    tf_example,
    write_mlperf,
)
from tests.pack_data.formats import foreign
from tests.refusals import faults_of_refusals
from tests.token_sequences import random_sequences, write_megatron

S, P, D = 24, 4, 3
UNPACKED = mlperf_row(example(), S, P)
SHARDS = [f"train-{number:05}-of-00003.jsonl" for number in range(3)]
TEST = "test-00000-of-00001.jsonl"
TAGGED = {"tokens": [["a", "b"]], "pos_tags": [[1, 2]], "ner_tags": [[0, 3]]}
GIVEN = Record(Origin("src", 9), example())
NOT_EMPTY = [*range(1, 100), 5]

TFRECORD = [
    # Examples: the second record of a file has other features.
    ("read(unpacked(input_ids=[1.0] * S))", ["record 1", "input_ids", "float", "int64"]),
    ("read(unpacked(masked_lm_weights=[1] * 2 + [0] * 2))", ["masked_lm_weights", "int64", "float"]),
    ("read(unpacked(masked_lm_weights=[1.0] * 3))", ["masked_lm_weights has 3", "masked_lm_positions 4"]),
    ("read(unpacked(masked_lm_weights=[0.5, 1.0, 0.0, 0.0]))", ["masked_lm_weights", "ones"]),
    ("read(unpacked(masked_lm_ids=[7, 8, 9]))", ["masked_lm_positions has 4", "masked_lm_ids 3"]),
    ("read(unpacked(input_ids=[-5] + [1] * 6 + [0] * 17))", ["input_ids", "-5", "index 0"]),
    ("read(unpacked(input_ids=[2**40] + [1] * 6 + [0] * 17))", ["input_ids", 2**40, "index 0"]),
    ("read(unpacked(input_ids=[1] * 7))", ["segment_ids has 24", "input_ids 7"]),
    ("read(unpacked(input_ids=[1] * 8 + [0] * 16))", ["not 0"]),
    ("read(unpacked(input_mask=[0] * S))", ["record 1", "input_mask"]),
    ("read(unpacked(input_mask=[1] * 3 + [2] * 4 + [0] * 17))", ["input_mask", "packed"]),
    ("read(unpacked(input_mask=[1] * 7))", ["input_mask has 7", "input_ids 24"]),
    ("read(unpacked(segment_ids=[1] * 7 + [0] * 16 + [1]))", ["not 0"]),
    ("read(unpacked(segment_ids=[0, 1, 0, 1] + [1] * 3 + [0] * 17))", ["segment_ids", "zeros", "ones"]),
    ("read(unpacked(segment_ids=[1] * 7 + [0] * 17))", ["segment_ids", "first segment"]),
    ("read(unpacked(segment_ids=[0] * 4 + [2] * 3 + [0] * 17))", ["segment_ids", "2", "index 4", "0 to 1"]),
    ("read(unpacked(masked_lm_positions=[2, 7, 0, 0]))", ["masked_lm_positions", "7", "index 1", "7 tokens"]),
    ("read(unpacked(masked_lm_positions=[2, 2, 0, 0]))", ["masked_lm_positions", "twice"]),
    ("read(unpacked(masked_lm_ids=[5, 6, 7, 0]))", ["not 0"]),
    ("read(unpacked(next_sentence_labels=[2]))", ["next_sentence_labels", "2", "0 or 1"]),
    ("read(unpacked(next_sentence_labels=[0, 0]))", ["next_sentence_labels", "2 values"]),
    ("read(unpacked(next_sentence_labels=[]))", ["next_sentence_labels", "bytes|0 values"]),
    # Packs.
    ("read(packed(positions=[*range(9), 0]))", ["record 1", "positions", "sequence 2", "0 to 3"]),
    ("read(packed(input_mask=[1] * 5 + [3] * 4 + [0]))", ["masked_lm_weights", "2", "index 1", "input_mask", "3"]),
    ("read(packed(**numbered(4)))", ["input_mask", "4", "next_sentence_weights", "3"]),
    (
        "read(packed(next_sentence_weights=[1.0, 0.0, 0.0], next_sentence_labels=[1, 0, 0]))",
        ["input_mask", "2", "next_sentence_weights has 1"],
    ),
    ("read(packed(**numbered(3)))", ["input_mask", "3", "next_sentence_weights has 2"]),
    ("read(packed(**numbered(3), next_sentence_weights=[1.0] * 3))", ["input_mask", "number 2"]),
    ("read(packed(next_sentence_positions=[0, 6, 0]))", ["next_sentence_positions", "slot 5", "sequence 2"]),
    ("read(packed(next_sentence_positions=[0, 10, 0]))", ["next_sentence_positions", "10 slots"]),
    ("read(packed(next_sentence_weights=[1.0, 1.5, 0.0]))", ["next_sentence_weights", "whole"]),
    ("read(packed(next_sentence_weights=[1.0, 2.0, 0.0]))", ["next_sentence_weights", "2", "0 to 1"]),
    ("read(packed(next_sentence_labels=[1, 0, 1]))", ["next_sentence_labels", "next_sentence_weights"]),
    ("read(packed(masked_lm_positions=[1, 6, 10, 0, 0]))", ["masked_lm_positions", "10", "index 2", "10 slots"]),
    ("read(packed(masked_lm_positions=[1, 6, 4, 0, 0]))", ["masked_lm_weights", "index 2", "input_mask", "1"]),
    ("read(packed(masked_lm_ids=[11, 21, 22, 5, 0]))", ["masked_lm_ids", "masked_lm_weights"]),
    ("read(packed(masked_lm_ids=[11, 21, 22, 0]))", ["masked_lm_ids has 4", "masked_lm_positions 5"]),
    ("read(packed(segment_ids=[0, 0, 1, 0, 1, 0, 0, 0, 1, 0]))", ["segment_ids", "sequence 1", "zeros", "ones"]),
    ("read(packed(input_ids=[101, 103, 102, 12, 102, 101, 103, 103, 102, 9]))", ["input_ids", "input_mask"]),
    (
        "read(packed(**{name: [0.0 if 'weights' in name else 0] * len(PACKED[name]) for name in PACKED}))",
        ["at least one"],
    ),
    # Features and formats.
    ("read(messages(without(UNPACKED, 'segment_ids')), format='mlperf_tfrecord')", ["record 0", "segment_ids"]),
    ("read(messages(without(UNPACKED, 'segment_ids')))", ["a.tfrecord", "masked_lm_weights", "--from-format"]),
    ("read(messages(*packs('positions', 'next_sentence_weights')))", ["a.tfrecord", "--format"]),
    ("read(messages(UNPACKED, *packs(None)))", ["record 1", "next_sentence_labels"]),
    ("read(messages(b'junk', b'junk', UNPACKED), skip_bad=1)", ["record 1", "2 bad records", "--skip-bad 1"]),
    ("read(file('a.tfrecord', content(zlib.compress(foreign.RECORD))))", ["ZLIB", "GZIP"]),
    # Frames: of a damaged stream nobody knows how many records are lost, so none may be skipped.
    ("framed(gzip.compress(TWO)[:-12])", ["a.tfrecord.gz", "compressed"]),
    ("framed(gzip.compress(frame(b'one') + frame(bytes(1000))[:500], 0)[:-8] + bytes(99))", ["a.tfrecord.gz", "compr"]),
    # Writing.
    ("write_mlperf(target, [GIVEN], RowWidths(6, 4))", ["src: record 9", "7", "6", "--max-sequence-length"]),
    ("write_mlperf(target, [GIVEN], RowWidths(8, 1))", ["record 9", "2", "1", "--max-predictions-per-sequence"]),
    ("write_mlperf(target, [GIVEN], RowWidths(8))", ["--max-sequence-length", "--max-predictions-per-sequence"]),
    (
        "write_mlperf(target, [GIVEN._replace(foreign={'n': np.zeros((2, 2))})], RowWidths(S, P))",
        ["record 9", "n holds"],
    ),
    (
        "write_mlperf(target, [GIVEN._replace(foreign={'n': 0.1 + 2**-40})], RowWidths(S, P))",
        ["record 9", "n holds", "32"],
    ),
    ("write_mlperf(target, [GIVEN._replace(foreign={'n': 2**63})], RowWidths(S, P))", ["record 9", "n", str(2**63)]),
]

COLUMNS = [
    ("read(parquet(TAGGED))", ["a.parquet", "pos_tags.*ner_tags", "--columns"]),
    ("read(parquet({'tokens': [['a']], 'ner_tags': [[1]]}))", ["ner_tags", "--columns"]),
    ("read(parquet({'text': ['a'], 'labels': [[1]]}))", ["text", "labels", "--corpus"]),
    ("read(parquet({'a': [[1]], 'b': [[1]]}))", ["a .list.*b .list", "--columns"]),
    ("read(parquet({'text': ['a'], 'number': [1]}))", ["text", "string", "number", "int64", "--corpus"]),
    ("read(parquet({'input_ids': [[1.0, 2.5]]}))", ["record 0", "input_ids holds 2.5"]),
    ("read(parquet({'input_ids': [[[1]]]}))", ["input_ids", "list"]),
    ("read(parquet({'input_ids': [[1], None]}))", ["record 1", "input_ids", "null"]),
    ("read(parquet({'input_ids': [[1], [2, None]]}))", ["record 1", "input_ids", "null"]),
    ("read(parquet({'input_ids': [[1, -2]]}))", ["record 0", "input_ids", "-2", "index 1"]),
    ("read(parquet({'ids': [[1, 2**31]]}))", ["record 0", "ids", 2**31, "index 1"]),
    ("read(parquet({'input_ids': pa.array([[]], pa.list_(pa.int32()))}))", ["record 0", "input_ids", "empty"]),
    ("read(parquet({'input_ids': [[1, 2]], 'labels': [[1]]}))", ["record 0", "input_ids 2", "labels 1", "--columns"]),
    ("read(parquet({'input_ids': [[1, 2, 3]], 'attention_mask': [[1, 0, 1]]}))", ["record 0", "attention_mask"]),
    ("read(parquet({'input_ids': [[1, 2]], 'attention_mask': [[0, 0]]}))", ["record 0", "input_ids", "empty"]),
    ("read(parquet({'input_ids': [[1]], 'text': ['a']}), columns=['text'])", ["text", "integer lists", "input_ids"]),
    ("read(parquet({'text': ['a'], 'embedding': [[-3, 5, 7]]}))", ["embedding", "--columns", "--corpus"]),
    ("read(parquet({**BERT, 'next_sentence_labels': [[1]]}))", ["masked_lm_positions", "TFRecord", "--columns"]),
    ("read(parquet({'input_ids': [[5, 6]], 'next_sentence_positions': [[0, 1]]}))", ["sentence_positions", "TFRecord"]),
    ("read(parquet({'input_ids': [[1, 2]], 'seq_lengths': [[3]]}))", ["record 0", "seq_lengths"]),
    ("read(parquet({'input_ids': [[1, 2]], 'segment_ids': [[0, 1]]}))", ["token_type_ids", "--columns input_ids"]),
    ("read(parquet({'tokens': [[1, 2]], 'ids': [[0, 1]]}))", ["tokens and ids", "--columns tokens"]),
    ("read(parquet({'paragraphs': [[1, 2]]}))", ["paragraphs", "--columns"]),
    *((f"read(parquet(starting({starts})))", ["record 0", "seq_start_id"]) for starts in ([], [1], [0, 2, 2], [0, 3])),
    ("read(parquet(starting([0, -1])))", ["record 0", "seq_start_id"]),
    ("read(file('a.parquet', flipped))", ["row group 0", "CRC|checksum"]),
    ("read(file('a.parquet', cut(foreign.parquet(), 9)))", ["a.parquet", "Arrow"]),
    ("read(file('a.arrow', cut(foreign.arrow(), 8)))", ["cut short"]),
    ("read(file('a.arrow', twice))", ["a.arrow", "same name"]),
    # Columns beside the tokens, from both kinds of files.
    ("beside('parquet', loss_mask=[['a', 'b']])", ["loss_mask", "0 and 1"]),
    ("beside('parquet', completion_mask=[1])", ["completion_mask", "list"]),
    ("beside('parquet', labels=[[[1], [2]]])", ["labels", "list"]),
    ("beside('parquet', loss_mask=[[0, 2]])", ["loss_mask holds 2"]),
    ("beside('parquet', labels=[[0.5, 2.0]])", ["labels holds 0.5"]),
    ("beside('parquet', attention_mask=[[2, 1]])", ["attention_mask holds 2"]),
    ("beside('parquet', weights=[[0.5, float('inf')]])", ["weights holds inf"]),
    ("beside('jsonl', loss_mask=[['a', 'b']])", ["loss_mask", "0 and 1"]),
    ("beside('jsonl', completion_mask=[1])", ["completion_mask", "list"]),
    ("beside('jsonl', labels=[[[1], [2]]])", ["labels", "list"]),
    ("beside('jsonl', labels=[[0.5, 2.0]])", ["labels holds 0.5"]),
    ("beside('jsonl', weights=[[0.5, float('inf')]])", ["weights holds inf|JSON"]),
    # Blocks.
    (
        "list(open_source(megatron(NOT_EMPTY[:40])).blocks(longest=30))",
        ["record 0", "40", "30", "--max-sequence-length"],
    ),
    ("read(megatron([7] * 9), max_record_bytes=16)", ["a.idx: record 0", "16 bytes", "--max-record-bytes"]),
    ("blocks_of(shards())", ["2.parquet", "input_ids, labels", "--columns"]),
    (
        "blocks_of(jsonl({'input_ids': [1]}, {'input_ids': [3], 'loss_mask': [1]}))",
        ["line 2", "loss_mask", "--columns"],
    ),
    # Writing.
    (
        "sequence_output.write(target + '.parquet', lambda: [noted(0, 3), noted(1, 'x')], 'parquet')",
        ["src: record 1", "note"],
    ),
    ("sequence_output.write(target + '.parquet', list, 'parquet')", ["a.tfrecord.parquet", "no record"]),
    ("sequence_output.write(target + '.jsonl', lambda: [noted(0, float('nan'))], 'jsonl')", ["src: record 0", "note"]),
    ("packed_parquet({'input_ids': [1, 2], 'labels': [3, 4]})", ["input_ids, labels", "input_ids and loss_mask"]),
    # Values.
    ("integers('ids', np.zeros((2, 2)), largest=9)", ["ids", "2 dimensions"]),
    ("integers('ids', np.array(['a']), largest=9)", ["ids", "no numbers"]),
    ("integers('ids', np.array([0, 9, 10]), largest=9)", ["ids", "10.*0 to 9"]),
    ("integers('ids', np.array([9, -1]), largest=9)", ["ids", "-1.*0 to 9"]),
    ("integers('ids', np.array([2**31]))", ["ids", 2**31]),
]

JSON = [
    ("read(file('split.json', foreign.frames(to_json={'orient': 'split'})))", ["orient", "lines=True"]),
    ('read(text(\'{"columns": ["input_ids"], "index": [0, 1], "data": [[[1]], [[2]]]}\'))', ["orient"]),
    ("read(file('a.json', foreign.frames(to_json={'orient': 'columns'})))", ["input_ids", "an object"]),
    (
        "read(file('a.json', foreign.frames({'input_ids': foreign.IDS}, to_json={'orient': 'values'})))",
        ["list of list"],
    ),
    ("read(text('{\"input_ids\": null}'))", ["line 1", "input_ids"]),
    ('read(text(\'{"text": "a"}\'))', ["text", "--corpus"]),
    ("read(text(' '))", ["a.jsonl", "no record"]),
    ("read(text('{\"a\": []}'))", ["a", "list of nothing"]),
    ("read(text('{\"input_ids\": [0.5]}'))", ["line 1", "input_ids holds 0.5"]),
    ("read(file('a.jsonl', content(foreign.LINES.decode().encode('utf-16'))))", ["UTF-16"]),
    ("read(file('a.json', content(b'{\\n  \"input_ids\": [1]\\n}')))", ["a.json", "one object per line"]),
    ("read(file('a.json', content(b'[{\"input_ids\": [1]}, {\"input')))", ["record 1", "cut"]),
    ("read(file('a.json', content(b'[{\"input_ids\": [1]}, 5, {\"input_ids\": [2]}]')))", ["record 1", "5"]),
    ("read(file('a.json', content(b'[{\"input_ids\": [1]}, {\"input_ids\": 1,}]')))", ["record 1", "not JSON"]),
    ("read(jsonl({'text': 'a', 'input_ids': [1]}), columns=('text',))", ["a.jsonl", "text", "input_ids"]),
    # One bad line between two good ones.
    ("read(between('{\"input_ids\": [1, 2'))", ["line 3", "not JSON"]),
    ("read(between('\"text\"'))", ["line 3", "is a str"]),
    ("read(between('{\"input_ids\": 7}'))", ["line 3", "input_ids", "array", "int"]),
    ("read(between('{\"text\": [1]}'))", ["line 3", "lacks input_ids"]),
    ("read(between('{\"input_ids\": []}'))", ["line 3", "input_ids is empty"]),
    ("read(between('{\"input_ids\": [-1]}'))", ["line 3", "input_ids holds -1"]),
    ("read(between('{\"input_ids\": [1' + '0' * 30 + ']}'))", ["line 3", "31 digits"]),
    ("read(between('{\"input_ids\": [18446744073709551616]}'))", ["line 3", "input_ids holds 1.8446744073709552e"]),
    ("read(between('[' * 100_000))", ["line 3", "nested"]),
    ("read(between('{\"input_ids\": [' + '1, ' * 200 + '1]}'), max_record_bytes=500)", ["line 3", "500 bytes"]),
    # Compressed.
    ("read(file('bomb.jsonl.zst', zstd(b'[1]\\n' + b' ' * 40_000_000, level=9)))", ["bomb.jsonl.zst", "40"]),
    ("read(file('bomb.zip', zipped(b'[1]\\n' + b' ' * 40_000_000)))", ["bomb.zip", "40"]),
    ("read(file('cut.jsonl.zst', cut(zstd(foreign.LINES), 5)))", ["cut.jsonl.zst", "cut"]),
    ("read(file('cut.jsonl.zip', cut(zipped(foreign.LINES), 9)))", ["cut.jsonl.zip", "cut"]),
    ("read(file('cut.jsonl.gz', cut(content(gzip.compress(foreign.LINES * 50)), 20)))", ["cut.jsonl.gz", "compressed"]),
    ("read(file('a.parquet.gz', content(gzip.compress(b'PAR1'))))", ["parquet", "decompress"]),
    ("read(file('moved.zip', moved))", ["moved.zip", "damaged"]),
    ("read(file('plain.jsonl.zst', content(foreign.LINES)))", ["plain.jsonl.zst", "not compressed"]),
    ("read(file('a.csv', content(b'input_ids\\n1\\n')))", ["a.csv", "format"]),
    ("read(file('a.jsonl', content(b'')))", ["a.jsonl", "no record"]),
    # Rows.
    ("list(read_rows(str(file('a.parquet', foreign.parquet())), BadRecords(), ['nope']))", ["nope", "input_ids, url"]),
    ("read_rows(str(file('a.npy', lambda path: np.save(path, np.arange(3)))), BadRecords())", ["a.npy", "npy"]),
    ("read_rows(str(file('a.txt', content(b'text'))), BadRecords())", ["a.txt", "no known format"]),
    ("list(read_rows(str(file('a.jsonl', content(foreign.LINES))), BadRecords(), start=10_000))", ["a.jsonl", "10000"]),
]

DIRECTORIES = [
    ("read(put(SHARDS[0], SHARDS[2]))", [SHARDS[1], "1 of 3"]),
    ("read(put('part-00000-of-99999999999.jsonl'))", ["part-00001-of-99999999999.jsonl", "99999999998 of"]),
    ("read(put(*SHARDS, TEST))", ["--split", "test, train"]),
    ("read(put(*SHARDS, TEST), split='validation')", ["--split", "validation", "test, train"]),
    ("read(put('train.jsonl', 'validation.jsonl'))", ["--split", "train, validation"]),
    ("read(put('train/a.jsonl', 'dev/a.jsonl'))", ["--split", "dev, train"]),
    ("read(put('a.jsonl', 'a.jsonl.gz'))", ["a.jsonl and a.jsonl.gz"]),
    ("read(put('a.jsonl', 'b.parquet'))", ["jsonl and parquet"]),
    ("read(put('a.idx', 'a.bin', 'b.jsonl'))", ["idx and jsonl"]),
    ("read(put('index.json', 'shard.00000.mds'))", ["MDS", "JSONL"]),
    ("read(put('readme.md'))", ["no data file"]),
    ("read(put('recipe.json', 'packs-00000-1f2e3d4c.npy', 'config.json'))", ["no data file"]),
    ("read(put('a.jsonl') / 'a.jsonl', split='train')", ["a.jsonl", "--split train"]),
    ("read(put('a.jsonl') / 'none')", ["none", "no such file"]),
    ("read(saved({'_indices_files': [{'filename': 'indices.arrow'}]}))", ["indices.arrow", "state.json"]),
    ("read(saved(), split='test')", ["_split", "train", "test"]),
    ("read(saved({'_data_files': []}))", ["state.json", "no file"]),
    ("read(saved({'_data_files': [{'filename': '../a.arrow'}]}))", ["state.json", "_data_files", "filename"]),
    ("read(saved({'_data_files': 3}))", ["state.json", "_data_files"]),
    ("read(selecting([0, 4]))", ["indices.arrow", "row 4"]),
    ("read(about('dataset_info.json', features={'text': {}}))", ["input_ids", "dataset_info.json", "text"]),
    ("read(about('dataset_dict.json', splits=['test', 'train']))", ["--split", "test, train"]),
    ("read(about('dataset_dict.json', splits=['test', 'train']), split='x')", ["--split", "test, train"]),
    ("read(about('dataset_dict.json', splits=['../train']))", ["dataset_dict.json", "splits"]),
    ("open_source(put('a.jsonl'), format='json')", ["json", "jsonl"]),
    ("open_source(put('a.jsonl'), skip_bad=-1)", ["skip_bad", "-1"]),
    ("read(messages(UNPACKED), columns=('input_ids',))", ["columns", "mlperf_tfrecord"]),
]

BINARY = [
    # Megatron: 5 sequences behind a header of 34 bytes.
    ("damaged(9, struct.pack('<Q', 2))", ["a.idx", "version 2"]),
    ("damaged(17, b'\\x06')", ["a.idx", "type code 6"]),
    ("damaged(17, b'\\x08')", ["record 1 begins at byte"]),
    ("damaged(34, struct.pack('<i', 10_000))", ["record 1 begins at byte"]),
    ("damaged(34, struct.pack('<i', -1))", ["record 1 begins at byte"]),
    ("damaged(54, struct.pack('<q', 2))", ["record 0 begins at byte 2"]),
    ("damaged(-8, struct.pack('<q', 6))", ["document indices.*from 0 to 6.*5"]),
    ("damaged(-8, struct.pack('<q', 4))", ["document indices.*from 0 to 4.*5"]),
    ("read(file('a.idx', cut(indexed, 40)))", ["a.idx", "the file is cut"]),
    ("read(file('a.idx', cut(indexed, 60)), format='megatron')", ["a.idx", "cut"]),
    ("read(file('a.idx', content(b'MMIDIDX')), format='megatron')", ["a.idx", "MMIDIDX"]),
    ("longer_tokens('<u2', '<i4')", ["a.bin", "index covers"]),
    ("longer_tokens('<i4', '<i4')", ["a.bin", "index covers"]),
    ("read(file('a.idx', without_tokens))", ["a.idx", "a.bin"]),
    # HDF5.
    ("read(file('a.h5', foreign.filtered(32001)))", ["input_ids", "Blosc", "gzip"]),
    ("read(file('a.h5', foreign.filtered(32015)))", ["input_ids", "Zstandard", "gzip"]),
    ("read(file('a.h5', cut(foreign.hdf5(lambda *_: None), 4000)))", ["a.h5", "HDF5"]),
    ("read(file('a.h5', only(input_ids=np.zeros((2, 3)))))", ["a.h5", "segment_ids", "input_ids"]),
    ("read(file('a.h5', only(positions=np.zeros((2, 3), np.int32))))", ["a.h5", "positions", "TFRecord"]),
    ("read(hdf5('masked_lm_ids', data=np.zeros((2, P), np.int32)))", ["masked_lm_ids", "(2, 4)", "(4, 24)"]),
    ("read(hdf5('segment_ids', data=np.full((4, S), np.inf)))", ["segment_ids", "inf|whole"]),
    *((f"read(hdf5('{name}', data=3))", [name, "shape"]) for name in ("input_ids", "next_sentence_labels")),
    *((f"read(hdf5('{name}'))", [name, "no data set"]) for name in ("input_ids", "next_sentence_labels")),
    ("read(hdf5('next_sentence_labels', data=np.zeros((5, 2), np.int32)))", ["next_sentence_labels", "shape"]),
    ("read(hdf5('input_ids', data=h5py.Empty('i4')))", ["input_ids|rows", "shape|HDF5"]),
    *(
        (f"read(hdf5('{name}', {how}))", ["a.h5", name, "dimensions"])
        for name in ("input_ids", "masked_lm_positions", "input_mask")
        for how in (
            "data=np.zeros(4, np.int32)",
            "data=np.zeros((4, 2, 3), np.int32)",
            "data=np.array([[b'a']] * 4, 'S3')",
            "data=np.zeros((4, 2), np.complex64)",
            "data=np.zeros((4, 2), [('a', '<i4'), ('b', '<f4')])",
            "shape=(4,), dtype=h5py.string_dtype()",
            "shape=(4, 2), dtype=h5py.vlen_dtype(np.int32)",
        )
    ),
    ("read(linked('link'))", ["input_ids", "another file"]),
    ("read(linked('virtual'))", ["input_ids", "another file"]),
    ("read(linked('raw'))", ["input_ids", "another file"]),
    # A chunk is unpacked at once: 128 MB of zeros are 130 kB compressed.
    ("read(hdf5('masked_lm_ids', **zeros))", ["chunk of masked_lm_ids", "134,217,728", "--max-record-bytes"]),
    ("read(hdf5('masked_lm_ids', **zeros), max_record_bytes=1 << 20)", ["row of masked_lm_ids", "--max-record-bytes"]),
    # Lengths, given to a build.
    ("build(BuildOptions(target, source=lengths()))", ["lengths.npy", "pack_data.optimal"]),
    ("build(BuildOptions(target, corpus=lengths()))", ["lengths.npy", "pack_data.optimal"]),
]


def scope_in(directory):
    """Return the names of the calls; each call writes into a directory of its own."""
    fresh = (directory / str(number) for number in itertools.count())

    def folder():
        made = next(fresh)
        made.mkdir(parents=True)
        return made

    def file(name, write):
        path = folder() / name
        write(path)
        return path

    def read(path, **options):
        return list(open_source(path, **options).read())

    def blocks_of(path):
        return list(open_source(path).blocks())

    def messages(*rows):
        framed = [frame(row if isinstance(row, bytes) else tf_example(row)) for row in rows]
        return file("a.tfrecord", foreign.content(b"".join(framed)))

    def without(row, name):
        return {key: values for key, values in row.items() if key != name}

    def packs(*missing):
        """Return packed records, each without one feature."""
        row = pack_from_examples([example()], RowWidths(S, P, D))
        floats = ("masked_lm_weights", "next_sentence_weights")
        typed = {name: list(map(float if name in floats else int, values)) for name, values in row.items()}
        return [without(typed, name) for name in missing]

    def numbered(number):
        """Return the mask and the weights of PACKED whose second sequence has another number."""
        weights = [1.0, float(number), float(number), 0.0, 0.0]
        return {"input_mask": [1] * 5 + [number] * 4 + [0], "masked_lm_weights": weights}

    def framed(stored):
        path = file("a.tfrecord.gz", foreign.content(stored))
        return list(tfrecord.read_frames(str(path), BadRecords(9, 99)))

    def jsonl(*rows):
        return file("a.jsonl", foreign.content(list(rows)))

    def text(line):
        return file("a.jsonl", foreign.content(line.encode()))

    def between(line):
        """Return JSONL with blank lines and this line between two good ones."""
        return text("\n\n".join(['{"input_ids": [3]}', line, '{"input_ids": [4]}']) + "\n")

    def parquet(columns):
        return file("a.parquet", foreign.parquet(columns))

    def shards():
        first = file("1.parquet", foreign.parquet({"input_ids": [[1]], "labels": [[2]]}))
        foreign.parquet({"input_ids": [[1]]})(first.with_name("2.parquet"))
        return first.parent

    def starting(starts):
        columns = {"input_ids": [[5, 6, 7]], "loss_mask": [[1, 1, 1]], "seq_start_id": [starts]}
        return {name: pa.array(values, pa.list_(pa.int32())) for name, values in columns.items()}

    def beside(suffix, **columns):
        columns = {"input_ids": [[1, 2]], **columns}
        row = {name: values[0] for name, values in columns.items()}
        return blocks_of(jsonl(row) if suffix == "jsonl" else parquet(columns))

    def twice(path):
        table = pa.Table.from_arrays([pa.array([[1]]), pa.array([[2]])], names=["input_ids", "input_ids"])
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)

    def noted(number, note):
        return Record(Origin("src", number), {"input_ids": np.array([1, 2])}, {"note": note})

    def packed_parquet(row):
        out = folder()
        build(BuildOptions(out / "packs", source=jsonl(row), max_sequence_length=8)).close()
        return convert([str(out / "packs"), str(out / "b.parquet"), "--to-format", "packed_parquet"])

    def megatron(sequence):
        return write_megatron(folder() / "a", [sequence])

    def indexed(path):
        write_megatron(path.with_suffix(""), random_sequences(5))

    def without_tokens(path):
        indexed(path)
        path.with_suffix(".bin").unlink()

    def damaged(place, data):
        def write(path):
            indexed(path)
            stored = bytearray(path.read_bytes())
            place_from_start = place % len(stored)
            stored[place_from_start : place_from_start + len(data)] = data
            path.write_bytes(stored)

        return read(file("a.idx", write))

    def longer_tokens(stated, stored):
        index = write_megatron(folder() / "a", random_sequences(5), {"<u2": 8, "<i4": 4}[stated], stated)
        tokens = index.with_suffix(".bin")
        np.append(np.fromfile(tokens, stated), 7).astype(stored).tofile(tokens)
        return read(index)

    def only(**columns):
        def write(path):
            with h5py.File(path, "w") as opened:
                for name, values in columns.items():
                    opened[name] = values

        return write

    def linked(kind):
        """Return HDF5 whose input_ids lie in another file."""
        outside = file("outside.h5", foreign.hdf5(lambda *_: None))
        (outside.parent / "bytes").write_bytes(bytes(4 * 4 * S))

        def change(opened, _):
            del opened["input_ids"]
            if kind == "link":
                opened["input_ids"] = h5py.ExternalLink(str(outside), "/input_ids")
            elif kind == "virtual":
                layout = h5py.VirtualLayout((4, S), np.int32)
                layout[:] = h5py.VirtualSource(str(outside), "input_ids", (4, S))
                opened.create_virtual_dataset("input_ids", layout)
            else:
                external = [(str(outside.parent / "bytes"), 0, 4 * 4 * S)]
                opened.create_dataset("input_ids", (4, S), np.int32, external=external)

        return file("a.h5", foreign.hdf5(change))

    def selecting(rows):
        given = foreign.saved(folder(), {"_indices_files": [{"filename": "indices.arrow"}]}, files=2)
        foreign.row_numbers(rows)(given / "indices.arrow")
        return given

    def about(name, **fields):
        """Return a directory of two saved splits, or of one if the file describes its columns."""
        given = folder()
        for split in ("train", "test") if name == "dataset_dict.json" else ("",):
            (given / split).mkdir(exist_ok=True)
            foreign.saved(given / split, {"_split": split})
        (given / name).write_text(json.dumps(fields))
        return given

    own = dict(locals())
    own.update(
        content=foreign.content,
        cut=foreign.cut,
        zstd=foreign.zstd,
        zipped=foreign.zipped,
        flipped=foreign.flipped,
        moved=foreign.moved,
        unpacked=lambda **change: messages(UNPACKED, {**UNPACKED, **change}),
        packed=lambda **change: messages(PACKED, {**PACKED, **change}),
        put=lambda *names: foreign.put(folder(), *names),
        saved=lambda state=(): foreign.saved(folder(), state),
        hdf5=lambda name, **how: file("a.h5", foreign.with_column(name, **how)),
        lengths=lambda: file("lengths.npy", lambda path: np.save(path, np.arange(1, 9))),
        target=str(folder() / "a.tfrecord"),
        deep={"packed_next_sentence_mask": [1.0] * 11, "packed_next_sentence_labels": [0] * 11},
        zeros=dict(shape=(4, 1 << 24), dtype=np.int32, compression="gzip", chunks=(4, 1 << 23)),
        BERT={"input_ids": [[1]], "masked_lm_positions": [[1]], "masked_lm_ids": [[1]]},
        TWO=frame(b"one") + frame(b"two"),
    )
    return {**globals(), **own}


@pytest.mark.parametrize(
    "table",
    [TFRECORD, COLUMNS, JSON, DIRECTORIES, BINARY],
    ids=["tfrecord", "columns", "json", "directories", "binary"],
)
def test_files_are_refused(tmp_path, table):
    faults = faults_of_refusals(table, scope_in(tmp_path))
    assert not faults, "\n".join(faults)
    assert len(table) > 20
