"""Records, which every reader yields and every writer takes, and the checks of one record.

Four kinds of content:

"examples"     one pre-training example per record (`pack_data.store.sequences.Example`)
"packs"        one pack of them per record, the ten fields of the packed format (`pack_data.store.packs.FIELDS`)
"tokens"       one sequence per record, any named integer columns of equal length
"token_packs"  one pack of those per record: the columns without padding, and `seq_start_id`, where each sequence begins

A reader yields a `Record` for each valid one, including all those before a damaged place.
Records are counted from 0 within their file.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from pack_data.reading.bad_records import Origin
from pack_data.store.packs import FIELDS as PACK_FIELDS
from pack_data.store.sequences import Example

UNPACKED = {
    "examples": "examples",
    "packs": "examples",
    "tokens": "tokens",
    "token_packs": "tokens",
}
LARGEST_ID = 2**31 - 1  # a batch is int32

# An unpacked row as columns, and the columns that it may have in addition.
EXAMPLE_FIELDS = (
    "input_ids",
    "segment_ids",
    "masked_lm_positions",
    "masked_lm_ids",
    "next_sentence_labels",
)
DERIVED = ("input_mask", "masked_lm_weights")

_FIELDS_OF_ONE_WIDTH = (PACK_FIELDS[:4], PACK_FIELDS[4:7], PACK_FIELDS[7:])  # [S], [P] and [D]
# Field -> the fields of a pack that are 0 wherever it is 0.
_MASKED = {
    "input_mask": ("input_ids", "segment_ids", "positions"),
    "next_sentence_weights": ("next_sentence_labels",),
    "masked_lm_weights": ("masked_lm_positions", "masked_lm_ids"),
}

NO_COLUMNS = (
    "BERT examples and packs in columns (Parquet, Arrow, JSONL, HDF5) are no longer supported; use TFRecord, or a data "
    "set directory that packed-bert build writes"
)

Pack = Dict[str, np.ndarray]  # the ten fields, int32
Tokens = Dict[str, np.ndarray]  # column name -> integers, all of one length
Columns = Mapping[str, np.ndarray]  # the values of a row by column
Tally = Dict[str, int]  # the counts of `counting`
Value = Any  # an Example, a Pack or Tokens, depending on the kind of the file


class RecordError(ValueError):
    """A problem of one record; the reader that catches it knows the record's origin."""


class Record(NamedTuple):
    """One record.  `foreign`: the columns that are not part of its kind; they are passed on unchanged."""

    origin: Origin
    value: Value
    foreign: Mapping[str, Any] = {}


class RowWidths(NamedTuple):
    """Row widths of a fixed-width file: S slots, P predictions, D sequences (None if the file has no such width)."""

    max_sequence_length: Optional[int] = None
    max_predictions: Optional[int] = None
    max_sequences_per_pack: Optional[int] = None

    def of_packs(self) -> Tuple[int, int, int]:
        """Return all three widths, none of which is None for packs."""
        size, predictions, depth = self
        assert size is not None and predictions is not None and depth is not None, self
        return size, predictions, depth


# ---- one example -------------------------------------------------------------------------------------------------


def integers(
    name: str, values: np.ndarray, largest: int = LARGEST_ID, least: int = 0
) -> np.ndarray:
    """Return `values` as int32 [n].  Raises RecordError if one is too small, too large or not whole."""
    values = np.asarray(values)
    if values.ndim != 1:
        raise RecordError(f"{name} has {values.ndim} dimensions, must have one")
    if values.dtype.kind == "f":
        values = values.astype(np.float64)  # half precision has no 2^31 to compare with
        if not (values == np.floor(values)).all():  # also refuses NaN
            raise RecordError(f"{name} holds a number that is not whole")
    elif values.dtype.kind not in "iub":
        raise RecordError(f"{name} holds no numbers")
    if len(values) and (values.min() < least or values.max() > largest):
        outside = (values < least) | (values > largest)
        raise RecordError(f"{name} holds {_first(values, outside)}, must be {least} to {largest}")
    return values.astype(np.int32)


def _first(values: np.ndarray, wrong: np.ndarray) -> str:
    index = int(np.flatnonzero(wrong)[0])
    return f"{values[index]} at index {index}"


def _count_ones(name: str, values: np.ndarray, form: str = "ones followed by zeros") -> int:
    """Return the number of ones of a row of ones, then zeros.  Raises RecordError for other rows."""
    ones = int(np.count_nonzero(values))
    if not (values[:ones] == 1).all():
        raise RecordError(f"{name} is not {form}")
    return ones


