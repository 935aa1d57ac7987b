"""Padding-free batches for causal Hugging Face models: attention, collators, a test for leaks, updates by their tokens.

    from ipu_packed_bert.padding_free import PaddingFreeCollator, use_padding_free
    use_padding_free(model, longest=2048)                   # an attention that keeps examples apart, checked
    collator = PaddingFreeCollator(model)                   # list of examples -> arguments of the model

A public name is loaded when it is first used, so that the package itself needs neither torch nor Transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, List

if TYPE_CHECKING:
    from ipu_packed_bert.padding_free.choice import use_padding_free
    from ipu_packed_bert.padding_free.collators import PaddingCollator, PaddingFreeCollator, inputs_for
    from ipu_packed_bert.padding_free.probe import assert_isolated, check_no_leak
    from ipu_packed_bert.padding_free.streams import PackedStream, least_of_ranks
    from ipu_packed_bert.padding_free.trainers import pack_into
    from ipu_packed_bert.padding_free.update import UpdateResult, accumulate, mean_loss, take_step
    from pack_data.cli.memory import keep_buffers

_PLACES = {
    "PackedStream": "streams",
    "PaddingCollator": "collators",
    "PaddingFreeCollator": "collators",
    "UpdateResult": "update",
    "accumulate": "update",
    "assert_isolated": "probe",
    "check_no_leak": "probe",
    "inputs_for": "collators",
    "keep_buffers": "pack_data.cli.memory",
    "least_of_ranks": "streams",
    "mean_loss": "update",
    "pack_into": "trainers",
    "take_step": "update",
    "use_padding_free": "choice",
}

__all__ = [
    "PackedStream",
    "PaddingCollator",
    "PaddingFreeCollator",
    "UpdateResult",
    "accumulate",
    "assert_isolated",
    "check_no_leak",
    "inputs_for",
    "keep_buffers",
    "least_of_ranks",
    "mean_loss",
    "pack_into",
    "take_step",
    "use_padding_free",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = _PLACES[name]
    return getattr(import_module(place if "." in place else f"{__name__}.{place}"), name)


def __dir__() -> List[str]:
    return sorted([*globals(), *__all__])
