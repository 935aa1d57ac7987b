"""The store of this package, as a source of packs or token sequences and as a target for packs made elsewhere."""
from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Callable, Iterable, Iterator

import numpy as np

from pack_data.formats.records import BadRecords, Origin, Record, RecordError, Shape, checked_pack
from pack_data.packs import BERT, FIELDS, PackSchema, assemble, decode, disassemble
from pack_data.sequences import Sequences, starts_of
from pack_data.store import PackStore, StoreWriter

PACKS = 256  # decoded or assembled at a time


def kind(path: str) -> str:
    with PackStore.open(Path(path)) as store:
        return "packs" if store.schema.kind == BERT else "tokens"


def shape(path: str) -> Shape:
    with PackStore.open(Path(path)) as store:
        schema = store.schema
        if schema.kind != BERT:
            return Shape()
        return Shape(schema.max_sequence_length, schema.max_predictions_per_pack, schema.max_sequences_per_pack)


def predictions_per_sequence(path: str) -> int:
    """What the data set was built with, 0 where it does not say."""
    with PackStore.open(Path(path)) as store:
        return store.manifest.max_predictions_per_sequence


def read(path: str, bad: BadRecords) -> Iterator[Record]:
    """Packs, or token sequences in the order of packs and slots."""
    with PackStore.open(Path(path)) as store:
        rows = _packs if store.schema.kind == BERT else _sequences
        number = 0
        for shard in store.shards():
            for start in range(0, len(shard), PACKS):
                for record in rows(path, number, store.schema, np.array(shard[start:start + PACKS])):
                    number += 1
                    yield record


def _packs(path: str, first: int, schema: PackSchema, records: np.ndarray) -> Iterator[Record]:
    batch = decode(schema, records)
    for row in range(len(records)):
        yield Record(
            Origin(path, first + row),
            {name: batch[name][row] for name in FIELDS},
            {name: values[row] for name, values in batch.items() if name not in FIELDS})


def _sequences(path: str, first: int, schema: PackSchema, records: np.ndarray) -> Iterator[Record]:
    sequences = disassemble(schema, records)
    for row, (begin, length) in enumerate(zip(starts_of(sequences.lengths), sequences.lengths)):
        yield Record(
            Origin(path, first + row),
            {name: values[begin:begin + length] for name, values in sequences.tokens.items()},
            {name: values[row] for name, values in sequences.scalars.items()})


def write(path: str, packs: Callable[[], Iterable[Record]], widths: Shape) -> int:
    """Store packs as they are, in their order, and return how many.  `packs` is called twice: once for the largest id.

    The packing is kept, but rows take the store's layout (sequences one behind the other) and foreign columns, whose
    meaning within a pack is not known, are not stored.
    """
    largest = max((max(int(record.value["input_ids"].max()), int(record.value["masked_lm_ids"].max())) for record in packs()), default=0)
    size, predictions, depth = widths
    schema = PackSchema.bert(size, depth, predictions, vocabulary_size=largest + 1)
    writer, records, count = StoreWriter(Path(path), schema), iter(packs()), 0
    for block in iter(lambda: list(islice(records, PACKS)), []):
        examples, pack, slot = [], [], []
        for row, record in enumerate(block):
            try:
                sequences = checked_pack(record.value)[1]
            except RecordError as error:
                raise ValueError(f"{record.origin}: {error}") from None
            examples += sequences
            pack += [row] * len(sequences)
            slot += range(len(sequences))
        writer.add(assemble(schema, Sequences.from_examples(examples), np.array(pack), np.array(slot), len(block)))
        count += len(block)
    writer.finish(algorithm="as read", vocabulary_size=largest + 1).close()
    return count
