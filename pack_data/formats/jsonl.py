"""JSONL with tokenised sequences: one object per line, or just a list of token ids; plain, or compressed by gzip.

The lists of integers in the first line are the columns of the token sequences, as in Parquet (parquet.py), unless the
user chooses some. An attention_mask only marks padding. All other fields are foreign. A list alone is the column
input_ids.
"""

from __future__ import annotations

import json
from itertools import islice
from typing import Any, Dict, Iterator, Sequence, Tuple

import numpy as np

from pack_data.cli.bad_records import BadRecords, Origin
from pack_data.formats.records import Record, RecordError, token_columns, tokens_from_columns
from pack_data.reading.files import open_unpacked

_LINES_FOR_DETECTION = 100_000  # the most that are tried to find a valid one
_MOST_DIGITS = 20  # Python 3.8 takes hours for a number of millions of digits, and 3.11 refuses it


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise RecordError(f"a number of {len(digits)} digits")
    return int(digits)


def _row(line: bytes) -> Dict[str, Any]:
    """Return the fields of a line; lists of integers as arrays.  Raises RecordError."""
    try:
        row = json.loads(line.decode("utf-8-sig"), parse_int=_integer)
    except RecursionError:
        raise RecordError("its JSON is nested too deeply to be read") from None
    except RecordError:
        raise
    except ValueError as error:
        raise RecordError(f"not JSON ({error})") from None
    if isinstance(row, list):
        row = {"input_ids": row}
    if not isinstance(row, dict):
        raise RecordError(f"is a {type(row).__name__}, must be an object or a list of token ids")
    return {name: _array(value) for name, value in row.items()}


def _array(value: Any) -> Any:
    """Return a list of integers as an array, one integer as a NumPy number, and anything else unchanged."""
    if isinstance(value, list) and all(type(item) is int for item in value):
        try:
            return np.array(value, np.int64)
        except OverflowError:
            raise RecordError("holds a number that does not fit 64 bits") from None
    return np.int64(value) if type(value) is int and -(2**63) <= value < 2**63 else value


def _lines(path: str, bad: BadRecords) -> Iterator[Tuple[Origin, bytes]]:
    """Yield the lines that are not blank.  Raises ValueError if compressed data is damaged."""
    with open_unpacked(path, way_out="pass a JSONL file") as file:
        yield from bad.short_lines(file, path)


def _columns_of(path: str, row: Dict[str, Any], columns: Sequence[str]) -> Tuple[str, ...]:
    """Return the fields that hold the token sequences, from the first record.  Raises ValueError."""
    lists = [name for name, value in row.items() if isinstance(value, np.ndarray)]
    return token_columns(path, list(row), lists, columns)


def kind(path: str, columns: Sequence[str] = ()) -> str:
    """Return "tokens"; raise ValueError unless one of the first lines holds token sequences."""
    problem = "holds no record"
    for _, line in islice(_lines(path, BadRecords(allowed=2**62)), _LINES_FOR_DETECTION):
        try:
            _columns_of(path, _row(line), columns)
            return "tokens"
        except RecordError as error:
            problem = (
                f"none of its first {_LINES_FOR_DETECTION:,} lines can be read; the last: {error}"
            )
    raise ValueError(f"{path}: {problem}; expected JSONL, one object per line")


def read(path: str, bad: BadRecords, columns: Sequence[str] = ()) -> Iterator[Record]:
    """Yield the records of one file, in file order.  Lines count from 1."""
    chosen: Tuple[str, ...] = ()
    for origin, line in _lines(path, bad):
        try:
            row = _row(line)
            chosen = chosen or _columns_of(path, row, columns)
            for name in chosen:
                if not isinstance(row.get(name), (np.ndarray, np.int64)):
                    raise RecordError(
                        f"{name} is not a list of integers, unlike in the first record"
                    )
            value = tokens_from_columns({name: np.atleast_1d(row[name]) for name in chosen})
        except RecordError as error:
            bad.add(origin, str(error))
            continue
        yield Record(
            origin, value, {name: value for name, value in row.items() if name not in chosen}
        )
