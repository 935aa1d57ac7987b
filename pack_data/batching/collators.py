"""Examples of different lengths -> the arrays of one batch, for causal models.

An example is a mapping with input_ids and, where they differ from them, labels: integers, equally many.  Labels are not
shifted; the model does that, as Hugging Face models do.  All arrays are int64, except the cumulative lengths, which
attention kernels take as int32.
"""

from __future__ import annotations

from collections import abc
from typing import Any, Dict, List, Mapping, Optional, Sequence, Union

import numpy as np

from pack_data.batching.plans import Batch, Way
from pack_data.reading.fields import whole_number
from pack_data.store.sequences import rounded_up

Example = Mapping[str, Union[Sequence[int], np.ndarray]]


_IGNORED = -100  # the label of a token that is not predicted
_NO_VALUES = (str, bytes, abc.Mapping)  # have a length, and no values for tokens


def token_columns(example: Mapping[str, Any], name: str) -> Dict[str, Any]:
    """The columns of an example with one value for each token of input_ids.

    Raises ValueError for tokens in several dimensions, and for labels or a loss_mask of another length: left out in
    silence, all tokens would be learnt.
    """
    ids = example["input_ids"]
    if getattr(ids, "ndim", 1) != 1 or len(ids) and np.ndim(ids[0]):
        raise ValueError(f"{name}: input_ids has the shape {np.shape(ids)}; give one dimension")
    found = {}
    for column, values in example.items():
        listed = hasattr(values, "__len__") and getattr(values, "ndim", 1) > 0 and not isinstance(values, _NO_VALUES)
        if listed and len(values) == len(ids):
            found[column] = values
        elif listed and column in ("labels", "loss_mask"):
            raise ValueError(f"{name} has {len(ids)} input_ids and {len(values)} {column}; give one for each token")
    return found


def alike(parts: Sequence[Mapping[str, Any]]) -> List[Mapping[str, Any]]:
    """The examples, or rows, with labels and a loss_mask in all where one has them: what has none learns its tokens."""
    found = list(parts)
    for column, of in (("labels", np.asarray), ("loss_mask", np.ones_like)):
        if any(column in part for part in found):
            found = [part if column in part else {**part, column: of(part["input_ids"])} for part in found]
    return found


def _padding(tokens: int, pad_id: int) -> Dict[str, np.ndarray]:
    return {"input_ids": np.full(tokens, pad_id, np.int64), "labels": np.full(tokens, _IGNORED, np.int64)}


def _columns(examples: Sequence[Example], pad_id: int) -> List[Dict[str, np.ndarray]]:
    """input_ids and labels of each example; without any example, one padding token that is not predicted.

    Raises ValueError for an empty example, and for labels of another length.
    """
    columns = []
    for number, example in enumerate(examples):
        ids = np.asarray(example["input_ids"], np.int64)
        labels = np.asarray(example.get("labels", ids), np.int64)
        if ids.ndim != 1 or not len(ids) or len(labels) != len(ids):
            raise ValueError(
                f"example {number} of the batch has {len(ids)} input_ids and {len(labels)} labels; "
                "must be equally many, in one dimension, and at least 1"
            )
        columns.append({"input_ids": ids, "labels": labels})
    return columns or [_padding(1, pad_id)]


def padding_free_batch(
    examples: Sequence[Example],
    *,
    pad_id: int = 0,
    slots: Optional[int] = None,
    multiple_of: int = 1,
    causal: bool = True,
) -> Dict[str, np.ndarray]:
    """All examples in one row, without padding.  ("Enhancing Training Efficiency Using Packing ...", section 3.4.)

    input_ids, labels, position_ids [1, tokens]; cumulative_lengths int32 [examples + 1], from 0 to tokens; max_length,
    tokens of the longest example.  position_ids begin at 0 in each example.  The first label of each example is
    -100, because the token before it belongs to another example; not so with causal=False, for masked models.
    slots: tokens of every row, where all rows must have one shape.  Each padding token is an example of its own.
    Raises ValueError where the examples have more tokens.
    multiple_of: each example begins at a multiple of it, and the row ends at one.  The padding behind an example is an
    example of its own.
    """
    columns, multiple_of = _columns(examples, pad_id), whole_number("multiple_of", multiple_of, least=1)
    if multiple_of > 1:
        if (slots or 0) % multiple_of:
            raise ValueError(f"slots is {slots}, which is no multiple of {multiple_of} = multiple_of; choose another")
        gaps = [-len(column["input_ids"]) % multiple_of for column in columns]
        pairs = [[column, _padding(gap, pad_id)] for column, gap in zip(columns, gaps)]
        columns = [column for pair in pairs for column in pair if len(column["input_ids"])]
    if slots is not None:
        missing = slots - sum(len(column["input_ids"]) for column in columns)
        if missing < 0:
            raise ValueError(f"the examples of a row have {slots - missing} tokens, slots is {slots}; make it larger")
        columns += _columns([], pad_id) * missing
    lengths = np.array([len(column["input_ids"]) for column in columns])
    ends = np.cumsum(lengths)
    labels = np.concatenate([column["labels"] for column in columns])
    if causal:
        labels[ends - lengths] = _IGNORED
    return {
        "input_ids": np.concatenate([column["input_ids"] for column in columns])[None],
        "labels": labels[None],
        "position_ids": (np.arange(ends[-1]) - np.repeat(ends - lengths, lengths))[None],
        "cumulative_lengths": np.concatenate([[0], ends]).astype(np.int32),
        "max_length": np.asarray(lengths.max()),
    }


def padded_batch(examples: Sequence[Example], *, pad_id: int = 0, multiple_of: int = 1) -> Dict[str, np.ndarray]:
    """One row an example, padded on the right to the longest, rounded up to a multiple of `multiple_of`.

    input_ids, attention_mask, labels, position_ids [rows, longest].  Padding has label -100 and position 0.
    A batch without examples has one token with attention_mask 1, as some kernels return NaN for a row of zeros.
    """
    columns, multiple_of = _columns(examples, pad_id), whole_number("multiple_of", multiple_of, least=1)
    lengths = np.array([len(column["input_ids"]) for column in columns])
    longest = int(rounded_up(lengths, multiple_of).max())
    real = np.arange(longest) < lengths[:, None]
    batch = {
        "input_ids": np.full(real.shape, pad_id, np.int64),
        "attention_mask": real.astype(np.int64),
        "labels": np.full(real.shape, _IGNORED, np.int64),
        "position_ids": np.where(real, np.arange(longest), 0),
    }
    for name in ("input_ids", "labels"):
        batch[name][real] = np.concatenate([column[name] for column in columns])
    return batch


def collate(way: Way, batch: Batch, dataset: Sequence[Example], pad_id: int = 0) -> Dict[str, np.ndarray]:
    """The arrays of one batch of a plan.

    A padded row of several pieces is one text to the model: nothing tells the pieces apart.
    """
    rows = [
        [{name: values[piece.start : piece.stop] for name, values in dataset[piece.example].items()} for piece in row]
        for row in batch
    ]
    if way.padding_free:
        pieces = [piece for row in rows for piece in row]
        return padding_free_batch(pieces, pad_id=pad_id)
    texts = [{name: np.concatenate([piece[name] for piece in row]) for name in row[0]} for row in rows]
    return padded_batch(texts, pad_id=pad_id)
