"""JSONL, one object per line or just a list of token ids, and JSON arrays of such records; plain or compressed.

A list alone is the column input_ids. msgspec decodes the lists that are asked for; records that it does not decode are
decoded as a whole, in pure Python, which names what is wrong.
"""

from __future__ import annotations

import json
import re
from array import array
from functools import partial
from itertools import islice
from typing import Any, BinaryIO, Callable, Dict, Iterator, List, Sequence, Tuple, Union

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
    Block,
    ColumnType,
    FileRow,
    Ragged,
)
from pack_data.formats.records import RecordError
from pack_data.reading.bad_records import BadRecords, Origin
from pack_data.reading.compressed import open_unpacked
from pack_data.reading.encodings import HEAD_BYTES, check_encoding
from pack_data.reading.fields import shown
from pack_data.reading.words import counted
from pack_data.store.meanings import OF_SEQUENCES, OF_TOKENS, TOKENS, values_of

_WAY_OUT = "pass a JSONL file"
_LINES_FOR_DETECTION = 100_000  # the most that are tried to find a valid one
_ROWS_FOR_TYPES = 1000  # that are read to find the type of a field which is null in those before
_ROWS = 1024  # of a block, at most
_TOO_LARGE = 2**64
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
    """Return the type of each field of the first readable record; of a null, that of the records after it."""
    first = _first_row(path)
    found = {name: _type_of(name, value) for name, value in first.fields.items()}
    unknown = {name for name, type in found.items() if type.kind == NULL}
    for row in islice(
        rows(path, BadRecords(_LINES_FOR_DETECTION), sorted(unknown)), _ROWS_FOR_TYPES
    ):
        if not unknown:
            break
        for name in unknown.intersection(row.fields):
            found[name] = _type_of(name, row.fields[name])
        unknown = {name for name in unknown if found[name].kind == NULL}
    return found


def _first_row(path: str) -> FileRow:
    """Return the first readable record.  Raises ValueError if there is none."""
    bad = BadRecords(allowed=_LINES_FOR_DETECTION)
    for row in rows(path, bad):
        return row
    problem = "holds no record"
    if bad.found:
        problem = f"none of its {counted(bad.count, 'line')} can be read; the last: {bad.found[-1].reason}"
    raise ValueError(f"{path}: {problem}; expected JSONL, one object per line")


def _type_of(name: str, value: Any) -> ColumnType:
    if value is None:
        return ColumnType(NULL, "null")
    if isinstance(value, str):
        return ColumnType(TEXT, "text")
    if not isinstance(value, list):
        return ColumnType(OTHER if isinstance(value, dict) else ONE, type(value).__name__)
    names = {type(item).__name__ for item in value} - {"NoneType"}
    printed = f"list of {' and '.join(sorted(names)) or 'nothing'}"
    if not names:
        # An empty list may be one of anything, unless its name determines what it holds.
        is_known = name == TOKENS or name in OF_TOKENS or name in OF_SEQUENCES
        return ColumnType(WHOLE if is_known else OTHER, printed)
    if names <= {"int"}:
        return ColumnType(WHOLE, printed)
    is_number = names <= {"int", "float", "bool"}
    kind = TRUTHS if names == {"bool"} else FRACTIONS if is_number else OTHER
    return ColumnType(kind, printed)


# ---- columns ---------------------------------------------------------------------------------------------------------

_Decode = Callable[[bytes], Sequence[Any]]


def blocks(
    path: str,
    bad: BadRecords,
    columns: Sequence[str],
    refused: Sequence[str] = (),
    has_others: bool = False,
) -> Iterator[Block]:
    """Yield the columns of one file in blocks of rows, in file order.

    columns: lists of numbers, the tokens first. refused: columns that may not have lists. has_others: keep all other
    fields as well.
    """
    decode: _Decode = partial(_decoded, columns, refused)
    if not has_others:
        decode = _decoder(columns, refused)
    block = _Block(columns)
    for origin, text, _ in _texts(path, bad):
        problem = ""
        try:
            block.add(origin, decode(text))
        except ValueError as error:
            problem = str(error)
        if block.origins and (problem or block.is_full):
            yield block.finished()
            block = _Block(columns)
        if problem:
            bad.add(origin, problem)
    if block.origins:
        yield block.finished()


