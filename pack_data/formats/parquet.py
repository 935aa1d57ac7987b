"""Parquet and Arrow files with tokenised columns, as Hugging Face data sets hold them; read and written.

Every column of integer lists is a column of the token sequences, unless the user chooses some. An attention_mask only
marks padding: its zeros are cut off, and it is not kept. seq_start_id beside input_ids makes packs of token sequences
(packed Parquet). All other columns are foreign and are passed on with their types.

An .arrow file is an IPC stream, or an IPC file if it begins with ARROW1; the stream is what `write` writes.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Type

import numpy as np

from pack_data.cli.bad_records import BadRecords, Origin
from pack_data.formats.records import (
    STARTS,
    Record,
    RecordBlock,
    RecordError,
    Tokens,
    fits,
    integers,
    token_columns,
    tokens_from_columns,
)
from pack_data.reading.fields import one_line
from pack_data.reading.files import open_regular, replacing
from pack_data.reading.packages import load_package
from pack_data.store.sequences import Sequences

ROWS = 1024  # read and written at a time; a row group, so that damage costs few rows
PARQUET_MAGIC, FILE_MAGIC = b"PAR1", b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def _arrow():
    return load_package("pyarrow", "this file format")


def _parquet():
    return load_package("pyarrow.parquet", "this file format")


def _damage() -> Tuple[Type[BaseException], ...]:
    # the others for names and text, and for values that Python cannot hold
    return (_arrow().ArrowException, OSError, UnicodeDecodeError, OverflowError, MemoryError)


@contextmanager
def _opening(path: str) -> Iterator[None]:
    """What Arrow raises in the block is a ValueError in one line that names the file."""
    try:
        yield
    except _damage() as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{path}: Arrow cannot read it ({one_line(error)})") from None


def _magic(path: str) -> bytes:
    with open_regular(path) as file:
        return file.read(8)


def _schema(path: str):
    """The file's Arrow schema.  Raises ValueError."""
    arrow, magic = _arrow(), _magic(path)
    try:
        if magic.startswith(PARQUET_MAGIC):
            with _parquet().ParquetFile(path) as file:
                schema = file.schema_arrow
        else:
            with arrow.OSFile(path) as file:
                schema = (
                    arrow.ipc.open_file(file) if magic.startswith(FILE_MAGIC) else arrow.ipc.open_stream(file)
                ).schema
        _ = schema.names  # decoded only here
        return schema
    except _damage() as error:
        raise ValueError(f"{path}: Arrow cannot open it ({one_line(error, 200)})") from None


def _is_list(kind) -> bool:
    types = _arrow().types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _integer_lists(schema) -> List[str]:
    is_integer = _arrow().types.is_integer
    return [column.name for column in schema if _is_list(column.type) and is_integer(column.type.value_type)]


def _columns_of(path: str, columns: Sequence[str]) -> Tuple[str, Tuple[str, ...]]:
    """Return the kind of the records and the columns that hold them.  Raises ValueError."""
    schema = _schema(path)
    if len(set(schema.names)) != len(schema.names):
        raise ValueError(f"{path}: two columns have the same name")
    lists = _integer_lists(schema)
    chosen = token_columns(path, schema.names, lists, columns)
    is_packed = not columns and _TOKENS in lists and STARTS in lists
    return "token_packs" if is_packed else "tokens", chosen


def kind(path: str, columns: Sequence[str] = ()) -> str:
    """Return "token_packs" for packed Parquet, else "tokens"."""
    return _columns_of(path, columns)[0]


def _parquet_batches(path: str, bad: BadRecords) -> Iterator[Tuple[int, Any]]:
    """First row and rows of each batch; a row group that fails is read again row by row up to its damage."""
    with _opening(path), _parquet().ParquetFile(path, page_checksum_verification=True) as file:
        start = 0
        for group in range(file.num_row_groups):
            rows, done = file.metadata.row_group(group).num_rows, 0
            for size in (ROWS, 1):
                try:
                    seen = 0
                    for batch in file.iter_batches(batch_size=size, row_groups=[group], use_threads=False):
                        batch.validate(full=True)
                        seen += batch.num_rows
                        if seen > done:
                            yield start + seen - batch.num_rows, batch
                            done = seen
                    if done < rows:
                        raise OSError(f"the row group ends after {done} of {rows} rows")
                    break
                except _damage() as error:
                    reason = one_line(error, 200)
            else:
                bad.add(Origin(path, start + done), f"row group {group} cannot be read further ({reason})", rows - done)
            start += rows


