"""When each IPU of a replica does what in a weight update: what the pipeline is priced by, put in order of time.

In pipeline cycle c, stage s works on micro-batch c - s, if there is one. A forward stage runs its blocks. The turn, the
last forward stage, runs its blocks forward and backward at once. A backward stage recomputes its blocks and runs them
backward. An IPU takes its stages one after the other and then waits for the slowest IPU; then all copy to their
neighbours. A stage without a micro-batch leaves its time empty, while the pipeline fills and drains: the bubble. Copies
are counted once for a micro-batch, with its forward stage: gradients go the other way at the same time. Each IPU then
sums its gradients over the replicas and updates its weights, and at last all wait for the host.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple

import numpy as np

from ipu_packed_bert.cycles.layout import Cost
from ipu_packed_bert.cycles.parameters import Parameters
from ipu_packed_bert.cycles.pipeline import Ipu, Pipeline, PipelinePlacement, recomputes

FORWARD, RECOMPUTATION, BACKWARD, COPY = "forward", "recomputation", "backward", "copies"
GRADIENTS, OPTIMIZER, STREAMING = "gradients of replicas", "optimiser", "state off chip"
WAITING, BUBBLE, HOST = "waiting", "bubble", "host"
WORK = (FORWARD, RECOMPUTATION, BACKWARD, COPY, GRADIENTS, OPTIMIZER, STREAMING)
_ROUNDING = 1e-3  # cycles: what floating-point numbers leave over
KINDS = WORK + (WAITING, BUBBLE, HOST)


class _Stages(NamedTuple):
    """The stages of a training pipeline by their numbers, each with its IPU."""

    forward: Dict[int, int]
    turn: Dict[int, int]
    backward: Dict[int, int]


class _Span(NamedTuple):
    """A time in which an IPU does one thing."""

    ipu: int
    kind: str
    start: Any  # cycles since the stretch's beginning
    cycles: Any
    stage: int = -1  # of the pipeline; -1: none


class Stretch(NamedTuple):
    """Pipeline cycles that are alike, one after the other, or what follows them (`number` -1)."""

    number: int  # of the first of these pipeline cycles
    repeats: int
    start: Any  # cycles since the update's beginning
    cycles: Any  # of one of them
    spans: Tuple[_Span, ...]  # of one of them; those of an IPU leave no gap

    @property
    def end(self) -> Any:
        return self.start + self.repeats * self.cycles


class Schedule(NamedTuple):
    """A weight update over time. All cycles are arrays where the parameters are."""

    stretches: Tuple[Stretch, ...]
    stages: _Stages
    ipus: int

    @property
    def cycles(self) -> Any:
        """From the update's beginning to the next one's; the host's part is in it."""
        return self.stretches[-1].end

    def totals(self) -> List[Dict[str, Any]]:
        """Of each IPU, its cycles by kind."""
        found: List[Dict[str, Any]] = [dict.fromkeys(KINDS, 0.0) for _ in range(self.ipus)]
        for stretch in self.stretches:
            for span in stretch.spans:
                found[span.ipu][span.kind] = found[span.ipu][span.kind] + stretch.repeats * span.cycles
        return found


def stages_of(placement: PipelinePlacement) -> _Stages:
    """Forward stages along the IPUs, the turn on the IPU of the heads, and the way back."""
    along = [0] + [ipu for ipu, layers in enumerate(placement.layers_per_ipu) if ipu and layers]
    turn = 0 if placement.heads_return else along[-1]
    if len(along) == 1 or not placement.heads_return:
        along = along[:-1]
    forward = dict(enumerate(along))
    number = len(forward)
    return _Stages(forward, {number: turn}, {2 * number - stage: ipu for stage, ipu in reversed(forward.items())})


@lru_cache(4)
def _works(pipeline: Pipeline) -> List[Dict[int, Dict[str, Cost]]]:
    """Of each IPU, stage -> kind -> cost in the order of its stages; they add up to the IPU's."""
    return [_work(pipeline, stages_of(pipeline.placement), ipu) for ipu in pipeline.ipus]