class _Block:
    """A block that grows by records; numbers become arrays one record after another, which keeps memory small."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.origins: List[Origin] = []
        self._columns = [(name, _Column()) for name in columns]
        self._others: List[Any] = []

    def add(self, origin: Origin, record: Sequence[Any]) -> None:
        for number, (_, column) in enumerate(self._columns):
            column.add(record[number])
        self._others += record[len(self._columns) :] or [{}]
        self.origins.append(origin)

    @property
    def is_full(self) -> bool:
        first = self._columns[0][1]
        return len(self.origins) == _ROWS or len(first.integers) > _VALUES

    def finished(self) -> Block:
        columns = {name: column.finished() for name, column in self._columns}
        return Block(columns, self.origins.__getitem__, self._others.__getitem__)


class _Column:
    def __init__(self) -> None:
        self.integers = array("i")
        self._parts: List[np.ndarray] = []
        self._lengths: List[int] = []
        self._nulls: List[int] = []

    def add(self, values: Any) -> None:
        """Add the values of a record: a list or an array of numbers, or None."""
        if values is None:
            self._nulls.append(len(self._lengths))
            values = []
        self._lengths.append(len(values))
        try:
            self.integers.fromlist(values)
        except (TypeError, OverflowError):
            # Other numbers than integers of 32 bits, and records that were decoded in Python.
            other = np.array(values)
            if other.dtype == object:  # beyond 64 bits
                other = np.array(
                    [float(min(max(item, -_TOO_LARGE), _TOO_LARGE)) for item in values]
                )
            self._parts += [np.array(self.integers, np.int32), other]
            self.integers = array("i")

    def finished(self) -> Ragged:
        values = np.concatenate([*self._parts, np.array(self.integers, np.int32)])
        rows = len(self._lengths)
        is_null = np.zeros(rows, bool)
        is_null[self._nulls] = True
        return Ragged(np.array(self._lengths, np.int64), values, is_null, np.zeros(rows, bool))


def _decoder(columns: Sequence[str], refused: Sequence[str]) -> _Decode:
    """Return a function that decodes the columns of a record; ValueError says what is wrong with one."""
    missing = msgspec.UNSET
    types: Dict[str, Any] = {}
    for name in columns:
        item: Any = Union[int, float, bool]
        if name == columns[0]:
            item = int
        types[name] = Union[List[item], None, msgspec.UnsetType]
    for name in refused:
        types[name] = Union[str, int, float, bool, dict, None, msgspec.UnsetType]
    names = {f"field{number}": name for number, name in enumerate(types)}
    declared = [(field, types[name], missing) for field, name in names.items()]
    record_type = msgspec.defstruct("Record", declared, rename=names, gc=False)
    decode = msgspec.json.Decoder(record_type).decode
    decode_list = msgspec.json.Decoder(List[int]).decode
    is_list_enough = tuple(columns) == (TOKENS,)

    def decoded(text: bytes) -> Sequence[Any]:
        try:
            if is_list_enough and text[:1] == b"[":
                return [decode_list(text)]
            record = msgspec.structs.astuple(decode(text))[: len(columns)]
        except (ValueError, RecursionError):
            return _decoded(columns, refused, text)
        if missing in record:
            return _decoded(columns, refused, text)
        return record

    return decoded


def _decoded(columns: Sequence[str], refused: Sequence[str], text: bytes) -> List[Any]:
    """Return the columns of a record, and a dictionary of its other fields.  Raises ValueError."""
    fields = _fields(text)
    record: List[Any] = []
    for name in columns:
        if name not in fields:
            raise RecordError(
                f"lacks {name}, unlike the first record; write null, or choose other columns with --columns"
            )
        record.append(_numbers(name, fields.pop(name), columns[0]))
    for name in refused:
        if isinstance(fields.get(name), list):
            raise RecordError(f"{name} is not in the first record; choose columns with --columns")
    return [*record, fields]


def _numbers(name: str, value: Any, tokens: str) -> Any:
    """Return a list of numbers as an array, None for a null.  Raises ValueError for any other value."""
    if value is None:
        return None
    names = {type(item).__name__ for item in value} if isinstance(value, list) else {""}
    if not names <= {"int", "float", "bool"} or (name == tokens and "bool" in names):
        raise RecordError(f"{name} is not a list of integers, unlike in the first record")
    return values_of(
        name,
        np.array(value, None if value else np.int64),
        are_ids=name == tokens and name not in OF_TOKENS,
    )
