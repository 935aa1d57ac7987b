"""The fit of the five free parameters of the cycle model, and its errors.

factor: actual cycles on chip / cycles of the formulas.
framework: cycles on chip of a graph compiled from PyTorch / cycles of the same graph written in PopART.
layout: cycles per byte of rearrangements whose atom size is not published, from 0.44 (8-byte atoms) to 5.148 (2-byte).
replica_seconds: seconds of the host between two calls, for each replica of a PyTorch process.
popart_replica_seconds: the same of a PopART process.

They are fitted to the published throughputs (`points.POINTS`) and to the paper's overhead at depth 2 only. Standard
errors: 10 % for a published throughput (a task differs by 13 % between frameworks), 0.25 points for the overhead. The
fit is repeated without each of these 16 numbers: the errors of the throughputs left out are those of predictions. The
spread of these fits is no error of a speed-up: three of four published ratios of throughputs lie outside it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import log, sqrt
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ipu_packed_bert.settings import shipped as configurations
from ipu_packed_bert.settings.loading import load_config
from ipu_profiling.cycles.parameters import Parameters
from ipu_profiling.cycles.pipeline import Pipeline
from ipu_profiling.cycles.points import FITTED_DEPTH, PAPER_CONFIG, PAPER_OVERHEAD, POINTS, Point
from ipu_profiling.cycles.target import TARGETS
from ipu_profiling.cycles.tracing import POPART, UNPACKED
from ipu_profiling.cycles.vertices import REARRANGE_BYTE
from ipu_profiling.cycles.workload import Machine, Traces

STORED = Path(__file__).resolve().parent / "calibration.json"
_THROUGHPUT_SIGMA = 0.10  # of the logarithm of a published throughput
_OVERHEAD_SIGMA = 0.25  # of the paper's overhead, in percent of a micro-batch
_FEW_REPLICAS = 4  # of a process
_IPUS_ONLY = ("without_ipus=null",)  # no changes for machines without IPUs
_PAPER = f"Table 1, depth {FITTED_DEPTH}"


class Interval(NamedTuple):
    """A number and the ends of its interval."""

    lower: float
    value: float  # at the fitted parameters
    upper: float


@dataclass(frozen=True)
class Calibration:
    """The fitted parameters and the errors of their fit."""

    parameters: Parameters
    left_out: Dict[str, Parameters]  # fitted without one of the published numbers, by its name
    report: Dict[str, Any]

    def throughput(self, value: Callable[[Parameters], float]) -> Interval:
        """Return a throughput and the range that the errors of the left-out throughputs allow."""
        fitted = value(self.parameters)
        least, most = self._errors()
        return Interval(fitted / (1 + most), fitted, fitted / (1 + least))

    def duration(self, value: Callable[[Parameters], float]) -> Interval:
        """Return the time or cycles of an update and the range that the errors of the left-out throughputs allow."""
        fitted = value(self.parameters)
        least, most = self._errors()
        return Interval(fitted * (1 + least), fitted, fitted * (1 + most))

    def _errors(self) -> Tuple[float, float]:
        """Return the least and the greatest error of a throughput that its fit left out, as fractions."""
        errors = [row["left_out_error"] for row in self.report["points"]]
        return min(errors), max(errors)


class _Observation(NamedTuple):
    """A published point and its pipeline, from which a prediction for any parameters is cheap."""

    point: Point
    pipeline: Pipeline

    def predicted(self, parameters: Parameters) -> float:
        """Return the sequences per second of the whole machine."""
        point = self.point
        return self.pipeline.sequences_per_second(
            point.accumulation, point.sequences_per_pack, self._in_its_framework(parameters)
        )

    def seconds(self, parameters: Parameters) -> float:
        """Return the seconds of one weight update."""
        in_its_framework = self._in_its_framework(parameters)
        return self.pipeline.step(self.point.accumulation, in_its_framework).seconds

    def _in_its_framework(self, parameters: Parameters) -> Parameters:
        return parameters if self.point.pytorch else parameters.of_popart()

    @property
    def measured_seconds(self) -> float:
        """Seconds of one weight update that the published throughput implies."""
        point = self.point
        packs = point.accumulation * self.pipeline.micro_batch * self.pipeline.placement.replicas
        return packs * point.sequences_per_pack / point.sequences_per_second


class Observations(NamedTuple):
    """The pipelines of all published numbers to which the model is fitted."""

    throughputs: Tuple[_Observation, ...]
    packed: Pipeline  # the paper's graph at the fitted depth
    unpacked: Pipeline


def machines(folder: Optional[Path]) -> Dict[str, Machine]:
    """Return one machine for each target, by its name; the machines share their traces.

    Args:
        folder: directory of the cache of traces and plans; None: no cache.
    """
    traces = Traces(folder)
    return {name: Machine(target, folder, traces) for name, target in TARGETS.items()}


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
    """Return the extra cycles of a micro-batch of packs as a fraction: the paper's OH, counted on the kernel."""
    packed_cycles = packed.micro_batch_cycles(parameters)
    unpacked_cycles = unpacked.micro_batch_cycles(parameters)
    return packed_cycles / unpacked_cycles - 1.0


# ---- the fit ---------------------------------------------------------------------------------------------------------


