"""Writes token sequences as Parquet, Arrow (a stream) or JSONL, and packs of them as packed Parquet.

The columns are those of `parquet.py` and `jsonl.py`, which read such files. A column of Parquet and Arrow has one type,
which all its values determine: integers next to floating-point numbers become floating-point numbers, objects have the
keys of all objects (null if one lacks a key), and a record without the field has a null. Values without a common type
are refused.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, Optional, Sequence

import numpy as np

from pack_data.formats import parquet
from pack_data.formats.records import Record, RecordError
from pack_data.reading.durable import replacing
from pack_data.reading.fields import one_line
from pack_data.reading.packages import load_package
from pack_data.reading.words import in_blocks
from pack_data.store.meanings import STARTS, TOKENS

_ROWS = 1024  # of a row group, which is written at a time; few, so that damage costs few rows
_MASK = "loss_mask"
# Errors of pyarrow for a value that a type does not hold; SystemError: scalars of lists of a fixed size.
_MISFITS = (ValueError, TypeError, OverflowError, NotImplementedError, SystemError)

_Types = Dict[str, Any]  # column -> its Arrow type

_arrow = lru_cache(maxsize=None)(partial(load_package, "pyarrow", "this file format"))
_parquet = partial(load_package, "pyarrow.parquet", "this file format")


def _packed_rows(packs: Iterable[Record]) -> Iterator[Record]:
    """Yield packs of token sequences as rows of packed Parquet.  Without a loss_mask, every token is predicted.

    Raises ValueError for a pack without input_ids or with a column that packed Parquet does not have.
    """
    for record in packs:
        columns = [name for name in record.value if name != STARTS]
        if TOKENS not in columns or set(columns) - {TOKENS, _MASK}:
            raise ValueError(
                f"{record.origin}: columns {', '.join(columns)}; packed Parquet holds {TOKENS} and {_MASK}: "
                f"build the data set with --columns {TOKENS},{_MASK}, or write its sequences with --unpack"
            )
        ids = record.value[TOKENS].astype(np.int32)
        mask = record.value.get(_MASK, np.ones(len(ids))).astype(np.int32)
        yield Record(record.origin, {TOKENS: ids, _MASK: mask, STARTS: record.value[STARTS]})


def _row(record: Record) -> Dict[str, Any]:
    """Return all columns of a record, those of tokens first."""
    return {**record.value, **record.foreign}


def _plain(value: Any) -> Any:
    """Return a value of Arrow or NumPy as Python's own."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return value.as_py() if hasattr(value, "as_py") else value


# ---- columns -----------------------------------------------------------------------------------------------------


def _array(values: Sequence[Any], kind: Any = None):
    """Return values as an Arrow array of a type; None: of the type that Arrow infers.

    Raises one of _MISFITS if there is no such type, or if it does not hold the values.
    """
    classes = {type(value) for value in values}
    if classes == {np.ndarray} and len({value.dtype for value in values}) == 1:
        # 30 times as fast as a list of arrays.
        ends = np.cumsum([len(value) for value in values])
        offsets = np.append(0, ends).astype(np.int32)
        array = _arrow().ListArray.from_arrays(offsets, _arrow().array(np.concatenate(values)))
        return array.cast(kind or array.type)
    scalar_types = {value.type for value in values if isinstance(value, _arrow().Scalar)}
    if kind is None and len(scalar_types) > 1:
        raise TypeError("scalars of several types")
    if len(scalar_types) == 1 and kind in (None, *scalar_types):
        (kind,) = scalar_types
        scalars = [None if value is None or not value.is_valid else value for value in values]
        # Not every Arrow takes scalars of every type.
        with suppress(*_MISFITS):
            return _arrow().array(scalars, kind)
    return _arrow().array([_plain(value) for value in values], kind)


def _type_of(value: Any):
    """Return the Arrow type of one value.  Raises one of _MISFITS for a value that Arrow does not hold."""
    if isinstance(value, _arrow().Scalar):
        return value.type
    if isinstance(value, int) and 2**63 <= value < 2**64:
        return _arrow().uint64()  # which Arrow does not infer
    if isinstance(value, list):
        kind = _arrow().null()
        for item in value:
            kind = _common_type(kind, _type_of(item))
        return _arrow().list_(kind)
    if isinstance(value, dict):
        return _arrow().struct([(key, _type_of(item)) for key, item in value.items()])
    return _arrow().array([value]).type


