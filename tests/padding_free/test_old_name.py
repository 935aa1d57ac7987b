"""`ipu_packed_bert.padding_free`, the name of version 1, is the package `padding_free` and loads nothing twice."""

import importlib
import sys

import pytest

import padding_free

OLD = "ipu_packed_bert.padding_free"


def test_the_old_name_warns_once_and_has_the_public_names(monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    monkeypatch.delitem(sys.modules, OLD, raising=False)
    with pytest.warns(DeprecationWarning, match="import padding_free") as warnings:
        old = importlib.import_module(OLD)
        importlib.import_module(OLD)
    assert len(warnings) == 1
    assert [name for name in padding_free.__all__ if getattr(old, name) is not getattr(padding_free, name)] == []
    with pytest.raises(ModuleNotFoundError, match="not a package"):
        importlib.import_module(f"{OLD}.attention")
