"""Files of sequences between examples and packs: columns without a header, any run of which can be read alone.

A file holds one block of sequences (pack_data.sequences.Sequences), column after column. Where a run of sequences lies
in each column follows from three running totals: sequences, tokens, masked tokens. So a shard takes one contiguous read
of each column of each file, however large the corpus is.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterator, NamedTuple, Tuple

import numpy as np

from pack_data.reading.files import replacing
from pack_data.sequences import Sequences
from pack_data.store.packs import PREDICTION, SEQUENCE, SLOT, PackSchema, StoredColumn, smallest_type


class RunningTotals(NamedTuple):
    """Sequences, tokens and masked tokens, of a block or up to a place in it."""

    sequences: int
    tokens: int
    predictions: int


@dataclass(frozen=True)
class SpillFormat:
    """The columns of a file. The lengths come first, so that they can be read alone."""

    lengths_type: str
    columns: Tuple[StoredColumn, ...]

    @classmethod
    def of(cls, schema: PackSchema, *more: StoredColumn) -> SpillFormat:
        return cls(smallest_type(schema.max_sequence_length), schema.columns + more)

    def _parts(self) -> Iterator[Tuple[str, str, int, np.dtype]]:
        """(axis, name, which of the totals counts its values, type) of every column in the order of the file."""
        yield "", "lengths", 0, np.dtype(self.lengths_type)
        yield "", "prediction_counts", 0, np.dtype(self.lengths_type)
        for axis, total in ((SEQUENCE, 0), (SLOT, 1), (PREDICTION, 2)):
            for column in self.columns:
                if column.axis == axis:
                    yield axis, column.name, total, np.dtype(column.dtype)

    def write(self, path: Path, sequences: Sequences) -> None:
        """The whole file under its name, or none."""
        columns = {
            "": {"lengths": sequences.lengths, "prediction_counts": sequences.prediction_counts},
            SEQUENCE: sequences.scalars,
            SLOT: sequences.tokens,
            PREDICTION: sequences.predictions,
        }
        with replacing(path) as temporary, open(temporary, "wb") as out:
            for axis, name, _, dtype in self._parts():
                out.write(np.ascontiguousarray(columns[axis][name].astype(dtype, copy=False)).data)

    def read(self, path: Path, totals: RunningTotals, start: RunningTotals, end: RunningTotals) -> Sequences:
        """The sequences between two running totals of a file with these totals."""
        columns: Dict[str, Dict[str, np.ndarray]] = {"": {}, SEQUENCE: {}, SLOT: {}, PREDICTION: {}}
        descriptor = os.open(str(path), os.O_RDONLY)
        try:
            offset = 0
            for axis, name, counted, dtype in self._parts():
                wanted = (end[counted] - start[counted]) * dtype.itemsize
                data = os.pread(descriptor, wanted, offset + start[counted] * dtype.itemsize) if wanted else b""
                if len(data) != wanted:
                    raise ValueError(f"{path}: cut short; remove the folder {path.parent} and build again")
                columns[axis][name] = np.frombuffer(data, dtype=dtype)
                offset += totals[counted] * dtype.itemsize
        finally:
            os.close(descriptor)
        own = columns[""]
        sums = (int(own["lengths"].sum(dtype=np.int64)), int(own["prediction_counts"].sum(dtype=np.int64)))
        if sums != (end.tokens - start.tokens, end.predictions - start.predictions):
            raise ValueError(f"{path}: was changed; remove the folder {path.parent} and build again")
        return Sequences(
            own["lengths"].astype(np.int64),
            columns[SLOT],
            own["prediction_counts"].astype(np.int64),
            columns[PREDICTION],
            columns[SEQUENCE],
        )

    def read_lengths(self, path: Path, totals: RunningTotals) -> np.ndarray:
        """The lengths alone, [sequences], in the type of the file."""
        lengths = np.fromfile(path, dtype=self.lengths_type, count=totals.sequences)
        if len(lengths) != totals.sequences or int(lengths.sum(dtype=np.int64)) != totals.tokens:
            raise ValueError(f"{path}: cut short or changed; remove the folder {path.parent} and build again")
        return lengths
