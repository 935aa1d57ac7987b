"""Padding-free batches for causal Hugging Face models: attention, collators, a test for leaks, updates by their tokens.

    from padding_free import PaddingFreeCollator, use_padding_free
    use_padding_free(model, longest=2048)                   # an attention that keeps examples apart, checked
    collator = PaddingFreeCollator(model)                   # list of examples -> arguments of the model

A public name is loaded when it is first used, so that the package itself needs neither torch nor Transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, List

if TYPE_CHECKING:
    from pack_data.cli.memory import keep_buffers as keep_buffers
    from padding_free.choice import use_padding_free as use_padding_free
    from padding_free.collators import PaddingCollator as PaddingCollator
    from padding_free.collators import PaddingFreeCollator as PaddingFreeCollator
    from padding_free.collators import inputs_for as inputs_for
    from padding_free.leaks.isolated import assert_isolated as assert_isolated
    from padding_free.leaks.probe import check_no_leak as check_no_leak
    from padding_free.streams import PackedStream as PackedStream
    from padding_free.streams import least_of_ranks as least_of_ranks
    from padding_free.trainers import pack_into as pack_into
    from padding_free.update import UpdateResult as UpdateResult
    from padding_free.update import accumulate as accumulate
    from padding_free.update import mean_loss as mean_loss
    from padding_free.update import take_step as take_step

_HERE = "padding_free"
# Public name -> its module.
_PLACES = {
    "PackedStream": f"{_HERE}.streams",
    "PaddingCollator": f"{_HERE}.collators",
    "PaddingFreeCollator": f"{_HERE}.collators",
    "UpdateResult": f"{_HERE}.update",
    "accumulate": f"{_HERE}.update",
    "assert_isolated": f"{_HERE}.leaks.isolated",
    "check_no_leak": f"{_HERE}.leaks.probe",
    "inputs_for": f"{_HERE}.collators",
    "keep_buffers": "pack_data.cli.memory",
    "least_of_ranks": f"{_HERE}.streams",
    "mean_loss": f"{_HERE}.update",
    "pack_into": f"{_HERE}.trainers",
    "take_step": f"{_HERE}.update",
    "use_padding_free": f"{_HERE}.choice",
}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> List[str]:
    return sorted([*globals(), *__all__])
