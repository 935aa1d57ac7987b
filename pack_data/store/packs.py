"""The pack: its fields, what is stored of them, sequences to packs (`assemble`) and back (`disassemble`).

A stored pack is one record with the smallest sufficient types, of only what cannot be derived. The lengths of each
sequence and of its first segment give positions, input_mask, segment_ids and next_sentence_positions; the number of
each sequence's masked tokens gives masked_lm_weights. At S = 512, D = 3, P = 79 that is 1,358 bytes a pack, against
9,104 as int32.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Mapping, Tuple, Union

import numpy as np

from pack_data.reading.fields import Fields, shown, whole_number
from pack_data.store.sequences import LONGEST, Sequences, check_multiple, ragged_copy, rounded_up, starts_of

BERT, TOKENS = "bert_pretraining", "tokens"

# The fields of a batch of BERT packs in the order of the model's arguments, named as in the packed MLPerf format.
FIELDS = tuple(
    (
        "input_ids input_mask segment_ids positions masked_lm_positions masked_lm_ids masked_lm_weights "
        "next_sentence_positions next_sentence_labels next_sentence_weights"
    ).split()
)

# One value for each slot [S], for each sequence [D], for each masked token [P].
SLOT, SEQUENCE, PREDICTION = "slot", "sequence", "prediction"
_TYPES = ("|u1", "<u2", "<u4", "|i1", "<i2", "<i4")
# Slots, sequences or masked tokens of one pack, and bytes of its record.
LARGEST_WIDTH, LARGEST_RECORD = LONGEST, 1 << 30


def smallest_type(largest: int) -> str:
    """The smallest unsigned type, little endian, that holds 0..largest."""
    for name, limit in (("|u1", 1 << 8), ("<u2", 1 << 16), ("<u4", 1 << 31)):
        if largest < limit:
            return name
    raise ValueError(f"a column holds {largest}; a batch is int32, so values up to 2147483647 can be stored")


@dataclass(frozen=True)
class StoredColumn:
    """A stored column. `slot_index`: its values are positions in the sequence, in a pack from the pack's start."""

    name: str
    axis: str
    dtype: str
    slot_index: bool = False

    def __post_init__(self) -> None:
        # As the header of a .npy file holds it: Latin-1 without escapes.
        if not (
            isinstance(self.name, str)
            and self.name.isprintable()
            and re.fullmatch(r"[^\\'\"\u0100-\U0010ffff]{1,200}", self.name)
        ):
            raise ValueError(
                f"a column is called {shown(self.name)}; a name has one to 200 printable characters of Latin-1, no "
                "quotes and no backslash: rename it"
            )
        if self.axis not in (SLOT, SEQUENCE, PREDICTION):
            raise ValueError(
                f"column {self.name}: one value for each {shown(self.axis)}; it is {SLOT}, {SEQUENCE} or {PREDICTION}"
            )
        if self.dtype not in _TYPES:
            raise ValueError(f"column {self.name}: of type {shown(self.dtype)}; the types are {', '.join(_TYPES)}")


