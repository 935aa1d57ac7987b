"""Texts in other encodings than UTF-8, which are refused with the name of the encoding."""

from __future__ import annotations

import codecs
from typing import Any

# Bytes at the beginning of a file that are looked at.
HEAD_BYTES = 4096
# UTF-32 first: its mark begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


def check_encoding(path: Any, head: bytes) -> None:
    """Raise ValueError if the first bytes of a text file are those of UTF-16 or UTF-32."""
    encoding = next((name for mark, name in _MARKS if head.startswith(mark)), "")
    # Texts in UTF-8 have no zero bytes; half of the bytes of an English text in UTF-16 are zero.
    if not encoding and head.count(0) > len(head) // 4:
        encoding = "UTF-16"
    if encoding:
        raise ValueError(
            f"{path}: {encoding}, not UTF-8 text; convert it: iconv -f {encoding} -t UTF-8"
        )
