"""Intervals and tests over seeds, and the power of a test, by scipy."""

from __future__ import annotations

from typing import Dict, Mapping, NamedTuple, Sequence

import numpy as np
from scipy import integrate, stats

CONFIDENCE = 0.9  # of an interval; each end is a one-sided test at 5 %
LEVEL = 0.05  # of a P value


class Interval(NamedTuple):
    """A mean and its interval of `CONFIDENCE`."""

    mean: float
    low: float
    high: float
    seeds: int

    def within(self, margin: float) -> bool:
        """Return True if the difference is shown to be below the margin: two one-sided tests (Schuirmann 1987)."""
        return -margin < self.low and self.high < margin

    def over(self, unit: float) -> Interval:
        """Return the interval in multiples of a unit."""
        return self._replace(
            mean=self.mean / unit,
            low=self.low / unit,
            high=self.high / unit,
        )

    def words(self, form: str) -> str:
        """Format as `+0.12 (+0.10 to +0.14)`; the mean alone for one seed."""
        mean = f"{self.mean:{form}}"
        if self.seeds < 2:
            return mean
        return f"{mean} ({self.low:{form}} to {self.high:{form}})"


def extremes(values: Sequence[float]) -> Interval:
    """Return the mean, with the smallest and the largest value as its ends."""
    mean = float(np.mean(values))
    return Interval(mean, min(values), max(values), len(values))


def students(values: Sequence[float]) -> Interval:
    """Return the mean of the values of seeds or rounds, with Student's interval, which is infinite for one value."""
    number = len(values)
    mean = float(np.mean(values))
    if number < 2:
        return Interval(mean, -np.inf, np.inf, number)
    low = high = mean
    if np.ptp(values):
        error = stats.sem(values)
        low, high = stats.t.interval(CONFIDENCE, number - 1, mean, error)
    return Interval(mean, float(low), float(high), number)


def _p_above(values: np.ndarray, bound: float) -> float:
    """Return the P value of a one-sided t test of a mean above the bound; values that are not numbers show nothing."""
    if np.isnan(values).any():
        return 1.0
    error = float(stats.sem(values))
    distance = float(values.mean()) - bound
    if not error:
        return float(distance <= 0)
    t = distance / error
    return float(stats.t.sf(t, len(values) - 1))


def equivalence(values: Sequence[float], margin: float) -> float:
    """Return the larger P value of two one-sided t tests; below 5 %, the interval lies within the margin."""
    differences = np.asarray(values, dtype=np.float64)
    above_lower = _p_above(differences, -margin)
    below_upper = _p_above(-differences, -margin)
    return max(above_lower, below_upper)


def above(ratios: Sequence[float], bound: float) -> float:
    """Return the P value of a one-sided t test, on logarithms, of ratios above the bound."""
    logarithms = np.log(ratios)
    return _p_above(logarithms, float(np.log(bound)))


def holm(p_values: Mapping[str, float]) -> Dict[str, float]:
    """Adjust P values for their number (Holm 1979)."""
    adjusted = dict(p_values)
    largest = 0.0
    tests_left = len(p_values)
    for name in sorted(p_values, key=lambda name: p_values[name]):
        product = tests_left * p_values[name]
        largest = max(largest, min(1.0, product))
        adjusted[name] = largest
        tests_left -= 1
    return adjusted


def power(deviation: float, margin: float, seeds: int) -> float:
    """Return the probability that `equivalence` passes at 5 % if the true difference is 0.

    The mean of a sample with the standard deviation s must be within margin - t s / sqrt(n); s**2 (n - 1) /
    deviation**2 has a chi-squared distribution and is independent of the mean.

    Args:
        deviation: Standard deviation of a seed.
        margin: The margin.
        seeds: Number of seeds, n.
    """
    if not deviation:
        return 1.0
    freedom = seeds - 1
    error = deviation / seeds**0.5
    t = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))

    def passes(share: float) -> float:
        """Return the probability at a quantile of the distribution of s**2."""
        chi_squared = float(stats.chi2.ppf(share, freedom))
        variance = chi_squared / freedom
        limit = margin / error - t * variance**0.5
        inside = 2 * stats.norm.cdf(limit) - 1
        return max(0.0, float(inside))

    probability, _ = integrate.quad(passes, 0, 1, limit=200)
    return float(probability)


def ratio(values: Sequence[float]) -> Interval:
    """Return the geometric mean of ratios, with Student's interval of their logarithms.

    If a value is not above 0, such as the difference of two times, return the median with an infinite interval.
    """
    if min(values) <= 0:
        median = float(np.median(values))
        return Interval(median, 0.0, np.inf, len(values))
    logarithms = np.log(values).tolist()
    interval = students(logarithms)
    mean, low, high = np.exp(interval[:3]).tolist()
    return Interval(mean, low, high, interval.seeds)
