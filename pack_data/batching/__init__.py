"""Batches of examples of different lengths: which examples share a batch (plans), its arrays (collators).

A public name is loaded when it is first used, so that collators start without the packers that plans need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, List

if TYPE_CHECKING:
    from pack_data.batching.collators import padded_batch as padded_batch
    from pack_data.batching.collators import padding_free_batch as padding_free_batch
    from pack_data.batching.plans import WAYS as WAYS
    from pack_data.batching.plans import BatchOptions as BatchOptions
    from pack_data.batching.plans import EpochPlan as EpochPlan
    from pack_data.batching.plans import Way as Way
    from pack_data.batching.plans import get_way as get_way
    from pack_data.batching.sampler import IndexBatchSampler as IndexBatchSampler
    from pack_data.batching.sampler import MicroBatchSampler as MicroBatchSampler

# Public name -> its module in this package.
_PLACES = {
    "BatchOptions": "plans",
    "EpochPlan": "plans",
    "IndexBatchSampler": "sampler",
    "MicroBatchSampler": "sampler",
    "WAYS": "plans",
    "Way": "plans",
    "get_way": "plans",
    "padded_batch": "collators",
    "padding_free_batch": "collators",
}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> List[str]:
    return sorted([*globals(), *__all__])