def _common_type(left: Any, right: Any):
    """Return the Arrow type that holds the values of both types.  Raises RecordError if there is none."""
    types = _arrow().types
    if left == right or types.is_null(left):
        return right
    if types.is_struct(left) and types.is_struct(right):
        fields = {field.name: field.type for field in left}
        for field in right:
            fields[field.name] = _common_type(fields.get(field.name, _arrow().null()), field.type)
        return _arrow().struct(list(fields.items()))
    if types.is_list(left) and types.is_list(right):
        return _arrow().list_(_common_type(left.value_type, right.value_type))

    schemas = [_arrow().schema([("value", kind)]) for kind in (left, right)]
    try:
        common = _arrow().unify_schemas(schemas, promote_options="permissive").field(0).type
    except _arrow().ArrowException:
        raise RecordError(f"{left} and {right} have no common type") from None
    # Arrow would also make bytes of text, and floating-point numbers of decimal ones.
    is_lossy = types.is_decimal(left) != types.is_decimal(right) and types.is_floating(common)
    is_text_as_bytes = ("binary" in str(left)) != ("binary" in str(right))
    if is_lossy or (is_text_as_bytes and not types.is_null(right)):
        raise RecordError(f"{left} and {right} have no common type")
    has_unsigned = types.is_uint64(left) or types.is_uint64(right)
    return _arrow().uint64() if has_unsigned and types.is_integer(common) else common


def _column(types: _Types, name: str, block: Sequence[Record], values: Sequence[Any]):
    """Return a column of a block of records, and widen its type to hold it.  Raises ValueError that names a record."""
    known = types.get(name, _arrow().null())
    with suppress(*_MISFITS):
        array = _array(values)
        types[name] = _common_type(known, array.type)
        return array if array.type == types[name] else _array(values, types[name])

    # One by one: Arrow does not infer every type, and a message names the first record that does not fit.
    kind = known
    for record, value in zip(block, values):
        with _refusing(record, name):
            kind = _common_type(kind, _type_of(value))
    for record, value in zip(block, values):
        with _refusing(record, name):
            _array([value], kind)
    types[name] = kind
    with _refusing(block[0], name):
        return _array(values, kind)


@contextmanager
def _refusing(record: Record, name: str) -> Iterator[None]:
    """Turn an error of Arrow about a value into a ValueError that names its record and column."""
    try:
        yield
    except _MISFITS as error:
        raise ValueError(
            f"{record.origin}: {name}: cannot be written as a column of one type ({one_line(error, 150)}); make its "
            "values alike, or write .jsonl"
        ) from None


def _writer(sink: Any, schema: Any, to_format: str):
    if to_format == "arrow":
        return _arrow().ipc.new_stream(sink, schema)
    return _parquet().ParquetWriter(sink, schema, write_page_checksum=True)


def _write_columns(
    path: Path, records: Iterable[Record], types: _Types, to_format: str
) -> Optional[int]:
    """Write records while the types of the first block hold them, and widen the types to hold all of them.

    Return the number of records; None if the file has other types than these, and is to be written again.
    """
    count = 0
    writer = None
    with ExitStack() as stack:
        for block in in_blocks(records, _ROWS):
            rows = [_row(record) for record in block]
            names = dict.fromkeys(chain(types, *rows))
            arrays = [
                _column(types, name, block, [row.get(name) for row in rows]) for name in names
            ]
            if not count:
                schema = _arrow().schema(list(types.items()))
                writer = stack.enter_context(_writer(str(path), schema, to_format))
            count += len(block)
            if schema != _arrow().schema(list(types.items())):
                writer = None
            if writer is not None:
                writer.write_batch(_arrow().record_batch(arrays, schema=schema))
    return count if writer is not None else None


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
            try:
                count = _write_columns(temporary, rows, types, to_format)
                # Arrow and Parquet limit the nesting of what they read.
                if count is not None and parquet.types(str(temporary)):
                    return count
            except _arrow().ArrowException as error:
                columns = ", ".join(f"{name} of type {kind}" for name, kind in types.items())
                raise ValueError(
                    f"{path}: {to_format} cannot hold {one_line(columns, 150)} ({one_line(error, 100)}); write another "
                    "format, such as .jsonl, or leave a column out of the source"
                ) from None
            if not types:
                raise ValueError(f"{path}: nothing to write, the source has no record")
    raise ValueError(f"{path}: the source changed while it was read; convert it again")
