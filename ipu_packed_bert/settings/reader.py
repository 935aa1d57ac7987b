"""Reading settings from YAML trees and `--set` texts, with all problems in one message.

Settings and the rules between them are declared elsewhere (`pack_data.reading.declare`).
Loads neither torch nor poptorch.

    reader = SettingsReader(declared([("batch", "batch", Batch)], "pretrain"), "configs/a.yml")
    reader.read(load_yaml("configs/a.yml"), FILE)
    reader.override(parse_override("batch.micro_batch=4"))
    reader.value("batch.micro_batch")        # 4
    reader.origins["batch.micro_batch"]      # "--set"
    reader.refuse_problems()
"""

from __future__ import annotations

import contextlib
import difflib
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Union

from ipu_packed_bert.settings.declare import shown
from ipu_packed_bert.settings.yaml_files import ConfigError, parse_yaml
from pack_data.reading import fields as decoding
from pack_data.reading.declare import Setting, typed_value
from pack_data.reading.declare import setting as setting  # users' tasks import it from here
from pack_data.reading.fields import named
from pack_data.reading.words import settings_by_meaning

# Origins of values. The origin of a setting that nobody stated begins with DEFAULT.
DEFAULT = "default"
FILE = "file"
CHECKPOINT = "checkpoint"  # the configuration of the run that is resumed
OVERRIDE = "--set"

_SHAPE = "one `key: value` per line"


class Override(NamedTuple):
    """The text `section.name=value` of a command line, parsed once."""

    text: str
    key: str
    value: Any = None
    problem: str = ""  # the reason why the text states no setting


def parse_override(text: Union[str, Override]) -> Override:
    """Parse the text of a --set, whose value is YAML, unless it is parsed; a malformed text has a problem."""
    if isinstance(text, Override):
        return text
    key, _, value_text = text.partition("=")
    rule = "must be section.key=value; write null for no value"
    if value_text.strip():
        rule = "the value is not valid YAML"
        with contextlib.suppress(ConfigError):
            return Override(text, key.strip(), parse_yaml(value_text, OVERRIDE))
    return Override(text, key.strip(), problem=f"{OVERRIDE} {named(text)}: {rule}")


def peek(key: str, tree: Any, overrides: Iterable[Override]) -> Any:
    """Return the unchecked value of a setting before its declaration is known, None if nobody states it."""
    section, _, name = key.partition(".")
    settings = tree.get(section) if isinstance(tree, Mapping) else None
    value = settings.get(name) if isinstance(settings, Mapping) else None
    for override in overrides:
        if override.key == key and not override.problem:
            value = override.value
    return value