def _arrow_batches(path: str, bad: BadRecords) -> Iterator[Tuple[int, Any]]:
    arrow, start = _arrow(), 0
    random_access = _magic(path).startswith(FILE_MAGIC)
    with _opening(path), arrow.OSFile(path) as file:
        reader = arrow.ipc.open_file(file) if random_access else arrow.ipc.open_stream(file)
        numbers = iter(range(reader.num_record_batches if random_access else 0))
        while True:
            try:
                batch = reader.get_batch(next(numbers)) if random_access else reader.read_next_batch()
                batch.validate(full=True)
            except StopIteration:
                break
            except _damage() as error:
                bad.stop(
                    Origin(path, start),
                    f"Arrow cannot read on ({one_line(error, 200)}): the {start} records before it "
                    "were read, how many stand behind it cannot be known",
                )
            for at in range(0, batch.num_rows, ROWS):
                yield start + at, batch.slice(at, ROWS)
            start += batch.num_rows
    if not random_access:
        with open(path, "rb") as file:
            # Arrow takes the end of the file for the end of the stream, so a file cut between batches would look
            # complete.
            file.seek(-len(_END_OF_STREAM), 2)
            if file.read() != _END_OF_STREAM:
                bad.add(Origin(path, start), "the stream has no end mark, the file is cut short")


class _Lists:
    """One column of a batch: row -> numpy array, or RecordError where it is null."""

    def __init__(self, name: str, column):
        arrow = _arrow()
        if arrow.types.is_fixed_size_list(column.type):
            column = column.cast(arrow.list_(column.type.value_type))
        self._name = name
        self._null = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
        self._offsets = column.offsets.to_numpy()
        self._arrow_values = column.values if column.values.null_count else None
        self._values = column.values.to_numpy(zero_copy_only=False)

    def __getitem__(self, row: int) -> np.ndarray:
        begin, end = int(self._offsets[row]), int(self._offsets[row + 1])
        if (self._null is not None and self._null[row]) or (
            self._arrow_values is not None and self._arrow_values.slice(begin, end - begin).null_count
        ):
            raise RecordError(f"{self._name} is null or holds a null")
        return self._values[begin:end]

    def together(self) -> Optional[Tuple[np.ndarray, np.ndarray]]:
        """The lengths of all rows, and their values, one after another; None where one is null."""
        if self._null is not None or self._arrow_values is not None:
            return None
        offsets = self._offsets.astype(np.int64)
        return np.diff(offsets), self._values[offsets[0] : offsets[-1]]


def _lists(batch, names: Iterable[str]) -> Dict[str, _Lists]:
    return {name: _Lists(name, batch.column(batch.schema.get_field_index(name))) for name in names}


def _batches(path: str, bad: BadRecords) -> Iterator[Tuple[int, Any]]:
    return (_parquet_batches if _magic(path).startswith(PARQUET_MAGIC) else _arrow_batches)(path, bad)


def blocks(path: str, bad: BadRecords, columns: Sequence[str] = ()) -> Iterator[RecordBlock]:
    """Yield the records of one file in blocks, in file order."""
    content, chosen = _columns_of(path, columns)
    for start, batch in _batches(path, bad):
        foreign = tuple(name for name in batch.schema.names if name not in chosen)
        lists = _lists(batch, chosen)
        yield RecordBlock(
            partial(_columns, batch, lists, foreign),
            partial(_records, path, content, start, batch, lists, foreign, bad),
            foreign,
        )


def read(path: str, bad: BadRecords, columns: Sequence[str] = ()) -> Iterator[Record]:
    """The records of one file, in its order."""
    for block in blocks(path, bad, columns):
        yield from block.records()


def _columns(batch, lists: Mapping[str, _Lists], foreign: Sequence[str]) -> Optional[Sequences]:
    columns: Dict[str, np.ndarray] = {}
    lengths = np.zeros(0, np.int64)
    for name, values in lists.items():
        found = values.together()
        if found is None or not fits(name, found[1]) or (columns and not np.array_equal(found[0], lengths)):
            return None
        lengths, columns[name] = found
    mask = columns.pop("attention_mask", None) if len(columns) > 1 else None
    if not len(lengths) or lengths.min() < 1 or (mask is not None and (mask != 1).any()):
        return None
    scalars = {}
    for name in foreign:
        column = batch.column(batch.schema.get_field_index(name))
        if _arrow().types.is_integer(column.type) and not column.null_count:
            values = column.to_numpy(zero_copy_only=False)
            if fits(name, values):
                scalars[name] = values.astype(np.int64)
    return Sequences.of_tokens(lengths, columns, scalars)


