"""Differences of held-out losses with intervals over sequences and seeds, and what follows from them.

Runs are compared pair by pair: the same seed, the same held-out sequences. Sequences are resampled. Seeds are too few
for that: resampling three of them gives intervals that are much too narrow. What they add is drawn instead from
Student's t with the standard error of their differences, as if each difference of a seed were normal.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional, Sequence

import numpy as np
from scipy import special

CONFIDENCE = 0.9  # of an interval; both ends of it are one-sided tests at 5 %
SHARE = 0.25  # of what the broken control costs: the margin
TWICE = 0.1  # by this share two timings of the same may differ; beyond it ratios of times tell nothing
DRAWS = 4000
_AT_ONCE = 200


class Scores(NamedTuple):
    """What one run scores on each of N held-out sequences."""

    masked: np.ndarray  # [N] masked tokens
    mlm: np.ndarray  # [N] their losses added up, nats
    nsp: Optional[np.ndarray]  # [N] loss of the next sentence, nats; None without that task

    @property
    def mlm_loss(self) -> float:
        """A masked token's."""
        return float(self.mlm.sum() / self.masked.sum())

    @property
    def nsp_loss(self) -> float:
        return 0.0 if self.nsp is None else float(self.nsp.mean())

    @property
    def loss(self) -> float:
        """What is trained: both."""
        return self.mlm_loss + self.nsp_loss


class Interval(NamedTuple):
    """A difference and its interval of `CONFIDENCE`."""

    mean: float
    low: float
    high: float
    seeds: int

    def within(self, margin: float) -> bool:
        """Whether the difference is shown to be smaller than the margin: two one-sided tests (Schuirmann 1987)."""
        return -margin < self.low and self.high < margin

    def words(self, form: str, unit: str = "") -> str:
        """`+0.12 (+0.10 to +0.14)`; the unit stands before the bracket."""
        return f"{self.mean:{form}}{unit} ({self.low:{form}} to {self.high:{form}})"


def difference(first: Sequence[Scores], second: Sequence[Scores], *, masked_only: bool = False) -> Interval:
    """Held-out loss of the first runs minus that of the second ones, run by run.

    masked_only: of the masked tokens alone, also where one side has no next sentence task.
    Raises ValueError where the runs are no pairs. One pair: the interval is over sequences only.
    """
    if not first or len(first) != len(second):
        raise ValueError(f"{len(first)} runs and {len(second)} runs are no pairs; run the same seeds of both")
    masked = first[0].masked
    if any(not np.array_equal(each.masked, masked) for each in (*first, *second)):
        raise ValueError("the runs were not scored on the same held-out sequences; measure them in one folder")
    mlm = np.array([one.mlm - other.mlm for one, other in zip(first, second)], dtype=np.float64)
    nsp = np.zeros_like(mlm)
    if not masked_only:
        if any(each.nsp is None for each in (*first, *second)):
            raise ValueError("a run has no next sentence task; compare the losses of its masked tokens only")
        nsp = np.array([one.nsp - other.nsp for one, other in zip(first, second)], dtype=np.float64)  # type: ignore
    by_seed = mlm.sum(axis=1) / masked.sum() + nsp.mean(axis=1)
    mean, seeds = float(by_seed.mean()), len(by_seed)
    random = np.random.default_rng(0)
    drawn = _resampled(masked, mlm.mean(axis=0), nsp.mean(axis=0), random)
    if seeds > 1:
        # Its quantiles in random order: t of one degree of freedom, drawn, would not come out symmetric.
        t = special.stdtrit(seeds - 1, random.permutation((np.arange(DRAWS) + 0.5) / DRAWS))
        drawn = drawn + by_seed.std(ddof=1) / np.sqrt(seeds) * t
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()
    return Interval(mean, low, high, seeds)