def _loss(
    observations: Sequence[_Observation],
    paper: Optional[Tuple[Pipeline, Pipeline]],
    parameters: Parameters,
) -> float:
    """Return the sum of squared errors in standard errors; `paper` is the packed and the unpacked pipeline."""
    loss = 0.0
    for observation in observations:
        published = observation.point.sequences_per_second
        error = log(published / observation.predicted(parameters))
        loss += (error / _THROUGHPUT_SIGMA) ** 2
    if paper is not None:
        difference = 100 * overhead(*paper, parameters) - PAPER_OVERHEAD[FITTED_DEPTH]
        loss += (difference / _OVERHEAD_SIGMA) ** 2
    return loss


def _minimum(function: Callable[[float], float], low: float, high: float, steps: int) -> float:
    """Return the minimum of a function by golden sections, whose arithmetic is the same on every machine."""
    ratio = (sqrt(5.0) - 1.0) / 2.0
    left = high - ratio * (high - low)
    right = low + ratio * (high - low)
    at_left = function(left)
    at_right = function(right)
    for _ in range(steps):
        if at_left <= at_right:
            high = right
            right = left
            at_right = at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low = left
            left = right
            at_left = at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return (low + high) / 2.0


def _at_layout(observations: Sequence[_Observation], layout: float) -> Parameters:
    """Fit the factors and the host's seconds of both frameworks at a layout parameter.

    The seconds of an update are linear in these four as long as the same IPU is the slowest; their slopes are taken
    between factors 0.9 and 1.1. Processes of few replicas do not determine the host's seconds: if there are no others
    in PyTorch, its host takes as long as PopART's.
    """
    separate_hosts = any(
        observation.point.pytorch and observation.pipeline.placement.replicas > _FEW_REPLICAS
        for observation in observations
    )

    def parameters_of(values: Sequence[float]) -> Parameters:
        popart, pytorch, popart_host = values[:3]
        return Parameters(pytorch, layout, values[-1], pytorch / popart, popart_host)

    def seconds_at(values: np.ndarray) -> np.ndarray:
        parameters = parameters_of(values.tolist())
        return np.array([observation.seconds(parameters) for observation in observations])

    start = np.array([0.9, 0.9, 0.0, 0.0][: 3 + separate_hosts])
    base = seconds_at(start)
    steps = np.diag([0.2, 0.2, 1.0, 1.0])[: len(start), : len(start)]
    slopes = np.stack([(seconds_at(start + step) - base) / step.sum() for step in steps], axis=1)
    rest = base - slopes @ start
    measured = np.array([observation.measured_seconds for observation in observations])
    return parameters_of(_least_squares(slopes, rest, measured).tolist())


def _least_squares(slopes: np.ndarray, rest: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Return positive `x` with the least squares of log(measured / (slopes @ x + rest)), by Gauss-Newton.

    Args:
        slopes: seconds per unit of the two factors and of one or both hosts, [points, 3 or 4].
        rest: seconds that no parameter changes, [points].
        measured: published seconds, [points].
    """
    best = np.array([1.0, 1.0, 0.005, 0.005])[: slopes.shape[1]]
    for _ in range(10):
        predicted = slopes @ best + rest
        # The step is relative to `best`, which keeps `best` positive; undetermined parameters move the least.
        relative = slopes / predicted[:, None] * best
        residuals = np.log(measured / predicted)
        inverse = np.linalg.pinv(relative.T @ relative, rcond=1e-10, hermitian=True)
        step = inverse @ (relative.T @ residuals)
        best = best * np.maximum(1.0 + step, 0.1)
    return best


def _fit(
    observations: Sequence[_Observation], paper: Optional[Tuple[Pipeline, Pipeline]]
) -> Parameters:
    """Fit all five parameters by least squares, rounded: to four decimals, seconds to six."""

    def loss_at(layout: float) -> float:
        return _loss(observations, paper, _at_layout(observations, layout))

    layout = _minimum(loss_at, REARRANGE_BYTE[8], REARRANGE_BYTE[2], steps=32)
    best = _at_layout(observations, layout)
    return Parameters(
        round(best.factor, 4),
        round(layout, 4),
        round(best.replica_seconds, 6),
        round(best.framework, 4),
        round(best.popart_replica_seconds, 6),
    )


def calibrate(observations: Observations) -> Calibration:
    """Fit the parameters to all published numbers and without each of them, and compute the errors of the points."""
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
    """Return the relative error of a prediction, rounded to four decimals."""
    return round(predicted / measured - 1.0, 4)


# ---- the stored fit --------------------------------------------------------------------------------------------------


def named(parameters: Parameters) -> Dict[str, float]:
    """Return the parameters by their names in `calibration.json` and in reports."""
    values = asdict(parameters)
    values["layout_cycles_per_byte"] = values.pop("layout")
    return values


def _parameters(stored: Dict[str, float]) -> Parameters:
    return Parameters(
        stored["factor"],
        stored["layout_cycles_per_byte"],
        stored["replica_seconds"],
        stored["framework"],
        stored["popart_replica_seconds"],
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
        path: the file; by default the fit of the package.
    """
    stored = json.loads(path.read_text(encoding="utf-8"))
    left_out = {name: _parameters(parameters) for name, parameters in stored["left_out"].items()}
    return Calibration(_parameters(stored), left_out, stored["report"])
