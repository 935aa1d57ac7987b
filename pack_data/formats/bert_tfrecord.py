"""TFRecord files of BERT: MLPerf's examples, and packs in two layouts. One example or one pack a record.

mlperf_tfrecord: an unpacked example. int64: input_ids, input_mask, segment_ids [S]; masked_lm_positions, masked_lm_ids
[P]; next_sentence_labels [1]. float: masked_lm_weights [P], 1 for a prediction. P is 20 at S = 128 and 76 at 512.
Unused values are 0.

packed_tfrecord: the ten fields of the packed format published for MLPerf BERT. int64: input_ids, input_mask,
segment_ids, positions [S]; masked_lm_positions, masked_lm_ids [P]; next_sentence_positions, next_sentence_labels [D].
float: masked_lm_weights [P] (number of the sequence, 0 unused), next_sentence_weights [D]. Sequence numbers begin at 1,
unused values are 0.

cls_last_tfrecord, read only: `packed_*` names and every [CLS] at the end of its row, as the PyTorch BERT for IPUs reads
it. int64: packed_input_ids, packed_input_mask, packed_segment_ids, packed_position_ids [S]; packed_masked_lm_positions,
packed_masked_lm_ids [P]; packed_next_sentence_labels [D]. packed_masked_lm_mask [P] (sequence number, 0 unused) and
packed_next_sentence_mask [D] (1 used) are float. Sequence k has its [CLS], position 0, at slot S - k; its other tokens,
positions 1.., stand with those of the other sequences from slot 0 on. The labels run in the order of the row, sequence
k at D - k. Rows come out in the layout of the packed format, [CLS] first in its sequence, and as wide: P is predictions
of a sequence + D - 1 here and one more there.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, Iterator, Mapping, Tuple

import numpy as np

from pack_data.cli.bad_records import BadRecords
from pack_data.formats import tfrecord
from pack_data.formats.records import (
    DERIVED,
    EXAMPLE_FIELDS,
    PACK_FIELDS,
    Pack,
    Record,
    RecordError,
    RowWidths,
    checked_pack,
    example_from_columns,
    integers,
    pack_from_examples,
    shape_of_pack,
)
from pack_data.store.sequences import Example

FLOATS = ("masked_lm_weights", "next_sentence_weights")
_CLS_LAST = (
    "input_ids input_mask segment_ids position_ids masked_lm_positions masked_lm_ids masked_lm_mask "
    "next_sentence_labels next_sentence_mask"
).split()


def _field(name: str) -> tfrecord.Field:
    return tfrecord.Field(name, "float" if name in FLOATS else "int64")


# Of each format, in the order in which a record is compared with them.
FIELDS: Dict[str, Tuple[tfrecord.Field, ...]] = {
    "packed_tfrecord": tuple(map(_field, PACK_FIELDS)),
    "mlperf_tfrecord": tuple(_field(name) for name in PACK_FIELDS if name in EXAMPLE_FIELDS + DERIVED),
    # "number": files in use have these masks in either type.
    "cls_last_tfrecord": tuple(
        tfrecord.Field(f"packed_{name}", "number" if name in ("masked_lm_mask", "next_sentence_mask") else "int64")
        for name in _CLS_LAST
    ),
}


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


def _cls_last_pack(features: Mapping[str, np.ndarray]) -> Pack:
    row, sequences = checked_pack(_ten_fields(features))
    size, predictions, depth = shape_of_pack(row).of_packs()
    return pack_from_examples(sequences, RowWidths(size, predictions + 1, depth))


_VALUE_OF: Dict[str, Callable[[Mapping[str, np.ndarray]], Any]] = {
    "packed_tfrecord": lambda features: checked_pack(features)[0],
    "mlperf_tfrecord": example_from_columns,
    "cls_last_tfrecord": _cls_last_pack,
}


def read(path: str, bad: BadRecords, format: str) -> Iterator[Record]:
    """The examples or packs of one file, in its order. The rows of packed_tfrecord stay laid out as they are there."""
    return tfrecord.read_records(path, bad, FIELDS[format], _VALUE_OF[format])


def shape(path: str, format: str) -> RowWidths:
    """Return the row widths: of packs from the first good one, of examples from the first that has all features."""
    any_damage = BadRecords(allowed=2**62)
    if format == "mlperf_tfrecord":
        first = next(tfrecord.read_records(path, any_damage, FIELDS[format], dict), None)
    else:
        first = next(read(path, any_damage, format), None)
    if first is None:
        return RowWidths()
    if format == "mlperf_tfrecord":
        return RowWidths(len(first.value["input_ids"]), len(first.value["masked_lm_positions"]))
    return shape_of_pack(first.value)


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
    row = pack_from_examples([example], RowWidths(shape.max_sequence_length, shape.max_predictions, 1))
    return {field.name: row[field.name] for field in FIELDS["mlperf_tfrecord"]}


def write(path: str, records: Iterable[Record], widths: RowWidths, format: str) -> int:
    """Write examples or packs, return how many. ValueError names the example that does not fit the widths."""

    def features(value: Any) -> Pack:
        row = value if format == "packed_tfrecord" else _row(value, widths)
        names = [field.name for field in FIELDS[format]]
        return {name: row[name].astype(np.float32) if name in FLOATS else row[name] for name in names}

    return tfrecord.write_records(path, records, features)
