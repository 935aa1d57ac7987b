"""The columns of packed Parquet for causal models, as Megatron-Bridge and Nemotron read them: one row a pack.

input_ids     list<int32>, the tokens of all sequences, one after another, without padding
loss_mask     list<int32>, 1 where a token is predicted
seq_start_id  list<int32>, where each sequence begins: 0, and then ascending
"""

from __future__ import annotations

from typing import Dict, Iterable, Iterator, List, Mapping

import numpy as np

from pack_data.formats.records import Record, RecordError, checked_token_pack, integers

TOKENS, MASK, STARTS = "input_ids", "loss_mask", "seq_start_id"


def with_numbers(row: Mapping[str, np.ndarray]) -> Dict[str, np.ndarray]:
    """A row with input_mask and positions in place of seq_start_id. RecordError where that is no order of starts."""
    starts, slots = integers(STARTS, row[STARTS]), len(row[TOKENS])
    ends = np.append(starts[1:], slots)
    if not len(starts) or starts[0] != 0 or (ends <= starts).any():
        raise RecordError(
            f"{STARTS} does not begin with 0 and ascend below the {slots} values of {TOKENS}: each sequence has a token"
        )
    lengths = ends - starts
    numbers = np.repeat(np.arange(1, len(starts) + 1, dtype=np.int32), lengths)
    positions = np.arange(slots, dtype=np.int32) - np.repeat(starts, lengths).astype(np.int32)
    return {
        **{name: values for name, values in row.items() if name != STARTS},
        "input_mask": numbers,
        "positions": positions,
    }


def _row(sequences: List[Dict[str, np.ndarray]]) -> Dict[str, np.ndarray]:
    lengths = [len(sequence[TOKENS]) for sequence in sequences]
    masks = [sequence.get(MASK, np.ones(len(sequence[TOKENS]), np.int32)) for sequence in sequences]
    return {
        TOKENS: np.concatenate([sequence[TOKENS] for sequence in sequences]).astype(np.int32),
        MASK: np.concatenate(masks).astype(np.int32),
        STARTS: (np.cumsum(lengths) - lengths).astype(np.int32),
    }


def with_starts(packs: Iterable[Record]) -> Iterator[Record]:
    """Packs of token sequences as these rows. Without a loss_mask each token is predicted.

    ValueError for a pack without input_ids, or with a column that these rows have no place for.
    """
    for record in packs:
        sequences = checked_token_pack(record.value)[1]
        other = sorted(set(sequences[0]) - {TOKENS, MASK})
        if other or TOKENS not in sequences[0]:
            raise ValueError(
                f"{record.origin}: columns {', '.join(sequences[0])}; packed Parquet holds {TOKENS} and {MASK}: build "
                f"the data set with --columns {TOKENS},{MASK}, or write --to-format parquet"
            )
        yield Record(record.origin, _row(sequences))
