"""Command lines of declared settings: an option for each, read with the type and the range of its declaration."""

from __future__ import annotations

import argparse
from typing import Any, Callable, Dict, Iterable, Mapping, Tuple, Union

from pack_data.cli.option_types import byte_count, item_type, option_type, parse_depth
from pack_data.reading.declare import AUTO, REQUIRED, Setting

_METAVARS = {int: "N", float: "P", str: "NAME"}


def _depth(text: str) -> Union[int, str, None]:
    return text if text == AUTO else parse_depth(text)


def _names(text: str) -> Tuple[str, ...]:
    return tuple(text.split(","))


_READERS: Mapping[str, Callable[[str], Any]] = {
    "bytes": byte_count,
    "depth": _depth,
    "names": _names,
}


def add_options(parser: Any, settings: Iterable[Setting]) -> None:
    """Add an option for each setting; one that is not typed is not in the result of the parser.

    Args:
        parser: a parser, or a group of one.
        settings: the settings, of one or several sections.
    """
    for setting in settings:
        details: Dict[str, Any] = {}
        if setting.kind is bool:
            details["action"] = "store_false" if setting.default else "store_true"
        else:
            details["metavar"] = setting.metavar or _METAVARS[item_type(setting.kind)]
            details["type"] = (
                str if setting.several else option_type(setting, _READERS.get(setting.read))
            )
        if setting.several == "append":
            details["action"] = "append"
        elif setting.several:
            details["nargs"] = setting.several
        if setting.default is REQUIRED:
            details["required"] = True
        action = parser.add_argument(
            setting.flag,
            dest=setting.name,
            default=argparse.SUPPRESS,
            help=_help(setting),
            **details,
        )
        action.is_rare = setting.rare


def _help(setting: Setting) -> str:
    """Return the help of an option: its meaning, its choices, and its default if that is a word or a number."""
    text = setting.meaning
    default = setting.default
    if setting.rule.choices and setting.rule.minimum is None:
        text += f": {', '.join(setting.rule.choices)}"
    if isinstance(default, (int, float)) and setting.kind is not bool:
        text += f" (default {default:,})"
    elif isinstance(default, str) and default and not setting.several:
        text += f" (default {default})"
    return text.replace("%", "%%")
