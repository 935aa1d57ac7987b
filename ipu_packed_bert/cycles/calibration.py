"""The four fitted parameters, their fit, and how far the fitted model is off.

factor: how many times longer everything on chip takes than the formulas say.
framework: how many times longer that takes in graphs made from PyTorch than in those written in PopART.
layout: cycles per byte of rearrangements whose atom size is not published, from 0.44 (8-byte atoms) to 5.148 (2-byte).
replica_seconds: what the host takes between two calls, for each replica that a process serves.

They are fitted to the published throughputs (`points.POINTS`) and to the paper's overhead at depth 2, and to nothing
else. Standard errors: 10 % for a published throughput (a task differs by 13 % between frameworks), 0.25 points for the
overhead. The fit is repeated without each of these 15 numbers: intervals are the range over these fits.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from math import log, sqrt
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ipu_packed_bert.cycles.parameters import Parameters
from ipu_packed_bert.cycles.pipeline import Pipeline
from ipu_packed_bert.cycles.points import FITTED_DEPTH, PAPER_CONFIG, PAPER_OVERHEAD, POINTS, Point
from ipu_packed_bert.cycles.target import TARGETS
from ipu_packed_bert.cycles.tracing import POPART, UNPACKED
from ipu_packed_bert.cycles.vertices import REARRANGE_BYTE
from ipu_packed_bert.cycles.workload import Machine
from ipu_packed_bert.settings import shipped as configurations
from ipu_packed_bert.settings.loading import load_config

STORED = Path(__file__).resolve().parent / "calibration.json"
_THROUGHPUT_SIGMA = 0.10  # of the logarithm of a published throughput
_OVERHEAD_SIGMA = 0.25  # of the paper's overhead, in percent of a micro-batch
_IPUS_ONLY = (
    "without_ipus=null",
)  # the cycle model is of IPUs: what changes without them is left out
_PAPER = f"Table 1, depth {FITTED_DEPTH}"


class Interval(NamedTuple):
    """A number and the ends of its interval."""

    lower: float
    value: float  # at the fitted parameters
    upper: float


@dataclass(frozen=True)
class Calibration:
    """The fitted parameters and the errors of the fit."""

    parameters: Parameters
    left_out: Dict[str, Parameters]  # fitted without one of the published numbers, by its name
    report: Dict[str, Any]

    def interval(self, value: Callable[[Parameters], float]) -> Interval:
        """Return the value at the fitted parameters and its range over the fits that leave one published number out."""
        fitted = value(self.parameters)
        values = [fitted, *map(value, self.left_out.values())]
        return Interval(min(values), fitted, max(values))

    def throughput(self, value: Callable[[Parameters], float]) -> Interval:
        """Return a throughput and the range that the errors of the left-out throughputs allow."""
        fitted = value(self.parameters)
        least, most = self._errors()
        return Interval(fitted / (1 + most), fitted, fitted / (1 + least))

    def duration(self, value: Callable[[Parameters], float]) -> Interval:
        """Return the time of an update (or its cycles) and the range that the left-out throughputs' errors allow."""
        fitted = value(self.parameters)
        least, most = self._errors()
        return Interval(fitted * (1 + least), fitted, fitted * (1 + most))

    def _errors(self) -> Tuple[float, float]:
        """Return the least and the greatest error of a throughput that was left out of its fit, as fractions."""
        errors = [row["left_out_error"] for row in self.report["points"]]
        return min(errors), max(errors)


class _Observation(NamedTuple):
    """A published point and its pipeline, from which a prediction for any parameters is cheap."""

    point: Point
    pipeline: Pipeline

    def predicted(self, parameters: Parameters) -> float:
        """Sequences per second of the whole machine."""
        point = self.point
        return self.pipeline.sequences_per_second(
            point.accumulation, point.sequences_per_pack, self._in_its_framework(parameters)
        )

    def seconds(self, parameters: Parameters) -> float:
        """Seconds of one weight update."""
        return self.pipeline.step(
            self.point.accumulation, self._in_its_framework(parameters)
        ).seconds

    def _in_its_framework(self, parameters: Parameters) -> Parameters:
        if self.point.pytorch:
            return parameters
        return replace(parameters, factor=parameters.factor / parameters.framework)

    @property
    def measured_seconds(self) -> float:
        """Seconds of one weight update that the published throughput implies."""
        point = self.point
        packs = point.accumulation * self.pipeline.micro_batch * self.pipeline.placement.replicas
        return packs * point.sequences_per_pack / point.sequences_per_second


