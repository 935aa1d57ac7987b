"""Refusals of files, fields and data sets that no other test reaches."""

import gzip
import types

import numpy as np
import pytest

from pack_data.formats.records import integers
from pack_data.reading import compressed, files
from pack_data.reading.encodings import check_encoding
from pack_data.reading.fields import Fields
from pack_data.reading.hugging_face import lengths_of
from pack_data.text.vocabulary import load_tokenizer
from tests.refusals import refused


@pytest.mark.parametrize("more", [0, 1])
def test_the_limit_of_decompression(tmp_path, monkeypatch, more):
    monkeypatch.setattr(compressed, "ALWAYS_UNPACKED", 1000)
    monkeypatch.setattr(compressed, "MOST_TIMES", 1)
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(bytes(1000 + more)))
    if not more:
        with compressed.open_unpacked(path) as file:
            assert len(file.read()) == 1000
        return
    with refused("a.txt.gz", "1 times"), compressed.open_unpacked(path) as file:
        file.read()


def test_a_file_that_cannot_be_opened_is_one_line(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("")

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", denied)
    with refused("a.txt", "Permission denied"), files.open_regular(path):
        pass


@pytest.mark.parametrize("empty, text", [(True, ""), (False, "a")])
def test_an_empty_text_is_one_where_it_may_be(empty, text):
    assert Fields.of({"key": text}, "a.json", "").text("key", empty=empty) == text


def test_an_empty_text_is_refused_where_it_may_not_be():
    with refused("a.json", "key", "1 to"):
        Fields.of({"key": ""}, "a.json", "way out").text("key", empty=False)


@pytest.mark.parametrize(
    "column, values, names",
    [
        ("text", ["a"], ("text", "input_ids")),
        ("length", [1, None], ("length", "empty")),
        ("length", [1.5], ("length", "double|float64")),
    ],
)
def test_lengths_of_a_data_set_that_has_none(column, values, names):
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({column: values})
    data_set = types.SimpleNamespace(column_names=[column], iter=lambda rows: [table])
    data_set.select_columns = data_set.with_format = lambda _: data_set
    with refused("datasets.Dataset", *names):
        lengths_of(data_set)


def test_lengths_of_a_data_set(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"input_ids": [[1, 2], [3]]})
    data_set = types.SimpleNamespace(column_names=["input_ids"], iter=lambda rows: [table])
    data_set.select_columns = data_set.with_format = lambda _: data_set
    assert np.array_equal(lengths_of(data_set), [2, 1])


def test_a_missing_tokenizer_is_named(tmp_path):
    with refused("tokenizer.json"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_the_largest_id_is_that_of_int32():
    assert integers("ids", np.array([2**31 - 1])).tolist() == [2**31 - 1]
    with refused("ids", 2**31):
        integers("ids", np.array([2**31]))


def test_a_text_with_more_zeros_than_a_quarter_is_named_utf_16():
    check_encoding("a.txt", b"abc\0" * 10)
    with refused("a.txt", "UTF-16"):
        check_encoding("a.txt", b"abc\0" * 10 + b"\0")
