"""Which columns of a file hold token sequences, and the columns of a block of its rows."""

from __future__ import annotations

from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import numpy as np

from pack_data.formats.records import Record, RecordError
from pack_data.reading.bad_records import BadRecords, Origin
from pack_data.store.boundaries import sequences_in
from pack_data.store.meanings import (
    ALSO_OF_RECORDS,
    HARMLESS,
    LENGTHS,
    MASKS,
    OF_SEQUENCES,
    OF_TOKENS,
    OTHER_TOKENS,
    REFUSED,
    STATING,
    TOKENS,
    values_of,
)
from pack_data.store.sequences import Sequences
from pack_data.store.trained_labels import default_values, labels_of

# Kinds of columns. The first three hold lists.
WHOLE = "integers"
TRUTHS = "true and false"
FRACTIONS = "numbers"
TEXT = "text"
ONE = "one value"
NULL = "null"
OTHER = "other"
LISTS = (WHOLE, TRUTHS, FRACTIONS)
# They divide or pad the sequences, and are not kept.
_USED_UP = frozenset((*MASKS, *OF_SEQUENCES, "positions"))


class FileRow(NamedTuple):
    """A row of a file as Python values; `after` is the place of the next row (rows.py)."""

    origin: Origin
    fields: Dict[str, Any]
    after: int


class ColumnType(NamedTuple):
    """The kind of a column, and its type as the library of the file format prints it."""

    kind: str
    name: str


class Ragged(NamedTuple):
    """One column of a block: the values of row 0, of row 1, ...

    lengths: int64 [rows], 0 for a null; values: [sum of lengths]; is_null: bool [rows]; is_bad: bool [rows], True where
    a list holds a null.
    """

    lengths: np.ndarray
    values: np.ndarray
    is_null: np.ndarray
    is_bad: np.ndarray

    @classmethod
    def of(cls, lengths: np.ndarray, values: np.ndarray) -> Ragged:
        """Return rows without nulls."""
        nothing = np.zeros(len(lengths), bool)
        return cls(lengths, values, nothing, nothing)


# ---- which columns -----------------------------------------------------------------------------------------------


def token_columns(
    path: str, types: Mapping[str, ColumnType], columns: Sequence[str]
) -> Tuple[str, ...]:
    """Return the columns of the token sequences of a file: the tokens, then the columns that change their meaning.

    They are in the order of the table of meanings, or of the user, whatever their order in the file. The name or the
    user decides which column holds the tokens. Raises ValueError if neither does, for a column that changes the meaning
    of the tokens and cannot be read, and for columns of BERT's examples and packs.
    """
    if columns:
        tokens = _chosen(path, types, columns)
        beside = [*columns, *MASKS]
    else:
        tokens = _named(path, types)
        beside = [*OF_TOKENS, *OF_SEQUENCES]
        for name, way_out in REFUSED.items():
            if name in types and types[name].kind in LISTS:
                raise ValueError(
                    f"{path}: {name} is not read: {way_out}, or choose --columns {tokens} to ignore it"
                )
    read = [name for name in beside if name in types and _is_read(path, name, types[name])]
    return tuple(dict.fromkeys((tokens, *read)))


def _chosen(path: str, types: Mapping[str, ColumnType], columns: Sequence[str]) -> str:
    """Return which of the columns of the user holds the tokens.  Raises ValueError for a column that is no list."""
    lists = [name for name, type in types.items() if type.kind in LISTS]
    for name in columns:
        kind = types[name].kind if name in types else ""
        if kind not in (*LISTS, NULL):
            raise ValueError(
                f"{path}: {name} is {kind or 'not a column'}; the columns of integer lists are "
                f"{', '.join(lists) or 'none'}"
            )
    return min(columns, key=lambda name: (name != TOKENS, name in OF_TOKENS))


def _named(path: str, types: Mapping[str, ColumnType]) -> str:
    """Return the column with a name of token ids.  Raises ValueError unless it is one column, of lists."""
    names = (TOKENS,) if TOKENS in types else OTHER_TOKENS
    may_hold_ids = (WHOLE, FRACTIONS, NULL)
    candidates = [name for name in names if name in types and types[name].kind in may_hold_ids]
    if len(candidates) == 1:
        return candidates[0]
    if len(candidates) > 1:
        problem = f"{' and '.join(candidates)} may both hold the tokens"
        way_out = f"choose one of them with --columns {candidates[0]}"
    else:
        described = ", ".join(f"{name} ({type.name})" for name, type in types.items())
        problem = f"no column {TOKENS} of integer lists; its columns are {described[:150]}"
        way_out = "choose the tokens with --columns, or for text use --corpus"
    raise ValueError(f"{path}: {problem} ({way_out})")


def _is_read(path: str, name: str, type: ColumnType) -> bool:
    """Return True for a column of lists or nulls.  Raises ValueError for one that changes the meaning of the tokens."""
    if type.kind in (*LISTS, NULL):
        return True
    if type.kind in (ONE, TEXT) and name in ALSO_OF_RECORDS:
        return False
    values = OF_TOKENS[name].values if name in OF_TOKENS else "whole numbers"
    raise ValueError(
        f"{path}: {name} is {type.name}, must be a list of {values}; write it as one, or choose other columns with "
        "--columns (a mask of padding is read in any case)"
    )


