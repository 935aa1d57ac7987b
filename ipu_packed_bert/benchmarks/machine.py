"""The machine that numbers come from, in one line."""

from __future__ import annotations

import os
import platform
from typing import List


def machine() -> str:
    """This machine in one line: processor or CUDA device, cores, versions."""
    import torch

    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        device = (
            f"{_processor()}, {cores} core{'' if cores == 1 else 's'}, {torch.get_num_threads()} torch "
            f"thread{'' if torch.get_num_threads() == 1 else 's'}"
        )
    return f"{device}; Python {platform.python_version()}, torch {torch.__version__}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names: List[str] = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()
