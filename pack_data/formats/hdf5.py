"""HDF5, read only: unpacked examples as NVIDIA's BERT keeps them, and packs as in the published packed HDF5.

Unpacked: input_ids, input_mask, segment_ids [N, S]; masked_lm_positions, masked_lm_ids [N, P]; next_sentence_labels
[N].  There is no masked_lm_weights: predictions end at the first position 0.  The rows may also be variable-length
arrays, then without padding; their input_mask may be missing.

Packed: the ten fields except masked_lm_weights, which is rebuilt: a used prediction has an id other than 0 and belongs
to the sequence that input_mask names at its position.

Rows are read in slices, in order: the data is usually gzipped in blocks of many rows, and each random row would cost
a whole block.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, Tuple

import numpy as np

from pack_data.bad_records import BadRecords, Origin
from pack_data.decoding import one_line
from pack_data.formats.records import (
    PACK_FIELDS,
    Record,
    RecordError,
    RowWidths,
    checked_pack,
    example_from_row,
    integers,
    predictions_by_position,
    single,
)
from pack_data.packages import load_package

ROWS = 512  # read at a time
EXAMPLE_FIELDS = ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels")
STORED_PACK_FIELDS = tuple(name for name in PACK_FIELDS if name != "masked_lm_weights")
# What h5py raises on a damaged file, depending on the place of the damage.
DAMAGE = (OSError, RuntimeError, ValueError, KeyError, TypeError, OverflowError, MemoryError)


def _open(path: str):
    h5py = load_package("h5py", "this file format")
    try:
        return h5py.File(path, "r")
    except FileNotFoundError:
        raise
    except DAMAGE as error:
        raise ValueError(f"{path}: HDF5 cannot open it ({one_line(error)})") from None


def _columns(path: str, file) -> Dict[str, Any]:
    """Every one- or two-dimensional data set of the file's root with as many rows as input_ids.  Raises ValueError."""
    h5py = load_package("h5py", "this file format")
    try:
        found = {name: file[name] for name in file if isinstance(name, str) and isinstance(file[name], h5py.Dataset)}
        shapes = {name: data.shape for name, data in found.items()}
    except DAMAGE as error:
        raise ValueError(f"{path}: HDF5 cannot list its data sets ({one_line(error)})") from None
    needed = STORED_PACK_FIELDS if "positions" in found else EXAMPLE_FIELDS
    missing = [name for name in needed if name not in found]
    if missing:
        raise ValueError(f"{path}: has no data set {missing[0]}; it has {', '.join(sorted(found)) or 'none'}")
    for name in needed:
        if not shapes[name] or shapes[name][0] != shapes["input_ids"][0]:
            raise ValueError(
                f"{path}: {name} has shape {shapes[name]}, input_ids {shapes['input_ids']}: rows must be equal in "
                "number"
            )
    rows = shapes["input_ids"][0]
    return {name: data for name, data in found.items() if shapes[name] and shapes[name][0] == rows}


def kind(path: str) -> str:
    with _open(path) as file:
        return "packs" if "positions" in _columns(path, file) else "examples"


def _rows(path: str, columns: Dict[str, Any], bad: BadRecords) -> Iterator[Tuple[Origin, Dict[str, np.ndarray]]]:
    """One dict of row values for each row that can be read; a slice that cannot is read again row by row."""
    total = columns["input_ids"].shape[0]
    for start in range(0, total, ROWS):
        stop = min(start + ROWS, total)
        try:
            block = {name: data[start:stop] for name, data in columns.items()}
        except DAMAGE:
            for row in range(start, stop):
                try:
                    values = {name: data[row] for name, data in columns.items()}
                except DAMAGE as error:
                    bad.add(Origin(path, row), f"HDF5 cannot read it ({one_line(error)})")
                    continue
                yield Origin(path, row), values
            continue
        for row in range(start, stop):
            yield Origin(path, row), {name: values[row - start] for name, values in block.items()}


def _example(row: Dict[str, np.ndarray]):
    positions = integers("masked_lm_positions", row["masked_lm_positions"])
    return example_from_row(
        row["input_ids"],
        row.get("input_mask"),
        row["segment_ids"],
        positions,
        row["masked_lm_ids"],
        predictions_by_position(positions),
        single("next_sentence_labels", row["next_sentence_labels"]),
    )


def _pack(row: Dict[str, np.ndarray]):
    mask = integers("input_mask", row["input_mask"])
    positions = integers("masked_lm_positions", row["masked_lm_positions"])
    ids = integers("masked_lm_ids", row["masked_lm_ids"])
    if len(ids) != len(positions):
        raise RecordError(
            f"masked_lm_positions has {len(positions)} values and masked_lm_ids {len(ids)}, must be equal"
        )
    if (positions >= len(mask)).any():
        raise RecordError(f"masked_lm_positions holds {positions.max()}, the row has {len(mask)} slots")
    return checked_pack({**row, "masked_lm_weights": np.where(ids != 0, mask[positions], 0)})[0]


def read(path: str, bad: BadRecords) -> Iterator[Record]:
    """The examples or packs of one file, in its order."""
    with _open(path) as file:
        columns = _columns(path, file)
        packed = "positions" in columns
        known = PACK_FIELDS if packed else EXAMPLE_FIELDS + ("input_mask",)
        foreign = [name for name in columns if name not in known]
        for origin, row in _rows(path, columns, bad):
            try:
                value = _pack(row) if packed else _example(row)
            except RecordError as error:
                bad.add(origin, str(error))
                continue
            yield Record(origin, value, {name: row[name] for name in foreign})


def shape(path: str) -> RowWidths:
    """Row widths; none where the rows are of variable length."""
    with _open(path) as file:
        columns = _columns(path, file)
        if len(columns["input_ids"].shape) < 2:
            return RowWidths()
        depth = columns["next_sentence_weights"].shape[1] if "positions" in columns else None
        return RowWidths(columns["input_ids"].shape[1], columns["masked_lm_positions"].shape[1], depth)
