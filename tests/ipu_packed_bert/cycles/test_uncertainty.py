"""Draws of all unknowns: what is planted is found, weights and intervals by hand, arrays say what single draws say."""

from dataclasses import fields, replace

import numpy as np
import pytest

from ipu_packed_bert.cycles import calibration, uncertainty, vertices
from ipu_packed_bert.cycles.arrangement import PACKED, UNPACKED
from ipu_packed_bert.cycles.layout import Cost
from ipu_packed_bert.cycles.lowering import ATTENTION, Lowering
from ipu_packed_bert.cycles.parameters import Parameters
from ipu_packed_bert.cycles.uncertainty import FIELDS, KEPT, UNKNOWNS
from ipu_packed_bert.cycles.workload import shape_of

LARGE = "packed_phase2_pod16.yml"


def test_the_stored_draws_cover_nine_in_ten_of_the_points_left_out():
    draws = calibration.load().draws
    report = draws.report
    assert report["drawn"] == uncertainty.DRAWN and report["effective"] > KEPT
    points = report["left_out"]
    assert [point["point"] for point in points] == [row["point"] for row in calibration.load().report["points"]]
    assert report["covered"] == sum(point["low"] <= 0.0 <= point["high"] for point in points) >= 0.9 * len(points)
    for field in FIELDS:
        values = getattr(draws.parameters, field)
        assert values.shape == (KEPT,) and np.isfinite(values).all() and (values >= 0).all(), field
    assert draws.parameters.layout.min() >= 0.44 and draws.parameters.square.max() <= 5.148
    assert uncertainty.alike(draws, uncertainty.load())
    other = replace(draws, parameters=replace(draws.parameters, factor=1.1 * draws.parameters.factor))
    assert not uncertainty.alike(draws, other)


def test_every_unknown_is_a_field_with_a_prior():
    assert set(FIELDS) == {field.name for field in fields(Parameters)}
    drawn = uncertainty._prior(2000, 3)
    for field in UNKNOWNS:
        values = getattr(drawn, field)
        assert len(np.unique(values)) == 2000
        again = getattr(uncertainty._prior(2000, 3), field)
        assert (values == again).all() and (values != getattr(uncertainty._prior(2000, 4), field)).any()


# An update's seconds as a function of the parameters: on chip, the host for some replicas, streaming.
UPDATES = [(4.0, 4, 0.07), (0.6, 8, 0.0), (0.4, 8, 0.0), (12.0, 4, 0.07), (0.3, 16, 0.01), (2.0, 1, 0.2)]


def seconds(on_chip, replicas, streamed):
    """Made from PyTorch where it streams, otherwise written in PopART."""
    chip = (lambda p: p.factor * on_chip) if streamed else (lambda p: p.factor / p.framework * on_chip)
    return lambda p: chip(p) * p.products**0.0 + p.replica_seconds * replicas + p.streaming * streamed


def planted(**options):
    functions = [seconds(*update) for update in UPDATES]
    true = Parameters(1.2, 3.0, 0.010, 1.1)
    return uncertainty.sample(
        functions,
        [function(true) for function in functions],
        [str(number) for number in range(len(functions))],
        lambda p: p.square * 1.5,
        4.5,
        0.1,
        drawn=3000,
        kept=300,
        **options,
    )


def test_what_is_planted_is_found():
    draws = planted(seed=1)
    for value, truth in (
        (lambda p: p.factor, 1.2),
        (lambda p: p.replica_seconds, 0.010),
        (lambda p: p.framework, 1.1),
        (lambda p: p.square, 3.0),
        (seconds(5.0, 4, 0.1), 6.14),
    ):
        low, middle, high = draws.interval(value)
        assert low < truth < high
        assert middle == np.median(value(draws.parameters)) == draws.throughput(value).value
        wide = draws.throughput(value)
        assert wide.upper - wide.lower > 0
    assert draws.interval(lambda p: p.square).upper < 3.3  # the overhead says it, whose prior reaches from 0.44 to 5.1
    assert draws.interval(lambda p: p.layout).lower + 1.8 > 2.0  # of which nothing was seen
    assert draws.report["covered"] == len(UPDATES) and 100 < draws.report["effective"] < 3000
    assert uncertainty.to_json(draws) == uncertainty.to_json(planted(seed=1)) != uncertainty.to_json(planted(seed=2))


def test_stored_and_loaded_draws_are_the_same(tmp_path):
    draws = planted(seed=1)
    (tmp_path / "draws.json").write_text(uncertainty.to_json(draws))
    loaded = uncertainty.load(tmp_path / "draws.json")
    assert uncertainty.to_json(loaded) == uncertainty.to_json(draws)


