"""The pack: its fields, what is stored of them, sequences to packs (`assemble`) and back (`disassemble`).

A stored pack is one record with the smallest sufficient types, and only of what cannot be derived. The lengths of each
sequence and of its first segment give positions, input_mask, segment_ids and next_sentence_positions; the number of
each sequence's masked tokens gives masked_lm_weights. At S = 512, D = 3, P = 79 that is 1,358 bytes a pack, against
9,104 as int32.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, replace
from typing import Any, Counter, Dict, Iterable, List, Mapping, Sequence, Tuple, Union

import numpy as np

from pack_data.reading.fields import Fields, shown, whole_number
from pack_data.store.quantities import rounded_up
from pack_data.store.sequences import (
    INTEGER_TYPES,
    LONGEST,
    Sequences,
    check_multiple,
    ragged_copy,
    smallest_type,
    starts_of,
)

# Kinds of packs.
BERT = "bert_pretraining"
TOKENS = "tokens"

# The fields of a batch of BERT packs in the order of the model's arguments, named as in the packed MLPerf format.
FIELDS = tuple(
    (
        "input_ids input_mask segment_ids positions masked_lm_positions masked_lm_ids masked_lm_weights "
        "next_sentence_positions next_sentence_labels next_sentence_weights"
    ).split()
)

# Axes of stored columns: one value for each slot [S], for each sequence [D], for each masked token [P].
SLOT = "slot"
SEQUENCE = "sequence"
PREDICTION = "prediction"
# The most slots, sequences or masked tokens of one pack, and the most bytes of its record.
_LARGEST_WIDTH = LONGEST
_LARGEST_RECORD = 1 << 30
_Field = Tuple[str, str, Tuple[int, ...]]  # name, type and shape
# S, D and P.
_WIDTHS = ("max_sequence_length", "max_sequences_per_pack", "max_predictions_per_pack")
# Columns of every record.
_OWN_COLUMNS = ("lengths", "prediction_counts")


@dataclass(frozen=True)
class StoredColumn:
    """A stored column. slot_index: its values are positions in the sequence; in a pack they count from its start."""

    name: str
    axis: str
    dtype: str
    slot_index: bool = False

    def __post_init__(self) -> None:
        # A name that the header of a .npy file holds as it is: Latin-1 without escapes.
        is_name = isinstance(self.name, str) and re.fullmatch(
            r"[^\\'\"\u0100-\U0010ffff]{1,200}", self.name
        )
        if not is_name or not self.name.isprintable():
            raise ValueError(
                f"a column is called {shown(self.name)}; a name has one to 200 printable characters of Latin-1, no "
                "quotes and no backslash: rename it"
            )
        if self.axis not in (SLOT, SEQUENCE, PREDICTION):
            axes = f"{SLOT}, {SEQUENCE} or {PREDICTION}"
            raise ValueError(
                f"column {self.name}: the axis is {shown(self.axis)}; it must be {axes}"
            )
        if self.dtype not in INTEGER_TYPES:
            raise ValueError(
                f"column {self.name}: the type is {shown(self.dtype)}; it must be {', '.join(INTEGER_TYPES)}"
            )


@dataclass(frozen=True)
class PackSchema:
    """The shape of a pack and the columns stored for it.

    max_sequence_length (S): slots; max_sequences_per_pack (D): packing depth; max_predictions_per_pack (P): masked
    tokens. Without `columns` they are those of BERT pre-training with token ids below 65,536; see `bert`, `of_tokens`.
    multiple_of: each sequence begins at a multiple of it; the slots between two sequences are padding.
    """

    max_sequence_length: int
    max_sequences_per_pack: int
    max_predictions_per_pack: int
    kind: str = BERT
    columns: Tuple[StoredColumn, ...] = ()
    multiple_of: int = 1

    def __post_init__(self) -> None:
        for name in (*_WIDTHS, "multiple_of"):
            least = 0 if name == "max_predictions_per_pack" else 1
            number = whole_number(name, getattr(self, name), least=least, most=_LARGEST_WIDTH)
            object.__setattr__(self, name, number)
        check_multiple(self.max_sequence_length, self.multiple_of)
        if self.kind not in (BERT, TOKENS):
            raise ValueError(
                f"the kind of packs is {shown(self.kind)}; it must be {BERT} or {TOKENS}"
            )
        if not self.columns:
            object.__setattr__(self, "columns", _bert_columns(self.max_sequence_length, 1 << 16))
        for name, uses in Counter(
            [*_OWN_COLUMNS, *(column.name for column in self.columns)]
        ).items():
            if uses > 1:
                raise ValueError(
                    f"column {name}: the schema names it twice, or the name is reserved; rename it"
                )
        if self.kind == BERT:
            self._check_bert()
        elif not self.on(SLOT) or self.on(PREDICTION):
            raise ValueError(
                f"packs of {TOKENS} need a column with a value for each slot, and none for masked tokens"
            )
        sizes = [
            self.width(column.axis) * np.dtype(column.dtype).itemsize for column in self.columns
        ]
        if sum(sizes) + 8 * self.max_sequences_per_pack > _LARGEST_RECORD:
            raise ValueError(
                f"a pack of these columns takes more than {_LARGEST_RECORD:,} bytes; make packs shorter"
            )

    def _check_bert(self) -> None:
        """Raise ValueError unless the columns of BERT are there, with unsigned values."""
        columns = {column.name: column for column in self.columns}
        for needed in _bert_columns(self.max_sequence_length, 1 << 16):
            column = columns.get(needed.name)
            if (
                column is None
                or "i" in column.dtype
                or replace(column, dtype=needed.dtype) != needed
            ):
                raise ValueError(
                    f"packs of {BERT} need a column {needed.name} without negative values, one value for each "
                    f"{needed.axis}"
                )

    @classmethod
    def bert(
        cls,
        max_sequence_length: int,
        max_sequences_per_pack: int,
        max_predictions_per_pack: int,
        *,
        vocabulary_size: int,
        extra: Iterable[StoredColumn] = (),
    ) -> PackSchema:
        """Return the schema of BERT pre-training packs.

        Args:
            max_sequence_length: Slots of a pack, S.
            max_sequences_per_pack: Packing depth, D.
            max_predictions_per_pack: Masked tokens of a pack, P.
            vocabulary_size: Number of token ids; it decides the type of their columns.
            extra: Further columns. If one has the name of a derived field, it is stored instead of derived; any other
                is an additional field of every batch.
        """
        return cls(
            max_sequence_length,
            max_sequences_per_pack,
            max_predictions_per_pack,
            BERT,
            _bert_columns(max_sequence_length, vocabulary_size) + tuple(extra),
        )

    @classmethod
    def of_tokens(
        cls, max_sequence_length: int, max_sequences_per_pack: int, columns: Iterable[StoredColumn]
    ) -> PackSchema:
        """Return the schema of packs of any integer columns.

        Args:
            max_sequence_length: Slots of a pack, S.
            max_sequences_per_pack: Packing depth, D.
            columns: Columns with a value for each token (axis "slot") or each sequence (axis "sequence").
        """
        return cls(max_sequence_length, max_sequences_per_pack, 0, TOKENS, tuple(columns))

    def on(self, axis: str) -> Tuple[StoredColumn, ...]:
        """Return the columns on one axis.

        Args:
            axis: "slot", "sequence" or "prediction".
        """
        return tuple(column for column in self.columns if column.axis == axis)

    def width(self, axis: str) -> int:
        """Return the number of values of a pack on an axis: S, D or P.

        Args:
            axis: "slot", "sequence" or "prediction".
        """
        name = dict(zip((SLOT, SEQUENCE, PREDICTION), _WIDTHS))[axis]
        width: int = getattr(self, name)
        return width

    def taken(self, lengths: np.ndarray) -> np.ndarray:
        """Return the slots that sequences take, with the padding up to a multiple of `multiple_of`.

        Args:
            lengths: Tokens of sequences, integers of any shape.

        Returns:
            int64 in the same shape.
        """
        return rounded_up(lengths, self.multiple_of)

    def _real_slots(self, lengths: np.ndarray) -> np.ndarray:
        """Return the slots that hold a token, bool [n, S].

        Args:
            lengths: Tokens of the sequences of n packs, integers [n, D], 0 for absent sequences.
        """
        taken = self.taken(lengths)
        if self.multiple_of > 1:
            return _rows([(1, lengths), (0, taken - lengths)], self.max_sequence_length) > 0
        real: np.ndarray = np.arange(self.max_sequence_length) < taken.sum(axis=1)[:, None]
        return real

    @property
    def lengths_dtype(self) -> np.dtype:
        """The type of lengths, and counts of masked tokens, in a record."""
        return np.dtype(self._counts())

    def _counts(self) -> List[_Field]:
        """Return name, type and shape of the fields of `lengths_dtype`."""
        depth = (self.max_sequences_per_pack,)
        fields: List[_Field] = [("lengths", smallest_type(self.max_sequence_length), depth)]
        if self.on(PREDICTION):
            counts_type = smallest_type(self.max_predictions_per_pack)
            fields.append(("prediction_counts", counts_type, depth))
        return fields

    @property
    def record_dtype(self) -> np.dtype:
        """The type of a pack's record; the widest fields come first, so that most values stay aligned."""
        fields: List[_Field] = [
            (column.name, column.dtype, (self.width(column.axis),)) for column in self.columns
        ]
        fields += self._counts()
        return np.dtype(sorted(fields, key=lambda field: -np.dtype(field[1]).itemsize))

    @property
    def fields(self) -> Tuple[str, ...]:
        """The names of the arrays in a batch, in order."""
        stored = tuple(column.name for column in self.columns)
        if self.kind == BERT:
            return FIELDS + tuple(
                name for name in stored if name not in FIELDS and name != "first_segment_lengths"
            )
        derived = ("input_mask", "positions")
        return tuple(name for name in stored if name not in derived) + derived

    def to_json(self) -> Dict[str, Any]:
        """Return the schema in a manifest."""
        rounding = {} if self.multiple_of == 1 else {"multiple_of": self.multiple_of}
        return {
            **rounding,
            "kind": self.kind,
            **{name: getattr(self, name) for name in _WIDTHS},
            "columns": [asdict(column) for column in self.columns],
        }

    @classmethod
    def from_json(cls, value: Union[Mapping[str, Any], Fields]) -> PackSchema:
        """Read a schema.

        Args:
            value: An object that `to_json` returned.

        Raises:
            ValueError: If a field is missing or breaks its rule.
        """
        fields = Fields.of(value, "schema", "make it with `to_json`")
        stated: Dict[str, Any] = {name: fields.integer(name) for name in _WIDTHS}
        if "multiple_of" in fields:
            stated["multiple_of"] = fields.integer("multiple_of", least=2)
        columns = []
        for column in fields.list_of("columns", Fields.object, longest=1000):
            name = column.text("name", most=200)
            axis = column.one_of("axis", (SLOT, SEQUENCE, PREDICTION))
            dtype = column.one_of("dtype", INTEGER_TYPES)
            with column.refusing():
                columns.append(StoredColumn(name, axis, dtype, column.boolean("slot_index")))
        if not columns:
            raise fields.error("columns", "must have an item")
        with fields.refusing():
            return cls(kind=fields.one_of("kind", (BERT, TOKENS)), columns=tuple(columns), **stated)


