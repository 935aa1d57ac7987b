"""Packed rows for Hugging Face datasets."""

import numpy as np
import pytest

from pack_data.stream.rows import PackRows, _row_of, packed_rows
from tests.refusals import refused


def examples(n, S=64, seed=0):
    """Each example's tokens are its number, so that a row tells whose they are."""
    lengths = np.random.default_rng(seed).integers(1, S, n).tolist()
    return [
        {"input_ids": [number + 1] * length, "labels": [-1] * length, "text": "x"}
        for number, length in enumerate(lengths)
    ]


def check_rows(rows, given, S, depth):
    """Each example once and whole; positions begin anew in each."""
    found = []
    for row in rows:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) == len(row["labels"]) == len(row["position_ids"]) <= S
        assert len(row["seq_lengths"]) <= depth
        start = 0
        for length in row["seq_lengths"]:
            (number,) = set(row["input_ids"][start : start + length])
            assert row["position_ids"][start : start + length] == list(range(length))
            found.append((number, length))
            start += length
        assert "text" not in row
    assert sorted(found) == [(number, len(each["input_ids"])) for number, each in enumerate(given, start=1)]


def test_a_batch_becomes_rows():
    given = examples(200)
    batch = {name: [each[name] for each in given] for name in given[0]}
    columns = PackRows(64, max_sequences_per_pack=4)(batch)
    rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
    check_rows(rows, given, 64, 4)
    assert len({len(values) for values in columns.values()}) == 1 and len(rows) < 150


def test_a_stream_becomes_rows():
    given = examples(300)
    check_rows(list(packed_rows(given, 64, max_sequences_per_pack=4, buffer_sequences=32)), given, 64, 4)


def test_longer_examples_follow_the_rule():
    given = [{"input_ids": list(range(1, 11))}, {"input_ids": [11, 12]}]
    batch = {"input_ids": [each["input_ids"] for each in given]}
    for rule, tokens in (("split", range(1, 13)), ("truncate", [1, 2, 3, 4, 11, 12]), ("drop", [11, 12])):
        for rows in (list(packed_rows(given, 4, longer=rule)), None):
            ids = PackRows(4, longer=rule)(batch)["input_ids"] if rows is None else [row["input_ids"] for row in rows]
            assert sorted(token for row in ids for token in row) == list(tokens)
    with refused("example 0 of the batch", 10):
        PackRows(4)(batch)
    with refused("example 0 of the stream", 10):
        list(packed_rows(given, 4))


@pytest.mark.parametrize("seed", range(4))  # the order of the rows
def test_a_column_as_long_as_the_tokens_by_chance_is_left_out(seed):
    batch = {"input_ids": [[1, 2], [3, 4, 5, 6]], "notes": [["a", "b"], ["c"]], "meta": [{"of": 1, "id": 2}, {}]}
    columns = PackRows(4, seed=seed)(batch)
    assert set(columns) == {"input_ids", "position_ids", "seq_lengths"}
    assert sorted(columns["input_ids"]) == [[1, 2], [3, 4, 5, 6]]


def test_a_budget_reaches_the_packer():
    lengths = np.random.default_rng(0).lognormal(np.log(73), 0.6, 1000).astype(int).clip(1, 256)
    batch = {"input_ids": [[1] * length for length in lengths]}
    fast, whole = (len(PackRows(256, budget=budget)(batch)["input_ids"]) for budget in (1e-9, 60))
    assert whole < fast


def test_a_batch_without_examples_has_no_rows():
    assert PackRows(4)({"input_ids": []}) == {"input_ids": [], "position_ids": [], "seq_lengths": []}


def test_a_row_by_hand():
    row = _row_of([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}])
    assert row == {"input_ids": [5, 6, 7, 8], "position_ids": [0, 1, 2, 0], "seq_lengths": [3, 1]}


def test_rows_in_hugging_face_datasets():
    datasets = pytest.importorskip("datasets")
    given = examples(100)
    columns = ["input_ids", "labels", "text"]
    mapped = datasets.IterableDataset.from_generator(lambda: iter(given)).map(
        PackRows(64, 4), batched=True, batch_size=50, remove_columns=columns
    )
    check_rows(list(mapped), given, 64, 4)
    streamed = datasets.IterableDataset.from_generator(
        packed_rows, gen_kwargs={"examples": given, "max_sequence_length": 64, "max_sequences_per_pack": 4}
    )
    check_rows(list(streamed), given, 64, 4)
