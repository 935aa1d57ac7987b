"""Causal Hugging Face models on padding-free batches: collators, a probe for leaks, and updates normalised by their tokens."""
from __future__ import annotations

from importlib import import_module
from typing import Any, List

# Loaded on first use (PEP 562): importing the package needs neither torch nor Transformers.
_HOMES = {
    "Batches": "collators",
    "PaddingCollator": "collators",
    "PaddingFreeCollator": "collators",
    "inputs_for": "collators",
    "check_no_leak": "probe",
    "UpdateResult": "update",
    "accumulate": "update",
    "mean_loss": "update",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> List[str]:
    return sorted([*globals(), *_HOMES])
