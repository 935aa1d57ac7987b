"""Packed TFRecord: the ten fields of the packed format published for MLPerf BERT, one pack a record.

int64: input_ids, input_mask, segment_ids, positions [S]; masked_lm_positions, masked_lm_ids [P];
next_sentence_positions, next_sentence_labels [D].  float: masked_lm_weights [P] (number of the sequence, 0 unused),
next_sentence_weights [D].  Sequence numbers begin at 1, unused values are 0.
"""

from __future__ import annotations

from typing import Iterable, Iterator, List, Mapping, Optional

import numpy as np

from pack_data.cli.bad_records import BadRecords
from pack_data.formats import tfrecord
from pack_data.formats.records import PACK_FIELDS, Pack, Record, RowWidths, checked_pack, distinct_places, ids_in_range

FLOATS = ("masked_lm_weights", "next_sentence_weights")
FIELDS = tuple(tfrecord.Field(name, "float" if name in FLOATS else "int64") for name in PACK_FIELDS)


def consecutive_packs(rows: Mapping[str, np.ndarray]) -> List[Optional[Pack]]:
    """The packs of consecutive sequences, as the ten fields int32; None where a row is to be checked alone."""
    mask, segments, positions = rows["input_mask"], rows["segment_ids"], rows["positions"]
    places, weights, used_slots = rows["masked_lm_positions"], rows["masked_lm_weights"], rows["next_sentence_weights"]
    n, S = mask.shape
    D = used_slots.shape[1]
    if (
        len({rows[name].shape for name in PACK_FIELDS[:4]})
        + len({rows[name].shape for name in PACK_FIELDS[4:7]})
        + len({rows[name].shape for name in PACK_FIELDS[7:]})
        != 3
        or not S
    ):
        return [None] * n
    # The lengths and first segments of the sequences 1..D give the whole layout; the row must have exactly that one.
    belongs = mask[:, None, :] == np.arange(1, D + 1)[:, None]
    lengths = belongs.sum(axis=2)
    second = (belongs & (segments[:, None, :] != 0)).sum(axis=2)
    present = lengths > 0
    ends = np.cumsum(lengths, axis=1)
    starts = ends - lengths
    slot = np.arange(S)
    number = (slot >= ends[:, :, None]).sum(axis=1)  # sequence of a slot, from 0; D in the padding
    real = slot < ends[:, -1:]
    number = np.where(real, number, 0)
    start = np.take_along_axis(starts, number, axis=1)
    first = np.take_along_axis(lengths - second, number, axis=1)
    good = present[:, 0] & (present[:, 1:] <= present[:, :-1]).all(axis=1) & (ends[:, -1] <= S)
    good &= (mask == np.where(real, number + 1, 0)).all(axis=1)
    good &= (positions == np.where(real, slot - start, 0)).all(axis=1)
    good &= (segments == (real & (slot - start >= first))).all(axis=1) & (~present | (second < lengths)).all(axis=1)
    good &= ids_in_range(rows["input_ids"], real)
    good &= (used_slots == present).all(axis=1) & (rows["next_sentence_positions"] == np.where(present, starts, 0)).all(
        axis=1
    )
    good &= ((rows["next_sentence_labels"] == 0) | (present & (rows["next_sentence_labels"] == 1))).all(axis=1)
    used = weights != 0
    inside = (places >= 0) & (places < S)
    owner = np.take_along_axis(mask, np.where(inside, places, 0).astype(np.int64), axis=1)
    good &= np.where(used, inside & (owner == weights), places == 0).all(axis=1) & ids_in_range(
        rows["masked_lm_ids"], used
    )
    good &= distinct_places(places, used, S)
    packs: List[Optional[Pack]] = [None] * n
    chosen = np.flatnonzero(good)
    whole = {name: rows[name][chosen].astype(np.int32) for name in PACK_FIELDS}
    for at, row in enumerate(chosen.tolist()):
        packs[row] = {name: whole[name][at] for name in PACK_FIELDS}
    return packs


def read(path: str, bad: BadRecords) -> Iterator[Record]:
    """The packs of one file, in its order, their rows laid out as they are there."""
    return tfrecord.read_records(path, bad, FIELDS, lambda features: checked_pack(features)[0], consecutive_packs)


def write(path: str, records: Iterable[Record], widths: RowWidths) -> int:
    """Write packs, return how many."""

    def features(pack: Pack) -> Pack:
        return {name: pack[name].astype(np.float32) if name in FLOATS else pack[name] for name in PACK_FIELDS}

    return tfrecord.write_records(path, records, features)
