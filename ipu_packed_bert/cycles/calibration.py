"""The four fitted parameters, their fit, and the errors of the fitted model and of a trivial one.

factor: how many times longer everything on chip takes than the formulas say.
framework: how many times longer that takes in graphs made from PyTorch than in those written in PopART.
layout: cycles per byte of rearrangements whose atom size is not published, from 0.44 (8-byte atoms) to 5.148 (2-byte).
replica_seconds: what the host takes between two calls, for each replica that a process serves.

They are fitted to the published throughputs (`points.POINTS`) and to the paper's overhead at depth 2, and to nothing
else. Standard errors: 10 % for a published throughput (a task differs by 13 % between frameworks), 0.25 points for the
overhead.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import log, sqrt
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ipu_packed_bert.cycles import uncertainty
from ipu_packed_bert.cycles.arrangement import POPART, UNPACKED
from ipu_packed_bert.cycles.lowering import ATTENTION, FEED_FORWARD, half_of, short_name
from ipu_packed_bert.cycles.pipeline import Parameters, Pipeline
from ipu_packed_bert.cycles.points import FITTED_DEPTH, PAPER_CONFIG, PAPER_OVERHEAD, POINTS, Point
from ipu_packed_bert.cycles.target import TARGETS
from ipu_packed_bert.cycles.tracing import Graph, layer_of
from ipu_packed_bert.cycles.uncertainty import Draws, Interval
from ipu_packed_bert.cycles.vertices import REARRANGE_BYTE
from ipu_packed_bert.cycles.workload import Machine, shape_of
from ipu_packed_bert.settings import shipped as configurations
from ipu_packed_bert.settings.pretraining import load_config

STORED = Path(__file__).resolve().parent / "calibration.json"
THROUGHPUT_SIGMA, OVERHEAD_SIGMA = 0.10, 0.25
_IPUS_ONLY = ("without_ipus=null",)  # the cycle model is of IPUs: what changes without them is left out
_DAY = 86_400.0
_PEAK_SHARE = 0.31  # the trivial model: 31 % of the AMP peak, whatever the workload


class _Observation(NamedTuple):
    """A published point and its pipeline, from which a prediction for any parameters is cheap."""

    point: Point
    pipeline: Pipeline
    ideal_cycles: float  # useful and recomputed multiply-adds of the fullest IPU at AMP peak

    def predicted(self, parameters: Parameters) -> float:
        """Sequences per second of the whole machine."""
        point = self.point
        return self.pipeline.sequences_per_second(
            point.accumulation, point.sequences_per_pack, self._framework(parameters)
        )

    def seconds(self, parameters: Parameters) -> float:
        """Of one weight update."""
        return self.pipeline.step(self.point.accumulation, self._framework(parameters)).seconds

    def _framework(self, parameters: Parameters) -> Parameters:
        factor = parameters.factor if self.point.pytorch else parameters.factor / parameters.framework
        return replace(parameters, factor=factor)

    @property
    def measured_seconds(self) -> float:
        """Of one weight update, as the published throughput implies."""
        point = self.point
        packs = point.accumulation * self.pipeline.micro_batch * self.pipeline.placement.replicas
        return packs * point.sequences_per_pack / point.sequences_per_second

    def trivial(self) -> float:
        """Sequences per second at 31 % of peak."""
        point, placement = self.point, self.pipeline.placement
        cycles = self.ideal_cycles / _PEAK_SHARE * (point.accumulation + placement.stages - 1)
        packs = point.accumulation * self.pipeline.micro_batch * placement.replicas
        return packs * point.sequences_per_pack / self.pipeline.target.seconds(cycles)


class Observations(NamedTuple):
    throughputs: Tuple[_Observation, ...]
    packed: Pipeline  # the paper's graph at the fitted depth
    unpacked: Pipeline


@dataclass(frozen=True)
class Calibration:
    """The fitted parameters and the errors of the fit."""

    parameters: Parameters
    report: Dict[str, Any]
    draws: Draws  # of all unknowns, for intervals


def machines(folder: Optional[Path]) -> Dict[str, Machine]:
    """One machine for each target; they share their traces."""
    first = Machine(TARGETS["mk2"], folder)
    return {name: first if name == "mk2" else Machine(target, folder, first.traces) for name, target in TARGETS.items()}


def observe(machine_of: Dict[str, Machine]) -> Observations:
    """Trace and lower the workload of every point. machine_of: by target."""
    found = []
    for point in POINTS:
        config = load_config(configurations.FOLDER / point.config, _IPUS_ONLY + point.overrides)
        machine = machine_of[point.target]
        pipeline = machine.pipeline(
            config, arrangement=point.arrangement, feed_forward_per_ipu=point.feed_forward_per_ipu
        )
        graph = machine.traces.training(config, shape_of(config), point.arrangement)
        found.append(_Observation(point, pipeline, _ideal_cycles(graph, pipeline)))
    config = load_config(configurations.FOLDER / PAPER_CONFIG, _IPUS_ONLY)
    mk2 = machine_of["mk2"]
    return Observations(
        tuple(found),
        mk2.pipeline(config, arrangement=POPART, depth=FITTED_DEPTH),
        mk2.pipeline(config, arrangement=UNPACKED, depth=1),
    )


def _ideal_cycles(graph: Graph, pipeline: Pipeline) -> float:
    """Multiply-adds of the encoder layers on the fullest IPU, recomputation included, at AMP peak."""
    macs = {ATTENTION: 0.0, FEED_FORWARD: 0.0}
    last = graph.num_layers - 1
    for operation in graph.operations:
        if layer_of(operation.scope) != last:
            continue
        name, _ = short_name(operation.operator)
        if name not in ("mm", "addmm", "bmm"):
            continue
        left = operation.inputs()[1 if name == "addmm" else 0]
        work = graph.values[left].elements * graph.values[operation.outputs[0]].shape[-1]
        times = 2 if operation.phase == "forward" and pipeline.placement.recompute else 1
        macs[half_of(operation.scope)] += work * times
    fullest = max(
        sum(number * macs[half] for half, number in pipeline.placement.halves(ipu.number).items())
        for ipu in pipeline.ipus
    )
    return fullest / pipeline.target.peak_macs_per_cycle


def overhead(packed: Pipeline, unpacked: Pipeline, parameters: Parameters) -> float:
    """Extra cycles of a micro-batch of packs, a fraction: the paper's OH, counted on the kernel."""
    return packed.micro_batch_cycles(parameters) / unpacked.micro_batch_cycles(parameters) - 1.0


