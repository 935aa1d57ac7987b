"""Parquet, Arrow, HDF5 and Megatron: what is written is read, and damage costs no record before it."""

import struct
from pathlib import Path

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="needs the formats extra (pyarrow)")
pq = pytest.importorskip("pyarrow.parquet", reason="needs the formats extra (pyarrow)")
h5py = pytest.importorskip("h5py", reason="needs the formats extra (h5py)")

from pack_data.building.command import BuildOptions, build
from pack_data.building.convert import main as convert
from pack_data.formats import hdf5, megatron, parquet, sequence_output
from pack_data.formats.columns import RowBlock
from pack_data.formats.records import RowWidths
from pack_data.formats.source import open_source
from pack_data.store.meanings import values_of
from pack_data.store.sequences import Sequences
from pack_data.text.corpus import documents
from tests.format_samples import example, mlperf_row, random_examples, records, values, write_hdf5
from tests.pack_data.formats import foreign
from tests.refusals import refused
from tests.token_sequences import random_sequences, sequences_of, write_megatron

S, P = 24, 4
ROWS = 2500


# ---- blocks ----------------------------------------------------------------------------------------------------------


def padded_parquet(path, sequences, masked=(), **columns):
    """Write rows with an attention_mask; those of the numbers `masked` have padding behind their tokens."""
    ids = []
    masks = []
    for number, sequence in enumerate(sequences):
        padding = [0] * (2 * (number in masked))
        ids.append(sequence and sequence + padding)
        masks.append(sequence and [1] * len(sequence) + padding)
    foreign.parquet({"input_ids": ids, "attention_mask": masks, **columns})(path)
    return path


def read_both_ways(source, monkeypatch):
    """Return blocks after comparing them with records read one by one, and the pieces that were read by record."""
    pieces = []
    real = RowBlock.records
    monkeypatch.setattr(RowBlock, "records", lambda block, bad: pieces.append(block) or real(block, bad))
    blocks = Sequences.concatenate(list(source.blocks(700)))
    by_record = len(pieces)
    bad = source.report()
    expected = list(source.examples())
    assert source.report() == bad
    assert blocks.lengths.tolist() == [len(record.value["input_ids"]) for record in expected]
    for name, column in blocks.tokens.items():
        assert np.array_equal(column, np.concatenate([record.value[name] for record in expected]))
    return blocks, by_record


def megatron_file(path, sequences):
    return write_megatron(path, [sequence or [5, -1] for sequence in sequences], 4, "<i4")


@pytest.mark.parametrize("write", [megatron_file, padded_parquet])
def test_blocks_are_the_records_one_by_one(tmp_path, monkeypatch, write):
    """Only blocks with a bad or padded record are read by record."""
    monkeypatch.setattr(megatron, "_BYTES", 6000)
    sequences = random_sequences(ROWS)
    blocks, by_record = read_both_ways(open_source(write(tmp_path / "good", sequences)), monkeypatch)
    assert (len(blocks), by_record) == (ROWS, 0)
    sequences[1700] = None
    source = open_source(write(tmp_path / "bad", sequences), skip_bad=1)
    blocks, by_record = read_both_ways(source, monkeypatch)
    assert len(blocks) == ROWS - 1
    assert 0 < by_record < 5
    assert "record 1700" in str(source.bad.found[0])


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl"])
def test_only_the_columns_that_are_read_are_decoded(tmp_path, suffix):
    """A value of another column that cannot be decoded does no harm."""
    texts = pa.array([b"one", b"\xff\xfe"]).view(pa.string())
    columns = {"input_ids": [[1, 2], [3]], "text": texts}
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        path.write_bytes(b'{"input_ids": [1, 2], "text": "one"}\n{"input_ids": [3], "text": "\xff\xfe"}\n')
    else:
        {"parquet": foreign.parquet, "arrow": foreign.arrow}[suffix](columns)(path)
    (block,) = open_source(path).blocks()
    assert block.tokens["input_ids"].tolist() == [1, 2, 3]


