"""The batch of a plan for any way of making batches."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

import numpy as np

from pack_data.batching.collators import Example, padded_batch, padding_free_batch, token_columns
from pack_data.batching.plans import Batch, Way


def collate(
    way: Way,
    batch: Batch,
    dataset: Sequence[Example],
    pad_id: int = 0,
) -> Dict[str, np.ndarray]:
    """Return the arrays of one batch of a plan.

    A padded row of several pieces is one text to the model: nothing tells the pieces apart.
    """
    texts: List[Dict[str, Any]] = []
    for row in batch:
        pieces = []
        for number, start, stop in row:
            columns = token_columns(dataset[number], f"example {number}")
            pieces.append({name: values[start:stop] for name, values in columns.items()})
        if way.padding_free:
            texts += pieces
            continue
        text: Dict[str, Any] = {}
        for name in ("input_ids", "labels"):
            if name in pieces[0]:
                text[name] = np.concatenate([piece[name] for piece in pieces])
        texts.append(text)
    batch_of = padding_free_batch if way.padding_free else padded_batch
    return batch_of(texts, pad_id=pad_id)
