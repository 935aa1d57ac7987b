"""Global batches, read ahead by another process.  Loads without the SDK."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Tuple

import torch

from ipu_packed_bert.data.global_batches import Batch, GlobalBatches, Layout, Packs, Position


@dataclass(frozen=True)
class Reader:
    """The batches of a run from a given place on, as an iterable that can travel to another process."""

    packs: Callable[[], Packs]
    layout: Layout
    share: Tuple[int, int]
    start: Dict[str, Any]  # GlobalBatches.state()
    updates_per_epoch: int
    complaint: str  # a file: what ends the reading, in one line

    def __len__(self) -> int:
        return self.updates_per_epoch

    def __iter__(self) -> Iterator[Tuple[torch.Tensor, ...]]:
        try:
            yield from self._tensors()
        except (ValueError, OSError, MemoryError) as error:
            # The other process has no way to hand over an exception. It leaves a line and ends without a traceback.
            line = " ".join(str(error).split()) or type(error).__name__
            Path(self.complaint).write_text(line, encoding="utf-8", errors="replace")
            raise SystemExit(1) from None

    def _tensors(self) -> Iterator[Tuple[torch.Tensor, ...]]:
        with contextlib.closing(
            GlobalBatches(self.packs(), self.layout, share=self.share)
        ) as batches:
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
        self._folder: Any = None  # of the reader's complaint

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __iter__(self) -> BatchesAhead:
        return self

    def __next__(self) -> Batch:
        """Return the next batch; raise ValueError if the other process has ended."""
        batches = self._batches
        try:
            if self._accessor is None:
                self._folder = tempfile.TemporaryDirectory(prefix="packed-bert-")
                complaint = str(self._complaint)
                self._accessor = self._read_ahead(
                    Reader(
                        batches.packs.again(),
                        batches.layout,
                        batches.share,
                        batches.state(),
                        batches.updates_per_epoch,
                        complaint,
                    )
                )
            tensors = next(self._accessor)
        except (
            Exception
        ) as error:  # PopTorch raises its own error, or AssertionError, where the process has died
            raise self._died(error) from error
        batch = {name: tensor.numpy() for name, tensor in zip(batches.layout.fields, tensors)}
        self._batches.load_state({**self._batches.state(), **self._after()._asdict()})
        return batch

    @property
    def _complaint(self) -> Path:
        return Path(self._folder.name, "complaint")

    def _died(self, error: Exception) -> ValueError:
        if self._complaint.is_file():
            return ValueError(self._complaint.read_text(encoding="utf-8"))
        problem = " ".join(str(error).split())[:200] or type(error).__name__
        return ValueError(
            f"the process that reads the batches has ended ({problem}): killed, or out of memory; --set "
            "engine.asynchronous_loading=false reads them in this one"
        )

    def _after(self) -> Position:
        """Where the batch after the current one begins."""
        epoch, packs = self._batches.position
        packs += self._batches.packs_per_update
        return (
            Position(epoch + 1, 0) if packs >= len(self._batches.packs) else Position(epoch, packs)
        )

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
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
