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
    Record,
    RecordError,
    RowWidths,
    example_from_columns,
    row_from_example,
)
from pack_data.formats.whole_blocks import together, unpacked_examples
from pack_data.sequences import Example

FIELDS = tuple(
    tfrecord.Field(name, "float" if name == "masked_lm_weights" else "int64")
    for name in (
        "input_ids",
        "input_mask",
        "segment_ids",
        "masked_lm_positions",
        "masked_lm_ids",
        "masked_lm_weights",
        "next_sentence_labels",
    )
)
NAMES = [field.name for field in FIELDS]


def read(path: str, bad: BadRecords) -> Iterator[Record]:
    """The examples of one file, in its order."""
    return tfrecord.read_records(
        path, bad, FIELDS, example_from_columns, lambda rows: together(rows, NAMES, unpacked_examples)
    )


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


def write(path: str, records: Iterable[Record], widths: RowWidths) -> int:
    """Write examples, return how many.  Raises ValueError naming the record that does not fit the widths."""

    def features(example: Example) -> Dict[str, np.ndarray]:
        row = row_from_example(example, widths)
        return {**row, "masked_lm_weights": row["masked_lm_weights"].astype(np.float32)}

    return tfrecord.write_records(path, records, features)
