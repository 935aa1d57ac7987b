"""Examples that are rows of several sequences keep their boundaries on every way to a batch."""

import json

import numpy as np
import pytest

from evidence.batching_report import collate
from pack_data import BuildOptions, PackDataset, build, pack, pack_dataset
from pack_data.batching.collators import padded_batch, padding_free_batch
from pack_data.batching.plans import BatchOptions, Piece, get_way
from pack_data.batching.sampler import IndexBatchSampler
from pack_data.stream.rows import PackRows, packed_rows
from tests.pack_data.store.test_boundaries import STATEMENTS
from tests.refusals import refused

SEQUENCES = [[10, 11, 12], [20], [30, 31], [40, 41, 42, 43]]
PLAIN = [50, 51, 52]
JOINED = padding_free_batch([{"input_ids": ids} for ids in (*SEQUENCES, PLAIN)])


def a_row(name):
    """SEQUENCES as one example, padded to 12 tokens."""
    lengths = np.array([len(ids) for ids in SEQUENCES])
    row = {
        "input_ids": [*sum(SEQUENCES, []), 0, 0],
        "labels": [*sum(SEQUENCES, []), -100, -100],
    }
    row[name] = STATEMENTS[name](lengths).tolist()
    if "position" in name:
        row[name] += [0, 0]
    return {**row, "attention_mask": [1] * 10 + [0] * 2}


def same(batch, expected=JOINED):
    return all(np.array_equal(batch[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", STATEMENTS)
def test_a_row_is_its_sequences(name):
    examples = [a_row(name), {"input_ids": PLAIN}]
    assert same(padding_free_batch(examples))
    assert same(
        padded_batch(examples),
        padded_batch([{"input_ids": ids} for ids in (*SEQUENCES, PLAIN)]),
    )
    assert same(padding_free_batch([a_row(name), {"input_ids": [9], "attention_mask": [0]}, examples[1]]))

    rows = pack_dataset(examples, max_sequence_length=15)
    order = [0, 1] if 10 in rows[0]["input_ids"][:1] else [1, 0]
    assert same(rows.collate([rows[0]]), padding_free_batch([examples[number] for number in order]))
    rows = pack_dataset(examples, max_sequence_length=16, multiple_of=4)
    assert same(
        rows.collate([rows[0]]),
        padding_free_batch([examples[number] for number in order], multiple_of=4),
    )

    streamed = list(packed_rows(examples, 13))
    table = PackRows(13)({column: [values] for column, values in examples[0].items()})
    assert [row["seq_lengths"] for row in streamed] == [[3, 1, 2, 4, 3]]
    assert table["seq_lengths"] == [[3, 1, 2, 4]]
    assert same(padding_free_batch(streamed))


@pytest.mark.parametrize("name", STATEMENTS)
def test_a_cut_row_keeps_the_boundaries_in_its_pieces(name):
    """Cut after five tokens, inside the third sequence."""
    expected = [[10, 11, 12], [20], [30], [31], [40, 41, 42, 43]]
    cut = padding_free_batch([{"input_ids": ids} for ids in expected])
    row = a_row(name)
    assert same(
        collate(
            get_way("MiniBatchPacking+PosID"),
            ((Piece(0, 0, 5),), (Piece(0, 5, 12),)),
            [row],
        ),
        cut,
    )
    sampler = IndexBatchSampler("MiniBatchPacking+PosID", [12], BatchOptions(3, 5), longer="split")
    pieces = [piece for batch in sampler for piece in sampler.view([row]).__getitems__(batch)]
    pieces.sort(key=lambda piece: int(piece["input_ids"][0]) or 99)
    assert same(padding_free_batch(pieces), cut)
    rows = PackDataset([row], packed=pack([12], max_sequence_length=5, longer="split"))
    batch = rows.collate([rows[number] for number in range(len(rows))])
    assert sorted(batch["input_ids"][0][batch["cumulative_lengths"][:-1]]) == [
        10,
        20,
        30,
        31,
        40,
    ]
    assert [row["seq_lengths"] for row in packed_rows([row], 5, longer="split")] == [
        [3, 1, 1],
        [1, 4],
    ]


def test_padding_behind_a_sequence_is_not_masked_in_a_row():
    """The rows of `PackRows` are examples again."""
    examples = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in SEQUENCES]
    rows = list(packed_rows(examples, 16, multiple_of=4))
    tokens = np.split(padding_free_batch(rows)["input_ids"][0], 4)
    assert sorted(map(list, tokens)) == [[*ids, *[0] * (4 - len(ids))] for ids in SEQUENCES]


def test_positions_of_several_axes_are_refused():
    with refused("example 0", "position_ids", "3, 2"):
        pack_dataset([{"input_ids": [5, 6], "position_ids": [[0, 1]] * 3}], max_sequence_length=8)[0]


def test_a_built_data_set_keeps_the_boundaries_in_position_ids(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        json.dumps(
            {
                "input_ids": sum(SEQUENCES, []),
                "position_ids": [0, 1, 2, 0, 0, 1, 0, 1, 2, 3],
            }
        )
        + "\n"
    )
    options = BuildOptions(tmp_path / "built", source=str(path), max_sequence_length=16)
    rows = PackDataset(build(options))
    (row,) = rows
    numbers = range(1, 1 + len(SEQUENCES))
    assert sorted(row["input_ids"][row["input_mask"] == number].tolist() for number in numbers) == sorted(SEQUENCES)
    boundaries = rows.collate([row])["cu_seqlens"]
    assert sorted(np.diff(boundaries)) == sorted(map(len, SEQUENCES))
