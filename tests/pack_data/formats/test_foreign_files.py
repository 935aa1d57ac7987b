"""Files as other libraries write them: the exact rows, or a refusal in one line that names file, column and way out.

A row of FILES or REFUSED has a name, what writes the file, and options of `open_source`.
"""

import bz2
import gzip
import json
import lzma
import os
import zipfile
import zlib
from functools import partial

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="needs the formats extra (pyarrow)")
pytest.importorskip("google_crc32c", reason="needs the formats extra (google-crc32c)")

import pyarrow as pa
import pyarrow.parquet as pq

from pack_data.formats import saved as saved_metadata
from pack_data.formats.rows import column_types, identity, read_rows
from pack_data.formats.source import open_source
from pack_data.reading import compressed
from pack_data.reading.bad_records import BadRecords
from tests.format_samples import example, frame, mlperf_row, tf_example, write_hdf5
from tests.refusals import refused

IDS = [[5, 6, 7], [8], [9, 4, 3, 2]]
COLUMNS = {"input_ids": IDS, "url": ["a", "b", "c"]}
LINES = "".join(json.dumps({"input_ids": ids, "url": url}) + "\n" for ids, url in zip(IDS, "abc")).encode()
TAGGED = {"tokens": [["a", "b"]], "pos_tags": [[1, 2]], "ner_tags": [[0, 3]]}


# Each skips its test if the library is missing.
pd, pl, datasets, zstandard, h5py = (
    partial(pytest.importorskip, name) for name in ("pandas", "polars", "datasets", "zstandard", "h5py")
)


def content(data):
    """A writer of these bytes, or of JSON lines of these values."""
    if isinstance(data, list):
        data = "".join(json.dumps(value) + "\n" for value in data).encode()
    return lambda path: path.write_bytes(data)


def call(function, *arguments, **options):
    """A writer that calls function(path, ...)."""
    return lambda path: function(str(path), *arguments, **options)


def frames(columns=COLUMNS, **options):
    """A writer of pandas: the first option is the name of its method."""
    ((method, options),) = options.items()
    return lambda path: getattr(pd().DataFrame(columns), method)(path, **options)


def polars(method, columns=COLUMNS, **options):
    return lambda path: getattr(pl().DataFrame(columns), method)(path, **options)


def parquet(columns=COLUMNS, **options):
    return lambda path: pq.write_table(pa.table(columns), path, **options)


def arrow(columns=COLUMNS, kind="stream", **options):
    def write(path):
        table = pa.table(columns)
        with getattr(pa.ipc, f"new_{kind}")(str(path), table.schema, **options) as writer:
            writer.write_table(table, max_chunksize=2)

    return write


def zipped(*parts):
    def write(path):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for number, part in enumerate(parts):
                archive.writestr(f"part/{number}.jsonl", part)
            archive.writestr("__MACOSX/._0.jsonl", b"\0\5\26\7")

    return write


def zstd(*parts, level=3):
    return lambda path: path.write_bytes(b"".join(zstandard().ZstdCompressor(level).compress(part) for part in parts))


def views(kind):
    def write(path):
        if not hasattr(pa, kind):
            pytest.skip("needs a newer pyarrow")
        arrow({"input_ids": pa.array(IDS, getattr(pa, kind)(pa.int32()))})(path)

    return write


def hub(**features):
    """A writer of datasets with these features."""

    def write(path):
        types = {"ids": datasets().List(datasets().Value("int32")), "text": datasets().Value("string")}
        table = datasets().Dataset.from_dict(COLUMNS, datasets().Features(input_ids=types["ids"], url=types["text"]))
        getattr(table, features["method"])(str(path))

    return write


