"""Costs of a weight update outside the pipeline: worked by hand from bytes, bandwidths and steps; and laws."""

from dataclasses import replace

import pytest

from ipu_profiling.cycles.layout import Cost
from ipu_profiling.cycles.pipeline import Parameters, PipelinePlacement
from ipu_profiling.cycles.target import BOW, MK2, Target
from ipu_profiling.cycles.update import IpuUpdate, UpdateCost, _pods, _ring, host_seconds, ipu_cost

# 32 M parameters in 50 tensors, an optimiser of 1.33 M cycles and 100 MB to and from streaming memory.
UPDATE = IpuUpdate(Cost(vertices=1.0e6, layout_bytes=1.0e5), 32.0e6, 50, 100.0e6)
LARGE = "packed_phase2_pod16.yml"


def test_ring_inside_a_pod_by_hand():
    """Eight replicas send 2 * 7/8 of 64 MB each at 64 GB/s: 1.75 ms; 50 tensors take 14 steps of 600 cycles."""
    found = _ring(UPDATE, 8, 8, MK2)
    assert found.links == pytest.approx(2 * 7 / 8 * 64.0e6 / 64.0e9) == pytest.approx(1.75e-3)
    assert found.steps == pytest.approx(50 * 14 * 600 / 1.33e9)
    assert found == UpdateCost(links=found.links, steps=found.steps)


def test_ring_over_gateways_by_hand():
    """Sixteen replicas of 8 IPUs are two pods: 2 * 15/16 of 64 MB at 100 Gb/s * 2 / 4 IPUs = 6.25 GB/s: 19.2 ms."""
    found = _ring(UPDATE, 16, 8, BOW)
    assert found.gateways == pytest.approx(2 * 15 / 16 * 64.0e6 / 6.25e9) == pytest.approx(19.2e-3)
    assert found.steps == pytest.approx(50 * 30 * 600 / 1.85e9)
    assert found.links == 0.0  # the whole ring goes as fast as its slowest link


def test_one_replica_sums_nothing():
    assert _ring(UPDATE, 1, 4, MK2) == UpdateCost()


@pytest.mark.parametrize(
    "replicas, ipus, number", [(1, 4, 1), (16, 4, 1), (8, 8, 1), (17, 4, 2), (16, 8, 2), (32, 8, 4)]
)
def test_pods_of_64_ipus(replicas, ipus, number):
    assert _pods(replicas, ipus, MK2) == number


def test_optimiser_and_streaming_by_hand():
    """1 M cycles and 100 kB rearranged at 2 cycles a byte, twice as long: 2.4 M cycles; 100 MB at 5 GB/s: 20 ms."""
    found = ipu_cost(UPDATE, 1, 4, MK2, Parameters(2.0, 2.0))
    assert found.optimizer == pytest.approx(2.4e6 / 1.33e9) and found.streaming == pytest.approx(0.020)
    assert found.total == found.device == pytest.approx(found.optimizer + 0.020)


@pytest.mark.parametrize("replicas, ipus, served", [(4, 4, 4), (8, 8, 8), (16, 8, 8)])
def test_the_process_of_a_pod_serves_its_replicas_one_after_the_other(replicas, ipus, served):
    found = host_seconds(replicas, ipus, MK2, replica_seconds=0.008)
    assert found == pytest.approx(0.008 * served)


def test_popart_has_its_own_host_and_its_own_factor():
    """PyTorch's factor of 1.2 is 1.25 times PopART's 0.96; its host takes 30 ms, PopART's 10."""
    popart = Parameters(1.2, 3.0, 0.030, 1.25, 0.010).of_popart()
    assert (popart.factor, popart.layout, popart.replica_seconds) == (pytest.approx(0.96), 3.0, 0.010)


