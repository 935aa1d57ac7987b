"""Sequences made elsewhere, for `pack_data.build --from`: numbered parts of them, and their columns.

The largest id is known only after the last record. So the parts have the widest types, and the packs the smallest types
that hold what was read.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Sequence, Tuple

from pack_data.building.tasks import save_examples
from pack_data.formats.detect import Source, integer_columns
from pack_data.formats.megatron import tokens_file
from pack_data.reading.files import sha256_of
from pack_data.sequences import Sequences
from pack_data.store.data_set import MANIFEST
from pack_data.store.packs import BERT, PREDICTION, SEQUENCE, SLOT, PackSchema, StoredColumn, smallest_type

PART = 1 << 15  # sequences
_IDS = ("input_ids", "masked_lm_ids")
_TAKEN = ("lengths", "prediction_counts", "pack_in_shard", "slot")  # names of the build's own columns


@dataclass(frozen=True)
class SourceTask:
    """A part of a source, already read."""

    work: str
    part: int
    sequences: Sequences
    schema: PackSchema


def parts_schema(source: Source, max_sequence_length: int, max_predictions: int) -> PackSchema:
    """The columns of a source, from its first record, with the widest types. ValueError where it has no record."""
    first = next(source.examples(), None)
    if first is None:
        raise ValueError(f"{source.path}: has no record; nothing to pack")
    extra = [StoredColumn(name, SEQUENCE, "<i4") for name in integer_columns(first)]
    for name in [column.name for column in extra] + (list(first.value) if source.unpacked_kind == "tokens" else []):
        if name in _TAKEN:
            raise ValueError(
                f"{first.origin.path}: a column may not be called {name}, the build has one of that name; rename it"
            )
    if source.unpacked_kind == "tokens":
        columns = [StoredColumn(name, SLOT, "<i4") for name in first.value]
        return PackSchema.of_tokens(max_sequence_length, 1, columns + extra)
    return PackSchema.bert(max_sequence_length, 1, max_predictions, vocabulary_size=1 << 31, extra=extra)


def tasks(source: Source, work: Path, schema: PackSchema, missing: Callable[[int], bool]) -> Iterator[SourceTask]:
    """The parts that are missing. Every record is read, those of other parts too, because parts count records."""
    for part, sequences in enumerate(source.blocks(PART, schema.max_sequence_length)):
        if missing(part):
            yield SourceTask(str(work.resolve()), part, sequences, schema)


def make_source_part(task: SourceTask) -> Dict[str, Any]:
    """Writes a part and notes the smallest and largest value of each column."""
    columns = {SLOT: task.sequences.tokens, SEQUENCE: task.sequences.scalars, PREDICTION: task.sequences.predictions}
    ranges = {}
    for column in task.schema.columns:
        values = columns[column.axis][column.name]
        if len(values):
            ranges[column.name] = [int(values.min()), int(values.max())]
    return save_examples(Path(task.work), task.part, task.sequences, task.schema, documents=0, ranges=ranges)


def narrowed(schema: PackSchema, notes: Sequence[Mapping[str, Any]]) -> PackSchema:
    """The same columns with the smallest types that hold the values of all parts. All token ids have one type."""
    ranges = _ranges(notes)

    def dtype(column: StoredColumn) -> str:
        low, high = ranges.get(column.name, (0, 0))
        if column.name in _IDS and schema.kind == BERT:
            low, high = _together(ranges, _IDS)
        if low >= 0:
            return smallest_type(high)
        signed = (("|i1", 7), ("<i2", 15), ("<i4", 31))
        return next(name for name, bits in signed if low >= -(1 << bits) and high < 1 << bits)

    # The types of positions and labels follow from the shape of the pack.
    own = {"first_segment_lengths", "next_sentence_labels", "masked_lm_positions"} if schema.kind == BERT else set()
    return replace(
        schema,
        columns=tuple(
            column if column.name in own else replace(column, dtype=dtype(column)) for column in schema.columns
        ),
    )


def vocabulary_size(notes: Sequence[Mapping[str, Any]]) -> int:
    """Largest token id + 1, 0 where no column is called input_ids."""
    return _together(_ranges(notes), _IDS)[1] + 1 if "input_ids" in _ranges(notes) else 0


def _ranges(notes: Sequence[Mapping[str, Any]]) -> Dict[str, Tuple[int, int]]:
    ranges: Dict[str, Tuple[int, int]] = {}
    for note in notes:
        for name, (low, high) in note["ranges"].items():
            before = ranges.get(name, (low, high))
            ranges[name] = (min(before[0], low), max(before[1], high))
    return ranges


def _together(ranges: Mapping[str, Tuple[int, int]], names: Sequence[str]) -> Tuple[int, int]:
    found = [ranges[name] for name in names if name in ranges]
    return min(low for low, _ in found), max(high for _, high in found)


def content_digest(source: Source) -> List[Tuple[str, str]]:
    """(name, sha256) of every file: what goes in, whatever its path."""
    files = source.files if source.format != "store" else [str(Path(source.path) / MANIFEST)]
    if source.format != "megatron":
        return [(Path(file).name, sha256_of(file)) for file in files]
    # The same index may belong to other tokens.
    both = [(file, sha256_of(file) + sha256_of(tokens_file(file))) for file in files]
    return [(Path(file).name, hashlib.sha256(sums.encode()).hexdigest()) for file, sums in both]
