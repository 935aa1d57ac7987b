"""The module that adds varlen_attn to CPUs says in one line which torch it needs."""

import importlib
import sys

import pytest

MODULE = "padding_free.varlen_on_cpu"


def test_a_torch_without_varlen_attn_is_refused_in_one_line(monkeypatch):
    """Torch 2.0 has no torch.nn.attention; a newer one is made to have none."""
    monkeypatch.setitem(sys.modules, "torch.nn.attention", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with pytest.raises(ImportError, match="needs torch 2.13") as caught:
        importlib.import_module(MODULE)
    assert "\n" not in str(caught.value) and caught.value.__suppress_context__