def _loss(
    observations: Sequence[_Observation], paper: Optional[Tuple[Pipeline, Pipeline]], parameters: Parameters
) -> float:
    loss = sum(
        (log(o.point.sequences_per_second / o.predicted(parameters)) / THROUGHPUT_SIGMA) ** 2 for o in observations
    )
    if paper is not None:
        difference = 100 * overhead(paper[0], paper[1], parameters) - PAPER_OVERHEAD[FITTED_DEPTH]
        loss += (difference / OVERHEAD_SIGMA) ** 2
    return loss


def _minimum(function: Callable[[float], float], low: float, high: float, steps: int = 60) -> float:
    """Golden-section search, whose floating-point operations are the same on every machine."""
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
    """The best factors and seconds of the host at a layout parameter."""
    seconds, measured = [o.seconds for o in observations], [o.measured_seconds for o in observations]
    return uncertainty.nearest(seconds, measured, Parameters(layout=layout))


def _fit(observations: Sequence[_Observation], paper: Optional[Tuple[Pipeline, Pipeline]]) -> Parameters:
    """Least squares over the four parameters, rounded: to four decimals, seconds to six."""

    def at(layout: float) -> float:
        return _loss(observations, paper, _at_layout(observations, layout))

    layout = _minimum(at, REARRANGE_BYTE[8], REARRANGE_BYTE[2], steps=32)
    found = _at_layout(observations, layout)
    return Parameters(
        round(found.factor, 4), round(layout, 4), round(found.replica_seconds, 6), round(found.framework, 4)
    )


