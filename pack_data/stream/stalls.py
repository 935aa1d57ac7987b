"""A source that may stall: its items, and None where it has given nothing for some time."""

from __future__ import annotations

import queue
import threading
from typing import Iterable, Iterator, Optional, TypeVar

_T = TypeVar("_T")
_AHEAD = 64  # items that are read before they are asked for


def items_and_stalls(source: Iterable[_T], seconds: Optional[float]) -> Iterator[Optional[_T]]:
    """The items of the source, and None once whenever it gives no item for so many seconds; None: never.

    A thread reads the source, at most `_AHEAD` items before they are asked for.  The source's errors are raised here.
    """
    if seconds is None:
        yield from source
        return
    items: queue.Queue = queue.Queue(_AHEAD)  # (item,), an error, or None: the end
    left = threading.Event()

    def read() -> None:
        end = None
        try:
            for item in source:
                items.put((item,))
                if left.is_set():
                    break
        except BaseException as error:
            end = error
        items.put(end)

    threading.Thread(target=read, name="stream source", daemon=True).start()
    try:
        while True:
            try:
                found = items.get(timeout=seconds)
            except queue.Empty:
                yield None
                found = items.get()
            if found is None:
                return
            if isinstance(found, BaseException):
                raise found
            yield found[0]
    finally:
        left.set()
        while not items.empty():  # the thread may wait for room
            items.get_nowait()
