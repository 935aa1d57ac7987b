"""Fields that are no tokens, converted from any format of records to any other: same values, or one line."""

import itertools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow", reason="needs the formats extra (pyarrow)")
pq = pytest.importorskip("pyarrow.parquet", reason="needs the formats extra (pyarrow)")

from pack_data.building import convert
from pack_data.cli.command import run_main
from pack_data.formats import sequence_output
from pack_data.formats.source import open_source
from tests.format_samples import example, frame, mlperf_row, tf_example, write_hdf5
from tests.refusals import refusal_of

FORMATS = ("jsonl", "parquet", "arrow")
MANY = settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
    ],
)


def write_table(path, table):
    if path.suffix == ".parquet":
        return pq.write_table(table, str(path))
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_lines(path, rows):
    path.write_text("".join(json.dumps({"input_ids": [1], **row}) + "\n" for row in rows))
    return path


def read_table(path):
    return pq.read_table(str(path)) if path.suffix == ".parquet" else pa.ipc.open_stream(str(path)).read_all()


def read_rows(path):
    """The rows without the tokens; a field that is missing is None."""
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        rows = read_table(path).to_pylist()
    return [row.get("x") for row in rows]


def converted(source, target):
    columns = [] if source.suffix == ".tfrecord" else ["--columns", "input_ids"]
    assert run_main(convert.main, [str(source), str(target), *columns]) == 0
    return target


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(sequence_output, "_ROWS", 2)


# ---- any values ----------------------------------------------------------------------------------------------------

INTEGERS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(blacklist_categories=["Cs"]), max_size=3)
LEAVES = {
    pa.int64(): INTEGERS,
    pa.uint64(): st.integers(0, 2**64 - 1) | st.integers(2**63, 2**64 - 1),
    pa.float64(): FLOATS | st.integers(-(2**53), 2**53),
    pa.string(): TEXTS,
    pa.binary(): st.binary(max_size=3),
    pa.null(): st.none(),
}
TYPES = st.recursive(
    st.sampled_from(list(LEAVES)),
    lambda kinds: (
        kinds.map(pa.list_)
        | st.dictionaries(TEXTS, kinds, min_size=1, max_size=3).map(lambda fields: pa.struct(list(fields.items())))
    ),
    max_leaves=5,
)


def values_of(kind):
    if pa.types.is_list(kind):
        values = st.lists(values_of(kind.value_type), max_size=3)
    elif pa.types.is_struct(kind):
        values = st.fixed_dictionaries({}, optional={field.name: values_of(field.type) for field in kind})
    else:
        values = LEAVES[kind]
    return st.none() | values


@st.composite
def columns(draw):
    """A type, and a column of its values; objects may lack keys."""
    kind = draw(TYPES)
    return kind, draw(st.lists(values_of(kind), min_size=1, max_size=6))


def with_all_keys(values):
    """The values of one place in their records, where each object has the keys of all."""
    objects = [value for value in values if isinstance(value, dict)]
    lists = [value for value in values if isinstance(value, list)]
    if objects:
        keys = list(dict.fromkeys(itertools.chain(*objects)))
        filled = {key: iter(with_all_keys([value.get(key) for value in objects])) for key in keys}
        return [value if value is None else {key: next(filled[key]) for key in keys} for value in values]
    if lists:
        items = iter(with_all_keys(list(itertools.chain(*lists))))
        return [value if value is None else [next(items) for _ in value] for value in values]
    return values


def holds(kind, check):
    """True if a type, or one within it, passes the check."""
    return check(kind) or any(holds(kind.field(place).type, check) for place in range(kind.num_fields))


@pytest.mark.parametrize("target", FORMATS)
@given(column=columns())
@MANY
def test_jsonl_to_any_format_and_back(target, column):
    kind, values = column
    assume(not holds(kind, pa.types.is_binary))
    expected = values if target == "jsonl" else with_all_keys(values)
    assume(target != "parquet" or "{}" not in repr(expected))
    with tempfile.TemporaryDirectory() as folder:
        source = write_lines(Path(folder, "a.jsonl"), [{"x": value} for value in values])
        there = converted(source, Path(folder, f"b.{target}"))
        assert read_rows(there) == expected
        assert read_rows(converted(there, Path(folder, "c.jsonl"))) == expected


@pytest.mark.parametrize("source", FORMATS[1:])
@pytest.mark.parametrize("target", FORMATS)
@given(column=columns())
@MANY
def test_a_table_to_any_format_and_back(source, target, column):
    kind, values = column
    assume(target != "jsonl" or not holds(kind, pa.types.is_binary))
    tokens = pa.array([[1]] * len(values))
    table = pa.table({"input_ids": tokens, "x": pa.array(values, kind)})
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder, f"a.{source}")
        write_table(first, table)
        there = converted(first, Path(folder, f"b.{target}"))
        assert read_rows(there) == table["x"].to_pylist()
        back = converted(there, Path(folder, f"c.{source}"))
        assert read_rows(back) == table["x"].to_pylist()
        if target != "jsonl":
            assert read_table(there).schema.equals(table.schema)
            assert read_table(back).schema.equals(table.schema)


# ---- one column of each kind --------------------------------------------------------------------------------------

