"""HDF5: the unpacked examples of MLPerf and NVIDIA, with rows of fixed and of variable length."""

import struct
from pathlib import Path

import numpy as np
import pytest

h5py = pytest.importorskip("h5py", reason="needs the formats extra (h5py)")

from pack_data.formats import hdf5
from pack_data.formats.records import RowWidths
from pack_data.formats.source import open_source
from tests.format_samples import example, mlperf_row, random_examples, values, write_hdf5
from tests.refusals import refused

S, P = 24, 4


def test_unpacked_rows_become_examples(tmp_path):
    examples = random_examples(np.random.default_rng(0), 9, S, P)
    source = open_source(write_hdf5(tmp_path / "a.hdf5", [mlperf_row(each, S, P) for each in examples]))
    assert (source.format, source.kind, source.shape()) == ("hdf5", "examples", RowWidths(S, P, None))
    assert [record.value for record in source.read()] == examples
    assert [record.origin.record for record in source.read()] == list(range(9))


def test_a_heap_that_the_library_would_walk_without_end_is_refused(tmp_path):
    path = tmp_path / "a.hdf5"
    with h5py.File(path, "w") as file:
        rows = file.create_dataset("input_ids", (3,), h5py.vlen_dtype(np.int32))
        for number in range(3):
            rows[number] = [1, 2, 3]
    data = bytearray(path.read_bytes())
    heap = data.index(b"GCOL")
    data[heap + 16 : heap + 64] = bytes(48)
    path.write_bytes(data)
    with refused(path, "0 bytes"):
        hdf5._check_heaps(str(path))


def test_heaps_in_each_other_are_refused_after_one_pass(tmp_path):
    """Each of these would be gone through to the end of the file."""
    path, heap = tmp_path / "a.hdf5", struct.Struct("<8sQ")
    number = 20_000
    one = struct.pack("<HH4xQ", 1, 0, heap.size) + heap.pack(b"GCOL\1\0\0\0", number * 32)
    path.write_bytes(one * number)
    with refused("a.hdf5", "heaps overlap"):
        hdf5._check_heaps(str(path))


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_whole_numbers_of_any_float_are_read_and_others_refused(tmp_path, kind):
    examples = random_examples(np.random.default_rng(0), 2, S, P)
    path = write_hdf5(tmp_path / "a.hdf5", [mlperf_row(each, S, P) for each in examples])
    with h5py.File(path, "r+") as file:
        labels = file["segment_ids"][()].astype(kind)
        del file["segment_ids"]
        file["segment_ids"] = labels
    assert values(path) == examples
    with h5py.File(path, "r+") as file:
        file["segment_ids"][0, 0] = np.inf
    with refused("segment_ids", "inf"):
        values(path)


def test_predictions_end_at_the_first_position_zero(tmp_path):
    """All P slots used leaves no zero; none used is a row of zeros."""
    full = example(positions=(1, 2, 3, 5))
    none = example(positions=())
    assert values(write_hdf5(tmp_path / "a.h5", [mlperf_row(full, S, P), mlperf_row(none, S, P)])) == [full, none]


def test_rows_of_variable_length_with_and_without_mask(tmp_path):
    examples = random_examples(np.random.default_rng(0), 4, S, P)
    path = tmp_path / "a.hdf5"
    write_hdf5(path, examples, "varlength")
    for _ in range(2):
        assert values(path) == examples
        assert open_source(path).shape() == RowWidths()
        with h5py.File(path, "r+") as file:
            file.pop("input_mask", None)


def test_foreign_data_sets_come_along_row_by_row(tmp_path):
    path = write_hdf5(tmp_path / "a.hdf5", [mlperf_row(example(seed=n), S, P) for n in range(3)])
    with h5py.File(path, "a") as file:
        file["document"] = np.array([4, 5, 6], np.int64)
        file["version"] = np.array([1])  # not one value a row: about the file
    assert [{name: int(value) for name, value in record.foreign.items()} for record in open_source(path).read()] == [
        {"document": 4},
        {"document": 5},
        {"document": 6},
    ]


def test_files_that_are_not_what_they_should_be(tmp_path):
    (tmp_path / "cut.hdf5").write_bytes(
        Path(write_hdf5(tmp_path / "a.hdf5", [mlperf_row(example(), S, P)])).read_bytes()[:900]
    )
    with refused("cut.hdf5", "HDF5"):
        open_source(tmp_path / "cut.hdf5")
    with h5py.File(tmp_path / "less.hdf5", "w") as file:
        file["input_ids"] = np.zeros((2, 3))
    with refused("less.hdf5", "segment_ids", "input_ids"):
        open_source(tmp_path / "less.hdf5")
    with h5py.File(tmp_path / "a.hdf5", "a") as file:
        del file["masked_lm_ids"]
        file["masked_lm_ids"] = np.zeros((2, P), np.int32)
    with refused("a.hdf5", "masked_lm_ids", (2, 4), (1, 24)):
        open_source(tmp_path / "a.hdf5")


