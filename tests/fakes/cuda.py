"""A CUDA device that is not there: what torch says of it, and the streams that the host engine orders its copies with.

It shows which calls are made, in which order and by which thread. It does not show that a kernel computes anything.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, List, Optional, Tuple

import torch

Call = Tuple[Any, ...]


def pretend(monkeypatch, capability=(9, 0), name="Fake GPU"):
    """torch reports one GPU of this capability; None: it reports that there is none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(capability is not None))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    return torch.device("cuda")


class Streams:
    """Streams and events in place of torch's; `calls` are what was asked of them, in order."""

    def __init__(self, monkeypatch):
        self.calls: List[Call] = []
        self._here = threading.local()
        self.working = self._stream("working")
        monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: self._stream("copying"))
        monkeypatch.setattr(torch.cuda, "Event", self._event)
        monkeypatch.setattr(torch.cuda, "stream", self._entered)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.Tensor, "pin_memory", self._pinned(), raising=True)
        monkeypatch.setattr(torch.Tensor, "record_stream", self._recorded(), raising=True)

    @property
    def current(self):
        return getattr(self._here, "stream", self.working)

    @contextlib.contextmanager
    def _entered(self, stream):
        outer = self.current
        self._here.stream = stream
        yield
        self._here.stream = outer

    def _stream(self, name):
        streams = self

        class Stream:
            def wait_event(self, event):
                streams.calls.append(("wait", name, event.number))

            def __repr__(self):
                return name

        return Stream()

    def _event(self):
        streams = self

        class Event:
            number: Optional[int] = None

            def record(self, stream):
                self.number = sum(call[0] == "event" for call in streams.calls)
                streams.calls.append(("event", repr(stream), self.number))

        return Event()

    def _pinned(self):
        def pin_memory(tensor):
            self.calls.append(("pin", repr(self.current), threading.current_thread() is threading.main_thread()))
            return tensor.clone()

        return pin_memory

    def _recorded(self):
        def record_stream(tensor, stream):
            self.calls.append(("used", repr(stream)))

        return record_stream
