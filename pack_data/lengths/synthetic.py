"""Lengths drawn by a specification such as `lognormal:mean=400,max=4096,n=1000000`, for experiments and benchmarks.

The same specification always gives the same histogram: the seed is part of it (default 0).
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, Tuple

import numpy as np

from pack_data.packing.histogram import LengthHistogram

HELP = """\
what --synthetic takes:
  lognormal:mean=400,max=4096,n=1000000[,sigma=1][,seed=0]   longer ones cut to max; or mode=, median= instead of mean=
  uniform:max=512,n=100000[,min=1][,seed=0]                  every length from min to max alike
  sample:wikipedia_512,n=1000000[,seed=0]                    drawn from a shipped histogram without replacement"""


# Keys that are whole numbers, and the least of each.
_WHOLE = {"max": 1, "n": 1, "min": 1, "seed": 0}


def synthetic_histogram(specification: str) -> LengthHistogram:
    """Draw a histogram.

    Args:
        specification: `KIND:KEY=NUMBER,...`; see `HELP` for the kinds.

    Raises:
        ValueError: the specification names no kind, misses a key or has a wrong value.
    """
    try:
        return LengthHistogram(_draw(specification), specification)
    except ValueError as error:
        raise ValueError(f"--synthetic {specification}: {error}") from None


def _draw(specification: str) -> np.ndarray:
    kind, _, rest = specification.partition(":")
    if kind not in _KINDS:
        raise ValueError(f"no kind is called {kind!r}; use one of {', '.join(_KINDS)}")
    draw, required, optional = _KINDS[kind]
    allowed = required + optional
    values: Dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        if kind == "sample" and "=" not in part and not values.get("histogram"):
            values["histogram"] = part
        else:
            values[part.partition("=")[0]] = _number(part)

    takes = f"{kind} takes {', '.join(allowed)}"
    for key in values:
        if key not in allowed:
            raise ValueError(f"no key {key!r}; {takes}")
    for key in required:
        if key not in values:
            raise ValueError(f"{key} is missing; {takes}")
    random = np.random.default_rng(values.pop("seed", 0))
    return draw(random, **values)


def _number(part: str) -> float:
    """Return the value of `KEY=NUMBER`, an int for keys that are whole numbers."""
    key, _, text = part.partition("=")
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{part!r} is not KEY=NUMBER") from None
    if key not in _WHOLE:
        return value
    if not value.is_integer() or value < _WHOLE[key]:
        raise ValueError(f"{key}={value:g} must be a whole number of at least {_WHOLE[key]}")
    return int(value)


def _lognormal(
    rng: np.random.Generator, *, max: int, n: int, sigma: float = 1.0, **centre: float
) -> np.ndarray:
    if len(centre) != 1:
        raise ValueError("pass exactly one of mean, mode and median")
    ((kind, value),) = centre.items()
    if value <= 0 or sigma < 0:
        raise ValueError(f"{kind} must be positive, sigma at least 0")
    shift = {"mean": -(sigma**2) / 2, "mode": sigma**2, "median": 0.0}[kind]
    drawn = np.rint(rng.lognormal(math.log(value) + shift, sigma, n))
    lengths = np.clip(drawn, 1, max).astype(np.int64)
    return np.bincount(lengths, minlength=max + 1)


def _uniform(rng: np.random.Generator, *, max: int, n: int, min: int = 1) -> np.ndarray:
    if min > max:
        raise ValueError(f"min={min} must not be above max={max}")
    return np.bincount(rng.integers(min, max + 1, n), minlength=max + 1)


def _sample(rng: np.random.Generator, *, histogram: str, n: int) -> np.ndarray:
    published = LengthHistogram.published(histogram)
    if n > published.sequences:
        raise ValueError(
            f"n={n} must be at most {published.sequences}, the sequences of {histogram}"
        )
    counts = published.counts[published.lengths]
    lengths = np.repeat(published.lengths.astype(np.int32), counts)
    drawn = rng.permutation(lengths)[:n]
    return np.bincount(drawn, minlength=len(published.counts))


_Kind = Tuple[Callable[..., np.ndarray], Tuple[str, ...], Tuple[str, ...]]
_KINDS: Dict[str, _Kind] = {  # how to draw, the keys needed, the keys allowed
    "lognormal": (_lognormal, ("max", "n"), ("mean", "mode", "median", "sigma", "seed")),
    "uniform": (_uniform, ("max", "n"), ("min", "seed")),
    "sample": (_sample, ("histogram", "n"), ("seed",)),
}
