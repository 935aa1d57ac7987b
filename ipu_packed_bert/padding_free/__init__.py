"""Padding-free batches for causal Hugging Face models: collators, a test for leaks, updates by their tokens."""

from __future__ import annotations

from importlib import import_module
from typing import Any, List

# A public name is imported on first use (PEP 562), so that the package itself needs neither torch nor Transformers.
_MODULES = {
    "Batches": "collators",
    "PaddingCollator": "collators",
    "PaddingFreeCollator": "collators",
    "inputs_for": "collators",
    "check_no_leak": "probe",
    "UpdateResult": "update",
    "accumulate": "update",
    "mean_loss": "update",
    "take_step": "update",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> List[str]:
    return sorted([*globals(), *_MODULES])
