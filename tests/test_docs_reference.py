"""docs/reference.py: every setting has a meaning, every public name a docstring, every option a page and a test; one
that lacks it is found."""

import ast
import dataclasses
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from ipu_packed_bert.settings.declare import declared
from pack_data.building.options import BuildOptions
from pack_data.packers import PACKERS
from pack_data.reading.declare import setting, settings_in
from tests.imports import ROOT, SOURCES

spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
reference = importlib.util.module_from_spec(spec)
sys.modules["reference"] = reference
spec.loader.exec_module(reference)


# The public names are in __all__ of these packages.
PACKAGES = ("pack_data", "pack_data.batching", "pack_data.stream", "ipu_packed_bert", "padding_free")


def undocumented(package):
    """Return the public names of a package, and the public methods of their classes, without a docstring."""
    module = importlib.import_module(package)
    missing = []
    for name in module.__all__:
        value = getattr(module, name)
        # A dataclass without a docstring gets its signature as one.
        if callable(value) and (inspect.getdoc(value) or f"{name}(").startswith(f"{name}("):
            missing.append(f"{package}.{name}")
        for method, function in vars(value).items() if inspect.isclass(value) else ():
            function = getattr(function, "fget", getattr(function, "__func__", function))
            is_public = inspect.isfunction(function) and not method.startswith("_")
            if is_public and not inspect.getdoc(getattr(value, method)):
                missing.append(f"{package}.{name}.{method}")
    return missing


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_a_docstring_and_a_page(package):
    assert undocumented(package) == []
    assert f".. automodule:: {package}\n" in (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_committed_page_is_what_would_be_written_now(name):
    if not (3, 10) <= sys.version_info < (3, 13):
        pytest.skip("argparse and ast of other Pythons print other words")
    pytest.importorskip("torch", reason="the help of some commands needs torch")
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert "<!-- generated: " in text
    assert reference.page_of(text) == text, "run: python docs/reference.py"


def test_only_what_stands_between_its_comments_is_written():
    begun = "before\n<!-- generated: settings of fine-tuning -->\nof before\n<!-- end of generated -->\nafter\n"
    page = reference.page_of(begun)
    assert page.startswith("before\n<!-- generated: settings of fine-tuning -->\n\n### ") and "\nof before" not in page
    assert page.endswith("\n\n<!-- end of generated -->\nafter\n") and reference.page_of(page) == page


def test_a_public_name_without_a_docstring_is_found(monkeypatch):
    class Documented:
        """It is."""

        def silent(self):
            pass

        def _private(self):
            pass

    @dataclasses.dataclass
    class Silent:
        field: int = 0

    package = ModuleType("package")
    package.Documented = Documented
    package.Silent = Silent
    package.__all__ = ["Documented", "Silent"]
    monkeypatch.setitem(sys.modules, "package", package)
    assert undocumented("package") == ["package.Documented.silent", "package.Silent"]


def test_every_setting_has_a_meaning_and_a_row():
    for sections in reference.setting_sections().values():
        table = reference.settings_tables(sections)
        for section in sections.values():
            assert all(f"\n| `{declaration.name}` |" in table for declaration in section.settings)


def test_a_setting_without_a_meaning_is_found():
    @dataclasses.dataclass(frozen=True)
    class Section:
        """A section."""

        named: int = setting(1, "with | a meaning", minimum=0)
        silent: int = setting(1)

    settings = declared([("section", "section", Section)], "pretrain")
    sections = {"section": reference.Section("A section.", list(settings.values()))}
    assert reference.without_meaning(sections) == ["section.silent"]
    with pytest.raises(ValueError, match="without a meaning: section.silent"):
        reference.settings_tables(sections)


def options_of(source):
    """The options that a module adds to a parser, also by a shorter name of `add_argument`."""
    nodes = list(ast.walk(ast.parse(source)))
    adders = {"add_argument"}
    for node in nodes:
        if isinstance(node, ast.Assign) and "add_argument" in ast.dump(node.value):
            adders |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    words = [
        word.value
        for call in calls
        if getattr(call.func, "attr", getattr(call.func, "id", "")) in adders
        for word in call.args
        if isinstance(word, ast.Constant)
    ]
    return {word for word in words if isinstance(word, str) and word.startswith("--")}


def missing_from(options, texts):
    """The options that stand as a word in none of the texts."""
    words = {word for text in texts for word in re.findall(r"--[a-z][a-z0-9-]*", text)}
    return sorted(set(options) - words)


def test_every_option_stands_on_a_page_and_in_a_test():
    options = set().union(*(options_of(path.read_text(encoding="utf-8")) for path in SOURCES))
    # A law over all of them tests the declared ones (tests/pack_data/cli/test_options.py).
    declared_options = {setting.flag for setting in settings_in(BuildOptions).values()}
    assert len(options | declared_options) > 90
    files = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    pages = [path.read_text(encoding="utf-8") for path in files]
    assert missing_from(options | declared_options, pages) == []
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    assert missing_from(options, tests) == []


def test_an_option_without_a_page_is_found():
    source = "add = parser.add_argument\nadd('--short')\nparser.add_argument('-l', '--long')\ngit('--other')"
    assert options_of(source) == {"--short", "--long"}
    assert missing_from(options_of(source), ["`--shorter` and --long=3"]) == ["--short"]


def test_the_schema_of_configurations_is_current_and_editors_find_it():
    assert reference.SCHEMA.read_text(encoding="utf-8") == reference.schema_text()
    known = reference.configuration_schema()["properties"]
    files = [path for path in sorted((ROOT / "configs").glob("*.yml")) if path.name != "derived.yml"]
    checked = 0
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert "\n# yaml-language-server: $schema=schema.json\n" in text, path
        tree = yaml.safe_load(text)
        for block in (tree, tree.get("without_ipus", {})):
            for section, values in block.items():
                if section not in ("extends", "without_ipus"):
                    checked += len(values)
                    assert set(values) <= set(known[section]["properties"]), f"{path}: {section}"
    assert len(files) > 10 and checked > 150
    packers = known["data"]["properties"]["packer"]
    assert packers["enum"] == list(PACKERS) and known["run"]["properties"]["epochs"]["minimum"] == 1