def students(values: Sequence[float]) -> Interval:
    """The mean of one value a seed, or a round, with Student's interval; as wide as can be for one value."""
    number, mean = len(values), float(np.mean(values))
    if number < 2:
        return Interval(mean, -np.inf, np.inf, number)
    t = float(special.stdtrit(number - 1, (1 + CONFIDENCE) / 2))
    half = t * float(np.std(values, ddof=1)) / number**0.5
    return Interval(mean, mean - half, mean + half, number)


def _resampled(masked: np.ndarray, mlm: np.ndarray, nsp: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The loss over sequences drawn with replacement, [DRAWS]."""
    number, found = len(masked), []
    for _ in range(DRAWS // _AT_ONCE):
        chosen = random.integers(number, size=(_AT_ONCE, number))
        found.append(mlm[chosen].sum(axis=1) / masked[chosen].sum(axis=1) + nsp[chosen].mean(axis=1))
    return np.concatenate(found)


class Verdict(NamedTuple):
    """What an experiment with a broken control says."""

    shows: bool  # whether the control fails the test that the claim has to pass
    equivalent: bool  # whether the claim passes it
    why: str  # one line


def verdict(
    margin: Optional[Interval], claim: Interval, control: Interval, *, unit: str = "nats", digits: int = 4
) -> Verdict:
    """Whether `claim` is a difference smaller than the margin, in an experiment that would have noticed `control`.

    margin: what the control costs on seeds that do not count; `SHARE` of it is the margin. None: not measured.
    unit, digits: of the differences, in words.
    """

    def words(interval: Interval) -> str:
        return interval.words(f"+.{digits}f", f" {unit}")

    if margin is None:
        return Verdict(False, False, "shows nothing yet: what the control costs is not measured")
    if claim.seeds < 2 or control.seeds < 2:
        return Verdict(False, False, "shows nothing yet: a verdict needs two seeds of each run")
    if margin.low <= 0:
        return Verdict(
            False,
            False,
            f"shows nothing: the control costs {words(margin)} on the seeds that set the margin, not clearly more "
            f"than 0",
        )
    bound = SHARE * margin.mean
    if control.within(bound):
        passes = f"shows nothing: the control passes the test as well, {words(control)}, margin {bound:.{digits}f}"
        return Verdict(False, False, passes)
    if control.low <= bound:  # failing for want of sequences or seeds says nothing of the control
        unclear = f"shows nothing: the control does not fail clearly, {words(control)}, margin {bound:.{digits}f}"
        return Verdict(False, False, unclear)
    equivalent = claim.within(bound)
    return Verdict(
        True,
        equivalent,
        f"{'equivalent' if equivalent else 'not shown to be equivalent'}: {words(claim)}, margin "
        f"{bound:.{digits}f}; the control fails as it must: {words(control)}",
    )


def ratio(values: Sequence[float]) -> Interval:
    """Of ratios in rounds: the geometric mean, with Student's interval of their logarithms; none for one round.

    Where a value is not above 0, as a difference of two times may be: the median, without an interval.
    """
    if min(values) <= 0:
        return Interval(float(np.median(values)), 0.0, float("inf"), len(values))
    found = students(np.log(np.asarray(values, dtype=np.float64)).tolist())
    mean, low, high = (float(np.exp(each)) for each in (found.mean, found.low, found.high))
    return Interval(mean, low, high, len(values))


def median_interval(values: Sequence[float]) -> Interval:
    """The median and its interval: two of the values, between which the true median lies with `CONFIDENCE` at least.

    Nothing is assumed of how the values are distributed. With fewer than five values the interval is that of all,
    and its confidence lower.
    """
    found = sorted(values)
    number, outside = len(found), 0  # how many values lie outside at each end
    below = 0.5**number  # chance that the true median lies below all but `outside` values
    while outside < (number - 1) // 2:
        below += math.comb(number, outside + 1) * 0.5**number
        if 2 * below > 1 - CONFIDENCE:
            break
        outside += 1
    return Interval(float(np.median(found)), found[outside], found[number - 1 - outside], number)
