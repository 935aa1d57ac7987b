"""The account of a build: what it read, what is in the data set, and every reason for the difference.

    records = documents (of both sides) + empty_records (+ copies, with --drop-copies)
    tokens  = tokens_in_sequences (different tokens of the text; of each side)

Records that cannot be read, and lines of texts (--skip-bad), are counted beside them. A text that is divided is one
record of some `paragraphs`. The manifest has the account in `made_with`.
"""

from __future__ import annotations

from typing import Iterator, Mapping, Sequence

from pack_data.reading.account import Account
from pack_data.reading.words import counted

ACCOUNT = "account"
# A build warns if less of its input is in the data set.
_LEAST_SHARE = 0.9
# A build explains a larger share of random second segments.
_MANY_RANDOM = 0.6

Counts = Mapping[str, int]  # of a data set, as its manifest has them


def lines(sides: Sequence[Counts]) -> Iterator[str]:
    """Yield at most three lines about the input of a build, given the counts of each data set."""
    first = sides[0]
    total = {name: sum(account[name] for account in sides) for name in first}
    if "records" in first:
        reasons = {"empty": first["empty_records"], "unreadable": first["unreadable"]}
        kept = first["records"] - first["empty_records"]
        if first["documents"] < kept:
            reasons["dropped copies"] = first["copies"]
            kept = first["documents"]
        records = Account(first["records"] + first["unreadable"], kept, reasons)
        warning = "warning: only " if kept < _LEAST_SHARE * records.came_in else ""
        line = (
            f"{warning}{records.text('records')} of {counted(first['files'], 'file')} went into the data set "
            f"({total['characters']:,} characters)"
        )
        if first["unreadable_lines"]:
            line += f"; {counted(first['unreadable_lines'], 'line')} of text unreadable"
        yield line
    yield tokens_line(total)
    if "random_second_segments" in first:
        share = total["random_second_segments"] / total["sequences"]
        line = f"{share:.0%} of the second segments are random (label 1)"
        if share > _MANY_RANDOM:
            line += ": a sentence alone has no real second one; next-sentence prediction is easy in short documents"
        yield line


def tokens_line(account: Counts) -> str:
    """Describe the share of the tokens that is in the sequences."""
    kept = account["tokens_in_sequences"]
    read = account["tokens"]
    return f"{kept:,} of {counted(read, 'token')} read are in sequences ({kept / read:.1%})"
