"""Intervals and tests over seeds, and how likely a test passes. All of it is scipy's."""

from __future__ import annotations

from typing import Dict, Mapping, NamedTuple, Sequence

import numpy as np
from scipy import integrate, stats

CONFIDENCE = 0.9  # of an interval; both ends of it are one-sided tests at 5 %
LEVEL = 0.05  # of a P value
TWICE = 0.1  # by this share two timings of the same may differ; beyond it ratios of times tell nothing


class Interval(NamedTuple):
    """A mean and its interval of `CONFIDENCE`."""

    mean: float
    low: float
    high: float
    seeds: int

    def within(self, margin: float) -> bool:
        """Whether the difference is shown to be smaller than the margin: two one-sided tests (Schuirmann 1987)."""
        return -margin < self.low and self.high < margin

    def words(self, form: str, unit: str = "") -> str:
        """`+0.12 (+0.10 to +0.14)`; the unit stands before the bracket. Of one seed the mean alone."""
        if self.seeds < 2:
            return f"{self.mean:{form}}{unit}"
        return f"{self.mean:{form}}{unit} ({self.low:{form}} to {self.high:{form}})"


def students(values: Sequence[float]) -> Interval:
    """The mean of one value a seed, or a round, with Student's interval; as wide as can be for one value."""
    number, mean = len(values), float(np.mean(values))
    if number < 2:
        return Interval(mean, -np.inf, np.inf, number)
    low, high = stats.t.interval(CONFIDENCE, number - 1, mean, stats.sem(values)) if np.ptp(values) else (mean, mean)
    return Interval(mean, float(low), float(high), number)


def _p_above(values: np.ndarray, bound: float) -> float:
    """P value of a one-sided t test: that the mean lies above the bound."""
    error, apart = float(stats.sem(values)), float(values.mean()) - bound
    return float(stats.t.sf(apart / error, len(values) - 1)) if error else float(apart <= 0)


def equivalence(values: Sequence[float], margin: float) -> float:
    """P value of two one-sided t tests: the larger one. Below 5 %: the interval lies within the margin."""
    found = np.asarray(values, dtype=np.float64)
    return max(_p_above(found, -margin), _p_above(-found, -margin))


def above(ratios: Sequence[float], bound: float) -> float:
    """P value of a one-sided t test of their logarithms: that the ratios lie above the bound."""
    return _p_above(np.log(ratios), float(np.log(bound)))


def holm(found: Mapping[str, float]) -> Dict[str, float]:
    """P values adjusted for their number (Holm 1979)."""
    adjusted, largest = {}, 0.0
    for place, name in enumerate(sorted(found, key=lambda each: found[each])):
        largest = max(largest, min(1.0, (len(found) - place) * found[name]))
        adjusted[name] = largest
    return {name: adjusted[name] for name in found}


def power(deviation: float, margin: float, seeds: int) -> float:
    """Probability that `equivalence` passes at 5 % where the true difference is 0 and seeds lie `deviation` apart.

    With s the standard deviation found, the mean must lie within margin - t s / sqrt(n); s**2 (n - 1) / deviation**2
    has a chi-squared distribution and is independent of the mean.
    """
    if not deviation:
        return 1.0
    freedom, error = seeds - 1, deviation / seeds**0.5
    t = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))

    def passes(share: float) -> float:  # share: of the distribution of s**2 below, so that no spread is too small
        room = margin / error - t * (float(stats.chi2.ppf(share, freedom)) / freedom) ** 0.5
        return max(0.0, float(2 * stats.norm.cdf(room) - 1))

    return float(integrate.quad(passes, 0, 1, limit=200)[0])


def error_over_sequences(masked: np.ndarray, mlm: np.ndarray, nsp: np.ndarray) -> float:
    """Standard error of a difference of losses over the held-out sequences alone, nats.

    masked: tokens of each sequence, [N]; mlm, nsp: differences of its losses, [N]. The loss of a masked token is a
    ratio of two sums, so its residuals count (delta method).
    """
    residuals = (mlm - mlm.sum() / masked.sum() * masked) / masked.mean() + nsp
    return float(stats.sem(residuals))


def ratio(values: Sequence[float]) -> Interval:
    """Of ratios in rounds: the geometric mean, with Student's interval of their logarithms; none for one round.

    Where a value is not above 0, as a difference of two times may be: the median, without an interval.
    """
    if min(values) <= 0:
        return Interval(float(np.median(values)), 0.0, float("inf"), len(values))
    found = students(np.log(np.asarray(values, dtype=np.float64)).tolist())
    mean, low, high = (float(np.exp(each)) for each in found[:3])
    return Interval(mean, low, high, found.seeds)


def median_interval(values: Sequence[float]) -> Interval:
    """The median and its interval: two of the values, between which the true median lies with `CONFIDENCE` at least.

    Nothing is assumed of how the values are distributed. With fewer than five values the interval is that of all,
    and its confidence lower.
    """
    found, number, outside = sorted(values), len(values), 0  # how many values lie outside at each end
    while outside < (number - 1) // 2 and 2 * stats.binom.cdf(outside + 1, number, 0.5) <= 1 - CONFIDENCE:
        outside += 1
    return Interval(float(np.median(found)), found[outside], found[number - 1 - outside], number)
