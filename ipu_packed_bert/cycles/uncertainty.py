"""How far the model may be off: all unknowns drawn together, weighted by how well each draw meets what is published.

A draw is a whole set of unknowns from its prior (`UNKNOWNS`). The fitted factors and the host's seconds are then drawn
around their best values for this set, and the draw is weighted by its likelihood: the published throughputs, each with
a standard error of `_DISCREPANCY` in the logarithm, and the paper's overhead at the fitted depth (importance weights).
Draws taken by their weights are stored; a number is the median of what the model says for them, its interval holds
90 %. Throughputs get the discrepancy on top: what the model is off by for reasons that have no name here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ipu_packed_bert.cycles.parameters import Parameters
from ipu_packed_bert.cycles.vertices import REARRANGE_BYTE

STORED = Path(__file__).resolve().parent / "draws.json"
SEED, DRAWN, KEPT = 19, 20_000, 400
_DISCREPANCY = 0.04  # of the logarithm of a throughput: the points, left out of their fit, are off by 3.2 % rms
INSIDE = 0.90  # of an interval
_ENDS = ((1 - INSIDE) / 2, (1 + INSIDE) / 2)


def _uniform(low: float, high: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda generator, count: low + (high - low) * generator.random(count)


def _factor(spread: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda generator, count: np.exp(spread * generator.standard_normal(count))


_ATOMS = _uniform(REARRANGE_BYTE[8], REARRANGE_BYTE[2])
# Fields of `Parameters` and their priors; docs/cycle_model.md has them in words.
UNKNOWNS: Dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "layout": _ATOMS,
    "square": _ATOMS,
    "products": _factor(0.10),
    "batched": _factor(0.10),
    "wide": _factor(0.03),
    "exchange": _factor(0.20),
    "sync": _factor(0.30),
    "links": _factor(0.30),
    "gateways": _factor(0.30),
    "streaming": _factor(0.50),
}
FIELDS = ("factor", "replica_seconds", "framework", *UNKNOWNS)


class Interval(NamedTuple):
    """A number and the ends of its interval."""

    lower: float
    value: float  # the median of the draws; at the fitted parameters where rows must add up, or where it says fitted
    upper: float


@dataclass(frozen=True)
class Draws:
    """Draws of all unknowns that are equally likely, and how they came about."""

    parameters: Parameters  # of arrays
    discrepancy: np.ndarray  # factor on a throughput
    report: Dict[str, Any]

    def interval(self, value: Callable[[Parameters], Any]) -> Interval:
        """Of a number that the model computes from parameters."""
        return Interval(*(float(end) for end in np.quantile(value(self.parameters), (_ENDS[0], 0.5, _ENDS[1]))))

    def throughput(self, value: Callable[[Parameters], Any]) -> Interval:
        """As `interval`, of a throughput: its ends with what the model is off by for reasons without a name."""
        middle = self.interval(value)
        return self.interval(lambda each: value(each) * self.discrepancy)._replace(value=middle.value)


def _prior(count: int, seed: int) -> Parameters:
    """Draws of the unknowns, without the fitted ones."""
    return Parameters(
        **{
            field: draw(np.random.default_rng([seed, number]), count)
            for number, (field, draw) in enumerate(UNKNOWNS.items())
        }
    )


class _Updates(NamedTuple):
    """Seconds of updates: linear in what is fitted, but for which IPU takes longest; that one is taken near 1.

    Fitted are the factor in graphs written in PopART, that in graphs made from PyTorch, and the host's seconds.
    """

    slopes: np.ndarray  # [draws, points, 3]
    rest: np.ndarray  # [draws, points]

    def at(self, values: np.ndarray) -> np.ndarray:
        return np.einsum("npi,ni->np", self.slopes, values) + self.rest

    def nearest(self, measured: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """The values with the least squares of logarithms [draws, 3], by Gauss-Newton, and their precision."""
        best = np.tile([1.0, 1.0, 0.005], (len(self.rest), 1))
        for _ in range(10):
            now = self.at(best)
            slopes, left = self.slopes / now[..., None] / _DISCREPANCY, np.log(measured / now) / _DISCREPANCY
            precision = np.einsum("npi,npj->nij", slopes, slopes)
            # In parts of the values, which stay positive; where the points leave one open, the smallest step.
            scaled = precision * best[:, :, None] * best[:, None, :]
            inverse = np.linalg.pinv(scaled, rcond=1e-10, hermitian=True)
            step = np.einsum("nij,nj,npj,np->ni", inverse, best, slopes, left, optimize=True)
            best = best * np.maximum(1.0 + step, 0.1)
        return best, precision


def _with(drawn: Parameters, popart: Any, factor: Any, host: Any) -> Parameters:
    return replace(drawn, factor=factor, framework=factor / popart, replica_seconds=host)


def _updates(seconds: Sequence[Callable[[Parameters], Any]], drawn: Parameters) -> _Updates:
    low, popart, factor, host = (
        np.stack([np.broadcast_to(of(_with(drawn, *at)), np.size(drawn.layout)) for of in seconds], axis=1)
        for at in ((0.9, 0.9, 0.0), (1.1, 0.9, 0.0), (0.9, 1.1, 0.0), (0.9, 0.9, 1.0))
    )
    slopes = np.stack([(popart - low) / 0.2, (factor - low) / 0.2, host - low], axis=2)
    return _Updates(slopes, low - 0.9 * slopes[:, :, :2].sum(axis=2))


def nearest(
    seconds: Sequence[Callable[[Parameters], Any]], measured: Sequence[float], others: Parameters
) -> Parameters:
    """What is fitted, at one set of the others. seconds: of an update, for each point; measured: as published."""
    best, _ = _updates(seconds, others).nearest(np.asarray(measured))
    return _with(others, *map(float, best[0]))


class _Sampled(NamedTuple):
    parameters: Parameters
    log_weights: np.ndarray  # not normalised
    log_likelihood: np.ndarray  # [draws, points]
    seconds: np.ndarray  # [draws, points], of an update


def _sample(
    seconds: Sequence[Callable[[Parameters], Any]], measured: Sequence[float], drawn: Parameters, seed: int
) -> _Sampled:
    """The fitted unknowns for each draw of the others, and the draws' weights. seconds, measured: as of `nearest`."""
    updates = _updates(seconds, drawn)
    best, precision = updates.nearest(np.asarray(measured))
    covariance = np.linalg.inv(precision)
    noise = np.random.default_rng([seed, len(UNKNOWNS)]).standard_normal(best.shape)
    taken = best + np.einsum("nij,nj->ni", np.linalg.cholesky(covariance), noise)
    possible = (taken > 0).all(axis=1)
    taken = np.where(possible[:, None], taken, best)
    current = updates.at(taken)
    likelihood = -0.5 * (np.log(np.asarray(measured) / current) / _DISCREPANCY) ** 2
    proposed = -0.5 * (noise**2).sum(axis=1) - 0.5 * np.log(np.linalg.det(covariance))
    weights = np.where(possible, likelihood.sum(axis=1) - proposed, -np.inf)
    return _Sampled(_with(drawn, *taken.T), weights, likelihood, current)


