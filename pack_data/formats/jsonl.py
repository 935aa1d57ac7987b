"""JSONL with tokenised sequences: an object a line, or a list of token ids alone; plain, or compressed by gzip.

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

_TRIED = 100_000  # lines, to find one that says what the file holds


def _whole(digits: str) -> int:
    if len(digits) > 20:  # Python 3.8 takes hours for one of millions of digits, and 3.11 refuses it
        raise RecordError(f"a number of {len(digits)} digits")
    return int(digits)


def _row(line: bytes) -> Dict[str, Any]:
    """The fields of a line; lists of integers as arrays. Raises RecordError."""
    try:
        row = json.loads(line.decode("utf-8-sig"), parse_int=_whole)
    except RecursionError:
        raise RecordError("the JSON in it is nested too deeply to be read") from None
    except RecordError:
        raise
    except ValueError as error:
        raise RecordError(f"not JSON ({error})") from None
    if isinstance(row, list):
        row = {"input_ids": row}
    if not isinstance(row, dict):
        raise RecordError(f"is a {type(row).__name__}; an object, or a list of token ids, is needed")
    return {name: _array(value) for name, value in row.items()}


def _array(value: Any) -> Any:
    """A list of integers as an array, one number as one of NumPy; anything else as it is."""
    if isinstance(value, list) and all(type(each) is int for each in value):
        try:
            return np.array(value, np.int64)
        except OverflowError:
            raise RecordError("holds a number that does not fit 64 bits") from None
    return np.int64(value) if type(value) is int and -(2**63) <= value < 2**63 else value


def _lines(path: str, bad: BadRecords) -> Iterator[Tuple[Origin, bytes]]:
    """The lines that are not blank. Raises ValueError where compressed data is damaged."""
    with open_unpacked(path, way_out="give a file of JSONL") as file:
        yield from bad.short_lines(file, path)


def _columns_of(path: str, row: Dict[str, Any], columns: Sequence[str]) -> Tuple[str, ...]:
    """Return the fields that hold the token sequences, from the first record.  Raises ValueError."""
    lists = [name for name, value in row.items() if isinstance(value, np.ndarray)]
    return token_columns(path, list(row), lists, columns)


def kind(path: str, columns: Sequence[str] = ()) -> str:
    problem = "holds no record"
    for _, line in islice(_lines(path, BadRecords(allowed=2**62)), _TRIED):
        try:
            _columns_of(path, _row(line), columns)
            return "tokens"
        except RecordError as error:
            problem = f"no line of its first {_TRIED:,} can be read; the last: {error}"
    raise ValueError(f"{path}: {problem}; JSONL is needed, an object in each line")


def read(path: str, bad: BadRecords, columns: Sequence[str] = ()) -> Iterator[Record]:
    """The records of one file, in its order. Lines count from 1."""
    chosen: Tuple[str, ...] = ()
    for origin, line in _lines(path, bad):
        try:
            row = _row(line)
            chosen = chosen or _columns_of(path, row, columns)
            for name in chosen:
                if not isinstance(row.get(name), (np.ndarray, np.int64)):
                    raise RecordError(f"{name} is not a list of integers, unlike in the first record")
            value = tokens_from_columns({name: np.atleast_1d(row[name]) for name in chosen})
        except RecordError as error:
            bad.add(origin, str(error))
            continue
        yield Record(origin, value, {name: value for name, value in row.items() if name not in chosen})