def test_weights_and_quantiles_by_hand():
    assert uncertainty._effective(np.full(8, 1 / 8)) == pytest.approx(8)
    assert uncertainty._effective(np.array([1.0, 0.0, 0.0])) == 1
    assert uncertainty._effective(np.array([0.5, 0.25, 0.25])) == pytest.approx(1 / (0.25 + 0.0625 + 0.0625))
    # 3, 1, 2 with weights 1/2, 1/4, 1/4: in order 1, 2, 3, reached 1/4, 1/2, 1.
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([0.5, 0.25, 0.25])
    assert uncertainty._weighted_quantiles(values, weights, [0.1, 0.3, 0.6, 1.0]) == [1.0, 2.0, 3.0, 3.0]


def test_no_draw_is_the_plain_model():
    cost = Cost(
        matmul=100.0,
        vertices=30.0,
        exchange=20.0,
        sync=10.0,
        layout_calls=2.0,
        layout_bytes=50.0,
        batched=40.0,
        wide=10.0,
        square_bytes=15.0,
    )
    assert Parameters(1.5, 2.0).cycles(cost) == pytest.approx(1.5 * cost.cycles(2.0))
    assert Parameters(1.5, 2.0).layout_cycles(cost) == pytest.approx(cost.layout_cycles(2.0)) == 2 * 587 + 100
    uneven = Parameters(1.5, 2.0, square=4.0)  # 35 bytes at 2, 15 at 4 cycles
    assert uneven.layout_cycles(cost) == pytest.approx(2 * 587 + 35 * 2.0 + 15 * 4.0)
    scaled = Parameters(1.0, 0.0, products=2.0, batched=3.0, wide=1.5, exchange=5.0, sync=7.0)
    assert scaled.cycles(cost) == pytest.approx(2 * 60 + 3 * (40 + 0.5 * 10) + 30 + 5 * 20 + 7 * 10 + 2 * 587)


def test_arrays_of_draws_say_what_each_draw_says(machine, load):
    config = load(LARGE)
    pipeline, unpacked = machine.pipeline(config), machine.pipeline(config, arrangement=UNPACKED, depth=1)
    drawn = replace(
        uncertainty._prior(4, 7),
        factor=np.linspace(0.8, 1.1, 4),
        replica_seconds=np.linspace(0.001, 0.02, 4),
        framework=np.linspace(0.9, 1.2, 4),
    )
    for value in (
        pipeline.pipeline_cycle,
        pipeline.micro_batch_cycles,
        lambda p: pipeline.update_cost(p).device,
        lambda p: pipeline.step(100, p).seconds,
        lambda p: pipeline.sequences_per_second(100, 2.0, p),
        lambda p: sum(pipeline.category_cycles(p).values()) - pipeline.micro_batch_cycles(p),
        lambda p: calibration.overhead(pipeline, unpacked, p),
    ):
        together = value(drawn)
        for number in range(4):
            one = Parameters(**{field: float(getattr(drawn, field)[number]) for field in FIELDS})
            assert together[number] == pytest.approx(value(one), rel=1e-9, abs=1e-3)


def test_what_only_the_product_mask_leaves_open(machine, load):
    config = load(LARGE)
    packed, unpacked = (
        machine.pipeline(config, arrangement=PACKED),
        machine.pipeline(config, arrangement=UNPACKED, depth=1),
    )
    cost, plain = packed.ipus[1].total, unpacked.ipus[1].total
    assert 0 < cost.wide < cost.batched < cost.matmul and 0 < cost.square_bytes < cost.layout_bytes
    assert plain.wide == 0 and 0 < plain.batched < plain.matmul
    # In each layer query and key are joined to 16 columns: [2, 16, 512, 80] halves. Their gradients are sliced,
    # [2, 16, 512, 64], and stay on their tiles.
    graph = machine.traces.training(config, shape_of(config), PACKED)
    entries = Lowering(graph, machine.planner, memory_proportion=0.2, serialized=5).run().entries
    held = [each for each in entries if each.half == ATTENTION]
    joined = [each for each in held if each.operator.startswith("aten.cat.")]
    sliced = [each for each in held if each.operator.startswith("aten.slice.") and each.cost.vertices]
    for found, phase, columns in ((joined, "forward", 80), (sliced, "backward", 64)):
        assert [each.phase for each in found] == [phase, phase]
        num_bytes = -(-2 * 16 * 512 * columns // 1472) * 2
        assert all(each.cost.vertices == vertices.copy(num_bytes) for each in found)
        assert all(each.cost.layout_bytes == 0 for each in found)
    assert all(each.cost.exchange == 0 for each in sliced)
    assert 0.8 < 100 * calibration.overhead(packed, unpacked, Parameters(1.0, 3.1)) < 1.8
