"""The old name of the package `padding_free`; version 3 removes it."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any, List

_NEW = "padding_free"

warnings.warn(
    f"ipu_packed_bert.padding_free is now {_NEW}; import {_NEW}", DeprecationWarning, stacklevel=2
)


def __getattr__(name: str) -> Any:
    if name.startswith(
        "__"
    ):  # with the path of the package, its modules would be loaded a second time
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_NEW), name)


def __dir__() -> List[str]:
    return dir(import_module(_NEW))
