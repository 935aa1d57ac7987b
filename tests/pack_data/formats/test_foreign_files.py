"""Files as other libraries write them are read as their exact rows: whole, in blocks, and on from any place."""

import gzip
import json
import os
import re

import pytest

pytest.importorskip("pyarrow", reason="needs the formats extra (pyarrow)")
pytest.importorskip("google_crc32c", reason="needs the formats extra (google-crc32c)")

import pyarrow as pa

from pack_data.formats import saved as saved_metadata
from pack_data.formats.rows import column_types, identity, read_rows
from pack_data.formats.source import open_source
from pack_data.reading.bad_records import BadRecords
from tests.pack_data.formats.foreign import (
    COLUMNS,
    IDS,
    LINES,
    arrow,
    compressed,
    content,
    datasets,
    frames,
    hub,
    numbers,
    parquet,
    plain,
    polars,
    put,
    row_numbers,
    saved,
    views,
    zipped,
    zstd,
)

TAGGED = {"tokens": [["a", "b"]], "pos_tags": [[1, 2]], "ner_tags": [[0, 3]]}
HALF = LINES.index(b"\n") + 1
ROWS = [{"input_ids": ids} for ids in IDS]
ONE_LINE = {"orient": "records", "lines": True}
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
    ("array.json", content(json.dumps(ROWS).encode())),
    ("indented.json", content(json.dumps([{"x": '"]}\\', **row} for row in ROWS], indent=2).encode())),
    ("marked.json", content(b"\xef\xbb\xbf \n" + json.dumps(ROWS).encode())),
    ("lists.json", content(json.dumps(IDS).encode())),
    ("first.jsonl", content([{"tags": [], **ROWS[0]}, *ROWS[1:]])),
    ("mask.jsonl", content([{"input_ids": [*ids, 0], "attention_mask": [1] * len(ids) + [0]} for ids in IDS])),
    ("many.jsonl", content([{"n": 2**63, "x": {}, "tags": None, "ner_tags": [1], "s": [0.5], **row} for row in ROWS])),
    ("pandas.jsonl", frames(to_json=ONE_LINE)),
    ("pandas.json", frames(to_json={"orient": "records"})),
    ("pandas.json.zip", frames(to_json=ONE_LINE)),
    ("pandas.json.zst", frames(to_json=ONE_LINE)),
    ("polars.ndjson", polars("write_ndjson")),
    ("polars.json", polars("write_json")),
    ("hub.jsonl", hub("to_json")),
    # compressed
    *((f"a.jsonl{suffix}", content(compressed(LINES, suffix))) for suffix in (".gz", ".xz", ".bz2")),
    ("members.jsonl.BZ2", content(compressed(LINES[:HALF], ".bz2") + compressed(LINES[HALF:], ".bz2"))),
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
    ("polars.parquet", polars("write_parquet")),
    ("hub.parquet", hub("to_parquet")),
    # Arrow
    ("a.arrow", arrow()),
    ("file.arrow", arrow(kind="file")),
    ("lz4.arrow", arrow(options=pa.ipc.IpcWriteOptions(compression="lz4"))),
    ("view.arrow", views("list_view")),
    ("large_view.arrow", views("large_list_view")),
    ("pandas.feather", frames(to_feather={})),
    ("polars.arrow", polars("write_ipc")),
    ("stream.arrow", polars("write_ipc_stream")),
    ("hub", hub("save_to_disk")),
]


def check_rows(path):
    source = open_source(path)
    assert plain(source) == ROWS
    assert source.summary().startswith("tokens from ")
    assert re.search(", columns? input_ids", source.summary())
    (block,) = source.blocks()
    assert block.lengths.tolist() == [3, 1, 4]
    if path.is_dir() or path.name == "mask.jsonl":
        return
    rows = list(read_rows(str(path), BadRecords(), ["input_ids"]))
    assert [row.fields["input_ids"] for row in rows] == IDS
    for row_number, row in enumerate(rows, 1):
        rest = list(read_rows(str(path), BadRecords(), ["input_ids"], start=row.after))
        assert rest == rows[row_number:]


def test_rows_of_every_file(tmp_path):
    faults = []
    read = 0
    for number, (name, write) in enumerate(FILES):
        path = tmp_path / str(number) / name
        path.parent.mkdir()
        try:
            write(path)
            check_rows(path)
            read += 1
        except pytest.skip.Exception:  # a library that is not installed
            continue
        except (AssertionError, ValueError) as error:
            faults.append(f"{name}: {error}")
    assert not faults, "\n".join(faults)
    assert read >= 40


COMPANIONS = {"input_ids": [[5, 6, 0]], "attention_mask": [[1, 1, 0]], "labels": [[-100, 6, 0]]}


@pytest.mark.parametrize(
    "columns, chosen, rows, summary",
    [
        (COLUMNS, (), {"input_ids": IDS[0]}, "tokens from a.parquet, column input_ids; ignored: url"),
        (COMPANIONS, (), {"input_ids": [5, 6], "labels": [-100, 6]}, ", columns input_ids, attention_mask, labels"),
        (COMPANIONS, ("labels",), {"labels": [-100, 6]}, "columns labels, attention_mask; ignored: input_ids"),
        ({"tokens": IDS, "id": [1, 2, 3]}, (), {"tokens": IDS[0]}, "column tokens; ignored: id"),
        (TAGGED, ("pos_tags",), {"pos_tags": [1, 2]}, "column pos_tags; ignored: ner_tags, tokens"),
        # Single fields of packs may stand beside tokens.
        ({"input_ids": [[5]], "positions": ["north"]}, (), {"input_ids": [5]}, "ignored: positions"),
        ({"input_ids": [[5]], "next_sentence_labels": [1]}, (), {"input_ids": [5]}, "ignored: next_sentence_labels"),
    ],
)
def test_which_columns_are_tokens(tmp_path, columns, chosen, rows, summary):
    parquet(columns)(tmp_path / "a.parquet")
    source = open_source(tmp_path / "a.parquet", columns=chosen)
    assert plain(source)[0] == rows
    assert source.summary().endswith(summary)