HALF = LINES.index(b"\n") + 1
FILES = [
    # JSON
    ("a.jsonl", content(LINES)),
    ("A.JSONL", content(LINES)),
    ("a.ndjson", content(LINES)),
    ("a.json", content(LINES)),
    ("a", content(LINES)),
    ("mark.jsonl", content(b"\xef\xbb\xbf" + LINES)),
    ("crlf.jsonl", content(LINES.replace(b"\n", b"\r\n"))),
    ("last.jsonl", content(LINES[:-1])),
    ("blank.jsonl", content(LINES.replace(b"\n", b"\n\n \n"))),
    ("lists.jsonl", content(IDS)),
    ("array.json", content(json.dumps([{"input_ids": ids} for ids in IDS]).encode())),
    ("indented.json", content(json.dumps([{"x": '"]}\\', "input_ids": ids} for ids in IDS], indent=2).encode())),
    ("marked.json", content(b"\xef\xbb\xbf \n" + json.dumps([{"input_ids": ids} for ids in IDS]).encode())),
    ("lists.json", content(json.dumps(IDS).encode())),
    ("first.jsonl", content([{"tags": [], "input_ids": IDS[0]}, *({"input_ids": ids} for ids in IDS[1:])])),
    ("null.jsonl", content([{"tags": None, "input_ids": ids} for ids in IDS])),
    ("floats.jsonl", content([{"scores": [0.5], "input_ids": ids} for ids in IDS])),
    ("chat.jsonl", content([{"messages": [{"role": "user"}], "input_ids": ids} for ids in IDS])),
    ("tags.jsonl", content([{"ner_tags": [1], "input_ids": ids} for ids in IDS])),
    ("many.jsonl", content([{"n": 2**63, "x": {}, "input_ids": ids} for ids in IDS])),
    ("pandas.jsonl", frames(to_json={"orient": "records", "lines": True})),
    ("pandas.json", frames(to_json={"orient": "records"})),
    ("pandas.json.zip", frames(to_json={"orient": "records", "lines": True})),
    ("pandas.json.zst", frames(to_json={"orient": "records", "lines": True})),
    ("polars.ndjson", polars("write_ndjson")),
    ("polars.json", polars("write_json")),
    ("hub.jsonl", hub(method="to_json")),
    # compressed
    ("a.jsonl.gz", content(gzip.compress(LINES))),
    ("members.jsonl.gz", content(gzip.compress(LINES[:HALF]) + gzip.compress(LINES[HALF:]))),
    ("a.jsonl.xz", content(lzma.compress(LINES))),
    ("a.jsonl.bz2", content(bz2.compress(LINES))),
    ("members.jsonl.BZ2", content(bz2.compress(LINES[:HALF]) + bz2.compress(LINES[HALF:]))),
    ("a.jsonl.zst", zstd(LINES)),
    ("frames.json.zst", zstd(LINES[:HALF], b"", LINES[HALF:])),
    ("a.zip", zipped(LINES)),
    ("two.jsonl.zip", zipped(LINES[: HALF - 1], LINES[HALF:])),
    ("no-suffix", content(gzip.compress(LINES))),
    ("array.json.gz", content(gzip.compress(json.dumps(IDS).encode()))),
    # Parquet
    ("a.parquet", parquet()),
    ("a.PARQUET", parquet()),
    ("a", parquet()),
    ("groups.parquet", parquet(row_group_size=1, write_page_checksum=True)),
    *((f"{name}.parquet", parquet(compression=name)) for name in ("none", "gzip", "zstd", "brotli", "lz4")),
    ("v1.parquet", parquet(data_page_version="1.0", use_dictionary=False)),
    ("v2.parquet", parquet(data_page_version="2.0", version="1.0")),
    ("u16.parquet", parquet({"input_ids": pa.array(IDS, pa.list_(pa.uint16()))})),
    ("large.parquet", parquet({"input_ids": pa.array(IDS, pa.large_list(pa.int64()))})),
    ("length.parquet", parquet({**COLUMNS, "length": [3, 1, 4]})),
    ("tagged.parquet", parquet({**COLUMNS, "pos_tags": [[1]] * 3, "word_ids": [[0, None]] * 3})),
    ("pandas.parquet", frames(to_parquet={})),
    ("index.parquet", lambda path: pd().DataFrame(COLUMNS).set_index("url").to_parquet(path)),
    ("polars.parquet", polars("write_parquet")),
    ("hub.parquet", hub(method="to_parquet")),
    # Arrow
    ("a.arrow", arrow()),
    ("file.arrow", arrow(kind="file")),
    ("lz4.arrow", arrow(options=pa.ipc.IpcWriteOptions(compression="lz4"))),
    ("view.arrow", views("list_view")),
    ("large_view.arrow", views("large_list_view")),
    ("pandas.feather", frames(to_feather={})),
    ("polars.arrow", polars("write_ipc")),
    ("stream.arrow", polars("write_ipc_stream")),
    ("hub", hub(method="save_to_disk")),
]


