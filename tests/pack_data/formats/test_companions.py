"""A column beside the tokens means the same from JSONL, Parquet and a list, or all of them refuse it."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow", reason="needs the formats extra (pyarrow)")
pq = pytest.importorskip("pyarrow.parquet", reason="needs the formats extra (pyarrow)")

from pack_data import pack_dataset
from pack_data.building.command import BuildOptions, build
from pack_data.formats.source import open_source
from pack_data.lengths.counting import count
from pack_data.store.companions import COMPANIONS
from tests.refusals import refused

ARROW = {
    "bool_": pa.bool_(),
    "int8": pa.int8(),
    "uint16": pa.uint16(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "half": pa.float16(),
}
BOUNDARIES = ("attention_mask", "document_ids", "position_ids")


@st.composite
def companions(draw, name, kind, runs):
    """A value for each token of a row, whose sequences have these lengths."""
    tokens = sum(runs)
    if name == "position_ids":
        values = np.concatenate([np.arange(run) for run in runs]).tolist()
    elif name == "document_ids":
        values = np.repeat(np.arange(len(runs)) % 2, runs).tolist()
    elif name == "attention_mask":
        values = [1] * runs[0] + [0] * (tokens - runs[0])
    else:
        largest = 1
        if kind != "bool_":
            largest = draw(st.sampled_from([1, 9]))
        numbers = st.integers(0, largest)
        values = draw(st.lists(numbers, min_size=tokens, max_size=tokens))
    is_fraction = draw(st.integers(0, 5)) == 0
    if "float" in kind and is_fraction and name not in BOUNDARIES:
        values[0] = 0.5
    convert = {"b": bool, "f": float, "h": float}.get(kind[0], int)
    return values if 0.5 in values else list(map(convert, values))


@st.composite
def tables(draw):
    """A table of rows with input_ids and some companions, and the Arrow type of each column."""
    names = draw(st.sets(st.sampled_from(sorted(COMPANIONS)), min_size=1, max_size=3))
    kinds = {name: draw(st.sampled_from(sorted(ARROW))) for name in names}
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        runs = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        tokens = sum(runs)
        row = {"input_ids": draw(st.lists(st.integers(1, 99), min_size=tokens, max_size=tokens))}
        for name, kind in kinds.items():
            row[name] = draw(companions(name, kind, runs))
        rows.append(row)
    return rows, kinds


def sequences(source):
    """Return the ids and labels of all sequences, sorted; None if they are refused."""
    pairs = []
    try:
        rows = pack_dataset(source, max_sequence_length=16)
        for row in rows:
            batch = rows.collate([row])
            ends = batch["cu_seqlens"].tolist()
            ids = batch["input_ids"].reshape(-1)
            labels = batch["labels"].reshape(-1)
            for start, end in zip(ends, ends[1:]):
                own = slice(start, end)
                pairs.append((ids[own].tolist(), labels[own].tolist()))
    except ValueError as error:
        assert "\n" not in str(error)
        return None
    return sorted(pairs)


def write(folder, rows, kinds):
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "a.jsonl").write_text("".join(lines))
    columns = {"input_ids": pa.array([row["input_ids"] for row in rows])}
    for name, kind in kinds.items():
        values = [row[name] for row in rows]
        if kind == "half":
            values = [np.array(row, np.float16) for row in values]
        columns[name] = pa.array(values, pa.list_(ARROW[kind]))
    pq.write_table(pa.table(columns), folder / "a.parquet")
    return [str(folder / name) for name in ("a.jsonl", "a.parquet")]


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=tables())
def test_a_table_is_the_same_sequences_from_every_place_or_is_refused(tmp_path, table):
    rows, kinds = table
    expected = sequences(rows)
    for path in write(tmp_path, rows, kinds):
        assert sequences(path) == expected
        if expected is not None:  # as `build` and `look` read it
            ids = []
            for block in open_source(path).blocks():
                ends = np.cumsum(block.lengths)
                parts = np.split(block.tokens["input_ids"], ends[:-1])
                ids += [part.tolist() for part in parts]
            assert sorted(ids) == sorted(ids_of for ids_of, _ in expected)


def test_build_look_and_rows_divide_a_row_at_its_restarts(tmp_path):
    row = {"input_ids": list(range(1, 17)), "position_ids": [*range(8), *range(8)]}
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps(row) + "\n") * 10)
    assert count([str(path)]).sequences == 20
    with build(BuildOptions(tmp_path / "out", source=str(path), max_sequence_length=16)) as store:
        assert store.manifest.sequences == 20
    assert len(sequences(str(path))) == 20
    assert len(sequences([row] * 10)) == 20


def test_weights_are_kept_in_rows_and_refused_by_a_build(tmp_path):
    row = {"input_ids": [1, 2], "loss_weights": [0.5, 1.0]}
    for path in write(tmp_path, [row], {"loss_weights": "float32"}):
        packed = pack_dataset(path, max_sequence_length=2)
        assert packed[0]["loss_weights"].tolist() == [0.5, 1.0]
        with refused("loss_weights", "--columns"):
            build(BuildOptions(tmp_path / "out", source=path, max_sequence_length=16))
        options = BuildOptions(f"{path}.packs", source=path, columns=("input_ids",), max_sequence_length=16)
        build(options).close()
