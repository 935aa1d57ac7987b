"""Sequences a second and days of a run, as the cycle model says: one place for the report and the plan."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import NamedTuple, Optional

from ipu_packed_bert.cycles import calibration
from ipu_packed_bert.cycles.calibration import Calibration
from ipu_packed_bert.cycles.pipeline import Pipeline
from ipu_packed_bert.cycles.target import TARGETS
from ipu_packed_bert.cycles.uncertainty import Interval
from ipu_packed_bert.cycles.workload import Machine, NotTraced, Traces
from ipu_packed_bert.settings.pretraining import Config

_DAY = 86_400.0


class _Speed(NamedTuple):
    rate: Interval  # sequences a second, of all replicas
    days: float  # of the whole run


def speed(pipeline: Pipeline, accumulation: int, packing_factor: float, updates: int, fitted: Calibration) -> _Speed:
    """packing_factor: sequences of a pack."""
    rate = fitted.throughput(lambda each: pipeline.sequences_per_second(accumulation, packing_factor, each))
    seconds = fitted.interval(lambda each: pipeline.step(accumulation, each).seconds)
    return _Speed(rate, updates * seconds.value / _DAY)


def known_speed(config: Config, packing_factor: float, folder: Path) -> Optional[_Speed]:
    """Without torch, and writing nothing: None where no report has traced this network yet.

    folder: the cache of plans and traces.
    """
    machine = Machine(TARGETS[config.placement.machine], folder, Traces(folder, tracing=False))
    try:
        pipeline = machine.pipeline(config)
    except (NotTraced, PackageNotFoundError):  # the second: torch is not installed
        return None
    return speed(pipeline, config.accumulation(packing_factor), packing_factor, config.run.steps, calibration.load())
