"""engine/ipu/ uses only what PopTorch 3.3 and 3.4 have; read from the source, nothing runs.

Names and arguments of PopTorch 3.4 are checked where the engine runs on the mock, whose names and signatures are
PopTorch's (test_fake_poptorch.py).
"""

import ast
import json
import re

from tests.imports import ROOT

API = json.loads((ROOT / "tests" / "data" / "poptorch_api.json").read_text(encoding="utf-8"))
ENGINE = sorted((ROOT / "ipu_packed_bert" / "engine" / "ipu").glob("*.py"))


def attributes_of(source):
    """Return the names that a source reads from modules and objects."""
    return {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}


def newer_than(names, release):
    """Return those of some names that PopTorch got after a release such as "3.3"."""
    later = set()
    for item, changed in API["name_changes_by_release"].items():
        if item > f"{release}.0":
            later.update(name.rpartition(".")[2] for name in changed["added"])
    return sorted(later & set(names))


def sources():
    return [path.read_text(encoding="utf-8") for path in ENGINE]


def test_what_the_engine_uses_is_in_older_releases_too():
    """3.3, the oldest that engine/ipu/ takes, is the SDK of Argonne's Bow Pod64; 3.1 and 3.2 have other torch."""
    names = set().union(*map(attributes_of, sources()))
    assert {
        "deviceIterations",
        "gradientAccumulation",
        "cycleCount",
        "LAMB",
        "recomputationCheckpoint",
    } <= names
    for release in ("3.3", "3.2", "3.1"):
        assert newer_than(names, release) == []
    assert re.search(r"_OLDEST = \((\d), (\d)\)", "".join(sources())).groups() == ("3", "3")


def test_names_that_an_older_release_lacks_are_found():
    names = attributes_of("poptorch.cond(a, b)\noptions.updatableNamedBuffers([])\nself._training.compilationTime()")
    assert newer_than(names, "3.2") == ["compilationTime", "cond", "updatableNamedBuffers"]
    assert newer_than(names, "3.3") == []


def test_numbers_of_backend_settings_are_those_of_their_names():
    """The names and types of the settings are checked by the mock."""
    actual = {}
    for source in sources():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "set":
                name, value = map(ast.literal_eval, node.args)
                actual[name] = value
    values = API["popart_enums"]["values"]
    schedules = values["AccumulateOuterFragmentSchedule"]
    assert actual["accumulateOuterFragmentSettings.schedule"] == schedules["OverlapMemoryOptimized"]
    assert actual["subgraphCopyingStrategy"] == values["SubgraphCopyingStrategy"]["JustInTime"]
