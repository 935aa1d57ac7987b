"""The cost of a weight update outside the pipeline: the exchange of gradients by hand, and what adds up."""

import pytest

from ipu_profiling.cycles.layout import Cost
from ipu_profiling.cycles.pipeline import Parameters
from ipu_profiling.cycles.target import BOW, MK2
from ipu_profiling.cycles.update import IpuUpdate, UpdateCost, _ring

# 32 M parameters in 50 tensors, an optimiser of 1.33 M cycles and 100 MB to and from streaming memory.
UPDATE = IpuUpdate(Cost(vertices=1.0e6, layout_bytes=1.0e5), 32.0e6, 50, 100.0e6)
LARGE = "packed_phase2_pod16.yml"


def test_the_exchange_of_gradients_by_hand():
    """Eight replicas send 2 x 7/8 of 64 MB at 64 GB/s in 14 steps of 600 cycles; two pods send at 6.25 GB/s."""
    pod = _ring(UPDATE, 8, 8, MK2)
    assert pod.links == pytest.approx(1.75e-3)
    cycles = 50 * 14 * 600
    assert pod.steps == pytest.approx(cycles / 1.33e9)
    assert pod == UpdateCost(links=pod.links, steps=pod.steps)
    pods = _ring(UPDATE, 16, 8, BOW)
    cycles = 50 * 30 * 600
    assert pods.gateways == pytest.approx(19.2e-3)
    assert pods.steps == pytest.approx(cycles / 1.85e9)
    assert pods == UpdateCost(gateways=pods.gateways, steps=pods.steps)
    assert _ring(UPDATE, 1, 4, MK2) == UpdateCost()


def test_an_update_adds_up(machine, load):
    parameters = Parameters(1.0, 3.0, 0.01)
    pipeline = machine.pipeline(load(LARGE))
    cost = pipeline._update_cost(parameters)
    slowest = max(pipeline._ipu_update(number, parameters).device for number in range(4))
    assert cost.device == slowest
    assert cost.host == pytest.approx(0.04)  # four replicas in one process
    step = pipeline.step(100, parameters)
    assert step.once == cost
    once = cost.device * MK2.clock_hz
    assert step.cycles == pytest.approx(108 * step.pipeline_cycle + once)
    on_chip = step.cycles / MK2.clock_hz
    assert step.seconds == pytest.approx(on_chip + 0.04)
    rate = pipeline.sequences_per_second(100, 2.0, parameters)
    sequences = 100 * 2 * 4 * 2.0  # micro-batch 2, four replicas, two a pack
    assert rate * step.seconds == pytest.approx(sequences)
