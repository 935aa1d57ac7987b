"""Batch samplers that count the batches that a loader delivered: `DeliveredBatches`.

A sampler gets the requests of a loader, not its deliveries: a DataLoader with workers requests several batches in
advance, Accelerate's loader one. So the loop counts the batches that it gets:

    for batch in sampler.counted(loader):  # of torch, torchdata or Accelerate, with any number of workers
        state = sampler.state_dict()       # after this batch
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Any, Dict, Iterator, List, Mapping, Optional


class DeliveredBatches(ABC):
    """The base of a batch sampler with a place, which a counted loop moves.

    An iteration outside a counted loop yields the batches from the place on. After it no state can be taken, and
    another iteration can begin only if this one requested all batches.
    """

    _counted = 0  # batches that counted loops delivered since the place
    _loop: Optional[object] = None  # the counted loop that is under way
    # The iteration that began since the place was set. It may have ended, in workers before its batches are delivered.
    _reading: Optional[weakref.ref] = None
    # True if that iteration is not counted, so that the number of batches it delivered is unknown.
    _is_unknown = False
    _is_read = False  # True if it requested all batches

    @abstractmethod
    def _go_on(self) -> None:
        """Go to the place behind the batches that were delivered."""

    @abstractmethod
    def _batches(self) -> Iterator[List[int]]:
        """Return the batches from the place on."""

    @abstractmethod
    def _state_after(self, state: Mapping[str, Any], batches: int) -> Dict[str, Any]:
        """Return the state of the place that many batches behind another state."""

    def _end(self) -> None:
        """Go to the place behind the last batch."""

    def _batches_of_one(self, loader: Any) -> int:
        """Return the number of batches of this sampler that one batch of the loader uses up."""
        return 1

    def __iter__(self) -> Iterator[List[int]]:
        return _Reading(self)

    def counted(self, loader: Any) -> CountedLoader:
        """Return a loader whose batches are counted, so that a state can be taken after each of them.

        Args:
            loader: any iterable that reads this sampler and delivers its batches in order, such as a DataLoader with
                workers, or what `accelerator.prepare` returned.

        Returns:
            An iterable of the same batches. A loop that is left early is continued by the next one.
        """
        return CountedLoader(self, loader)

    @property
    def _delivered(self) -> int:
        """Batches that were delivered since the place."""
        if self._is_unknown:
            raise ValueError(
                "state of the sampler: a loop did not count its batches, and its loader may have read ahead; loop "
                "over sampler.counted(loader), or call state_at or set_epoch"
            )
        return self._counted

    def _forget(self) -> None:
        """Note that the place was set anew."""
        self._counted = 0
        self._reading = None
        self._is_unknown = False
        self._is_read = False

    def _check_idle(self) -> None:
        """Raise ValueError if a loop that has requested batches is under way."""
        if self._reading and self._reading():
            raise ValueError(
                "the place of the sampler cannot change while a loop over it is under way; leave the loop first, or "
                "make a new sampler and loader"
            )

    def _settle(self) -> None:
        """Go to the next epoch if an iteration requested all batches of this one and is over."""
        if self._is_read and self._reading and not self._reading():
            self._end()
            self._is_unknown = True

    def _resume(self) -> None:
        """Go to the place at which the next iteration begins."""
        if self._is_read:
            self._end()
        if self._reading is None:
            self._is_unknown = False
        self._go_on()


class _Reading:
    """An iteration over the batches of a sampler. It begins with the first request: a DataLoader calls iter() twice.

    torchdata's StatefulDataLoader takes its state with each request.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._first: Mapping[str, Any] = {}  # state at the first request
        self._batches: Optional[Iterator[List[int]]] = None
        self._next: Optional[List[int]] = None  # the batch of the next request
        self._requested = 0

    def __iter__(self) -> Iterator[List[int]]:
        return self

    def __next__(self) -> List[int]:
        sampler = self._sampler
        if self._batches is None:
            sampler._resume()
            self._first = sampler.state_dict()
            self._batches = sampler._batches()
            sampler._reading = weakref.ref(self)
            sampler._is_unknown = sampler._loop is None
            self._next = next(self._batches, None)
        batch = self._next
        # Transformers' Trainer counts the batches and never makes the request after the last one.
        self._next = next(self._batches, None)
        if (
            self._next is None
            and sampler._is_unknown
            and sampler._reading
            and sampler._reading() is self
        ):
            sampler._is_read = True
        if batch is None:
            raise StopIteration
        self._requested += 1
        return batch

    def state_dict(self) -> Dict[str, Any]:
        """Return the state after the batches that were requested."""
        if not self._first:
            return self._sampler.state_dict()
        return self._sampler._state_after(self._first, self._requested)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin at the place of a state."""
        self._sampler.load_state_dict(state)


class CountedLoader:
    """The batches of a loader, counted by its batch sampler when they are delivered."""

    def __init__(self, sampler: DeliveredBatches, loader: Any) -> None:
        self._sampler = sampler
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        sampler = self._sampler
        sampler._resume()
        sampler._loop = loop = object()
        batches_of_one = sampler._batches_of_one(self._loader)
        try:
            for batch in self._loader:
                if sampler._loop is not loop or sampler._reading is None:
                    raise ValueError(
                        "counted: another loop or an epoch began before this loop was left, or the loader does not "
                        "read this sampler"
                    )
                sampler._counted += batches_of_one
                yield batch
            sampler._go_on()
        finally:
            if sampler._loop is loop:
                sampler._loop = None
                sampler._reading = None
