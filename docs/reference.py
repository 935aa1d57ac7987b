"""What the pages of reference are made of: settings, options, public names, docstrings as Sphinx reads them."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple, get_type_hints

from evidence import __main__ as evidence
from ipu_packed_bert import __main__ as packed_bert
from ipu_packed_bert.settings import finetuning as fine_tuning
from ipu_packed_bert.settings import pretraining as config
from ipu_packed_bert.settings.reader import shown
from pack_data.packers import PACKERS

# The public surface: the names in __all__ of these.
PACKAGES = (
    "pack_data",
    "pack_data.batching",
    "pack_data.stream",
    "ipu_packed_bert",
    "ipu_packed_bert.padding_free",
)

# ------------------------------------------------------------------------------------------------------------ settings

_TYPES = {int: "whole number", float: "number", bool: "true or false", str: "text"}


def setting_sections() -> Dict[str, Mapping[str, type]]:
    """The sections of a configuration, of pre-training and of fine-tuning; what both have is in the first alone."""
    tasks = {f"task ({name})": kind for name, kind in fine_tuning.SETTINGS_OF.items()}
    own = {name: kind for name, kind in fine_tuning.SECTIONS.items() if kind not in config.SECTIONS.values()}
    return {"pre-training": config.SECTIONS, "fine-tuning": {**_joined(tasks), **own}}


def _joined(tasks: Mapping[str, type]) -> Dict[str, type]:
    """Tasks that have the same settings under one heading."""
    names: Dict[type, List[str]] = {}
    for name, kind in tasks.items():
        names.setdefault(kind, []).append(name[len("task (") : -1])
    return {f"task ({', '.join(each)})": kind for kind, each in names.items()}


def without_meaning(sections: Mapping[str, type]) -> List[str]:
    """The settings that do not say what they mean, and the sections without a docstring."""
    return [
        f"{section}.{each.name}"
        for section, kind in sections.items()
        for each in dataclasses.fields(kind)
        if not each.metadata.get("meaning")
    ] + [section for section, kind in sections.items() if not _own_doc(kind)]


def settings_tables(sections: Mapping[str, type]) -> str:
    """A heading and a table for each section, in Markdown; ValueError where a setting has no meaning."""
    missing = without_meaning(sections)
    if missing:
        raise ValueError(f"settings without a meaning: {', '.join(missing)}")
    lines: List[str] = []
    for section, kind in sections.items():
        types = get_type_hints(kind)
        lines += ["", f"### {section}", "", inspect.cleandoc(kind.__doc__ or "").replace("``", "`"), ""]
        lines += ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
        for each in dataclasses.fields(kind):
            cells = [f"`{each.name}`", _type(types[each.name], each.metadata["rule"]), f"`{shown(each.default)}`"]
            lines.append("| " + " | ".join([*cells, each.metadata["meaning"].replace("|", "\\|")]) + " |")
    return "\n".join(lines) + "\n"


def _type(kind: Any, rule: Any) -> str:
    """A setting's type and range in words."""
    arguments = getattr(kind, "__args__", ())
    null = " or null" if type(None) in arguments else ""
    if arguments and not null and bool not in arguments:
        return f"list: {_type(arguments[0], rule)}"
    if rule.choices:
        return ", ".join(f"`{choice}`" for choice in rule.choices) + null
    bounds = [("from", rule.minimum), ("above", rule.above), ("to", rule.maximum), ("below", rule.below)]
    words = [f"{word} {bound:,}" for word, bound in bounds if bound is not None]
    return " ".join([_TYPES[arguments[0] if null else kind], *words]) + null


# ------------------------------------------------------------------------------------------------------------ commands


# Commands that are neither one of packed-bert nor a packer.
_MODULES = (
    "pack_data.benchmark.assignment",
    "ipu_packed_bert.benchmarks.padding_free",
    "evidence.figures",
)
_EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def help_of(main: Any, *words: str) -> str:
    """All that a command says of its options."""
    out = io.StringIO()
    for option in ("--help-all", "--help"):  # the second for a parser that is Python's own
        if not out.getvalue():
            refused = contextlib.suppress(SystemExit, ValueError)  # argparse leaves by the first
            with refused, contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
                main([*words, option])
    return out.getvalue()


def options_page() -> str:
    """The help of every command, experiment and example in Markdown, a heading each."""
    commands = {f"packed-bert {name}": (packed_bert.main, name) for name in packed_bert.COMMANDS}
    experiments = {f"python -m evidence {name}": (evidence.main, name) for name in evidence.EXPERIMENTS}
    modules = [*(f"pack_data.{name}" for name in PACKERS), *_MODULES]
    alone = {f"python -m {name}": (importlib.import_module(name).main,) for name in modules}
    sys.path.append(str(_EXAMPLES))  # as for a script: they import each other
    scripts = ("own_text", "plain_loop", "pod16_walkthrough")
    examples = {f"python examples/{name}.py": (importlib.import_module(name).main,) for name in scripts}
    found = {**commands, **experiments, **alone, **examples}
    return "\n".join(f"## {name}\n\n```text\n{help_of(*call)}```\n" for name, call in found.items())