def tokens(source):
    return [{name: values.tolist() for name, values in record.value.items()} for record in source.read()]


@pytest.mark.parametrize("name, write", FILES, ids=[f"{number}-{name}" for number, (name, _) in enumerate(FILES)])
def test_rows_of_a_file(tmp_path, name, write):
    write(tmp_path / name)
    source = open_source(tmp_path / name)
    assert tokens(source) == [{"input_ids": ids} for ids in IDS]
    assert source.summary().startswith("tokens from ") and ", column input_ids" in source.summary()
    assert [block.lengths.tolist() for block in source.blocks()] == [[3, 1, 4]]
    if (tmp_path / name).is_file():
        rows = list(read_rows(str(tmp_path / name), BadRecords(), ["input_ids"]))
        assert [row.fields["input_ids"] for row in rows] == IDS
        for done in (1, 2, 3):
            rest = read_rows(str(tmp_path / name), BadRecords(), start=rows[done - 1].after)
            assert [(row.fields["input_ids"], row.origin) for row in rest] == [
                (row.fields["input_ids"], row.origin) for row in rows[done:]
            ]


COMPANIONS = {"input_ids": [[5, 6, 0]], "attention_mask": [[1, 1, 0]], "labels": [[-100, 6, 0]]}


@pytest.mark.parametrize(
    "columns, chosen, rows, summary",
    [
        (COLUMNS, (), {"input_ids": IDS[0]}, "tokens from a.parquet, column input_ids; ignored: url"),
        (COMPANIONS, (), {"input_ids": [5, 6], "labels": [-100, 6]}, ", columns input_ids, labels"),
        (COMPANIONS, ("labels",), {"labels": [-100, 6]}, "column labels; ignored: input_ids"),
        ({"tokens": IDS, "id": [1, 2, 3]}, (), {"tokens": IDS[0]}, "column tokens"),
        (TAGGED, ("pos_tags",), {"pos_tags": [1, 2]}, "column pos_tags; ignored: ner_tags, tokens"),
    ],
)
def test_which_columns_are_tokens(tmp_path, columns, chosen, rows, summary):
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    source = open_source(tmp_path / "a.parquet", columns=chosen)
    assert tokens(source)[0] == rows and source.summary().endswith(summary)


def hdf5(code):
    """A writer of HDF5 whose input_ids have a filter that HDF5 lacks here."""

    def write(path):
        write_hdf5(path, [mlperf_row(example(), 24, 4)])
        with h5py().File(path, "a") as file:
            del file["input_ids"]
            properties = h5py().h5p.create(h5py().h5p.DATASET_CREATE)
            properties.set_chunk((1, 24))
            properties.set_filter(code, h5py().h5z.FLAG_OPTIONAL, ())
            space = h5py().h5s.create_simple((1, 24))
            h5py().h5d.create(file.id, b"input_ids", h5py().h5t.NATIVE_INT32, space, properties)

    return write


def flipped(path):
    """Parquet with checksums, and a bit of its last page flipped."""
    parquet({"input_ids": [[number] for number in range(2000)]}, write_page_checksum=True, compression="none")(path)
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PAR1") // 3] ^= 1
    path.write_bytes(data)


def moved(path):
    """An archive whose directory places its file before the beginning."""
    zipped(LINES)(path)
    data = bytearray(path.read_bytes())
    end = data.rindex(b"PK\5\6")
    data[end + 16 : end + 20] = (0xFFFFFF).to_bytes(4, "little")
    path.write_bytes(data)


