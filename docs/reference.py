"""The generated parts of docs/api.md, configuration.md and commands.md: public names, settings, options.

python docs/reference.py            # writes them; a test compares the pages with what this would write
"""

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
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from evidence import __main__ as evidence  # noqa: E402
from ipu_packed_bert import __main__ as packed_bert  # noqa: E402
from ipu_packed_bert.settings import finetuning as fine_tuning  # noqa: E402
from ipu_packed_bert.settings import pretraining as config  # noqa: E402
from ipu_packed_bert.settings.reader import shown  # noqa: E402
from pack_data.packers import PACKERS  # noqa: E402

# The public surface: the names in __all__ of these.
PACKAGES = (
    "pack_data",
    "pack_data.batching",
    "pack_data.stream",
    "ipu_packed_bert",
    "ipu_packed_bert.padding_free",
)

PAGES = ("api.md", "configuration.md", "commands.md")

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
    if null:
        kind = arguments[0]
        arguments = getattr(kind, "__args__", ())
    if arguments and bool not in arguments:
        return f"list: {_type(arguments[0], rule)}{null}"
    if rule.choices:
        return ", ".join(f"`{choice}`" for choice in rule.choices) + null
    bounds = [("from", rule.minimum), ("above", rule.above), ("to", rule.maximum), ("below", rule.below)]
    words = [f"{word} {bound:,}" for word, bound in bounds if bound is not None]
    return " ".join([_TYPES[kind], *words]) + null


# ------------------------------------------------------------------------------------------------------------ commands


# Commands that are neither one of packed-bert nor a packer.
_MODULES = (
    "evidence.benches.packing",
    "evidence.benches.assignment",
    "evidence.benches.batching",
    "evidence.benches.padding_free",
    "evidence.figures",
)
_EXAMPLES = ROOT / "examples"


def help_of(typed: str, main: Any, *words: str) -> str:
    """What a command prints where it is `typed`: with all its options, if it has some that --help leaves out.

    As wide as a page, and without colours, whatever the terminal.
    """
    out = io.StringIO()
    first = typed.split()[0 if main is packed_bert.main else -1]  # as the system would give it
    environment = mock.patch.dict("os.environ", {"COLUMNS": "120", "NO_COLOR": "1"})
    with mock.patch.object(sys, "argv", [first, *words]), environment, contextlib.redirect_stdout(out):
        for option in ("--help", "--help-all"):
            if option == "--help" or "--help-all" in out.getvalue():
                out.seek(out.truncate(0))
                with contextlib.suppress(SystemExit):  # argparse leaves by it
                    main([*words, option])
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def options_page() -> str:
    """The help of every command, experiment and example in Markdown, a heading each."""
    commands = {f"packed-bert {name}": (packed_bert.main, name) for name in packed_bert.COMMANDS}
    experiments = {f"python -m evidence {name}": (evidence.main, name) for name in evidence.EXPERIMENTS}
    modules = [*(f"pack_data.{name}" for name in PACKERS), *_MODULES]
    alone = {f"python -m {name}": (importlib.import_module(name).main,) for name in modules}
    if str(_EXAMPLES) not in sys.path:
        sys.path.append(str(_EXAMPLES))  # as for a script: they import each other
    scripts = ("own_text", "plain_loop", "pod16_walkthrough")
    examples = {f"python examples/{name}.py": (importlib.import_module(name).main,) for name in scripts}
    found = {**commands, **experiments, **alone, **examples}
    return "\n".join(f"## {name}\n\n```text\n{help_of(name, *call)}```\n" for name, call in found.items())


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
    """The public names of a package in Markdown, a heading each; ValueError where one has no docstring."""
    missing = undocumented(package)
    if missing:
        raise ValueError(f"public names without a docstring: {', '.join(missing)}")
    module, lines = importlib.import_module(package), [""]
    for name in sorted(module.__all__, key=str.lower):
        value = getattr(module, name)
        if getattr(importlib.import_module("pack_data"), name, None) is value and package != "pack_data":
            continue  # it stands there
        lines += [f"### {package}.{name}", ""]
        if not callable(value):  # a table: its keys
            lines += [", ".join(f"`{each}`" for each in value), ""]
            continue
        lines += [*_code(name, value), *as_markdown(_own_doc(value).splitlines(), _parameters(value)), ""]
        if inspect.isclass(value):
            fields = [f"- `{field}` ({kind}): {_text(comment)}" for field, kind, comment in fields_of(value) if comment]
            lines += [*fields, ""] if fields else []
            for each, function in _members(value):
                is_property = isinstance(vars(value)[each], property)
                lines += [*_code(each, None if is_property else function)]
                lines += [*as_markdown((inspect.getdoc(function) or "").splitlines(), _parameters(function)), ""]
    return "\n".join(lines)


