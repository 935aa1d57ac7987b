"""Parquet and Arrow files with tokenised columns, as Hugging Face data sets hold them; written by `sequence_output`.

The column input_ids holds the token sequences, unless the user chooses others (columns.py). An attention_mask only
marks padding: its zeros are removed, and it is not kept. seq_start_id with input_ids makes packs of token sequences
(packed Parquet). All other columns are foreign and are passed on with their types.

An .arrow file is an IPC stream, or an IPC file if it begins with ARROW1.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Type

import numpy as np

from pack_data.formats.columns import FileRow, token_columns
from pack_data.formats.records import (
    LEAST,
    STARTS,
    Record,
    RecordBlock,
    RecordError,
    Tokens,
    fits,
    integers,
    least_of,
    sequences_from_columns,
    tokens_of,
)
from pack_data.formats.saved import check_columns, selected_files
from pack_data.reading.bad_records import BadRecords, Origin
from pack_data.reading.durable import naming
from pack_data.reading.fields import one_line, said_of
from pack_data.reading.files import open_regular
from pack_data.reading.packages import load_package
from pack_data.store.boundaries import STATING
from pack_data.store.companions import companion_values
from pack_data.store.sequences import Sequences

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


def types(path: str) -> Dict[str, str]:
    """Return the type of each column, as Arrow prints it."""
    return {column.name: str(column.type) for column in _schema(path)}


def _columns_of(path: str, columns: Sequence[str]) -> Tuple[str, Tuple[str, ...]]:
    """Return the kind of the records and the columns that hold them.  Raises ValueError."""
    chosen = token_columns(path, types(path), columns)
    is_packed = not columns and {_TOKENS, STARTS}.issubset(chosen)
    return "token_packs" if is_packed else "tokens", chosen


def kind(path: str, columns: Sequence[str] = ()) -> str:
    """Return "token_packs" for packed Parquet, else "tokens"."""
    return _columns_of(path, columns)[0]


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
                batch.validate(full=True)
            except StopIteration:
                break
            except _damage() as error:
                bad.stop(
                    Origin(path, first),
                    f"Arrow cannot read on ({one_line(error, 200)}): the {first} records before it were read, but how "
                    "many follow cannot be known",
                )
            if columns:
                batch = batch.select(list(columns))
            for row in range(0, batch.num_rows, _ROWS):
                yield first + row, batch.slice(row, _ROWS)
            first += batch.num_rows
    if not is_file:
        # Arrow takes the end of the file for the end of the stream, so a file cut between batches would look complete.
        with open(path, "rb") as raw:
            raw.seek(-len(_END_OF_STREAM), 2)
            if raw.read() != _END_OF_STREAM:
                bad.add(Origin(path, first), "the stream has no end mark, the file is cut short")


class _Lists:
    """One column of a batch: row -> array; RecordError if the row is null."""

    def __init__(self, name: str, column):
        if not (_arrow().types.is_list(column.type) or _arrow().types.is_large_list(column.type)):
            # Lists of a fixed size have no offsets, and those of a view lie in any order.
            lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
            offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
            column = _arrow().ListArray.from_arrays(
                offsets, column.flatten(), mask=column.is_null()
            )
        self._name = name
        self._offsets = column.offsets.to_numpy()
        self._values = column.values.to_numpy(zero_copy_only=False)
        self._is_bad = np.zeros(len(column), bool)
        if column.null_count or column.values.null_count:
            is_null = column.values.is_null().to_numpy(zero_copy_only=False)
            nulls_before = np.append(0, np.cumsum(is_null))[self._offsets]
            is_null_list = column.is_null().to_numpy(zero_copy_only=False)
            self._is_bad = is_null_list | (np.diff(nulls_before) > 0)

    def __getitem__(self, row: int) -> np.ndarray:
        if self._is_bad[row]:
            raise RecordError(f"{self._name} is null or holds a null")
        return self._values[self._offsets[row] : self._offsets[row + 1]]

    def together(self) -> Optional[Tuple[np.ndarray, np.ndarray]]:
        """Return the lengths of all rows and their concatenated values; None if one has a null."""
        if self._is_bad.any():
            return None
        offsets = self._offsets.astype(np.int64)
        return np.diff(offsets), self._values[offsets[0] : offsets[-1]]


def blocks(path: str, bad: BadRecords, columns: Sequence[str] = ()) -> Iterator[RecordBlock]:
    """Yield the records of one file in blocks, in file order."""
    content, chosen = _columns_of(path, columns)
    for start, batch in _batches(path, bad):
        arrays = dict(zip(batch.schema.names, batch.columns))
        lists = {name: _Lists(name, arrays[name]) for name in chosen}
        foreign = {name: values for name, values in arrays.items() if name not in chosen}
        yield RecordBlock(
            partial(_columns, lists, foreign),
            partial(_records, path, content, start, batch.num_rows, lists, foreign, bad),
            tuple(foreign),
        )


def _columns(lists: Mapping[str, _Lists], foreign: Mapping[str, Any]) -> Optional[Sequences]:
    """Return the columns of a batch and its foreign integers; None unless all rows are valid and without padding."""
    columns: Dict[str, np.ndarray] = {}
    lengths = np.zeros(0, np.int64)
    tokens = tokens_of(lists)
    for name, rows in lists.items():
        together = rows.together()
        if together is None or (columns and not np.array_equal(together[0], lengths)):
            return None
        lengths, values = together
        try:
            columns[name] = companion_values(name, values)
        except ValueError:
            return None
        is_weights = columns[name].dtype.kind == "f"
        if not is_weights and not fits(columns[name], least_of(name, tokens)):
            return None
    mask = columns.pop("attention_mask", None) if len(columns) > 1 else None
    is_padded = mask is not None and (mask != 1).any()
    is_divided = not STATING.isdisjoint(columns)
    if not len(lengths) or lengths.min() < 1 or is_padded or is_divided:
        return None

    scalars = {}
    for name, column in foreign.items():
        if _arrow().types.is_integer(column.type) and not column.null_count:
            values = column.to_numpy(zero_copy_only=False)
            if fits(values, LEAST):
                scalars[name] = values.astype(np.int64)
    return Sequences.of_tokens(lengths, columns, scalars)


def _records(
    path: str,
    content: str,
    start: int,
    rows: int,
    lists: Mapping[str, _Lists],
    foreign: Mapping[str, Any],
    bad: BadRecords,
) -> Iterator[Record]:
    for row in range(rows):
        others = {name: values[row] for name, values in foreign.items()}
        try:
            columns = {name: column[row] for name, column in lists.items()}
            if content == "tokens":
                found = sequences_from_columns(columns)
            else:
                pack = _checked_pack(columns)
                found = [pack]
                others.update({name: columns[name] for name in columns if name not in pack})
        except ValueError as error:
            bad.add(Origin(path, start + row), str(error))
            continue
        for value in found:
            yield Record(Origin(path, start + row), value, others)


# ---- packed Parquet ----------------------------------------------------------------------------------------------
#
# For causal models, as Megatron-Bridge and Nemotron read it, one row per pack, of list<int32>: input_ids, the tokens of
# all sequences, one after another, without padding; loss_mask, 1 where a token is predicted; seq_start_id, where each
# sequence begins: 0, then ascending.

_TOKENS = "input_ids"


def _checked_pack(row: Tokens) -> Tokens:
    """Return the columns with a value for each token, and `seq_start_id` as int32.

    Raises RecordError unless these are starts of sequences.
    """
    starts = integers(STARTS, row[STARTS])
    slots = len(row[_TOKENS])
    ends = np.append(starts[1:], slots)
    if not len(starts) or starts[0] != 0 or (ends <= starts).any():
        raise RecordError(
            f"{STARTS} must begin with 0 and ascend below {slots}, the number of values of {_TOKENS}, so that each "
            "sequence has a token"
        )
    integers(_TOKENS, row[_TOKENS])
    columns = {name: values for name, values in row.items() if len(values) == slots}
    pack = {name: companion_values(name, values) for name, values in columns.items()}
    return {**pack, STARTS: starts}