RECORD = frame(tf_example(mlperf_row(example(), 24, 4)))
REFUSED = [
    ("conll.parquet", parquet(TAGGED), ("pos_tags, ner_tags", "--columns")),
    ("wnut.parquet", parquet({"tokens": [["a"]], "ner_tags": [[1]]}), ("ner_tags", "--columns")),
    ("topics.parquet", parquet({"text": ["a"], "labels": [[1]]}), ("text", "labels", "--corpus")),
    ("two.parquet", parquet({"a": [[1]], "b": [[1]]}), ("a, b", "--columns")),
    ("text.parquet", parquet({"text": ["a"]}), ("text", "string", "--corpus")),
    ("floats.parquet", parquet({"input_ids": [[1.0, 2.0]]}), ("input_ids", "double")),
    ("nested.parquet", parquet({"input_ids": [[[1]]]}), ("input_ids", "list")),
    ("number.parquet", parquet({"length": [3]}), ("length", "int64")),
    ("nulls.parquet", parquet({"input_ids": [[1], None]}), ("record 1", "input_ids", "null")),
    ("negative.parquet", parquet({"input_ids": [[1, -2]]}), ("record 0", "input_ids", "-2")),
    ("large.parquet", parquet({"input_ids": [[2**31]]}), ("record 0", "input_ids")),
    ("empty.parquet", parquet({"input_ids": pa.array([[]], pa.list_(pa.int32()))}), ("record 0", "empty")),
    ("flipped.parquet", flipped, ("row group 0", "CRC|checksum")),
    ("cut.parquet", lambda path: (parquet()(path), path.write_bytes(path.read_bytes()[:-9])), ("cut.parquet",)),
    ("cut.arrow", lambda path: (arrow()(path), path.write_bytes(path.read_bytes()[:-8])), ("cut short",)),
    ("split.json", frames(to_json={"orient": "split"}), ("orient", "lines=True")),
    ("split.json", content([{"columns": ["input_ids"], "index": [0, 1], "data": [[[1]], [[2]]]}]), ("orient",)),
    ("columns.json", frames(to_json={"orient": "columns"}), ("input_ids", "dict")),
    ("values.json", frames({"input_ids": IDS}, to_json={"orient": "values"}), ("input_ids", "list of list")),
    ("one.jsonl", content([{"input_ids": [1]}, {"input_ids": 7}]), ("line 2", "input_ids")),
    ("null.jsonl", content([{"input_ids": None}]), ("line 1", "input_ids")),
    ("text.jsonl", content([{"text": "a"}]), ("text", "--corpus")),
    ("lists.jsonl", content([{"a": []}]), ("a", "list of nothing")),
    ("floats.jsonl", content([{"input_ids": [0.5]}]), ("input_ids", "list of float")),
    ("utf16.jsonl", content(LINES.decode().encode("utf-16")), ("UTF-16",)),
    ("pretty.json", content(b'{\n  "input_ids": [1]\n}'), ("pretty.json", "one object per line")),
    ("cut.json", content(b'[{"input_ids": [1]}, {"input'), ("record 1", "cut")),
    ("mixed.json", content(b'[{"input_ids": [1]}, 5, {"input_ids": [2]}]'), ("record 1", "5")),
    ("bad.json", content(b'[{"input_ids": [1]}, {"input_ids": 1,}]'), ("record 1", "not JSON")),
    ("bomb.jsonl.zst", zstd(b"[1]\n" + b" " * 40_000_000, level=9), (compressed.MOST_TIMES, "bomb.jsonl.zst")),
    ("bomb.zip", zipped(b"[1]\n" + b" " * 40_000_000), (compressed.MOST_TIMES, "bomb.zip")),
    ("cut.jsonl.zst", lambda path: (zstd(LINES)(path), path.write_bytes(path.read_bytes()[:-5])), ("cut",)),
    ("cut.jsonl.zip", lambda path: (zipped(LINES)(path), path.write_bytes(path.read_bytes()[:-9])), ("cut",)),
    ("a.parquet.gz", content(gzip.compress(b"PAR1")), ("parquet", "decompress")),
    ("moved.zip", moved, ("moved.zip", "damaged")),
    ("plain.jsonl.zst", content(LINES), ("plain.jsonl.zst", "not compressed")),
    ("a.csv", frames(to_csv={}), ("a.csv", "format")),
    ("a.tfrecord", content(zlib.compress(RECORD)), ("ZLIB", "GZIP")),
    ("blosc.h5", hdf5(32001), ("input_ids", "Blosc", "gzip")),
    ("zstd.h5", hdf5(32015), ("input_ids", "Zstandard", "gzip")),
]


