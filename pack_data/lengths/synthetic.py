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


def synthetic_histogram(specification: str) -> LengthHistogram:
    """The histogram that the specification describes; see HELP for the three kinds."""
    kind, _, rest = specification.partition(":")
    if kind not in _KINDS:
        raise ValueError(f"--synthetic {specification}: no kind is called {kind!r}; there are {', '.join(_KINDS)}")
    draw, needed, allowed = _KINDS[kind]
    values: Dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, text = part.partition("=")
        if not equals and kind == "sample" and "histogram" not in values:
            values["histogram"] = key
            continue
        try:
            values[key] = float(text)
        except ValueError:
            raise ValueError(f"--synthetic {specification}: {part!r} is not KEY=NUMBER") from None
    unknown = set(values) - set(needed) - set(allowed)
    missing = set(needed) - set(values)
    if unknown or missing:
        problem = f"no key {sorted(unknown)[0]!r}" if unknown else f"{sorted(missing)[0]} is missing"
        raise ValueError(f"--synthetic {specification}: {problem}; {kind} takes {', '.join(needed + allowed)}")
    for key, least in (("max", 1), ("n", 1), ("min", 1), ("seed", 0)):
        if key in values:
            if not values[key].is_integer() or values[key] < least:
                raise ValueError(
                    f"--synthetic {specification}: {key}={values[key]:g} is not a whole number of at least {least}"
                )
            values[key] = int(values[key])
    values.setdefault("seed", 0)
    try:
        return LengthHistogram(draw(np.random.default_rng(values.pop("seed")), **values), specification)
    except ValueError as error:
        raise ValueError(f"--synthetic {specification}: {error}") from None


def _lognormal(rng: np.random.Generator, *, max: int, n: int, sigma: float = 1.0, **centre: float) -> np.ndarray:
    if len(centre) != 1:
        raise ValueError("give one of mean, mode and median")
    ((kind, value),) = centre.items()
    if value <= 0 or sigma < 0:
        raise ValueError(f"{kind} has to be positive, sigma at least 0")
    shift = {"mean": -(sigma**2) / 2, "mode": sigma**2, "median": 0.0}[kind]
    lengths = np.rint(rng.lognormal(math.log(value) + shift, sigma, n))
    return np.bincount(np.clip(lengths, 1, max).astype(np.int64), minlength=max + 1)


def _uniform(rng: np.random.Generator, *, max: int, n: int, min: int = 1) -> np.ndarray:
    if min > max:
        raise ValueError(f"min={min} is above max={max}")
    return np.bincount(rng.integers(min, max + 1, n), minlength=max + 1)


def _sample(rng: np.random.Generator, *, histogram: str, n: int) -> np.ndarray:
    whole = LengthHistogram.published(histogram)
    if n > whole.sequences:
        raise ValueError(f"{histogram} has {whole.sequences} sequences; n is at most that")
    lengths = np.repeat(whole.lengths.astype(np.int32), whole.counts[whole.lengths])
    return np.bincount(rng.permutation(lengths)[:n], minlength=len(whole.counts))


_Kind = Tuple[Callable[..., np.ndarray], Tuple[str, ...], Tuple[str, ...]]
_KINDS: Dict[str, _Kind] = {  # how to draw, the keys needed, the keys allowed
    "lognormal": (_lognormal, ("max", "n"), ("mean", "mode", "median", "sigma", "seed")),
    "uniform": (_uniform, ("max", "n"), ("min", "seed")),
    "sample": (_sample, ("histogram", "n"), ("seed",)),
}
