"""Global batches, read ahead by another process.  Loads without the SDK."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Tuple

import torch

from ipu_packed_bert.config import Config
from ipu_packed_bert.engine.base import Batch
from ipu_packed_bert.loader import GlobalBatches, Position
from ipu_packed_bert.model.packed import BATCH_FIELDS
from pack_data.store import PackStore


@dataclass(frozen=True)
class Reader:
    """The batches of a run from a given place on, as an iterable that can travel to another process."""

    config: Config
    packing_factor: float
    share: Tuple[int, int]
    start: Dict[str, Any]  # GlobalBatches.state()
    updates_per_epoch: int

    def __len__(self) -> int:
        return self.updates_per_epoch

    def __iter__(self) -> Iterator[Tuple[torch.Tensor, ...]]:
        with contextlib.ExitStack() as opened:
            store = opened.enter_context(PackStore.open(Path(self.config.data.directory)))
            batches = opened.enter_context(
                contextlib.closing(
                    GlobalBatches(store, self.config, packing_factor=self.packing_factor, share=self.share)
                )
            )
            batches.load_state(self.start)
            for batch in batches:
                yield tuple(torch.from_numpy(batch[name]) for name in BATCH_FIELDS)


class BatchesAhead:
    """`loader.GlobalBatches`, decoded in a process of its own.

    PopTorch holds Python's lock while a program runs, so that a thread would read nothing meanwhile. The tensors of a
    batch are good until the next one is asked for.

    read_ahead: Reader -> an iterator over the tensors of its batches, without end, that another process fills; its
    `terminate()` ends that process (PopTorch's `AsynchronousDataAccessor`).
    """

    def __init__(self, batches: GlobalBatches, config: Config, *, packing_factor: float, share: Tuple[int, int],
                 read_ahead: Callable[[Reader], Any]):
        self._batches, self._config, self._packing_factor, self._share = batches, config, packing_factor, share
        self._read_ahead = read_ahead
        self._accessor: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __iter__(self) -> "BatchesAhead":
        return self

    def __next__(self) -> Batch:
        if self._accessor is None:
            batches = self._batches
            reader = Reader(
                self._config, self._packing_factor, self._share, batches.state(), batches.updates_per_epoch
            )
            self._accessor = self._read_ahead(reader)
        batch = {name: tensor.numpy() for name, tensor in zip(BATCH_FIELDS, next(self._accessor))}
        self._batches.load_state({**self._batches.state(), **self._after()._asdict()})
        return batch

    def _after(self) -> Position:
        """Where the batch after the current one begins."""
        epoch, packs = self._batches.position
        packs += self._batches.packs_per_update
        return Position(epoch + 1, 0) if packs >= self._batches.training_packs else Position(epoch, packs)

    def load_state(self, state: Dict[str, Any]) -> None:
        self._stop()
        self._batches.load_state(state)

    def close(self) -> None:
        self._stop()
        self._batches.close()

    def _stop(self) -> None:
        if self._accessor is not None:
            self._accessor.terminate()
            self._accessor = None