def _bert_columns(max_sequence_length: int, vocabulary_size: int) -> Tuple[StoredColumn, ...]:
    token = smallest_type(max(vocabulary_size - 1, 256))
    slot = smallest_type(max_sequence_length)
    return (
        StoredColumn("input_ids", SLOT, token),
        StoredColumn("masked_lm_positions", PREDICTION, slot, slot_index=True),
        StoredColumn("masked_lm_ids", PREDICTION, token),
        StoredColumn("first_segment_lengths", SEQUENCE, slot),
        StoredColumn("next_sentence_labels", SEQUENCE, "|u1"),
    )


# Published values at the published lengths.
_PUBLISHED_PREDICTIONS = {128: 20, 384: 56, 512: 76}


def default_predictions(max_sequence_length: int, masked_lm_probability: float = 0.15) -> int:
    """Return the default of max_predictions_per_sequence: the published value, else what the masking rate needs."""
    needed = max(1, math.ceil(masked_lm_probability * max_sequence_length))
    return _PUBLISHED_PREDICTIONS.get(max_sequence_length, needed)


def predictions_per_pack(max_predictions_per_sequence: int, depth: int, needed: int) -> int:
    """Return P: max_predictions_per_sequence + D as published, or what the data needs if that is more.

    The published rule is sufficient if max_predictions_per_sequence >= 0.15 S - 1: a full pack has at most 0.15 S
    masked tokens plus half a token of rounding for each sequence.
    """
    return max(max_predictions_per_sequence + depth, needed)


