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
from itertools import chain
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Optional, Tuple

import numpy as np

from pack_data.formats.records import (
    EXAMPLE_FIELDS,
    NO_COLUMNS,
    Pack,
    Record,
    RecordError,
    RowWidths,
    example_from_columns,
    integers,
)
from pack_data.reading.bad_records import BadRecords, Origin
from pack_data.reading.fields import one_line, shown
from pack_data.reading.files import check_regular, open_regular
from pack_data.reading.packages import load_package
from pack_data.store.sequences import Example

_ROWS = 512  # read at a time
_FIELDS = (*EXAMPLE_FIELDS, "input_mask")
_SINGLE = "next_sentence_labels"  # may also be one number per row
# Registered filters of HDF5 that h5py does not include.
_FILTERS = {32001: "Blosc", 32004: "LZ4", 32008: "Bitshuffle", 32015: "Zstandard", 32026: "Blosc2"}
# HDF5 File Format Specification 3.0, III.E.  A global heap, which holds rows of variable length, begins with its
# signature, version 1, 3 bytes of 0, and its size; an object in it with its number, references, 4 bytes of 0, and the
# size of its data.
_HEAP = b"GCOL\x01\0\0\0"
_HEAP_HEADER = struct.Struct("<8xQ")
_HEAP_OBJECT = struct.Struct("<HH4xQ")


def _h5py():
    return load_package("h5py", "this file format")


def _open(path: str):
    h5py = _h5py()
    check_regular(path)
    try:
        return h5py.File(path, "r")
    except (
        Exception
    ) as error:  # h5py raises errors of nearly every kind for a damaged file, here and below
        raise ValueError(f"{path}: HDF5 cannot open it ({one_line(error)})") from None