def _code(name: str, value: Any) -> List[str]:
    """A line of code with a name and, where it can be called, the parameters that its source gives it."""
    function = value if inspect.isfunction(value) else vars(value).get("__init__") if inspect.isclass(value) else None
    parameters = ""
    if inspect.isfunction(function) and "<" not in function.__code__.co_filename:  # not of a dataclass
        given = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0].args  # type: ignore[attr-defined]
        if given.args and given.args[0].arg in ("self", "cls"):
            del given.args[0]
        parameters = f"({ast.unparse(given)})"
    return ["```text", *textwrap.wrap(name + parameters, 110, subsequent_indent="    "), "```", ""]


def _parameters(value: Any) -> List[str]:
    try:
        return list(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return []


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
    """A line as Markdown in which only code is marked."""
    parts, end = [], 0
    for span in _SPAN.finditer(line):
        parts += [_plain(line[end : span.start()]), f"`{span.group(2).lstrip('~')}`"]
        end = span.end()
    return "".join([*parts, _plain(line[end:])])


def _plain(text: str) -> str:
    return re.sub(r"([*<\\]|(?<!\w)_|_(?!\w))", r"\\\1", text)


def as_markdown(lines: Sequence[str], parameters: Sequence[str] = ()) -> List[str]:
    """A docstring of this project as Markdown: code blocks, lists, and a list item for each parameter."""
    out: List[str] = []
    in_code = in_list = in_item = False

    def apart() -> None:
        if out and out[-1]:
            out.append("")

    for line in lines:
        if in_code and line.strip() and not line.startswith("    "):
            out += ["```", ""]
            in_code = False
        if not line.strip():
            out += [""] * (not in_code)
            in_list = in_item = False
            continue
        if line.startswith("    ") and (in_code or not in_list or not line.startswith("  - ")):
            if not in_code:
                apart()
                out.append("```text")
            in_code, in_list, in_item = True, False, False
            out.append(line[4:])
            continue
        item, parameter = re.match(r"\s*(- |\d+\. )", line), re.match(r"(\w+(?:, \w+)*) ?: (.*)", line)
        if parameter and set(parameter.group(1).split(", ")) <= set(parameters):
            if not in_list:
                apart()
            out.append(f"- `{parameter.group(1)}`: {_text(parameter.group(2))}")
            in_list, in_item = True, False
        elif item:
            if not in_list:
                apart()
            out.append(_text(line))
            in_list = in_item = True
        elif line.startswith("Raises ") or (in_item and not line.startswith("  ")):  # items go on indented
            apart()
            out.append(_text(line))
            in_list = in_item = False
        else:
            out.append(("  " if in_list and not line.startswith("  ") else "") + _text(line))
    return out + ["```"] * in_code


# --------------------------------------------------------------------------------------------------------------- pages

_PART = re.compile(r"(<!-- generated: (.+?) -->\n).*?(\n<!-- end of generated -->)", re.DOTALL)


def page_of(text: str) -> str:
    """A page with what is generated between its comments, as it is today."""
    return _PART.sub(lambda part: part[1] + "\n" + _part(part[2]).strip("\n") + "\n" + part[3], text)


def _part(what: str) -> str:
    kind, _, name = what.partition(" of ")
    if kind == "settings":
        return settings_tables(setting_sections()[name])
    return names_page(name) if kind == "names" else options_page()


def main() -> None:
    for name in PAGES:
        page = ROOT / "docs" / name
        text = page.read_text(encoding="utf-8")
        if page_of(text) != text:
            page.write_text(page_of(text), encoding="utf-8")
            print(f"written: {page}")


if __name__ == "__main__":
    main()