def _starts_in_rows(counts: np.ndarray) -> np.ndarray:
    """Return the start of each sequence's values in its pack; counts: of its values, [n, D]."""
    starts: np.ndarray = np.cumsum(counts, axis=1) - counts
    return starts


def assemble(
    schema: PackSchema, sequences: Sequences, pack: np.ndarray, slot: np.ndarray, packs: int
) -> np.ndarray:
    """Put sequences into packs; nothing is cut.

    Args:
        schema: The shape of the packs.
        sequences: n sequences with the columns of the schema.
        pack: The pack of each sequence, [n], from 0.
        slot: The number of each sequence in its pack, [n], from 0.
        packs: The number of packs.

    Returns:
        Records [packs] of schema.record_dtype.

    Raises:
        ValueError: If a pack would have more tokens, sequences or masked tokens than fit.
    """
    depth = schema.max_sequences_per_pack
    deepest = int(slot.max(initial=0)) + 1
    if deepest > depth:
        raise ValueError(f"a pack holds {deepest} sequences, at most {depth} fit; assign fewer")
    pack = np.asarray(pack, dtype=np.int64)
    place = pack * depth + slot
    if len(place) and np.bincount(place).max() > 1:
        raise ValueError("two sequences have the same place in a pack; number its sequences from 0")

    records = np.zeros(packs, dtype=schema.record_dtype)
    lengths = _by_place(sequences.lengths, place, records["lengths"].shape)
    records["lengths"] = lengths
    taken = schema.taken(lengths)
    starts = _starts_of_sequences(taken, place, schema.max_sequence_length, "tokens")
    first_slots = pack * schema.max_sequence_length + starts
    for column in schema.on(SLOT):
        values = sequences.tokens[column.name]
        _store_ragged(records, column, values, first_slots, sequences.lengths, starts)

    if schema.on(PREDICTION):
        P = schema.max_predictions_per_pack
        counts = _by_place(sequences.prediction_counts, place, lengths.shape)
        records["prediction_counts"] = counts
        masked_starts = _starts_of_sequences(counts, place, P, "masked tokens")
        first_masked = pack * P + masked_starts
        for column in schema.on(PREDICTION):
            values = sequences.predictions[column.name]
            _store_ragged(
                records, column, values, first_masked, sequences.prediction_counts, starts
            )

    for column in schema.on(SEQUENCE):
        values = sequences.scalars[column.name]
        if column.slot_index:
            values = values + starts
        records[column.name] = _by_place(values, place, lengths.shape)
    return records


