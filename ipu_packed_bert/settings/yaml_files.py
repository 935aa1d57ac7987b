"""Reading YAML files of settings safely, with the files that they extend.  Loads neither torch nor poptorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List, Optional, Set, Union

import yaml

from ipu_packed_bert.settings.shipped import FOLDER, derived_tree
from pack_data.cli.command import Problems
from pack_data.reading.fields import MOST_DIGITS, is_plain_name, named, one_line
from pack_data.reading.files import read_regular

_MAX_BYTES = 1 << 20  # a configuration has a few kB
# Keys that `<<` may merge into one section: aliases of aliases may stand for millions.
_MAX_MERGED_KEYS = 10_000
_MAX_EXTENDS = 8  # files that extend one another, in a chain


class ConfigError(Problems):
    """A configuration that cannot be used: all its problems, each with its setting, value and rule."""


class _YamlLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which also refuses duplicate keys, recursion, long numbers and huge merges."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        return super().construct_object(
            node, deep=True
        )  # deep: an alias inside its own anchor is then refused

    def construct_yaml_int(self, node: Any) -> Any:
        if len(node.value) > MOST_DIGITS:  # Python 3.8 takes seconds to convert a million digits
            raise yaml.constructor.ConstructorError(
                None, None, "a number with too many digits", node.start_mark
            )
        return super().construct_yaml_int(node)

    def flatten_mapping(self, node: Any) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MAX_MERGED_KEYS:
            raise yaml.constructor.ConstructorError(
                None, None, "a section with too many keys", node.start_mark
            )

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys: Set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if key in keys:
                problem = f"{named(key)} stands twice in one section"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep=deep)


_YamlLoader.add_constructor("tag:yaml.org,2002:int", _YamlLoader.construct_yaml_int)


def load_yaml(path: Union[str, Path], *, levels: int = _MAX_EXTENDS) -> Any:
    """Read a YAML file and merge it, section by section, into the configurations that its `extends` names.

    `extends: NAME`, or a list of names, of which a later one wins: each is a file in the same directory or a
    configuration that comes with the program.

    Args:
        path: the file, or the path of a derived configuration of the program.
        levels: how many files may still be extended in a chain.

    Raises:
        ConfigError: in one line, if a file cannot be read.
    """
    tree = derived_tree(path)
    if tree is None:
        try:
            text = read_regular(path, way_out="give a file of settings", most_bytes=_MAX_BYTES)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        tree = parse_yaml(text, path)
    if not isinstance(tree, dict) or "extends" not in tree:
        return tree

    settings = {section: values for section, values in tree.items() if section != "extends"}
    names = tree["extends"]
    bases: List[Any] = []
    for name in names if isinstance(names, list) and names else [names]:
        base = _base_of(name, path)
        if base is None:
            raise ConfigError(
                f"{path}: extends is {named(name)}; must name a configuration in the same directory, or one that comes "
                "with the program, without .yml"
            )
        if not levels:
            raise ConfigError(
                f"{path}: extends {name}; too many files extend one another, or they form a circle"
            )
        bases.append(load_yaml(base, levels=levels - 1))
    merged: Any = {}
    for tree in (*bases, settings):
        merged = _merged(merged, tree)
    return merged


def _base_of(name: Any, path: Union[str, Path]) -> Optional[Path]:
    """Return the file of a configuration that ``path`` extends, None if there is none."""
    if not isinstance(name, str) or not is_plain_name(name):
        return None
    sibling = Path(path).with_name(f"{name}.yml")
    if sibling.is_file():
        return sibling
    shipped = FOLDER / f"{name}.yml"
    return shipped if shipped.is_file() or derived_tree(shipped) is not None else None


def _merged(base: Any, tree: Any) -> Any:
    """Return ``base`` with the values of ``tree`` in their places, section by section."""
    if not isinstance(base, dict) or not isinstance(tree, dict):
        return tree
    return {**base, **{key: _merged(base.get(key), value) for key, value in tree.items()}}


def parse_yaml(text: Union[str, bytes], source: Union[str, Path]) -> Any:
    """Parse a YAML text to plain values; raise ConfigError in one line, which names ``source``, if it is not valid."""
    try:
        if len(text) > _MAX_BYTES:
            raise ValueError(f"more than {_MAX_BYTES:,} bytes, too large for settings")
        return yaml.load(text if isinstance(text, str) else text.decode("utf-8"), _YamlLoader)
    except RecursionError:
        problem = "it is nested too deeply"
    # PyYAML's own errors, and those of its constructors for values that its patterns accept: 2001-13-45, !!int ''.
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
