"""Rows of JSONL, JSON arrays, Parquet and Arrow files, one after another, in bounded memory.

for row in read_rows("wiki/train-00000-of-00041.parquet", BadRecords(), ["text"]):
    row.fields["text"], str(row.origin), row.after
"""

from __future__ import annotations

import hashlib
import os
from types import ModuleType
from typing import Dict, Iterator, Sequence

from pack_data.formats import jsonl, parquet
from pack_data.formats.columns import FileRow
from pack_data.formats.detect import content_format, suffix_format
from pack_data.formats.saved import selected_files
from pack_data.reading.bad_records import BadRecords
from pack_data.reading.files import open_regular

# Bytes at each end of a file that identify it; the footer of a Parquet file is among them.
_DIGEST_BYTES = 1 << 16


def read_rows(
    path: str, bad: BadRecords, columns: Sequence[str] = (), start: int = 0
) -> Iterator[FileRow]:
    """Yield the rows of a file.

    Args:
        path: a file of JSONL, a JSON array, Parquet or Arrow, also compressed.
        bad: counts rows that cannot be read; a row of more than `bad.longest` bytes is one of them.
        columns: the fields of each row; all if empty. JSON objects may lack some of them.
        start: the place of the first row, `after` of the row before it.

    Raises:
        ValueError: the file has another format, lacks a column, or has more bad rows than allowed.
    """
    return _module(path).rows(path, bad, columns, start)


def column_types(path: str) -> Dict[str, str]:
    """Return the kind of each column of a file of `read_rows`, such as "text" (`columns.TEXT`)."""
    return {name: type.kind for name, type in _module(path).types(path).items()}


def identity(path: str) -> str:
    """Return the sizes of a file, and of those whose rows it selects, and a digest of their ends.

    A file that was written again has another identity.
    """
    content = hashlib.sha256()
    sizes = []
    for name in (path, *selected_files(path)):
        with open_regular(name) as file:
            size = os.fstat(file.fileno()).st_size
            content.update(file.read(_DIGEST_BYTES))
            file.seek(max(0, size - _DIGEST_BYTES))
            content.update(file.read(_DIGEST_BYTES))
        sizes.append(str(size))
    return f"{'+'.join(sizes)}:{content.hexdigest()[:32]}"


def _module(path: str) -> ModuleType:
    """Return the module that reads a file of rows.  Raises ValueError for any other format."""
    format = content_format(path) or suffix_format(path)
    if format not in ("parquet", "arrow", "jsonl"):
        raise ValueError(f"{path}: {format or 'no known format'}; pass JSONL, Parquet or Arrow")
    return jsonl if format == "jsonl" else parquet
