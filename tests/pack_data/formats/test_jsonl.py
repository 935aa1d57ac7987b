"""Tokenised JSONL: columns, lists alone, padding, foreign fields, damage, and builds from it."""

import gzip
import json
import lzma

import pytest

from pack_data.formats.data_files import data_files
from pack_data.formats.source import open_source
from pack_data.lengths.counting import count
from pack_data.lengths.options import named_histogram
from tests.refusals import refused

ROWS = [
    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "id": 11, "text": "a b"},
    {"input_ids": [8], "labels": [8], "id": 12, "text": "c"},
    {"input_ids": [9, 4, 3, 2], "labels": [9, 4, 3, 2], "id": 13, "text": "d"},
]


def write(path, rows):
    text = "\n\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n"
    path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(text.encode()))
    return str(path)


def values(source):
    return [{name: array.tolist() for name, array in record.value.items()} for record in source.read()]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a", "a.jsonl.gz", "a.jsonl.xz"])
def test_each_line_is_a_sequence_of_its_integer_lists(tmp_path, name):
    path = write(tmp_path / name, ROWS)
    source = open_source(path)
    assert (source.format, source.kind) == ("jsonl", "tokens")
    assert "jsonl" not in name or data_files(str(tmp_path)) == [path]
    assert values(source) == [{name: row[name] for name in ("input_ids", "labels")} for row in ROWS]
    assert [record.foreign["id"] for record in source.read()] == [11, 12, 13]
    assert values(open_source(path, columns=("labels",))) == [{"labels": row["labels"]} for row in ROWS]
    assert named_histogram(path, 8) == count([path], 8) and count([path]).counts.tolist() == [0, 1, 0, 1, 1]


@pytest.mark.parametrize(
    "content, sequences",
    [
        (b"[3, 4]\n[5]\n", [[3, 4], [5]]),
        (b'\xef\xbb\xbf{"input_ids": [3, 4]}', [[3, 4]]),
        (b'{"input_ids": [3, 4, 0], "attention_mask": [1, 1, 0]}\n', [[3, 4]]),
    ],
    ids=["lists alone", "byte order mark", "attention mask"],
)
def test_other_forms_of_a_line(tmp_path, content, sequences):
    (tmp_path / "a.jsonl").write_bytes(content)
    assert values(open_source(str(tmp_path / "a.jsonl"))) == [{"input_ids": ids} for ids in sequences]


@pytest.mark.parametrize(
    "line, words",
    [
        ('{"input_ids": [1, 2', "not JSON"),
        ('"text"', "is a str"),
        ('{"input_ids": [1, 2.5]}', "input_ids is not a list of integers"),
        ('{"labels": [1]}', "input_ids is not a list of integers"),
        ('{"input_ids": []}', "input_ids is empty"),
        ('{"input_ids": [-1]}', "input_ids holds -1"),
        ('{"input_ids": [1%s]}' % ("0" * 30), "a number of 31 digits"),
        ('{"input_ids": [18446744073709551616]}', "64 bits"),
        ("[" * 100_000, "nested too deeply"),
        ('{"input_ids": [%s1]}' % ("1, " * 200), "longer than 500 bytes"),
    ],
)
def test_a_bad_line_is_named_and_may_be_left_out(tmp_path, line, words):
    path = write(tmp_path / "a.jsonl", [{"input_ids": [3]}, line, {"input_ids": [4]}])
    limit = {"max_record_bytes": 500} if "longer" in words else {}
    with pytest.raises(ValueError, match=f"a.jsonl: line 3: .*{words}"):
        values(open_source(path, **limit))
    source = open_source(path, skip_bad=1, **limit)
    assert values(source) == [{"input_ids": [3]}, {"input_ids": [4]}] and source.bad.count == 1


def test_what_is_no_tokenised_jsonl_is_refused(tmp_path):
    with refused("a.jsonl", "--corpus"):
        open_source(write(tmp_path / "a.jsonl", [{"text": "a b"}]))
    with refused("b.jsonl", "no record"):
        open_source(write(tmp_path / "b.jsonl", [" "]))
    with refused("c.jsonl", "text", "input_ids"):
        open_source(write(tmp_path / "c.jsonl", ROWS), columns=("text",))
    whole = (tmp_path / "whole.jsonl.gz", tmp_path / "cut.jsonl.gz")
    write(whole[0], ROWS * 50)
    whole[1].write_bytes(whole[0].read_bytes()[:-20])
    with refused("cut.jsonl.gz", "compressed"):
        values(open_source(str(whole[1])))


def test_fields_of_later_lines_are_named_where_they_are_left_out(tmp_path):
    first = {"input_ids": [3, 4], "label": 1, "score": 0.5}
    path = write(tmp_path / "a.jsonl", [first, {"input_ids": [5], "label": 0, "score": 1, "late": 7}])
    source = open_source(path)
    (block,) = source.blocks()
    assert block.scalars["label"].tolist() == [1, 0] and list(block.scalars) == ["label"]
    assert source.foreign_lost == ("late", "score")
    source = open_source(write(tmp_path / "b.jsonl", [first, {"input_ids": [5], "label": 0.5}]))
    with refused("line 3", "label"):
        list(source.blocks())
