"""Batch samplers that know which of their batches a DataLoader has delivered: `DeliveredBatches`.

A DataLoader with workers requests batches before it delivers them, and does not report the deliveries. But it requests
exactly num_workers * prefetch_factor batches in advance, and one more with each delivery, also after the last batch.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any, Iterator, List, Optional


class DeliveredBatches(ABC):
    """The base of a batch sampler.

    Each iteration begins with `_begin`, which finds in `_delivered` the batches of the last iteration.
    """

    _reading: Optional[_Reading] = None  # the latest iteration

    def __iter__(self) -> Iterator[List[int]]:
        return _Reading(self, _requested_in_advance(self))

    @property
    def _delivered(self) -> int:
        """Batches of the latest iteration that were delivered."""
        return 0 if self._reading is None else self._reading.delivered

    @abstractmethod
    def _begin(self) -> Iterator[List[int]]:
        """Return the batches of a new iteration."""

    def _end(self) -> None:
        """Note that all batches of the latest iteration were delivered."""


class _Reading:
    """An iteration over the batches of a sampler. It begins with the first request: a DataLoader calls iter() twice."""

    def __init__(self, sampler: DeliveredBatches, in_advance: int) -> None:
        self._sampler = sampler
        self._in_advance = in_advance
        self._batches: Optional[Iterator[List[int]]] = None
        self._requests = 0
        self._drawn = 0

    @property
    def delivered(self) -> int:
        return min(self._drawn, max(0, self._requests - self._in_advance))

    def __iter__(self) -> Iterator[List[int]]:
        return self

    def __next__(self) -> List[int]:
        if self._batches is None:
            self._batches = self._sampler._begin()
            self._sampler._reading = self
        self._requests += 1
        try:
            batch = next(self._batches)
        except StopIteration:
            is_latest = self._sampler._reading is self
            # If nothing is left of an epoch, it does not end before its loop has begun.
            has_begun = self._requests > self._in_advance
            if is_latest and has_begun and self.delivered == self._drawn:
                self._sampler._end()
            raise
        self._drawn += 1
        return batch


def _requested_in_advance(sampler: Any) -> int:
    """Return how many batches the DataLoader that calls iter(sampler) requests before it delivers the first.

    A loader with a state, such as torchdata's StatefulDataLoader, takes the state of the sampler with each request.
    """
    frame = inspect.currentframe()
    while frame is not None:
        loader: Any = frame.f_locals.get("loader")
        if getattr(loader, "batch_sampler", None) is sampler:
            if hasattr(loader, "state_dict"):
                return 0
            return int(loader.num_workers * (loader.prefetch_factor or 0))
        frame = frame.f_back
    return 0
