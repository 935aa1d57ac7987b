"""Collators: the paper's example, labels, empty and broken examples."""

import numpy as np
import pytest

from evidence.batching_report import collate
from pack_data.batching.collators import padded_batch, padding_free_batch
from pack_data.batching.plans import Piece, get_way

PAPER = [
    list(range(10, 14)),
    list(range(20, 28)),
    list(range(30, 35)),
    list(range(40, 50)) + [410],
]


def test_the_example_of_the_paper():
    """ "Enhancing Training Efficiency Using Packing with Flash Attention", section 3.5."""
    batch = padding_free_batch([{"input_ids": ids} for ids in PAPER])
    assert batch["input_ids"].tolist() == [sum(PAPER, [])]
    assert batch["labels"].tolist() == [sum(([-100, *ids[1:]] for ids in PAPER), [])]
    assert batch["position_ids"].tolist() == [
        [
            0,
            1,
            2,
            3,
            0,
            1,
            2,
            3,
            4,
            5,
            6,
            7,
            0,
            1,
            2,
            3,
            4,
            0,
            1,
            2,
            3,
            4,
            5,
            6,
            7,
            8,
            9,
            10,
        ]
    ]
    assert batch["cumulative_lengths"].tolist() == [0, 4, 12, 17, 28]
    assert batch["cumulative_lengths"].dtype == np.int32
    assert batch["max_length"] == 11


@pytest.mark.parametrize(
    "options, real, padded",
    [
        ({}, [0, 17, 32, 46], [0, 17, 32, 46]),
        ({"multiple_of": 16}, [0, 17, 32, 46], [0, 32, 48, 64]),
        ({"multiple_of": 16, "slots": 96}, [0, 17, 32, 46], [0, 32, 48, 96]),
        (
            {"multiple_of": 16, "max_examples": 5},
            [0, 17, 32, 46, 46, 46],
            [0, 32, 48, 64, 64, 64],
        ),
    ],
)
def test_boundaries_for_context_parallelism(options, real, padded):
    """Example n is at padded[n], for real[n + 1] - real[n] tokens, as Transformer Engine reads them."""
    examples = [{"input_ids": np.full(length, length)} for length in (17, 15, 14)]
    batch = padding_free_batch(examples, **options)
    assert batch["cu_seqlens"].tolist() == real
    assert batch["cu_seqlens_padded"].tolist() == padded
    assert batch["cu_seqlens"].dtype == batch["cu_seqlens_padded"].dtype == np.int32
    for number, example in enumerate(examples):
        begin = padded[number]
        row = batch["input_ids"][0, begin : begin + real[number + 1] - real[number]]
        assert np.array_equal(row, example["input_ids"])


def test_padding_the_example_of_the_paper():
    batch = padded_batch([{"input_ids": ids} for ids in PAPER[:2]], pad_id=9)
    assert batch["input_ids"].tolist() == [[10, 11, 12, 13, 9, 9, 9, 9], PAPER[1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0, 0, 0], [1] * 8]
    assert batch["labels"].tolist() == [[10, 11, 12, 13, -100, -100, -100, -100], PAPER[1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 0, 0, 0], list(range(8))]


@pytest.mark.parametrize("collator", [padding_free_batch, padded_batch])
def test_an_empty_batch_has_one_ignored_token(collator):
    batch = collator([])
    assert batch["input_ids"].shape == (1, 1)
    assert batch["labels"].tolist() == [[-100]]
    assert batch["position_ids"].tolist() == [[0]]


def test_a_broken_example_counts_from_its_cut_and_predicts_nothing_across_it():
    """Example 0 of six tokens is cut after four: what is behind the cut cannot see what is before it."""
    way = get_way("FixedLengthPacking+PosID")
    dataset = [{"input_ids": np.arange(10, 16)}]
    batch = collate(way, ((Piece(0, 0, 4),), (Piece(0, 4, 6),)), dataset)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 11, 12, 13, -100, 15]]
    plain = collate(get_way("FixedLengthPacking"), ((Piece(0, 0, 4),), (Piece(0, 4, 6),)), dataset)
    assert plain["input_ids"].tolist() == [[10, 11, 12, 13], [14, 15, 0, 0]]


def test_a_column_of_one_number_is_no_column_of_tokens():
    examples = [{"input_ids": [5, 6], "score": np.array(0.5), "labels": [1, 2]}]
    assert padding_free_batch(examples)["labels"].tolist() == [[-100, 2]]