class Observations(NamedTuple):
    throughputs: Tuple[_Observation, ...]
    packed: Pipeline  # the paper's graph at the fitted depth
    unpacked: Pipeline


def machines(folder: Optional[Path]) -> Dict[str, Machine]:
    """Return one machine for each target; they share their traces.

    Args:
        folder: directory that keeps traces and plans; None: nothing is kept.
    """
    first = Machine(TARGETS["mk2"], folder)
    return {
        name: first if name == "mk2" else Machine(target, folder, first.traces)
        for name, target in TARGETS.items()
    }


def observe(machine_of: Dict[str, Machine]) -> Observations:
    """Trace and lower the workload of every point.

    Args:
        machine_of: the machines, by the name of their target.
    """
    throughputs = []
    for point in POINTS:
        config = load_config(configurations.FOLDER / point.config, _IPUS_ONLY + point.overrides)
        pipeline = machine_of[point.target].pipeline(
            config, arrangement=point.arrangement, feed_forward_per_ipu=point.feed_forward_per_ipu
        )
        throughputs.append(_Observation(point, pipeline))

    config = load_config(configurations.FOLDER / PAPER_CONFIG, _IPUS_ONLY)
    mk2 = machine_of["mk2"]
    return Observations(
        tuple(throughputs),
        mk2.pipeline(config, arrangement=POPART, depth=FITTED_DEPTH),
        mk2.pipeline(config, arrangement=UNPACKED, depth=1),
    )


def overhead(packed: Pipeline, unpacked: Pipeline, parameters: Parameters) -> float:
    """Return the extra cycles of a micro-batch of packs, a fraction: the paper's OH, counted on the kernel."""
    return packed.micro_batch_cycles(parameters) / unpacked.micro_batch_cycles(parameters) - 1.0


# ---- the fit ---------------------------------------------------------------------------------------------------------


def _loss(
    observations: Sequence[_Observation],
    paper: Optional[Tuple[Pipeline, Pipeline]],
    parameters: Parameters,
) -> float:
    loss = sum(
        (log(o.point.sequences_per_second / o.predicted(parameters)) / _THROUGHPUT_SIGMA) ** 2
        for o in observations
    )
    if paper is not None:
        difference = 100 * overhead(*paper, parameters) - PAPER_OVERHEAD[FITTED_DEPTH]
        loss += (difference / _OVERHEAD_SIGMA) ** 2
    return loss


def _minimum(function: Callable[[float], float], low: float, high: float, steps: int) -> float:
    """Search by golden sections, whose floating-point operations are the same on every machine."""
    ratio = (sqrt(5.0) - 1.0) / 2.0
    a, b = low, high
    c, d = b - ratio * (b - a), a + ratio * (b - a)
    at_c, at_d = function(c), function(d)
    for _ in range(steps):
        if at_c <= at_d:
            b, d, at_d = d, c, at_c
            c = b - ratio * (b - a)
            at_c = function(c)
        else:
            a, c, at_c = c, d, at_d
            d = a + ratio * (b - a)
            at_d = function(d)
    return (a + b) / 2.0


def _at_layout(observations: Sequence[_Observation], layout: float) -> Parameters:
    """Fit the factor of either framework and the host's seconds at a layout parameter.

    Seconds of updates are linear in these three, except for which IPU is the slowest; that one is taken near 1.
    """

    def with_fitted(popart: float, factor: float, host: float) -> Parameters:
        return Parameters(factor, layout, host, factor / popart)

    def seconds_at(*fitted: float) -> np.ndarray:
        return np.array([observation.seconds(with_fitted(*fitted)) for observation in observations])

    low = seconds_at(0.9, 0.9, 0.0)
    popart_slope = (seconds_at(1.1, 0.9, 0.0) - low) / 0.2
    factor_slope = (seconds_at(0.9, 1.1, 0.0) - low) / 0.2
    host_slope = seconds_at(0.9, 0.9, 1.0) - low
    slopes = np.stack([popart_slope, factor_slope, host_slope], axis=1)  # [points, 3]
    rest = low - 0.9 * slopes[:, :2].sum(axis=1)
    measured = np.array([observation.measured_seconds for observation in observations])
    return with_fitted(*map(float, _least_squares(slopes, rest, measured)))