def _normalised(log_weights: np.ndarray) -> np.ndarray:
    weights = np.exp(log_weights - log_weights.max())
    return weights / weights.sum()


def _effective(weights: np.ndarray) -> float:
    """Effective sample size of normalised weights."""
    return float(1.0 / (weights**2).sum())


def _weighted_quantiles(values: np.ndarray, weights: np.ndarray, shares: Sequence[float]) -> List[float]:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return [float(values[order][min(int(np.searchsorted(reached, share)), len(values) - 1)]) for share in shares]


def sample(
    seconds: Sequence[Callable[[Parameters], Any]],
    measured: Sequence[float],
    names: Sequence[str],
    overhead: Callable[[Parameters], Any],
    published: float,
    sigma: float,
    *,
    drawn: int = DRAWN,
    kept: int = KEPT,
    seed: int = SEED,
) -> Draws:
    """seconds, measured, names: of the points. overhead, published, sigma: of the fitted overhead, in percent."""
    found = _sample(seconds, measured, _prior(drawn, seed), seed)
    overheads = np.asarray(overhead(found.parameters))
    of_overhead = -0.5 * ((overheads - published) / sigma) ** 2
    log_weights = found.log_weights + of_overhead
    weights = _normalised(log_weights)
    generator = np.random.default_rng([seed, len(UNKNOWNS) + 1])
    off = _DISCREPANCY * generator.standard_normal(drawn)
    points = []
    for number, (name, value) in enumerate(zip(names, measured)):
        without = _normalised(log_weights - found.log_likelihood[:, number])
        ends = _weighted_quantiles(np.log(found.seconds[:, number]) + off, without, _ENDS)
        low, high = (float(np.exp(end) / value - 1.0) for end in ends)
        points.append({"point": name, "low": round(low, 4), "high": round(high, 4), "inside": low <= 0.0 <= high})
    without = _normalised(found.log_weights)
    # Between this and what is published lies the published number's own error, as the discrepancy for throughputs.
    error = sigma * np.random.default_rng([seed, len(UNKNOWNS) + 2]).standard_normal(drawn)
    ends = _weighted_quantiles(overheads + error, without, _ENDS)
    at = (generator.random() + np.arange(kept)) / kept
    chosen = np.minimum(np.searchsorted(np.cumsum(weights), at), drawn - 1)
    fields = {field: [float(f"{value:.5g}") for value in getattr(found.parameters, field)[chosen]] for field in FIELDS}
    factors = [float(f"{value:.5g}") for value in np.exp(_DISCREPANCY * generator.standard_normal(kept))]
    report = {
        "seed": seed,
        "drawn": drawn,
        "effective": round(_effective(weights), 1),
        "left_out": points,
        "overhead_left_out": [round(end, 3) for end in ends],
        "covered": sum(bool(point["inside"]) for point in points),
    }
    return _draws(fields, factors, report)


