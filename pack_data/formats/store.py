"""The data sets of this package, as a source of packs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator, Sequence, Tuple

import numpy as np

from pack_data.formats.records import Record, RowWidths
from pack_data.reading.bad_records import BadRecords, Origin
from pack_data.store.data_set import PackStore, read_manifest
from pack_data.store.meanings import STARTS
from pack_data.store.packs import BERT, FIELDS, SLOT, PackSchema, decode, disassemble
from pack_data.store.sequences import starts_of

_PACKS = 256  # decoded at a time
_SCALARS_OF_BERT = ("first_segment_lengths", "next_sentence_labels")


def kind(path: str) -> str:
    """Return "packs" for a data set of BERT, else "token_packs"."""
    return "packs" if read_manifest(Path(path)).kind == BERT else "token_packs"


def shape(path: str) -> RowWidths:
    """Return the row widths of the packs."""
    schema = read_manifest(Path(path)).schema
    return RowWidths(
        schema.max_sequence_length, schema.max_predictions_per_pack, schema.max_sequences_per_pack
    )


def _blocks(path: str) -> Iterator[Tuple[int, PackSchema, np.ndarray]]:
    """Yield the number of the first pack, the schema, and the records of a few packs at a time."""
    with PackStore.open(Path(path)) as store:
        number = 0
        for shard in store.shards():
            for start in range(0, len(shard), _PACKS):
                records = np.array(shard[start : start + _PACKS])
                yield number, store.schema, records
                number += len(records)


def read(path: str, bad: BadRecords) -> Iterator[Record]:
    """Yield the packs in order.  Foreign columns hold one value per sequence of the pack, then zeros."""
    for first, schema, records in _blocks(path):
        batch = decode(schema, records)
        names = list(FIELDS) if schema.kind == BERT else [column.name for column in schema.on(SLOT)]
        foreign = [name for name in batch if name not in (*names, "input_mask", "positions")]
        for row in range(len(records)):
            value = {name: batch[name][row] for name in names}
            if schema.kind != BERT:
                is_token = batch["input_mask"][row] > 0
                value = {name: values[is_token] for name, values in value.items()}
                is_start = batch["positions"][row][is_token] == 0
                value[STARTS] = np.flatnonzero(is_start).astype(np.int32)
            yield Record(
                Origin(path, first + row), value, {name: batch[name][row] for name in foreign}
            )


def sequences(path: str) -> Iterator[Record]:
    """Yield the sequences in order of packs and slots, with their own foreign values and the origin of their pack."""
    for first, schema, records in _blocks(path):
        block = disassemble(schema, records)
        values: Sequence[Any]
        if schema.kind == BERT:
            values = block.to_examples()
            foreign = [name for name in block.scalars if name not in _SCALARS_OF_BERT]
        else:
            values = [
                {name: column[start : start + length] for name, column in block.tokens.items()}
                for start, length in zip(starts_of(block.lengths), block.lengths)
            ]
            foreign = list(block.scalars)
        packs = first + np.nonzero(records["lengths"])[0]
        for row, (pack, value) in enumerate(zip(packs.tolist(), values)):
            yield Record(
                Origin(path, pack), value, {name: block.scalars[name][row] for name in foreign}
            )
