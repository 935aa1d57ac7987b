"""Tables for a README: Markdown, numbers rounded once, each with the command and the machine it came from."""

from __future__ import annotations

import math
from typing import Sequence, Union

import numpy as np

from pack_data.table import markdown as markdown


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