def _draws(fields: Dict[str, List[float]], factors: List[float], report: Dict[str, Any]) -> Draws:
    return Draws(
        Parameters(**{field: np.asarray(values) for field, values in fields.items()}), np.asarray(factors), report
    )


def to_json(draws: Draws) -> str:
    fields = {field: [float(value) for value in getattr(draws.parameters, field)] for field in FIELDS}
    lines = [f' "{key}": {json.dumps(value)}' for key, value in sorted(draws.report.items())]
    lines += [f' "discrepancy": {json.dumps([float(value) for value in draws.discrepancy])}']
    lines += [' "fields": {\n' + ",\n".join(f'  "{k}": {json.dumps(v)}' for k, v in fields.items()) + "\n }"]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def load(path: Optional[Path] = None) -> Draws:
    """The committed draws."""
    stored = json.loads((path or STORED).read_text(encoding="utf-8"))
    fields, factors = stored.pop("fields"), stored.pop("discrepancy")
    return _draws(fields, factors, stored)


def alike(some: Draws, others: Draws) -> bool:
    """Whether two sets of draws say the same but for the rounding of a machine: quantiles of every unknown."""

    def quantiles(draws: Draws) -> np.ndarray:
        return np.array(
            [np.quantile(getattr(draws.parameters, field), [0.1, 0.25, 0.5, 0.75, 0.9]) for field in FIELDS]
        )

    return some.report["covered"] == others.report["covered"] and np.allclose(
        quantiles(some), quantiles(others), rtol=0.02, atol=1e-4
    )
