"""The store of this package, as a source of packs and as a target for packs made elsewhere."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, List, Sequence, Tuple

import numpy as np

from pack_data.cli.bad_records import BadRecords, Origin
from pack_data.formats.records import STARTS, Record, RecordError, RowWidths, checked_pack
from pack_data.store.data_set import PackStore, StoreWriter, read_manifest
from pack_data.store.packs import BERT, FIELDS, SLOT, PackSchema, assemble, decode, disassemble
from pack_data.store.sequences import Example, Sequences, starts_of

PACKS = 256  # decoded or assembled at a time


def kind(path: str) -> str:
    return "packs" if read_manifest(Path(path)).kind == BERT else "token_packs"


def shape(path: str) -> RowWidths:
    schema = read_manifest(Path(path)).schema
    return RowWidths(schema.max_sequence_length, schema.max_predictions_per_pack, schema.max_sequences_per_pack)


def _blocks(path: str) -> Iterator[Tuple[int, PackSchema, np.ndarray]]:
    """First pack, schema and records of a few packs at a time."""
    with PackStore.open(Path(path)) as store:
        number = 0
        for shard in store.shards():
            for start in range(0, len(shard), PACKS):
                records = np.array(shard[start : start + PACKS])
                yield number, store.schema, records
                number += len(records)


def read(path: str, bad: BadRecords) -> Iterator[Record]:
    """Yield the packs in order.  Foreign columns hold one value for each sequence of the pack, then zeros."""
    for first, schema, records in _blocks(path):
        batch = decode(schema, records)
        names = list(FIELDS) if schema.kind == BERT else [column.name for column in schema.on(SLOT)]
        foreign = [name for name in batch if name not in (*names, "input_mask", "positions")]
        for row in range(len(records)):
            value = {name: batch[name][row] for name in names}
            if schema.kind != BERT:
                real = batch["input_mask"][row] > 0
                value = {name: values[real] for name, values in value.items()}
                value[STARTS] = np.flatnonzero(batch["positions"][row][real] == 0).astype(np.int32)
            yield Record(Origin(path, first + row), value, {name: batch[name][row] for name in foreign})


def sequences(path: str) -> Iterator[Record]:
    """The sequences in order of packs and slots, each with its own foreign values and the origin of its pack."""
    for first, schema, records in _blocks(path):
        block = disassemble(schema, records)
        packs = np.repeat(np.arange(len(records)), (records["lengths"] > 0).sum(axis=1))
        values: Sequence[Any] = (
            block.to_examples()
            if schema.kind == BERT
            else [
                {name: column[begin : begin + length] for name, column in block.tokens.items()}
                for begin, length in zip(starts_of(block.lengths), block.lengths)
            ]
        )
        foreign = [
            name
            for name in block.scalars
            if schema.kind != BERT or name not in ("first_segment_lengths", "next_sentence_labels")
        ]
        for row, value in enumerate(values):
            yield Record(
                Origin(path, first + int(packs[row])), value, {name: block.scalars[name][row] for name in foreign}
            )


def write(path: str, packs: Callable[[], Iterable[Record]], widths: RowWidths) -> int:
    """Store packs as they are, in their order, and return how many.  `packs` is called twice: once for the largest id.

    The packing is kept, but rows take the store's layout (sequences one behind the other) and foreign columns, whose
    meaning within a pack is not known, are not stored.
    """
    largest = max(
        (max(int(record.value["input_ids"].max()), int(record.value["masked_lm_ids"].max())) for record in packs()),
        default=0,
    )
    size, predictions, depth = widths.of_packs()
    schema = PackSchema.bert(size, depth, predictions, vocabulary_size=largest + 1)
    writer, records, count = StoreWriter(Path(path), schema), iter(packs()), 0
    for block in iter(lambda: list(islice(records, PACKS)), []):
        examples: List[Example] = []
        pack: List[int] = []
        slot: List[int] = []
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
