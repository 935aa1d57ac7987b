"""The table of meanings: what a column of texts or tokens holds, by its name, and which values are read.

Every reader of a file, of a `datasets.Dataset` and of a list takes its values through `values_of`, so that they mean
the same in all of them, or are refused. A column of this table changes what the tokens mean, or which of them are
learnt. It is never ignored because of the type of its values. No column is read because it is the only one of its type.

A list of any kind (plain, large, of a fixed size, a view) may hold the values, also with a dictionary:

| values | integers of any width | true and false | floating-point numbers |
| --- | --- | --- | --- |
| token ids | 0 to 2^31 - 1 | refused | whole ones |
| whole numbers | 32 bits | read | whole ones |
| 0 and 1 | 0 and 1 | read | 0 and 1 |
| numbers | read | read | finite ones |
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, NamedTuple

import numpy as np

from pack_data.reading.fields import shown

TOKENS = "input_ids"
# Names of token ids in files without input_ids.
OTHER_TOKENS = ("token_ids", "tokens", "ids")
TEXTS = ("text", "content")
LENGTHS = ("length", "lengths")

_IDS = f"token ids, 0 to {2**31 - 1}"
_WHOLE = "whole numbers of 32 bits"
_MASK = "0 and 1"
_WEIGHTS = "numbers"
_RANGES = {_IDS: (0, 2**31 - 1), _WHOLE: (-(2**31), 2**31 - 1), _MASK: (0, 1)}


class Meaning(NamedTuple):
    """The values that a column may hold, and the value of each token in a record whose column is null."""

    values: str
    default: float = 0


# Columns with a value for each token.
OF_TOKENS: Dict[str, Meaning] = {
    "attention_mask": Meaning(_MASK, 1),
    "assistant_masks": Meaning(_MASK, 1),
    "completion_mask": Meaning(_MASK, 1),
    "doc_ids": Meaning(_WHOLE),
    "document_ids": Meaning(_WHOLE),
    "input_mask": Meaning(_WHOLE, 1),
    "labels": Meaning(_WHOLE),  # in place of the default: the tokens
    "loss_mask": Meaning(_MASK, 1),
    "loss_weights": Meaning(_WEIGHTS, 1),
    "position_ids": Meaning(_WHOLE),
    "special_tokens_mask": Meaning(_MASK),
    "token_type_ids": Meaning(_WHOLE),
    "token_weights": Meaning(_WEIGHTS, 1),
    "weights": Meaning(_WEIGHTS, 1),
}
ENDS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")
# Columns with a value for each sequence of a record.
STARTS = "seq_start_id"
OF_SEQUENCES = ("seq_lengths", *ENDS, STARTS)
POSITIONS = ("position_ids", "positions")  # the second is that of a `PackDataset`
DOCUMENTS = ("document_ids", "doc_ids")
MASKS = ("attention_mask", "input_mask")
NUMBERED_MASKS = ("input_mask",)  # they may have the number of the sequence, from 1, in place of 1
# Columns that tell where sequences begin and end.
STATING = frozenset((*OF_SEQUENCES, *POSITIONS, *DOCUMENTS, *MASKS))
# One value for the whole record under these names is a class or a number of the record.
ALSO_OF_RECORDS = ("labels", *DOCUMENTS)
# Columns that may be token types or numbers of packed sequences, which nobody can tell apart.
UNCLEAR = {"segment_ids": "rename it to token_type_ids, or to document_ids if it numbers sequences"}


def is_list(values: Any) -> bool:
    """Return True for a list or an array of values, False for one value of a record.

    Args:
        values: of a column in a record.
    """
    return hasattr(values, "__len__") and getattr(values, "ndim", 1) > 0


def values_of(name: str, values: Any, *, are_ids: bool = False) -> np.ndarray:
    """Return the values of a column, one for each token.

    Args:
        name: the name of the column; a column that is not in the table holds whole numbers.
        values: [tokens]: integers, true and false, or floating-point numbers.
        are_ids: True for token ids under another name than input_ids.

    Returns:
        Whole numbers as integers, of their type or else int64; weights as floating-point numbers.

    Raises:
        ValueError: a value does not have the meaning of the column.
    """
    given = np.asarray(values)
    meaning = _meaning_of(name, are_ids)
    kind = given.dtype.kind
    least, most = _RANGES.get(meaning, (-np.inf, np.inf))
    allowed = "iuf" if meaning == _IDS else "iufb"
    if kind not in allowed and given.size:
        first = shown(given.reshape(-1)[:1].tolist()[0])
        raise ValueError(f"{name} holds {first} at index 0, must hold {meaning}")
    array = given
    is_right: Any = True
    if meaning == _WEIGHTS:
        array = given.astype(np.float64)
        is_right = np.isfinite(array)
    elif kind not in "iu":
        # A number that is not whole, too large or NaN does not come back from the conversion.
        with np.errstate(invalid="ignore"):
            array = given.astype(np.int64)
        is_right = array == given
    if array.size and (array.min() < least or array.max() > most):
        is_right = is_right & (array >= least) & (array <= most)
    if not np.all(is_right):
        wrong = int(np.argmin(is_right))
        raise ValueError(f"{name} holds {given.flat[wrong]} at index {wrong}, must hold {meaning}")
    return array


def _meaning_of(name: str, are_ids: bool) -> str:
    if are_ids or name == TOKENS:
        return _IDS
    return OF_TOKENS[name].values if name in OF_TOKENS else _WHOLE


def default_values(name: str, columns: Mapping[str, Any]) -> np.ndarray:
    """Return the values of a column that is null in a record.

    Args:
        name: a column of `OF_TOKENS`.
        columns: the other columns of the record; a column that is null is None.
    """
    ids = np.asarray(columns[TOKENS])
    if name == "labels":
        return ids
    if name == "position_ids":
        return np.arange(len(ids))
    meaning = OF_TOKENS[name]
    values = np.full(len(ids), meaning.default, float if meaning.values == _WEIGHTS else np.int64)
    if name == "loss_mask":
        # It must not train a token that another mask leaves out.
        for mask in ("completion_mask", "assistant_masks"):
            if columns.get(mask) is not None:
                values = values * np.asarray(columns[mask]).astype(np.int64)
    return values
