"""MLPerf BERT TFRecord: one unpacked pre-training example a record.

int64: input_ids, input_mask, segment_ids [S]; masked_lm_positions, masked_lm_ids [P]; next_sentence_labels [1].
float: masked_lm_weights [P], 1 for a prediction.  P is 20 at S = 128 and 76 at 512; unused values are 0.
"""

from __future__ import annotations

from typing import Iterable, Iterator, Mapping

import numpy as np

from pack_data.cli.bad_records import BadRecords
from pack_data.formats import tfrecord
from pack_data.formats.records import (
    Record,
    RecordError,
    RowWidths,
    example_from_row,
    predictions_by_weight,
    row_from_example,
    single,
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


def _value(features: Mapping[str, np.ndarray]) -> Example:
    weights = features["masked_lm_weights"]
    if len(weights) != len(features["masked_lm_positions"]):
        raise RecordError(
            f"masked_lm_weights has {len(weights)} values and masked_lm_positions "
            f"{len(features['masked_lm_positions'])}, must be equal"
        )
    return example_from_row(
        features["input_ids"],
        features["input_mask"],
        features["segment_ids"],
        features["masked_lm_positions"],
        features["masked_lm_ids"],
        predictions_by_weight(weights),
        single("next_sentence_labels", features["next_sentence_labels"]),
    )


def read(path: str, bad: BadRecords) -> Iterator[Record]:
    """The examples of one file, in its order."""
    return tfrecord.read_records(path, bad, FIELDS, _value, lambda rows: together(rows, NAMES, unpacked_examples))


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

    def messages() -> Iterator[bytes]:
        for record in records:
            try:
                row = row_from_example(record.value, widths)
                row["masked_lm_weights"] = row["masked_lm_weights"].astype(np.float32)
                message = tfrecord.message({**record.foreign, **row})
            except RecordError as error:
                raise ValueError(f"{record.origin}: {error}") from None
            yield message

    return tfrecord.write_frames(path, messages())
