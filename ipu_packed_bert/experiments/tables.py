"""Tables for a README: Markdown, numbers rounded once, each with the command and the machine it came from."""

from __future__ import annotations

import math
import os
import platform
from typing import List, Sequence, Union

import numpy as np

from pack_data.display.table import markdown as markdown


def spread(values: Union[Sequence[float], np.ndarray], digits: int = 3) -> str:
    """Mean and standard deviation over the seeds: `5.123 ± 0.012`; a single value stands alone."""
    mean = f"{float(np.mean(values)):.{digits}f}"
    return f"{mean} ± {float(np.std(values, ddof=1)):.{digits}f}" if len(values) > 1 else mean


def signed(value: float, digits: int = 3) -> str:
    """A difference with its sign."""
    return f"{value:+.{digits}f}"


def small(value: float) -> str:
    """A number that may be very small: `3.1e-12`."""
    return "0" if value == 0 or math.isnan(value) else f"{value:.1e}"


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
