"""Fields that are no tokens, converted from any format of records to any other: same values, or one line."""

import itertools
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow", reason="needs the formats extra (pyarrow)")
pq = pytest.importorskip("pyarrow.parquet", reason="needs the formats extra (pyarrow)")

from pack_data.building import convert
from pack_data.cli.command import run_main
from pack_data.formats import sequence_output

FORMATS = ("jsonl", "parquet", "arrow")
MANY = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
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
    assert run_main(convert.main, [str(source), str(target), "--columns", "input_ids"]) == 0
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
            assert read_table(there).schema.equals(table.schema) and read_table(back).schema.equals(table.schema)
