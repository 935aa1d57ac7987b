"""Write what is generated from settings, options and quantities: parts of pages, and the schema of configurations.

python docs/reference.py            # a test compares the committed pages with the output
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from evidence import __main__ as evidence  # noqa: E402
from ipu_packed_bert import __main__ as packed_bert  # noqa: E402
from ipu_packed_bert.settings.config import Config, settings_of  # noqa: E402
from ipu_packed_bert.settings.declare import shown  # noqa: E402
from ipu_packed_bert.settings.finetuning import TASKS  # noqa: E402
from pack_data.lengths import packer_command  # noqa: E402
from pack_data.packers import PACKERS  # noqa: E402
from pack_data.reading.declare import Setting  # noqa: E402
from pack_data.store.quantities import QUANTITIES  # noqa: E402

PAGES = ("configuration.md", "commands.md", "glossary.md")
SCHEMA = ROOT / "configs" / "schema.json"

# ---- settings ------------------------------------------------------------------------------------------

_TYPES = {int: "whole number", float: "number", bool: "true or false", str: "text"}


class Section(NamedTuple):
    """A table of settings."""

    meaning: str
    settings: List[Setting]


def setting_sections() -> Dict[str, Dict[str, Section]]:
    """Return the sections of pre-training, and those of fine-tuning with its own settings and its own defaults."""
    pretraining = settings_of("pretrain")
    tasks: Dict[type, List[str]] = {}  # tasks with the same settings have one heading
    for name, task in TASKS.items():
        tasks.setdefault(task.settings, []).append(name)
    fine_tuning: Dict[str, Section] = {}
    for kind, names in tasks.items():
        own = [
            setting
            for key, setting in settings_of("finetune", kind).items()
            if key.startswith("task.")
        ]
        fine_tuning[f"task ({', '.join(names)})"] = Section(_doc(kind), own)
    others = {
        key: setting
        for key, setting in settings_of("finetune").items()
        if not key.startswith("task.")
        and (key not in pretraining or pretraining[key].default != setting.default)
    }
    return {
        "pre-training": _by_section(pretraining),
        "fine-tuning": {**fine_tuning, **_by_section(others)},
    }


def _by_section(settings: Mapping[str, Setting]) -> Dict[str, Section]:
    sections: Dict[str, Section] = {}
    for key, setting in settings.items():
        section = key.partition(".")[0]
        if section not in sections:
            sections[section] = Section(_doc(type(getattr(Config(), setting.attribute))), [])
        sections[section].settings.append(setting)
    return sections


def _doc(kind: type) -> str:
    """Return the docstring of a dataclass; one without a docstring gets its signature as one."""
    text = inspect.cleandoc(kind.__doc__ or "")
    return "" if text.startswith(f"{kind.__name__}(") else text


def without_meaning(sections: Mapping[str, Section]) -> List[str]:
    """Return the settings without a meaning, and the sections without a docstring of their own."""
    missing = []
    for name, section in sections.items():
        missing += [f"{name}.{setting.name}" for setting in section.settings if not setting.meaning]
        if not section.meaning:
            missing.append(name)
    return missing


def settings_tables(sections: Mapping[str, Section]) -> str:
    """Return a Markdown heading and table for each section; raise ValueError if a setting has no meaning."""
    missing = without_meaning(sections)
    if missing:
        raise ValueError(f"settings without a meaning: {', '.join(missing)}")
    lines: List[str] = []
    for name, section in sections.items():
        lines += ["", f"### {name}", "", section.meaning.replace("``", "`"), ""]
        lines += ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
        for setting in section.settings:
            cells = [
                f"`{setting.name}`",
                _type(setting.kind, setting.rule),
                f"`{shown(setting.default)}`",
            ]
            lines.append("| " + " | ".join([*cells, setting.meaning.replace("|", "\\|")]) + " |")
    return "\n".join(lines) + "\n"


def _type(kind: Any, rule: Any) -> str:
    """Describe the type and range of a setting."""
    arguments = getattr(kind, "__args__", ())
    null = " or null" if type(None) in arguments else ""
    if arguments[:2] == (int, str):
        number = _type(int, rule._replace(choices=()))
        return " or ".join([number, *map("`{}`".format, rule.choices)]) + null
    if null:
        kind = arguments[0]
        arguments = getattr(kind, "__args__", ())
    if arguments and bool not in arguments:
        return f"list: {_type(arguments[0], rule)}{null}"
    if rule.choices:
        return ", ".join(f"`{choice}`" for choice in rule.choices) + null
    bounds = [
        ("from", rule.minimum),
        ("above", rule.above),
        ("to", rule.maximum),
        ("below", rule.below),
    ]
    words = [f"{word} {bound:,}" for word, bound in bounds if bound is not None]
    return " ".join([_TYPES[kind], *words]) + null


# ---- schema -------------------------------------------------------------------------------------------

_JSON_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}


def configuration_schema() -> Dict[str, Any]:
    """Return the JSON schema of a configuration file, which editors use to check and complete it."""
    by_key: Dict[str, List[Setting]] = {}
    kinds = [task.settings for task in TASKS.values()]
    for settings in (settings_of("pretrain"), *(settings_of("finetune", kind) for kind in kinds)):
        for key, setting in settings.items():
            by_key.setdefault(key, []).append(setting)
    sections: Dict[str, Any] = {}
    for key, same in sorted(by_key.items()):
        section, _, name = key.partition(".")
        schema = {"description": same[0].meaning, **_schema_of(same[0].kind, same[0].rule)}
        if all(setting.default == same[0].default for setting in same):
            schema["default"] = json.loads(json.dumps(same[0].default))
        empty = {"type": "object", "additionalProperties": False, "properties": {}}
        sections.setdefault(section, empty)["properties"][name] = schema
    several = {"type": "array", "items": {"type": "string"}}
    extends = {"description": "configurations whose settings this file changes"}
    extends["anyOf"] = [{"type": "string"}, several]
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Configuration of packed-bert",
        "type": "object",
        "additionalProperties": False,
        "properties": {"extends": extends, **sections, "without_ipus": {"$ref": "#"}},
    }


def _schema_of(kind: Any, rule: Any) -> Dict[str, Any]:
    """Return the schema of the values of a setting."""
    arguments = getattr(kind, "__args__", ())
    if arguments[:2] == (int, str):
        number = _schema_of(int, rule._replace(choices=()))
        null = [{"type": "null"}] if type(None) in arguments else []
        return {"anyOf": [{"enum": list(rule.choices)}, number, *null]}
    if type(None) in arguments:
        return {"anyOf": [_schema_of(arguments[0], rule), {"type": "null"}]}
    if arguments:
        return {"type": "array", "items": _schema_of(arguments[0], rule)}
    if rule.choices:
        choices = {"enum": list(rule.choices)}
        pattern = {"type": "string", "pattern": f"^({rule.pattern})$"}
        return {"anyOf": [choices, pattern]} if rule.pattern else choices
    bounds = {
        "minimum": rule.minimum,
        "exclusiveMinimum": rule.above,
        "maximum": rule.maximum,
        "exclusiveMaximum": rule.below,
    }
    return {
        "type": _JSON_TYPES[kind],
        **{name: bound for name, bound in bounds.items() if bound is not None},
    }


def schema_text() -> str:
    """Return the content of configs/schema.json."""
    return json.dumps(configuration_schema(), indent=1) + "\n"


# ---- commands ------------------------------------------------------------------------------------------


# Commands that are neither one of packed-bert nor a packer.
_MODULES = ("evidence.figures",)
_EXAMPLES = ROOT / "examples"


def help_of(typed: str, main: Any, *words: str) -> str:
    """Return the help of a command, with the options that only --help-all shows, in the width of a page."""
    out = io.StringIO()
    first = typed.split()[0 if main is packed_bert.main else -1]
    environment = mock.patch.dict("os.environ", {"COLUMNS": "120", "NO_COLOR": "1"})
    with mock.patch.object(sys, "argv", [first, *words]), environment, contextlib.redirect_stdout(
        out
    ):
        for option in ("--help", "--help-all"):
            if option == "--help" or "--help-all" in out.getvalue():
                out.seek(out.truncate(0))
                with contextlib.suppress(SystemExit):
                    main([*words, option])
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def options_page() -> str:
    """Return the help of every command, experiment and example in Markdown, with a heading for each."""
    commands = {f"packed-bert {name}": (packed_bert.main, name) for name in packed_bert.COMMANDS}
    rows = {"packed-bert pack SOURCE --rows": (packed_bert.main, "pack", "--rows", "rows.npy")}
    experiments = {
        f"python -m evidence {name}": (evidence.main, name) for name in evidence.EXPERIMENTS
    }
    packers = {
        f"python -m pack_data.{name}": (partial(packer_command.main, name),) for name in PACKERS
    }
    alone = {f"python -m {name}": (importlib.import_module(name).main,) for name in _MODULES}
    if str(_EXAMPLES) not in sys.path:
        # Examples import each other.
        sys.path.append(str(_EXAMPLES))
    scripts = ("encoder_on_cpu", "own_text", "plain_loop", "pod16_walkthrough")
    examples = {
        f"python examples/{name}.py": (importlib.import_module(name).main,) for name in scripts
    }
    parts = []
    for name, call in {**commands, **rows, **experiments, **packers, **alone, **examples}.items():
        parts.append(f"## {name}\n\n```text\n{help_of(name, *call)}```\n")
    return "\n".join(parts)


# ---- quantities ----------------------------------------------------------------------------------------


def quantities_table() -> str:
    """Return the table of quantities in Markdown."""
    lines = ["| quantity | in JSON | unit | formula |", "| --- | --- | --- | --- |"]
    for key, quantity in QUANTITIES.items():
        formula = quantity.formula
        if formula != "counted":
            formula = f"`{formula}`"
        lines.append(f"| {quantity.name} | `{key}` | {quantity.unit} | {formula} |")
    return "\n".join(lines) + "\n"


# ---- pages ------------------------------------------------------------------------------------------

_PART = re.compile(r"(<!-- generated: (.+?) -->\n).*?(\n<!-- end of generated -->)", re.DOTALL)


def page_of(text: str) -> str:
    """Return a page with its generated parts renewed."""
    return _PART.sub(
        lambda part: part[1] + "\n" + _part(part[2]).strip("\n") + "\n" + part[3], text
    )


def _part(what: str) -> str:
    kind, _, name = what.partition(" of ")
    if kind == "settings":
        return settings_tables(setting_sections()[name])
    if kind == "quantities":
        return quantities_table()
    return options_page()


def main() -> None:
    for name in PAGES:
        page = ROOT / "docs" / name
        text = page.read_text(encoding="utf-8")
        if page_of(text) != text:
            page.write_text(page_of(text), encoding="utf-8")
            print(f"written: {page}")
    if not SCHEMA.exists() or SCHEMA.read_text(encoding="utf-8") != schema_text():
        SCHEMA.write_text(schema_text(), encoding="utf-8")
        print(f"written: {SCHEMA}")


if __name__ == "__main__":
    main()
