"""Parquet and Arrow: examples, packs and any integer columns; padding, foreign columns, damage."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow", reason="needs the formats extra (pyarrow)")
pq = pytest.importorskip("pyarrow.parquet", reason="needs the formats extra (pyarrow)")

from pack_data.building.command import main as build_main
from pack_data.cli.command import run_main
from pack_data.formats import parquet
from pack_data.formats.detect import open_source
from pack_data.formats.records import EXAMPLE_FIELDS, RowWidths, pack_from_examples
from pack_data.store.packs import FIELDS
from tests.format_samples import mlperf_row, random_examples, records

S, P, D = 24, 4, 3


def values(path, **options):
    return [record.value for record in open_source(path, **options).read()]


def plain(value):
    return {name: array.tolist() for name, array in value.items()}


def write_arrow(path, table, batch_rows=3):
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return path


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@given(seed=st.integers(0, 2**32))
def test_examples_round_trip(tmp_path_factory, suffix, seed):
    examples = random_examples(np.random.default_rng(seed), 5, S, P)
    path = str(tmp_path_factory.mktemp("examples") / f"a.{suffix}")
    assert parquet.write(path, records(examples), "examples", suffix) == 5
    source = open_source(path)
    assert (source.format, source.kind) == (suffix, "examples")
    assert [record.value for record in source.read()] == examples


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_packs_round_trip_with_their_types(tmp_path, suffix):
    rng = np.random.default_rng(0)
    packs = [pack_from_examples(random_examples(rng, 2, S // D, P), RowWidths(S, P * D, D)) for _ in range(5)]
    path = str(tmp_path / f"a.{suffix}")
    parquet.write(path, records(packs), "packs", suffix)
    source = open_source(path)
    assert (source.kind, source.shape()) == ("packs", RowWidths(S, P * D, D))
    for got, expected in zip([record.value for record in source.read()], packs):
        assert all(np.array_equal(got[name], expected[name]) for name in FIELDS)
    types = {name: parquet._schema(path).field(name).type.value_type for name in FIELDS}
    assert all(
        kind == (pa.float32() if name in ("masked_lm_weights", "next_sentence_weights") else pa.int32())
        for name, kind in types.items()
    )


def test_more_rows_than_one_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "ROWS", 4)
    examples = random_examples(np.random.default_rng(0), 11, S, P)
    for name in ("a.parquet", "a.arrow"):
        assert parquet.write(str(tmp_path / name), records(examples), "examples", name.rpartition(".")[2]) == 11
        got = list(open_source(tmp_path / name).read())
        assert [record.value for record in got] == examples
        assert [record.origin.record for record in got] == list(range(11))


def test_padded_examples_lose_their_padding(tmp_path):
    """The columns of MLPerf in a table, as a data set loaded from those files has them."""
    examples = random_examples(np.random.default_rng(0), 3, S, P)
    rows = [mlperf_row(each, S, P) for each in examples]
    pq.write_table(pa.table({name: [row[name] for row in rows] for name in rows[0]}), tmp_path / "a.parquet")
    source = open_source(tmp_path / "a.parquet")
    assert (source.kind, source.shape()) == ("examples", RowWidths(S, P, None))
    assert [record.value for record in source.read()] == examples


@pytest.mark.parametrize("kind", ["list", "large_list", "fixed"])
def test_token_columns_of_every_list_type(tmp_path, kind):
    lists = {"list": pa.list_, "large_list": pa.large_list, "fixed": lambda value: pa.list_(value, 3)}[kind]
    table = pa.table(
        {
            "ids": pa.array([[1, 2, 3], [4, 5, 6]], lists(pa.int64())),
            "labels": pa.array([[-100, 2, 3], [-100, 5, 6]], lists(pa.int16())),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    got = values(tmp_path / "a.parquet")
    assert [plain(value) for value in got] == [
        {"ids": [1, 2, 3], "labels": [-100, 2, 3]},
        {"ids": [4, 5, 6], "labels": [-100, 5, 6]},
    ]
    assert (got[0]["ids"].dtype, got[0]["labels"].dtype) == (np.int64, np.int16)


def test_attention_mask_cuts_padding_on_either_side(tmp_path):
    table = pa.table(
        {
            "input_ids": [[7, 8, 0, 0], [0, 9, 9, 9]],
            "token_type_ids": [[0, 1, 0, 0], [0, 0, 1, 1]],
            "attention_mask": [[1, 1, 0, 0], [0, 1, 1, 1]],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    assert [plain(value) for value in values(tmp_path / "a.parquet")] == [
        {"input_ids": [7, 8], "token_type_ids": [0, 1]},
        {"input_ids": [9, 9, 9], "token_type_ids": [0, 1, 1]},
    ]
    assert [plain(value) for value in values(tmp_path / "a.parquet", columns=["input_ids"])] == [
        {"input_ids": [7, 8]},
        {"input_ids": [9, 9, 9]},
    ]


def test_tokens_and_foreign_columns_round_trip_with_their_types(tmp_path):
    table = pa.table(
        {
            "input_ids": pa.array([[1, 2], [3]], pa.list_(pa.int32())),
            "labels": pa.array([[5, -100], [6]], pa.list_(pa.int16())),
            "text": pa.array(["a", None]),
            "score": pa.array([0.5, 1.5], pa.float32()),
            "words": pa.array([["x"], []], pa.list_(pa.string())),
            "when": pa.array([1, 2], pa.timestamp("ms")),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    source = open_source(tmp_path / "a.parquet")
    for target in ("b.parquet", "b.arrow"):
        parquet.write(str(tmp_path / target), source.read(), "tokens", target.rpartition(".")[2])
        again = open_source(tmp_path / target)
        assert [plain(record.value) for record in again.read()] == [
            {"input_ids": [1, 2], "labels": [5, -100]},
            {"input_ids": [3], "labels": [6]},
        ]
    assert pq.read_table(tmp_path / "b.parquet").equals(pq.read_table(tmp_path / "a.parquet"))


def test_dictionary_and_null_rows(tmp_path):
    table = pa.table(
        {
            "input_ids": pa.array([[1], None, [2, None], [3]], pa.list_(pa.int32())),
            "tag": pa.array(["x", "y", "x", "x"]).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet: record 1: input_ids is null or holds a null"):
        values(tmp_path / "a.parquet")
    source = open_source(tmp_path / "a.parquet", skip_bad=2)
    got = list(source.read())
    assert [(record.origin.record, record.value["input_ids"].tolist()) for record in got] == [(0, [1]), (3, [3])]
    parquet.write(str(tmp_path / "b.parquet"), got, "tokens", "parquet")
    assert pq.read_table(tmp_path / "b.parquet")["tag"].to_pylist() == ["x", "x"]


@pytest.mark.parametrize(
    "table, reason",
    [
        (
            {"input_ids": [[1, 2]], "labels": [[1]]},
            "record 0: columns of different lengths: input_ids 2, labels 1 .name the ones to take with --columns",
        ),
        ({"input_ids": [[1, -2]]}, "record 0: input_ids holds -2 at index 1"),
        ({"input_ids": [[1, 2**31]]}, "record 0: input_ids holds 2.147.* at index 1"),
        ({"labels": [[1, 2**31]]}, "record 0: labels holds a number that does not fit 32 bits"),
        ({"input_ids": pa.array([[]], pa.list_(pa.int32()))}, "record 0: input_ids is empty"),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]}, "record 0: attention_mask is not one run of ones"),
        ({"text": ["a"], "number": [1]}, "has no column of integer lists; its columns are text, number"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, table, reason):
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet: " + reason):
        values(tmp_path / "a.parquet")


def column_lists(kind):
    """A file's columns, as lists, of packs, of examples, or of packs of token sequences."""
    rng = np.random.default_rng(0)
    if kind == "examples":
        return {name: [[1, 1, 1]] for name in EXAMPLE_FIELDS[:-1]}, {EXAMPLE_FIELDS[-1]: [1]}
    if kind == "token_packs":
        return {"input_ids": [[5, 6, 7]], "input_mask": [[1, 1, 2]], "positions": [[0, 1, 0]]}, {}
    pack = pack_from_examples(random_examples(rng, 2, S // D, P), RowWidths(S, P * D, D))
    return {name: [pack[name].tolist()] for name in FIELDS}, {}


NAMES = [("packs", name) for name in FIELDS] + [("examples", name) for name in EXAMPLE_FIELDS]


@pytest.mark.parametrize("kind, name", [*NAMES, ("token_packs", "input_mask")])
def test_a_misnamed_column_does_not_make_packs_into_tokens(tmp_path, capsys, kind, name):
    lists, numbers = column_lists(kind)
    whole, misnamed = str(tmp_path / "whole.parquet"), str(tmp_path / "misnamed.parquet")
    pq.write_table(pa.table({**lists, **numbers}), whole)
    assert open_source(whole).kind == kind
    columns = {("x" + own if own == name else own): value for own, value in {**lists, **numbers}.items()}
    pq.write_table(pa.table(columns), misnamed)
    with pytest.raises(ValueError, match=rf"misnamed.parquet: .*not {name} .*x{name}.*--columns"):
        open_source(misnamed)
    assert run_main(build_main, ["--from", misnamed, "--out", str(tmp_path / "data")]) == 2
    assert open_source(misnamed, columns=(next(own for own in columns if own in lists),)).kind == "tokens"


def test_single_fields_of_packs_may_stand_beside_tokens(tmp_path):
    path = str(tmp_path / "a.parquet")
    for other in ({"next_sentence_labels": [1]}, {"input_mask": [[1, 1]]}, {"positions": ["north"]}):
        pq.write_table(pa.table({"input_ids": [[5, 6]], **other}), path)
        assert open_source(path).kind == "tokens"


def test_a_column_that_is_not_there_is_said(tmp_path):
    pq.write_table(pa.table({"input_ids": [[1]], "text": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="text is no column of integer lists; those are input_ids"):
        open_source(tmp_path / "a.parquet", columns=["text"])


def test_a_damaged_page_costs_no_record_before_it(tmp_path):
    """Ten row groups of two; the fifth is damaged: its two records are counted, all others come out."""
    examples = random_examples(np.random.default_rng(0), 20, S, P)
    path = tmp_path / "a.parquet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "ROWS", 2)
        parquet.write(str(path), records(examples), "examples", "parquet")
    chunk = pq.ParquetFile(path).metadata.row_group(4).column(0)
    raw = bytearray(path.read_bytes())
    raw[chunk.data_page_offset + chunk.total_compressed_size - 3] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match="a.parquet: records 8 to 9: row group 4 cannot be read further"):
        values(path)
    source = open_source(path, skip_bad=2)
    assert [record.value for record in source.read()] == examples[:8] + examples[10:]
    assert source.bad.count == 2


def test_a_stream_cut_between_batches_does_not_pass_for_whole(tmp_path):
    table = pa.table({"input_ids": [[n + 1] for n in range(9)]})
    path = write_arrow(tmp_path / "a.arrow", table)
    raw = path.read_bytes()
    path.write_bytes(raw[:-8])
    with pytest.raises(ValueError, match="record 9: the stream has no end mark, the file is cut short"):
        values(path)
    assert len(values(path, skip_bad=1)) == 9
    path.write_bytes(raw[:-60])
    got = []
    with pytest.raises(ValueError, match="a.arrow: record 6: Arrow cannot read on .*the 6 records before it were read"):
        for record in open_source(path, skip_bad=99).read():
            got.append(record.value["input_ids"][0])
    assert got == [1, 2, 3, 4, 5, 6]


def test_an_ipc_file_is_read_too(tmp_path):
    table = pa.table({"input_ids": [[n + 1] for n in range(9)]})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    assert [value["input_ids"].tolist() for value in values(tmp_path / "a.arrow")] == [[n + 1] for n in range(9)]


ODD_TYPES = {
    "nested": pa.list_(pa.list_(pa.int32())),
    "texts": pa.list_(pa.string()),
    "a text": pa.string(),
    "a record": pa.struct([("a", pa.int32())]),
    "a time": pa.timestamp("ns"),
    "a map": pa.map_(pa.string(), pa.int32()),
    "a category": pa.dictionary(pa.int8(), pa.string()),
    "decimals": pa.decimal128(5, 2),
    "nothing": pa.null(),
}


@pytest.mark.parametrize("name", ["input_ids", "masked_lm_positions", "next_sentence_labels"])
@pytest.mark.parametrize("kind", ODD_TYPES.values(), ids=ODD_TYPES)
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_column_of_another_type_is_one_line(tmp_path, name, kind, suffix):
    names = ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels")
    table = pa.table({each: pa.array([None], kind if each == name else pa.list_(pa.int32())) for each in names})
    path = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(ValueError, match=f"a.{suffix}: column {name} is .*; must be lists of numbers"):
        list(open_source(path).read())
