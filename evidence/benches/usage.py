"""Memory and processor time of a benchmark, as the operating system counts them."""

from __future__ import annotations

import sys

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


def check_counted() -> None:
    """Raise ValueError if the system does not count what processes use."""
    if resource is None:
        raise ValueError(
            "this benchmark needs a POSIX system such as Linux or macOS (resource is missing here)"
        )


def peak_megabytes(*, workers: bool = False) -> float:
    """Return the peak memory of this process, or of the largest of its ended workers, in MiB."""
    kilobytes = resource.getrusage(
        resource.RUSAGE_CHILDREN if workers else resource.RUSAGE_SELF
    ).ru_maxrss
    return kilobytes / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def cpu_seconds() -> float:
    """Return the user and system seconds of this process and its ended workers."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
