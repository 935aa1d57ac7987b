"""Writes token sequences, and packs of them, as Parquet or as an Arrow stream.

The columns of `parquet.py`, which reads such files.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any, Iterable, Iterator, List, Mapping, Sequence

import numpy as np

from pack_data.formats.records import STARTS, Record
from pack_data.reading.fields import one_line
from pack_data.reading.files import replacing
from pack_data.reading.packages import load_package

_ROWS = 1024  # of a row group, which is written at a time; few, so that damage costs few rows
_TOKENS = "input_ids"
_MASK = "loss_mask"


def _arrow():
    return load_package("pyarrow", "this file format")


def _parquet():
    return load_package("pyarrow.parquet", "this file format")


def _packed_rows(packs: Iterable[Record]) -> Iterator[Record]:
    """Yield packs of token sequences as rows of packed Parquet.  Without a loss_mask, every token is predicted.

    Raises ValueError for a pack without input_ids or with a column that packed Parquet does not have.
    """
    for record in packs:
        columns = [name for name in record.value if name != STARTS]
        if _TOKENS not in columns or set(columns) - {_TOKENS, _MASK}:
            raise ValueError(
                f"{record.origin}: columns {', '.join(columns)}; packed Parquet holds {_TOKENS} and {_MASK}: "
                f"build the data set with --columns {_TOKENS},{_MASK}, or write its sequences with --unpack"
            )
        ids = record.value[_TOKENS].astype(np.int32)
        mask = record.value.get(_MASK, np.ones(len(ids))).astype(np.int32)
        yield Record(record.origin, {_TOKENS: ids, _MASK: mask, STARTS: record.value[STARTS]})


def _arrow_schema(first: Record):
    """Return the Arrow schema of a file whose first record is `first`."""
    arrow = _arrow()
    columns = []
    tokens_first = {**first.value, **first.foreign, **first.value}
    for name, value in tokens_first.items():
        columns.append(
            (name, value.type if isinstance(value, arrow.Scalar) else arrow.infer_type([value]))
        )
    return arrow.schema(columns)


def _column(field, values: List[Any]):
    arrow = _arrow()
    if all(isinstance(value, np.ndarray) for value in values):
        # 30 times as fast as a list of arrays.
        offsets = np.concatenate([[0], np.cumsum([len(value) for value in values])]).astype(
            np.int32
        )
        return arrow.ListArray.from_arrays(
            offsets, arrow.array(np.concatenate(values)).cast(field.type.value_type)
        )
    return arrow.array(
        [value.as_py() if isinstance(value, arrow.Scalar) else value for value in values],
        field.type,
    )


def _batch(schema, records: Sequence[Record]):
    rows: List[Mapping[str, Any]] = []
    for record in records:
        row = {**record.foreign, **record.value}
        unknown = sorted(set(row) - set(schema.names))
        if unknown:
            raise ValueError(
                f"{record.origin}: column {unknown[0]} is not in the first record, whose columns a table keeps"
            )
        rows.append(row)
    try:
        columns = [_column(field, [row.get(field.name) for row in rows]) for field in schema]
        return _arrow().record_batch(columns, schema=schema)
    except _arrow().ArrowException as error:
        raise ValueError(
            f"{records[0].origin} and the next {len(records) - 1}: {one_line(error, 200)}"
        ) from None


def write(path: str, records: Iterable[Record], to_format: str) -> int:
    """Write token sequences as "parquet" or "arrow" (a stream), or packs of them as "packed_parquet".

    Return the number of records.  Parquet pages have checksums, so that damage is noticed when they are read.
    """
    records = _packed_rows(records) if to_format == "packed_parquet" else iter(records)
    block = list(islice(records, _ROWS))
    if not block:
        raise ValueError(f"{path}: nothing to write, the source has no record")
    schema = _arrow_schema(block[0])
    count = 0
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing(Path(path)) as temporary:
        if to_format == "arrow":
            writer = _arrow().ipc.new_stream(str(temporary), schema)
        else:
            writer = _parquet().ParquetWriter(str(temporary), schema, write_page_checksum=True)
        with writer:
            while block:
                writer.write_batch(_batch(schema, block))
                count += len(block)
                block = list(islice(records, _ROWS))
    return count
