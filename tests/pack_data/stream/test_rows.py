"""Packed rows for Hugging Face datasets."""

import numpy as np
import pytest

from pack_data.stream.rows import PackRows, _row_of, packed_rows


def examples(n, S=64, seed=0):
    """Each example's tokens are its number, so that a row tells whose they are."""
    lengths = np.random.default_rng(seed).integers(1, S, n).tolist()
    rows = []
    for number, length in enumerate(lengths, start=1):
        labels = [-1] * length
        rows.append({"input_ids": [number] * length, "labels": labels, "text": "x"})
    return rows


def columns_of(rows):
    return {name: [row[name] for row in rows] for name in rows[0]}


def rows_of(columns):
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def check_rows(rows, expected, S, depth):
    """Each example once and whole; positions begin anew in each."""
    sequences = []
    for row in rows:
        tokens = len(row["input_ids"])
        assert tokens == sum(row["seq_lengths"]) <= S
        assert tokens == len(row["labels"]) == len(row["position_ids"])
        assert len(row["seq_lengths"]) <= depth
        assert "text" not in row
        start = 0
        for length in row["seq_lengths"]:
            (number,) = set(row["input_ids"][start : start + length])
            assert row["position_ids"][start : start + length] == list(range(length))
            sequences.append((number, length))
            start += length
    assert sorted(sequences) == [(example["input_ids"][0], len(example["input_ids"])) for example in expected]


def test_batches_and_streams_become_rows():
    batch = examples(200)
    columns = PackRows(64, max_sequences_per_pack=4)(columns_of(batch))
    assert len(rows_of(columns)) < 150
    check_rows(rows_of(columns), batch, 64, 4)
    check_rows(
        packed_rows(batch, 64, max_sequences_per_pack=4, buffer_sequences=32),
        batch,
        64,
        4,
    )


@pytest.mark.parametrize(
    "rule, tokens",
    [
        ("split", [*range(1, 13)]),
        ("truncate", [1, 2, 3, 4, 11, 12]),
        ("drop", [11, 12]),
    ],
)
def test_longer_examples_follow_the_rule(rule, tokens):
    batch = [{"input_ids": list(range(1, 11))}, {"input_ids": [11, 12]}]
    streamed = columns_of(list(packed_rows(batch, 4, longer=rule)))
    mapped = PackRows(4, longer=rule)(columns_of(batch))
    for columns in (streamed, mapped):
        assert sorted(sum(columns["input_ids"], [])) == tokens


@pytest.mark.parametrize("seed", range(4))  # the order of the rows
def test_a_column_as_long_as_the_tokens_by_chance_is_left_out(seed):
    batch = {
        "input_ids": [[1, 2], [3, 4, 5, 6]],
        "notes": [["a", "b"], ["c"]],
        "meta": [{"of": 1, "id": 2}, {}],
    }
    columns = PackRows(4, seed=seed)(batch)
    assert set(columns) == {"input_ids", "position_ids", "seq_lengths"}
    assert sorted(columns["input_ids"]) == [[1, 2], [3, 4, 5, 6]]


def test_a_budget_reaches_the_packer():
    lengths = np.random.default_rng(0).lognormal(np.log(73), 0.6, 1000).astype(int).clip(1, 256)
    batch = {"input_ids": [[1] * length for length in lengths]}
    hasty = PackRows(256, budget=1e-9)(batch)
    patient = PackRows(256, budget=60)(batch)
    assert len(patient["input_ids"]) < len(hasty["input_ids"])


def test_a_row_by_hand_and_no_row():
    row = _row_of([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}])
    assert row == {
        "input_ids": [5, 6, 7, 8],
        "position_ids": [0, 1, 2, 0],
        "seq_lengths": [3, 1],
    }
    empty = {"input_ids": [], "position_ids": [], "seq_lengths": []}
    assert PackRows(4)({"input_ids": []}) == empty


def test_rows_in_hugging_face_datasets():
    datasets = pytest.importorskip("datasets")
    batch = examples(100)
    source = datasets.IterableDataset.from_generator(lambda: iter(batch))
    options = dict(batched=True, batch_size=50, remove_columns=list(batch[0]))
    check_rows(source.map(PackRows(64, 4), **options), batch, 64, 4)
    arguments = {
        "examples": batch,
        "max_sequence_length": 64,
        "max_sequences_per_pack": 4,
    }
    streamed = datasets.IterableDataset.from_generator(packed_rows, gen_kwargs=arguments)
    check_rows(streamed, batch, 64, 4)
