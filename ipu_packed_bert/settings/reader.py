"""Settings: YAML files and `--set` texts -> frozen dataclasses, with every problem in one message.

A section is a frozen dataclass; each of its fields is a :func:`setting` that states type, default, range and meaning.
What several settings must fulfil together, and defaults that follow from other settings, are the caller's: see
`ipu_packed_bert.settings.pretraining`.  Loads neither torch nor poptorch.

    reader = SettingsReader({"batch": Batch, "run": Run}, "configs/a.yml")
    reader.read(load_yaml("configs/a.yml"), FILE)
    reader.override("batch.micro_batch=4")
    sections = reader.sections()             # {"batch": Batch(...), "run": Run(...)}
    reader.origins["batch.micro_batch"]      # "--set"
    reader.refuse_problems()
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import sys
from pathlib import Path
from typing import (
    Any,
    Container,
    Dict,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
    get_type_hints,
)

import yaml

from ipu_packed_bert.settings.shipped import FOLDER, derived_tree
from pack_data.cli.command import Problems
from pack_data.reading import fields as decoding
from pack_data.reading.fields import MOST_DIGITS, is_plain_name, named, one_line
from pack_data.reading.files import read_regular

# Where a value comes from. Origins that begin with DEFAULT belong to settings that nobody stated.
DEFAULT, FILE, OVERRIDE = "default", "file", "--set"

# Settings of version 1.0 that are constants now; a file or a checkpoint of that version may state them with this value.
_FIXED: Mapping[str, Any] = {"run.on_nonfinite": "stop"}

_Sections = Mapping[str, type]


class ConfigError(Problems):
    """What is wrong with a configuration: every problem found, each with its key, its value and the rule."""


class _Rule(NamedTuple):
    """The range of one setting; None leaves a side open."""

    minimum: Optional[float] = None  # value >= minimum
    above: Optional[float] = None  # value > above
    maximum: Optional[float] = None  # value <= maximum
    below: Optional[float] = None  # value < below
    choices: Tuple[str, ...] = ()  # value is one of these
    note: str = ""  # a few words behind the choices
    pattern: str = ""  # what is none of the choices, and may be a value

    def broken_by(self, value: Any) -> Optional[str]:
        """The rule in words if ``value`` (a number, a string or a tuple of numbers) breaks it, else None."""
        if self.choices:
            known = shown(value) in self.choices or (self.pattern and re.fullmatch(self.pattern, value))
            return None if known else f"must be one of {', '.join(self.choices)}{self.note}"
        bounds = [
            ("at least", self.minimum, lambda v, b: v >= b),
            ("above", self.above, lambda v, b: v > b),
            ("at most", self.maximum, lambda v, b: v <= b),
            ("below", self.below, lambda v, b: v < b),
        ]
        stated = [(words, bound, holds) for words, bound, holds in bounds if bound is not None]
        values = value if isinstance(value, tuple) else (value,)
        if all(holds(v, bound) for v in values for _, bound, holds in stated):
            return None
        each = "each must be " if isinstance(value, tuple) else "must be "
        return each + " and ".join(
            f"{words} {f'{bound:g}' if isinstance(bound, float) else bound}" for words, bound, _ in stated
        )


def setting(default: Any, meaning: str = "", **rule: Any) -> Any:
    """A dataclass field with a default, its meaning in a few words, and a :class:`_Rule`."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, "rule": _Rule(**rule)})


def keys_of(sections: _Sections) -> List[str]:
    """Every setting's full name, section.key."""
    return [f"{section}.{each.name}" for section, kind in sections.items() for each in dataclasses.fields(kind)]


def peek(key: str, tree: Any, overrides: Sequence[str]) -> Any:
    """The value of one setting before its sections are known, None where it is not stated; nothing is checked."""
    section, _, name = key.partition(".")
    settings = tree.get(section) if isinstance(tree, Mapping) else None
    value = settings.get(name) if isinstance(settings, Mapping) else None
    for override in overrides:
        if override.partition("=")[0].strip() == key:
            with contextlib.suppress(ConfigError):  # the reader complains about it
                value = parse_yaml(override.partition("=")[2], OVERRIDE)
    return value


