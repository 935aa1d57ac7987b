"""Refusals of the formats that no other test reaches, and ids of every width there and back."""

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="needs the formats extra (pyarrow)")
pytest.importorskip("google.protobuf", reason="needs the formats extra (protobuf)")
pytest.importorskip("google_crc32c", reason="needs the formats extra (google-crc32c)")

from pack_data.building import convert
from pack_data.formats import sequence_output
from pack_data.formats.records import Record, RowWidths, fits, integers, least_of
from pack_data.formats.source import open_source
from pack_data.reading.bad_records import Origin
from pack_data.store.data_set import read_manifest
from tests.format_samples import CLS_LAST, example, frame, pack_from_examples, records, tf_example, write_packed
from tests.refusals import refused


def token_record(number, **foreign):
    return Record(Origin("src", number), {"input_ids": np.array([1, 2])}, foreign)


@pytest.mark.parametrize(
    "rows, names",
    [
        ([token_record(0, note=3), token_record(1, note="x")], ("src: record 1", "note", "int64", "string")),
        ([], ("a.parquet", "no record")),
    ],
    ids=["other types", "nothing"],
)
def test_a_table_that_cannot_be_written_leaves_no_file(tmp_path, rows, names):
    with refused(*names, unchanged=tmp_path):
        sequence_output.write(str(tmp_path / "a.parquet"), lambda: rows, "parquet")


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array([[1]]), pa.array([[2]])], names=["input_ids", "input_ids"])
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    with refused("a.arrow", "same name"):
        open_source(tmp_path / "a.arrow")


@pytest.mark.parametrize(
    "name, values, is_column",
    [
        ("input_ids", [0, 2**31 - 1], True),
        ("input_ids", [-1], False),
        ("input_ids", [2**31], False),
        ("labels", [-(2**31), 2**31 - 1], True),
        ("labels", [-(2**31) - 1], False),
        ("labels", [0.5], False),
    ],
)
def test_a_column_has_whole_numbers_of_32_bits_and_ids_are_not_negative(name, values, is_column):
    assert fits(np.array(values), least_of(name, "input_ids")) is is_column


def test_a_directory_of_two_formats_names_both(tmp_path):
    for name in ("a.idx", "a.bin"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "b.jsonl").write_text("")
    with refused(tmp_path, "files of idx and jsonl"):
        open_source(tmp_path)


def test_more_places_than_slots_are_a_bad_pack(tmp_path):
    wide = {**CLS_LAST, "packed_next_sentence_mask": [1.0] * 11, "packed_next_sentence_labels": [0] * 11}
    (tmp_path / "a.tfrecord").write_bytes(frame(tf_example(wide)))
    with refused("a.tfrecord: record 0", "packed_next_sentence_mask", 11, 10):
        list(open_source(tmp_path / "a.tfrecord").read())


def test_positions_in_hdf5_mark_packs(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["positions"] = np.zeros((2, 3), np.int32)
    with refused("a.hdf5", "positions", "TFRecord"):
        open_source(tmp_path / "a.hdf5")


@pytest.mark.parametrize(
    "values, reason",
    [
        (np.zeros((2, 2)), "2 dimensions"),
        (np.array(["a"]), "no numbers"),
        (np.array([0, 9, 10]), "10.*0 to 9"),
        (np.array([9, -1]), "-1.*0 to 9"),
    ],
)
def test_what_is_no_row_of_integers_is_refused(values, reason):
    with refused("ids", reason):
        integers("ids", values, largest=9)


@pytest.mark.parametrize("largest, dtype", [(255, "<u2"), (256, "<u2"), (65_535, "<u2"), (65_536, "<u4")])
def test_the_largest_id_comes_back_from_a_data_set(tmp_path, largest, dtype):
    given = example()._replace(input_ids=[1, 2, 3, 4, 5, 6, largest], masked_lm_ids=[1, largest])
    write_packed(str(tmp_path / "a.tfrecord"), records([pack_from_examples([given], RowWidths(24, 6, 2))]), RowWidths())
    assert convert.main([str(tmp_path / "a.tfrecord"), str(tmp_path / "out"), "--to-format", "store"]) == 0
    assert [record.value for record in open_source(tmp_path / "out").examples()] == [given]
    manifest = read_manifest(tmp_path / "out")
    assert manifest.vocabulary_size == largest + 1
    assert {column.name: column.dtype for column in manifest.schema.columns}["input_ids"] == dtype
