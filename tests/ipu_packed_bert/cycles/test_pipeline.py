"""Pipeline assembly: stages, bottleneck, copies, update; and that more work never takes fewer cycles."""

import pytest

from ipu_packed_bert.cycles.arrangement import ADDITIVE, PACKED, UNPACKED
from ipu_packed_bert.cycles.lowering import COPIES, ENCODER, MASK_APPLICATION
from ipu_packed_bert.cycles.pipeline import Parameters, PipelinePlacement, _route
from ipu_packed_bert.cycles.target import BOW, MK2
from ipu_packed_bert.cycles.workload import Machine, placement_of, shape_of

PLAIN = Parameters(1.0, 3.125)
PACKED_LARGE = "packed_phase2_pod16.yml"
# Laws are tested on a narrow model: its products have fewer plans to search.
NARROW = (
    "model.hidden_size=256",
    "model.intermediate_size=1024",
    "model.num_heads=4",
    "model.vocabulary_size=8192",
    "data.vocabulary_size=8192",
    "placement.available_memory_proportion=[0.2, 0.2, 0.2, 0.2]",
)


def test_stages_as_popart_counts_them():
    assert PipelinePlacement((3, 7, 7, 7), (0.1,) * 4).stages == 9  # 5 forward stages, 4 more backwards
    assert PipelinePlacement((0, 3, 3, 3, 3, 4, 4, 4), (1.0,) * 8).stages == 17
    assert PipelinePlacement((4,), (0.28,)).stages == 1


def test_layers_find_their_ipu():
    placement = PipelinePlacement((3, 7, 7, 7), (0.1,) * 4)
    assert [placement.ipu_of_layer(layer) for layer in (0, 2, 3, 9, 10, 16, 17, 23)] == [0, 0, 1, 1, 2, 2, 3, 3]
    with pytest.raises(ValueError, match="layer 24"):
        placement.ipu_of_layer(24)


def test_routes():
    assert _route(0, 1, 4) == [0] and _route(2, 0, 4) == [2, 1] and _route(1, 1, 4) == []
    assert _route(3, 0, 4) == [3]  # a link of its own back to the first IPU
    assert _route(0, 3, 4, through=True) == [0, 1, 2]  # unless every IPU on the way needs it


def test_seven_layers_on_the_fullest_ipu_and_not_six_and_a_half(machine, load):
    """26 layers on four IPUs are 6.5 each, but the pipeline waits for the one that has 7."""
    config = load(PACKED_LARGE, "model.num_layers=26", "placement.layers_per_ipu=[5, 7, 7, 7]", *NARROW)
    pipeline = machine.pipeline(config)
    slowest = pipeline.bottleneck(PLAIN)
    assert slowest.layers == 7 and slowest.number in (1, 2, 3)
    layer = pipeline.ipu_cycles(slowest, PLAIN) / 7
    assert pipeline.pipeline_cycle(PLAIN) == pytest.approx(7 * layer + pipeline.copy_cycles())
    balanced = machine.pipeline(load(PACKED_LARGE, *NARROW))
    assert balanced.ipu_cycles(balanced.bottleneck(PLAIN), PLAIN) == pytest.approx(7 * layer)
    # Fewer layers on the fullest IPU help; moving one between the others does not.
    even = machine.pipeline(load(PACKED_LARGE, "placement.layers_per_ipu=[6, 6, 6, 6]", *NARROW))
    assert even.ipu_cycles(even.ipus[1], PLAIN) == pytest.approx(6 / 7 * pipeline.ipu_cycles(slowest, PLAIN), rel=0.01)
    assert even.bottleneck(PLAIN).number == 0  # embeddings and heads come on top of its six


def test_recomputation_is_one_more_forward_pass(machine, load):
    with_it, without = (
        machine.pipeline(load(PACKED_LARGE, f"engine.recompute_layers={value}")) for value in ("true", "false")
    )
    lowered = with_it.ipus[1].costs[MASK_APPLICATION].cycles(3.0)
    assert lowered == pytest.approx(2 * without.ipus[1].costs[MASK_APPLICATION].cycles(3.0))
    assert with_it.ipus[1].costs[ENCODER].cycles(3.0) > without.ipus[1].costs[ENCODER].cycles(3.0)


def test_accumulation_fill_and_drain(machine, load):
    pipeline = machine.pipeline(load(PACKED_LARGE))
    one, two = (pipeline.step(g, PLAIN) for g in (192, 193))
    assert two.cycles - one.cycles == pytest.approx(pipeline.pipeline_cycle(PLAIN))
    assert one.cycles == pytest.approx(200 * one.pipeline_cycle + one.update)  # 192 + 9 - 1
    # Loading and storing 8 bytes per parameter, a quarter on each of 4 replicas, at 5 GB/s: 70 ms for 88 M of them.
    assert 0.05 < MK2.seconds(one.update) < 0.12