def _by_place(values: np.ndarray, place: np.ndarray, shape: Tuple[int, ...]) -> np.ndarray:
    """Return one value of each sequence as a table, int64 [packs, D], 0 for absent sequences."""
    table = np.zeros(shape, dtype=np.int64)
    table.reshape(-1)[place] = values
    return table


def _starts_of_sequences(counts: np.ndarray, place: np.ndarray, most: int, unit: str) -> np.ndarray:
    """Return where each sequence's values start in its pack, int64 [n]; counts: of its values, [packs, D]."""
    fullest = int(counts.sum(axis=1).max(initial=0))
    if fullest > most:
        raise ValueError(
            f"a pack holds {fullest} {unit}, at most {most} fit; assign fewer sequences"
        )
    return _starts_in_rows(counts).reshape(-1)[place]


def _store_ragged(
    records: np.ndarray,
    column: StoredColumn,
    values: np.ndarray,
    first: np.ndarray,
    sizes: np.ndarray,
    starts: np.ndarray,
) -> None:
    """Copy the values of each sequence into its pack.

    Per sequence, [n]: first, its place among the values of all packs; sizes, its values; starts, its first slot.
    """
    if column.slot_index:
        values = values + np.repeat(starts, sizes)
    values = values.astype(column.dtype, copy=False)
    rows = np.zeros(records[column.name].shape, dtype=column.dtype)
    ragged_copy(rows.reshape(-1), first, values, starts_of(sizes), sizes)
    records[column.name] = rows


