"""How many processes one machine is given."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def most_processes() -> int:
    """More than these gain nothing on this machine: each takes its own memory and waits for the others."""
    return max(64, 4 * available_cores())