def test_gateways_are_of_large_pods_only_and_never_faster():
    costs = [_ring(UPDATE, replicas, 8, MK2).total for replicas in (1, 2, 4, 8, 16, 32)]
    assert costs == sorted(costs) and costs[4] > 5 * costs[3]
    endless = replace(MK2, gateway_bytes_per_second=MK2.link_bytes_per_second)
    assert _ring(UPDATE, 16, 8, endless).gateways == pytest.approx(2 * 15 / 16 * 64.0e6 / 64.0e9)
    assert Target("x", 1.0e9).gateway_bytes_per_second == 2 * 100e9 / 8 / 4


def test_an_update_of_a_pipeline_is_its_slowest_ipus_and_the_hosts(machine, load):
    parameters = Parameters(1.0, 3.0, 0.01)
    pipeline = machine.pipeline(load(LARGE))
    cost = pipeline.update_cost(parameters)
    parts = [pipeline._ipu_update(number, parameters) for number in range(4)]
    assert cost.device == max(part.device for part in parts) and all(part.host == 0.0 for part in parts)
    assert cost.host == pytest.approx(0.04)  # four replicas in one process
    step = pipeline.step(100, parameters)
    assert step.once == cost and step.update == pytest.approx(cost.device * MK2.clock_hz)
    assert step.cycles == pytest.approx(108 * step.pipeline_cycle + step.update)
    assert step.seconds == pytest.approx(step.cycles / MK2.clock_hz + 0.04)
    rate = pipeline.sequences_per_second(100, 2.0, parameters)
    assert rate * step.seconds == pytest.approx(100 * 2 * 4 * 2.0)  # micro-batch 2, four replicas, two a pack


def test_state_on_chip_spares_streaming(machine, load):
    off, on = (
        machine.pipeline(load(LARGE, f"placement.optimizer_state_off_chip={value}")) for value in ("true", "false")
    )
    parameters = Parameters()
    # 8 bytes a parameter to and from the IPUs, a quarter on each of four replicas, at 5 GB/s.
    most = max(update.parameters for update in off.updates)
    assert off.update_cost(parameters).streaming == pytest.approx(2 * 8 * most / 4 / 5.0e9)
    assert on.update_cost(parameters).streaming == 0.0
    assert off.update_cost(parameters).links == on.update_cost(parameters).links > 0


def test_parameters_lie_where_their_half_of_the_layer_lies(machine, load):
    config = load(LARGE, "placement.layers_per_ipu=[4, 7, 6, 7]")
    whole, split = machine.pipeline(config), machine.pipeline(config, feed_forward_per_ipu=(5, 6, 7, 6))
    # Attention: 4 matrices of 1024 x 1024 with biases and a LayerNorm; feed forward: two of 1024 x 4096, a LayerNorm.
    attention, feed_forward = 4 * (1024 * 1024 + 1024) + 2 * 1024, 2 * 1024 * 4096 + 4096 + 1024 + 2 * 1024
    assert whole.updates[1].parameters == 7 * (attention + feed_forward)
    assert split.updates[1].parameters == 7 * attention + 6 * feed_forward
    # Query, key and value, output, LayerNorm: 10 tensors; two products and LayerNorm: 6.
    assert (whole.updates[1].tensors, split.updates[1].tensors) == (7 * 16, 7 * 10 + 6 * 6)
    sums = [sum(update.parameters for update in pipeline.updates) for pipeline in (whole, split)]
    assert sums[0] == sums[1]
    plain = Parameters(1.0, 3.0)
    most = [pipeline.pipeline_cycle(plain) for pipeline in (whole, split)]
    assert most[1] < most[0] < 7 / 6.4 * most[1]  # six and a half layers on the fullest instead of seven
    placement = PipelinePlacement((4, 7), (0.2, 0.2), feed_forward_per_ipu=(5, 6))
    assert [placement.halves(ipu) for ipu in (0, 1)] == [
        {"attention": 4, "feed forward": 5},
        {"attention": 7, "feed forward": 6},
    ]