@pytest.mark.parametrize(
    "name, write, names", REFUSED, ids=[f"{number}-{row[0]}" for number, row in enumerate(REFUSED)]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, write, names):
    write(tmp_path / name)
    with refused(name, *names, unchanged=tmp_path):
        tokens(open_source(tmp_path / name))


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress, None])
def test_records_of_tensorflow_may_be_compressed_in_any_way(tmp_path, compress):
    suffix = {gzip.compress: ".gz", bz2.compress: ".bz2", lzma.compress: ".xz"}.get(compress, ".zst")
    path = tmp_path / f"a.tfrecord{suffix}"
    (content(compress(RECORD)) if compress else zstd(RECORD))(path)
    assert [record.value for record in open_source(path).read()] == [example()]


def test_zstandard_is_named_if_it_is_missing(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with refused("pip install zstandard"):
        open_source(tmp_path / "a.jsonl.zst")


# ---- directories -----------------------------------------------------------------------------------------------------


def put(folder, *names):
    """Write a JSONL file of one sequence, the number of the file, for each name."""
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = json.dumps({"input_ids": [number]}).encode() + b"\n"
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)


def numbers(folder, **options):
    return [row["input_ids"][0] for row in tokens(open_source(folder, **options))]


SHARDS = [f"train-{number:05}-of-00003.jsonl" for number in range(3)]
TEST = "test-00000-of-00001.jsonl"


@pytest.mark.parametrize(
    "names, split, files_read",
    [
        (SHARDS, "", [0, 1, 2]),
        ([f"data/{name}" for name in SHARDS], "", [0, 1, 2]),
        ([*SHARDS, TEST], "train", [0, 1, 2]),
        ([*SHARDS, TEST], "test", [3]),
        ([f"a-{number}-of-2.jsonl" for number in (1, 2)], "", [0, 1]),
        (["train/a.jsonl", "test/a.jsonl"], "test", [1]),
        (["train.jsonl", "other.jsonl"], "", [1, 0]),
        (["train_sft-00000-of-00001.jsonl", "test_sft-00000-of-00001.jsonl"], "train_sft", [0]),
        (["latest.jsonl", "contest.jsonl"], "", [1, 0]),
        (["a.jsonl", "b.json", ".hidden.jsonl", "_c.jsonl"], "", [0]),
        (["part-10.jsonl", "part-9.jsonl"], "", [1, 0]),
        (["a.jsonl.gz", "b.jsonl.gz"], "", [0, 1]),
    ],
)
def test_files_of_a_directory(tmp_path, names, split, files_read):
    put(tmp_path, *names)
    assert numbers(tmp_path, split=split) == files_read


@pytest.mark.parametrize(
    "names, split, refusal",
    [
        ([*SHARDS[:1], *SHARDS[2:]], "", (SHARDS[1], "1 of 3")),
        (["part-00000-of-99999999999.jsonl"], "", ("part-00001-of-99999999999.jsonl", "99999999998 of")),
        ([*SHARDS, TEST], "", ("--split", "test, train")),
        ([*SHARDS, TEST], "validation", ("--split", "validation", "test, train")),
        (["train.jsonl", "validation.jsonl"], "", ("--split", "train, validation")),
        (["train/a.jsonl", "dev/a.jsonl"], "", ("--split", "dev, train")),
        (["a.jsonl", "a.jsonl.gz"], "", ("a.jsonl and a.jsonl.gz",)),
        (["a.jsonl", "b.parquet"], "", ("jsonl and parquet",)),
        (["index.json", "shard.00000.mds"], "", ("MDS", "JSONL")),
        (["readme.md"], "", ("no data file",)),
        (["recipe.json", "packs-00000-1f2e3d4c.npy", "config.json"], "", ("no data file",)),
    ],
)
def test_a_directory_that_contradicts_itself_is_refused(tmp_path, names, split, refusal):
    put(tmp_path, *names)
    with refused(tmp_path.name, *refusal, unchanged=tmp_path):
        open_source(tmp_path, split=split)


