"""The generic reader: what is taken over, from where, what is refused and in which words; on a schema of its own."""

from dataclasses import dataclass
from typing import Optional, Tuple

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ipu_packed_bert.settings import loading as config
from ipu_packed_bert.settings.config import ConfigError
from ipu_packed_bert.settings.declare import declared
from ipu_packed_bert.settings.reader import FILE, SettingsReader, parse_override, setting, suggestions
from ipu_packed_bert.settings.yaml_files import load_yaml
from pack_data.reading.declare import typed_value
from tests.imports import CONFIGS


@dataclass(frozen=True)
class Tree:
    height: float = setting(3.0, "metres", above=0.0, maximum=120.0)
    leaves: int = setting(5, "", minimum=0)
    rings: Tuple[int, ...] = setting((1, 2), "one a year", minimum=1)
    kind: str = setting("oak", "", choices=("oak", "elm"))
    felled: bool = setting(False)


@dataclass(frozen=True)
class Owner:
    name: Optional[str] = setting(None, "null: nobody")
    leaves: int = setting(0, "in the garden", minimum=0)


SETTINGS = declared([("tree", "tree", Tree), ("owner", "owner", Owner)], "pretrain")


def reader(tree=None, *overrides):
    actual = SettingsReader(SETTINGS, "a.yml")
    actual.read(tree, FILE)
    for override in overrides:
        actual.override(parse_override(override))
    return actual


@pytest.mark.parametrize(
    "key, meant",
    [
        ("height", ["tree.height"]),
        ("owner.height", ["tree.height"]),
        ("tree.hight", ["tree.height"]),
        ("heights", ["tree.height"]),
        ("leaves", ["tree.leaves", "owner.leaves"]),
        ("ownr", ["owner"]),
        ("tree.zzz", []),
        ("zzz", []),
    ],
)
def test_an_unknown_name_is_answered_with_full_names(key, meant):
    assert suggestions(key, list(SETTINGS)) == meant


def test_a_block_of_the_same_settings_shares_the_problems_and_names_itself():
    actual = reader({"tree": {"height": "low"}})
    small = actual.block("in_pots")
    small.read({"tree": {"hight": 1, "leaves": -1, "height": 2}}, FILE)
    small.override(parse_override("tree.rings=3"))
    assert actual.problems == [
        "tree.height is 'low'; must be a number",
        "in_pots.tree.hight is not a setting; did you mean in_pots.tree.height?",
        "in_pots.tree.leaves is -1; must be at least 0",
        "--set in_pots.tree.rings is 3; must be a list such as [3, 7]",
    ]
    assert small.values == {"tree.height": 2.0}
    assert "tree.height" not in actual.values


@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["{!r}", "{:e}", "{:.17g}", "{:E}"]))
def test_a_number_in_any_notation_is_that_number(number, notation):
    text = notation.format(number)
    assert typed_value(yaml.safe_load(text), float) == float(text)


@given(st.integers(-(10**15), 10**15))
def test_a_whole_number_in_any_notation_is_that_number(number):
    for text in (str(number), f"{number}.0", f"{number}e0"):
        value = typed_value(yaml.safe_load(text), int)
        assert value == number
        assert type(value) is int
    with pytest.raises(ValueError, match="a whole number"):
        typed_value(number + 0.5 if abs(number) < 2**50 else 0.5, int)


_ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
_MERGES = "a0: &a0 {b: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12))


@pytest.mark.parametrize(
    "text",
    [
        "run:\n  steps: " + value
        for value in (
            *(
                "!!python/object/apply:os.getpid []",
                "2001-13-45",
                "2001-01-01",
                "!!bool a",
                "!!int ''",
                "!!timestamp a",
                "&x [*x]",
            ),
            *(
                "9" * 100_000,
                "1e400",
                ".inf",
                ".nan",
                "1" + "0" * 40,
                "[" * 600,
                "{[1]: 2}",
                "{1: 1, 1: 1}",
                "{<<: 1}",
                '"\\0"',
            ),
        )
    ]
    + ["data:\n  directory: " + value for value in ('"\\0"', '"a\\nb"', '"\\ud800"', "x" * 5000, "2001-01-01", "12")]
    + ['task: {name: "\\ud800"}', "task: {name: " + "x" * 5000 + "}"]
    + [_ALIASES, _MERGES, "run: " + "a" * 70_000, "b" * 70_000 + ": {}", '"\\e[31m": 1', "# " + "x" * (1 << 20)],
    ids=lambda text: text[:24],
)
def test_what_a_file_can_hold_besides_settings_is_refused_in_lines_that_can_be_printed(tmp_path, text):
    path = tmp_path / "a.yml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        config.load_config(path)
    lines = str(raised.value).split("\n")
    assert str(path) in lines[0]
    assert all(line.isprintable() and len(line) < 600 for line in lines)


@pytest.mark.parametrize("value", ["[" * 600, "2001-13-45", "9" * 100_000, "!!int ''", "x" * 5000])
def test_what_set_can_hold_besides_a_value_is_refused_too(tmp_path, value):
    (tmp_path / "a.yml").write_text("run: {steps: 3}\n")
    with pytest.raises(ConfigError) as raised:
        config.load_config(tmp_path / "a.yml", [f"run.steps={value}"])
    assert len(str(raised.value)) < 600
    assert "--set" in str(raised.value)


def test_one_value_under_two_names_is_not_a_key_that_stands_twice(tmp_path):
    (tmp_path / "a.yml").write_text("tree: &a {leaves: 3}\nowner: *a\n")
    assert load_yaml(tmp_path / "a.yml") == {"tree": {"leaves": 3}, "owner": {"leaves": 3}}


def test_a_file_extends_another(tmp_path):
    """Section by section, over several files; the nearest value counts, a list as a whole."""
    (tmp_path / "a.yml").write_text("x: {one: 1, two: [1, 2], three: 3}\ny: {z: {deep: 1, other: 2}}\n")
    (tmp_path / "b.yml").write_text("extends: a\nx: {two: [5], three: null}\n")
    (tmp_path / "c.yml").write_text("extends: b\ny: {z: {deep: 7}}\nw: {new: 1}\n")
    assert load_yaml(tmp_path / "c.yml") == {
        "x": {"one": 1, "two": [5], "three": None},
        "y": {"z": {"deep": 7, "other": 2}},
        "w": {"new": 1},
    }
    (tmp_path / "d.yml").write_text("extends: [c, a]\nw: {new: 2}\n")  # of several, a later one wins
    assert load_yaml(tmp_path / "d.yml")["x"] == {"one": 1, "two": [1, 2], "three": 3}
    assert load_yaml(tmp_path / "d.yml")["w"] == {"new": 2}
    (tmp_path / "own.yml").write_text("extends: packed_phase2_pod16\nrun: {steps: 7}\n")  # comes with the program
    extending = config.load_config(tmp_path / "own.yml")
    whole = config.load_config(CONFIGS / "packed_phase2_pod16.yml")
    assert extending.run.steps == 7
    assert extending.model == whole.model
    assert extending.without_ipus == whole.without_ipus