BIG = 2**63
UNION = pa.UnionArray.from_dense(
    pa.array([0, 1], pa.int8()), pa.array([0, 0], pa.int32()), [pa.array([1]), pa.array(["b"])]
)
INTERVAL = pa.array([pa.MonthDayNano([1, 2, 3])])
RUNS = pa.RunEndEncodedArray.from_arrays([1, 2], [7, 8])
KEYLESS = pa.array([{}], pa.struct([]))
X = ("a.jsonl: line 2", "x:")
# Values of lines, or a column of Arrow; formats; the rows there if they are others, or what a refusal names.
CASES = [
    ([{}], ("arrow", "jsonl"), None),
    ([1, 1, 1, BIG], FORMATS, None),
    ([1, 2 * BIG, "a", [1]], ("jsonl",), None),
    (KEYLESS, ("arrow", "jsonl"), None),
    (INTERVAL, ("arrow",), None),
    (RUNS, ("arrow", "jsonl"), None),
    (json.loads(f"[{'[' * 70}{']' * 70}]"), ("jsonl",), None),
    (json.loads(f"[{'[' * 70}{']' * 70}]"), ("arrow",), ("b.arrow", "x", "list<")),
    ([{}], ("parquet",), ("b.parquet", "x", "struct<>")),
    (KEYLESS, ("parquet",), ("b.parquet", "x", "struct<>")),
    (INTERVAL, ("parquet",), ("b.parquet", "x", "interval")),
    (RUNS, ("parquet",), ("b.parquet", "x", "run_end_encoded")),
    (UNION, FORMATS[1:], ("a.arrow: record 0", "x:", "union")),
    ([1, 2 * BIG], FORMATS[1:], (*X, "too large")),
    ([BIG, -1], FORMATS[1:], (*X, "negative")),
    ([1.5, 2**53 + 1], FORMATS[1:], (*X, 2**53 + 1)),
    ([1, "a"], FORMATS[1:], (*X, "int64", "string")),
    ([[1], 2], FORMATS[1:], (*X, "list<item: int64>", "int64")),
    ([True, 1], FORMATS[1:], (*X, "bool", "int64")),
    ([{"a": 1}, {"a": "x"}], FORMATS[1:], (*X, "int64", "string")),
    ([1, 1, 1, "a"], FORMATS[1:], ("a.jsonl: line 4", "x:", "int64", "string")),
    ([0, float("nan")], ("jsonl",), (*X, "JSON")),
    (pa.array([b"a"]), ("jsonl",), ("a.arrow: record 0", "x:", "bytes")),
]


@pytest.mark.parametrize(
    "values, target, expected",
    [(values, target, last) for values, targets, last in CASES for target in targets],
)
def test_a_column_is_held_or_refused(tmp_path, capsys, values, target, expected):
    if isinstance(values, list):
        source = write_lines(tmp_path / "a.jsonl", [{"x": value} for value in values])
    else:
        source = tmp_path / "a.arrow"
        write_table(source, pa.table({"input_ids": [[1]] * len(values), "x": values}))
        values = values.to_pylist()
    if isinstance(expected, tuple):
        arguments = [source, tmp_path / f"b.{target}"]
        refusal_of(
            convert.main,
            arguments,
            capsys,
            *expected,
            unchanged=tmp_path,
            after=r".*(\rjsonl|arrow to .*)?",
        )
    else:
        assert read_rows(converted(source, tmp_path / f"b.{target}")) == (expected or values)


# ---- TFRecord -----------------------------------------------------------------------------------------------------

FEATURES = st.dictionaries(
    TEXTS.filter(bool),
    st.lists(INTEGERS, min_size=1) | st.lists(st.floats(width=32), min_size=1) | st.lists(st.binary(max_size=3)),
    max_size=3,
)


def foreign(path):
    rows = [record.foreign for record in open_source(path).read()]
    return [{name: np.array(row[name], object).tolist() for name in sorted(row)} for row in rows]


@pytest.mark.parametrize("suffix", ["tfrecord", "tfrecord.gz"])
@given(rows=st.lists(FEATURES, min_size=1, max_size=3))
@MANY
def test_features_of_a_tfrecord_there_and_back(suffix, rows):
    own = mlperf_row(example(), 24, 4)
    assume(not any(own.keys() & row.keys() for row in rows))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "a.tfrecord")
        source.write_bytes(b"".join(frame(tf_example({**own, **row})) for row in rows))
        values = converted(source, Path(folder, f"b.{suffix}"))
        assert repr(foreign(values)) == repr([dict(sorted(row.items())) for row in rows])


@pytest.mark.parametrize(
    "column, names",
    [
        ([[0.5, 1e30]], ("x", "32 bits")),
        ([[0.1]], ("x", "32 bits")),
        (np.array([[2**63]], np.uint64), ("x", 2**63)),
    ],
)
def test_numbers_that_a_tfrecord_does_not_hold_are_refused(tmp_path, capsys, column, names):
    write_hdf5(tmp_path / "a.h5", [mlperf_row(example(), 24, 4)])
    with pytest.importorskip("h5py").File(tmp_path / "a.h5", "a") as file:
        file["x"] = column
    arguments = [tmp_path / "a.h5", tmp_path / "b.tfrecord"]
    refusal_of(
        convert.main,
        arguments,
        capsys,
        "a.h5: record 0",
        *names,
        unchanged=tmp_path,
        after=".*",
    )
