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

from collections import abc
from typing import Any, Dict, NamedTuple

import numpy as np

from pack_data.reading.fields import shown

TOKENS = "input_ids"
# Names of token ids in files without input_ids.
OTHER_TOKENS = ("token_ids", "tokens", "ids")
TEXTS = ("text", "content")
# One number of a record: of its tokens.
LENGTHS = (
    "length",
    "lengths",
    "len",
    "num_tokens",
    "n_tokens",
    "token_count",
    "seq_len",
    "seq_length",
)
# Values for tokens that do not change what the tokens mean.
HARMLESS = ("word_ids", "tags", "ner_tags", "pos_tags", "chunk_tags")

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
    "positions": Meaning(_WHOLE),
    "special_tokens_mask": Meaning(_MASK),
    "token_type_ids": Meaning(_WHOLE),
    "token_weights": Meaning(_WEIGHTS, 1),
    "weights": Meaning(_WEIGHTS, 1),
}
_VALUES = {TOKENS: _IDS, **{name: meaning.values for name, meaning in OF_TOKENS.items()}}
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
ALSO_OF_RECORDS = ("labels", "positions", *DOCUMENTS)
_OF_BERT = (
    "BERT examples and packs are read from TFRecord, not from columns; write them as TFRecord"
)
# Columns that are not read -> the way out.
REFUSED: Dict[str, str] = {
    "segment_ids": "rename it to token_type_ids, or to document_ids if it numbers sequences",
    "masked_lm_positions": _OF_BERT,
    "masked_lm_ids": _OF_BERT,
    "next_sentence_labels": _OF_BERT,
    "next_sentence_positions": _OF_BERT,
    "next_sentence_weights": _OF_BERT,
}


def is_list(values: Any) -> bool:
    """Return True for a list or an array of values, False for one value of a record, such as a text.

    Args:
        values: of a column in a record.
    """
    is_one_value = isinstance(values, (str, bytes, abc.Mapping))
    return hasattr(values, "__len__") and getattr(values, "ndim", 1) > 0 and not is_one_value


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
    meaning = _IDS if are_ids else _VALUES.get(name, _WHOLE)
    kind = given.dtype.kind
    least, most = _RANGES.get(meaning, (-np.inf, np.inf))
    allowed = "iuf" if meaning == _IDS else "iufb"
    array = given
    is_right: Any = True
    if kind not in allowed:
        array = np.zeros(given.shape, np.int64)
        is_right = array > 0
    elif meaning == _WEIGHTS:
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
        value = shown(given.reshape(-1).tolist()[wrong])
        raise ValueError(f"{name} holds {value} at index {wrong}, must hold {meaning}")
    return array
