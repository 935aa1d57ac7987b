"""Declarations of settings: a dataclass field with a type, a default, a range, a meaning and a rule for resumed runs.

    @dataclass(frozen=True)
    class Batch:
        micro_batch: int = setting(2, "packs in one forward pass", minimum=1, default_of={"finetune": 4})

Values are read by `ipu_packed_bert.settings.reader`.  Loads neither torch nor poptorch.
"""

from __future__ import annotations

import dataclasses
import operator
import re
import sys
from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple, get_type_hints

# Rules for a setting that differs in a resumed run. Any other text is the reason why the setting never changes.
ASK = ""  # it changes the following updates: refused unless --allow-change names it
FREE = "free"  # it changes no update, or only rounding or the end of the run: noted in one line

OWN_TASK = r"(.+\.py):(\w+)"  # a task's name that is a class in a file of the user, see `settings.user_task`
AUTO = "auto"  # a number that the command chooses, see `settings.schema.Rows`

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_MAX_TEXT = 4096  # characters, the longest path of Linux
_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_LIST_EXAMPLES = {int: "3, 7", float: "0.1, 0.15", str: "data/a, data/b"}


class Chosen(int):
    """The number that `auto` stands for in one run; files and comparisons keep the word."""


class Rule(NamedTuple):
    """The range of a setting; None: unbounded."""

    minimum: Optional[float] = None  # value >= minimum
    above: Optional[float] = None  # value > above
    maximum: Optional[float] = None  # value <= maximum
    below: Optional[float] = None  # value < below
    choices: Tuple[str, ...] = ()  # value is one of these
    note: str = ""  # appended to the choices in a message
    pattern: str = ""  # regular expression of further values

    def violation(self, value: Any) -> Optional[str]:
        """Return the rule as a phrase if ``value`` breaks it, else None.

        Args:
            value: a number, a text or a tuple of numbers.
        """
        if self.choices and isinstance(value, str):
            if shown(value) in self.choices or (self.pattern and re.fullmatch(self.pattern, value)):
                return None
            return f"must be one of {', '.join(self.choices)}{self.note}"

        several = isinstance(value, tuple)
        numbers = value if several else (value,)
        sides = (
            ("at least", self.minimum, operator.ge),
            ("above", self.above, operator.gt),
            ("at most", self.maximum, operator.le),
            ("below", self.below, operator.lt),
        )
        bounds = []
        is_broken = False
        for words, bound, is_within in sides:
            if bound is not None:
                is_broken |= not all(is_within(number, bound) for number in numbers)
                bounds.append(
                    f"{words} {bound:g}" if isinstance(bound, float) else f"{words} {bound}"
                )
        if not is_broken:
            return None
        subject = "each " if several else ""
        return f"{subject}must be {' and '.join(bounds)}"


def setting(
    default: Any,
    meaning: str = "",
    *,
    of: str = "",
    default_of: Optional[Mapping[str, Any]] = None,
    resume: str = ASK,
    **rule: Any,
) -> Any:
    """Declare a setting, the field of a dataclass.

    Args:
        default: the value if nobody states the setting.
        meaning: a few words for --show-config and docs/configuration.md.
        of: the command that has the setting; empty: both.
        default_of: the default of a command in place of ``default``.
        resume: the rule for a resumed run: ASK, FREE, or the reason why the setting never changes.
        rule: the fields of :class:`Rule`.
    """
    metadata = {
        "meaning": meaning,
        "of": of,
        "default_of": default_of or {},
        "resume": resume,
        "rule": Rule(**rule),
    }
    return dataclasses.field(default=default, metadata=metadata)


class Setting(NamedTuple):
    """A setting of one command."""

    attribute: str  # of the configuration: the dataclass with the value
    name: str  # field of the dataclass
    kind: Any  # the type of the value
    default: Any
    meaning: str
    resume: str
    rule: Rule


def declared(parts: Sequence[Tuple[str, str, type]], command: str) -> Dict[str, Setting]:
    """Return the settings of ``command`` by full name, section.name.

    Args:
        parts: (attribute of the configuration, section of the file, dataclass); two may share a section.
        command: ``"pretrain"`` or ``"finetune"``.
    """
    settings = {}
    for attribute, section, part in parts:
        types = get_type_hints(part)
        for field in dataclasses.fields(part):
            metadata = field.metadata
            if metadata["of"] in ("", command):
                settings[f"{section}.{field.name}"] = Setting(
                    attribute,
                    field.name,
                    types[field.name],
                    metadata["default_of"].get(command, field.default),
                    metadata["meaning"],
                    metadata["resume"],
                    metadata["rule"],
                )
    return settings


def typed_value(raw: Any, kind: Any) -> Any:
    """Convert a value of YAML to the type of a setting.

    YAML 1.1 reads 1e-3 and 6.0e5 as texts; they are accepted as numbers.

    Args:
        raw: the value.
        kind: the type, such as ``int`` or ``Optional[Tuple[float, ...]]``.

    Raises:
        ValueError: the value has another type; the message is the rule.
    """
    arguments: Tuple[Any, ...] = getattr(kind, "__args__", ())
    if type(None) in arguments:
        return None if raw is None else typed_value(raw, arguments[0])
    if arguments == (int, str):
        return typed_value(raw, str if isinstance(raw, str) else int)
    if arguments:  # Tuple[int, ...]
        if not isinstance(raw, (list, tuple)) or not raw:
            raise ValueError(f"must be a list such as [{_LIST_EXAMPLES[arguments[0]]}]")
        return tuple(typed_value(item, arguments[0]) for item in raw)
    if kind in (int, float):
        return _number(raw, kind)
    if not isinstance(raw, kind):
        raise ValueError(f"must be {_TYPE_NAMES[kind]}")
    if kind is str and not (raw.isprintable() and len(raw) <= _MAX_TEXT):
        raise ValueError(f"must be a text of at most {_MAX_TEXT} printable characters in one line")
    return raw


def _number(raw: Any, kind: type) -> Any:
    """Convert a value to int or float, and check its size."""
    number = raw
    if isinstance(raw, str) and "e" in raw.lower() and _NUMBER.fullmatch(raw):
        number = float(raw)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise ValueError(f"must be {_TYPE_NAMES[kind]}")
    if not abs(number) <= sys.float_info.max:
        raise ValueError("must be finite")
    if kind is int and number != int(number):
        raise ValueError(f"must be {_TYPE_NAMES[kind]}")
    if kind is int and abs(number) >= 2**63:
        raise ValueError("must fit into 64 bits")
    return kind(number)


def plain(value: Any) -> Any:
    """Return the value of a setting in types of YAML."""
    if isinstance(value, Chosen):
        return AUTO
    return list(value) if isinstance(value, tuple) else value


def nested(values: Mapping[str, Any]) -> Dict[str, Dict[str, Any]]:
    """Return values by full name as sections of plain values: {"batch.micro_batch": 4} -> {"batch": {...}}."""
    sections: Dict[str, Dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = plain(value)
    return sections


def flat(tree: Mapping[str, Any], prefix: str = "") -> Dict[str, Any]:
    """Return nested settings by full name, such as "run.seed"."""
    settings: Dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            settings.update(flat(value, f"{prefix}{name}."))
        else:
            settings[prefix + name] = value
    return settings


def shown(value: Any) -> str:
    """Return the value of a setting for a message, in the spelling of YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(plain(value))
