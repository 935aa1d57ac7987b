"""Reading YAML files of settings safely, with the files that they extend.  Loads neither torch nor poptorch."""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path
from typing import Any, List, Optional, Set, Union

import yaml

from ipu_packed_bert.settings.shipped import FOLDER, derived_tree
from pack_data.reading.fields import MOST_DIGITS, is_plain_name, named, one_line
from pack_data.reading.files import read_regular
from pack_data.reading.words import Problems

_MAX_BYTES = 1 << 20  # a configuration has a few kB
# Keys that `<<` merges into one section; an alias of an alias may stand for millions.
_MAX_MERGED_KEYS = 10_000
_MAX_EXTENDS = 8  # files of a chain in which each extends the next


class ConfigError(Problems):
    """A configuration that cannot be used, with all its problems: setting, value and rule."""


class _YamlLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which also refuses duplicate keys, recursion, long numbers and huge merges."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Construct a value with deep=True, which refuses an alias inside its own anchor."""
        return super().construct_object(node, deep=True)

    def construct_yaml_int(self, node: Any) -> Any:
        """Construct a number; Python 3.8 takes seconds to convert a million digits."""
        if len(node.value) > MOST_DIGITS:
            raise _refusal("a number with too many digits", node)
        return super().construct_yaml_int(node)

    def flatten_mapping(self, node: Any) -> None:
        """Merge the keys of `<<`."""
        super().flatten_mapping(node)
        if len(node.value) > _MAX_MERGED_KEYS:
            raise _refusal("a section with too many keys", node)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Construct a section."""
        keys: Set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if key in keys:
                raise _refusal(f"{named(key)} is there twice in one section", key_node)
            keys.add(key)
        return super().construct_mapping(node, deep=deep)


def _refusal(problem: str, node: Any) -> Exception:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


_YamlLoader.add_constructor("tag:yaml.org,2002:int", _YamlLoader.construct_yaml_int)


def load_yaml(path: Union[str, Path], *, levels: int = _MAX_EXTENDS) -> Any:
    """Read a YAML file and merge it, section by section, into the configurations that its `extends` names.

    `extends` is a name or a list of names; later ones override earlier ones. Each name is that of a file in the same
    directory or of a configuration of the program, without .yml.

    Args:
        path: the file, or the path of a derived configuration of the program.
        levels: the number of files that may follow in a chain of `extends`.

    Raises:
        ConfigError: a file cannot be read or extended; the message has one line.
    """
    tree = own_tree(path)
    if not isinstance(tree, dict) or "extends" not in tree:
        return tree

    settings = {section: values for section, values in tree.items() if section != "extends"}
    names = tree["extends"]
    bases: List[Any] = []
    for name in names if isinstance(names, list) and names else [names]:
        base = _base_of(name, path)
        if base is None:
            raise ConfigError(
                f"{path}: extends is {named(name)}; must be the name of a configuration in the same directory or of "
                "the program, without .yml"
            )
        if not levels:
            raise ConfigError(
                f"{path}: extends {name}; the chain of files is a circle or has more than {_MAX_EXTENDS}; remove an "
                "extends"
            )
        bases.append(load_yaml(base, levels=levels - 1))
    merged: Any = {}
    for tree in (*bases, settings):
        merged = _merged(merged, tree)
    return merged


def own_tree(path: Union[str, Path]) -> Any:
    """Return what the file itself states, without what it extends. ConfigError if it cannot be read."""
    tree = derived_tree(path)
    if tree is not None:
        return tree
    try:
        text = read_regular(path, way_out="pass a file of settings", most_bytes=_MAX_BYTES)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return parse_yaml(text, path)


def _base_of(name: Any, path: Union[str, Path]) -> Optional[Path]:
    """Return the file of a configuration that ``path`` extends, None if there is no such configuration."""
    if not isinstance(name, str) or not is_plain_name(name):
        return None
    sibling = Path(path).with_name(f"{name}.yml")
    if sibling.is_file():
        return sibling
    shipped = FOLDER / f"{name}.yml"
    is_known = shipped.is_file() or derived_tree(shipped) is not None
    return shipped if is_known else None


def _merged(base: Any, tree: Any) -> Any:
    """Return ``base`` with the values of ``tree``, section by section."""
    if not isinstance(base, dict) or not isinstance(tree, dict):
        return tree
    merged = dict(base)
    for key, value in tree.items():
        merged[key] = _merged(base.get(key), value)
    return merged


@lru_cache(maxsize=32)
def _parsed(text: str) -> Any:
    """Parse a text once: one base is read again for each configuration that extends it."""
    return yaml.load(text, _YamlLoader)


def parse_yaml(text: Union[str, bytes], source: Union[str, Path]) -> Any:
    """Parse a YAML text to plain values.

    Args:
        text: the text.
        source: the file or option, for messages.

    Raises:
        ConfigError: the text is not valid; the message has one line.
    """
    try:
        if len(text) > _MAX_BYTES:
            raise ValueError(f"more than {_MAX_BYTES:,} bytes, too many for settings")
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return copy.deepcopy(_parsed(text))
    except RecursionError:
        problem = "it is nested too deeply"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = place + one_line(error.problem or error)
    # The errors of PyYAML, and those of its constructors for values that its patterns accept: 2001-13-45, !!int ''.
    except (
        yaml.YAMLError,
        ValueError,
        ArithmeticError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        problem = one_line(error)
    raise ConfigError(f"{source}: not valid YAML: {problem}")