def _least_squares(slopes: np.ndarray, rest: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Return positive `x` with the least squares of log(measured / (slopes @ x + rest)), by Gauss-Newton."""
    best = np.array([1.0, 1.0, 0.005])
    for _ in range(10):
        predicted = slopes @ best + rest
        # The step is relative to `best`, which keeps it positive; what the points leave open moves the least.
        relative = slopes / predicted[:, None] * best
        residuals = np.log(measured / predicted)
        inverse = np.linalg.pinv(relative.T @ relative, rcond=1e-10, hermitian=True)
        step = inverse @ (relative.T @ residuals)
        best = best * np.maximum(1.0 + step, 0.1)
    return best


def _fit(
    observations: Sequence[_Observation], paper: Optional[Tuple[Pipeline, Pipeline]]
) -> Parameters:
    """Fit all four parameters by least squares, rounded: to four decimals, seconds to six."""

    def loss_at(layout: float) -> float:
        return _loss(observations, paper, _at_layout(observations, layout))

    layout = _minimum(loss_at, REARRANGE_BYTE[8], REARRANGE_BYTE[2], steps=32)
    best = _at_layout(observations, layout)
    return Parameters(
        round(best.factor, 4),
        round(layout, 4),
        round(best.replica_seconds, 6),
        round(best.framework, 4),
    )


def calibrate(observations: Observations) -> Calibration:
    """Fit the parameters, on all published numbers and without each of them, and compute the points' errors."""
    throughputs = observations.throughputs
    paper = (observations.packed, observations.unpacked)
    parameters = _fit(throughputs, paper)
    left_out: Dict[str, Parameters] = {}
    rows: List[Dict[str, Any]] = []
    for number, observation in enumerate(throughputs):
        point = observation.point
        without = _fit(throughputs[:number] + throughputs[number + 1 :], paper)
        left_out[point.name] = without
        measured = point.sequences_per_second
        rows.append(
            {
                "point": point.name,
                "what": point.what,
                "measured": measured,
                "fitted_error": _error(observation.predicted(parameters), measured),
                "left_out_error": _error(observation.predicted(without), measured),
            }
        )
    left_out[_PAPER] = _fit(throughputs, None)

    report: Dict[str, Any] = {
        "fitted_on": list(left_out),
        "sigma": {"throughput": _THROUGHPUT_SIGMA, "overhead_points": _OVERHEAD_SIGMA},
        "points": rows,
        "overhead_fitted_depth": {
            "paper": PAPER_OVERHEAD[FITTED_DEPTH],
            "model": round(100 * overhead(*paper, parameters), 4),
            "left_out": round(100 * overhead(*paper, left_out[_PAPER]), 4),
        },
        "mean_error": {},
        "worst_error": {},
    }
    for kind in ("fitted", "left_out"):
        errors = [abs(row[f"{kind}_error"]) for row in rows]
        report["mean_error"][kind] = round(sum(errors) / len(errors), 4)
        report["worst_error"][kind] = max(errors)
    return Calibration(parameters, left_out, report)


def _error(predicted: float, measured: float) -> float:
    return round(predicted / measured - 1.0, 4)


# ---- the stored fit --------------------------------------------------------------------------------------------------


def named(parameters: Parameters) -> Dict[str, float]:
    """Return the parameters by their names in the stored fit and in reports."""
    values = asdict(parameters)
    values["layout_cycles_per_byte"] = values.pop("layout")
    return values


def _parameters(stored: Dict[str, float]) -> Parameters:
    return Parameters(
        stored["factor"],
        stored["layout_cycles_per_byte"],
        stored["replica_seconds"],
        stored["framework"],
    )


def to_json(calibration: Calibration) -> str:
    """Return the text of the stored fit, `calibration.json`."""
    tree = {
        **named(calibration.parameters),
        "left_out": {name: named(parameters) for name, parameters in calibration.left_out.items()},
        "report": calibration.report,
    }
    return json.dumps(tree, indent=1, sort_keys=True) + "\n"


def load(path: Path = STORED) -> Calibration:
    """Read a stored fit.

    Args:
        path: the file; by default the one that the package ships.
    """
    stored = json.loads(path.read_text(encoding="utf-8"))
    left_out = {name: _parameters(parameters) for name, parameters in stored["left_out"].items()}
    return Calibration(_parameters(stored), left_out, stored["report"])