# ---- directories -----------------------------------------------------------------------------------------------------

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
    assert numbers(put(tmp_path, *names), split=split) == files_read


def test_the_metadata_of_many_shards_is_read_once(tmp_path, monkeypatch):
    parsed = []
    parse = saved_metadata.parse_json
    monkeypatch.setattr(saved_metadata, "parse_json", lambda *what: parsed.append(what) or parse(*what))
    assert len(numbers(saved(tmp_path, files=20))) == 40
    assert len(parsed) == 2


def test_metadata_that_is_replaced_within_a_tick_of_the_clock_is_read_again(tmp_path):
    state = saved(tmp_path, files=2) / "state.json"
    before = state.stat()
    assert numbers(tmp_path) == [1, 2, 1, 2] == numbers(tmp_path, split="train")
    text = state.read_text().replace('{"filename": "data-00000-of-00002.arrow"}, ', "")
    with open(state, "r+") as file:
        file.write(text.ljust(before.st_size))
    os.utime(state, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert numbers(tmp_path) == [1, 2]
    # Columns that dataset_info.json states are those of the file.
    (tmp_path / "dataset_info.json").write_text('{"features": {"input_ids": {}}}')
    assert numbers(tmp_path) == [1, 2]


@pytest.mark.parametrize("name", ["_indices_files", "_indices_data_files"])
def test_rows_that_are_selected_by_their_numbers(tmp_path, name):
    saved(tmp_path, {name: [{"filename": "indices.arrow"}]}, files=2)
    for number in range(2):
        rows = [[2 * number], [2 * number + 1]]
        arrow({"input_ids": rows})(tmp_path / f"data-0000{number}-of-00002.arrow")
    row_numbers([3, 0, 3, 2, 1])(tmp_path / "indices.arrow")
    assert numbers(tmp_path) == [3, 0, 3, 2, 1]
    source = open_source(tmp_path)
    (block,) = source.blocks()
    assert block.tokens["input_ids"].tolist() == [3, 0, 3, 2, 1]
    (path,) = source.files
    rest = read_rows(path, BadRecords(), ["input_ids"], start=3)
    assert [row.fields["input_ids"] for row in rest] == [[2], [1]]
    before = identity(path)
    arrow({"input_ids": [[5], [6]]})(tmp_path / "data-00001-of-00002.arrow")
    assert identity(path) != before
    assert numbers(tmp_path) == [6, 0, 6, 5, 1]


def test_a_dictionary_of_data_sets_needs_a_split(tmp_path):
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        saved(tmp_path / name, {"_split": name})
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert numbers(tmp_path, split="test") == [1, 2]


def test_a_saved_data_set_is_read_as_its_library_reads_it(tmp_path):
    """Results of map and filter beside it are not read."""
    datasets().disable_progress_bars()
    rows = [[number] for number in range(30)]
    datasets().Dataset.from_dict({"input_ids": rows}).save_to_disk(tmp_path / "saved")
    loaded = datasets().load_from_disk(tmp_path / "saved")
    loaded.map(lambda row: {"input_ids": row["input_ids"] * 2})
    chosen = loaded.filter(lambda row: row["input_ids"][0] > 20)
    chosen.shuffle(seed=1).save_to_disk(tmp_path / "chosen")
    assert len(list((tmp_path / "saved").glob("cache-*"))) > 0
    for name in ("saved", "chosen"):
        expected = [row["input_ids"][0] for row in datasets().load_from_disk(tmp_path / name)]
        assert numbers(tmp_path / name) == expected


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_types_of_columns(tmp_path):
    row = {"text": "a", "input_ids": [1], "score": 0.5, "meta": {"x": 1}}
    content([row])(tmp_path / "a.jsonl")
    parquet({name: [value] for name, value in row.items()})(tmp_path / "a.parquet")
    types = {"text": "text", "input_ids": "integers", "score": "one value", "meta": "other"}
    for name in ("a.jsonl", "a.parquet"):
        assert column_types(str(tmp_path / name)) == types


def test_an_identity_changes_with_the_file(tmp_path):
    path = tmp_path / "a.jsonl"
    seen = set()
    long = LINES * 3000
    short = LINES[:-1]
    for data in (LINES, short + b" ", short, long, b" " + long):
        path.write_bytes(data)
        name = identity(str(path))
        assert identity(str(path)) == name
        seen.add(name)
    assert len(seen) == 5


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_a_long_record_is_refused_without_its_memory(tmp_path, name):
    ids = [list(range(5000)), [1]]
    rows = [{"input_ids": one} for one in ids]
    writers = {
        "a.jsonl": content(rows),
        "a.json": content(json.dumps(rows).encode()),
        "a.parquet": parquet({"input_ids": ids}, row_group_size=1),
    }
    writers[name](tmp_path / name)
    bad = BadRecords(1, 6000)
    read = list(read_rows(str(tmp_path / name), bad))
    assert [row.fields["input_ids"] for row in read] == [[1]]
    assert bad.count == 1
    assert bad.too_long() in str(bad.found[0])


def test_a_bad_line_is_left_out_on_request(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input_ids": [3]}\n{"input_ids": [4\n{"input_ids": [5]}\n')
    source = open_source(tmp_path / "a.jsonl", skip_bad=1)
    assert plain(source) == [{"input_ids": [3]}, {"input_ids": [5]}]
    assert source.bad.count == 1
    assert "line 2" in source.report()
