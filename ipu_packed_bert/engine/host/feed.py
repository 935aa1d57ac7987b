"""Transfer of micro-batches to the device; on CUDA they are copied while the device works on earlier ones."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Deque, Iterator, List, Sequence, Tuple

import torch

_Fields = List[torch.Tensor]


def cut(fields: Sequence[torch.Tensor], rows: int) -> Iterator[_Fields]:
    """Yield the fields of an update in micro-batches.

    Args:
        fields: tensors of the update, a row per pack.
        rows: rows of a micro-batch.
    """
    for first in range(0, len(fields[0]), rows):
        yield [field[first : first + rows] for field in fields]


class _Feed:
    """Feed of a CPU: yields the micro-batches unchanged."""

    def __init__(self, device: torch.device):
        self.device = device

    def __call__(self, micro_batches: Iterator[_Fields]) -> Iterator[_Fields]:
        for fields in micro_batches:
            yield [field.to(self.device) for field in fields]

    def close(self) -> None:
        pass


class _CudaFeed(_Feed):
    """Feed of CUDA: a thread copies micro-batches to pinned memory, then to the device on a separate stream.

    The computing stream waits for the copy of its micro-batch; the host waits for neither.
    """

    AHEAD = 2  # micro-batches in flight: one is being copied while another is ready

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")

    def __call__(self, micro_batches: Iterator[_Fields]) -> Iterator[_Fields]:
        ahead: Deque[Future] = deque()
        try:
            for fields in micro_batches:
                ahead.append(self._thread.submit(self._move, fields))
                if len(ahead) > self.AHEAD:
                    yield self._arrived(ahead.popleft())
            while ahead:
                yield self._arrived(ahead.popleft())
        finally:
            for moving in ahead:
                moving.cancel()

    def _move(self, fields: _Fields) -> Tuple[_Fields, Any]:
        """Start the copy, in the thread; return the fields on the device and the event that marks its end."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            # The allocator of pinned memory keeps a block until the copies from it are done.
            moved = [field.pin_memory().to(self.device, non_blocking=True) for field in fields]
            event = torch.cuda.Event()
            event.record(self._stream)
        return moved, event

    def _arrived(self, moving: Future) -> _Fields:
        moved, event = moving.result()
        working = torch.cuda.current_stream(self.device)
        working.wait_event(event)
        for field in moved:
            # The copying stream allocated this memory; it must not reuse it before the computing stream is done.
            field.record_stream(working)
        return moved

    def close(self) -> None:
        self._thread.shutdown()


def feed_for(device: torch.device) -> _Feed:
    """Return the feed of a device."""
    return _CudaFeed(device) if device.type == "cuda" else _Feed(device)
