"""A table means the same sequences from a file, a `Dataset`, a list and a stream, or all of them refuse it.

Hypothesis draws the types, masks, boundaries, nulls, foreign columns and shards of a table.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow", reason="needs the formats extra (pyarrow)")
pq = pytest.importorskip("pyarrow.parquet", reason="needs the formats extra (pyarrow)")

from pack_data import pack_dataset
from pack_data.building.command import BuildOptions, build
from pack_data.formats.source import open_source
from pack_data.lengths.counting import count
from pack_data.store.meanings import OF_TOKENS
from pack_data.stream.rows import packed_rows
from tests.pack_data.formats.foreign import datasets
from tests.refusals import refused
from tests.token_sequences import sequences_of

SLOTS = 16
INTEGERS = (
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.uint8(),
    pa.uint16(),
    pa.uint32(),
    pa.uint64(),
)
NUMBERS = (*INTEGERS, pa.bool_(), pa.float16(), pa.float32(), pa.float64())
LISTS = [pa.list_, pa.large_list]
LISTS += [getattr(pa, name) for name in ("list_view", "large_list_view") if hasattr(pa, name)]
BOUNDARIES = ("seq_lengths", "cu_seq_lens_q", "cu_seqlens")
# A column that no reader knows, as another writer has it in the first and in the second shard.
FOREIGN = [
    {},
    {"id": [5, 2**40]},
    {"label": [1, None]},
    {"score": [1, 0.5]},
    {"text": ["a", ["b"]]},
    {"embedding": [[-3, 5] * 9, [0.5] * 9]},
    {"meta": [{"x": 1}, {"y": "z"}]},
]


@st.composite
def values_of_column(draw, name, runs):
    """Draw the values of a row, whose sequences have these lengths; None for a null."""
    tokens = sum(runs)
    if draw(st.integers(0, 7)) == 0:
        return None
    if name == "position_ids":
        return np.concatenate([np.arange(run) for run in runs]).tolist()
    if name == "document_ids":
        return np.repeat(np.arange(len(runs)) % 2, runs).tolist()
    if name == "seq_lengths":
        return list(runs)
    if name in BOUNDARIES:
        return [0, *np.cumsum(runs).tolist()]
    if name == "attention_mask":
        return [1] * runs[0] + [0] * (tokens - runs[0])
    largest = draw(st.sampled_from([1, 1, 9]))
    return draw(st.lists(st.integers(0, largest), min_size=tokens, max_size=tokens))


@st.composite
def tables(draw):
    """Draw rows with input_ids and some columns beside it, and a maker of the Arrow type of each column."""
    beside = st.sampled_from(sorted(OF_TOKENS) + list(BOUNDARIES))
    names = ["input_ids", *draw(st.lists(beside, max_size=3, unique=True))]
    types = {}
    for name in names:
        number = draw(st.sampled_from(NUMBERS if name != "input_ids" else (*INTEGERS, pa.float32(), pa.float64())))
        if number not in (pa.bool_(), pa.float16()) and draw(st.integers(0, 5)) == 0:
            number = pa.dictionary(pa.int32(), number)
        types[name] = draw(st.sampled_from(LISTS))(number)
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        runs = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        tokens = sum(runs)
        row = {"input_ids": draw(st.lists(st.integers(1, 99), min_size=tokens, max_size=tokens))}
        for name in names[1:]:
            row[name] = draw(values_of_column(name, runs))
        rows.append(row)
    return rows, types


def plain_type(type):
    """Return the type of the numbers in lists, without a dictionary."""
    return getattr(type.value_type, "value_type", type.value_type)


def as_written(rows, types):
    """Return the rows with the values that their types hold, as Python values."""
    typed = []
    for row in rows:
        values = {}
        for name, column in row.items():
            number = plain_type(types[name])
            convert = bool if number == pa.bool_() else float if pa.types.is_floating(number) else int
            values[name] = column if column is None else list(map(convert, column))
        typed.append(values)
    return typed


def table_of(rows, types, foreign=(), shard=0):
    columns = {}
    for name in list(types)[:: -1 if shard else 1]:
        numbers = types[name].value_type
        values = [row[name] for row in rows]
        if pa.types.is_dictionary(numbers):
            plain = pa.array(values, pa.list_(numbers.value_type))
            encoded = plain.values.dictionary_encode().cast(numbers)
            is_null = pa.array([value is None for value in values])
            columns[name] = pa.ListArray.from_arrays(plain.offsets, encoded, mask=is_null)
            continue
        if pa.types.is_float16(numbers):
            values = [None if value is None else [np.float16(number) for number in value] for value in values]
        columns[name] = pa.array(values, types[name])
    for name, of_shards in dict(foreign).items():
        if of_shards[shard] is not None:
            columns[name] = pa.array([of_shards[shard]] * len(rows))
    return pa.table(columns)


def written(folder, rows, types, foreign, is_divided):
    """Write the table as directories of Parquet, Arrow and JSONL; return their paths."""
    half = (len(rows) + 1) // 2
    shards = [rows[:half], rows[half:]] if is_divided else [rows]
    for number, shard in enumerate(filter(None, shards)):
        for name in ("parquet", "arrow", "jsonl"):
            (folder / name).mkdir(exist_ok=True)
        table = table_of(shard, types, foreign, number)
        if not any("view" in str(kind) or "dictionary" in str(kind) for kind in table.schema.types):
            pq.write_table(table, folder / f"parquet/{number}.parquet", row_group_size=2)
        with pa.ipc.new_stream(str(folder / f"arrow/{number}.arrow"), table.schema) as writer:
            writer.write_table(table)
        others = {name: values[number] for name, values in dict(foreign).items()}
        lines = [json.dumps({**row, **others}) + "\n" for row in shard]
        (folder / f"jsonl/{number}.jsonl").write_text("".join(lines))
    return [str(path) for path in folder.iterdir() if list(path.iterdir())]


def unless_refused(read):
    """Return what `read` returns, sorted; None if it refuses the table in one line."""
    try:
        return sorted(read())
    except ValueError as error:
        assert "\n" not in str(error)
        return None


def in_packs(source):
    """Yield ids and labels of each sequence of a packed data set."""
    rows = pack_dataset(source, max_sequence_length=SLOTS)
    for row in rows:
        batch = rows.collate([row])
        ends = batch["cu_seqlens"].tolist()
        for start, end in zip(ends, ends[1:]):
            ids = batch["input_ids"][0, start:end]
            yield ids.tolist(), batch["labels"][0, start:end].tolist()


def in_stream(rows):
    for row in packed_rows(rows, SLOTS):
        ends = np.cumsum(row["seq_lengths"])
        for ids in np.split(np.array(row["input_ids"]), ends[:-1]):
            yield ids.tolist()


def as_built(path, **options):
    """Yield the ids of the sequences as `build` reads them."""
    for block in open_source(path, **options).blocks():
        for ids in np.split(block.tokens["input_ids"], np.cumsum(block.lengths)[:-1]):
            yield ids.tolist()


@settings(max_examples=120, deadline=None, derandomize=True)
@given(table=tables(), foreign=st.sampled_from(FOREIGN), is_divided=st.booleans())
def test_a_table_is_the_same_sequences_from_every_place_or_is_refused(table, foreign, is_divided):
    rows, types = table
    rows = as_written(rows, types)
    expected = unless_refused(lambda: in_packs(rows))
    ids = None if expected is None else [ids for ids, _ in expected]
    assert unless_refused(lambda: in_stream(rows)) == ids
    with TemporaryDirectory() as folder:
        for path in written(Path(folder), rows, types, foreign, is_divided):
            assert unless_refused(lambda path=path: in_packs(path)) == expected, path
            assert unless_refused(lambda path=path: as_built(path)) == ids, path
            lengths = unless_refused(lambda path=path: count([path]).counts.tolist()[1:])
            if ids is not None:
                assert sum(lengths) == len(ids)


def test_the_library_reads_the_same_sequences():
    library = datasets()

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(table=tables())
    def check(table):
        rows, types = table
        types = {name: pa.list_(plain_type(type)) for name, type in types.items()}
        rows = as_written(rows, types)
        data_set = library.Dataset(library.table.InMemoryTable(table_of(rows, types)))
        expected = unless_refused(lambda: in_packs(rows))
        assert unless_refused(lambda: in_packs(data_set)) == expected

    check()


def test_build_look_and_rows_divide_a_row_at_its_restarts(tmp_path):
    row = {"input_ids": list(range(1, 17)), "position_ids": [*range(8), *range(8)]}
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps(row) + "\n") * 10)
    assert count([str(path)]).sequences == 20
    build(BuildOptions(tmp_path / "out", source=str(path), max_sequence_length=16)).close()
    assert len(sequences_of(tmp_path / "out")) == 20
    assert len(list(in_packs([row] * 10))) == 20


def test_weights_are_kept_in_rows_and_refused_by_a_build(tmp_path):
    row = {"input_ids": [1, 2], "loss_weights": [0.5, 1.0]}
    types = {
        "input_ids": pa.list_(pa.int64()),
        "loss_weights": pa.list_(pa.float32()),
    }
    for path in written(tmp_path, [row], types, {}, False):
        packed = pack_dataset(path, max_sequence_length=2)
        assert packed[0]["loss_weights"].tolist() == [0.5, 1.0]
        with refused("loss_weights", "--columns"):
            build(BuildOptions(tmp_path / "out", source=path, max_sequence_length=16))
        options = BuildOptions(
            f"{path}.packs",
            source=path,
            columns=("input_ids",),
            max_sequence_length=16,
        )
        build(options).close()


# Columns beside rows of 9 tokens, of which 4, 5 and 6 are real: the values of each row, and whether the file is read.
BESIDE = [
    ("mask", [[1] * real + [0] * (9 - real) for real in (4, 5, 6)], False),
    (
        "Attention_Mask",
        [[1.0] * real + [0.0] * (9 - real) for real in (4, 5, 6)],
        False,
    ),
    (
        "is_padding",
        [[False] * real + [True] * (9 - real) for real in (4, 5, 6)],
        False,
    ),
    ("document_lengths", [[real, 9 - real] for real in (4, 5, 6)], False),
    ("offsets", [[0, real, 9] for real in (4, 5, 6)], False),
    ("length", [4, 5, 6], False),
    ("length", [9, 9, 9], True),
    ("labels", [[[1] * 9] * 9] * 3, False),
    ("embedding", [[0.1, -0.3]] * 3, True),
    ("word_ids", [list(range(9))] * 3, True),
    ("offset_mapping", [[[0, 1]] * 9] * 3, True),
    ("label", [1, 0, None], True),
]


@pytest.mark.parametrize("name, values, is_read", BESIDE, ids=[name for name, _, _ in BESIDE])
def test_a_column_that_may_belong_to_the_tokens_is_read_or_refused(tmp_path, name, values, is_read):
    rows = [{"input_ids": list(range(1, 10)), name: value} for value in values]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for path in (tmp_path / "a.jsonl", tmp_path / "a.parquet"):
        if is_read:
            assert name in open_source(path).ignored
            assert len(list(as_built(path))) == 3
        else:
            with refused(name, "--columns"):
                open_source(path)
        assert len(list(as_built(path, columns=("input_ids",)))) == 3
