"""`make test-ipu` without the SDK is one line; with one the tests marked `ipu` run on what is imported as poptorch, and
use of it only what is published."""

import ast
import contextlib
import os
import re
import subprocess
import sys

import pytest

from tests import on_ipus
from tests.fakes import poptorch as stand_in
from tests.fakes.lowering import API
from tests.fakes.machine import machine
from tests.fakes.sdk import installed
from tests.ipu_packed_bert.engine.test_ipu_signatures import uses_of

TOP = API["modules"]["poptorch"]


def test_without_the_sdk_it_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "poptorch", None)
    assert on_ipus.main([]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "Poplar SDK" in said.err


@pytest.mark.parametrize("ipus, asked_for, where", [(16, "0", "on 16 IPUs"), (0, "1", "4 tiles an IPU")])
def test_both_parts_are_run(monkeypatch, capsys, ipus, asked_for, where):
    ran = []

    def run(command, cwd):
        ran.append((command, os.environ.get("POPTORCH_SMALL_IPU_MODEL", "0")))
        return subprocess.CompletedProcess(command, len(ran) - 1)

    monkeypatch.setattr(on_ipus.subprocess, "run", run)
    monkeypatch.setenv("POPTORCH_SMALL_IPU_MODEL", "0")
    with installed(ipus=ipus):
        assert on_ipus.main(["-x"]) == 1  # the second part fails
        monkeypatch.setenv("POPTORCH_SMALL_IPU_MODEL", "0")
    assert [command[command.index("-m", 3) + 1] for command, _ in ran] == ["not ipu", "ipu"]
    assert [model for _, model in ran] == [asked_for] * 2 and where in capsys.readouterr().out


@pytest.mark.parametrize("ipus", [0, 4], ids=["IPU Model", "hardware"])
def test_the_tier_takes_the_poptorch_that_is_installed(monkeypatch, tmp_path, ipus):
    """A stand-in in the SDK's place is taken for the SDK."""
    from tests.ipu_packed_bert.engine import test_ipu_tier as tests

    with installed(ipus=ipus):
        tier = tests.of_the_sdk(monkeypatch)
        assert tier.real and tier.ipus(4) == bool(ipus)
        tests.test_poptorch_has_the_published_interface(tier)
        tests.test_an_update_on_one_ipu(tier, 3)
        with pytest.raises(pytest.skip.Exception) if not ipus else contextlib.nullcontext():
            tests.test_an_update_on_two_replicas(tier)


TIER = [on_ipus.ROOT / "tests" / "ipu_packed_bert" / f"{name}.py" for name in on_ipus.ON_THE_SDK]


def sources_on_the_sdk():
    """The tests that run on the SDK, `make test-ipu` itself, and the helpers in tests/ that they import."""
    found = [on_ipus.ROOT / "tests" / "on_ipus.py", *TIER]
    for path in found:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.module.split(".") if isinstance(node, ast.ImportFrom) and node.module else []
            helper = on_ipus.ROOT.joinpath(*parts).with_suffix(".py")
            if parts[:1] == ["tests"] and parts[1:2] != ["fakes"] and len(parts) > 1 and helper not in found:
                found.append(helper)
    return found


def test_the_tests_on_the_sdk_use_published_names_alone():
    """By their sources: names and calls of PopTorch are published; of the stand-in's files they import only what runs
    where there is no SDK, and the facts."""
    paths, names = sources_on_the_sdk(), set()
    assert {"test_ipu_tier.py", "ipu_runs.py", "pretraining.py", "tiny_runs.py"} <= {path.name for path in paths}
    of_fakes = {}
    for path in paths:
        text = re.sub(r"\b(tier|self)\.poptorch", "poptorch", path.read_text(encoding="utf-8"))
        uses = uses_of(text)
        assert uses.problems == [], path
        names |= uses.names
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests.fakes"):
                of_fakes.setdefault(path.name, set()).update(alias.asname or alias.name for alias in node.names)
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "stand_in":
                assert node.attr in TOP, node.attr
    assert {"ipuHardwareIsAvailable", "Options"} <= names
    # stand_in: its names are looked up in the published ones; installed, pva: where the real SDK is not.
    assert of_fakes == {"test_ipu_tier.py": {"stand_in", "API", "installed", "pva"}}


class _Published:
    """A module of the stand-in of which only published names can be read."""

    def __init__(self, module, names):
        self._module, self._names = module, names

    def __getattr__(self, name):
        if name not in self._names:
            raise AttributeError(f"PopTorch has no {name}")
        value = getattr(self._module, name)
        return _Published(value, API["modules"]["poptorch.optim"]) if name == "optim" else value


def test_an_update_needs_only_published_names(monkeypatch):
    """The same by running: the engine and a test on the SDK, with a PopTorch that has no other name."""
    from tests.ipu_packed_bert.engine import test_ipu_tier as tests

    strict = _Published(stand_in, {*TOP, "optim", "__version__"})
    with pytest.raises(AttributeError):
        _ = strict.ctypes
    with installed(ipus=4), monkeypatch.context() as patched:
        for name in [name for name in sys.modules if name.startswith("ipu_packed_bert.engine.ipu")]:
            del sys.modules[name]
        vars(sys.modules["ipu_packed_bert.engine"]).pop("ipu")
        patched.setitem(sys.modules, "poptorch", strict)
        patched.setitem(sys.modules, "poptorch.optim", strict.optim)
        tier = tests.of_the_sdk(patched)
        assert tier.poptorch is strict and tier.ipu.devices.poptorch is strict
        tests.test_a_pipeline_of_four_ipus(tier, half=False, mask="product")
        assert machine.compilations.count("training") == 2