def calibrate(observations: Observations) -> Calibration:
    """Fit, compute each point's error in the fit and in a fit without it, and draw the unknowns."""
    paper = (observations.packed, observations.unpacked)
    parameters = _fit(observations.throughputs, paper)
    rows: List[Dict[str, Any]] = []
    for number, observation in enumerate(observations.throughputs):
        others = observations.throughputs[:number] + observations.throughputs[number + 1 :]
        left_out = _fit(others, paper)
        measured = observation.point.sequences_per_second
        rows.append(
            {
                "point": observation.point.name,
                "what": observation.point.what,
                "measured": measured,
                "uncalibrated_error": _error(observation.predicted(Parameters(1.0, REARRANGE_BYTE[8])), measured),
                "fitted_error": _error(observation.predicted(parameters), measured),
                "left_out_error": _error(observation.predicted(left_out), measured),
                "trivial_error": _error(observation.trivial(), measured),
            }
        )
    without_paper = _fit(observations.throughputs, None)
    report = {
        "fitted_on": [row["point"] for row in rows] + [f"Table 1, depth {FITTED_DEPTH}"],
        "sigma": {"throughput": THROUGHPUT_SIGMA, "overhead_points": OVERHEAD_SIGMA},
        "points": rows,
        "overhead_fitted_depth": {
            "paper": PAPER_OVERHEAD[FITTED_DEPTH],
            "model": round(100 * overhead(*paper, parameters), 4),
            "left_out": round(100 * overhead(*paper, without_paper), 4),
        },
        "rms_error": {key: _rms([row[key + "_error"] for row in rows]) for key in ("fitted", "left_out", "trivial")},
        "mean_error": {key: _mean([row[key + "_error"] for row in rows]) for key in ("fitted", "left_out", "trivial")},
        "worst_error": {
            key: max(abs(row[key + "_error"]) for row in rows) for key in ("fitted", "left_out", "trivial")
        },
    }
    return Calibration(parameters, report, _draw(observations))


def _draw(observations: Observations) -> Draws:
    """Draws of all unknowns, weighted by the points that the parameters are fitted to."""
    throughputs = observations.throughputs
    return uncertainty.sample(
        [observation.seconds for observation in throughputs],
        [observation.measured_seconds for observation in throughputs],
        [observation.point.name for observation in throughputs],
        lambda parameters: 100 * overhead(observations.packed, observations.unpacked, parameters),
        PAPER_OVERHEAD[FITTED_DEPTH],
        OVERHEAD_SIGMA,
    )


def _error(predicted: float, measured: float) -> float:
    return round(predicted / measured - 1.0, 4)


def _rms(errors: Sequence[float]) -> float:
    return round(sqrt(sum(log(1.0 + error) ** 2 for error in errors) / len(errors)), 4)


def _mean(errors: Sequence[float]) -> float:
    return round(sum(abs(error) for error in errors) / len(errors), 4)


def to_json(calibration: Calibration) -> str:
    return (
        json.dumps(
            {
                "factor": calibration.parameters.factor,
                "framework": calibration.parameters.framework,
                "layout_cycles_per_byte": calibration.parameters.layout,
                "replica_seconds": calibration.parameters.replica_seconds,
                "report": calibration.report,
            },
            indent=1,
            sort_keys=True,
        )
        + "\n"
    )


def load(path: Path = STORED) -> Calibration:
    """The committed parameters and draws."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    return Calibration(
        Parameters(stored["factor"], stored["layout_cycles_per_byte"], stored["replica_seconds"], stored["framework"]),
        stored["report"],
        uncertainty.load(),
    )


# Sequences a second and days of a run: one place for the report and the plan ------------------------------------


class _Speed(NamedTuple):
    rate: Interval  # sequences a second, of all replicas
    days: float  # of the whole run


def speed(pipeline: Pipeline, accumulation: int, packing_factor: float, updates: int, fitted: Calibration) -> _Speed:
    """packing_factor: sequences of a pack."""
    rate = fitted.draws.throughput(lambda each: pipeline.sequences_per_second(accumulation, packing_factor, each))
    seconds = fitted.draws.interval(lambda each: pipeline.step(accumulation, each).seconds)
    return _Speed(rate, updates * seconds.value / _DAY)
