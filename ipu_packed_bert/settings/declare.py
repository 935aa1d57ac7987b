"""The settings of configurations by full name, section.name, and their values in types and spelling of YAML.

`pack_data.reading.declare` declares them.  Loads neither torch nor poptorch.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, Sequence, Tuple

from pack_data.reading.declare import AUTO, Setting, settings_in


class Chosen(int):
    """The number that `auto` stands for in one run; files and comparisons keep the word."""


def declared(parts: Sequence[Tuple[str, str, type]], command: str) -> Dict[str, Setting]:
    """Return the settings of ``command`` by full name, section.name.

    Args:
        parts: (attribute of the configuration, section of the file, dataclass); two may share a section.
        command: ``"pretrain"`` or ``"finetune"``.
    """
    settings = {}
    for attribute, section, part in parts:
        for name, declaration in settings_in(part).items():
            if declaration.of in ("", command):
                default = declaration.default_of.get(command, declaration.default)
                settings[f"{section}.{name}"] = declaration._replace(
                    attribute=attribute, default=default
                )
    return settings


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
