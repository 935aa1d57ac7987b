"""Columns of text in lines of a width, and values as JSON has them."""

from __future__ import annotations

import math
import textwrap
from itertools import takewhile
from numbers import Integral, Real
from typing import Any, List, Mapping, NamedTuple, Sequence

WIDTH = 100  # characters of a printed line
GAP = "  "  # between columns


def plain(value: Any) -> Any:
    """Return a value as JSON has it: null for what is not finite, lists for tuples, Python's numbers for NumPy's."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if math.isfinite(value) else None


class ShownColumn(NamedTuple):
    """A column as it is shown.

    key: of its values. values: as JSON has them. is_number: flush right. is_label: repeated if the table does not fit
    into a line.
    """

    key: str
    heading: str
    cells: Sequence[str]
    values: Sequence[Any] = ()
    is_number: bool = False
    is_label: bool = False


def wrapped(words: str, head: str = "", width: int = WIDTH) -> List[str]:
    """Break a sentence into lines.

    Args:
        words: the sentence.
        head: stands before its first line; blanks as long stand before all others.
        width: characters of a line.
    """
    lines = textwrap.wrap(
        words,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [head.rstrip()]


def table_lines(columns: Sequence[ShownColumn], width: int = WIDTH) -> List[str]:
    """Return the rows; columns that do not fit into a line stand below, after the labels again.

    Args:
        columns: a table's.
        width: characters of a line.
    """
    labels = list(takewhile(lambda column: column.is_label, columns))
    if len(labels) == len(columns):
        labels = labels[:1]
    texts = [_padded(column) for column in columns]
    labelled = texts[: len(labels)]
    blocks = [list(labelled)]
    for cells in texts[len(labels) :]:
        needed = sum(len(column[0]) + len(GAP) for column in (*blocks[-1], cells))
        if needed > width + len(GAP) and len(blocks[-1]) > len(labels):
            blocks.append(list(labelled))
        blocks[-1].append(cells)

    lines: List[str] = []
    for block in blocks:
        if lines:
            lines.append("")
        lines += [GAP.join(cells).rstrip() for cells in zip(*block)]
    return lines


def _padded(column: ShownColumn) -> List[str]:
    """Return heading and cells, all as long as the longest."""
    texts = [column.heading, *column.cells]
    width = max(map(len, texts))
    pad = str.rjust if column.is_number else str.ljust
    return [pad(text, width) for text in texts]