def check_beside(path: str, columns: Sequence[str], rows: Iterable[FileRow]) -> None:
    """Raise ValueError if a column beside those that are read may change the meaning of the tokens.

    In all rows it has a value for each token, or divides them, or in one it states another number of tokens.
    """
    tokens = columns[0]
    way_out = f"or choose --columns {tokens} to ignore it"
    others = {*columns, *HARMLESS}
    alike: Set[str] = set()
    for row in rows:
        ids = row.fields.get(tokens)
        count = isinstance(ids, list) and len(ids)
        for name, values in row.fields.items():
            if not values or count < 2:
                continue
            if isinstance(values, list):
                numbers = [value for value in values if isinstance(value, (int, float))]
                may_be_of_tokens = count in (len(values), values[-1], sum(numbers))
                (alike if may_be_of_tokens else others).add(name)
            elif name in LENGTHS and values != count:
                raise ValueError(
                    f"{row.origin}: {name} is {values}, but {tokens} has {count} values; remove the column, {way_out}"
                )
    for name in alike - others:
        raise ValueError(
            f"{path}: {name} has a value for each token or sequence, but an unknown name; rename it to what it is "
            f"(attention_mask, labels, seq_lengths, ...), {way_out}"
        )


# ---- blocks of rows ----------------------------------------------------------------------------------------------


class RowBlock(NamedTuple):
    """Consecutive rows by column.

    columns: the tokens first; origin: of a row; others: the values of all other columns of a row, if they were asked
    for.
    """

    columns: Mapping[str, Ragged]
    origin: Callable[[int], Origin]
    others: Callable[[int], Mapping[str, Any]] = lambda row: {}

    def sequences(self) -> Optional[Sequences]:
        """Return the rows as sequences; None if one of them is bad, null, padded or divided."""
        tokens, *beside = self.columns
        lengths = self.columns[tokens].lengths
        if not len(lengths) or lengths.min() < 1:
            return None
        columns = {}
        for column in self.columns.values():
            has_gaps = column.is_null.any() or column.is_bad.any()
            if has_gaps or not np.array_equal(column.lengths, lengths):
                return None
        try:
            for name, column in self.columns.items():
                columns[name] = values_of(name, column.values, are_ids=_are_ids(name, tokens))
            if TOKENS in columns and beside:
                labels_of(columns, "a row")
        except ValueError:
            return None
        for name in MASKS:
            if name in beside and not (columns.pop(name) == 1).all():
                return None
        if not STATING.isdisjoint(columns):
            return None
        return Sequences.of_tokens(lengths, columns)

    def records(self, bad: BadRecords) -> Iterator[Record]:
        """Yield the sequences row by row; bad rows are counted in `bad`."""
        ends = {name: np.cumsum(column.lengths) for name, column in self.columns.items()}
        for row in range(len(next(iter(ends.values())))):
            fields = {}
            try:
                for name, column in self.columns.items():
                    if column.is_bad[row]:
                        raise RecordError(f"{name} holds a null")
                    end = int(ends[name][row])
                    values = column.values[end - int(column.lengths[row]) : end]
                    fields[name] = None if column.is_null[row] else values
                sequences = sequences_of_row(fields)
            except ValueError as error:
                bad.add(self.origin(row), str(error))
                continue
            for value in sequences:
                yield Record(self.origin(row), value, self.others(row))


def _are_ids(name: str, tokens: str) -> bool:
    """Return True for the column of the tokens, whatever it is called; the user may choose labels alone."""
    return name == tokens and name not in OF_TOKENS


def sequences_of_row(row: Mapping[str, Optional[np.ndarray]]) -> List[Dict[str, np.ndarray]]:
    """Return the token sequences of a row, the tokens first, without padding (`store.boundaries`).

    A column beside the tokens that is null has its default.  Raises ValueError.
    """
    tokens, *beside = row
    if row[tokens] is None:
        raise RecordError(f"{tokens} is null")
    example = {**row, TOKENS: row[tokens]}
    of_tokens = {}
    for name, values in row.items():
        if name in beside and name in _USED_UP:
            continue
        if values is None:
            if name not in OF_TOKENS:
                raise RecordError(f"{name} is null")
            values = default_values(name, example)
        of_tokens[name] = values_of(name, values, are_ids=_are_ids(name, tokens))
    sizes = [f"{name} {len(values)}" for name, values in of_tokens.items()]
    if len({len(values) for values in of_tokens.values()}) > 1:
        raise RecordError(
            f"columns of different lengths: {', '.join(sizes)} (choose columns with --columns)"
        )
    if tokens == TOKENS:
        labels_of(of_tokens, "the row")
    stated = {name: row[name] for name in beside}
    span, lengths_inside = sequences_in({**stated, TOKENS: row[tokens]}, "the row")
    if not len(lengths_inside):
        raise RecordError(f"{tokens} is empty, a sequence needs at least one token")
    ends = np.cumsum(lengths_inside)[:-1]
    parts = [np.split(values[span], ends) for values in of_tokens.values()]
    return [dict(zip(of_tokens, part)) for part in zip(*parts)]
