"""`.npy` files of numbers, and of records of numbers, mapped for reading; any other file is refused in one line."""

from __future__ import annotations

import math
import os
import warnings
from typing import Any

import numpy as np

from pack_data.reading.durable import PathLike
from pack_data.reading.fields import one_line
from pack_data.reading.files import check_regular

_MOST_DIMENSIONS = 32  # NumPy's limit before version 2


def map_array(path: PathLike, *, way_out: str) -> np.ndarray:
    """Map the values of a file that is as long as its header says; raise ValueError, one line, for anything else."""
    check_regular(path, way_out=way_out)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what NumPy's parser makes of a damaged header
            values = np.lib.format.open_memmap(os.fspath(path), mode="r")
        _check_values(values)
    except Exception as error:  # NumPy and Python's parser raise any type for a damaged header
        raise ValueError(
            f"{path}: not a readable .npy file ({one_line(error, 120)}); {way_out}"
        ) from None
    size = os.stat(path).st_size
    needed = values.offset + math.prod(values.shape) * values.dtype.itemsize
    if size != needed:
        raise ValueError(
            f"{path}: {size} bytes, but its header needs {needed}; the file is cut or damaged, {way_out}"
        )
    return values


def _check_values(values: np.memmap) -> None:
    dtype = values.dtype
    columns = [dtype] if dtype.names is None else [dtype[name] for name in dtype.names]
    if not all(column.base.kind in "biuf" for column in columns):
        raise ValueError("its values are neither numbers nor records of numbers")
    # NumPy counts in 32 bits, and a sum that is too large begins again from below.
    record_bytes = sum(column.base.itemsize * math.prod(column.shape) for column in columns)
    if record_bytes != dtype.itemsize or not record_bytes:
        raise ValueError("its records have no size")
    if len(values.shape) > _MOST_DIMENSIONS or not all(type(size) is int for size in values.shape):
        raise ValueError("its header has no shape")


def read_array(path: PathLike, *, dtype: Any, dimensions: int, way_out: str) -> np.ndarray:
    """Map the values of a file that must have this type and number of dimensions; raise ValueError otherwise."""
    values = map_array(path, way_out=way_out)
    if values.dtype != np.dtype(dtype) or values.ndim != dimensions:
        raise ValueError(
            f"{path}: holds {values.dtype} in {values.ndim} dimensions, must be {np.dtype(dtype)} in {dimensions}; "
            f"{way_out}"
        )
    return values


def refuse_sequences(path: PathLike) -> None:
    """Raise ValueError for an array passed where sequences or texts are read: it can only hold lengths."""
    raise ValueError(
        f"{path}: a NumPy array: lengths, neither text nor sequences; pack them with python -m pack_data.optimal "
        f"--histogram {path} --max-sequence-length S, or pack_data.pack(lengths, ...); write lists of tokens as "
        "JSONL, one [5, 7, 9] a line"
    )
