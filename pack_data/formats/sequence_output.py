"""Writes token sequences as Parquet, Arrow (a stream) or JSONL, and packs of them as packed Parquet.

The columns are those of `parquet.py` and `jsonl.py`, which read such files. A column of Parquet and Arrow has one type,
which all its values determine: integers next to floating-point numbers become floating-point numbers, objects have the
keys of all objects (null if one lacks a key), and a record without the field has a null. Values without a common type
are refused.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from pack_data.cli.bad_records import Origin
from pack_data.formats.records import STARTS, Record, RecordError
from pack_data.reading.fields import one_line
from pack_data.reading.files import replacing
from pack_data.reading.packages import load_package

_ROWS = 1024  # of a row group, which is written at a time; few, so that damage costs few rows
_TOKENS = "input_ids"
_MASK = "loss_mask"
# Errors of pyarrow for a value that a type does not hold; SystemError: scalars of lists of a fixed size.
_MISFITS = (ValueError, TypeError, OverflowError, NotImplementedError, SystemError)

_Types = Dict[str, Any]  # column -> its Arrow type


@lru_cache(maxsize=None)
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


def _row(record: Record) -> Dict[str, Any]:
    """Return all columns of a record, those of tokens first."""
    return {**record.value, **record.foreign, **record.value}


def _plain(value: Any) -> Any:
    """Return a value of Arrow or NumPy as Python's own."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return value.as_py() if hasattr(value, "as_py") else value


# ---- types of columns --------------------------------------------------------------------------------------------


def _type_of(value: Any):
    """Return the Arrow type of one value.  Raises RecordError for a value that Arrow does not hold."""
    arrow = _arrow()
    if isinstance(value, arrow.Scalar):
        return value.type
    if isinstance(value, np.ndarray) and len(value):
        return arrow.list_(arrow.from_numpy_dtype(value.dtype))
    if isinstance(value, np.generic):
        return arrow.from_numpy_dtype(value.dtype)
    if isinstance(value, int) and 2**63 <= value < 2**64:
        return arrow.uint64()
    try:
        return arrow.array([_plain(value)]).type
    except _MISFITS as error:
        # Arrow does not infer the type of integers from 2^63 on, which may be in lists and objects.
        if isinstance(value, list):
            kind = arrow.null()
            for item in value:
                kind = _common_type(kind, _type_of(item))
            return arrow.list_(kind)
        if isinstance(value, dict):
            return arrow.struct([(key, _type_of(item)) for key, item in value.items()])
        raise RecordError(one_line(error, 120)) from None


def _common_type(left: Any, right: Any):
    """Return the Arrow type that holds the values of both types.  Raises RecordError if there is none."""
    arrow = _arrow()
    types = arrow.types
    if types.is_struct(left) and types.is_struct(right):
        fields = {field.name: field.type for field in left}
        for field in right:
            fields[field.name] = _common_type(fields.get(field.name, arrow.null()), field.type)
        return arrow.struct(list(fields.items()))
    if types.is_list(left) and types.is_list(right):
        return arrow.list_(_common_type(left.value_type, right.value_type))
    if types.is_null(left):
        return right

    schemas = [arrow.schema([("value", kind)]) for kind in (left, right)]
    try:
        common = arrow.unify_schemas(schemas, promote_options="permissive").field(0).type
    except arrow.ArrowException:
        raise RecordError(f"{left} and {right}") from None
    # Arrow would also make bytes of text, and floating-point numbers of decimal ones.
    is_lossy = types.is_decimal(left) != types.is_decimal(right) and types.is_floating(common)
    is_text_as_bytes = ("binary" in str(left)) != ("binary" in str(right))
    if is_lossy or (is_text_as_bytes and not types.is_null(right)):
        raise RecordError(f"{left} and {right}")
    has_unsigned = types.is_uint64(left) or types.is_uint64(right)
    return arrow.uint64() if has_unsigned and types.is_integer(common) else common


def _widen(types: _Types, block: Sequence[Record]) -> bool:
    """Widen the types of the columns to hold a block of records; return True if that changed any.

    Raises ValueError that names the first record whose type has none in common with those before it.
    """
    first_origins: Dict[Tuple[str, Any], Origin] = {}
    for record in block:
        for name, value in _row(record).items():
            try:
                kind = _type_of(value)
            except RecordError as error:
                raise ValueError(f"{record.origin}: {name} is not of one type ({error})") from None
            if kind != types.get(name):
                first_origins.setdefault((name, kind), record.origin)

    is_wider = False
    for (name, kind), origin in first_origins.items():
        known = types.get(name, _arrow().null())
        try:
            common = _common_type(known, kind)
        except RecordError as error:
            raise ValueError(
                f"{origin}: {name} is {one_line(kind, 60)}, in records before it {one_line(known, 60)}; a column has "
                f"one type, but {one_line(error, 60)} have none in common: make them alike, or write .jsonl"
            ) from None
        is_wider = is_wider or common != types.get(name)
        types[name] = common
    return is_wider


# ---- columns -----------------------------------------------------------------------------------------------------