def _work(pipeline: Pipeline, stages: _Stages, ipu: Ipu) -> Dict[int, Dict[str, Cost]]:
    own = [{stage: at for stage, at in part.items() if at == ipu.number} for part in stages]
    turn = next(iter(own[1]), -1)  # an IPU without layers has no stage
    first, last = next(iter(own[0]), turn), next(iter(own[2]), turn)
    found: Dict[int, Dict[str, Cost]] = {stage: {} for part in own for stage in part}

    def add(stage: int, kind: str, cost: Cost) -> None:
        kinds = found.setdefault(stage, {})
        kinds[kind] = kinds.get(kind, Cost()) + cost

    for times, entry in ipu.held:
        forward, backward = (turn, turn) if entry.block == "heads" else (first, last)
        cost = entry.cost * float(times)
        if entry.phase != "forward":
            add(backward, BACKWARD, cost)
        elif recomputes(entry, pipeline.placement):
            add(forward, FORWARD, cost * 0.5)
            add(backward, RECOMPUTATION, cost * 0.5)
        else:
            add(forward, FORWARD, cost)
    return found


def _patterns(stages: int, accumulation: int) -> Iterator[Tuple[int, int, range]]:
    """(first pipeline cycle, how many are alike, the stages that work in them)"""
    number, end = 0, accumulation + stages - 1
    while number < end:
        working = range(max(0, number - accumulation + 1), min(stages, number + 1))
        alike = accumulation - stages + 1 if len(working) == stages else 1
        yield number, alike, working
        number += alike


def schedule(pipeline: Pipeline, accumulation: int, parameters: Parameters) -> Schedule:
    """The update of `Pipeline.step`, over time."""
    stages = stages_of(pipeline.placement)
    step, clock = pipeline.step(accumulation, parameters), pipeline.target.clock_hz
    copying = parameters.links * pipeline.copy_cycles()
    working = step.pipeline_cycle - copying  # of the slowest IPU
    order = (FORWARD, RECOMPUTATION, BACKWARD)
    cycles = [
        [
            (stage, kind, parameters.cycles(parts[kind]))
            for stage, parts in each.items()
            for kind in order
            if kind in parts
        ]
        for each in _works(pipeline)
    ]
    links = [parameters.links * pipeline.target.link_cycles(sum(ipu.link_bytes.values())) for ipu in pipeline.ipus]
    found: List[Stretch] = []
    at: Any = 0.0
    for number, alike, active in _patterns(pipeline.placement.stages, accumulation):
        spans: List[_Span] = []
        for ipu, (each, link) in enumerate(zip(cycles, links)):
            line = _Line(ipu)
            idle = not any(stage in active for stage, _, _ in each)
            for stage, kind, taken in each:
                line.add(kind if stage in active else BUBBLE, taken, stage)
            line.add(BUBBLE if idle else WAITING, working - line.at)
            line.add(COPY if each and min(stage for stage, _, _ in each) in active else BUBBLE, link)
            line.add(BUBBLE if idle else WAITING, step.pipeline_cycle - line.at)
            spans += line.spans
        found.append(Stretch(number, alike, at, step.pipeline_cycle, tuple(spans)))
        at = found[-1].end
    spans = []
    host = step.once.host * clock
    for ipu in range(len(pipeline.ipus)):
        once, line = pipeline.ipu_update(ipu, parameters), _Line(ipu)
        line.add(GRADIENTS, (once.links + once.gateways + once.steps) * clock)
        line.add(OPTIMIZER, once.optimizer * clock)
        line.add(STREAMING, once.streaming * clock)
        line.add(WAITING, step.update - line.at)
        line.add(HOST, host)
        spans += line.spans
    found.append(Stretch(-1, 1, at, step.update + host, tuple(spans)))
    return Schedule(tuple(found), stages, len(pipeline.ipus))


class _Line:
    """The spans of one IPU, one after the other; idle ones are joined, those of no length left out."""

    def __init__(self, ipu: int):
        self.ipu = ipu
        self.at: Any = 0.0
        self.spans: List[_Span] = []

    def add(self, kind: str, cycles: Any, stage: int = -1) -> None:
        if not np.any(np.abs(cycles) > _ROUNDING):
            return
        if self.spans and self.spans[-1].kind == kind in (WAITING, BUBBLE):
            before = self.spans.pop()
            self.spans.append(before._replace(cycles=before.cycles + cycles, stage=-1))
        else:
            self.spans.append(_Span(self.ipu, kind, self.at, cycles, stage))
        self.at = self.at + cycles