# ---- Parquet and Arrow -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_what_is_written_is_read_with_its_types_over_several_batches(tmp_path, monkeypatch, suffix):
    for module in (parquet, sequence_output):
        monkeypatch.setattr(module, "_ROWS", 2)
    table = pa.table(
        {
            "input_ids": pa.array([[1, 2], [3], [4]], pa.list_(pa.int32())),
            "labels": pa.array([[5, -100], [6], [7]], pa.list_(pa.int16())),
            "text": pa.array(["a", None, "b"]),
            "score": pa.array([0.5, 1.5, 2.5], pa.float32()),
            "words": pa.array([["x"], [], None], pa.list_(pa.string())),
            "when": pa.array([1, 2, 3], pa.timestamp("ms")),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    path = tmp_path / f"b.{suffix}"
    assert sequence_output.write(str(path), open_source(tmp_path / "a.parquet").read, suffix) == 3
    source = open_source(path)
    assert foreign.places(source) == [0, 1, 2]
    tokens = table.select(["input_ids", "labels"])
    assert foreign.plain(source) == tokens.to_pylist()
    readers = {"parquet": pq.read_table, "arrow": lambda file: pa.ipc.open_stream(str(file)).read_all()}
    assert readers[suffix](path).equals(table)


def test_a_damaged_page_costs_no_record_before_it(tmp_path, monkeypatch):
    """Ten row groups of two; the fifth is damaged: its two records are counted, all others come out."""
    monkeypatch.setattr(sequence_output, "_ROWS", 2)
    sequences = random_sequences(20)
    rows = records([{"input_ids": np.array(sequence)} for sequence in sequences])
    path = tmp_path / "a.parquet"
    sequence_output.write(str(path), lambda: rows, "parquet")
    metadata = pq.ParquetFile(path).metadata
    chunk = metadata.row_group(4).column(0)
    stored = bytearray(path.read_bytes())
    stored[(chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size - 3] ^= 1
    path.write_bytes(stored)
    with refused("a.parquet: records 8 to 9", "row group 4"):
        values(path)
    source = open_source(path, skip_bad=2)
    assert foreign.ids_of(source) == sequences[:8] + sequences[10:]
    assert source.bad.count == 2


def test_a_stream_cut_between_batches_does_not_pass_for_whole(tmp_path):
    path = tmp_path / "a.arrow"
    rows = [[number + 1] for number in range(8)]
    foreign.arrow({"input_ids": rows})(path)
    stored = path.read_bytes()
    path.write_bytes(stored[:-8])
    with refused("a.arrow: record 8", "end mark"):
        values(path)
    assert len(values(path, skip_bad=1)) == 8
    path.write_bytes(stored[:-60])
    intact = []
    with refused("a.arrow: record 6", "Arrow", "6 records"):
        for record in open_source(path, skip_bad=99).read():
            intact.append(record.value["input_ids"][0])
    assert intact == [1, 2, 3, 4, 5, 6]


def test_text_that_is_not_utf_8_is_refused(tmp_path):
    """pyarrow checks neither Parquet nor Arrow by itself."""
    texts = pa.array([b"one two", b"\xff\xfe", b"three"]).view(pa.string())
    foreign.parquet({"text": texts})(tmp_path / "a.parquet")
    with refused("a.parquet: records 1 to 2", "UTF8"):
        list(documents(str(tmp_path / "a.parquet")))


@pytest.mark.parametrize(
    "keys, has_plain_footer", [(["text"], True), (["input_ids.list.element"], True), (["text"], False)]
)
def test_encrypted_columns_are_refused_and_do_not_abort_the_process(tmp_path, keys, has_plain_footer):
    encryption = pytest.importorskip("pyarrow.parquet.encryption")

    class Keys(encryption.KmsClient):
        def __init__(self, _):
            encryption.KmsClient.__init__(self)

        def wrap_key(self, key, _):
            return key

    columns_of_table = {"input_ids": [[1, 2], [3]], "text": ["a", "b"]}
    table = pa.table(columns_of_table)
    settings = encryption.EncryptionConfiguration("footer", column_keys={"k": keys}, plaintext_footer=has_plain_footer)
    properties = encryption.CryptoFactory(Keys).file_encryption_properties(encryption.KmsConnectionConfig(), settings)
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    source = tmp_path / "a.parquet"
    if keys == ["text"] and has_plain_footer:
        # Another column is encrypted.
        (block,) = open_source(source).blocks()
        assert block.tokens["input_ids"].tolist() == [1, 2, 3]
        return
    with refused("a.parquet", "encrypted" if has_plain_footer else "Arrow"):
        list(open_source(source).blocks())


VALUES = [
    ("input_ids", [0, 2**31 - 1], True),
    ("input_ids", [1.0, 2.0], True),
    ("input_ids", [-1], False),
    ("input_ids", [2**31], False),
    ("input_ids", [True], False),
    ("labels", [-(2**31), 2**31 - 1], True),
    ("labels", [-(2**31) - 1], False),
    ("labels", [0.5], False),
    ("loss_mask", [True, False], True),
    ("loss_mask", [2], False),
    ("weights", [0.5], True),
    ("weights", [float("nan")], False),
]


@pytest.mark.parametrize("name, values_of_column, is_right", VALUES)
def test_the_values_that_a_column_may_hold(name, values_of_column, is_right):
    values_given = np.array(values_of_column)
    if is_right:
        assert values_of(name, values_given).tolist() == values_of_column
        return
    with refused(name, "index 0"):
        values_of(name, values_given)


# ---- HDF5 ------------------------------------------------------------------------------------------------------------


def write_unpacked(path, count):
    examples = random_examples(np.random.default_rng(0), count, S, P)
    rows = [mlperf_row(row, S, P) for row in examples]
    return write_hdf5(path, rows), examples


def test_unpacked_rows_become_examples(tmp_path):
    """Foreign columns come along row by row; a data set of another length is about the file."""
    path, examples = write_unpacked(tmp_path / "a.hdf5", 9)
    with h5py.File(path, "a") as file:
        file["document"] = np.arange(9)
        file["version"] = np.array([1])
    source = open_source(path)
    assert source.format == "hdf5"
    assert source.shape() == RowWidths(S, P, None)
    assert values(path) == examples
    assert values(path, max_record_bytes=2 * 4 * S) == examples
    rows = list(source.read())
    assert foreign.places(source) == [record.foreign["document"] for record in rows]
    assert set(rows[0].foreign) == {"document"}


def test_a_heap_that_the_library_would_walk_without_end_is_refused(tmp_path):
    path = tmp_path / "a.hdf5"
    with h5py.File(path, "w") as file:
        rows = file.create_dataset("input_ids", (3,), h5py.vlen_dtype(np.int32))
        for number in range(3):
            rows[number] = [1, 2, 3]
    stored = bytearray(path.read_bytes())
    heap = stored.index(b"GCOL")
    stored[heap + 16 : heap + 64] = bytes(48)
    path.write_bytes(stored)
    with refused(path, "0 bytes"):
        hdf5._check_heaps(str(path))


def test_heaps_in_each_other_are_refused_after_one_pass(tmp_path):
    """Each of these would be gone through to the end of the file."""
    path = tmp_path / "a.hdf5"
    heap = struct.Struct("<8sQ")
    number = 20_000
    heap_object = struct.pack("<HH4xQ", 1, 0, heap.size)
    inner_heap = heap.pack(b"GCOL\1\0\0\0", number * 32)
    path.write_bytes((heap_object + inner_heap) * number)
    with refused("a.hdf5", "heaps overlap"):
        hdf5._check_heaps(str(path))


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_whole_numbers_of_any_float_are_read(tmp_path, kind):
    path, examples = write_unpacked(tmp_path / "a.hdf5", 2)
    with h5py.File(path, "r+") as file:
        segments = file["segment_ids"][()].astype(kind)
        del file["segment_ids"]
        file["segment_ids"] = segments
    assert values(path) == examples


def test_predictions_end_at_the_first_position_zero(tmp_path):
    """All P slots used leaves no zero; none used is a row of zeros."""
    examples = [example(positions=(1, 2, 3, 5)), example(positions=())]
    rows = [mlperf_row(row, S, P) for row in examples]
    assert values(write_hdf5(tmp_path / "a.h5", rows)) == examples


def test_rows_of_variable_length_with_and_without_mask(tmp_path):
    examples = random_examples(np.random.default_rng(0), 4, S, P)
    path = write_hdf5(tmp_path / "a.hdf5", examples, "varlength")
    for _ in range(2):
        assert values(path) == examples
        source = open_source(path)
        assert source.shape() == RowWidths()
        with h5py.File(path, "r+") as file:
            file.pop("input_mask", None)


def test_a_damaged_block_costs_its_rows_only(tmp_path):
    """Rows 4 and 5 share a gzipped block of input_ids; one flipped byte there, and the other eight rows come out."""
    path, _ = write_unpacked(tmp_path / "a.hdf5", 10)
    with h5py.File(path, "r") as file:
        block = file["input_ids"].id.get_chunk_info_by_coord((4, 0))
    stored = bytearray(Path(path).read_bytes())
    stored[block.byte_offset + block.size // 2] ^= 0x55
    Path(path).write_bytes(stored)
    with refused("a.hdf5: record 4", "HDF5"):
        values(path)
    source = open_source(path, skip_bad=2)
    assert foreign.places(source) == [0, 1, 2, 3, 6, 7, 8, 9]
    assert source.bad.count == 2


# ---- Megatron and packed Parquet -------------------------------------------------------------------------------------


@pytest.mark.parametrize("code, dtype", [(4, "<i4"), (8, "<u2"), (5, "<i8")])
def test_each_sequence_of_megatron_is_read_once(tmp_path, code, dtype):
    given = random_sequences(20)
    index = write_megatron(tmp_path / "text_document", given, code, dtype)
    for path in (index, index.with_suffix(".bin"), tmp_path):
        source = open_source(path)
        assert source.format == "megatron"
        assert source.kind == "tokens"
        assert foreign.ids_of(source) == given


def test_packed_parquet_round_trip(tmp_path):
    given = random_sequences(40)
    index = write_megatron(tmp_path / "a", given)
    options = BuildOptions(tmp_path / "out", source=index, max_sequence_length=16, max_sequences_per_pack=None)
    build(options).close()
    assert sequences_of(tmp_path / "out") == sorted(given)
    path = tmp_path / "one.parquet"
    assert convert([str(tmp_path / "out"), str(path), "--to-format", "packed_parquet"]) == 0
    table = pq.read_table(path)
    assert table.column_names == ["input_ids", "loss_mask", "seq_start_id"]
    types = {field.type.value_type for field in table.schema}
    assert types == {pa.int32()}
    sequences = []
    for row in table.to_pylist():
        starts = row["seq_start_id"]
        ids = row["input_ids"]
        assert len(row["loss_mask"]) == len(ids) <= 16
        for start, end in zip(starts, [*starts[1:], None]):
            sequences.append(ids[start:end])
    assert sorted(sequences) == sorted(given)
    # Built from packs, the sequences are the same; the loss_mask stays beside them.
    store = build(BuildOptions(tmp_path / "again", source=path, max_sequence_length=16))
    assert sequences_of(tmp_path / "again") == sorted(given)
    assert store.schema.fields == ("input_ids", "loss_mask", "input_mask", "positions")
    # Other tokens are another source.
    write_megatron(tmp_path / "a", [[token + 1 for token in sequence] for sequence in given])
    with refused("overwrite"):
        build(options)