def _first_segment(segment_ids: np.ndarray, what: str = "segment_ids") -> int:
    """Return the tokens in the first segment of one sequence: zeros, then ones.  Raises RecordError for other rows."""
    first = len(segment_ids) - _count_ones(what, segment_ids[::-1], "zeros followed by ones")
    if first == 0:
        raise RecordError(f"{what} has no 0: the first segment is empty")
    return first


def _checked_example(
    input_ids: np.ndarray,
    first_segment_length: int,
    masked_lm_positions: np.ndarray,
    masked_lm_ids: np.ndarray,
    next_sentence_label: int,
) -> Example:
    """Return an `Example` after the checks that hold for every file.  Raises RecordError.

    input_ids int32 [length]; masked_lm_positions, masked_lm_ids int32 [predictions], used ones only.
    """
    length = len(input_ids)
    outside = masked_lm_positions >= length
    if outside.any():
        raise RecordError(
            f"masked_lm_positions holds {_first(masked_lm_positions, outside)}, the sequence has {length} tokens"
        )
    if len(set(masked_lm_positions.tolist())) != len(masked_lm_positions):
        raise RecordError("masked_lm_positions names one position twice")
    if next_sentence_label not in (0, 1):
        raise RecordError(f"next_sentence_labels holds {next_sentence_label}, must be 0 or 1")
    return Example(
        input_ids=input_ids.tolist(),
        first_segment_length=int(first_segment_length),
        masked_lm_positions=masked_lm_positions.tolist(),
        masked_lm_ids=masked_lm_ids.tolist(),
        next_sentence_label=int(next_sentence_label),
    )


def example_from_columns(row: Columns, predictions: Optional[int] = None) -> Example:
    """Return an example from EXAMPLE_FIELDS [S] and [P], and those of DERIVED that there are.

    Without input_mask nothing is padded.  predictions: how many of P count; None: as many as masked_lm_weights marks.
    Raises RecordError for unequal lengths, a mask, weights or segments of another form, and values outside their range.
    """
    if predictions is None:
        _equal(row, "masked_lm_weights", "masked_lm_positions")
        predictions = _count_ones("masked_lm_weights", row["masked_lm_weights"])
    labels = integers("next_sentence_labels", np.atleast_1d(row["next_sentence_labels"]))
    if len(labels) != 1:
        raise RecordError(f"next_sentence_labels has {len(labels)} values, must have 1")
    input_ids = integers("input_ids", row["input_ids"])
    segment_ids = integers("segment_ids", row["segment_ids"], 1)
    _equal(row, "segment_ids", "input_ids")
    length = len(input_ids)
    if "input_mask" in row:
        input_mask = integers("input_mask", row["input_mask"])
        _equal(row, "input_mask", "input_ids")
        form = "ones followed by zeros (a packed row numbers its sequences: is this a packed file?)"
        length = _count_ones("input_mask", input_mask, form)
    if length == 0:
        raise RecordError(
            "input_ids has no token that input_mask marks, a record needs at least one"
        )
    positions = integers("masked_lm_positions", row["masked_lm_positions"])
    ids = integers("masked_lm_ids", row["masked_lm_ids"])
    _equal(row, "masked_lm_positions", "masked_lm_ids")
    for unused in (
        input_ids[length:],
        segment_ids[length:],
        positions[predictions:],
        ids[predictions:],
    ):
        if unused.any():
            raise RecordError("a value after the last real token or prediction is not 0")
    return _checked_example(
        input_ids[:length],
        _first_segment(segment_ids[:length]),
        positions[:predictions],
        ids[:predictions],
        int(labels[0]),
    )


def _equal(row: Columns, name: str, other: str) -> None:
    if len(row[name]) != len(row[other]):
        raise RecordError(
            f"{name} has {len(row[name])} values and {other} {len(row[other])}, must be equal"
        )


# ---- one pack ----------------------------------------------------------------------------------------------------


def checked_pack(fields: Columns) -> Tuple[Pack, List[Example]]:
    """Return the ten fields of one pack as int32, and its sequences; raise RecordError if they contradict each other.

    Each sequence is found by its number in input_mask and put in order by positions, so any layout of the row is
    understood.  A zero in next_sentence_positions may mean slot 0 or nothing: next_sentence_weights tells.
    """
    pack = {name: integers(name, fields[name]) for name in PACK_FIELDS}
    integers("next_sentence_weights", pack["next_sentence_weights"], 1)
    for names in _FIELDS_OF_ONE_WIDTH:
        for name in names:
            _equal(pack, name, names[0])
    for mask, masked in _MASKED.items():
        for name in masked:
            if pack[name][pack[mask] == 0].any():
                raise RecordError(f"{name} is not 0 where {mask} is 0")

    _check_predictions(pack)
    count = _sequence_count(pack)
    labels = _labels_by_slot(pack)
    return pack, [_sequence(pack, number, labels) for number in range(1, count + 1)]


