"""JSONL, one object per line or just a list of token ids, and JSON arrays of such records; plain or compressed.

A list alone is the column input_ids. An attention_mask only marks padding. Fields that hold no tokens are foreign.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO, Dict, Iterator, Sequence, Tuple

import numpy as np

from pack_data.formats.columns import FileRow, token_columns
from pack_data.formats.records import Record, RecordError, sequences_from_columns
from pack_data.reading.bad_records import BadRecords, Origin
from pack_data.reading.compressed import open_unpacked
from pack_data.reading.encodings import HEAD_BYTES, check_encoding
from pack_data.reading.fields import shown
from pack_data.reading.words import counted
from pack_data.store.companions import COMPANIONS, TOKENS

_WAY_OUT = "pass a JSONL file"
_LINES_FOR_DETECTION = 100_000  # the most that are tried to find a valid one
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
    with open_unpacked(path, way_out=_WAY_OUT) as file:
        head = file.peek(_BLOCK)  # type: ignore[attr-defined]
        check_encoding(path, head[:HEAD_BYTES])
        texts = _elements if _ARRAY.match(head) else _lines
        for origin, text, after in texts(file, path, bad, start):
            try:
                fields = _fields(text)
            except RecordError as error:
                bad.add(origin, str(error))
                continue
            if columns:
                fields = {name: fields[name] for name in columns if name in fields}
            yield FileRow(origin, fields, after)


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


def _tokens(name: str, value: Any) -> np.ndarray:
    """Return a list of integers, or of numbers beside the tokens, as an array.  Raises RecordError for any other."""
    if isinstance(value, list):
        types = set(map(type, value))
        with suppress(OverflowError):
            if types <= {int}:
                return np.array(value, np.int64)
            if name in COMPANIONS and types <= {int, float, bool}:
                return np.array(value)
    raise RecordError(f"{name} is not a list of integers of 64 bits, unlike in the first record")


def _types_of(fields: Dict[str, Any], columns: Sequence[str] = ()) -> Dict[str, str]:
    """Return the type of each field of a record, where `columns` hold lists of integers."""
    types = {}
    for name, value in fields.items():
        # An empty list may be one of anything, unless its name or the user says what it holds.
        is_known = name in (TOKENS, *COMPANIONS, *columns)
        is_empty = value == [] or (name == TOKENS and value is None)
        types[name] = "list of int" if is_known and is_empty else _type_of(value)
    return types


def _type_of(value: Any) -> str:
    if isinstance(value, str):
        return "text"
    if isinstance(value, list):
        item_types = sorted({type(item).__name__ for item in value})
        return f"list of {' and '.join(item_types) or 'nothing'}"
    return "null" if value is None else type(value).__name__


def _first_row(path: str) -> FileRow:
    """Return the first readable record.  Raises ValueError if there is none."""
    bad = BadRecords(allowed=_LINES_FOR_DETECTION)
    for row in rows(path, bad):
        return row
    problem = "holds no record"
    if bad.found:
        problem = f"none of its {counted(bad.count, 'line')} can be read; the last: {bad.found[-1].reason}"
    raise ValueError(f"{path}: {problem}; expected JSONL, one object per line")


def types(path: str) -> Dict[str, str]:
    """Return the type of each field of the first readable record."""
    return _types_of(_first_row(path).fields)


def kind(path: str, columns: Sequence[str] = ()) -> str:
    """Return "tokens"; raise ValueError unless the first readable record holds a token sequence."""
    token_columns(path, _types_of(_first_row(path).fields, columns), columns)
    return "tokens"


def read(path: str, bad: BadRecords, columns: Sequence[str] = ()) -> Iterator[Record]:
    """Yield the token sequences of one file, in file order.  Lines count from 1, elements of an array from 0."""
    chosen: Tuple[str, ...] = ()
    for row in rows(path, bad):
        chosen = chosen or token_columns(path, _types_of(row.fields, columns), columns)
        try:
            fields = dict(row.fields)
            tokens = {name: _tokens(name, fields.pop(name, None)) for name in chosen}
            late = [name for name in COMPANIONS if isinstance(fields.get(name), list)]
            if late and not columns:
                raise RecordError(
                    f"{late[0]} is not in the first record; choose columns with --columns"
                )
            values = sequences_from_columns(tokens)
        except ValueError as error:
            bad.add(row.origin, str(error))
            continue
        for value in values:
            yield Record(row.origin, value, fields)
