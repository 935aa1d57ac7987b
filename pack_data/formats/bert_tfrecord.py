"""TFRecord files of BERT: MLPerf's examples, and packs of them; one example or one pack per record.

mlperf_tfrecord: an unpacked example. int64: input_ids, input_mask, segment_ids [S]; masked_lm_positions, masked_lm_ids
[P]; next_sentence_labels [1]. float: masked_lm_weights [P], 1 for a prediction. P is 20 at S = 128 and 76 at 512.
Unused values are 0.

packed_tfrecord: the ten fields of the packed format published for MLPerf BERT. int64: input_ids, input_mask,
segment_ids, positions [S]; masked_lm_positions, masked_lm_ids [P]; next_sentence_positions, next_sentence_labels [D].
float: masked_lm_weights [P] (number of the sequence, 0 unused), next_sentence_weights [D]. Sequence numbers begin at 1,
unused values are 0.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, Iterator, List

import numpy as np

from pack_data.formats import tfrecord
from pack_data.formats.records import (
    DERIVED,
    EXAMPLE_FIELDS,
    Columns,
    Pack,
    Record,
    RecordError,
    RowWidths,
    checked_pack,
    example_from_columns,
    shape_of_pack,
)
from pack_data.reading.bad_records import BadRecords
from pack_data.store.packs import FIELDS
from pack_data.store.sequences import Example

_FLOATS = ("masked_lm_weights", "next_sentence_weights")
_TYPE_OF = {name: "float" if name in _FLOATS else "int64" for name in FIELDS}

# Format -> feature -> type, in the order in which a record is compared with the formats.
FEATURES: Dict[str, Dict[str, str]] = {
    "packed_tfrecord": _TYPE_OF,
    "mlperf_tfrecord": {
        name: type for name, type in _TYPE_OF.items() if name in EXAMPLE_FIELDS + DERIVED
    },
}


_VALUE_OF: Dict[str, Callable[[Columns], Any]] = {
    "packed_tfrecord": lambda features: checked_pack(features)[0],
    "mlperf_tfrecord": example_from_columns,
}


def kind(path: str, format: str) -> str:
    """Return "examples" or "packs", which only the format decides."""
    return "examples" if format == "mlperf_tfrecord" else "packs"


def read(path: str, bad: BadRecords, format: str) -> Iterator[Record]:
    """Yield the examples or packs of one file, in file order.  Rows of packed_tfrecord keep the file's layout."""
    return tfrecord.read_records(path, bad, FEATURES[format], _VALUE_OF[format])


def shape(path: str, format: str) -> RowWidths:
    """Return the row widths: of packs from the first valid one, of examples from the first that has all features."""
    value_of = dict if format == "mlperf_tfrecord" else _VALUE_OF[format]
    any_damage = BadRecords(allowed=2**62)
    first = next(tfrecord.read_records(path, any_damage, FEATURES[format], value_of), None)
    if first is None:
        return RowWidths()
    if format == "mlperf_tfrecord":
        return RowWidths(len(first.value["input_ids"]), len(first.value["masked_lm_positions"]))
    return shape_of_pack(first.value)


def _row(example: Example, widths: RowWidths) -> Dict[str, List[int]]:
    """Return the padded row of an example: [S] and [P], next_sentence_labels [1].  RecordError if it is too long."""
    if widths.max_sequence_length is None or widths.max_predictions is None:
        raise ValueError(
            "the rows of an unpacked TFRecord need their widths: pass --max-sequence-length and "
            "--max-predictions-per-sequence"
        )
    length = len(example.input_ids)
    if length > widths.max_sequence_length:
        raise RecordError(
            f"{length} tokens, a row holds {widths.max_sequence_length} (--max-sequence-length)"
        )
    predictions = len(example.masked_lm_positions)
    if predictions > widths.max_predictions:
        raise RecordError(
            f"{predictions} predictions, a row holds {widths.max_predictions} (--max-predictions-per-sequence)"
        )

    no_tokens = [0] * (widths.max_sequence_length - length)
    no_predictions = [0] * (widths.max_predictions - predictions)
    first_segment = [0] * example.first_segment_length
    second_segment = [1] * (length - example.first_segment_length)
    return {
        "input_ids": example.input_ids + no_tokens,
        "input_mask": [1] * length + no_tokens,
        "segment_ids": first_segment + second_segment + no_tokens,
        "masked_lm_positions": example.masked_lm_positions + no_predictions,
        "masked_lm_ids": example.masked_lm_ids + no_predictions,
        "masked_lm_weights": [1] * predictions + no_predictions,
        "next_sentence_labels": [example.next_sentence_label],
    }


def write(path: str, records: Iterable[Record], widths: RowWidths, format: str) -> int:
    """Write examples or packs and return their number.  ValueError names an example that does not fit the widths."""

    def features(value: Any) -> Pack:
        row = value if format == "packed_tfrecord" else _row(value, widths)
        return {
            name: np.asarray(row[name], np.float32 if type == "float" else np.int32)
            for name, type in FEATURES[format].items()
        }

    return tfrecord.write_records(path, records, features)