class SettingsReader:
    """Values of settings from several sources in turn, a later source before an earlier one.

    A problem is noted and the reading goes on; :meth:`refuse_problems` raises all of them.
    """

    def __init__(
        self,
        sections: _Sections,
        path: str,
        *,
        prefix: str = "",
        problems: Optional[List[str]] = None,
        broken: Optional[Set[str]] = None,
    ) -> None:
        self._sections, self.path, self._prefix = sections, path, prefix
        self._blocks: List[str] = []
        self.values: Dict[str, Any] = {}
        self.origins: Dict[str, str] = {}
        self.problems: List[str] = [] if problems is None else problems
        # Settings known to be wrong: what follows from them is not reported again.
        self.broken: Set[str] = set() if broken is None else broken
        self._types = {section: get_type_hints(kind) for section, kind in sections.items()}

    def block(self, name: str) -> SettingsReader:
        """A reader of the same settings in a block of their own, such as `without_ipus`; it shares what is noted."""
        self._blocks.append(name)
        return SettingsReader(self._sections, self.path, prefix=f"{name}.", problems=self.problems, broken=self.broken)

    def read(self, tree: Any, origin: str) -> None:
        """Take over nested settings: {section: {key: value}}."""
        stated = "" if origin == FILE else f"{origin} "
        if tree is None:
            return
        if not isinstance(tree, Mapping):
            where = self._prefix.rstrip(".") or "the file"
            self.problems.append(
                f"{stated}{where} is {decoding.shown(tree)}; must hold sections of settings, one `key: value` a line"
            )
            return
        for section, settings in tree.items():
            if section not in self._sections:
                self._unknown(stated, named(section))
            elif isinstance(settings, Mapping):
                for name, raw in settings.items():
                    self._take(section, named(name), raw, origin, stated)
            elif settings is not None:  # a section whose keys are all commented out is empty
                self.problems.append(
                    f"{stated}{self._prefix}{section} is {decoding.shown(settings)}; must hold settings, one "
                    "`key: value` a line"
                )
                self.broken.update(keys_of({section: self._sections[section]}))

    def override(self, text: str) -> None:
        """Take over one text `section.key=value`, the value in YAML."""
        key, value = self.split(text)
        if key is not None:
            section, _, name = key.partition(".")
            self.read({section: {name: value}} if name else {section: value}, OVERRIDE)

    def split(self, text: str) -> Tuple[Optional[str], Any]:
        """`section.key=value` -> key and value; key None, and a problem noted, where it is no such text."""
        key, _, value_text = text.partition("=")
        if not value_text.strip():
            self.problems.append(f"{OVERRIDE} {named(text)}: must read section.key=value, for no value null")
            return None, None
        try:
            return key.strip(), parse_yaml(value_text, OVERRIDE)
        except ConfigError:
            self.problems.append(f"{OVERRIDE} {named(text)}: the value is not valid YAML")
            return None, None

    def derive(self, key: str, value: Any, source: str) -> None:
        """A default that follows from another setting: kept unless somebody stated the setting."""
        if key not in self.values:
            self.values[key] = value
            self.origins[key] = f"{DEFAULT}, from {source}"

    def stated(self, key: str) -> bool:
        """Whether a file or a `--set` gives the setting."""
        return key in self.values and not self.origins[key].startswith(DEFAULT)

    def value(self, key: str) -> Any:
        """The value of a setting as it stands now, its default where none was read."""
        if key in self.values:
            return self.values[key]
        section, _, name = key.partition(".")
        return next(each.default for each in dataclasses.fields(self._sections[section]) if each.name == name)

    def sections(self) -> Dict[str, Any]:
        """A dataclass for each section; what nobody stated has its default, and `origins` says so."""
        for key in keys_of(self._sections):
            self.origins.setdefault(key, DEFAULT)
        return {
            section: kind(
                **{
                    each.name: self.values[f"{section}.{each.name}"]
                    for each in dataclasses.fields(kind)
                    if f"{section}.{each.name}" in self.values
                }
            )
            for section, kind in self._sections.items()
        }

    def refuse_problems(self) -> None:
        """Raise ConfigError with every problem noted so far."""
        if self.problems:
            raise ConfigError(problems_message(self.path, self.problems))

    def _take(self, section: str, name: str, raw: Any, origin: str, stated: str) -> None:
        key = f"{section}.{name}"
        if key in _FIXED:
            if raw != _FIXED[key]:
                self.problems.append(
                    f"{stated}{self._prefix}{key} is {decoding.shown(raw)}; it is no setting any more and is fixed at "
                    f"{_FIXED[key]}: remove it"
                )
            return
        if name not in self._types[section]:
            self._unknown(stated, key)
            return
        rule = next(each for each in dataclasses.fields(self._sections[section]) if each.name == name).metadata["rule"]
        try:
            value = typed_value(raw, self._types[section][name])
            wrong = rule.broken_by(value) if value is not None else None
        except ValueError as error:
            wrong = str(error)
        if wrong:
            self.problems.append(f"{stated}{self._prefix}{key} is {decoding.shown(raw)}; {wrong}")
            self.broken.add(key)
        else:
            self.values[key], self.origins[key] = value, origin

    def _unknown(self, stated: str, key: str) -> None:
        near = suggestions(key, self._sections, self._blocks)
        hint = f"; did you mean {' or '.join(self._prefix + each for each in near)}?" if near else ""
        self.problems.append(f"{stated}{self._prefix}{key} is not a setting{hint}")
        for each in near:
            self.broken.update(keys_of({each: self._sections[each]}) if each in self._sections else [each])