def test_a_damaged_block_costs_its_rows_only(tmp_path):
    """Rows 4 and 5 share a gzipped block of input_ids; one flipped byte there, and the other eight rows come out."""
    examples = random_examples(np.random.default_rng(0), 10, S, P)
    path = write_hdf5(tmp_path / "a.hdf5", [mlperf_row(each, S, P) for each in examples])
    with h5py.File(path, "r") as file:
        block = file["input_ids"].id.get_chunk_info_by_coord((4, 0))
    raw = bytearray(Path(path).read_bytes())
    raw[block.byte_offset + block.size // 2] ^= 0x55
    Path(path).write_bytes(raw)
    with refused("a.hdf5: record 4", "HDF5"):
        values(path)
    source = open_source(path, skip_bad=2)
    assert [record.origin.record for record in source.read()] == [0, 1, 2, 3, 6, 7, 8, 9]
    assert source.bad.count == 2


def unpacked(path):
    return write_hdf5(path, [mlperf_row(each, S, P) for each in random_examples(np.random.default_rng(0), 4, S, P)])


def replace_column(path, name, **how):
    with h5py.File(path, "r+") as file:
        del file[name]
        if how:
            file.create_dataset(name, **how)


@pytest.mark.parametrize("name", ["input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids", "input_mask"])
@pytest.mark.parametrize(
    "how",
    [
        {"data": np.zeros(4, np.int32)},
        {"data": np.zeros((4, 2, 3), np.int32)},
        {"data": np.array([[b"a"]] * 4, "S3")},
        {"data": np.zeros((4, 2), np.complex64)},
        {"data": np.zeros((4, 2), [("a", "<i4"), ("b", "<f4")])},
        {"shape": (4,), "dtype": h5py.string_dtype()},
        {"shape": (4, 2), "dtype": h5py.vlen_dtype(np.int32)},
    ],
    ids=["rank 1", "rank 3", "texts", "complex", "records", "variable texts", "variable rank 2"],
)
def test_a_column_of_another_rank_or_type_is_one_line(tmp_path, name, how):
    path = unpacked(tmp_path / "a.hdf5")
    replace_column(path, name, **how)
    with refused("a.hdf5", name, "dimensions"):
        list(open_source(path).read())


@pytest.mark.parametrize("name", ["input_ids", "next_sentence_labels"])
def test_a_column_without_rows_or_with_others_is_one_line(tmp_path, name):
    for how in ({"data": 3}, {"data": np.zeros((5, 2), np.int32)}, {"data": h5py.Empty("i4")}, {}):
        path = unpacked(tmp_path / "a.hdf5")
        replace_column(path, name, **how)
        with refused("a.hdf5", "shape|no data set"):
            list(open_source(path).read())


def test_nothing_is_read_from_another_file(tmp_path):
    """Over an external link, from a virtual data set, from raw external storage: each is refused."""
    outside = unpacked(tmp_path / "outside.hdf5")
    linked, virtual, raw = (unpacked(tmp_path / f"{kind}.hdf5") for kind in ("linked", "virtual", "raw"))
    with h5py.File(linked, "r+") as file:
        del file["input_ids"]
        file["input_ids"] = h5py.ExternalLink(outside, "/input_ids")
    with h5py.File(virtual, "r+") as file:
        del file["input_ids"]
        layout = h5py.VirtualLayout((4, S), np.int32)
        layout[:] = h5py.VirtualSource(outside, "input_ids", (4, S))
        file.create_virtual_dataset("input_ids", layout)
    (tmp_path / "bytes").write_bytes(bytes(4 * 4 * S))
    with h5py.File(raw, "r+") as file:
        del file["input_ids"]
        file.create_dataset("input_ids", (4, S), np.int32, external=[(str(tmp_path / "bytes"), 0, 4 * 4 * S)])
    for path in (linked, virtual, raw):
        with refused("input_ids", "another file"):
            list(open_source(path).read())


def test_rows_and_chunks_beyond_the_limit_are_refused(tmp_path):
    """A chunk is unpacked at once: 128 MB of zeros are 130 kB compressed."""
    path = unpacked(tmp_path / "a.hdf5")
    zeros = {"shape": (4, 1 << 24), "dtype": np.int32, "compression": "gzip"}
    replace_column(path, "masked_lm_ids", chunks=(4, 1 << 23), **zeros)
    for limit, names in ((64 << 20, ("chunk of masked_lm_ids", "134,217,728")), (1 << 20, ("row of masked_lm_ids",))):
        with refused(*names, "--max-record-bytes"):
            list(open_source(path, max_record_bytes=limit).read())


def test_rows_are_read_in_slices_that_fit_the_limit(tmp_path):
    path = unpacked(tmp_path / "a.hdf5")
    assert values(path, max_record_bytes=2 * 4 * S) == values(path)