def _records(
    path: str, content: str, start: int, batch, lists: Mapping[str, _Lists], names: Sequence[str], bad: BadRecords
) -> Iterator[Record]:
    foreign = {name: batch.column(batch.schema.get_field_index(name)) for name in names}
    for row in range(batch.num_rows):
        origin = Origin(path, start + row)
        others = {name: values[row] for name, values in foreign.items()}
        try:
            value = {name: values[row] for name, values in lists.items()}
            if content == "tokens":
                value = tokens_from_columns(value)
            else:
                # Lists of another length have no value for each token: foreign.
                slots = len(value[_TOKENS])
                other_lists = [name for name, values in value.items() if name != STARTS and len(values) != slots]
                others.update({name: value.pop(name) for name in other_lists})
                value = _checked_pack(value)
        except RecordError as error:
            bad.add(origin, str(error))
            continue
        yield Record(origin, value, others)


# ---- packed Parquet ----------------------------------------------------------------------------------------------
#
# For causal models, as Megatron-Bridge and Nemotron read it, one row a pack of list<int32>: input_ids, the tokens of
# all sequences, one after another, without padding; loss_mask, 1 where a token is predicted; seq_start_id, where each
# sequence begins: 0, and then ascending.

_TOKENS, _MASK = "input_ids", "loss_mask"


def _checked_pack(row: Tokens) -> Tokens:
    """Return the row with `seq_start_id` as int32.  Raises RecordError unless these are starts of sequences."""
    starts = integers(STARTS, row[STARTS])
    slots = len(row[_TOKENS])
    ends = np.append(starts[1:], slots)
    if not len(starts) or starts[0] != 0 or (ends <= starts).any():
        raise RecordError(
            f"{STARTS} must begin with 0 and ascend below {slots}, the number of values of {_TOKENS}, so that each "
            "sequence has a token"
        )
    return {**row, STARTS: starts}


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


# ---- writing -----------------------------------------------------------------------------------------------------


def _arrow_schema(first: Record):
    """Return the Arrow schema of a file whose first record is `first`."""
    arrow = _arrow()
    columns = [(name, arrow.list_(arrow.from_numpy_dtype(values.dtype))) for name, values in first.value.items()]
    columns += [(name, _type_of(value)) for name, value in first.foreign.items() if name not in first.value]
    return arrow.schema(columns)


def _type_of(value: Any):
    """The Arrow type of a foreign value: an Arrow scalar, an array, a number, a text, or a list of bytes."""
    arrow = _arrow()
    if hasattr(value, "as_py"):
        return value.type
    if isinstance(value, np.ndarray):
        return arrow.list_(arrow.from_numpy_dtype(value.dtype))
    if isinstance(value, np.generic):
        return arrow.from_numpy_dtype(value.dtype)
    return arrow.list_(arrow.binary()) if isinstance(value, list) else arrow.infer_type([value])


def _column(field, values: List[Any]):
    arrow = _arrow()
    if all(isinstance(value, np.ndarray) for value in values):
        offsets = np.concatenate([[0], np.cumsum([len(value) for value in values])]).astype(np.int32)
        return arrow.ListArray.from_arrays(offsets, arrow.array(np.concatenate(values)).cast(field.type.value_type))
    plain = [
        value.as_py() if hasattr(value, "as_py") else value.tolist() if isinstance(value, np.ndarray) else value
        for value in values
    ]
    return arrow.array(plain, field.type)


def _batch(schema, records: Sequence[Record]):
    rows: List[Mapping[str, Any]] = []
    for record in records:
        row = {**record.foreign, **record.value}
        unknown = sorted(set(row) - set(schema.names))
        if unknown:
            raise ValueError(
                f"{record.origin}: column {unknown[0]} was not in the first record; a table has its columns from "
                "the start"
            )
        rows.append(row)
    try:
        return _arrow().record_batch(
            [_column(field, [row.get(field.name) for row in rows]) for field in schema], schema=schema
        )
    except _arrow().ArrowException as error:
        raise ValueError(f"{records[0].origin} and the next {len(records) - 1}: {one_line(error, 200)}") from None


def write(path: str, records: Iterable[Record], to_format: str) -> int:
    """Write token sequences as "parquet" or "arrow" (a stream), or packs of them as "packed_parquet".

    Return the number of records.  Parquet pages have checksums, so that damage is noticed when they are read.
    """
    arrow, parquet, count, waiting = _arrow(), _parquet(), 0, []
    records = _packed_rows(records) if to_format == "packed_parquet" else iter(records)
    first = next(records, None)
    if first is None:
        raise ValueError(f"{path}: nothing to write, the source has no record")
    schema = _arrow_schema(first)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing(Path(path)) as temporary:
        writer = (
            arrow.ipc.new_stream(str(temporary), schema)
            if to_format == "arrow"
            else parquet.ParquetWriter(str(temporary), schema, write_page_checksum=True)
        )
        with writer:
            waiting.append(first)
            for record in records:
                waiting.append(record)
                if len(waiting) == ROWS:
                    writer.write_batch(_batch(schema, waiting))
                    count += len(waiting)
                    waiting = []
            if waiting:
                writer.write_batch(_batch(schema, waiting))
                count += len(waiting)
    return count
