"""Tables of fixed-width columns, for people who read a terminal."""

from __future__ import annotations

from typing import Collection, List, Optional, Sequence, Tuple


def padded(
    rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,), widths: Optional[Sequence[int]] = None
) -> List[List[str]]:
    """The cells of a table, filled up with blanks so that the cells of a column have one width.

    rows: cells [rows][columns]. left: the numbers of the columns that stand flush left; the others stand flush right.
    widths: characters of each column at least; None: as the widest cell needs.
    """
    if not rows:
        return []
    least = [0] * len(rows[0]) if widths is None else widths
    wide = [max(width, *(len(row[column]) for row in rows)) for column, width in enumerate(least)]
    return [
        [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, wide))
        ]
        for row in rows
    ]


def text_table(
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[int] = (0,),
    widths: Optional[Sequence[int]] = None,
    between: str = "  ",
    indent: str = "",
) -> List[str]:
    """The lines of a table, without blanks at their ends; see `padded`. A heading is a row like any other."""
    return [(indent + between.join(cells)).rstrip() for cells in padded(rows, left=left, widths=widths)]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, columns padded so that it also reads as text; all but the first column flush right."""
    table = padded([header, *rows])
    rule = ["-" * len(cell) if number == 0 else "-" * (len(cell) - 1) + ":" for number, cell in enumerate(table[0])]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in [table[0], rule, *table[1:]])


def account(title: str, rows: Sequence[Tuple[str, str, str]]) -> str:
    """An underlined title, and under it (what, how much, a note) for each quantity."""
    return "\n".join([title, "-" * len(title), *text_table(rows, left=(0, 2), indent="  ")])