def _check_heaps(path: str) -> None:
    """Raise ValueError for heaps in which the HDF5 library would not terminate.

    It never leaves a heap whose free space has no size, and would take days for heaps that overlap, which HDF5 does not
    write.
    """
    with open_regular(path) as file:
        if not os.fstat(file.fileno()).st_size:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            objects_left = len(data) // _HEAP_OBJECT.size + 1  # as many as the file has room for
            heap = data.find(_HEAP)
            while heap >= 0:
                place = heap + _HEAP_HEADER.size
                end = len(data)
                if place <= end:
                    end = min(end, heap + _HEAP_HEADER.unpack_from(data, heap)[0])
                while place <= end - _HEAP_OBJECT.size:
                    number, _, size = _HEAP_OBJECT.unpack_from(data, place)
                    objects_left -= 1
                    if objects_left < 0:
                        raise ValueError(
                            f"{path}: HDF5 cannot open it (damaged: its heaps overlap); copy it again"
                        )
                    if number == 0:  # the free space up to the end, including its header
                        if size < _HEAP_OBJECT.size:
                            raise ValueError(
                                f"{path}: HDF5 cannot open it (damaged: free space of {size} bytes in the heap at byte "
                                f"{heap}); copy it again"
                            )
                        break
                    place += _HEAP_OBJECT.size + -(-size // 8) * 8
                heap = data.find(_HEAP, heap + 1)


def _columns(path: str, file, longest: Optional[int] = None) -> Dict[str, Any]:
    """Return the one- or two-dimensional data sets of the file's root with as many rows as input_ids.

    longest: the most bytes of a row and of a chunk, which is decompressed at once; None if no data is read.
    Raises ValueError, also for a link into another file and for data kept in another file.
    """
    try:
        data_sets = dict(_data_sets(path, file))
        is_ragged = any(
            _h5py().check_vlen_dtype(data.dtype) is not None for data in data_sets.values()
        )
    except RecordError:
        raise
    except Exception as error:
        raise ValueError(f"{path}: HDF5 cannot list its data sets ({one_line(error)})") from None
    if is_ragged and longest is not None:
        _check_heaps(path)
    _check_names_and_rows(path, data_sets)
    rows = data_sets["input_ids"].shape[0]
    columns = {name: data for name, data in data_sets.items() if data.shape[:1] == (rows,)}
    for name, data in columns.items():
        if name in _FIELDS:
            _check_form(path, name, data)
        _check_filters(path, name, data)
        if longest is not None:
            _check_sizes(path, name, data, longest)
    return columns


def _check_names_and_rows(path: str, data_sets: Mapping[str, Any]) -> None:
    """Raise ValueError unless all fields of examples are there, with one number of rows."""
    if "positions" in data_sets:
        raise ValueError(f"{path}: positions: {NO_COLUMNS}")
    missing = [name for name in EXAMPLE_FIELDS if name not in data_sets]
    if missing:
        names = ", ".join(sorted(data_sets))[:200] or "none"
        raise ValueError(f"{path}: has no data set {missing[0]}; its data sets are {names}")
    ids_shape = data_sets["input_ids"].shape
    for name in EXAMPLE_FIELDS:
        shape = data_sets[name].shape
        if not shape or shape[:1] != ids_shape[:1]:
            raise ValueError(
                f"{path}: {name} has shape {shape}, input_ids {ids_shape}: the numbers of rows must be equal"
            )


def _check_filters(path: str, name: str, data: Any) -> None:
    """Raise ValueError if the data is compressed by a filter that HDF5 does not have here, such as Blosc."""
    properties = data.id.get_create_plist()
    for number in range(properties.get_nfilters()):
        code = properties.get_filter(number)[0]
        if not _h5py().h5z.filter_avail(code):
            filter_name = _FILTERS.get(code, f"filter {code}")
            raise ValueError(
                f"{path}: {name} is compressed with {filter_name}, which HDF5 lacks here; write it with gzip instead "
                "(the package hdf5plugin reads it)"
            )


def _check_sizes(path: str, name: str, data: Any, longest: int) -> None:
    """Raise ValueError if a row or a chunk has more than `longest` bytes."""
    sizes = {
        "row": _row_bytes(data),
        "chunk": math.prod(data.chunks or ()) * data.dtype.itemsize,
    }
    for part, size in sizes.items():
        if size > longest:
            raise ValueError(
                f"{path}: a {part} of {name} has {size:,} bytes, more than {longest:,}; if there is enough memory, "
                "raise --max-record-bytes"
            )


def _data_sets(path: str, file) -> Iterator[Tuple[str, Any]]:
    """Yield name and data set of each in the root.  RecordError for one that lies in another file."""
    h5py = _h5py()
    for name in file:
        link = file.get(name, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            raise RecordError(
                f"{path}: {shown(name)} is a link into another file; copy its data into this one"
            )
        if not isinstance(name, str) or not isinstance(file.get(name), h5py.Dataset):
            continue
        data = file[name]
        if data.external or data.is_virtual or Path(data.file.filename) != Path(file.filename):
            raise RecordError(
                f"{path}: the data of {shown(name)} lies in another file; copy it into this one"
            )
        yield name, data


def _check_form(path: str, name: str, data: Any) -> None:
    """Raise ValueError unless the values are rows of numbers (of any length), or numbers where one per row will do."""
    dtype = data.dtype
    dimensions = data.ndim
    row_dtype = _h5py().check_vlen_dtype(dtype)
    if row_dtype is not None:
        dtype = np.dtype(row_dtype)
        dimensions += 1
    if dtype.kind not in "iufb" or not (dimensions == 2 or (name == _SINGLE and dimensions == 1)):
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


def _rows(
    path: str, columns: Dict[str, Any], bad: BadRecords, rows: range
) -> Iterator[Tuple[int, Pack]]:
    """Yield the number and the values of each readable row; a slice that cannot be read is read again row by row."""
    try:
        block = {name: data[rows.start : rows.stop] for name, data in columns.items()}
    except Exception as error:
        if len(rows) == 1:
            bad.add(Origin(path, rows.start), f"HDF5 cannot read it ({one_line(error)})")
            return
        for row in rows:
            yield from _rows(path, columns, bad, range(row, row + 1))
        return
    for index, row in enumerate(rows):
        yield row, {name: values[index] for name, values in block.items()}


def _slices(columns: Dict[str, Any], longest: int) -> Iterator[range]:
    """Yield ranges of rows; those of a slice may have as many bytes as the longest record."""
    total = columns["input_ids"].shape[0]
    bytes_per_row = sum(map(_row_bytes, columns.values()))
    rows = max(1, min(_ROWS, longest // max(1, bytes_per_row)))
    for start in range(0, total, rows):
        yield range(start, min(start + rows, total))


def _example(row: Pack) -> Example:
    zeros = np.flatnonzero(integers("masked_lm_positions", row["masked_lm_positions"]) == 0)
    # Without weights, predictions end at the first position 0, which [CLS] holds.
    return example_from_columns(
        row, int(zeros[0]) if len(zeros) else len(row["masked_lm_positions"])
    )


def read(path: str, bad: BadRecords) -> Iterator[Record]:
    """Yield the examples of one file, in file order."""
    with _open(path) as file:
        columns = _columns(path, file, bad.longest)
        foreign = [name for name in columns if name not in _FIELDS]
        slices = _slices(columns, bad.longest)
        rows = (_rows(path, columns, bad, numbers) for numbers in slices)
        for number, row in chain.from_iterable(rows):
            origin = Origin(path, number)
            try:
                value = _example(row)
            except RecordError as error:
                bad.add(origin, str(error))
                continue
            yield Record(origin, value, {name: row[name] for name in foreign})


def shape(path: str) -> RowWidths:
    """Return the row widths; none if the rows are of variable length."""
    with _open(path) as file:
        columns = _columns(path, file)
        shapes = [columns[name].shape for name in ("input_ids", "masked_lm_positions")]
        if any(len(shape) < 2 for shape in shapes):
            return RowWidths()
        return RowWidths(shapes[0][1], shapes[1][1])
