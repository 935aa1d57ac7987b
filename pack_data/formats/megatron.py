"""Megatron's indexed data sets, a `.bin` of token ids and an `.idx` that says where each sequence stands; only read.

The `.idx`, little-endian: the magic, version 1 (uint64), the code of the ids' type (uint8), how many sequences and
document indices there are (uint64 each), tokens of each sequence (int32), its first byte in the `.bin` (int64), and the
document indices (int64). What follows these (modes of images) is not read. A record is one sequence.
"""

from __future__ import annotations

import os
import struct
from functools import partial
from typing import BinaryIO, Iterator, NamedTuple, Optional

import numpy as np

from pack_data.cli.bad_records import BadRecords, Origin
from pack_data.formats.records import Record, RecordBlock, RecordError, fits, integers
from pack_data.reading.files import open_regular
from pack_data.store.sequences import Sequences

MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_TOKENS = 1 << 20  # read at a time
# Code -> type; 6 and 7 are floats, which are no token ids.
_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class _Index(NamedTuple):
    path: str
    dtype: np.dtype
    lengths: np.ndarray  # int32 [sequences], in tokens
    pointers: np.ndarray  # int64 [sequences], in bytes


def tokens_file(path: str) -> str:
    """The `.bin` of an `.idx`. ValueError where it is missing."""
    data = os.path.splitext(path)[0] + ".bin"
    if not os.path.isfile(data):
        raise ValueError(f"{path}: {os.path.basename(data)} is not beside it; give both files one name in one folder")
    return data


def _index(path: str) -> _Index:
    with open_regular(path) as file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or not head.startswith(MAGIC):
            raise ValueError(f"{path}: no index of Megatron; it begins with {MAGIC!r} and has {_HEADER.size} bytes")
        _, version, code, sequences, documents = _HEADER.unpack(head)
        if version != 1 or code not in _TYPES:
            raise ValueError(
                f"{path}: version {version}, type code {code}; read are version 1 and the whole numbers "
                f"{', '.join(map(str, _TYPES))}: write it again with Megatron's preprocessing"
            )
        size, needed = os.path.getsize(path), _HEADER.size + 12 * sequences + 8 * documents
        if size < needed:
            raise ValueError(f"{path}: {size} bytes where its header needs {needed}; the file is cut, copy it again")
        lengths = np.frombuffer(file.read(4 * sequences), "<i4")
        return _Index(path, np.dtype(_TYPES[code]), lengths, np.frombuffer(file.read(8 * sequences), "<i8"))


def kind(path: str) -> str:
    """Return "tokens", the only kind that Megatron's files hold."""
    return "tokens"


def blocks(path: str, bad: BadRecords) -> Iterator[RecordBlock]:
    """The sequences in the order of the index, about a million tokens at a time."""
    index, data = _index(path), tokens_file(path)
    ends = np.cumsum(index.lengths, dtype=np.int64)
    with open_regular(data) as file:
        first = 0
        while first < len(ends):
            begun = int(ends[first - 1]) if first else 0
            end = max(first + 1, int(np.searchsorted(ends, begun + _TOKENS)))
            yield RecordBlock(
                partial(_columns, file, index, first, end, bad), partial(_records, file, index, first, end, bad)
            )
            first = end


def read(path: str, bad: BadRecords) -> Iterator[Record]:
    """The sequences in the order of the index."""
    for block in blocks(path, bad):
        yield from block.records()


def _columns(file: BinaryIO, index: _Index, first: int, end: int, bad: BadRecords) -> Optional[Sequences]:
    lengths, pointers = index.lengths[first:end].astype(np.int64), index.pointers[first:end]
    sizes = lengths * index.dtype.itemsize
    if lengths.min() < 1 or pointers[0] < 0 or sizes.max() > bad.longest or (np.diff(pointers) != sizes[:-1]).any():
        return None
    file.seek(int(pointers[0]))
    ids = np.frombuffer(file.read(int(sizes.sum())), np.uint8)
    if len(ids) < sizes.sum() or not fits("input_ids", ids.view(index.dtype)):
        return None
    return Sequences.of_tokens(lengths, {"input_ids": ids.view(index.dtype)})


def _records(file: BinaryIO, index: _Index, first: int, end: int, bad: BadRecords) -> Iterator[Record]:
    size, width = os.path.getsize(file.name), index.dtype.itemsize
    for number in range(first, end):
        length, start, origin = int(index.lengths[number]), int(index.pointers[number]), Origin(index.path, number)
        try:
            if length < 1 or start < 0 or start + length * width > size:
                raise RecordError(
                    f"{length} tokens from byte {start}; a sequence has at least one, and "
                    f"{os.path.basename(file.name)} has {size} bytes"
                )
            if length * width > bad.longest:
                raise RecordError(bad.too_long())
            file.seek(start)
            ids = integers("input_ids", np.frombuffer(file.read(length * width), index.dtype))
        except RecordError as error:
            bad.add(origin, str(error))
            continue
        yield Record(origin, {"input_ids": ids})