def suggestions(key: str, sections: _Sections, blocks: Sequence[str] = ()) -> List[str]:
    """What an unknown section, block or setting may have meant, as full names: at most three, best first."""
    known = keys_of(sections)
    name = key.rpartition(".")[2]
    same = [each for each in known if each.rpartition(".")[2] == name]
    if same:  # the right name without its section, or in another one
        return same[:3]
    if "." in key:
        return difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    near = difflib.get_close_matches(key, [*sections, *blocks], n=1, cutoff=0.6)
    if near:
        return near
    names = {each.rpartition(".")[2]: each for each in known}
    return [names[each] for each in difflib.get_close_matches(name, list(names), n=1, cutoff=0.8)]


def broken_rules(rules: Sequence[Tuple[str, Any, str]], broken: Container[str] = frozenset()) -> List[str]:
    """The words of the rules that are broken, without those about settings in ``broken``."""
    return [words for keys, wrong, words in rules if wrong and not any(key in broken for key in keys.split())]


def problems_message(path: str, problems: Sequence[str]) -> str:
    """One line for one problem, else a heading and a line for each."""
    if len(problems) == 1:
        return f"{path}: {problems[0]}"
    return "\n  ".join([f"{path}: {len(problems)} problems", *problems])


# ---------------------------------------------------------------------------------------------------------- one value

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_LONGEST_TEXT = 4096  # as long as the name of a file may be
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def typed_value(raw: Any, kind: Any) -> Any:
    """``raw`` as the type ``kind``; ValueError with the rule if it is of another.

    A number is what people write as one: YAML 1.1 reads 1e-3 and 6.0e5 as texts.
    """
    arguments: Tuple[Any, ...] = getattr(kind, "__args__", ())
    if type(None) in arguments:
        return None if raw is None else typed_value(raw, arguments[0])
    if arguments:  # Tuple[int, ...]
        if not isinstance(raw, (list, tuple)) or not raw:
            examples = {int: "3, 7", float: "0.1, 0.15", str: "data/a, data/b"}
            raise ValueError(f"must be a list such as [{examples[arguments[0]]}]")
        return tuple(typed_value(each, arguments[0]) for each in raw)
    if kind in (int, float):
        number = raw
        if isinstance(raw, str) and "e" in raw.lower() and _NUMBER.fullmatch(raw):
            number = float(raw)
        if not isinstance(number, (int, float)) or isinstance(number, bool):
            raise ValueError(f"must be {_WORDS[kind]}")
        if not abs(number) <= sys.float_info.max:
            raise ValueError("must be finite")
        if kind is int and number != int(number):
            raise ValueError(f"must be {_WORDS[kind]}")
        if kind is int and abs(number) >= 2**63:
            raise ValueError("must be a number of 64 bits")
        return kind(number)
    if kind is str and isinstance(raw, str) and not (raw.isprintable() and len(raw) <= _LONGEST_TEXT):
        raise ValueError(f"must be a text of at most {_LONGEST_TEXT} characters that can be printed, in one line")
    if isinstance(raw, kind) and (kind is bool or not isinstance(raw, bool)):
        return raw
    raise ValueError(f"must be {_WORDS[kind]}")


# ---------------------------------------------------------------------------------------------------- YAML, in and out


_MOST_YAML_BYTES = 1 << 20  # a configuration has a few kB
_MOST_MERGED = 10_000  # keys that `<<` brings into one section: an alias of an alias may stand for millions