def _array(kind: Any, values: Sequence[Any]):
    """Return values as an Arrow array.  Raises one of _MISFITS if the type does not hold them."""
    arrow = _arrow()
    is_of_numbers = arrow.types.is_list(kind) and arrow.types.is_primitive(kind.value_type)
    are_arrays = all(isinstance(value, np.ndarray) for value in values)
    if is_of_numbers and are_arrays and len({value.dtype for value in values}) == 1:
        # 30 times as fast as a list of arrays.
        ends = np.cumsum([len(value) for value in values])
        offsets = np.concatenate([[0], ends]).astype(np.int32)
        items = arrow.array(np.concatenate(values)).cast(kind.value_type)
        return arrow.ListArray.from_arrays(offsets, items)
    if all(isinstance(value, arrow.Scalar) and value.type == kind for value in values):
        try:
            return arrow.array([value if value.is_valid else None for value in values], kind)
        except _MISFITS:
            pass  # not every Arrow takes scalars of every type
    return arrow.array([_plain(value) for value in values], kind)


def _column(name: str, kind: Any, block: Sequence[Record]):
    values = [_row(record).get(name) for record in block]
    try:
        return _array(kind, values)
    except _MISFITS as error:
        for record, value in zip(block, values):
            try:
                _array(kind, [value])
            except _MISFITS as misfit:
                raise ValueError(
                    f"{record.origin}: {name} is {one_line(_type_of(value), 60)} and does not fit the column's type "
                    f"{one_line(kind, 60)} ({one_line(misfit, 110)}); make the values alike, or write .jsonl"
                ) from None
        raise ValueError(
            f"{block[0].origin} and the next {len(block) - 1}: {name}: {one_line(error, 200)}"
        ) from None


def _blocks(records: Iterable[Record]) -> Iterator[List[Record]]:
    rows = iter(records)
    return iter(lambda: list(islice(rows, _ROWS)), [])


def _unwritable(types: _Types, to_format: str) -> Optional[str]:
    """Return the first column whose type the format does not have."""
    if to_format == "arrow":
        return None
    for name, kind in types.items():
        sink = _arrow().BufferOutputStream()
        try:
            _parquet().ParquetWriter(sink, _arrow().schema([(name, kind)])).close()
        except _MISFITS:
            return name
    return None


def _writer(path: Path, schema: Any, to_format: str):
    if to_format == "arrow":
        return _arrow().ipc.new_stream(str(path), schema)
    return _parquet().ParquetWriter(str(path), schema, write_page_checksum=True)


def _write_columns(
    path: Path, records: Iterable[Record], types: _Types, to_format: str
) -> Optional[int]:
    """Write records while the types of the first block hold them, and widen the types to hold all of them.

    Return the number of records; None if the file has other types than these, and is to be written again.
    """
    count = 0
    schema = None
    is_complete = True
    with ExitStack() as stack:
        for block in _blocks(records):
            is_wider = _widen(types, block)
            if schema is None:
                schema = _arrow().schema(list(types.items()))
                is_complete = _unwritable(types, to_format) is None
                if is_complete:
                    writer = stack.enter_context(_writer(path, schema, to_format))
            elif is_wider:
                is_complete = False
            if is_complete:
                columns = [_column(name, kind, block) for name, kind in types.items()]
                writer.write_batch(_arrow().record_batch(columns, schema=schema))
            count += len(block)
    return count if is_complete else None


# ---- JSONL -------------------------------------------------------------------------------------------------------


def _json_fields(record: Record) -> Iterator[str]:
    for name, value in _row(record).items():
        try:
            text = json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)
            text.encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{record.origin}: {name}: JSON cannot hold it ({one_line(error, 100)}); write .parquet or .arrow"
            ) from None
        yield f"{json.dumps(name, ensure_ascii=False)}: {text}"


def _write_lines(path: Path, records: Iterable[Record]) -> int:
    count = 0
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for record in records:
            file.write("{" + ", ".join(_json_fields(record)) + "}\n")
            count += 1
    return count


def write(path: str, records: Callable[[], Iterable[Record]], to_format: str) -> int:
    """Write token sequences as "parquet", "arrow" (a stream) or "jsonl", or packs of them as "packed_parquet".

    `records` is called a second time if a later record needs wider types than the first ones. Return the number of
    records. Parquet pages have checksums, so that damage is noticed when they are read.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing(Path(path)) as temporary:
        if to_format == "jsonl":
            return _write_lines(temporary, records())
        types: _Types = {}
        for _ in range(2):
            rows = _packed_rows(records()) if to_format == "packed_parquet" else records()
            count = _write_columns(temporary, rows, types, to_format)
            if count == 0:
                raise ValueError(f"{path}: nothing to write, the source has no record")
            name = _unwritable(types, to_format)
            if name is not None:
                raise ValueError(
                    f"{path}: Parquet cannot hold column {name} of type {one_line(types[name], 100)}; write .arrow or "
                    ".jsonl, or leave the column out of the source"
                )
            if count is not None:
                return count
    raise ValueError(f"{path}: the source changed while it was read; convert it again")
