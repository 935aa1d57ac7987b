"""The sequences of a task in memory: tokens of texts, packed with `pack_data`."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ipu_packed_bert.data.global_batches import Batch, Packs
from pack_data.building.assignment import assign
from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.store.packs import (
    SEQUENCE,
    SLOT,
    PackSchema,
    StoredColumn,
    assemble,
    decode,
)
from pack_data.store.sequences import Sequences, ragged_index, smallest_type
from pack_data.text.special_tokens import Template
from pack_data.text.spelling import Spelling
from pack_data.text.vocabulary import AnyVocabulary

_TEXTS_AT_A_TIME = 1024  # texts; the objects that the tokenizers library returns are large


class Tokens(NamedTuple):
    """The tokens of one text."""

    ids: np.ndarray  # int32 [n]
    spans: np.ndarray  # int64 [n, 2]: first character, and one after the last


class Tokenizer:
    """A vocabulary that returns arrays of tokens.

    Args:
        vocabulary: Splits texts into tokens.
        read: Called with the number of texts after each batch of them, for progress.
    """

    def __init__(self, vocabulary: AnyVocabulary, *, read: Callable[[int], Any] = int):
        self._read = read
        self.vocabulary = vocabulary
        self.spelling = Spelling()  # the characters of all texts so far

    def encode(self, texts: Sequence[str]) -> List[Tokens]:
        """Return the tokens of each text, without special tokens."""
        encoded: List[Tokens] = []
        for start in range(0, len(texts), _TEXTS_AT_A_TIME):
            part = texts[start : start + _TEXTS_AT_A_TIME]
            encodings = self.vocabulary.cut(part)
            counts = self.vocabulary.spelling(part, encodings)
            self.spelling = Spelling.total([self.spelling, counts])
            for tokens in encodings:
                spans = np.array(tokens.offsets, np.int64).reshape(-1, 2)
                encoded.append(Tokens(np.array(tokens.ids, np.int32), spans))
            self._read(len(part))
        return encoded

    def template(self, texts: int) -> Template:
        """Return the special tokens around one text or two."""
        return self.vocabulary.single if texts == 1 else self.vocabulary.pair

    def joined(self, parts: Sequence[np.ndarray]) -> Tuple[np.ndarray, np.ndarray]:
        """Return input ids and segment ids of one text or two: [CLS] first [SEP] second [SEP]."""
        return self.template(len(parts)).joined(parts)


@dataclass(frozen=True, eq=False)
class Inputs:
    """The n sequences of a task."""

    lengths: np.ndarray  # tokens [n]
    input_ids: np.ndarray  # flat, one sequence after another
    segment_ids: np.ndarray  # flat
    slot_targets: Mapping[str, np.ndarray] = field(default_factory=dict)  # slots in a sequence [n]
    targets: Mapping[str, np.ndarray] = field(default_factory=dict)  # other targets [n, ...]
    slots: Mapping[str, np.ndarray] = field(default_factory=dict)  # other columns of tokens, flat
    records: Optional[int] = None  # that the sequences come from; None: as many as sequences

    @classmethod
    def of(cls, ids: Sequence[np.ndarray], segment_ids: np.ndarray, **further: Any) -> Inputs:
        """Join the ids of all sequences; segment_ids and `slots` are already flat."""
        lengths = np.array(list(map(len, ids)), np.int64)
        return cls(lengths, np.concatenate(ids), segment_ids, **further)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> Dict[str, np.ndarray]:
        """All columns of one value per token."""
        return {"input_ids": self.input_ids, "segment_ids": self.segment_ids, **self.slots}

    @cached_property
    def sequences(self) -> Sequences:
        """The sequences for `pack_data`, numbered from 1 and without `targets`."""
        columns = {
            "cls_positions": np.zeros(len(self), np.int64),
            **self.slot_targets,
            "sequence_numbers": np.arange(1, len(self) + 1, dtype=np.int64),
        }
        return Sequences.of_tokens(self.lengths, self.tokens, columns)


class ExamplePacks(Packs):
    """The sequences in packs. Each epoch assigns sequences of equal length to packs anew.

    A file has few updates in an epoch. If its last update had the remaining packs, their sequences would count several
    times as much as others, because a loss is normalised over an update: the remainder is spread over all updates.

    Args:
        inputs: The sequences.
        packing: The lengths that share a pack.
        seed: Seed of the assignment, together with the epoch.
        depth: Places for sequences in a row; by default those of the deepest pack.

    Raises:
        ValueError: A sequence is too long.
    """

    even_updates = True

    def __init__(
        self, inputs: Inputs, packing: Packing, *, seed: int = 0, depth: Optional[int] = None
    ):
        self.inputs = inputs
        self.packing = packing
        self.seed = seed
        self.digest = zlib.crc32(inputs.input_ids.tobytes())
        for _, values in sorted({**inputs.targets, **inputs.slot_targets, **inputs.slots}.items()):
            self.digest = zlib.crc32(np.ascontiguousarray(values).tobytes(), self.digest)
        self.schema = _schema_of(
            inputs, packing.max_sequence_length, max(1, depth or packing.largest_depth)
        )
        self._epoch = -1
        self._packs = np.zeros(0, self.schema.record_dtype)  # of the epoch

    def __len__(self) -> int:
        return self.packing.packs

    def order(self, epoch: int) -> np.ndarray:
        return np.arange(len(self))  # the assignment shuffles the sequences already

    def again(self) -> Callable[[], Packs]:
        depth = self.schema.max_sequences_per_pack
        return partial(ExamplePacks, self.inputs, self.packing, seed=self.seed, depth=depth)

    def batch(self, numbers: np.ndarray, epoch: int) -> Batch:
        return _fields(self.inputs, self.schema, self._records(numbers, epoch))

    def alone(self, numbers: np.ndarray, epoch: int) -> Batch:
        sequences = self._records(numbers, epoch)["sequence_numbers"]
        rows = [[number - 1] for number in sequences[sequences > 0].tolist()]
        schema = self.schema
        return rows_of(self.inputs, rows, schema.max_sequence_length, schema.max_sequences_per_pack)

    def _records(self, numbers: np.ndarray, epoch: int) -> np.ndarray:
        if self._epoch != epoch:
            places = assign(self.inputs.lengths, self.packing, (self.seed, epoch))
            self._packs = assemble(
                self.schema, self.inputs.sequences, places.pack, places.slot, len(self)
            )
            self._epoch = epoch
        return self._packs[numbers]


def _schema_of(inputs: Inputs, slots: int, depth: int) -> PackSchema:
    """Return the schema of rows of `slots` slots and `depth` sequences."""
    largest = {name: int(values.max(initial=0)) for name, values in inputs.tokens.items()}
    columns = [StoredColumn(name, SLOT, smallest_type(value)) for name, value in largest.items()]
    for name in ("cls_positions", *inputs.slot_targets):
        columns.append(StoredColumn(name, SEQUENCE, smallest_type(slots), slot_index=True))
    columns.append(StoredColumn("sequence_numbers", SEQUENCE, smallest_type(len(inputs))))
    return PackSchema.of_tokens(slots, depth, columns)


def rows_of(
    inputs: Inputs, rows: Sequence[Sequence[int]], slots: int, depth: Optional[int] = None
) -> Batch:
    """Return the fields of rows of sequences, without scales.

    Args:
        inputs: The sequences.
        rows: The indices of the sequences of each row.
        slots: Slots of a row.
        depth: Places for sequences in a row; by default those of the fullest row.

    Raises:
        ValueError: A row does not fit.
    """
    counts = np.array(list(map(len, rows)), np.int64)
    numbers = np.array(list(chain.from_iterable(rows)), np.int64)
    schema = _schema_of(inputs, slots, depth or max(1, int(counts.max(initial=0))))
    row = np.repeat(np.arange(len(rows)), counts)
    place = ragged_index(np.zeros(len(rows), np.int64), counts)
    records = assemble(schema, inputs.sequences.take(numbers), row, place, len(rows))
    return _fields(inputs, schema, records)


def _fields(inputs: Inputs, schema: PackSchema, records: np.ndarray) -> Batch:
    batch = decode(schema, records)
    for name, values in inputs.targets.items():
        # An absent sequence gets the target of the first one; its weight is 0.
        batch[name] = values[np.maximum(batch["sequence_numbers"], 1) - 1]
    return batch


def pack_inputs(
    inputs: Inputs, *, max_sequence_length: int, packer: str, max_sequences_per_pack: Optional[int]
) -> Packing:
    """Pack the lengths of sequences; the packing is the same in all epochs."""
    histogram = LengthHistogram.from_lengths(inputs.lengths, max_sequence_length)
    packing = get_packer(packer)(histogram, max_sequences_per_pack=max_sequences_per_pack)
    packing.check(histogram)
    return packing
