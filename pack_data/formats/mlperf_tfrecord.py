"""MLPerf BERT TFRecord: one unpacked pre-training example a record.

int64: input_ids, input_mask, segment_ids [S]; masked_lm_positions, masked_lm_ids [P]; next_sentence_labels [1].
float: masked_lm_weights [P], 1 for a prediction.  P is 20 at S = 128 and 76 at 512; unused values are 0.
"""

from __future__ import annotations

from typing import Dict, Iterable, Iterator

import numpy as np

from pack_data.cli.bad_records import BadRecords
from pack_data.formats import tfrecord
from pack_data.formats.records import (
    DERIVED,
    EXAMPLE_FIELDS,
    P_FIELDS,
    PACK_FIELDS,
    Record,
    RecordError,
    RowWidths,
    example_from_columns,
)
from pack_data.sequences import Example

FIELDS = tuple(
    tfrecord.Field(name, "float" if name == "masked_lm_weights" else "int64")
    for name in PACK_FIELDS
    if name in EXAMPLE_FIELDS + DERIVED
)


def read(path: str, bad: BadRecords) -> Iterator[Record]:
    """The examples of one file, in its order."""
    return tfrecord.read_records(path, bad, FIELDS, example_from_columns)


def shape(path: str) -> RowWidths:
    """Row widths, from the first record that has them."""
    for _, data in tfrecord.read_frames(path, BadRecords(allowed=2**62)):
        try:
            features = tfrecord.parse(data)
            tfrecord.demand(features, FIELDS)
        except RecordError:
            continue
        return RowWidths(len(features["input_ids"]), len(features["masked_lm_positions"]))
    return RowWidths()


def _row(example: Example, shape: RowWidths) -> Dict[str, np.ndarray]:
    """The padded row of an example: int32, [S] and [P], next_sentence_labels [1].  RecordError if it is too long."""
    length, predictions = len(example.input_ids), len(example.masked_lm_positions)
    if shape.max_sequence_length is None or shape.max_predictions is None:
        raise ValueError(
            "a fixed-width file needs its widths: give --max-sequence-length and --max-predictions-per-sequence"
        )
    if length > shape.max_sequence_length:
        raise RecordError(f"{length} tokens, a row holds {shape.max_sequence_length} (--max-sequence-length)")
    if predictions > shape.max_predictions:
        raise RecordError(
            f"{predictions} predictions, a row holds {shape.max_predictions} (--max-predictions-per-sequence)"
        )
    row = {name: np.zeros(shape.max_sequence_length, np.int32) for name in ("input_ids", "input_mask", "segment_ids")}
    row["input_ids"][:length] = example.input_ids
    row["input_mask"][:length] = 1
    row["segment_ids"][example.first_segment_length : length] = 1
    for name in P_FIELDS:
        row[name] = np.zeros(shape.max_predictions, np.int32)
    row["masked_lm_positions"][:predictions] = example.masked_lm_positions
    row["masked_lm_ids"][:predictions] = example.masked_lm_ids
    row["masked_lm_weights"][:predictions] = 1
    row["next_sentence_labels"] = np.array([example.next_sentence_label], np.int32)
    return row


def write(path: str, records: Iterable[Record], widths: RowWidths) -> int:
    """Write examples, return how many.  Raises ValueError naming the record that does not fit the widths."""

    def features(example: Example) -> Dict[str, np.ndarray]:
        row = _row(example, widths)
        return {**row, "masked_lm_weights": row["masked_lm_weights"].astype(np.float32)}

    return tfrecord.write_records(path, records, features)
