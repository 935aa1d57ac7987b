"""Columns with a value for each token that tokenizers and trainers write beside the tokens, and what they hold.

A column of this table changes what the tokens mean, or which of them are learnt. Every reader of files, of a
`datasets.Dataset` and of a list takes its values through `companion_values`, so that they mean the same in all of them,
or are refused. Such a column is never ignored because of the type of its values.
"""

from __future__ import annotations

from typing import Any, Dict

import numpy as np

from pack_data.reading.fields import shown

TOKENS = "input_ids"
_WHOLE = "whole numbers"
_MASK = "0 and 1"
_WEIGHTS = "numbers"
COMPANIONS: Dict[str, str] = {
    "attention_mask": _MASK,
    "assistant_masks": _MASK,
    "completion_mask": _MASK,
    "document_ids": _WHOLE,
    "labels": _WHOLE,
    "loss_mask": _MASK,
    "loss_weights": _WEIGHTS,
    "position_ids": _WHOLE,
    "special_tokens_mask": _MASK,
    "token_type_ids": _WHOLE,
    "token_weights": _WEIGHTS,
    "weights": _WEIGHTS,
}


def companion_values(name: str, values: Any) -> np.ndarray:
    """Return the values of a column, one for each token.

    Args:
        name: the name of the column; a column that is not in `COMPANIONS` holds whole numbers.
        values: [tokens]: integers, true and false, or floating-point numbers.

    Returns:
        Whole numbers as integers, of their type or else int64; weights as floating-point numbers.

    Raises:
        ValueError: a value does not have the meaning of the column.
    """
    given = np.asarray(values)
    meaning = COMPANIONS.get(name, _WHOLE)
    kind = given.dtype.kind
    array = given
    if kind not in "iufb" and given.size:
        raise ValueError(f"{name} holds {shown(given.flat[0])}, must hold {meaning}")
    if kind != ("f" if meaning == _WEIGHTS else "i"):
        # A number that is not whole, too large or NaN does not come back from the conversion.
        with np.errstate(invalid="ignore"):
            array = given.astype(np.float64 if meaning == _WEIGHTS else np.int64)
    is_right = np.isfinite(array) & (array == given)
    if meaning == _MASK:
        is_right &= (array == 0) | (array == 1)
    if not is_right.all():
        raise ValueError(f"{name} holds {given.flat[int(is_right.argmin())]}, must hold {meaning}")
    return given if kind in "iu" and meaning != _WEIGHTS else array
