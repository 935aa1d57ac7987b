"""Rows of other people's files, and which of their columns hold token sequences."""

from __future__ import annotations

import re
from typing import Any, Dict, Mapping, NamedTuple, Sequence, Tuple

from pack_data.formats.records import NO_COLUMNS, STARTS
from pack_data.reading.bad_records import Origin
from pack_data.store.boundaries import OF_SEQUENCES
from pack_data.store.companions import COMPANIONS, TOKENS

MASK = "attention_mask"
# Columns that are read beside the tokens.
_BESIDE = frozenset((*COMPANIONS, STARTS))
# Two of these columns, or a list of `positions`, mark BERT's examples or packs, which are not read from columns.
_OF_BERT = (
    "positions",
    "next_sentence_positions",
    "next_sentence_weights",
    "masked_lm_positions",
    "masked_lm_ids",
    "next_sentence_labels",
)
# Types such as large_list<element: uint16>.
_INTEGER_LIST = re.compile(r"(large_|fixed_size_)?list(_view)?<[^<]*: u?int\d|list of int$")
# A companion of the tokens may have these types as well.
_NUMBER_LIST = re.compile(
    r"(large_|fixed_size_)?list(_view)?<[^<]*: (u?int\d|bool|halffloat|float|double)"
    r"|list of (int|bool|float)( and (int|bool|float))*$"
)
_TEXT = re.compile(r"text|(large_)?string|dictionary<values=(large_)?string")
# Integers under such a name describe tokens or texts.
_NO_TOKENS = re.compile(r"(tags?|labels?|label_ids|masks?|weights?|positions?)$", re.IGNORECASE)


class FileRow(NamedTuple):
    """A row of a file as Python values; `after` is the place of the next row (rows.py)."""

    origin: Origin
    fields: Dict[str, Any]
    after: int


def kind_of_type(type: str) -> str:
    """Return "text", "integers" (a list) or "other" for a type as Arrow or jsonl.py prints it."""
    if _INTEGER_LIST.match(type):
        return "integers"
    return "text" if _TEXT.match(type) else "other"


def token_columns(path: str, types: Mapping[str, str], columns: Sequence[str]) -> Tuple[str, ...]:
    """Return the columns that hold the token sequences of a file: those that the user chose, or input_ids.

    types: the type of each column.  Raises ValueError if nothing says which column holds tokens, and for columns of
    BERT's examples and packs, which are no longer read.
    """
    lists = [name for name, type in types.items() if _is_read(name, type)]
    for name in columns:
        if name not in lists:
            raise ValueError(
                f"{path}: {name} is {types.get(name, 'not a column')}; the columns of integer lists are "
                f"{', '.join(lists) or 'none'}"
            )
    _check_companions(path, types, columns)
    if columns:
        masks = [name for name in (MASK,) if name in lists and name not in columns]
        return (*columns, *masks)

    for name in OF_SEQUENCES:
        if name in types:
            raise ValueError(
                f"{path}: {name} are the boundaries of rows that are packed already, and files are read without them; "
                f"read the file with datasets.load_dataset, or choose --columns {TOKENS} to ignore them"
            )
    of_bert = [name for name in _OF_BERT if name in types]
    if "positions" in lists or len(of_bert) >= 2:
        raise ValueError(
            f"{path}: {', '.join(of_bert)}: {NO_COLUMNS}, or choose columns of token sequences with --columns"
        )
    candidates = [name for name in lists if name not in _BESIDE]
    if TOKENS in types:
        candidates = [TOKENS] if TOKENS in lists else []
    if not candidates:
        described = ", ".join(f"{name} ({type})" for name, type in types.items())
        raise ValueError(
            f"{path}: has no column of integer lists for tokens; its columns are {described[:150] or 'none'} "
            "(for text use --corpus)"
        )
    if len(candidates) > 1 or _NO_TOKENS.search(candidates[0]):
        raise ValueError(
            f"{path}: has no column {TOKENS}, and {', '.join(candidates)[:150]} may hold other things than tokens; "
            "choose with --columns"
        )
    return tuple(name for name in lists if name in candidates or name in _BESIDE)


def _is_read(name: str, type: str) -> bool:
    """Return True if a column of this type can have a value for each token."""
    pattern = _NUMBER_LIST if name in COMPANIONS else _INTEGER_LIST
    return bool(pattern.match(type))


def _check_companions(path: str, types: Mapping[str, str], columns: Sequence[str]) -> None:
    """Raise ValueError for a column that changes what the tokens mean, and has a type that cannot be read."""
    for name in (MASK,) if columns else COMPANIONS:
        type = types.get(name, "null")
        # One label is of the whole sequence: its class, say.
        is_one_label = name == "labels" and "list" not in type
        if not (type == "null" or is_one_label or _is_read(name, type)):
            raise ValueError(
                f"{path}: {name} is {type}, must be a list of {COMPANIONS[name]}; choose other columns with --columns"
            )
