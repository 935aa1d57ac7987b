"""Packed TFRecord with `packed_*` names and every [CLS] at the end of its row, as the PyTorch BERT for IPUs reads it.

int64: packed_input_ids, packed_input_mask, packed_segment_ids, packed_position_ids [S]; packed_masked_lm_positions,
packed_masked_lm_ids [P]; packed_next_sentence_labels [D].  packed_masked_lm_mask [P] (sequence number, 0 unused) and
packed_next_sentence_mask [D] (1 used) are float.  Sequence k has its [CLS], position 0, at slot S - k; its other
tokens, positions 1.., stand with those of the other sequences from slot 0 on.  The labels run in the order of the row,
sequence k at D - k.  Read only: rows come out in the layout of the packed format, [CLS] first in its sequence, and as
wide: P is predictions of a sequence + D - 1 here and one more there.
"""

from __future__ import annotations

from typing import Dict, Iterator, Mapping

import numpy as np

from pack_data.cli.bad_records import BadRecords
from pack_data.formats import tfrecord
from pack_data.formats.records import (
    Pack,
    Record,
    RecordError,
    RowWidths,
    checked_pack,
    integers,
    pack_from_examples,
    shape_of_pack,
)

# "number": files in use have these masks in either type.
FIELDS = tuple(
    tfrecord.Field(f"packed_{name}", "number" if name.endswith("_mask") and name != "input_mask" else "int64")
    for name in (
        "input_ids input_mask segment_ids position_ids masked_lm_positions masked_lm_ids masked_lm_mask "
        "next_sentence_labels next_sentence_mask"
    ).split()
)


def _ten_fields(features: Mapping[str, np.ndarray]) -> Dict[str, np.ndarray]:
    size, depth = len(features["packed_input_ids"]), len(features["packed_next_sentence_mask"])
    if depth > size:
        raise RecordError(f"packed_next_sentence_mask has {depth} values, a row has only {size} slots")
    used = integers("packed_next_sentence_mask", features["packed_next_sentence_mask"], 1)
    return {
        "input_ids": features["packed_input_ids"],
        "input_mask": features["packed_input_mask"],
        "segment_ids": features["packed_segment_ids"],
        "positions": features["packed_position_ids"],
        "masked_lm_positions": features["packed_masked_lm_positions"],
        "masked_lm_ids": features["packed_masked_lm_ids"],
        "masked_lm_weights": features["packed_masked_lm_mask"],
        "next_sentence_positions": np.arange(size - depth, size) * used,
        "next_sentence_labels": features["packed_next_sentence_labels"],
        "next_sentence_weights": used,
    }


def _value(features: Mapping[str, np.ndarray]) -> Pack:
    row, sequences = checked_pack(_ten_fields(features))
    size, predictions, depth = shape_of_pack(row).of_packs()
    return pack_from_examples(sequences, RowWidths(size, predictions + 1, depth))


def read(path: str, bad: BadRecords) -> Iterator[Record]:
    """The packs of one file, in its order."""
    return tfrecord.read_records(path, bad, FIELDS, _value)
