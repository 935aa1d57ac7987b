"""`make test-ipu` without the SDK is one line; with one the tests marked `ipu` run on what is imported as poptorch."""

import contextlib
import os
import subprocess
import sys

import pytest

from tests import on_ipus
from tests.fakes.sdk import installed


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
