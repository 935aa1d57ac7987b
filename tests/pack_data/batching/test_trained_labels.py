"""Labels trained = labels wanted, on every way from examples with masks of the loss to a batch."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pack_data import pack_dataset
from pack_data.batching.collators import _warn_left_out, padded_batch, padding_free_batch
from pack_data.batching.plans import BatchOptions
from pack_data.batching.sampler import IndexBatchSampler
from pack_data.store.trained_labels import labels_of
from pack_data.stream.rows import PackRows, packed_rows
from tests.refusals import refused

S = 12
MASKS = ("loss_mask", "completion_mask", "assistant_masks")
TYPES = (bool, np.int8, np.uint8, int, np.float32, float)


@st.composite
def examples_with_masks(draw):
    """Examples of different tokens, with any masks and labels that agree, and the tokens that are wanted."""
    examples = []
    wanted = set()
    for number in range(draw(st.integers(1, 6))):
        ids = 100 * (number + 1) + np.arange(draw(st.integers(1, S)))
        bits = st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)).map(np.array)
        example = {"input_ids": ids}
        trained = np.ones(len(ids), bool)
        for name in ("completion_mask", "assistant_masks", "loss_mask"):
            if draw(st.booleans()):
                mask = draw(bits)
                mask = mask & trained if name == "loss_mask" else mask
                trained = trained & mask
                example[name] = mask.astype(draw(st.sampled_from(TYPES)))
        stated = draw(st.sampled_from(["none", "copy", "own"]))
        if stated != "none":
            trained = trained & draw(bits) if stated == "own" else trained
            labels = np.where(trained, ids, -100) if stated == "own" else ids
            example["labels"] = labels.astype(draw(st.sampled_from([np.int32, float])))
        if draw(st.booleans()):
            example = {name: values.tolist() for name, values in example.items()}
        examples.append(example)
        wanted.update(ids[trained].tolist())
    return examples, wanted


def ways(examples):
    """The batches of each way."""
    yield padded_batch(examples)
    yield padding_free_batch(examples, causal=False)
    for multiple_of in (1, 4):
        yield padding_free_batch(examples, multiple_of=multiple_of)
        rows = pack_dataset(examples, max_sequence_length=S, multiple_of=multiple_of, longer="split")
        yield rows.collate([rows[number] for number in range(len(rows))])
        yield padding_free_batch(list(packed_rows(examples, S, multiple_of=multiple_of)))
        names = sorted(set().union(*examples))
        columns = {name: [example.get(name) for example in examples] for name in names}
        table = PackRows(S, multiple_of=multiple_of)(columns)
        yield padding_free_batch([dict(zip(table, values)) for values in zip(*table.values())])
    sampler = IndexBatchSampler(
        "OptimalPacking+PosID",
        [len(example["input_ids"]) for example in examples],
        BatchOptions(1, S),
    )
    view = sampler.view(examples)
    yield padding_free_batch([view[number] for batch in sampler for number in batch])


@settings(max_examples=40, deadline=None)
@given(examples_with_masks())
def test_labels_trained_are_labels_wanted(given):
    """A causal padding-free row leaves out the first token of each example."""
    examples, wanted = given
    firsts = {int(example["input_ids"][0]) for example in examples}
    for number, batch in enumerate(ways(examples)):
        trained = batch["labels"][batch["labels"] != -100].tolist()
        assert len(trained) == len(set(trained))
        assert set(trained) == (wanted if number < 2 else wanted - firsts), number


def test_the_stream_and_the_collator_of_a_model_apply_masks():
    pytest.importorskip("torch")
    from padding_free import PackedStream, PaddingFreeCollator

    collate = PaddingFreeCollator(
        SimpleNamespace(config=SimpleNamespace(_attn_implementation="padding_free"), modules=list)
    )
    examples = [{"input_ids": [1, 2, 3, 4], name: [0, 0, 1, 1]} for name in MASKS]
    (inputs,) = PackedStream(examples, S, collate=collate)
    assert inputs["labels"].tolist() == [[-100, -100, 3, 4] * 3]


REFUSED = [
    ({"completion_mask": [1]}, "completion_mask"),
    ({"assistant_masks": [0, 1, 2]}, "assistant_masks", "2", "0 and 1"),
    ({"loss_mask": [0.5, 1.0, 1.0]}, "loss_mask", "0.5"),
    ({"loss_mask": [float("nan"), 1.0, 1.0]}, "loss_mask", "nan"),
    ({"completion_mask": ["0", "1", "1"]}, "completion_mask", "'0'"),
    ({"completion_mask": [[0, 1, 1]]}, "completion_mask", r"\(1, 3\)"),
    ({"labels": [5.0, 6.0, 6.5]}, "labels", "6.5", "whole"),
    ({"labels": [-100, 6, 7], "completion_mask": [0, 0, 1]}, "labels", "token 1"),
    ({"loss_mask": [0, 1, 1], "assistant_masks": [0, 0, 1]}, "loss_mask", "token 1"),
]


@pytest.mark.parametrize("columns, names", [(row[0], row[1:]) for row in REFUSED], ids=lambda value: str(value))
def test_what_contradicts_is_refused(columns, names):
    example = {"input_ids": [5, 6, 7], **columns}
    for way in (
        lambda: padding_free_batch([example]),
        lambda: padded_batch([example]),
        lambda: pack_dataset([example], max_sequence_length=4)[0],
        lambda: list(packed_rows([example], 4)),
    ):
        with refused("example 0", *names):
            way()


def test_columns_that_no_batch_has_are_named_once(caplog):
    _warn_left_out.cache_clear()
    example = {"input_ids": [5, 6], "loss_weights": [0.5, 1.0], "score_of_text": 3.0}
    for _ in range(2):
        padding_free_batch([example])
        rows = pack_dataset([example], max_sequence_length=4)
        rows.collate([rows[0]])
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    assert all("score_of_text" in record.getMessage() for record in caplog.records[:2])
    assert "loss_weights" in caplog.records[2].getMessage()


def test_masks_of_labels_are_not_changed_in_place():
    labels = np.array([5, 6, 7])
    mask = np.array([0, 1, 1])
    assert labels_of({"input_ids": labels, "labels": labels, "loss_mask": mask}, "x").tolist() == [
        -100,
        6,
        7,
    ]
    assert labels.tolist() == [5, 6, 7]
    assert mask.tolist() == [0, 1, 1]
