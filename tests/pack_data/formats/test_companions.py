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

TYPES = ["bool_", "int8", "uint16", "int64", "float32", "float64", "half"]
BOUNDARIES = ("attention_mask", "document_ids", "position_ids")


@st.composite
def tables(draw):
    """A table of rows with input_ids and some companions, and the Arrow type of each column."""
    names = draw(st.sets(st.sampled_from(sorted(COMPANIONS)), min_size=1, max_size=3))
    kinds = {name: draw(st.sampled_from(TYPES)) for name in names}
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        runs = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        tokens = sum(runs)
        row = {"input_ids": draw(st.lists(st.integers(1, 99), min_size=tokens, max_size=tokens))}
        for name in names:
            if name == "position_ids":
                values = [place for run in runs for place in range(run)]
            elif name == "document_ids":
                values = [number % 2 for number, run in enumerate(runs) for _ in range(run)]
            elif name == "attention_mask":
                values = [1] * runs[0] + [0] * (tokens - runs[0])
            elif draw(st.booleans()) or kinds[name] == "bool_":
                values = draw(st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens))
            else:
                values = draw(st.lists(st.integers(0, 9), min_size=tokens, max_size=tokens))
            if "float" in kinds[name] and draw(st.integers(0, 5)) == 0 and name not in BOUNDARIES:
                values[0] = 0.5
            if kinds[name] == "bool_":
                values = [bool(value) for value in values]
            elif kinds[name][0] in "fh":
                values = [float(value) for value in values]
            row[name] = values
        rows.append(row)
    return rows, kinds


def sequences(source):
    """Return the ids and labels of all sequences, sorted; None if they are refused."""
    found = []
    try:
        rows = pack_dataset(source, max_sequence_length=16)
        for row in rows:
            batch = rows.collate([row])
            ends = batch["cu_seqlens"].tolist()
            columns = (batch["input_ids"].reshape(-1), batch["labels"].reshape(-1))
            for start, end in zip(ends, ends[1:]):
                found.append(tuple(values[start:end].tolist() for values in columns))
    except ValueError as error:
        assert "\n" not in str(error)
        return None
    return sorted(found)


def write(folder, rows, kinds):
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"input_ids": pa.array([row["input_ids"] for row in rows])}
    for name, kind in kinds.items():
        values = [np.array(row[name], "f2") if kind == "half" else row[name] for row in rows]
        item = pa.float16() if kind == "half" else getattr(pa, kind)()
        columns[name] = pa.array(values, pa.list_(item))
    pq.write_table(pa.table(columns), folder / "a.parquet")
    return [str(folder / name) for name in ("a.jsonl", "a.parquet")]


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
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
                ids += [part.tolist() for part in np.split(block.tokens["input_ids"], ends[:-1])]
            assert sorted(ids) == sorted(ids_of for ids_of, _ in expected)


def test_build_look_and_rows_divide_a_row_at_its_restarts(tmp_path):
    row = {"input_ids": list(range(1, 17)), "position_ids": [*range(8), *range(8)]}
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps(row) + "\n") * 10)
    assert count([str(path)]).sequences == 20
    with build(BuildOptions(tmp_path / "out", source=str(path), max_sequence_length=16)) as store:
        assert store.manifest.sequences == 20
    assert len(sequences(str(path))) == len(sequences([row] * 10)) == 20


REFUSED = [
    ({"input_ids": [[1, 2]], "loss_mask": [["a", "b"]]}, "loss_mask", "0 and 1"),
    ({"input_ids": [[1, 2]], "completion_mask": [1]}, "completion_mask", "list"),
    ({"input_ids": [[1, 2]], "labels": [[[1], [2]]]}, "labels", "list"),
    ({"input_ids": [[1, 2]], "loss_mask": [[0, 2]]}, "loss_mask holds 2"),
    ({"input_ids": [[1, 2]], "labels": [[0.5, 2.0]]}, "labels holds 0.5"),
    ({"input_ids": [[1, 2]], "attention_mask": [[2, 1]]}, "attention_mask holds 2"),
    ({"text": ["a"], "embedding": [[-3, 5, 7]]}, "embedding holds -3"),
    ({"input_ids": [[1, 2]], "weights": [[0.5, float("inf")]]}, "weights holds inf"),
]


@pytest.mark.parametrize("columns, names", [(row[0], row[1:]) for row in REFUSED], ids=str)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_column_that_is_not_read_is_refused(tmp_path, suffix, columns, names):
    path = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.table(columns), path)
    else:
        path.write_text(json.dumps({name: values[0] for name, values in columns.items()}) + "\n")
    with refused(path.name, *names):
        list(open_source(path).blocks())


def test_weights_are_kept_in_rows_and_refused_by_a_build(tmp_path):
    row = {"input_ids": [1, 2], "loss_weights": [0.5, 1.0]}
    for path in write(tmp_path, [row], {"loss_weights": "float32"}):
        assert pack_dataset(path, max_sequence_length=2)[0]["loss_weights"].tolist() == [0.5, 1.0]
        with refused("loss_weights", "--columns"):
            build(BuildOptions(tmp_path / "out", source=path, max_sequence_length=16))
        options = BuildOptions(f"{path}.packs", source=path, columns=("input_ids",), max_sequence_length=16)
        build(options).close()


def test_a_mask_that_only_later_records_have_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"input_ids": [1, 2]}\n{"input_ids": [3, 4], "loss_mask": [0, 1]}\n')
    with refused("line 2", "loss_mask"):
        list(open_source(path).blocks())
    assert len(list(open_source(path, columns=("input_ids",)).examples())) == 2
