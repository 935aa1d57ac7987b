"""`.npy` files, read without surprises: the header first, checked against the file, then the values, mapped.

The header is that of NumPy's format 1.0, 2.0 or 3.0 (numpy.lib.format). NumPy reads it with Python's own parser, and
answers damage with any error that the parser has. Here a header is of one form, that of an array of numbers or of
records of numbers, and everything else is one line. So is a file whose size is not that of its header and its values:
nothing is allocated or mapped before.
"""

from __future__ import annotations

import ast
import math
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Tuple, Union

import numpy as np

from pack_data.files import open_regular

_MAGIC = b"\x93NUMPY"
_LENGTHS = {b"\1\0": "<H", b"\2\0": "<I", b"\3\0": "<I"}  # by version: how the length of the header is written
MOST_HEADER_BYTES = 1 << 16
_QUOTED = re.compile(r"'[^'\\\n]*'|\"[^\"\\\n]*\"")
# What is left of a header without its texts: nothing that Python would compute with.
_PLAIN = re.compile(r"(?:True|False|\d{1,18}|[\s{}\[\](),:])*")
_NUMBERS = re.compile(r"[<>|](?:[iu][1248]|f[248])|\|b1")
_DEEPEST = 6
_MOST_DIMENSIONS = 32  # NumPy's limit before version 2


@dataclass(frozen=True)
class Header:
    """What a file says of its array. `offset`: bytes before the values."""

    dtype: np.dtype
    shape: Tuple[int, ...]
    fortran_order: bool
    offset: int


def read_header(path: Union[str, os.PathLike], *, way_out: str) -> Header:
    """The header of an ordinary file that is as long as it says. ValueError, one line, for anything else."""
    with open_regular(path, way_out=way_out) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            header = _parsed(file)
        except ValueError as error:
            raise ValueError(f"{path}: not a readable .npy file ({error}); {way_out}") from None
    wanted = header.offset + math.prod(header.shape) * header.dtype.itemsize
    if size != wanted:
        raise ValueError(f"{path}: {size} bytes where its header needs {wanted}; the file is cut or damaged, {way_out}")
    return header


def _parsed(file: Any) -> Header:
    start = file.read(8)
    if start[:6] != _MAGIC:
        raise ValueError("it does not begin as one")
    code = _LENGTHS.get(start[6:])
    if code is None:
        raise ValueError("a version of the format that is not 1.0, 2.0 or 3.0")
    field = file.read(struct.calcsize(code))
    if len(field) < struct.calcsize(code):
        raise ValueError("the file ends in its header")
    (length,) = struct.unpack(code, field)
    if length > MOST_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes, more than {MOST_HEADER_BYTES}")
    content = file.read(length)
    if len(content) < length:
        raise ValueError("the file ends in its header")
    text = content.decode("utf-8" if start[6] == 3 else "latin-1")
    bare = _QUOTED.sub("0", text)
    if not _PLAIN.fullmatch(bare) or _depth(bare) > _DEEPEST:
        raise ValueError("the header is not of NumPy's form")
    try:
        fields = ast.literal_eval(text.strip())
    except (SyntaxError, ValueError, TypeError):
        raise ValueError("the header is not of NumPy's form") from None
    if not isinstance(fields, dict) or set(fields) != {"descr", "fortran_order", "shape"}:
        raise ValueError("the header has not the fields descr, fortran_order and shape")
    shape, order = fields["shape"], fields["fortran_order"]
    if type(order) is not bool or not _is_shape(shape):
        raise ValueError("the header has no shape")
    return Header(_dtype(fields["descr"]), shape, order, file.tell())


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "{[(") - (character in "}])")
        deepest = max(deepest, depth)
    return deepest


def _is_shape(value: Any) -> bool:
    whole = isinstance(value, tuple) and all(type(size) is int for size in value)
    return whole and len(value) <= _MOST_DIMENSIONS and math.prod(value) < 2**62


def _dtype(descr: Any) -> np.dtype:
    """A number, or a record of numbers and rows of numbers. ValueError for objects, texts, records in records."""
    fields = descr if isinstance(descr, list) else [("value", descr)]
    size = 0
    for field in fields:
        if not (isinstance(field, tuple) and len(field) in (2, 3) and all(isinstance(text, str) for text in field[:2])):
            raise ValueError("its values are neither numbers nor records of numbers")
        if not _NUMBERS.fullmatch(field[1]):
            raise ValueError(f"its values are of type {ascii(field[1][:20])}, not numbers")
        if not _is_shape(field[2] if len(field) == 3 else ()):
            raise ValueError("a column without a shape")
        size += np.dtype(field[1]).itemsize * math.prod(field[2] if len(field) == 3 else ())
    if not 0 < size < 2**31:  # NumPy counts in 32 bits, and a sum that is too large begins again from below
        raise ValueError(f"its values have {size} bytes each")
    try:
        dtype = np.dtype(descr)
    except (ValueError, TypeError) as error:
        raise ValueError(f"no such type of values: {error}") from None
    return dtype


def map_array(path: Union[str, os.PathLike], header: Header) -> np.ndarray:
    """The values, mapped for reading; an array without values has nothing to map."""
    if not math.prod(header.shape):
        return np.zeros(header.shape, header.dtype)
    order = "F" if header.fortran_order else "C"
    return np.memmap(Path(path), header.dtype, "r", header.offset, header.shape, order)  # type: ignore[call-overload]


def read_array(path: Union[str, os.PathLike], *, dtype: Any, dimensions: int, way_out: str) -> np.ndarray:
    """The values of a file that must be of this type and number of dimensions, mapped. ValueError where it is not."""
    header = read_header(path, way_out=way_out)
    if header.dtype != np.dtype(dtype) or len(header.shape) != dimensions:
        raise ValueError(
            f"{path}: holds {header.dtype} in {len(header.shape)} dimensions, must be {np.dtype(dtype)} in "
            f"{dimensions}; {way_out}"
        )
    return map_array(path, header)
