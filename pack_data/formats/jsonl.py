"""JSONL, one object per line or just a list of token ids, and JSON arrays of such records; plain or compressed.

A list alone is the column input_ids. msgspec decodes the lists that are asked for, and checks their types.
"""

from __future__ import annotations

import json
import re
from array import array
from functools import partial
from itertools import islice
from typing import (
    Any,
    BinaryIO,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import msgspec
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
from pack_data.formats.records import RecordError
from pack_data.reading.bad_records import BadRecords, Origin
from pack_data.reading.compressed import open_unpacked
from pack_data.reading.encodings import HEAD_BYTES, check_encoding
from pack_data.reading.fields import one_line, shown
from pack_data.reading.words import counted
from pack_data.store.meanings import TOKENS

_WAY_OUT = "pass a JSONL file"
_LINES_FOR_DETECTION = 100_000  # the most that are tried to find a valid one
_ROWS_FOR_TYPES = 1000  # that are read to find the type of a field which is null in those before
_ROWS = 1024  # of a block, at most
_TOO_LARGE = float(2**64)
_VALUES = 1 << 20  # of the tokens of a block, about
_MOST_DIGITS = 20  # Python 3.8 takes hours for a number of millions of digits, and 3.11 refuses it
# Translates the bytes of digits to zeros, and all others to spaces.
_DIGITS = bytes(ord("0") if chr(byte) in "0123456789" else ord(" ") for byte in range(256))
_LONG_NUMBER = b"0" * (_MOST_DIGITS + 1)
_BLOCK = 1 << 20  # bytes read at a time
# A line of JSONL cannot begin like this: its lists hold token ids.
_ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*[\[{]")
_BETWEEN = b" \t\r\n,"  # the bytes between two elements of an array
_MARKS = re.compile(rb'\\.|["\[\]{}]', re.DOTALL)
# The fields of pandas' to_json(orient="split").
_SPLIT_TABLE = {"columns", "index", "data"}

_Text = Tuple[Origin, bytes, int]  # a record, its place, and the place of the next one


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise RecordError(f"a number of {len(digits)} digits")
    return int(digits)


class _CountedLines:
    """A file that counts the bytes of the lines read from it."""

    def __init__(self, file: BinaryIO, place: int) -> None:
        self._file = file
        self.place = place

    def readline(self, most: int) -> bytes:
        line = self._file.readline(most)
        self.place += len(line)
        return line


def rows(
    path: str, bad: BadRecords, columns: Sequence[str] = (), start: int = 0
) -> Iterator[FileRow]:
    """Yield the records from a place on: the byte of a line, or the number of an element of an array."""
    for origin, text, after in _texts(path, bad, start):
        try:
            fields = _fields(text)
        except RecordError as error:
            bad.add(origin, str(error))
            continue
        if columns:
            fields = {name: fields[name] for name in columns if name in fields}
        yield FileRow(origin, fields, after)


def _texts(path: str, bad: BadRecords, start: int = 0) -> Iterator[_Text]:
    with open_unpacked(path, way_out=_WAY_OUT) as file:
        head = file.peek(_BLOCK)  # type: ignore[attr-defined]
        check_encoding(path, head[:HEAD_BYTES])
        texts = _elements if _ARRAY.match(head) else _lines
        yield from texts(file, path, bad, start)


def _lines(file: BinaryIO, path: str, bad: BadRecords, start: int) -> Iterator[_Text]:
    """Yield the lines from a byte on that are not blank."""
    lines_before = 0
    left = start
    while left:
        block = file.read(min(left, _BLOCK))
        if not block:
            raise ValueError(f"{path}: ends before byte {start}, where reading is to continue")
        left -= len(block)
        lines_before += block.count(b"\n")
    counted = _CountedLines(file, start)
    for origin, line in bad.short_lines(counted, path, first=lines_before + 1):
        yield origin, line, counted.place


def _elements(file: BinaryIO, path: str, bad: BadRecords, start: int) -> Iterator[_Text]:
    """Yield the elements of an array from a number on; an element above `bad.longest` bytes is a bad record."""
    number = 0
    element = bytearray()
    for piece, is_element, is_end in _pieces(file):
        origin = Origin(path, number)
        if is_element and len(element) <= bad.longest:
            element += piece
        if not is_element and piece.strip(_BETWEEN):
            bad.stop(origin, f"{shown(piece[:20])}: neither an object nor a list of token ids")
        if not is_end:
            continue
        if not is_element:
            return
        number += 1
        if number > start and len(element) > bad.longest:
            bad.add(origin, bad.too_long())
        elif number > start:
            yield origin, bytes(element), number
        element = bytearray()
    bad.stop(Origin(path, number), "the array is not closed; the file is cut, copy it again")


def _pieces(file: BinaryIO) -> Iterator[Tuple[bytes, bool, bool]]:
    """Yield the bytes of an array in pieces, divided at the brackets of its elements.

    With each: is it of an element, and does the element (or else the array) end with it?
    """
    depth = 0
    in_string = False
    for block in iter(partial(_block, file), b""):
        begin = 0
        for match in _MARKS.finditer(block):
            mark = match.group()
            if mark == b'"':
                in_string = not in_string
            elif in_string:
                continue
            elif mark in b"[{":
                depth += 1
                if depth == 1:
                    begin = match.end()
                elif depth == 2:
                    yield block[begin : match.start()], False, False
                    begin = match.start()
            elif mark in b"]}":
                depth -= 1
                if depth < 2:
                    end = match.start() + depth
                    yield block[begin:end], depth == 1, True
                    begin = end
        yield block[begin:], depth > 1, False


def _block(file: BinaryIO) -> bytes:
    """Read a block that does not end within an escaped character."""
    block = file.read(_BLOCK)
    while block.endswith(b"\\"):
        more = file.read(1)
        if not more:
            break
        block += more
    return block


def _fields(text: bytes) -> Dict[str, Any]:
    """Return the fields of a record.  Raises RecordError."""
    try:
        # A call for each number triples the time.
        has_long_number = _LONG_NUMBER in text.translate(_DIGITS)
        parse_int = _integer if has_long_number else None
        value = json.loads(text.decode("utf-8-sig"), parse_int=parse_int)
    except RecursionError:
        raise RecordError("its JSON is nested too deeply to be read") from None
    except RecordError:
        raise
    except ValueError as error:
        raise RecordError(f"not JSON ({error})") from None
    if isinstance(value, list):
        return {TOKENS: value}
    if not isinstance(value, dict):
        raise RecordError(f"is a {type(value).__name__}, must be an object or a list of token ids")
    if value.keys() == _SPLIT_TABLE:
        raise RecordError(
            "a table of pandas, orient='split'; write it with orient='records', lines=True"
        )
    return value


# ---- types -----------------------------------------------------------------------------------------------------------


def types(path: str) -> Dict[str, ColumnType]:
    """Return the type of each field of the first readable record; of a null, that of the records after it.

    Raises ValueError if there is no readable record.
    """
    bad = BadRecords(allowed=_LINES_FOR_DETECTION)
    found: Dict[str, ColumnType] = {}
    for row in islice(rows(path, bad), _ROWS_FOR_TYPES):
        for name in found or row.fields:
            if name not in found or found[name].kind == NULL:
                found[name] = _type_of(row.fields.get(name))
        if NULL not in {type.kind for type in found.values()}:
            break
    if found:
        return found
    problem = "holds no record"
    if bad.found:
        problem = f"none of its {counted(bad.count, 'line')} can be read; the last: {bad.found[-1].reason}"
    raise ValueError(f"{path}: {problem}; expected JSONL, one object per line")


def _type_of(value: Any) -> ColumnType:
    if isinstance(value, str):
        return ColumnType(TEXT, "text")
    if isinstance(value, dict):
        return ColumnType(OTHER, "an object")
    if not isinstance(value, list):
        return ColumnType(NULL if value is None else ONE, type(value).__name__)
    names = {type(item).__name__ for item in value} - {"NoneType"}
    kind = OTHER
    if names <= {"int", "float", "bool"}:
        kind = FRACTIONS
    if len(names) < 2:
        kind = {"": NULL, "int": WHOLE, "bool": TRUTHS}.get("".join(names), kind)
    return ColumnType(kind, f"list of {' and '.join(sorted(names)) or 'nothing'}")


# ---- columns ---------------------------------------------------------------------------------------------------------

_Decode = Callable[[bytes], Tuple[Sequence[Any], Mapping[str, Any]]]


def blocks(
    path: str,
    bad: BadRecords,
    columns: Sequence[str],
    refused: Sequence[str] = (),
    has_others: bool = False,
) -> Iterator[RowBlock]:
    """Yield the columns of one file in blocks of rows, in file order.

    columns: lists of numbers, the tokens first. refused: columns that may not have lists. has_others: keep all other
    fields as well.
    """
    decode = _decoder(columns, refused, has_others)
    rows = _GrowingBlock(columns)
    for origin, text, _ in _texts(path, bad):
        problem = ""
        try:
            rows.add(origin, *decode(text))
        except msgspec.ValidationError as error:
            problem = f"{error}; choose other columns with --columns"
        except ValueError as error:
            problem = one_line(error, 200)
        if rows.origins and (problem or rows.is_full):
            yield rows.block()
            rows = _GrowingBlock(columns)
        if problem:
            bad.add(origin, problem)
    if rows.origins:
        yield rows.block()


class _GrowingBlock:
    """Rows of a block; numbers become arrays one record after another, which keeps memory small."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.origins: List[Origin] = []
        self._columns = {name: _GrowingColumn() for name in columns}
        self._others: List[Mapping[str, Any]] = []

    def add(
        self, origin: Origin, record: Sequence[Optional[List[Any]]], others: Mapping[str, Any]
    ) -> None:
        for column, values in zip(self._columns.values(), record):
            column.add(values)
        self._others.append(others)
        self.origins.append(origin)

    @property
    def is_full(self) -> bool:
        tokens = next(iter(self._columns.values()))
        return len(self.origins) == _ROWS or len(tokens.integers) > _VALUES

    def block(self) -> RowBlock:
        columns = {name: column.ragged() for name, column in self._columns.items()}
        return RowBlock(columns, self.origins.__getitem__, self._others.__getitem__)


class _GrowingColumn:
    def __init__(self) -> None:
        self.integers = array("i")
        self._parts: List[np.ndarray] = []
        self._lengths: List[int] = []
        self._is_null: List[bool] = []

    def add(self, values: Optional[List[Any]]) -> None:
        """Add the values of a record; None for a null."""
        self._is_null.append(values is None)
        values = values or []
        self._lengths.append(len(values))
        try:
            self.integers.fromlist(values)
        except (TypeError, OverflowError):
            # Others than integers of 32 bits; float64 holds those beyond 64 bits, which no column may have.
            others = np.array(values)
            if others.dtype == object:
                others = np.array([min(float(item), _TOO_LARGE) for item in values])
            self._parts += [np.array(self.integers, np.int32), others]
            self.integers = array("i")

    def ragged(self) -> Ragged:
        values = np.concatenate([*self._parts, np.array(self.integers, np.int32)])
        lengths = np.array(self._lengths, np.int64)
        return Ragged(lengths, values, np.array(self._is_null), np.zeros(len(lengths), bool))


def _decoder(columns: Sequence[str], refused: Sequence[str], has_others: bool) -> _Decode:
    """Return a function that decodes the columns of a record, and its other fields if they are asked for."""
    record_type = _record_type(columns, refused)
    decode = msgspec.json.Decoder(record_type).decode
    if tuple(columns) == (TOKENS,):
        decode = msgspec.json.Decoder(Union[record_type, List[Union[int, float]]]).decode

    def decoded(text: bytes) -> Tuple[Sequence[Any], Mapping[str, Any]]:
        others: Dict[str, Any] = {}
        try:
            if has_others:
                raise msgspec.DecodeError
            record = decode(text)
        except (msgspec.DecodeError, RecursionError):
            # json reads NaN in other fields, and describes what is no JSON in more detail.
            others = _fields(text)
            record = msgspec.convert(others, record_type)
        if isinstance(record, list):
            return [record], others
        values = msgspec.structs.astuple(record)[: len(columns)]
        if msgspec.UNSET in values:
            name = columns[values.index(msgspec.UNSET)]
            raise RecordError(
                f"lacks {name}, unlike the first record; write null, or choose other columns with --columns"
            )
        return values, {name: value for name, value in others.items() if name not in columns}

    return decoded


def _record_type(columns: Sequence[str], refused: Sequence[str]) -> Any:
    """Return a class of records with these columns, which refuses lists in the others."""
    types: Dict[str, Any] = {}
    for name in columns:
        item: Any = Union[int, float] if name == columns[0] else Union[int, float, bool]
        types[name] = Union[List[item], None]
    for name in refused:
        types[name] = Union[str, int, float, bool, dict, None]
    names = {f"field{number}": name for number, name in enumerate(types)}
    fields = []
    for field, name in names.items():
        fields.append((field, Union[types[name], msgspec.UnsetType], msgspec.UNSET))
    return msgspec.defstruct("Record", fields, rename=names, gc=False)
