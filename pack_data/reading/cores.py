"""The processor cores of this process, and the limits of a number of processes that follow from them."""

from __future__ import annotations

import os
from typing import Any, Mapping

from pack_data.reading.words import counted


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # macOS has no such call, and a sandbox may refuse it
        return os.cpu_count() or 1


def _most_processes() -> int:
    """Return the number of processes beyond which more only take memory and wait for each other."""
    return max(64, 4 * available_cores())


# Limits of a number of processes.
PROCESSES: Mapping[str, Any] = {
    "minimum": 1,
    "maximum": _most_processes(),
    "note": f", as more do not help with {counted(available_cores(), 'core')}",
}