def disassemble(schema: PackSchema, records: np.ndarray) -> Sequences:
    """Return the sequences of packs, in order of pack and slot: the inverse of `assemble`.

    Args:
        schema: The shape of the packs.
        records: Packs, [n] of schema.record_dtype.
    """
    lengths = records["lengths"].astype(np.int64)
    is_present = lengths > 0
    starts = _starts_in_rows(schema.taken(lengths))[is_present]

    def values_of(axis: str, is_used: np.ndarray, counts: np.ndarray) -> Dict[str, np.ndarray]:
        columns = {}
        for column in schema.on(axis):
            values = records[column.name][is_used]
            if column.slot_index:
                values = (values - np.repeat(starts, counts)).astype(column.dtype)
            columns[column.name] = values
        return columns

    tokens = values_of(SLOT, schema._real_slots(lengths), lengths[is_present])
    counts = np.zeros(len(starts), dtype=np.int64)
    predictions: Dict[str, np.ndarray] = {}
    if schema.on(PREDICTION):
        counts_in_packs = records["prediction_counts"].astype(np.int64)
        counts = counts_in_packs[is_present]
        is_used = np.arange(schema.max_predictions_per_pack) < counts_in_packs.sum(axis=1)[:, None]
        predictions = values_of(PREDICTION, is_used, counts)
    scalars = values_of(SEQUENCE, is_present, np.ones_like(starts))
    return Sequences(lengths[is_present], tokens, counts, predictions, scalars)


def _rows(runs: Sequence[Tuple[Any, np.ndarray]], width: int) -> np.ndarray:
    """Return rows, int32 [n, width], of each sequence's values in turn, each repeated by its count, then zeros.

    runs: values and counts, [n, D] (values may be broadcast); the runs of a sequence are consecutive in the row.
    """
    shape = runs[0][1].shape
    counts = np.zeros((shape[0], shape[1] * len(runs) + 1), dtype=np.int64)
    values = np.zeros(counts.shape, dtype=np.int32)
    for number, (value, count) in enumerate(runs):
        counts[:, number : -1 : len(runs)] = count
        values[:, number : -1 : len(runs)] = value
    counts[:, -1] = width - counts.sum(axis=1)
    return np.repeat(values.reshape(-1), counts.reshape(-1)).reshape(shape[0], width)


def decode(schema: PackSchema, records: np.ndarray) -> Dict[str, np.ndarray]:
    """Return the batch of these records: every field of the schema, int32 [n, S], [n, P] or [n, D].

    Args:
        schema: The shape of the packs.
        records: Packs, [n] of schema.record_dtype.
    """
    S = schema.max_sequence_length
    lengths = records["lengths"].astype(np.int64)
    taken = schema.taken(lengths)
    starts = _starts_in_rows(taken)
    # Numbers of the sequences in a pack; 0 is padding.
    numbers = np.arange(1, schema.max_sequences_per_pack + 1)
    # The padding behind each sequence that rounds it up.
    rounding = [] if schema.multiple_of == 1 else [(0, taken - lengths)]

    def derive(name: str) -> np.ndarray:
        if name == "input_mask":
            return _rows([(numbers, lengths), *rounding], S)
        if name == "positions":
            positions = np.arange(S, dtype=np.int32) - _rows([(starts, taken)], S)
            return np.where(schema._real_slots(lengths), positions, np.int32(0))
        if name == "segment_ids":
            first = records["first_segment_lengths"].astype(np.int64)
            return _rows([(0, first), (1, lengths - first), *rounding], S)
        if name == "masked_lm_weights":
            counts = records["prediction_counts"].astype(np.int64)
            return _rows([(numbers, counts)], schema.max_predictions_per_pack)
        if name == "next_sentence_positions":
            return np.where(lengths > 0, starts, 0).astype(np.int32)
        return (lengths > 0).astype(np.int32)  # next_sentence_weights

    stored = {column.name for column in schema.columns}
    return {
        name: records[name].astype(np.int32) if name in stored else derive(name)
        for name in schema.fields
    }