def saved(folder, state=(), files=1):
    """A directory as save_to_disk writes it, with the result of a map beside it."""
    names = [f"data-{number:05}-of-{files:05}.arrow" for number in range(files)]
    for name in (*names, "cache-478a21f1dc2ad20e.arrow"):
        arrow({"input_ids": [[1], [2]]})(folder / name)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train", **dict(state)}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_the_metadata_of_many_shards_is_read_once(tmp_path, monkeypatch):
    parsed = []
    parse = saved_metadata.parse_json
    monkeypatch.setattr(saved_metadata, "parse_json", lambda *what: parsed.append(what) or parse(*what))
    assert len(numbers(saved(tmp_path, files=20))) == 40 and len(parsed) == 2  # state.json and dataset_info.json


def test_metadata_that_is_replaced_within_a_tick_of_the_clock_is_read_again(tmp_path):
    saved(tmp_path, files=2)
    state = tmp_path / "state.json"
    before = state.stat()
    assert len(numbers(tmp_path)) == 4
    text = state.read_text().replace('{"filename": "data-00000-of-00002.arrow"}, ', "")
    with open(state, "r+") as file:
        file.write(text.ljust(before.st_size))
    os.utime(state, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert len(numbers(tmp_path)) == 2


def test_state_json_lists_the_files_of_a_saved_data_set(tmp_path):
    assert numbers(saved(tmp_path, files=2)) == [1, 2, 1, 2] == numbers(tmp_path, split="train")
    (tmp_path / "data-00001-of-00002.arrow").unlink()
    with refused("data-00001-of-00002.arrow", "state.json"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    "state, split, names",
    [
        ({"_indices_files": [{"filename": "indices.arrow"}]}, "", ("indices.arrow", "state.json")),
        ({}, "test", ("_split", "train", "test")),
        ({"_data_files": []}, "", ("state.json", "no file")),
        ({"_data_files": [{"filename": "../a.arrow"}]}, "", ("state.json", "_data_files", "filename")),
        ({"_data_files": 3}, "", ("state.json", "_data_files")),
    ],
)
def test_a_state_json_that_cannot_be_followed_is_refused(tmp_path, state, split, names):
    saved(tmp_path, state)
    with refused(*names):
        open_source(tmp_path, split=split)


def write_numbers(path, rows):
    table = pa.table({"indices": pa.array(rows, pa.uint64())})
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


@pytest.mark.parametrize("name", ["_indices_files", "_indices_data_files"])
def test_rows_that_are_selected_by_their_numbers(tmp_path, name):
    saved(tmp_path, {name: [{"filename": "indices.arrow"}]}, files=2)
    for number in range(2):
        arrow({"input_ids": [[2 * number], [2 * number + 1]]})(tmp_path / f"data-0000{number}-of-00002.arrow")
    write_numbers(tmp_path / "indices.arrow", [3, 0, 3, 2, 1])
    assert numbers(tmp_path) == [3, 0, 3, 2, 1]
    assert [block.tokens["input_ids"].tolist() for block in open_source(tmp_path).blocks()] == [[3, 0, 3, 2, 1]]
    (path,) = open_source(tmp_path).files
    rest = read_rows(path, BadRecords(), ["input_ids"], start=3)
    assert [row.fields["input_ids"] for row in rest] == [[2], [1]]
    before = identity(path)
    arrow({"input_ids": [[5], [6]]})(tmp_path / "data-00001-of-00002.arrow")
    assert identity(path) != before and numbers(tmp_path) == [6, 0, 6, 5, 1]
    write_numbers(tmp_path / "indices.arrow", [0, 4])
    with refused("indices.arrow", "row 4"):
        numbers(tmp_path)


def test_columns_that_dataset_info_json_does_not_state_are_refused(tmp_path):
    (saved(tmp_path) / "dataset_info.json").write_text('{"features": {"input_ids": {}}}')
    assert numbers(tmp_path) == [1, 2]
    (tmp_path / "dataset_info.json").write_text('{"features": {"text": {}}}')
    with refused("data-00000-of-00001.arrow", "input_ids", "dataset_info.json", "text"):
        open_source(tmp_path)


def test_a_dictionary_of_data_sets_needs_a_split(tmp_path):
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        saved(tmp_path / name, {"_split": name})
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert numbers(tmp_path, split="test") == [1, 2]
    for split in ("", "validation"):
        with refused("--split", "test, train"):
            open_source(tmp_path, split=split)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["../train"]}')
    with refused("dataset_dict.json", "splits"):
        open_source(tmp_path)


