"""The account of a build: what it read, what is in the data set, and every reason for the difference.

    records = documents (of both sides) + empty_records (+ copies, with --drop-copies)
    tokens  = tokens_in_sequences (different tokens of the text; of each side)

Records that cannot be read, and lines of texts (--skip-bad), are counted beside them. A text that is divided is one
record of some `paragraphs`. The manifest has the account in `made_with`.
"""

from __future__ import annotations

from typing import Iterator, Mapping, Sequence

from pack_data.reading.words import counted

ACCOUNT = "account"
# A build warns if less of its input is in the data set.
_LEAST_SHARE = 0.9
# A build explains a larger share of random second segments.
_MANY_RANDOM = 0.6

Account = Mapping[str, int]


def lines(sides: Sequence[Account]) -> Iterator[str]:
    """Yield at most three lines about the input of a build, given the account of each data set."""
    first = sides[0]
    total = {name: sum(account[name] for account in sides) for name in first}
    if "records" in first:
        read = first["records"] + first["unreadable"]
        kept = first["records"] - first["empty_records"]
        others = ""
        if first["documents"] < kept:
            others = f", {first['copies']:,} dropped copies"
            kept = first["documents"]
        if first["unreadable_lines"]:
            others += f"; {counted(first['unreadable_lines'], 'line')} of text unreadable"
        warning = "warning: only " if kept < _LEAST_SHARE * read else ""
        yield (
            f"{warning}{kept:,} of {counted(read, 'record')} are in the data set ({counted(first['files'], 'file')}, "
            f"{total['characters']:,} characters): {first['empty_records']:,} of {read:,} records are empty, "
            f"{first['unreadable']:,} unreadable{others}"
        )
    yield tokens_line(total)
    if "random_second_segments" in first:
        share = total["random_second_segments"] / total["sequences"]
        line = f"{share:.0%} of the second segments are random (label 1)"
        if share > _MANY_RANDOM:
            line += ": a sentence alone has no real second one; next-sentence prediction is easy in short documents"
        yield line


def tokens_line(account: Account) -> str:
    """Describe the share of the tokens that is in the sequences."""
    kept = account["tokens_in_sequences"]
    read = account["tokens"]
    return f"of {counted(read, 'token')} read, {kept:,} are in sequences ({kept / read:.1%})"
