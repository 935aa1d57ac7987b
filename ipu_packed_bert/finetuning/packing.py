"""Sequences of a task -> packs -> updates, through the packers and the pack layout of `pack_data`.

An update is a run of packs that together hold about as many sequences as configured, and its loss is the mean over exactly
these.  `unpacked` gives the very same updates with each sequence alone in its row: the baseline, and what equality is tested
against.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Dict, Iterator, Mapping, NamedTuple, Optional

import numpy as np

from pack_data.building.assignment import assign
from pack_data.histogram import LengthHistogram
from pack_data.packers import get_packer
from pack_data.packing import Packing
from pack_data.packs import SEQUENCE, SLOT, StoredColumn, PackSchema, assemble, decode, smallest_type
from pack_data.sequences import Sequences

Batch = Dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Inputs:
    """n sequences of a task.

    lengths [n]; input_ids and segment_ids flat, one sequence after another; slot_targets: name -> place in the sequence [n];
    targets: name -> anything else that is learnt [n, ...].
    """

    lengths: np.ndarray
    input_ids: np.ndarray
    segment_ids: np.ndarray
    slot_targets: Mapping[str, np.ndarray] = field(default_factory=dict)
    targets: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def sequences(self) -> Sequences:
        columns = {"cls_positions": np.zeros(len(self), np.int64), **self.slot_targets,
                   "sequence_numbers": np.arange(1, len(self) + 1, dtype=np.int64)}
        return Sequences.of_tokens(self.lengths, {"input_ids": self.input_ids, "segment_ids": self.segment_ids}, columns)


class Rows(NamedTuple):
    """Packs in the order in which they are worked on."""

    schema: PackSchema
    records: np.ndarray  # [rows] of schema.record_dtype

    @property
    def sequences(self) -> np.ndarray:
        """Sequences in each row."""
        return (self.records["lengths"] > 0).sum(axis=1)


class PackedInputs:
    """The sequences and one packing of them, which serves every epoch; ValueError where a sequence is too long."""

    def __init__(self, inputs: Inputs, *, max_sequence_length: int, packer: str, max_sequences_per_pack: Optional[int]):
        histogram = LengthHistogram.from_lengths(inputs.lengths, max_sequence_length)
        self.inputs = inputs
        self.packing: Packing = get_packer(packer)(histogram, max_sequences_per_pack=max_sequences_per_pack)
        self.packing.check(histogram)

    def rows(self, seed: Any, *, unpacked: bool = False) -> Rows:
        """All sequences, dealt out to the packs and the packs shuffled by the seed; `unpacked`: in the same order, one a row."""
        place = assign(self.inputs.lengths, self.packing, seed)
        pack, slot, packs = place.pack, place.slot, self.packing.packs
        if unpacked:
            pack = np.empty(len(self.inputs), np.int64)
            pack[np.lexsort((place.slot, place.pack))] = np.arange(len(self.inputs))
            slot, packs = np.zeros(len(self.inputs), np.int64), len(self.inputs)
        schema = self._schema(1 if unpacked else max(1, self.packing.largest_depth))
        return Rows(schema, assemble(schema, self.inputs.sequences, pack, slot, packs))

    def _schema(self, depth: int) -> PackSchema:
        slots, inputs = self.packing.max_sequence_length, self.inputs
        return PackSchema.of_tokens(slots, depth, (
            StoredColumn("input_ids", SLOT, smallest_type(int(inputs.input_ids.max(initial=0)))),
            StoredColumn("segment_ids", SLOT, "|u1"),
            *(StoredColumn(name, SEQUENCE, smallest_type(slots), slot_index=True) for name in ("cls_positions", *inputs.slot_targets)),
            StoredColumn("sequence_numbers", SEQUENCE, smallest_type(len(inputs)))))

    def batch(self, rows: Rows, first: int, last: int) -> Batch:
        """The fields of `heads` for rows first..last - 1, all but the scale."""
        batch = decode(rows.schema, rows.records[first:last])
        number = batch["sequence_numbers"]
        for name, values in self.inputs.targets.items():
            # A sequence that is not there gets the first one's target; it weighs nothing.
            batch[name] = values[np.maximum(number, 1) - 1]
        return batch


class Schedule:
    """Which rows make up which update: every epoch new packs of the same lengths, cut into the same number of updates."""

    def __init__(self, packed: PackedInputs, *, sequences_per_update: int, epochs: int, seed: int, unpacked: bool = False):
        self._packed, self._seed, self._unpacked = packed, seed, unpacked
        self._epoch: Optional[int] = None
        wanted = max(1, int(round(len(packed.inputs) / sequences_per_update)))
        self.updates_per_epoch = max(1, min(wanted, packed.packing.packs))
        self.steps = epochs * self.updates_per_epoch

    def update(self, step: int, micro_batch: int) -> Iterator[Batch]:
        """The micro-batches of update number `step`, the first is 0; their `scale` is 1 / sequences of the update."""
        epoch, number = divmod(step, self.updates_per_epoch)
        if epoch != self._epoch:
            seed = (self._seed, epoch)
            self._rows = self._packed.rows(seed, unpacked=self._unpacked)
            # The cuts are those of the packs in both cases: the same sequences in the same updates.
            packs = self._packed.rows(seed) if self._unpacked else self._rows
            self._cuts = update_cuts(packs.sequences, self.updates_per_epoch)
            if self._unpacked:
                self._cuts = np.concatenate([[0], np.cumsum(packs.sequences)])[self._cuts]
            self._epoch = epoch
        first, last = int(self._cuts[number]), int(self._cuts[number + 1])
        scale = np.array(1.0 / int(self._rows.sequences[first:last].sum()))
        for start in range(first, last, micro_batch):
            yield {**self._packed.batch(self._rows, start, min(start + micro_batch, last)), "scale": scale}


def update_cuts(sequences: np.ndarray, updates: int) -> np.ndarray:
    """Where each update begins, and the end, [updates + 1]: none empty, each with as nearly the same number of sequences as
    whole packs allow."""
    packs = len(sequences)
    ends = np.cumsum(sequences)
    cuts = np.zeros(updates + 1, np.int64)
    for number in range(1, updates + 1):
        after = int(np.argmin(np.abs(ends - ends[-1] * number / updates))) + 1
        cuts[number] = min(max(after, cuts[number - 1] + 1), packs - (updates - number))
    return cuts
