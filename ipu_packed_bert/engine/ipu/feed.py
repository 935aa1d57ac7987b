"""Global batches, read ahead by another process. Loads without the SDK."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Tuple

import torch

from ipu_packed_bert.data.global_batches import Batch, GlobalBatches, Layout, Packs
from pack_data.reading.fields import one_line


@dataclass(frozen=True)
class Reader:
    """The batches of a run from a position on, as an iterable that can be sent to another process."""

    packs: Callable[[], Packs]
    layout: Layout
    share: Tuple[int, int]
    start: Dict[str, Any]  # GlobalBatches.state()
    updates_per_epoch: int
    error_file: str  # receives the error that ends the reading, one line

    def __len__(self) -> int:
        return self.updates_per_epoch

    def __iter__(self) -> Iterator[Tuple[torch.Tensor, ...]]:
        try:
            yield from self._tensors()
        except (ValueError, OSError, MemoryError) as error:
            # An exception cannot be sent to the other process. A file has its message instead of a traceback.
            line = " ".join(str(error).split()) or type(error).__name__
            Path(self.error_file).write_text(line, encoding="utf-8", errors="replace")
            raise SystemExit(1) from None

    def _tensors(self) -> Iterator[Tuple[torch.Tensor, ...]]:
        with contextlib.closing(
            GlobalBatches(self.packs(), self.layout, share=self.share)
        ) as batches:
            batches.load_state(self.start)
            for batch in batches:
                yield tuple(torch.from_numpy(batch[name]) for name in self.layout.fields)


class BatchesAhead:
    """`GlobalBatches` that another process decodes. The tensors of a batch are valid until the next one is requested.

    A thread could not read ahead, because PopTorch holds Python's lock while a program runs.

    Args:
        batches: the batches to read ahead.
        read_ahead: starts a process that reads, and returns an endless iterator over the tensors of its batches, whose
            `terminate()` ends the process (PopTorch's `AsynchronousDataAccessor`).
    """

    def __init__(self, batches: GlobalBatches, *, read_ahead: Callable[[Reader], Any]):
        self._batches = batches
        self._read_ahead = read_ahead
        self._accessor: Any = None
        self._folder: Any = None  # temporary directory of the error file

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
                reader = Reader(
                    batches.packs.again(),
                    batches.layout,
                    batches.share,
                    batches.state(),
                    batches.updates_per_epoch,
                    str(self._error_file),
                )
                self._accessor = self._read_ahead(reader)
            tensors = next(self._accessor)
        except Exception as error:
            # PopTorch raises its own error or AssertionError if the process has ended.
            raise self._reading_error(error) from error
        batches.load_state({**batches.state(), **batches.after(batches.position)._asdict()})
        return {name: tensor.numpy() for name, tensor in zip(batches.layout.fields, tensors)}

    @property
    def _error_file(self) -> Path:
        return Path(self._folder.name, "error")

    def _reading_error(self, error: Exception) -> ValueError:
        if self._error_file.is_file():
            return ValueError(self._error_file.read_text(encoding="utf-8"))
        problem = one_line(error, 200) or type(error).__name__
        return ValueError(
            f"the process that reads the batches has ended ({problem}), perhaps out of memory; use --set"
            " engine.asynchronous_loading=false to read them in the main process"
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
