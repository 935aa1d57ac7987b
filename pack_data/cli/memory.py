"""How much memory, and processor time, a piece of work needs, as the operating system counts it; buffers kept."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import sys
from typing import Any, Optional

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


def check_counted() -> None:
    """ValueError where the system does not count what processes use."""
    if resource is None:
        raise ValueError("this benchmark needs a POSIX system such as Linux or macOS (resource is missing here)")


def peak_megabytes(*, workers: bool = False) -> float:
    """The most memory one process has held, MiB: this one, or the largest of its ended workers."""
    kilobytes = resource.getrusage(resource.RUSAGE_CHILDREN if workers else resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def cpu_seconds() -> float:
    """Of this process and its ended workers, user and system."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


# Parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_buffers() -> bool:
    """Let this process keep the memory that it frees, for its next buffers.  Whether the C library does so (glibc).

    Otherwise glibc maps every buffer above 32 MiB anew and gives it back after use, and each use begins with a fault
    for every page.  The memory of the process stays at its peak then.  Not to be undone.
    """
    try:
        library = ctypes.CDLL(None)
        if not hasattr(library, "gnu_get_libc_version"):  # another one's mallopt may take other parameters
            return False
        return bool(library.mallopt(_M_MMAP_MAX, 0) and library.mallopt(_M_TRIM_THRESHOLD, -1))
    except (AttributeError, OSError, TypeError):
        return False


class PeakMemory:
    """Resident memory of this process above what it has now, at its highest (Linux, proc(5))."""

    def __init__(self) -> None:
        gc.collect()
        # Hand back what earlier work has freed.  Else this work takes it and seems to need none.
        with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library, another system
            _hand_back(ctypes.CDLL(None))
        self._start = _resident("VmRSS") if _reset_peak() else None

    def added(self) -> Optional[int]:
        """Bytes; None where the system does not tell."""
        peak = _resident("VmHWM")
        return None if self._start is None or peak is None else max(0, peak - self._start)


class _Mallinfo2(ctypes.Structure):
    """mallinfo(3); `keepcost` is the free memory at the end of the heap."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def _hand_back(library: Any) -> None:
    """Gives the system all memory that this process has freed (glibc)."""
    library.malloc_trim(0)
    # malloc_trim keeps the end of the heap where another user of sbrk(2) has been: we take it and drop its pages.
    library.mallinfo2.restype, library.malloc.restype = _Mallinfo2, ctypes.c_void_p
    page = mmap.PAGESIZE
    size = library.mallinfo2().keepcost - page
    block = library.malloc(ctypes.c_size_t(size)) if size > page else None
    if block:
        first, end = -(-block // page) * page, (block + size) // page * page
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
    """Bytes of this process: VmRSS now, VmHWM at the highest since the last reset."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            return next((1024 * int(line.split()[1]) for line in file if line.startswith(key)), None)
    except OSError:
        return None