def test_results_of_map_and_filter_are_not_read(tmp_path):
    datasets().disable_progress_bars()
    table = datasets().Dataset.from_dict({"input_ids": [[number] for number in range(30)]})
    datasets().DatasetDict(train=table, test=table.select(range(3))).save_to_disk(str(tmp_path / "both"))
    table.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    loaded = datasets().load_from_disk(str(tmp_path / "saved"))
    loaded.map(lambda row: {"input_ids": row["input_ids"] * 2})
    chosen = loaded.filter(lambda row: row["input_ids"][0] > 27)
    chosen.shuffle(seed=1).save_to_disk(str(tmp_path / "chosen"))
    for name, rows in (("shuffled", loaded.shuffle(seed=0)), ("selected", loaded.select([7, 3, 3, 29]))):
        rows.save_to_disk(str(tmp_path / name))
        assert numbers(tmp_path / name) == [row["input_ids"][0] for row in datasets().load_from_disk(tmp_path / name)]
    assert any(name.startswith("cache-") for name in os.listdir(tmp_path / "saved"))
    assert numbers(tmp_path / "saved") == list(range(30)) and sorted(numbers(tmp_path / "chosen")) == [28, 29]
    assert numbers(tmp_path / "both", split="test") == [0, 1, 2]


# ---- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix, write", [("jsonl", content), ("parquet", lambda rows: parquet(_columns(rows)))])
def test_types_of_columns(tmp_path, suffix, write):
    rows = [{"text": "a", "input_ids": [1], "score": 0.5, "meta": {"x": 1}}]
    write(rows)(tmp_path / f"a.{suffix}")
    types = {"text": "text", "input_ids": "integers", "score": "other", "meta": "other"}
    assert column_types(str(tmp_path / f"a.{suffix}")) == types


def _columns(rows):
    return {name: [row[name] for row in rows] for name in rows[0]}


def test_an_identity_changes_with_the_file(tmp_path):
    path = tmp_path / "a.jsonl"
    seen = set()
    for data in (LINES, LINES[:-1] + b" ", LINES[:-1], LINES * 3000, b" " + LINES * 3000):
        path.write_bytes(data)
        assert identity(str(path)) == identity(str(path))
        seen.add(identity(str(path)))
    assert len(seen) == 5


def test_rows_of_another_format_or_without_a_column_are_refused(tmp_path):
    parquet()(tmp_path / "a.parquet")
    with refused("a.parquet", "nope", "input_ids, url"):
        list(read_rows(str(tmp_path / "a.parquet"), BadRecords(), ["nope"]))
    np.save(tmp_path / "a.npy", np.arange(3))
    (tmp_path / "a.txt").write_text("text")
    for name, words in (("a.npy", "npy"), ("a.txt", "no known format")):
        with refused(name, words):
            read_rows(str(tmp_path / name), BadRecords())
    (tmp_path / "a.jsonl").write_bytes(LINES)
    with refused("a.jsonl", 10_000):
        list(read_rows(str(tmp_path / "a.jsonl"), BadRecords(), start=10_000))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_a_long_record_is_refused_without_its_memory(tmp_path, name):
    rows = [{"input_ids": list(range(5000))}, {"input_ids": [1]}]
    writers = {"a.jsonl": content(rows), "a.json": content(json.dumps(rows).encode())}
    writers.get(name, parquet({"input_ids": [row["input_ids"] for row in rows]}, row_group_size=1))(tmp_path / name)
    bad = BadRecords(1, 6000)
    rows = list(read_rows(str(tmp_path / name), bad))
    assert [row.fields["input_ids"] for row in rows] == [[1]] and bad.count == 1 and bad.too_long() in str(bad.found[0])
