"""Texts in other encodings than UTF-8, which are refused with the name of the encoding."""

from __future__ import annotations

import codecs
from typing import Any

# Bytes at the beginning of a file that are looked at.
HEAD_BYTES = 4096


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
