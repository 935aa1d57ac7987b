"""Global batches, read ahead by another process.  Loads without the SDK."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, Tuple

import torch

from ipu_packed_bert.loader import Batch, GlobalBatches, Layout, Packs, Position


@dataclass(frozen=True)
class Reader:
    """The batches of a run from a given place on, as an iterable that can travel to another process."""

    packs: Callable[[], Packs]
    layout: Layout
    share: Tuple[int, int]
    start: Dict[str, Any]  # GlobalBatches.state()
    updates_per_epoch: int

    def __len__(self) -> int:
        return self.updates_per_epoch

    def __iter__(self) -> Iterator[Tuple[torch.Tensor, ...]]:
        with contextlib.closing(GlobalBatches(self.packs(), self.layout, share=self.share)) as batches:
            batches.load_state(self.start)
            for batch in batches:
                yield tuple(torch.from_numpy(batch[name]) for name in self.layout.fields)


class BatchesAhead:
    """`loader.GlobalBatches`, decoded in a process of its own.

    PopTorch holds Python's lock while a program runs, so that a thread would read nothing meanwhile. The tensors of a
    batch are good until the next one is asked for.

    read_ahead: Reader -> an iterator over the tensors of its batches, without end, that another process fills; its
    `terminate()` ends that process (PopTorch's `AsynchronousDataAccessor`).
    """

    def __init__(self, batches: GlobalBatches, *, read_ahead: Callable[[Reader], Any]):
        self._batches = batches
        self._read_ahead = read_ahead
        self._accessor: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __iter__(self) -> BatchesAhead:
        return self

    def __next__(self) -> Batch:
        if self._accessor is None:
            batches = self._batches
            reader = Reader(
                batches.packs.again(), batches.layout, batches.share, batches.state(), batches.updates_per_epoch
            )
            self._accessor = self._read_ahead(reader)
        batch = {name: tensor.numpy() for name, tensor in zip(self._batches.layout.fields, next(self._accessor))}
        self._batches.load_state({**self._batches.state(), **self._after()._asdict()})
        return batch

    def _after(self) -> Position:
        """Where the batch after the current one begins."""
        epoch, packs = self._batches.position
        packs += self._batches.packs_per_update
        return Position(epoch + 1, 0) if packs >= len(self._batches.packs) else Position(epoch, packs)

    def load_state(self, state: Dict[str, Any], *, same_batch: bool = True) -> None:
        self._stop()
        self._batches.load_state(state, same_batch=same_batch)

    def close(self) -> None:
        self._stop()
        self._batches.close()

    def _stop(self) -> None:
        if self._accessor is not None:
            self._accessor.terminate()
            self._accessor = None