# -------------------------------------------------------------------------------------------------------- public names


def _own_doc(value: Any) -> str:
    """Its docstring, without those that classes and dataclasses have from elsewhere."""
    text = inspect.getdoc(value) or ""
    if inspect.isclass(value) and ("__doc__" not in vars(value) or text.startswith(f"{value.__name__}(")):
        return ""
    return text


def _members(kind: type) -> Iterator[Tuple[str, Any]]:
    """The public methods and properties that a class defines itself."""
    for name, value in vars(kind).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not name.startswith("_") and inspect.isfunction(function):
            yield name, function


def undocumented(package: str) -> List[str]:
    """The public names of a package, and the public methods of its classes, that have no docstring."""
    module = importlib.import_module(package)
    missing = []
    for name in module.__all__:
        value = getattr(module, name)
        if callable(value) and not _own_doc(value):
            missing.append(f"{package}.{name}")
        if inspect.isclass(value):
            missing += [f"{package}.{name}.{each}" for each, found in _members(value) if not inspect.getdoc(found)]
    return missing


def names_page(package: str) -> str:
    """The public names of a package in Markdown, for autodoc; ValueError where one has no docstring."""
    missing = undocumented(package)
    if missing:
        raise ValueError(f"public names without a docstring: {', '.join(missing)}")
    module = importlib.import_module(package)
    lines = ["```{eval-rst}", f".. py:module:: {package}", ""]
    for name in sorted(module.__all__, key=str.lower):
        value = getattr(module, name)
        if getattr(importlib.import_module("pack_data"), name, None) is value and package != "pack_data":
            continue  # it stands there
        if not callable(value):  # a table: its keys
            lines += [f".. py:data:: {package}.{name}", "", f"   {', '.join(f'``{each}``' for each in value)}", ""]
            continue
        kind = "autoclass" if inspect.isclass(value) else "autofunction"
        lines += [f".. {kind}:: {package}.{name}"]
        if inspect.isclass(value):
            members = [each for each, _ in _members(value)]
            lines += [f"   :members: {', '.join(members)}"] if members else []
            lines += ["   :member-order: bysource"]
        lines += [""]
    return "\n".join([*lines, "```", ""])


def fields_of(kind: type) -> List[Tuple[str, str, str]]:
    """(name, type, what the comment behind it says) of a dataclass or named tuple, as its source has them."""
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):
        return []
    found, lines = [], source.splitlines()
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            last = node.end_lineno or node.lineno
            comment = lines[last - 1][node.end_col_offset or 0 :].partition("#")[2].strip()
            found.append((node.target.id, ast.unparse(node.annotation), comment))
    return found


# ---------------------------------------------------------------------------------------------------------- docstrings

_SPAN = re.compile(r"(?::[a-z]+:)?(`+)(.+?)\1")


def _text(line: str) -> str:
    """A line as reStructuredText in which only code is marked."""
    parts, end = [], 0
    for span in _SPAN.finditer(line):
        parts += [_plain(line[end : span.start()]), f"``{span.group(2).lstrip('~')}``"]
        # Text right behind a span would end its mark-up.
        following = line[span.end() : span.end() + 1]
        parts += ["\\ "] if following and (following.isalnum() or following in "_`") else []
        end = span.end()
    return "".join([*parts, _plain(line[end:])])


def _plain(text: str) -> str:
    return re.sub(r"([*|\\]|_(?=\W|$))", r"\\\1", text)


def as_rst(lines: Sequence[str], parameters: Sequence[str] = ()) -> List[str]:
    """A docstring of this project as reStructuredText: code blocks, lists, and a list item for each parameter."""
    out: List[str] = []
    in_code = in_list = in_item = False
    for number, line in enumerate(lines):
        before = lines[number - 1] if number else ""
        if not line.strip():
            out.append("")
            in_item = False
            continue
        indented = line.startswith("    ")
        if indented and (in_code or not in_list):
            if not in_code:
                out += ["", "::", ""]
            in_code = True
            out.append(line)
            continue
        in_code = False
        in_list = bool(re.match(r"\s*- ", line)) or (in_list and line.startswith("  "))
        parameter = re.match(r"(\w+(?:, \w+)*) ?: (.*)", line)
        if re.match(r"\s*- ", line):
            out += [""] * bool(before.strip() and not re.match(r"\s*- |\s{2}", before)) + [_text(line)]
        elif parameter and set(parameter.group(1).split(", ")) <= set(parameters):
            out += ["", f"- ``{parameter.group(1)}``: {_text(parameter.group(2))}"]
            in_item = True
        elif line.startswith("Raises "):
            out += ["", _text(line)]
            in_item = False
        else:
            out.append(("  " if in_item and not line.startswith("  ") else "") + _text(line))
    return out
