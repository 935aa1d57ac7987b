"""Texts in other encodings than UTF-8, which are refused with the name of the encoding; tables of numbers."""

from __future__ import annotations

import codecs
import io
from itertools import count
from typing import Any, Iterator

from pack_data.reading.compressed import open_unpacked
from pack_data.reading.durable import PathLike

# Bytes at the beginning of a file that are looked at.
HEAD_BYTES = 4096
LONGEST_LINE = 1000  # characters of a line of a table of numbers


def check_encoding(path: Any, head: bytes) -> None:
    """Raise ValueError if the first bytes of a text file are those of UTF-16 or UTF-32."""
    encoding = ""
    # The mark of UTF-32 begins with that of UTF-16.
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        encoding = "UTF-32"
    # Texts in UTF-8 have no zero bytes; half of the bytes of an English text in UTF-16 are zero.
    elif head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or 4 * head.count(0) > len(
        head
    ):
        encoding = "UTF-16"
    if encoding:
        raise ValueError(
            f"{path}: {encoding}, not UTF-8 text; convert it: iconv -f {encoding} -t UTF-8"
        )


def lines_of_numbers(path: PathLike, *, way_out: str) -> Iterator[str]:
    """Yield the lines of a table of numbers, unpacked; ValueError for a long one, which is never read whole."""
    with open_unpacked(path, way_out=way_out) as raw:
        check_encoding(path, raw.peek(HEAD_BYTES)[:HEAD_BYTES])  # type: ignore[attr-defined]
        with io.TextIOWrapper(raw, "utf-8-sig") as file:
            for number in count(1):
                try:
                    line = file.readline(LONGEST_LINE + 1)
                except UnicodeDecodeError as error:
                    raise ValueError(f"{path}: not a text table ({error}); {way_out}") from None
                if not line:
                    return
                if len(line) > LONGEST_LINE:
                    raise ValueError(
                        f"{path} line {number}: more than {LONGEST_LINE} characters; {way_out}"
                    )
                yield line