def _check_predictions(pack: Pack) -> None:
    """Raise RecordError if a prediction lies outside its sequence."""
    mask = pack["input_mask"]
    weights = pack["masked_lm_weights"]
    positions = pack["masked_lm_positions"]
    outside = positions >= len(mask)
    if outside.any():
        raise RecordError(
            f"masked_lm_positions holds {_first(positions, outside)}, the row has {len(mask)} slots"
        )
    stray = (weights != 0) & (mask[positions] != weights)
    if stray.any():
        index = int(np.flatnonzero(stray)[0])
        raise RecordError(
            f"masked_lm_weights says sequence {weights[index]} at index {index}, input_mask says "
            f"{mask[positions[index]]}"
        )


def _sequence_count(pack: Pack) -> int:
    """Return the number of sequences.  Raises RecordError unless two fields agree on it."""
    weights = pack["next_sentence_weights"]
    count = int(pack["input_mask"].max(initial=0))
    if count > len(weights):
        raise RecordError(
            f"input_mask holds sequence number {count}, next_sentence_weights has room for {len(weights)}"
        )
    if weights.sum() != count:
        raise RecordError(
            f"input_mask numbers {count} sequences, next_sentence_weights has {weights.sum()}"
        )
    if count == 0:
        raise RecordError("input_mask is 0 everywhere, a pack needs at least one sequence")
    return count


def _labels_by_slot(pack: Pack) -> Dict[int, int]:
    """Return the label of the sequence that begins at each slot of a [CLS].  Raises RecordError."""
    is_used = pack["next_sentence_weights"] != 0
    cls_slots = pack["next_sentence_positions"][is_used]
    width = len(pack["input_mask"])
    if (cls_slots >= width).any():
        raise RecordError(f"next_sentence_positions lies outside the row of {width} slots")
    return dict(zip(cls_slots.tolist(), pack["next_sentence_labels"][is_used].tolist()))


def _sequence(pack: Pack, number: int, labels: Mapping[int, int]) -> Example:
    """Return one sequence of a pack.  Raises RecordError if it is not whole."""
    slots = np.flatnonzero(pack["input_mask"] == number)
    if not len(slots):
        raise RecordError(f"input_mask numbers more sequences, but number {number} does not occur")
    positions = pack["positions"]
    slots = slots[np.argsort(positions[slots], kind="stable")]
    if not np.array_equal(positions[slots], np.arange(len(slots))):
        raise RecordError(f"positions of sequence {number} are not 0 to {len(slots) - 1}")
    cls_slot = int(slots[0])
    if cls_slot not in labels:
        raise RecordError(
            f"next_sentence_positions does not name slot {cls_slot}, where sequence {number} begins"
        )

    predictions = pack["masked_lm_weights"] == number
    return _checked_example(
        pack["input_ids"][slots],
        _first_segment(pack["segment_ids"][slots], f"segment_ids of sequence {number}"),
        positions[pack["masked_lm_positions"][predictions]],
        pack["masked_lm_ids"][predictions],
        labels[cls_slot],
    )


def shape_of_pack(pack: Columns) -> RowWidths:
    return RowWidths(
        len(pack["input_ids"]), len(pack["masked_lm_positions"]), len(pack["next_sentence_weights"])
    )


# ---- counts ----------------------------------------------------------------------------------------------------------


def counting(records: Iterator[Record], kind: str, tally: Tally) -> Iterator[Record]:
    """Yield the records of a kind; `tally` counts them, the records of files that they come from, and their tokens."""
    tally.update(yielded=0, records=0, tokens=0)
    last = None
    for record in records:
        tally["yielded"] += 1
        tally["records"] += record.origin != last
        tally["tokens"] += _tokens(kind, record.value)
        last = record.origin
        yield record


def _tokens(kind: str, value: Value) -> int:
    if kind == "examples":
        return len(value.input_ids)
    if kind == "packs":
        return int(np.count_nonzero(value["input_mask"]))
    return len(next(iter(value.values())))
