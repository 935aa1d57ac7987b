"""Memory of a piece of work, as the operating system counts it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
from typing import Any, Optional

# Parameters of mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_buffers() -> bool:
    """Let this process keep freed memory for its next buffers.

    Otherwise glibc maps each buffer above 32 MiB again and returns it after use, so that each use causes a fault for
    every page. The memory of the process then stays at its peak; this cannot be undone.

    Returns:
        True if the C library is glibc and accepted the setting.
    """
    try:
        library = ctypes.CDLL(None)
        if not hasattr(library, "gnu_get_libc_version"):
            # The mallopt of another library may take other parameters.
            return False
        return bool(library.mallopt(_M_MMAP_MAX, 0) and library.mallopt(_M_TRIM_THRESHOLD, -1))
    except (AttributeError, OSError, TypeError):
        return False


class PeakMemory:
    """The peak of resident memory of this process above its present one (Linux, proc(5))."""

    def __init__(self) -> None:
        gc.collect()
        # Return what earlier work has freed; otherwise this work reuses it and seems to need none. Other C libraries
        # and systems lack the calls.
        with contextlib.suppress(AttributeError, OSError, TypeError):
            _return_freed_memory(ctypes.CDLL(None))
        self._start = _resident("VmRSS") if _reset_peak() else None

    def added(self) -> Optional[int]:
        """Return the bytes, or None if the system does not count them."""
        peak = _resident("VmHWM")
        if self._start is None or peak is None:
            return None
        return max(0, peak - self._start)


class _Mallinfo2(ctypes.Structure):
    """mallinfo(3); `keepcost` is the free memory at the end of the heap."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def _return_freed_memory(library: Any) -> None:
    """Return to the system all memory that this process has freed (glibc)."""
    library.malloc_trim(0)
    # malloc_trim keeps the end of the heap if others have used sbrk(2): allocate it here and drop its pages.
    library.mallinfo2.restype = _Mallinfo2
    library.malloc.restype = ctypes.c_void_p
    page = mmap.PAGESIZE
    size = library.mallinfo2().keepcost - page
    block = library.malloc(ctypes.c_size_t(size)) if size > page else None
    if block:
        first = -(-block // page) * page
        end = (block + size) // page * page
        library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)
        library.free(ctypes.c_void_p(block))


def _reset_peak() -> bool:
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return False
    return True


def _resident(key: str) -> Optional[int]:
    """Return bytes of this process: VmRSS is the present, VmHWM the peak since the last reset."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith(key):
                    return 1024 * int(line.split()[1])
    except OSError:
        pass
    return None
