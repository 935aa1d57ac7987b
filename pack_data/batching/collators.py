"""Examples of different lengths -> the arrays of one batch, for causal models.

An example is a mapping with input_ids and, if they differ from them, labels: integers, equally many. Masks of the loss
apply to the labels (`pack_data.store.trained_labels`). Labels are not shifted; the model does that, as Hugging Face
models do. An example that is a row of several sequences (`pack_data.store.boundaries`) counts as these sequences. All
arrays are int64, except the cumulative lengths, which attention kernels take as int32. A column that a batch does not
have is named once, in a warning.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, Dict, List, Mapping, Optional, Sequence, Union

import numpy as np

from pack_data.reading.fields import said_of, shown, whole_number
from pack_data.store.boundaries import cumulative, positions_of, sequences_in
from pack_data.store.meanings import (
    ALSO_OF_RECORDS,
    OF_SEQUENCES,
    OF_TOKENS,
    REFUSED,
    STATING,
    TOKENS,
    is_list,
    values_of,
)
from pack_data.store.quantities import rounded_up
from pack_data.store.trained_labels import (
    IGNORED,
    LABELS,
    MASKS,
    default_values,
    labels_of,
)

Example = Mapping[str, Union[Sequence[int], np.ndarray]]

_logger = logging.getLogger(__name__)

# Columns that are in a batch, or in its boundaries and labels; the last one matters to masked models' collators only.
_IN_BATCH = frozenset((TOKENS, LABELS, *MASKS, *STATING, "special_tokens_mask"))

# Columns that `sequences_in` does not check.
_BESIDE = frozenset(OF_TOKENS) - STATING


def token_columns(example: Mapping[str, Any], name: str) -> Dict[str, Any]:
    """Return the columns of an example with one value for each token of input_ids.

    The boundaries of a row of several sequences become position_ids that restart, so that they may be cut as well.

    name: of the example, for messages. Labels and masks of the loss that `labels_of` refuses raise ValueError, because
    without them all tokens would be learnt; so do input_ids of several dimensions.
    """
    ids = example["input_ids"]
    labels_of(example, name)
    columns = {}
    left_out = []
    for column, values in example.items():
        if values is None or column in OF_SEQUENCES:
            continue
        if is_list(values) and len(values) == len(ids):
            columns[column] = _checked(column, values, name)
        elif column in _BESIDE and (is_list(values) or column not in ALSO_OF_RECORDS):
            raise ValueError(
                f"{name}: {column} is {shown(values)}, must be {OF_TOKENS[column].values}, one for each of "
                f"{len(ids)} tokens; remove the column"
            )
        else:
            left_out.append(column)
    _warn_left_out(*left_out)
    span, lengths = sequences_in(example, name)
    if len(ids) and not len(lengths):
        raise ValueError(f"{name}: its masks leave no token; remove the example")
    if len(lengths) > 1:
        positions = np.zeros(len(ids), np.int64)
        positions[span] = positions_of(lengths)
        columns["position_ids"] = positions
    return columns


def _checked(column: str, values: Any, name: str) -> Any:
    """Return the values of a column, whole numbers as such; raise ValueError for those that its name excludes."""
    if column in REFUSED:
        raise ValueError(f"{name}: {column} is not read: {REFUSED[column]}")
    if column != TOKENS and column not in OF_TOKENS:
        return values
    given = np.asarray(values)
    with said_of(name):
        checked = values_of(column, given)
    return values if checked is given else checked


def alike(examples: Sequence[Mapping[str, Any]]) -> List[Mapping[str, Any]]:
    """Return the examples with the columns of `OF_TOKENS` in all that one of them has.

    A column that an example lacks has its default there. The labels are those that `labels_of` returns, so that they
    agree with the masks also in a row.
    """
    present = {column for example in examples for column in example if example[column] is not None}
    present &= _BESIDE
    if not present:
        return list(examples)
    completed: List[Mapping[str, Any]] = []
    for example in examples:
        columns = dict(example)
        for column in present:
            if columns.get(column) is None:
                columns[column] = default_values(column, example)
        if LABELS in present:
            columns[LABELS] = labels_of(example, "an example of the row")
        completed.append(columns)
    return completed


@lru_cache(maxsize=None)
def _warn_left_out(*columns: str) -> None:
    """Warn, once in a process, of columns that do not reach the batch."""
    if columns:
        _logger.warning(
            "the columns %s are left out of batches, which have input_ids, labels and positions",
            shown(list(columns)),
        )


def _padding(tokens: int, pad_id: int) -> Dict[str, np.ndarray]:
    return {
        "input_ids": np.full(tokens, pad_id, np.int64),
        LABELS: np.full(tokens, IGNORED, np.int64),
    }


def _columns(examples: Sequence[Example], pad_id: int) -> List[Dict[str, np.ndarray]]:
    """Return input_ids and labels of each sequence; for none, one padding token that is not predicted."""
    columns = []
    for number, example in enumerate(examples):
        name = f"example {number} of the batch"
        labels = labels_of(example, name)
        ids = np.asarray(example[TOKENS], np.int64)
        if not len(ids):
            raise ValueError(f"{name} has 0 input_ids; pass at least 1")
        _warn_left_out(*(column for column in example if column not in _IN_BATCH))
        span, lengths = sequences_in(example, name)
        ends = np.cumsum(lengths)[:-1]
        for _, *part in zip(lengths, np.split(ids[span], ends), np.split(labels[span], ends)):
            columns.append(dict(zip((TOKENS, LABELS), part)))
    return columns or [_padding(1, pad_id)]


def padding_free_batch(
    examples: Sequence[Example],
    *,
    pad_id: int = 0,
    slots: Optional[int] = None,
    multiple_of: int = 1,
    causal: bool = True,
    max_examples: Optional[int] = None,
) -> Dict[str, np.ndarray]:
    """Join all examples in one row, without padding.

    Source: "Enhancing Training Efficiency Using Packing with Flash Attention", section 3.4.

    Args:
        examples: mappings with input_ids and, optionally, labels and masks of the loss.
        pad_id: token id of padding.
        slots: tokens of every row, if all rows must have one shape. Each padding token is an example of its own.
        multiple_of: each example begins at a multiple of it, and the row ends at one. The padding behind an example is
            an example of its own.
        causal: False for masked models, which predict the first token of an example as well.
        max_examples: if cu_seqlens and cu_seqlens_padded must have one shape, their width less 1; the last boundary is
            repeated.

    Returns:
        input_ids, labels, position_ids [1, tokens]; cumulative_lengths int32 [examples + 1], from 0 to tokens; and
        max_length, tokens of the longest example. position_ids begin at 0 in each example. The first label of each
        example is -100, because the token before it belongs to another example. For context parallelism,
        cu_seqlens int32 [examples + 1] adds up the real tokens of the examples, and cu_seqlens_padded says where each
        begins and where the row ends, as Transformer Engine defines them; padding is no example in these.

    Raises:
        ValueError: an example is empty, its labels or masks are refused (`labels_of`), or the examples have more tokens
            than slots.
    """
    columns = _columns(examples, pad_id)
    multiple_of = whole_number("multiple_of", multiple_of, least=1)
    if (slots or 0) % multiple_of:
        raise ValueError(
            f"slots is {slots}, not a multiple of multiple_of = {multiple_of}; pass a multiple of it"
        )
    real = np.array([len(column["input_ids"]) for column in columns])
    if max_examples is not None and len(real) > max_examples:
        raise ValueError(
            f"the row has {len(real)} examples, max_examples is {max_examples}; pass a larger number"
        )
    padded = rounded_up(real, multiple_of)
    tokens = int(padded.sum())
    width = tokens if slots is None else slots
    if tokens > width:
        raise ValueError(
            f"the examples of a row have {tokens} tokens, slots is {slots}; pass a larger number of slots"
        )
    runs = np.stack([real, padded - real], axis=1).ravel()  # tokens and padding in turn
    lengths = np.concatenate([runs[runs > 0], np.ones(width - tokens, np.int64)])
    boundaries = cumulative(lengths)
    begins = np.cumsum(padded) - padded
    places = np.repeat(begins, real) + positions_of(real)
    row = _padding(width, pad_id)
    for name, values in row.items():
        values[places] = np.concatenate([column[name] for column in columns])
    if causal:
        row["labels"][boundaries[:-1]] = IGNORED

    padded_boundaries = cumulative(padded)
    padded_boundaries[-1] = width
    unused = (0, 0 if max_examples is None else max_examples - len(real))
    return {
        "input_ids": row["input_ids"][None],
        "labels": row["labels"][None],
        "position_ids": positions_of(lengths)[None],
        "cumulative_lengths": boundaries,
        "cu_seqlens": np.pad(cumulative(real), unused, "edge"),
        "cu_seqlens_padded": np.pad(padded_boundaries, unused, "edge"),
        "max_length": np.asarray(lengths.max()),
    }


def padded_batch(
    examples: Sequence[Example], *, pad_id: int = 0, multiple_of: int = 1
) -> Dict[str, np.ndarray]:
    """Pad each example on the right to the longest, one row for each.

    Args:
        examples: mappings with input_ids and, optionally, labels and masks of the loss.
        pad_id: token id of padding.
        multiple_of: the row length is rounded up to a multiple of it.

    Returns:
        input_ids, attention_mask, labels, position_ids [rows, longest]. Padding has label -100 and position 0. A batch
        without examples has one token with attention_mask 1, as some kernels return NaN for a row of zeros.

    Raises:
        ValueError: an example is empty, or its labels or masks are refused (`labels_of`).
    """
    columns = _columns(examples, pad_id)
    multiple_of = whole_number("multiple_of", multiple_of, least=1)
    lengths = np.array([len(column["input_ids"]) for column in columns])
    longest = int(rounded_up(lengths, multiple_of).max())
    positions = np.arange(longest)
    is_token = positions < lengths[:, None]
    batch = {
        "input_ids": np.full(is_token.shape, pad_id, np.int64),
        "attention_mask": is_token.astype(np.int64),
        "labels": np.full(is_token.shape, IGNORED, np.int64),
        "position_ids": np.where(is_token, positions, 0),
    }
    for name in ("input_ids", "labels"):
        batch[name][is_token] = np.concatenate([column[name] for column in columns])
    return batch
