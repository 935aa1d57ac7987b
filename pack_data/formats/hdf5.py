"""HDF5, read only: unpacked BERT examples in the layout of MLPerf and NVIDIA.

input_ids, input_mask, segment_ids [N, S]; masked_lm_positions, masked_lm_ids [N, P]; next_sentence_labels [N].  There
is no masked_lm_weights: predictions end at the first position 0.  The rows may also be variable-length arrays, then
without padding; their input_mask may be missing.

Rows are read in slices, in order: the data is usually gzipped in blocks of many rows, and each random row would cost
a whole block.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any, Dict, Iterator, Optional, Tuple

import numpy as np

from pack_data.cli.bad_records import BadRecords, Origin
from pack_data.formats.records import (
    EXAMPLE_FIELDS,
    NO_COLUMNS,
    Record,
    RecordError,
    RowWidths,
    example_from_columns,
    integers,
)
from pack_data.reading.fields import one_line, shown
from pack_data.reading.files import check_regular, open_regular
from pack_data.reading.packages import load_package
from pack_data.store.sequences import Example

_ROWS = 512  # read at a time
_FIELDS = (*EXAMPLE_FIELDS, "input_mask")


def _open(path: str):
    h5py = load_package("h5py", "this file format")
    check_regular(path)
    try:
        return h5py.File(path, "r")
    except Exception as error:  # h5py raises errors of nearly every kind on a damaged file, here and below
        raise ValueError(f"{path}: HDF5 cannot open it ({one_line(error)})") from None


# The header of a global heap, which holds rows of variable length, and of an object in it (HDF5 File Format
# Specification 3.0, III.E): signature, version 1, 3 bytes of 0, size; number, references, 4 bytes, size of the data.
_HEAP, _HEAP_HEADER, _HEAP_OBJECT = b"GCOL\x01\0\0\0", struct.Struct("<8xQ"), struct.Struct("<HH4xQ")


def _check_heaps(path: str) -> None:
    """ValueError for a heap whose free space has no size: the HDF5 library goes through such a heap without end.

    And for heaps that lie in each other, as none that HDF5 writes do: to go through all of them could take days.
    """
    with open_regular(path) as file:
        if not os.fstat(file.fileno()).st_size:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            heap = data.find(_HEAP)
            left = len(data) // _HEAP_OBJECT.size + 1  # objects that have room in the file
            while heap >= 0:
                place, end = heap + _HEAP_HEADER.size, len(data) - _HEAP_OBJECT.size
                if place <= len(data):
                    end = min(end, heap + _HEAP_HEADER.unpack_from(data, heap)[0] - _HEAP_OBJECT.size)
                while place <= end:
                    number, _, size = _HEAP_OBJECT.unpack_from(data, place)
                    left -= 1
                    if left < 0:
                        raise ValueError(
                            f"{path}: HDF5 cannot open it (damaged: its heaps overlap); copy the file again"
                        )
                    if number == 0:  # the free space, its header included, up to the end
                        if size < _HEAP_OBJECT.size:
                            raise ValueError(
                                f"{path}: HDF5 cannot open it (damaged: free space of {size} bytes in the heap at byte "
                                f"{heap}); copy the file again"
                            )
                        break
                    place += _HEAP_OBJECT.size + -(-size // 8) * 8
                heap = data.find(_HEAP, heap + 1)


def _columns(path: str, file, longest: Optional[int] = None) -> Dict[str, Any]:
    """Every one- or two-dimensional data set of the file's root with as many rows as input_ids.  Raises ValueError.

    longest: bytes of a row and of a chunk, which is unpacked at once; None where no data are read.
    Only what the file itself holds is read: a link into another file, or data kept in another one, is refused.
    """
    h5py = load_package("h5py", "this file format")
    try:
        found = dict(_data_sets(path, file))
        shapes = {name: data.shape for name, data in found.items()}
        ragged = any(h5py.check_vlen_dtype(data.dtype) is not None for data in found.values())
    except RecordError:
        raise
    except Exception as error:
        raise ValueError(f"{path}: HDF5 cannot list its data sets ({one_line(error)})") from None
    if ragged and longest is not None:
        _check_heaps(path)
    if "positions" in found:
        raise ValueError(f"{path}: positions: {NO_COLUMNS}")
    missing = [name for name in EXAMPLE_FIELDS if name not in found]
    if missing:
        raise ValueError(f"{path}: has no data set {missing[0]}; it has {', '.join(sorted(found))[:200] or 'none'}")
    for name in EXAMPLE_FIELDS:
        if not shapes[name] or shapes[name][0] != shapes["input_ids"][0]:
            raise ValueError(
                f"{path}: {name} has shape {shapes[name]}, input_ids {shapes['input_ids']}: rows must be equal in "
                "number"
            )
    rows = shapes["input_ids"][0]
    columns = {name: data for name, data in found.items() if shapes[name] and shapes[name][0] == rows}
    for name, data in columns.items():
        if name in _FIELDS:
            _check_form(path, name, data, single_too=name == "next_sentence_labels")
        for what, size in (
            ("a row", _row_bytes(data)),
            ("a chunk", math.prod(data.chunks or ()) * data.dtype.itemsize),
        ):
            if longest is not None and size > longest:
                raise ValueError(
                    f"{path}: {what} of {name} has {size:,} bytes, more than {longest:,}; raise --max-record-bytes "
                    "where the memory is there"
                )
    return columns


def _data_sets(path: str, file) -> Iterator[Tuple[str, Any]]:
    """Name and data set of each in the root that lies in this file.  RecordError for one that lies in another."""
    h5py = load_package("h5py", "this file format")
    for name in file:
        link = file.get(name, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            raise RecordError(f"{path}: {shown(name)} is a link into another file; copy its data into this one")
        if not isinstance(name, str) or not isinstance(file.get(name), h5py.Dataset):
            continue
        data = file[name]
        if data.external or data.is_virtual or Path(data.file.filename) != Path(file.filename):
            raise RecordError(f"{path}: the data of {shown(name)} lies in another file; copy it into this one")
        yield name, data


def _check_form(path: str, name: str, data: Any, single_too: bool) -> None:
    """Numbers: rows of them, rows of any length, or, where `single_too`, one for each row.  Raises ValueError."""
    h5py = load_package("h5py", "this file format")
    inner = h5py.check_vlen_dtype(data.dtype)
    kind, dimensions = (np.dtype(inner).kind, data.ndim + 1) if inner is not None else (data.dtype.kind, data.ndim)
    if kind not in "iufb" or not (dimensions == 2 or (single_too and dimensions == 1)):
        raise ValueError(
            f"{path}: {name} holds {shown(str(data.dtype))} in {data.ndim} dimensions; must be rows of whole numbers"
        )


def _row_bytes(data: Any) -> int:
    return math.prod(data.shape[1:]) * data.dtype.itemsize


def kind(path: str) -> str:
    """Return "examples"; raise ValueError if the file has another layout."""
    with _open(path) as file:
        _columns(path, file)
    return "examples"


def _rows(path: str, columns: Dict[str, Any], bad: BadRecords) -> Iterator[Tuple[Origin, Dict[str, np.ndarray]]]:
    """One dict of row values for each row that can be read; a slice that cannot is read again row by row."""
    total = columns["input_ids"].shape[0]
    # As many rows at a time as the longest record may have bytes.
    rows = max(1, min(_ROWS, bad.longest // max(1, sum(map(_row_bytes, columns.values())))))
    for start in range(0, total, rows):
        stop = min(start + rows, total)
        try:
            block = {name: data[start:stop] for name, data in columns.items()}
        except Exception:
            for row in range(start, stop):
                try:
                    values = {name: data[row] for name, data in columns.items()}
                except Exception as error:
                    bad.add(Origin(path, row), f"HDF5 cannot read it ({one_line(error)})")
                    continue
                yield Origin(path, row), values
            continue
        for row in range(start, stop):
            yield Origin(path, row), {name: values[row - start] for name, values in block.items()}


def _example(row: Dict[str, np.ndarray]) -> Example:
    zeros = np.flatnonzero(integers("masked_lm_positions", row["masked_lm_positions"]) == 0)
    # Without weights, predictions end at the first position 0, which [CLS] holds.
    return example_from_columns(row, int(zeros[0]) if len(zeros) else len(row["masked_lm_positions"]))


def read(path: str, bad: BadRecords) -> Iterator[Record]:
    """Yield the examples of one file, in file order."""
    with _open(path) as file:
        columns = _columns(path, file, bad.longest)
        foreign = [name for name in columns if name not in _FIELDS]
        for origin, row in _rows(path, columns, bad):
            try:
                value = _example(row)
            except RecordError as error:
                bad.add(origin, str(error))
                continue
            yield Record(origin, value, {name: row[name] for name in foreign})


def shape(path: str) -> RowWidths:
    """Row widths; none where the rows are of variable length."""
    with _open(path) as file:
        columns = _columns(path, file)
        if any(len(columns[name].shape) < 2 for name in ("input_ids", "masked_lm_positions")):
            return RowWidths()
        return RowWidths(columns["input_ids"].shape[1], columns["masked_lm_positions"].shape[1])
