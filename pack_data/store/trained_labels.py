"""The labels that an example trains, from its labels and its masks of the loss.

    labels_of({"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]}, "example 0")  # [-100, 6, 7]

completion_mask and assistant_masks apply together, as in TRL: a token is trained if both are 1. A loss_mask and labels
may leave out more tokens, but must not train a token that a mask leaves out. Labels that equal input_ids leave out
nothing, so the masks apply to them.
"""

from __future__ import annotations

from typing import Any, Mapping

import numpy as np

from pack_data.reading.fields import said_of
from pack_data.store.meanings import OF_TOKENS, POSITIONS, TOKENS, is_list, values_of

LABELS = "labels"
IGNORED = -100  # the label of a token that is not predicted
LOSS_MASK = "loss_mask"
# Masks of the loss: whole numbers, 1 where a token is predicted.
MASKS = (LOSS_MASK, "completion_mask", "assistant_masks")


def states_labels(example: Mapping[str, Any]) -> bool:
    """Return True if an example has labels or a mask of the loss; without them all its tokens are trained.

    One label is the class of the whole example.
    """
    return is_list(example.get(LABELS)) or any(example.get(mask) is not None for mask in MASKS)


def labels_of(example: Mapping[str, Any], name: str) -> np.ndarray:
    """Return the label of each token, int64 [tokens], -100 where a token is not predicted.

    Args:
        example: a mapping with input_ids and, optionally, labels and masks of the loss; None counts as absent.
        name: the name of the example, for messages.

    Raises:
        ValueError: labels or masks are not one whole number for each token, a mask has other values than 0 and 1, or
            they contradict each other.
    """
    ids = _of_tokens(example, TOKENS, name)
    labels = ids
    if is_list(example.get(LABELS)):
        labels = _of_tokens(example, LABELS, name)
    trained = np.ones(len(ids), bool)
    for column in reversed(MASKS):
        if example.get(column) is None:
            continue
        mask = _of_tokens(example, column, name)
        is_predicted = mask == 1
        if column == LOSS_MASK:
            _refuse_contradiction(is_predicted & ~trained, f"{name}: {column}")
        trained &= is_predicted

    if not np.array_equal(labels, ids):
        _refuse_contradiction((labels != IGNORED) & ~trained, f"{name}: {LABELS}")
    return labels if trained.all() else np.where(trained, labels, IGNORED)


def default_values(column: str, example: Mapping[str, Any]) -> np.ndarray:
    """Return the values of a column that an example lacks, one for each token.

    Args:
        column: a name of `OF_TOKENS`.
        example: a mapping with input_ids; None counts as absent.

    Raises:
        ValueError: labels or masks are refused (`labels_of`).
    """
    tokens = len(example[TOKENS])
    if column in POSITIONS:
        return np.arange(tokens)
    if column in (LABELS, LOSS_MASK):
        labels = labels_of(example, "an example")
        return labels if column == LABELS else (labels != IGNORED).astype(np.int64)
    return np.full(tokens, OF_TOKENS[column].default)


def _of_tokens(example: Mapping[str, Any], column: str, name: str) -> np.ndarray:
    """Return a column as one whole number for each token, int64 [tokens]."""
    tokens = len(example[TOKENS])
    with said_of(name):
        values = np.asarray(example[column])
        if values.shape != (tokens,):
            raise ValueError(
                f"{tokens} {TOKENS} and {column} of the shape {values.shape}; pass one value for each token"
            )
        return values_of(column, values).astype(np.int64)


def _refuse_contradiction(is_wrong: np.ndarray, title: str) -> None:
    """Raise ValueError if the column `title` trains a token that a mask leaves out."""
    if is_wrong.any():
        raise ValueError(
            f"{title} trains token {int(is_wrong.argmax())}, which a mask of the loss leaves out; remove the column "
            "that is wrong"
        )