class SettingsReader:
    """Values of settings from several sources; later ones override earlier ones.

    Problems are collected; :meth:`refuse_problems` raises all of them at once.
    """

    def __init__(
        self,
        settings: Mapping[str, Setting],
        path: str,
        *,
        fixed: Optional[Mapping[str, Any]] = None,
    ) -> None:
        """Start without values.

        Args:
            settings: the declared settings, by full name.
            path: the file, for messages.
            fixed: the only valid values of former settings, by full name.
        """
        self.settings = settings
        self.path = path
        self.values: Dict[str, Any] = {}
        self.origins: Dict[str, str] = {}
        self.problems: List[str] = []
        self.broken: Set[str] = set()  # settings with a problem; rules about them are skipped
        self._fixed = fixed or {}
        self._prefix = ""
        self._blocks: List[str] = []

    def block(self, name: str) -> SettingsReader:
        """Return a reader of the same settings in a block; it shares the list of problems with this reader."""
        self._blocks.append(name)
        block = SettingsReader(self.settings, self.path, fixed=self._fixed)
        block.problems = self.problems
        block.broken = self.broken
        block._prefix = f"{name}."
        return block

    def read(self, tree: Any, origin: str) -> None:
        """Read the values of nested settings, {section: {name: value}}."""
        source = f"{origin} " if origin == OVERRIDE else ""
        if tree is None:
            return
        if not isinstance(tree, Mapping):
            subject = self._prefix.rstrip(".") or "the file"
            self.problems.append(
                f"{source}{subject} is {decoding.shown(tree)}; must have sections of settings, {_SHAPE}"
            )
            return
        for section, values in tree.items():
            if not self._keys_of(section):
                self._report_unknown(source, named(section))
            elif isinstance(values, Mapping):
                for name, raw in values.items():
                    self._take(f"{section}.{named(name)}", raw, origin, source)
            elif values is not None:  # None: a section with only comments
                self.problems.append(
                    f"{source}{self._prefix}{section} is {decoding.shown(values)}; must have settings, {_SHAPE}"
                )
                self.broken.update(self._keys_of(section))

    def override(self, override: Override) -> None:
        """Read the value of a --set, or report its problem."""
        if override.problem:
            self.problems.append(override.problem)
            return
        section, _, name = override.key.partition(".")
        values = {name: override.value} if name else override.value
        self.read({section: values}, OVERRIDE)

    def derive(self, key: str, value: Any, source: str) -> None:
        """Set a default that follows from the setting ``source``, unless the setting has a value."""
        if key in self.values:
            return
        try:
            self.settings[key].checked(value)
        except ValueError as wrong:
            self.problems.append(f"{self._prefix}{key} is {shown(value)}, from {source}; {wrong}")
            self.broken.add(key)
            return
        self.values[key] = value
        self.origins[key] = f"{DEFAULT}, from {source}"

    def stated(self, key: str) -> bool:
        """Return True if a file or a `--set` states the setting."""
        return key in self.values and not self.origins[key].startswith(DEFAULT)

    def value(self, key: str) -> Any:
        """Return the value of a setting, or its default."""
        return self.values.get(key, self.settings[key].default)

    def refuse_problems(self) -> None:
        """Raise ConfigError with all problems so far, if there are any."""
        if self.problems:
            raise ConfigError(problems_message(self.path, self.problems))

    def _keys_of(self, section: Any) -> List[str]:
        return [key for key in self.settings if key.partition(".")[0] == section]

    def _take(self, key: str, raw: Any, origin: str, source: str) -> None:
        """Read the value of one setting, or report its problem."""
        if key in self._fixed:
            self._check_fixed(key, raw, source)
            return
        if key not in self.settings:
            self._report_unknown(source, key)
            return
        setting = self.settings[key]
        try:
            self.values[key] = setting.checked(raw)
            self.origins[key] = origin
        except ValueError as wrong:
            self.problems.append(f"{source}{self._prefix}{key} is {decoding.shown(raw)}; {wrong}")
            self.broken.add(key)

    def _check_fixed(self, key: str, raw: Any, source: str) -> None:
        """Report a former setting unless it has its only valid value."""
        fixed = self._fixed[key]
        value = None
        with contextlib.suppress(ValueError):
            value = typed_value(raw, type(fixed))
        if value != fixed:
            self.problems.append(
                f"{source}{self._prefix}{key} is {decoding.shown(raw)}; it is no longer a setting and is fixed at "
                f"{shown(fixed)}: remove it"
            )

    def _report_unknown(self, source: str, key: str) -> None:
        """Report a name that is not a setting, with similar names."""
        near = suggestions(key, list(self.settings), self._blocks)
        hint = ""
        if near:
            names = " or ".join(self._prefix + name for name in near)
            hint = f"; did you mean {names}?"
        self.problems.append(f"{source}{self._prefix}{key} is not a setting{hint}")
        for name in near:
            self.broken.update(self._keys_of(name) or [name])


def suggestions(key: str, known: Sequence[str], blocks: Sequence[str] = ()) -> List[str]:
    """Return up to three names that resemble an unknown one, the best first.

    Args:
        key: the unknown name of a section, a block or a setting.
        known: full names of all settings.
        blocks: names of the blocks.
    """
    name = key.rpartition(".")[2]
    same_name = [setting for setting in known if setting.rpartition(".")[2] == name]
    if same_name:  # in another section
        return same_name[:3]
    same_meaning = [setting for setting in settings_by_meaning(name) if setting in known]
    if same_meaning:
        return same_meaning[:1]
    if "." in key:
        return difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    sections = dict.fromkeys(setting.partition(".")[0] for setting in known)
    near = difflib.get_close_matches(key, [*sections, *blocks], n=1, cutoff=0.6)
    if near:
        return near
    by_name = {setting.rpartition(".")[2]: setting for setting in known}
    similar = difflib.get_close_matches(name, list(by_name), n=1, cutoff=0.8)
    return [by_name[close] for close in similar]


def problems_message(path: str, problems: Sequence[str]) -> str:
    """Return one line for a single problem, or a heading and one line for each problem."""
    if len(problems) == 1:
        return f"{path}: {problems[0]}"
    return "\n  ".join([f"{path}: {len(problems)} problems", *problems])
