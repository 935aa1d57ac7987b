"""Packed TFRecord: the ten fields of the packed format published for MLPerf BERT, one pack a record.

int64: input_ids, input_mask, segment_ids, positions [S]; masked_lm_positions, masked_lm_ids [P];
next_sentence_positions, next_sentence_labels [D].  float: masked_lm_weights [P] (number of the sequence, 0 unused),
next_sentence_weights [D].  Sequence numbers begin at 1, unused values are 0.
"""

from __future__ import annotations

from typing import Iterable, Iterator

import numpy as np

from pack_data.cli.bad_records import BadRecords
from pack_data.formats import tfrecord
from pack_data.formats.records import PACK_FIELDS, Pack, Record, RowWidths, checked_pack

FLOATS = ("masked_lm_weights", "next_sentence_weights")
FIELDS = tuple(tfrecord.Field(name, "float" if name in FLOATS else "int64") for name in PACK_FIELDS)


def read(path: str, bad: BadRecords) -> Iterator[Record]:
    """The packs of one file, in its order, their rows laid out as they are there."""
    return tfrecord.read_records(path, bad, FIELDS, lambda features: checked_pack(features)[0])


def write(path: str, records: Iterable[Record], widths: RowWidths) -> int:
    """Write packs, return how many."""

    def features(pack: Pack) -> Pack:
        return {name: pack[name].astype(np.float32) if name in FLOATS else pack[name] for name in PACK_FIELDS}

    return tfrecord.write_records(path, records, features)