@dataclass(frozen=True)
class PackSchema:
    """The shape of a pack and the columns stored for it.

    max_sequence_length (S): slots; max_sequences_per_pack (D): packing depth; max_predictions_per_pack (P): masked
    tokens. No `columns` means those of BERT pre-training with token ids below 65,536; see `bert` and `of_tokens`.
    """

    max_sequence_length: int
    max_sequences_per_pack: int
    max_predictions_per_pack: int
    kind: str = BERT
    columns: Tuple[StoredColumn, ...] = ()
    multiple_of: int = 1  # each sequence begins at a multiple of it; the slots between two are padding

    def __post_init__(self) -> None:
        limits = (("max_sequence_length", 1), ("max_sequences_per_pack", 1), ("max_predictions_per_pack", 0))
        for limit, least in limits:
            number = whole_number(limit, getattr(self, limit), least=least, most=LARGEST_WIDTH)
            object.__setattr__(self, limit, number)
        object.__setattr__(self, "multiple_of", whole_number("multiple_of", self.multiple_of, least=1))
        check_multiple(self.max_sequence_length, self.multiple_of)
        if self.kind not in (BERT, TOKENS):
            raise ValueError(f"packs of the kind {shown(self.kind)}; the kinds are {BERT} and {TOKENS}")
        if not self.columns:
            object.__setattr__(self, "columns", _bert_columns(self.max_sequence_length, 1 << 16))
        names = [column.name for column in self.columns]
        if len(set(names)) != len(names):
            raise ValueError(f"the schema names a column twice: {', '.join(names)}")
        for reserved in {"lengths", "prediction_counts"} & set(names):
            raise ValueError(f"a column may not be called {reserved}: every pack has one of that name")
        if self.kind == BERT:
            self._check_bert()
        elif not self.on(SLOT) or self.on(PREDICTION):
            raise ValueError(f"packs of {TOKENS} need a column with a value for each slot, and none for masked tokens")
        widths = [self.width(column.axis) * np.dtype(column.dtype).itemsize for column in self.columns]
        if sum(widths) + 8 * self.max_sequences_per_pack > LARGEST_RECORD:
            raise ValueError(f"a pack of these columns takes more than {LARGEST_RECORD:,} bytes; make packs shorter")

    def _check_bert(self) -> None:
        found = {column.name: column for column in self.columns}
        for needed in _bert_columns(self.max_sequence_length, 1 << 16):
            own = found.get(needed.name)
            if own is None or "i" in own.dtype or (own.axis, own.slot_index) != (needed.axis, needed.slot_index):
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
        """The schema of BERT pre-training packs.

        An `extra` column with the name of a derived field is stored instead of derived. Any other is stored beside the
        fields and is part of every batch.
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
        """The schema of packs of any integer columns, one value for each token (SLOT) or sequence (SEQUENCE)."""
        return cls(max_sequence_length, max_sequences_per_pack, 0, TOKENS, tuple(columns))

    def on(self, axis: str) -> Tuple[StoredColumn, ...]:
        """The columns that have a value for each slot, sequence or prediction."""
        return tuple(column for column in self.columns if column.axis == axis)

    def width(self, axis: str) -> int:
        """Values of a pack on an axis: its slots, sequences or predictions."""
        return {
            SLOT: self.max_sequence_length,
            SEQUENCE: self.max_sequences_per_pack,
            PREDICTION: self.max_predictions_per_pack,
        }[axis]

    def taken(self, lengths: np.ndarray) -> np.ndarray:
        """Slots that sequences of these lengths take, of the same shape."""
        return rounded_up(lengths, self.multiple_of)

    def real_slots(self, lengths: np.ndarray) -> np.ndarray:
        """bool [n, S]: the slots with a token, in packs with sequences of lengths [n, D]."""
        taken = self.taken(lengths)
        if self.multiple_of == 1:
            real: np.ndarray = np.arange(self.max_sequence_length) < taken.sum(axis=1)[:, None]
            return real
        n, D = lengths.shape
        runs = np.stack([lengths, taken - lengths], axis=2).reshape(n, 2 * D)
        numbers = np.tile(np.append(np.tile([True, False], D), False), n)
        return np.repeat(numbers, _with_rest(runs, self.max_sequence_length)).reshape(n, self.max_sequence_length)

    @property
    def lengths_dtype(self) -> np.dtype:
        """The part of a record that holds the lengths, and the counts of masked tokens, of its sequences."""
        depth = (self.max_sequences_per_pack,)
        fields: List[Tuple[str, str, Tuple[int, ...]]] = [("lengths", smallest_type(self.max_sequence_length), depth)]
        if self.on(PREDICTION):
            fields.append(("prediction_counts", smallest_type(self.max_predictions_per_pack), depth))
        return np.dtype(fields)

    @property
    def record_dtype(self) -> np.dtype:
        """The record of one pack; the widest types come first, so that most values stay aligned."""
        fields = [(column.name, column.dtype, (self.width(column.axis),)) for column in self.columns]
        own = self.lengths_dtype
        fields += [(name, own[name].base.str, own[name].shape) for name in own.names or ()]
        return np.dtype(sorted(fields, key=lambda field: -np.dtype(field[1]).itemsize))

    @property
    def fields(self) -> Tuple[str, ...]:
        """Names of the arrays in a batch, in order."""
        own = tuple(column.name for column in self.columns)
        if self.kind == BERT:
            return FIELDS + tuple(name for name in own if name not in FIELDS and name != "first_segment_lengths")
        return tuple(name for name in own if name not in ("input_mask", "positions")) + ("input_mask", "positions")

    def to_json(self) -> Dict[str, Any]:
        """Plain values, as a manifest holds them."""
        rounding = {} if self.multiple_of == 1 else {"multiple_of": self.multiple_of}
        return {
            **rounding,
            "kind": self.kind,
            "max_sequence_length": self.max_sequence_length,
            "max_sequences_per_pack": self.max_sequences_per_pack,
            "max_predictions_per_pack": self.max_predictions_per_pack,
            "columns": [
                {"name": c.name, "axis": c.axis, "dtype": c.dtype, "slot_index": c.slot_index} for c in self.columns
            ],
        }

    @classmethod
    def from_json(cls, value: Union[Mapping[str, Any], Fields]) -> PackSchema:
        """Inverse of `to_json`. ValueError for anything else."""
        fields = Fields.of(value, "schema", "make it with `to_json`")
        S, D, P = (
            fields.integer(name, least=0, most=LARGEST_WIDTH)
            for name in ("max_sequence_length", "max_sequences_per_pack", "max_predictions_per_pack")
        )
        multiple_of = fields.integer("multiple_of", least=2, most=LARGEST_WIDTH) if "multiple_of" in fields else 1
        columns = []
        for column in fields.list_of("columns", Fields.object, longest=1000):
            with column.refusing():
                columns.append(
                    StoredColumn(
                        column.text("name", most=200),
                        column.one_of("axis", (SLOT, SEQUENCE, PREDICTION)),
                        column.one_of("dtype", _TYPES),
                        column.boolean("slot_index"),
                    )
                )
        if not columns:
            raise fields.error("columns", "must have an item")
        with fields.refusing():
            return cls(S, D, P, fields.one_of("kind", (BERT, TOKENS)), tuple(columns), multiple_of)


def _bert_columns(max_sequence_length: int, vocabulary_size: int) -> Tuple[StoredColumn, ...]:
    token, slot = smallest_type(max(vocabulary_size - 1, 256)), smallest_type(max_sequence_length)
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
    """max_predictions_per_sequence where none is given: the published value, else what the masking rate needs."""
    return _PUBLISHED_PREDICTIONS.get(
        max_sequence_length, max(1, -int(-masked_lm_probability * max_sequence_length // 1))
    )


def predictions_per_pack(max_predictions_per_sequence: int, depth: int, needed: int) -> int:
    """P: max_predictions_per_sequence + D as published, or what the data needs where that is more.

    The published rule holds where max_predictions_per_sequence >= 0.15 S - 1: a full pack has at most 0.15 S masked
    tokens plus half a token of rounding for each sequence.
    """
    return max(max_predictions_per_sequence + depth, needed)


def assemble(schema: PackSchema, sequences: Sequences, pack: np.ndarray, slot: np.ndarray, packs: int) -> np.ndarray:
    """Records [packs] of schema.record_dtype in which sequence i is number slot[i], from 0, of pack pack[i].

    Raises ValueError where a pack would have more tokens, sequences or masked tokens than fit; nothing is cut.
    """
    S, D, P = (schema.width(axis) for axis in (SLOT, SEQUENCE, PREDICTION))
    if len(slot) and int(slot.max()) >= D:
        raise ValueError(f"a pack holds {int(slot.max()) + 1} sequences, at most {D} fit")
    pack = np.asarray(pack, dtype=np.int64)
    place = pack * D + slot
    if len(place) and np.bincount(place).max() > 1:
        raise ValueError("two sequences were given the same place in a pack")
    records = np.zeros(packs, dtype=schema.record_dtype)

    def by_sequence(values: np.ndarray) -> np.ndarray:
        table = np.zeros(packs * D, dtype=np.int64)
        table[place] = values
        return table.reshape(packs, D)

    def starts_in_packs(counts: np.ndarray, most: int, what: str) -> np.ndarray:
        """Where the values of each sequence begin in its pack."""
        used = counts.sum(axis=1)
        if packs and int(used.max()) > most:
            raise ValueError(f"a pack holds {int(used.max())} {what}, at most {most} fit")
        return (np.cumsum(counts, axis=1) - counts).reshape(-1)[place]

    records["lengths"] = lengths = by_sequence(sequences.lengths)
    starts = starts_in_packs(schema.taken(lengths), S, "tokens")
    runs = [(SLOT, S, starts, sequences.lengths, sequences.tokens)]
    if schema.on(PREDICTION):
        records["prediction_counts"] = counts = by_sequence(sequences.prediction_counts)
        own = starts_in_packs(counts, P, "masked tokens")
        runs.append((PREDICTION, P, own, sequences.prediction_counts, sequences.predictions))
    for axis, width, first, sizes, columns in runs:
        for column in schema.on(axis):
            values = columns[column.name]
            if column.slot_index:
                values = values + np.repeat(starts, sizes)
            rows = np.zeros(packs * width, dtype=column.dtype)
            ragged_copy(rows, pack * width + first, values.astype(column.dtype, copy=False), starts_of(sizes), sizes)
            records[column.name] = rows.reshape(packs, width)
    for column in schema.on(SEQUENCE):
        values = sequences.scalars[column.name]
        records[column.name] = by_sequence(values + starts if column.slot_index else values)
    return records


def disassemble(schema: PackSchema, records: np.ndarray) -> Sequences:
    """The sequences of the packs, in order of pack and slot: the inverse of `assemble`."""
    lengths = records["lengths"].astype(np.int64)
    present = lengths > 0
    taken = schema.taken(lengths)
    starts = (np.cumsum(taken, axis=1) - taken)[present]
    flat_lengths = lengths[present]

    def ragged(axis: str, filled: np.ndarray, counts: np.ndarray) -> Dict[str, np.ndarray]:
        columns = {}
        for column in schema.on(axis):
            values = records[column.name][filled]
            if column.slot_index:
                values = (values - np.repeat(starts, counts)).astype(column.dtype)
            columns[column.name] = values
        return columns

    tokens = ragged(SLOT, schema.real_slots(lengths), flat_lengths)
    counts, predictions = np.zeros(len(flat_lengths), dtype=np.int64), {}
    if schema.on(PREDICTION):
        table = records["prediction_counts"].astype(np.int64)
        counts = table[present]
        filled = np.arange(schema.max_predictions_per_pack) < table.sum(axis=1)[:, None]
        predictions = ragged(PREDICTION, filled, counts)
    scalars = {}
    for column in schema.on(SEQUENCE):
        values = records[column.name][present]
        scalars[column.name] = (values - starts).astype(column.dtype) if column.slot_index else values
    return Sequences(flat_lengths, tokens, counts, predictions, scalars)


def _with_rest(counts: np.ndarray, width: int) -> np.ndarray:
    """counts [n, k] with one more column, so that each row sums to `width`; flattened, for np.repeat."""
    rest = width - counts.sum(axis=1, keepdims=True)
    return np.concatenate([counts, rest], axis=1).reshape(-1)


def decode(schema: PackSchema, records: np.ndarray) -> Dict[str, np.ndarray]:
    """The batch of these records: every field of the schema, int32 [n, S], [n, P] or [n, D]."""
    n, S, D = len(records), schema.max_sequence_length, schema.max_sequences_per_pack
    P = schema.max_predictions_per_pack
    stored = {column.name for column in schema.columns}
    lengths = records["lengths"].astype(np.int64)
    taken = schema.taken(lengths)
    starts = np.cumsum(taken, axis=1) - taken
    present = lengths > 0
    # Sequence numbers 1..D, then 0 for padding, of one pack after another.
    numbers = np.tile(np.append(np.arange(1, D + 1, dtype=np.int32), np.int32(0)), n)
    counts = _with_rest(taken, S)
    batch: Dict[str, np.ndarray] = {}

    def derive(name: str) -> np.ndarray:
        if name == "input_mask":
            return np.repeat(numbers, counts).reshape(n, S)
        if name == "positions":
            # In padding this counts on; the line after next sets it to 0.
            first = np.concatenate([starts, np.zeros((n, 1), np.int64)], axis=1).astype(np.int32).reshape(-1)
            positions = np.arange(S, dtype=np.int32) - np.repeat(first, counts).reshape(n, S)
            return np.where(np.arange(S) < taken.sum(axis=1)[:, None], positions, np.int32(0))
        if name == "segment_ids":
            first = records["first_segment_lengths"].astype(np.int64)
            segments = np.stack([first, taken - first], axis=2).reshape(n, 2 * D)
            ids = np.tile(np.append(np.tile(np.array([0, 1], np.int32), D), np.int32(0)), n)
            return np.repeat(ids, _with_rest(segments, S)).reshape(n, S)
        if name == "masked_lm_weights":
            return np.repeat(numbers, _with_rest(records["prediction_counts"].astype(np.int64), P)).reshape(n, P)
        if name == "next_sentence_positions":
            return np.where(present, starts, 0).astype(np.int32)
        return present.astype(np.int32)  # next_sentence_weights

    for name in schema.fields:
        batch[name] = records[name].astype(np.int32) if name in stored else derive(name)
    if schema.multiple_of > 1:
        between = ~schema.real_slots(lengths)
        for name in {"input_mask", "positions", "segment_ids"} & set(batch) - stored:
            batch[name][between] = 0
    return batch