def test_a_mask_made_once_travels_and_one_made_in_each_layer_does_not(machine, load):
    config = load(PACKED_LARGE)
    once = machine.pipeline(config, arrangement=ADDITIVE)
    again = machine.pipeline(config, arrangement=ADDITIVE.with_(mask="layer"))
    codes = machine.pipeline(config, arrangement=PACKED)
    assert [ipu.link_bytes.get("mask", 0) for ipu in once.ipus] == [2 * 512 * 512 * 2] * 3 + [0]
    assert all("mask" not in ipu.link_bytes for ipu in again.ipus)
    # Two codes of 16 halves for each slot.
    assert [ipu.link_bytes.get("mask", 0) for ipu in codes.ipus] == [2 * 2 * 512 * 16 * 2] * 3 + [0]
    hidden = 2 * 512 * 1024 * 2
    assert [sum(ipu.link_bytes.values()) for ipu in again.ipus] == [hidden] * 4
    assert once.ipus[1].costs[COPIES].cycles(3.0) > again.ipus[1].costs[COPIES].cycles(3.0)  # and is stashed


def test_bow_takes_equal_cycles_on_chip_and_less_time(machine, load, cycle_cache):
    config = load(PACKED_LARGE)
    mk2, bow = machine.pipeline(config), Machine(BOW, cycle_cache, machine.traces).pipeline(config)
    assert [i.total for i in mk2.ipus] == [i.total for i in bow.ipus]
    ratio = bow.sequences_per_second(1024, 2.0, PLAIN) / mk2.sequences_per_second(1024, 2.0, PLAIN)
    assert 1.3 < ratio < 1.85 / 1.33


@pytest.mark.parametrize(
    "key, values",
    [
        ("data.max_sequence_length", (128, 384, 512)),
        ("batch.micro_batch", (1, 2, 3)),
        ("data.max_predictions_per_sequence", (20, 76, 80)),
    ],
)
def test_cycles_never_fall(machine, load, key, values):
    """With s, the micro-batch and the MLM slots: on every IPU and for both bounds of the layout parameter."""
    before = None
    for value in values:
        overrides = [f"{key}={value}", *NARROW]
        if key == "data.max_sequence_length":
            overrides.append("data.max_predictions_per_sequence=20")
        pipeline = machine.pipeline(load(PACKED_LARGE, *overrides))
        cycles = [
            pipeline.ipu_cycles(ipu, Parameters(1.0, layout)) for ipu in pipeline.ipus for layout in (0.44, 5.148)
        ]
        assert before is None or all(a <= b for a, b in zip(before, cycles)), (key, value)
        before = cycles


def test_cycles_grow_with_layers_and_depth(machine, load):
    cycles = [
        machine.pipeline(
            load(PACKED_LARGE, f"model.num_layers={4 * n}", f"placement.layers_per_ipu=[{n}, {n}, {n}, {n}]", *NARROW)
        ).micro_batch_cycles(PLAIN)
        for n in (1, 2, 6)
    ]
    assert cycles == sorted(cycles) and cycles[2] > 3 * cycles[0]
    deep = [
        machine.pipeline(load(PACKED_LARGE, *NARROW), depth=depth).micro_batch_cycles(PLAIN) for depth in (2, 3, 16)
    ]
    assert deep == sorted(deep) and deep[0] < deep[-1]


def test_three_traced_layers_stand_for_all(machine, load):
    """The whole model, traced layer by layer, costs the same as three layers do for all."""
    from ipu_packed_bert.cycles.pipeline import assemble
    from ipu_packed_bert.cycles.tracing import capture
    from ipu_packed_bert.cycles.workload import batch_shapes, build

    config = load(PACKED_LARGE, "model.num_layers=6", "placement.layers_per_ipu=[0, 2, 2, 2]", *NARROW)
    shape = shape_of(config)
    whole = capture(lambda: build(config, config.model, shape, PACKED), batch_shapes(shape), 6)
    pipeline = assemble(
        whole, machine.traces.update(config), placement_of(config), machine.planner, num_layers=6, micro_batch=2
    )
    short = machine.pipeline(config)
    for a, b in zip(pipeline.ipus, short.ipus):
        assert a.total.cycles(3.0) == pytest.approx(b.total.cycles(3.0)) and a.link_bytes == b.link_bytes


def test_unlimited_depth_is_refused_with_a_way_out(machine, load):
    config = load(PACKED_LARGE, "data.packer=spfhp", "data.max_sequences_per_pack=null")
    with pytest.raises(ValueError, match="--depth"):
        machine.pipeline(config)
    assert shape_of(config, depth=16).masked == 76 + 16
    assert shape_of(load("unpacked_phase2_pod16.yml")) == (2, 512, 1, 76)


def test_packed_and_unpacked_defaults(machine, load):
    """A configuration of depth 1 is canonical BERT; the mask in Q and K is the cheapest of the exact arrangements."""
    config = load(PACKED_LARGE)
    assert machine.pipeline(load("unpacked_phase2_pod16.yml")) is machine.pipeline(
        load("unpacked_phase2_pod16.yml"), arrangement=UNPACKED
    )
    assert machine.pipeline(config) is machine.pipeline(config, arrangement=PACKED)
    plain, product = machine.pipeline(load(PACKED_LARGE, "engine.mask=additive")), machine.pipeline(config)
    assert plain is machine.pipeline(config, arrangement=ADDITIVE)
    for layout in (0.44, 3.125, 5.148):
        assert product.micro_batch_cycles(Parameters(1.0, layout)) < plain.micro_batch_cycles(Parameters(1.0, layout))
