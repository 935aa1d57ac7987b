"""`make test-ipu` without the SDK is one line; with one the tests marked `ipu` run on what is imported as poptorch."""

import contextlib
import sys

import pytest

from tests import on_ipus
from tests.fakes.sdk import installed


def test_without_the_sdk_it_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "poptorch", None)
    assert on_ipus.main([]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert "Poplar SDK" in output.err


@pytest.mark.parametrize("ipus", [0, 4], ids=["IPU Model", "hardware"])
def test_the_tier_takes_the_poptorch_that_is_installed(monkeypatch, tmp_path, ipus):
    """A stand-in in the SDK's place is taken for the SDK."""
    from tests.ipu_packed_bert.engine import test_ipu_tier as tests

    with installed(ipus=ipus):
        tier = tests.of_the_sdk(monkeypatch)
        assert tier.real
        assert tier.ipus(4) == bool(ipus)
        tests.test_poptorch_has_the_published_interface(tier)
        tests.test_an_update_on_one_ipu(tier, 3)
        with pytest.raises(pytest.skip.Exception) if not ipus else contextlib.nullcontext():
            tests.test_an_update_on_two_replicas(tier)
