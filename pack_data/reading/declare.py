"""Declarations of settings: a dataclass field with a type, a default, a range, a meaning and a rule for resumed runs.

    @dataclass(frozen=True)
    class Batch:
        micro_batch: int = setting(2, "packs in one forward pass", minimum=1, default_of={"finetune": 4})

Sections of configurations, options of builds and options of commands are declared in this way. Configurations are read
by `ipu_packed_bert.settings.reader`, command lines by `pack_data.cli.options`, and arguments in Python by
`check_fields`: with the same types and ranges.  Loads neither YAML nor argparse.
"""

from __future__ import annotations

import dataclasses
import operator
import re
import sys
from pathlib import Path
from typing import (
    Any,
    Dict,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Tuple,
    Union,
    get_type_hints,
)

from pack_data.reading import fields

# Rules for a setting that differs in a resumed run. Any other text is the reason why the setting never changes.
ASK = ""  # it changes the following updates: refused unless --allow-change names it
FREE = "free"  # it changes no update, or only rounding or the end of the run: noted in one line

AUTO = "auto"  # a number that the program chooses
REQUIRED = dataclasses.MISSING  # the default of a setting without a default

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_MAX_TEXT = 4096  # characters, the longest path of Linux
_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_LIST_EXAMPLES = {int: "3, 7", float: "0.1, 0.15", str: "data/a, data/b"}


class Rule(NamedTuple):
    """The range of a setting; None: unbounded."""

    minimum: Optional[float] = None  # value >= minimum
    above: Optional[float] = None  # value > above
    maximum: Optional[float] = None  # value <= maximum
    below: Optional[float] = None  # value < below
    choices: Tuple[str, ...] = ()  # value is one of these
    note: str = ""  # appended to the rule in a message
    pattern: str = ""  # regular expression of further values

    def _violation(self, value: Any) -> Optional[str]:
        """Return the rule as a phrase if ``value`` breaks it, else None.

        Args:
            value: a number, a text or a tuple of numbers.
        """
        if self.choices and isinstance(value, str):
            if value in self.choices or (self.pattern and re.fullmatch(self.pattern, value)):
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
        return f"{subject}must be {' and '.join(bounds)}{self.note}"


class Setting(NamedTuple):
    """A setting: a field of a section of configurations, or an option of a command."""

    default: Any
    meaning: str
    rule: Rule
    resume: str = ASK  # the rule for a resumed run
    of: str = ""  # the command or the input that has the setting; empty: all
    default_of: Mapping[str, Any] = {}  # defaults of commands in place of `default`
    flag: str = ""  # the option on a command line, such as --from; empty: the name
    metavar: str = ""
    rare: bool = False  # listed by --help-all only
    several: str = ""  # "+": the option takes several words; "append": it may be repeated
    read: str = ""  # the form of the option's text: bytes, depth or names; empty: that of the type
    # Known when the section is complete.
    name: str = ""  # field of the dataclass
    kind: Any = None  # the type of the value
    attribute: str = ""  # of the configuration: the dataclass with the value

    def checked(self, raw: Any) -> Any:
        """Return a value in the type of the setting; raise ValueError, with the rule, if it is not allowed."""
        value = typed_value(raw, self.kind)
        wrong = self.rule._violation(value) if value is not None else None
        if wrong:
            raise ValueError(wrong)
        return value


def setting(default: Any, meaning: str = "", **declaration: Any) -> Any:
    """Declare a setting, the field of a dataclass.

    Args:
        default: the value if nobody states the setting; REQUIRED: it must be stated.
        meaning: a few words for --help, --show-config and docs/configuration.md.
        declaration: fields of :class:`Rule`, and of :class:`Setting`: ``of``, ``default_of``, ``resume``, ``flag``,
            ``metavar``, ``rare``, ``several``, ``read``.
    """
    limits = {name: declaration.pop(name) for name in Rule._fields if name in declaration}
    declared = Setting(default, meaning, Rule(**limits), **declaration)
    return dataclasses.field(default=default, metadata={"setting": declared})


def setting_of(section: type, name: str, **changes: Any) -> Any:
    """Declare the setting of another section, whose option stays there.

    Args:
        section: the dataclass that declares the setting.
        name: the field.
        changes: fields of :class:`Setting` with other values.
    """
    declared = settings_in(section)[name]._replace(**{"of": "", **changes})
    return dataclasses.field(default=declared.default, metadata={"setting": declared})


def settings_in(section: type) -> Dict[str, Setting]:
    """Return the settings of a dataclass by field, in the order of the fields."""
    types = get_type_hints(section)
    settings = {}
    for field in dataclasses.fields(section):
        if "setting" in field.metadata:
            declared = field.metadata["setting"]
            flag = declared.flag or "--" + field.name.replace("_", "-")
            settings[field.name] = declared._replace(
                name=field.name, kind=types[field.name], flag=flag
            )
    return settings


def words_of(settings: Mapping[str, Setting], values: Mapping[str, Any]) -> List[str]:
    """Return the words of a command line that states these values.

    Args:
        settings: the settings, by name.
        values: values by name; None is the depth `unlimited`.
    """
    words: List[str] = []
    for name, value in values.items():
        setting = settings[name]
        is_switch = setting.kind is bool
        if not is_switch or value != setting.default:
            words.append(setting.flag)
        if setting.several == "+" and not isinstance(value, str):
            words += map(str, value)
        elif isinstance(value, (list, tuple)):
            words.append(",".join(value))
        elif not is_switch:
            words.append("unlimited" if value is None else str(value))
    return words


def check_fields(section: Any) -> None:
    """Convert the values of a frozen dataclass to the types of its settings.

    Integers and floats of NumPy are numbers. A float is no whole number, even 1.0: it comes from a division or from a
    file that was read without its types, and the next value may not be whole.

    Raises:
        ValueError: a value has another type or breaks its rule; the message names the field.
    """
    for name, declared in settings_in(type(section)).items():
        value = getattr(section, name)
        if value is declared.default:
            continue
        number = value.item() if hasattr(value, "dtype") and not value.shape else value
        kinds = getattr(declared.kind, "__args__", (declared.kind,))
        try:
            if int in kinds and str not in kinds and isinstance(number, (float, str)):
                raise ValueError(f"must be {_TYPE_NAMES[int]}")
            checked = declared.checked(number)
        except ValueError as error:
            raise ValueError(f"{name} = {fields.shown(value)}; {error}") from None
        object.__setattr__(section, name, checked)


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
    if kind is Any or Path in arguments:  # paths, and data sets of other libraries
        return raw
    if type(None) in arguments and raw is None:
        return None
    if getattr(kind, "__origin__", None) is Union:
        is_text = isinstance(raw, str) and str in arguments
        return typed_value(raw, str if is_text else arguments[0])
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
