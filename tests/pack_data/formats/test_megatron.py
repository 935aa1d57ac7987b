"""Megatron's .bin and .idx, written here byte by byte, and packed Parquet in and out."""

import struct

import numpy as np
import pytest

from pack_data.building.command import BuildOptions, build
from pack_data.building.convert import main
from pack_data.formats import megatron
from pack_data.formats.source import open_source
from pack_data.reading.bad_records import BadRecords
from tests.refusals import refused
from tests.token_sequences import random_sequences, sequences_of, write_megatron


@pytest.mark.parametrize("code, dtype", [(4, "<i4"), (8, "<u2"), (5, "<i8")])
def test_each_sequence_of_megatron_is_read_once(tmp_path, code, dtype):
    given = random_sequences(20)
    index = write_megatron(tmp_path / "text_document", given, code, dtype)
    for path in (index, index.with_suffix(".bin"), tmp_path):
        source = open_source(path)
        assert (source.format, source.kind) == ("megatron", "tokens")
        assert [record.value["input_ids"].tolist() for record in source.read()] == given


def test_megatron_is_built_and_other_tokens_are_another_source(tmp_path):
    given = random_sequences(30)
    index = write_megatron(tmp_path / "a", given)
    options = BuildOptions(tmp_path / "out", source=index, max_sequence_length=16, max_sequences_per_pack=None)
    build(options).close()
    assert sequences_of(tmp_path / "out") == sorted(given)
    changed = [[token + 1 for token in sequence] for sequence in given]
    write_megatron(tmp_path / "a", changed)
    with refused("overwrite"):
        build(options)


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda data: data[:9] + struct.pack("<Q", 2) + data[17:], "version 2"),
        (lambda data: data[:17] + b"\x06" + data[18:], "type code 6"),
        (lambda data: data[:-40], "the file is cut"),
        (lambda data: data[:20], "MMIDIDX"),
        (lambda data: data[:34] + struct.pack("<i", 10_000) + data[38:], "record 1 begins at byte"),
        (lambda data: data[:34] + struct.pack("<i", -1) + data[38:], "record 1 begins at byte"),
        (lambda data: data[:54] + struct.pack("<q", 2) + data[62:], "record 0 begins at byte 2"),
        (lambda data: data[:-8] + struct.pack("<q", 6), "document indices.*from 0 to 6.*5"),
        (lambda data: data[:-8] + struct.pack("<q", 4), "document indices.*from 0 to 4.*5"),
        (lambda data: data[:17] + b"\x08" + data[18:], "record 1 begins at byte"),
    ],
)
def test_a_damaged_index_is_one_line(tmp_path, damage, words):
    index = write_megatron(tmp_path / "a", random_sequences(5))
    index.write_bytes(damage(index.read_bytes()))
    with refused(index, words):
        list(open_source(index, "megatron").read())


@pytest.mark.parametrize("dtype, code", [("<i4", 8), ("<i4", 4)], ids=["uint16 index, int32 tokens", "longer tokens"])
def test_an_index_and_tokens_that_do_not_belong_together_are_refused(tmp_path, dtype, code):
    index = write_megatron(tmp_path / "a", random_sequences(5), code, "<u2" if code == 8 else "<i4")
    tokens = index.with_suffix(".bin")
    ids = np.fromfile(tokens, "<u2" if code == 8 else "<i4")
    (np.append(ids, 7) if code == 4 else ids).astype(dtype).tofile(tokens)
    with refused("a.bin", "index covers", str(tokens.stat().st_size)):
        list(open_source(index, "megatron").read())


def test_a_record_beyond_the_limit_is_bad(tmp_path):
    index = write_megatron(tmp_path / "a", [[1] * 3, [2] * 9])
    bad = BadRecords(allowed=1, longest=16)
    assert [len(record.value["input_ids"]) for record in megatron.read(str(index), bad)] == [3]
    assert "longer than 16 bytes" in str(bad.found[0])


def test_an_index_alone_names_the_missing_file(tmp_path):
    index = write_megatron(tmp_path / "a", random_sequences(5))
    index.with_suffix(".bin").unlink()
    with refused("a.idx", "a.bin"):
        list(open_source(index).read())


def test_packed_parquet_round_trip(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    given = random_sequences(40)
    index = write_megatron(tmp_path / "a", given)
    build(BuildOptions(tmp_path / "out", source=index, max_sequence_length=16, max_sequences_per_pack=None)).close()
    for source, target in (("out", "one.parquet"), ("one.parquet", "two.parquet")):
        assert main([str(tmp_path / source), str(tmp_path / target), "--to-format", "packed_parquet"]) == 0
    one, two = (parquet.read_table(str(tmp_path / name)) for name in ("one.parquet", "two.parquet"))
    assert one.equals(two) and one.column_names == ["input_ids", "loss_mask", "seq_start_id"]
    assert {str(field.type.value_type) for field in one.schema} == {"int32"}
    found = []
    for row in one.to_pylist():
        ends = [*row["seq_start_id"][1:], len(row["input_ids"])]
        assert len(row["loss_mask"]) == len(row["input_ids"]) <= 16
        found += [row["input_ids"][start:end] for start, end in zip(row["seq_start_id"], ends)]
    assert sorted(found) == sorted(given)
    # Built from packs, the sequences are the same; the loss_mask stays beside them.
    store = build(BuildOptions(tmp_path / "again", source=tmp_path / "two.parquet", max_sequence_length=16))
    assert sequences_of(tmp_path / "again") == sorted(given)
    assert store.schema.fields == ("input_ids", "loss_mask", "input_mask", "positions")


@pytest.mark.parametrize("starts", [[], [1], [0, 2, 2], [0, 3], [0, -1]])
def test_wrong_starts_are_a_bad_record(tmp_path, starts):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    kind = arrow.list_(arrow.int32())
    columns = {"input_ids": [[5, 6, 7]], "loss_mask": [[1, 1, 1]], "seq_start_id": [starts]}
    table = arrow.table({name: arrow.array(values, kind) for name, values in columns.items()})
    parquet.write_table(table, str(tmp_path / "a.parquet"))
    with refused("record 0", "seq_start_id"):
        list(open_source(tmp_path / "a.parquet").read())


def test_a_column_without_a_place_in_packed_parquet_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2], "labels": [3, 4]}\n')
    build(BuildOptions(tmp_path / "out", source=tmp_path / "a.jsonl", max_sequence_length=8)).close()
    with refused("input_ids, labels", "input_ids and loss_mask"):
        main([str(tmp_path / "out"), str(tmp_path / "b.parquet"), "--to-format", "packed_parquet"])


def test_lengths_given_to_build_are_told_what_they_are(tmp_path):
    np.save(tmp_path / "lengths.npy", np.arange(1, 9))
    for given in ({"source": tmp_path / "lengths.npy"}, {"corpus": tmp_path / "lengths.npy"}):
        with refused("lengths.npy", "pack_data.optimal"):
            build(BuildOptions(tmp_path / "out", **given))
