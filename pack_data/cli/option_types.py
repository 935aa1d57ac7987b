"""Types of options: numbers, depths and sizes that a command line states as texts."""

from __future__ import annotations

import argparse
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, List, Mapping, Optional

from pack_data.reading.cores import PROCESSES
from pack_data.reading.declare import Rule, Setting


def _thousands(text: str) -> int:
    """Return the whole number that a text is; raise ValueError if it is none.

    Separators are accepted between thousands only: `2,4`, meant as two numbers, is not read as 24.
    """
    match = re.fullmatch(
        "-?[0-9]{1,18}|[0-9]{1,3}(,[0-9]{3}){1,5}|[0-9]{1,3}(_[0-9]{3}){1,5}", text.strip()
    )
    if match is None:
        raise ValueError("must be a whole number")
    return int(match[0].replace(",", ""))


def option_type(
    setting: Setting, read: Optional[Callable[[str], Any]] = None
) -> Callable[[str], Any]:
    """Return an argparse type, which reads the text of an option with `read` or by its type, and checks its range."""
    by_type: Mapping[Any, Callable[[str], Any]] = {int: _thousands, float: float, Path: Path}
    from_text = read or by_type.get(item_type(setting.kind), str)

    def checked(text: str) -> Any:
        try:
            return setting.checked(from_text(text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} {error}") from None

    return checked


def item_type(kind: Any) -> Any:
    """Return the type of one value: that of a list's items, or of a value that may be None."""
    arguments = getattr(kind, "__args__", ())
    return item_type(arguments[0]) if arguments else kind


def _number(kind: type, **limits: Any) -> Callable[[str], Any]:
    """Return an argparse type for numbers of a type within limits; `1_000` and `1,000` are numbers too."""
    return option_type(Setting(None, "", Rule(**limits), kind=kind))


positive_int = _number(int, minimum=1)
count_from_zero = _number(int, minimum=0)
positive_seconds = _number(float, above=0)


def positive_ints(text: str) -> List[int]:
    """Read numbers of at least 1, separated by commas (an argparse type)."""
    return [positive_int(part) for part in text.split(",")]


process_count = _number(int, **PROCESSES)


_UNITS = {
    "": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
}


def byte_count(text: str) -> int:
    """Read a number of bytes from 1 on, such as `65536`, `64MiB` or `1GB` (an argparse type)."""
    match = re.fullmatch(r"([0-9][0-9_,]*) ?([kmg]i?b|)", text.strip().lower())
    value = 0
    if match:
        with suppress(ValueError):
            value = _thousands(match[1]) * _UNITS[match[2]]
    if value < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of bytes; give one such as 65536, 64MiB or 1GB"
        )
    return value


def parse_depth(text: str) -> Optional[int]:
    """Read a packing depth: a number of at least 1, or `unlimited`, which is None (an argparse type)."""
    if text == "unlimited":
        return None
    try:
        return positive_int(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a packing depth; give a number of at least 1, or 'unlimited'"
        ) from None


def depth_text(max_sequences_per_pack: Optional[int]) -> str:
    """Return a packing depth as users type it; None is `unlimited`."""
    return "unlimited" if max_sequences_per_pack is None else str(max_sequences_per_pack)
