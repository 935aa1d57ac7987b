"""Megatron's indexed data sets, a `.bin` of token ids and an `.idx` with the place of each sequence; read only.

The `.idx`, little-endian: the magic, version 1 (uint64), the code of the ids' type (uint8), the numbers of sequences
and of document indices (uint64 each), the tokens of each sequence (int32), its first byte in the `.bin` (int64), and
the document indices (int64). What follows these (modes of images) is not read. A record is one sequence.
"""

from __future__ import annotations

import os
import struct
from typing import BinaryIO, Dict, Iterator, NamedTuple, Sequence

import numpy as np

from pack_data.formats.columns import WHOLE, ColumnType, Ragged, RowBlock
from pack_data.formats.detect import MEGATRON_MAGIC
from pack_data.reading.bad_records import BadRecords, Origin
from pack_data.reading.files import open_regular
from pack_data.store.meanings import TOKENS

_HEADER = struct.Struct("<9sQBQQ")
_BYTES = 4 << 20  # read at a time
# Code -> type; 6 and 7 are floats, which cannot be token ids.
_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class _Index(NamedTuple):
    path: str
    dtype: np.dtype
    sizes: np.ndarray  # int64 [sequences], in bytes
    starts: np.ndarray  # int64 [sequences], in bytes


def tokens_file(path: str) -> str:
    """Return the `.bin` of an `.idx`.  Raises ValueError if it is missing."""
    data = os.path.splitext(path)[0] + ".bin"
    if not os.path.isfile(data):
        raise ValueError(
            f"{path}: has no {os.path.basename(data)} in its directory; copy both files there"
        )
    return data


def _index(path: str) -> _Index:
    with open_regular(path) as file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or not head.startswith(MEGATRON_MAGIC):
            raise ValueError(
                f"{path}: not a Megatron index, which begins with {MEGATRON_MAGIC!r} and {_HEADER.size} bytes"
            )
        _, version, code, sequences, documents = _HEADER.unpack(head)
        if version != 1 or code not in _TYPES:
            raise ValueError(
                f"{path}: version {version}, type code {code}; must be version 1 and one of the integer types "
                f"{', '.join(map(str, _TYPES))}: write it again with Megatron's preprocessing"
            )
        size = os.path.getsize(path)
        needed = _HEADER.size + 12 * sequences + 8 * documents
        if size < needed:
            raise ValueError(
                f"{path}: {size} bytes, its header needs {needed}; the file is cut, copy it again"
            )
        lengths = np.frombuffer(file.read(4 * sequences), "<i4")
        pointers = np.frombuffer(file.read(8 * sequences), "<i8")
        document_indices = np.frombuffer(file.read(8 * documents), "<i8")
    dtype = np.dtype(_TYPES[code])
    sizes = lengths.astype(np.int64) * dtype.itemsize
    index = _Index(path, dtype, sizes, pointers.astype(np.int64))
    _check_pointers(index)
    _check_documents(path, document_indices, sequences)
    return index


def _check_pointers(index: _Index) -> None:
    """Raise ValueError unless the sequences, in any order, are all that the `.bin` holds, each once."""
    order = np.lexsort((index.sizes, index.starts))
    ends = np.cumsum(index.sizes[order])
    begins = ends - index.sizes[order]
    wrong = np.flatnonzero(index.starts[order] != begins)
    if len(wrong):
        place = int(wrong[0])
        record = int(order[place])
        raise ValueError(
            f"{index.path}: record {record} begins at byte {index.starts[record]}, but the records before it have "
            f"{begins[place]} bytes; the index is damaged, copy it again"
        )
    tokens = tokens_file(index.path)
    size = os.path.getsize(tokens)
    covered = int(index.sizes.sum())
    if size > covered:
        raise ValueError(
            f"{tokens}: {size} bytes, but its index covers {covered} ({index.dtype} tokens); the two files do not "
            "belong together, copy both again"
        )


def _check_documents(path: str, indices: np.ndarray, sequences: int) -> None:
    """Raise ValueError unless the document indices, each a number of sequences, rise from 0 to all of them."""
    if not len(indices):
        return
    if indices[0] != 0 or indices[-1] != sequences or (np.diff(indices) < 0).any():
        raise ValueError(
            f"{path}: document indices run from {indices[0]} to {indices[-1]}; they must rise from 0 to the number of "
            f"sequences, {sequences}: write the index again with Megatron's preprocessing"
        )


def types(path: str) -> Dict[str, ColumnType]:
    """Return the type of the only column."""
    return {TOKENS: ColumnType(WHOLE, "list of integers")}


def blocks(
    path: str, bad: BadRecords, columns: Sequence[str], has_others: bool = False
) -> Iterator[RowBlock]:
    """Yield the sequences in the order of the index, about 4 MiB at a time."""
    index = _index(path)
    ends = np.cumsum(index.sizes)
    with open_regular(tokens_file(path)) as file:
        first = 0
        while first < len(ends):
            most = ends[first] - index.sizes[first] + _BYTES
            end = max(first + 1, int(np.searchsorted(ends, most)))
            yield from _blocks(file, index, range(first, end), bad)
            first = end


def _blocks(file: BinaryIO, index: _Index, rows: range, bad: BadRecords) -> Iterator[RowBlock]:
    """Yield the sequences of some rows; count those that cannot be read."""
    size = os.path.getsize(file.name)
    readable = []
    parts = []
    for row in rows:
        start = int(index.starts[row])
        record_bytes = int(index.sizes[row])
        problem = ""
        if record_bytes < 1 or start + record_bytes > size:
            problem = (
                f"{record_bytes // index.dtype.itemsize} tokens from byte {start}; a sequence has at least one, and "
                f"{os.path.basename(file.name)} has {size} bytes"
            )
        elif record_bytes > bad.longest:
            problem = bad.too_long()
        if problem:
            bad.add(Origin(index.path, row), problem)
            continue
        if start != file.tell():
            file.seek(start)
        readable.append(row)
        parts.append(file.read(record_bytes))
    lengths = index.sizes[readable] // index.dtype.itemsize
    ids = np.frombuffer(b"".join(parts), index.dtype)
    if readable:
        origins = [Origin(index.path, row) for row in readable]
        yield RowBlock({TOKENS: Ragged.of(lengths, ids)}, origins.__getitem__)
