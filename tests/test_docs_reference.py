"""docs/reference.py: every setting has a meaning, every public name a docstring, and one that lacks it is found."""

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ipu_packed_bert.settings.reader import keys_of, setting

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
reference = importlib.util.module_from_spec(spec)
sys.modules["reference"] = reference
spec.loader.exec_module(reference)


@pytest.mark.parametrize("package", reference.PACKAGES)
def test_every_public_name_has_a_docstring_and_a_place(package):
    assert reference.undocumented(package) == []
    page = reference.names_page(package)
    module = importlib.import_module(package)
    first = importlib.import_module(reference.PACKAGES[0])
    for name in module.__all__:
        assert f":: {package}.{name}\n" in page or getattr(first, name) is getattr(module, name)


def test_the_page_of_names_has_the_packages():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert [
        line[len("<!-- generated: names of ") : -len(" -->")] for line in text.splitlines() if "names of" in line
    ] == [*reference.PACKAGES]


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
    package.Documented, package.Silent, package.__all__ = Documented, Silent, ["Documented", "Silent"]
    monkeypatch.setitem(sys.modules, "package", package)
    assert reference.undocumented("package") == ["package.Documented.silent", "package.Silent"]
    with pytest.raises(ValueError, match="without a docstring: package.Documented.silent, package.Silent"):
        reference.names_page("package")


def test_every_setting_has_a_meaning_and_a_row():
    for sections in reference.setting_sections().values():
        table = reference.settings_tables(sections)
        for key in keys_of(sections):
            assert f"\n| `{key.rpartition('.')[2]}` |" in table


def test_a_setting_without_a_meaning_is_found():
    @dataclasses.dataclass(frozen=True)
    class Section:
        """A section."""

        named: int = setting(1, "with | a meaning", minimum=0)
        silent: int = setting(1)

    assert reference.without_meaning({"section": Section}) == ["section.silent"]
    with pytest.raises(ValueError, match="without a meaning: section.silent"):
        reference.settings_tables({"section": Section})


def test_docstrings_are_plain_text_with_code():
    lines = ["One `name_`, *x and a_ |y|.", "", "    code *as it is*", "", "size: of it", "more", "Raises ValueError."]
    assert reference.as_rst(lines, ["size"]) == [
        "One ``name_``, \\*x and a\\_ \\|y\\|.",
        "",
        "",
        "::",
        "",
        "    code *as it is*",
        "",
        "",
        "- ``size``: of it",
        "  more",
        "",
        "Raises ValueError.",
    ]
