"""Boundaries of the sequences in a row, derived from their lengths.

An example may be a row of several sequences already. Its boundaries are then seq_lengths, seq_start_id, cu_seq_lens_q,
cu_seq_lens_k, position_ids that restart, document_ids that change, or an input_mask that numbers the sequences; if it
has several of them, they must agree. Tokens with an attention_mask of 0 at the ends of an example are padding. Every
reader of files and of data sets divides its records here.
"""

from __future__ import annotations

from typing import Any, Mapping, Tuple

import numpy as np

from pack_data.reading.fields import said_of, shown
from pack_data.store.meanings import (
    ALSO_OF_RECORDS,
    DOCUMENTS,
    ENDS,
    MASKS,
    NUMBERED_MASKS,
    OF_SEQUENCES,
    POSITIONS,
    STARTS,
    STATING,
    TOKENS,
    is_list,
    values_of,
)


def cumulative(lengths: np.ndarray) -> np.ndarray:
    """Return the boundaries 0, ..., total of sequences of these lengths, int32 [sequences + 1]."""
    return np.append(0, np.cumsum(lengths)).astype(np.int32)


def positions_of(lengths: np.ndarray) -> np.ndarray:
    """Return the positions of the tokens, which begin at 0 in each sequence, int64 [tokens]."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(np.sum(lengths)) - np.repeat(starts, lengths)


def sequences_in(example: Mapping[str, Any], name: str) -> Tuple[slice, np.ndarray]:
    """Find the sequences in an example.

    Args:
        example: a mapping with input_ids and any columns of boundaries.
        name: of the example, for messages.

    Returns:
        The real tokens, and the lengths of the sequences in them, int64, each at least 1. A plain example is one
        sequence.

    Raises:
        ValueError: the boundaries contradict each other or the tokens, the attention mask has a 0 between ones, or
            positions have several axes (M-RoPE).
    """
    tokens = len(example[TOKENS])
    columns = {}
    for column in STATING.intersection(example):
        values = example[column]
        is_number_of_record = column in ALSO_OF_RECORDS and not is_list(values)
        if values is not None and not is_number_of_record:
            with said_of(name):
                columns[column] = values_of(column, values).astype(np.int64)
    if not columns:
        return slice(0, tokens), np.array([tokens] if tokens else [], np.int64)

    span = _span_of(columns, tokens, name)
    lengths = _between([span.start, span.stop])
    first_column = ""
    for column in (*OF_SEQUENCES, *POSITIONS, *DOCUMENTS, *NUMBERED_MASKS):
        if column not in columns:
            continue
        if column in NUMBERED_MASKS and columns[column].max(initial=0) < 2:
            continue
        title = f"{name}: {column}"
        stated = _stated(column, columns[column], title, tokens, span)
        if first_column and not np.array_equal(stated, lengths):
            raise ValueError(
                f"{title} states sequences of {shown(stated.tolist())} tokens, and {first_column} of "
                f"{shown(lengths.tolist())}; pass only the right one"
            )
        first_column = first_column or column
        lengths = stated
    return span, lengths


def _span_of(columns: Mapping[str, np.ndarray], tokens: int, name: str) -> slice:
    """Return the real tokens.  Raises ValueError if two masks differ."""
    spans = []
    for column in MASKS:
        if column in columns:
            spans.append(_real_tokens(columns[column], f"{name}: {column}", tokens))
    if len(spans) > 1 and spans[0] != spans[1]:
        raise ValueError(f"{name}: {' and '.join(MASKS)} differ; pass only the right one")
    return spans[0] if spans else slice(0, tokens)


def _stated(column: str, values: np.ndarray, title: str, tokens: int, span: slice) -> np.ndarray:
    """Return the lengths of the sequences that a column states."""
    if column in POSITIONS:
        return _between_restarts(values, title, tokens, span)
    if column in ENDS:
        ends = values
    elif column == STARTS:
        ends = _ends_of(values, title, tokens)
    elif column in OF_SEQUENCES:
        ends = np.cumsum(values)
    else:
        ends = np.append(np.flatnonzero(np.diff(values)) + 1, len(values))
    return _between_ends(ends, title, tokens, span)


def _ends_of(starts: np.ndarray, title: str, tokens: int) -> np.ndarray:
    """Return where sequences end that begin at `starts`; each must have a token."""
    ends = np.append(starts[1:], tokens)
    if starts[:1].tolist() != [0] or (ends <= starts).any():
        raise ValueError(
            f"{title} must begin with 0 and ascend below {tokens}, the number of tokens; write the starts again"
        )
    return ends


def _between(bounds: Any) -> np.ndarray:
    """Return the lengths between rising bounds, without empty ones."""
    lengths = np.diff(np.asarray(bounds, np.int64))
    return lengths[lengths > 0]


def _real_tokens(mask: Any, title: str, tokens: int) -> slice:
    """Return the tokens between the zeros at the ends of a mask."""
    real = np.flatnonzero(mask)
    span = slice(0, 0)
    if len(real):
        span = slice(int(real[0]), int(real[-1]) + 1)
    if np.shape(mask) != (tokens,) or span.stop - span.start != len(real):
        raise ValueError(
            f"{title} of the shape {np.shape(mask)} must have a value for each of {tokens} tokens, and zeros only at "
            "the ends; leave other tokens out of the loss by the label -100"
        )
    return span


def _between_ends(ends: np.ndarray, title: str, tokens: int, span: slice) -> np.ndarray:
    """Return the lengths of sequences that end at `ends`, without padding."""
    bounds = np.append(0, ends)
    if (np.diff(bounds) < 0).any() or bounds[-1] not in (tokens, span.stop - span.start):
        raise ValueError(
            f"{title}: sequences that end at {shown(ends.tolist())}, but the example has {tokens} tokens; pass "
            "boundaries that rise to this number"
        )
    if bounds[-1] == tokens:
        bounds = bounds.clip(span.start, span.stop)
    return _between(bounds)


def _between_restarts(positions: np.ndarray, title: str, tokens: int, span: slice) -> np.ndarray:
    """Return the lengths of sequences whose positions begin at one number; the first may have lost its begin."""
    if positions.shape != (tokens,):
        raise ValueError(
            f"{title} of the shape {positions.shape} does not show the sequences in {tokens} tokens; pass one position "
            "for each token, or only seq_lengths"
        )
    row = positions[span]
    restarts = np.flatnonzero(np.diff(row) != 1) + 1
    begins = row[restarts]
    is_wrong = (begins != begins[:1]) | (begins > row[:1])
    if is_wrong.any():
        token = int(restarts[is_wrong.argmax()])
        before = row[token - 1]
        raise ValueError(
            f"{title} goes from {before} to {row[token]} at token {token}; let positions rise by 1, and begin at the "
            "same number in each sequence"
        )
    return _between([0, *restarts, len(row)])