class _YamlLoader(yaml.SafeLoader):
    """Refuses a key that stands twice: of two values the first would go without a word."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        return super().construct_object(node, deep=True)  # an alias inside what it stands for is refused then

    def construct_yaml_int(self, node: Any) -> Any:
        if len(node.value) > MOST_DIGITS:  # Python 3.8 takes seconds for a million of them
            raise yaml.constructor.ConstructorError(None, None, "a number of too many digits", node.start_mark)
        return super().construct_yaml_int(node)

    def flatten_mapping(self, node: Any) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MOST_MERGED:
            raise yaml.constructor.ConstructorError(None, None, "a section of too many keys", node.start_mark)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: Set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{named(key)} stands twice in one section", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_YamlLoader.add_constructor("tag:yaml.org,2002:int", _YamlLoader.construct_yaml_int)


def load_yaml(path: Union[str, Path], *, levels: int = 8) -> Any:
    """Read a YAML file, and take the settings that it leaves out from the configurations that its `extends` names.

    `extends: NAME`, or a list of names, of which a later one wins: each is a file in the same directory or a
    configuration that comes with the program. `levels` is the number of files that may still extend one another.
    Raises ConfigError, in one line, if a file cannot be read.
    """
    tree = derived_tree(path)
    if tree is None:
        try:
            text = read_regular(path, way_out="give a file of settings", most_bytes=_MOST_YAML_BYTES)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        tree = parse_yaml(text, path)
    if not isinstance(tree, dict) or "extends" not in tree:
        return tree
    names = tree["extends"]
    merged: Any = {}
    for name in names if isinstance(names, list) and names else [names]:
        base = _base_of(name, path)
        if base is None:
            raise ConfigError(
                f"{path}: extends is {named(name)}; must name a configuration beside it, or one that comes with the "
                "program, without .yml"
            )
        if not levels:
            raise ConfigError(f"{path}: extends {name}; too many files that extend one another, or a circle of them")
        merged = _merged(merged, load_yaml(base, levels=levels - 1))
    return _merged(merged, {section: settings for section, settings in tree.items() if section != "extends"})


def _base_of(name: Any, path: Union[str, Path]) -> Optional[Path]:
    """Return the path of a configuration that the file `path` extends, None if there is none."""
    if not isinstance(name, str) or not is_plain_name(name):
        return None
    sibling = Path(path).with_name(f"{name}.yml")
    if sibling.is_file():
        return sibling
    shipped = FOLDER / f"{name}.yml"
    return shipped if shipped.is_file() or derived_tree(shipped) is not None else None


def _merged(base: Any, tree: Any) -> Any:
    """Return `base` with the values of `tree` in their places, section by section."""
    if not isinstance(base, dict) or not isinstance(tree, dict):
        return tree
    return {**base, **{key: _merged(base.get(key), value) for key, value in tree.items()}}


def parse_yaml(text: Union[str, bytes], source: Union[str, Path]) -> Any:
    """What a YAML text holds, as plain values; `source` is for the message of the ConfigError, which has one line."""
    try:
        if len(text) > _MOST_YAML_BYTES:
            raise ValueError(f"more than {_MOST_YAML_BYTES:,} bytes, too large for settings")
        return yaml.load(text if isinstance(text, str) else text.decode("utf-8"), _YamlLoader)
    except RecursionError:
        problem = "it is nested too deeply"
    # PyYAML's own, and what its constructors raise for values that its patterns let through: 2001-13-45, !!int ''.
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        problem = one_line(error)
    raise ConfigError(f"{source}: not valid YAML: {problem}")


def plain(value: Any) -> Any:
    """A setting's value as YAML holds it."""
    return list(value) if isinstance(value, tuple) else value


def shown(value: Any) -> str:
    """A setting's value in a message, as one writes it in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)


def as_tree(sections: Mapping[str, Any]) -> Dict[str, Dict[str, Any]]:
    """Dataclasses by section -> nested plain values."""
    return {
        name: {each.name: plain(getattr(section, each.name)) for each in dataclasses.fields(section)}
        for name, section in sections.items()
    }


def annotated(sections: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """YAML of all settings; behind each value where it comes from and what it means."""
    lines: List[str] = []
    for name, section in sections.items():
        lines += ["", f"{name}:"]
        for each in dataclasses.fields(section):
            stated = f"  {each.name}: {_scalar(getattr(section, each.name))}"
            about = origins.get(f"{name}.{each.name}", "")
            meaning = each.metadata.get("meaning", "")
            lines.append(f"{stated:<44} # {about}{'; ' if about and meaning else ''}{meaning}".rstrip(" #"))
    return "\n".join(lines[1:]) + "\n"


def _scalar(value: Any) -> str:
    return yaml.safe_dump(plain(value), default_flow_style=True, width=10**6).replace("\n...", "").strip()
