"""Identities of examples, by which a state recognises the data that it was taken with."""

from __future__ import annotations

import hashlib
from typing import Any, Mapping, Sequence

import numpy as np

_DIGITS = 16  # hexadecimal, 64 bits


def digest_of_values(*values: Any) -> str:
    """Return a digest of numbers or texts, equal for equal values whatever the types of the numbers."""
    digest = hashlib.sha256()
    for value in values:
        digest.update(_bytes_of(value))
    return digest.hexdigest()[:_DIGITS]


def digest_of_example(example: Any) -> str:
    """Return a digest of an example: of its columns with one value for each token, of all if it has no input_ids.

    It is "" if there is no example.
    """
    if example is None:
        return ""
    if not isinstance(example, Mapping):
        return digest_of_values(example)
    of_tokens = "input_ids" in example
    values = []
    for name in sorted(example):
        column = example[name]
        if of_tokens and not _is_like(column, example["input_ids"]):
            continue
        values += [name, column]
    return digest_of_values(*values)


def digest_of_examples(examples: Sequence[Any], most: int) -> str:
    """Return a digest of the number of examples and of up to `most` of them, evenly spaced."""
    count = len(examples)
    numbers = np.linspace(0, count - 1, min(count, most)).astype(np.int64)
    digests = [digest_of_example(examples[int(number)]) for number in numbers]
    return digest_of_values(count, digests)


def _is_like(column: Any, tokens: Any) -> bool:
    return hasattr(column, "__len__") and len(column) == len(tokens)


def _bytes_of(value: Any) -> bytes:
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return b""
    if array.dtype.kind in "biu":
        values = array.astype(np.int64).tobytes()
    elif array.dtype.kind in "fUS":
        values = repr(array.tolist()).encode()
    else:
        values = b""
    return repr(array.shape).encode() + values
