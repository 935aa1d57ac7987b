"""Parquet and Arrow files with tokenised columns, as Hugging Face data sets hold them; written by `sequence_output`.

The column input_ids holds the token sequences, unless the user chooses others (columns.py). Only the columns that are
asked for are decoded.

An .arrow file is an IPC stream, or an IPC file if it begins with ARROW1.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Any, Dict, Iterator, List, Sequence, Tuple, Type

import numpy as np

from pack_data.formats.columns import (
    FRACTIONS,
    NULL,
    ONE,
    OTHER,
    TEXT,
    TRUTHS,
    WHOLE,
    ColumnType,
    FileRow,
    Ragged,
    RowBlock,
)
from pack_data.formats.saved import check_columns, selected_files
from pack_data.reading.bad_records import BadRecords, Origin
from pack_data.reading.durable import naming
from pack_data.reading.fields import one_line, said_of
from pack_data.reading.files import open_regular
from pack_data.reading.packages import load_package

_ROWS = 1024  # read at a time
_BATCH_BYTES = 64 << 20  # of the rows read at a time
_PARQUET_MAGIC = b"PAR1"
_FILE_MAGIC = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"

_Batches = Iterator[Tuple[int, Any]]  # the number of the first row of each batch, and its rows


_arrow = partial(load_package, "pyarrow", "this file format")
_parquet = partial(load_package, "pyarrow.parquet", "this file format")


def _damage() -> Tuple[Type[BaseException], ...]:
    """Return what Arrow raises for damaged files: not only its own errors, but those of decoding text and numbers."""
    return (_arrow().ArrowException, OSError, UnicodeDecodeError, OverflowError, MemoryError)


@contextmanager
def _opening(path: str) -> Iterator[None]:
    """Turn an error of Arrow into a ValueError in one line that names the file."""
    try:
        yield
    except _damage() as error:
        if isinstance(error, OSError) and error.errno is not None:
            with naming(path):
                raise
        raise ValueError(f"{path}: Arrow cannot read it ({one_line(error, 200)})") from None


def _has_magic(path: str, magic: bytes) -> bool:
    with open_regular(path) as file:
        return file.read(len(magic)) == magic


def _ipc_reader(path: str, file):
    ipc = _arrow().ipc
    return ipc.open_file(file) if _has_magic(path, _FILE_MAGIC) else ipc.open_stream(file)


def _schema(path: str):
    """Return the Arrow schema of the rows of a file.  Raises ValueError."""
    path = next(iter(selected_files(path)), path)
    with _opening(path):
        if _has_magic(path, _PARQUET_MAGIC):
            schema = _parquet().read_schema(path)
        else:
            with _arrow().OSFile(path) as file:
                schema = _ipc_reader(path, file).schema
        names = schema.names  # decoded only here
    if len(set(names)) != len(names):
        raise ValueError(f"{path}: two columns have the same name")
    check_columns(path, names)
    return schema


def types(path: str) -> Dict[str, ColumnType]:
    """Return the type of each column."""
    return {
        column.name: ColumnType(_kind(column.type), str(column.type)) for column in _schema(path)
    }


def _stored(type: Any) -> Any:
    """Return the type that holds the values of an extension type."""
    return type.storage_type if isinstance(type, _arrow().BaseExtensionType) else type


def _is_list(type: Any) -> bool:
    return "list" in str(type).partition("<")[0]  # also large ones, of a fixed size, and views


def _kind(type: Any) -> str:
    """Return the kind of a column of an Arrow type."""
    types = _arrow().types
    type = _stored(type)
    value = _stored(type.value_type) if _is_list(type) else type
    if types.is_dictionary(value):
        value = value.value_type
    if types.is_null(value):
        return NULL
    if not _is_list(type):
        is_text = types.is_string(value) or types.is_large_string(value)
        is_text = is_text or str(value) == "string_view"
        return TEXT if is_text else OTHER if types.is_nested(value) else ONE
    if types.is_integer(value):
        return WHOLE
    if types.is_boolean(value):
        return TRUTHS
    return FRACTIONS if types.is_floating(value) or types.is_decimal(value) else OTHER


def rows(
    path: str, bad: BadRecords, columns: Sequence[str] = (), start: int = 0
) -> Iterator[FileRow]:
    """Yield rows as Python values, from row `start` on."""
    names = _schema(path).names
    for name in columns:
        if name not in names:
            raise ValueError(
                f"{path}: has no column {name}; its columns are {', '.join(names)[:150]}"
            )
    for first, batch in _batches(path, bad, columns, start):
        with said_of(path):
            values = batch.to_pylist()
        for number, fields in enumerate(values, first):
            yield FileRow(Origin(path, number), fields, number + 1)


def _batches(path: str, bad: BadRecords, columns: Sequence[str] = (), start: int = 0) -> _Batches:
    """Yield the number of the first row and the rows of each batch, from row `start` on."""
    batches = _parquet_batches if _has_magic(path, _PARQUET_MAGIC) else _arrow_batches
    if selected_files(path):
        batches = _selected_batches
    for first, batch in batches(path, bad, columns, start):
        skipped = max(0, start - first)
        if skipped < batch.num_rows:
            yield first + skipped, batch.slice(skipped) if skipped else batch


def _parquet_batches(path: str, bad: BadRecords, columns: Sequence[str], start: int) -> _Batches:
    """Yield the first row and the rows of each batch, from the row group of row `start` on."""
    with _opening(path), _parquet().ParquetFile(path, page_checksum_verification=True) as file:
        first = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if first + rows > start:
                yield from _group_batches(path, file, group, first, columns, bad)
            first += rows


def _group_batches(
    path: str, file, group: int, first: int, columns: Sequence[str], bad: BadRecords
) -> _Batches:
    """Yield the rows of a row group, which begins with row `first`; after an error row by row, up to the damage."""
    metadata = file.metadata.row_group(group)
    rows = metadata.num_rows
    # Of all columns: asking for an encrypted one ends the process within Arrow.
    group_bytes = metadata.total_byte_size
    bytes_per_row = group_bytes // max(1, rows) + 1
    if bytes_per_row > bad.longest:
        bad.add(Origin(path, first), bad.too_long(), rows)
        return
    done = 0
    for size in (min(_ROWS, _BATCH_BYTES // bytes_per_row + 1), 1):
        try:
            end = 0
            for batch in file.iter_batches(
                batch_size=size, row_groups=[group], columns=columns or None, use_threads=False
            ):
                batch.validate(full=True)
                end += batch.num_rows
                if end > done:
                    yield first + end - batch.num_rows, batch
                    done = end
            if done < rows:
                raise OSError(f"the row group ends after {done} of {rows} rows")
            return
        except _damage() as error:
            reason = one_line(error, 200)
    if "decrypt" in reason:
        raise ValueError(
            f"{path}: it has encrypted columns ({reason}); write it without encryption"
        )
    bad.add(
        Origin(path, first + done),
        f"row group {group} cannot be read further ({reason})",
        rows - done,
    )


def _selected_batches(path: str, bad: BadRecords, columns: Sequence[str], start: int) -> _Batches:
    """Yield the rows whose numbers an Arrow file lists, in its order, which are rows of the files beside it."""
    batches: List[Any] = []
    for file in selected_files(path):
        batches.extend(batch for _, batch in _arrow_batches(file, bad, columns, 0, is_mapped=True))
    starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
    for first, numbers in _arrow_batches(path, bad, (), start):
        rows = []
        for row in numbers.column(0).to_pylist():
            batch = int(np.searchsorted(starts, row, side="right")) - 1
            if batch == len(batches):
                bad.stop(Origin(path, first), f"row {row} does not exist; there are {starts[-1]}")
            rows.append(batches[batch].slice(row - int(starts[batch]), 1))
        yield first, _arrow().Table.from_batches(rows).combine_chunks().to_batches()[0]


def _arrow_batches(
    path: str, bad: BadRecords, columns: Sequence[str], start: int, is_mapped: bool = False
) -> _Batches:
    """Yield the first row and the rows of each batch; those before row `start` too.

    is_mapped: the batches stay in the file, unless it is compressed.
    """
    is_file = _has_magic(path, _FILE_MAGIC)
    first = 0
    opened = _arrow().memory_map if is_mapped else _arrow().OSFile
    with _opening(path), opened(path) as file:
        reader = _ipc_reader(path, file)
        if is_file:
            numbers = range(reader.num_record_batches)
            batches = map(reader.get_batch, numbers)
        else:
            batches = iter(reader)
        while True:
            try:
                batch = next(batches)
                if columns:
                    batch = batch.select(list(columns))
                batch.validate(full=True)
            except StopIteration:
                break
            except _damage() as error:
                bad.stop(
                    Origin(path, first),
                    f"Arrow cannot read on ({one_line(error, 200)}): the {first} records before it were read, but how "
                    "many follow cannot be known",
                )
            for row in range(0, batch.num_rows, _ROWS):
                yield first + row, batch.slice(row, _ROWS)
            first += batch.num_rows
    if not is_file:
        # Arrow takes the end of the file for the end of the stream, so a file cut between batches would look complete.
        with open(path, "rb") as raw:
            raw.seek(-len(_END_OF_STREAM), 2)
            if raw.read() != _END_OF_STREAM:
                bad.add(Origin(path, first), "the stream has no end mark, the file is cut short")


def blocks(
    path: str, bad: BadRecords, columns: Sequence[str], has_others: bool = False
) -> Iterator[RowBlock]:
    """Yield the columns of one file in blocks of rows, in file order.

    columns: lists of numbers; the file may lack some of them. has_others: decode all other columns as well.
    """
    present = [name for name in _schema(path).names if name in columns]
    for start, batch in _batches(path, bad, () if has_others else present):
        arrays = dict(zip(batch.schema.names, batch.columns))
        lists = {name: _ragged(arrays[name]) for name in columns if name in present}
        others = {name: values for name, values in arrays.items() if name not in lists}
        yield RowBlock(lists, partial(_origin, path, start), partial(_row, others))


def _origin(path: str, start: int, row: int) -> Origin:
    return Origin(path, start + row)


def _row(arrays: Dict[str, Any], row: int) -> Dict[str, Any]:
    return {name: values[row] for name, values in arrays.items()}


def _ragged(column: Any) -> Ragged:
    """Return a column of lists of numbers of any Arrow type."""
    arrow = _arrow()
    if isinstance(column.type, arrow.BaseExtensionType):
        column = column.storage
    rows = len(column)
    if arrow.types.is_null(column.type):
        nothing = np.zeros(rows, np.int64)
        return Ragged(nothing, nothing[:0], nothing == 0, nothing > 0)
    values = column.flatten()
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    is_null = np.zeros(rows, bool)
    is_bad = is_null
    if column.null_count:
        is_null = column.is_null().to_numpy(zero_copy_only=False)
    if isinstance(values.type, arrow.BaseExtensionType):
        values = values.storage
    if arrow.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if values.null_count:
        bad_values = values.is_null().to_numpy(zero_copy_only=False)
        ends = np.cumsum(lengths)
        bad_before = np.append(0, np.cumsum(bad_values))
        is_bad = (bad_before[ends] > bad_before[ends - lengths]) & ~is_null
        values = _without_nulls(values)
    if arrow.types.is_decimal(values.type):
        values = values.cast(arrow.float64())
    return Ragged(lengths.astype(np.int64), values.to_numpy(zero_copy_only=False), is_null, is_bad)


def _without_nulls(values: Any) -> Any:
    """Return values with zeros in place of nulls, so that integers stay integers."""
    arrow = _arrow()
    if arrow.types.is_null(values.type):
        return arrow.array(np.zeros(len(values), np.int64))
    return values.fill_null(False if arrow.types.is_boolean(values.type) else 0)
