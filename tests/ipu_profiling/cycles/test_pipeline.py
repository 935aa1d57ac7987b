"""Pipeline assembly: stages, bottleneck, copies, update; and that more work never takes fewer cycles."""

import numpy as np
import pytest

from ipu_profiling.cycles import vertices
from ipu_profiling.cycles.layout import Cost, step, total
from ipu_profiling.cycles.lowering import ATTENTION, COPIES, ENCODER, MASK_APPLICATION, Lowering
from ipu_profiling.cycles.matmul import Planner
from ipu_profiling.cycles.pipeline import Parameters, PipelinePlacement, _edges, _route, assemble
from ipu_profiling.cycles.target import BOW, MK2, Target
from ipu_profiling.cycles.tracing import ADDITIVE, PACKED, POPART, UNPACKED, Graph, Operation, Value, layer_of
from ipu_profiling.cycles.workload import Machine, _placement_of, shape_of
from tests.tolerances import same

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


# By hand: a network of three alike layers, of which six run, on a machine of 10 tiles ---------------------------------

HAND = Target("hand", clock_hz=1e9, tiles=10, sync_cycles=101, dispatch_cycles=53)
HIDDEN, MASK = (2, 50, 8), (2, 50, 50)  # 800 halves, 80 on a tile; 5,000, 500 on a tile


def network():
    """Embedding, a mask made once, layers of two operations each way, heads. Values are named by what makes them."""
    values, operations, index = [], [], {}

    def value(name, shape, dtype="float16", called=""):
        strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
        index[name] = len(values)
        values.append(Value(shape, strides, dtype, called))

    def op(operator, inputs, output, scope, phase="forward", shape=HIDDEN):
        value(output, shape)
        arguments = tuple({"value": index[name]} for name in inputs)
        operations.append(Operation(f"aten.{operator}.default", arguments, {}, (index[output],), scope, phase))

    layer = "bert.encoder.layer.{}.{}".format
    value("ids", (2, 50), "int32", "input_ids")
    value("mask in", MASK, "float16", "input_mask")
    value("table", (320, 8), "float16", "bert.embeddings.word_embeddings.weight")
    for number in range(3):
        value(f"wa{number}", (8, 8), "float16", layer(number, "attention.self.query.weight"))
        value(f"wf{number}", (8, 32), "float16", layer(number, "intermediate.dense.weight"))
    op("embedding", ["table", "ids"], "h0", "bert.embeddings.word_embeddings")
    op("tanh", ["mask in"], "mask", "attention_mask", shape=MASK)
    for number in range(3):
        op("attend", [f"h{number}", "mask"], f"a{number}", layer(number, "attention.self"))
        op("gelu", [f"a{number}"], f"h{number + 1}", layer(number, "intermediate"))
    op("sqrt", ["h3"], "logits", "cls.x")
    op("tanh", ["logits"], "g3", "cls.x", "backward")
    for number in (2, 1, 0):
        op("gelu_backward", [f"g{number + 1}", f"a{number}"], f"f{number}", layer(number, "intermediate"), "backward")
        op("tanh_backward", [f"f{number}", f"a{number}"], f"g{number}", layer(number, "attention.self"), "backward")
    op("embedding_dense_backward", ["g0", "ids"], "gt", "bert.embeddings.word_embeddings", "backward", (320, 8))
    parameters = tuple(index[name] for name in index if name.startswith("w") or name == "table")
    return Graph(tuple(values), tuple(operations), parameters, (), 3), index


def update():
    """One multiplication of 64 parameters."""
    value = Value((8, 8), (8, 1), "float32", "w")
    multiply = Operation("aten._foreach_mul_.Scalar", ([{"value": 0}], 0.9), {}, (0,), "", "update")
    return Graph((value,), (multiply,), (0,), (), 1)


def by_hand(**options):
    graph, index = network()
    placement = PipelinePlacement((1, 2, 2, 1), (0.2, 0.2, 0.2, 0.3), **options)
    pipeline = assemble(graph, update(), placement, Planner(HAND), num_layers=6, micro_batch=2)
    return pipeline, graph, index


def sets(*work):
    return total(step(HAND, vertices_cycles=cycles) for cycles in work)


def whole(*costs):
    return total(costs)


ATTEND = sets(vertices.binary(500, "div", "float"))  # an unknown operator: a division of its largest tensor
GELU = sets(vertices.gelu(80))
# The gradient and the saved tensor have layouts of their own: 160 bytes on a tile in whole atoms, before each.
ALIGNED = Cost(vertices=587 + 0.44 * 160, exchange=40, sync=101)
BACK = ALIGNED * 2.0 + sets(vertices.gelu_gradient(80), vertices.tanh_gradient(80))
STASH = sets(2 * vertices.dynamic_slice(80))
CARRIED = sets(2 * vertices.dynamic_slice(500))  # the mask, which every layer reads


def alone(graph, operator, phase):
    """Return the cost of one operation of the graph; test_lowering.py works out each by hand."""
    found = [o for o in graph.operations if o.operator == f"aten.{operator}.default" and o.phase == phase]
    return Lowering(graph, Planner(HAND), memory_proportion=0.2).operation(found[0])


@pytest.mark.parametrize("recompute, forwards", [(True, 2.0), (False, 1.0)])
def test_shares_of_the_ipus_by_hand(recompute, forwards):
    pipeline, graph, _ = by_hand(recompute=recompute)
    layer = (ATTEND + GELU) * forwards + BACK
    accumulate = [sets(vertices.scaled_add(n)) for n in (288, 64, 64, 32)]  # 2,880, 640, 640 and 320 parameters
    first = (alone(graph, "embedding", "forward") + sets(vertices.unary(500, "tanh", "half"))) * forwards
    scatter = alone(graph, "embedding_dense_backward", "backward")
    heads = sets(vertices.unary(80, "sqrt", "half"), vertices.unary(80, "tanh", "half"))  # nothing there runs twice
    same(pipeline.ipus[0].total, whole(layer, first, scatter, heads, STASH * 2.0, CARRIED, accumulate[0]))
    for number, layers in ((1, 2.0), (2, 2.0), (3, 1.0)):
        same(pipeline.ipus[number].total, whole(layer * layers, STASH * layers, CARRIED, accumulate[number]))
    costs = pipeline.ipus[1].costs
    same(costs[MASK_APPLICATION], ATTEND * (2 * forwards))
    same(costs[COPIES], STASH * 2.0 + CARRIED)
    same(costs[ENCODER], (GELU * forwards + BACK) * 2.0 + accumulate[1])
    assert pipeline.unknown == {"aten.attend.default": 1}
    assert [ipu.layers for ipu in pipeline.ipus] == [1, 2, 2, 1] and pipeline.micro_batch == 2


def test_links_by_hand():
    pipeline, _, _ = by_hand()
    # Forward: hidden states to the next IPU, the mask to all; back to the heads by a link of its own.
    first = {"mask": 10_000.0, "layer": 1600.0}
    assert [ipu.link_bytes for ipu in pipeline.ipus] == [first, first, first, {"layer": 1600.0}]
    assert max(map(pipeline.copy_cycles, pipeline.ipus)) == pytest.approx(11_600 / 64e9 * 1e9 + 600)
    assert pipeline.placement.stages == 9


def test_steps_by_hand():
    pipeline, _, _ = by_hand(replicas=4, sharded=True, off_chip=True)
    parameters = Parameters(1.5, 2.0, 0.001)
    slowest = max(1.5 * ipu.total.cycles(2.0) for ipu in pipeline.ipus)
    assert pipeline.pipeline_cycle(parameters) == pytest.approx(slowest + max(map(pipeline.copy_cycles, pipeline.ipus)))
    assert pipeline.bottleneck(parameters).number == 0
    links = [600 + sent / 64 for sent in (11_600, 11_600, 11_600, 1600)]
    one = sum(1.5 * ipu.total.cycles(2.0) for ipu in pipeline.ipus) + sum(links)
    assert pipeline.micro_batch_cycles(parameters) == pytest.approx(one)
    found = pipeline.category_cycles(parameters)
    assert sum(found.values()) == pytest.approx(one)
    copies = sum(1.5 * ipu.costs[COPIES].cycles(2.0) for ipu in pipeline.ipus)
    assert found[COPIES] == pytest.approx(copies + sum(links))
    # 2,880 parameters in 3 tensors on IPU 0; a quarter of the optimiser's work and of 16 bytes each at 5 GB/s.
    assert [update.parameters for update in pipeline.updates] == [2880, 640, 640, 320]
    assert [update.tensors for update in pipeline.updates] == [3, 4, 4, 2]
    same(pipeline.updates[0].cost, sets(vertices.scalar(7, "mul", "float")) * (2880 / 4 / 64))
    assert [update.streamed_bytes for update in pipeline.updates] == [11_520, 2560, 2560, 1280]
    once = pipeline.update_cost(parameters)
    optimizer = 1.5 * pipeline.updates[0].cost.cycles(2.0) / 1e9
    ring = 2 * 3 / 4 * 2880 * 2 / 64e9 + 3 * 2 * 3 * 600 / 1e9
    assert once.device == pytest.approx(optimizer + ring + 11_520 / 5e9) and once.host == pytest.approx(0.004)
    step = pipeline.step(20, parameters)
    cycles = 28 * pipeline.pipeline_cycle(parameters) + once.device * 1e9
    assert step.cycles == pytest.approx(cycles) and step.seconds == pytest.approx(cycles / 1e9 + 0.004)
    assert pipeline.sequences_per_second(20, 1.5, parameters) == pytest.approx(20 * 2 * 4 * 1.5 / step.seconds)
    whole, _, _ = by_hand(replicas=4)
    assert whole.updates[0].cost.vertices == pytest.approx(4 * pipeline.updates[0].cost.vertices)
    assert whole.updates[0].streamed_bytes == 0.0


def test_one_ipu_keeps_all_and_copies_nothing():
    graph, _ = network()
    pipeline = assemble(graph, update(), PipelinePlacement((6,), (0.2,)), Planner(HAND), num_layers=6, micro_batch=2)
    assert pipeline.ipus[0].link_bytes == {} and max(map(pipeline.copy_cycles, pipeline.ipus)) == 0.0
    same(pipeline.ipus[0].costs[COPIES], STASH * 7.0)  # nothing is carried from IPU to IPU
    assert pipeline.placement.stages == 1 and pipeline.updates[0].parameters == 6 * 320 + 2560


def test_edges_by_hand():
    graph, index = network()
    found = {(edge.source, edge.target, edge.phase, edge.value): edge.num_bytes for edge in _edges(graph)}
    hidden = 1600
    assert found == {
        ("embeddings", "layer.0", "forward", index["h0"]): hidden,
        ("mask", "layer.0", "forward", index["mask"]): 10_000,
        ("mask", "layer.1", "forward", index["mask"]): 10_000,
        ("mask", "layer.2", "forward", index["mask"]): 10_000,
        ("layer.0", "layer.1", "forward", index["h1"]): hidden,
        ("layer.1", "layer.2", "forward", index["h2"]): hidden,
        ("layer.2", "heads", "forward", index["h3"]): hidden,
        ("heads", "layer.2", "backward", index["g3"]): hidden,
        ("layer.2", "layer.1", "backward", index["g2"]): hidden,
        ("layer.1", "layer.0", "backward", index["g1"]): hidden,
        ("layer.0", "embeddings", "backward", index["g0"]): hidden,
    }


# The real network -----------------------------------------------------------


def test_stages_as_popart_counts_them():
    assert PipelinePlacement((3, 7, 7, 7), (0.1,) * 4).stages == 9  # 5 forward stages, 4 more backwards
    assert PipelinePlacement((0, 3, 3, 3, 3, 4, 4, 4), (1.0,) * 8).stages == 17
    assert PipelinePlacement((4,), (0.28,)).stages == 1


def test_layers_find_their_ipu():
    placement = PipelinePlacement((3, 7, 7, 7), (0.1,) * 4)
    assert [placement._ipu_of_layer(layer) for layer in (0, 2, 3, 9, 10, 16, 17, 23)] == [0, 0, 1, 1, 2, 2, 3, 3]
    with pytest.raises(ValueError, match="layer 24"):
        placement._ipu_of_layer(24)


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
    layer = PLAIN.cycles(slowest.total) / 7
    assert pipeline.pipeline_cycle(PLAIN) == pytest.approx(7 * layer + max(map(pipeline.copy_cycles, pipeline.ipus)))
    balanced = machine.pipeline(load(PACKED_LARGE, *NARROW))
    assert PLAIN.cycles(balanced.bottleneck(PLAIN).total) == pytest.approx(7 * layer)
    # Fewer layers on the fullest IPU help; moving one between the others does not.
    even = machine.pipeline(load(PACKED_LARGE, "placement.layers_per_ipu=[6, 6, 6, 6]", *NARROW))
    assert PLAIN.cycles(even.ipus[1].total) == pytest.approx(6 / 7 * PLAIN.cycles(slowest.total), rel=0.01)
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
    again = machine.pipeline(config, arrangement=POPART)
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
        cycles = [Parameters(1.0, layout).cycles(ipu.total) for ipu in pipeline.ipus for layout in (0.44, 5.148)]
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


def signature(graph, layer):
    """Operators, shapes, types and constants of one layer, in order; values are numbered by their first use."""
    numbers = {}

    def named(argument):
        if isinstance(argument, dict) and "value" in argument:
            value = graph.values[argument["value"]]
            return [numbers.setdefault(argument["value"], len(numbers)), value.shape, value.strides, value.dtype]
        return [named(part) for part in argument] if isinstance(argument, (list, tuple)) else argument

    prefix = f"bert.encoder.layer.{layer}"
    return [
        (each.operator, named(each.arguments), named(list(each.keywords.values())), each.scope[len(prefix) :])
        for each in graph.operations
        if layer_of(each.scope) == layer
    ]


def test_three_traced_layers_stand_for_all(machine, load):
    """All layers of a whole model are one; so three cost what all do."""
    from ipu_profiling.cycles.tracing import capture
    from ipu_profiling.cycles.workload import _batch_shapes, _build

    config = load(PACKED_LARGE, "model.num_layers=6", "placement.layers_per_ipu=[0, 2, 2, 2]", *NARROW)
    shape = shape_of(config)
    whole = capture(lambda: _build(config, config.model, shape, PACKED), _batch_shapes(shape), 6)
    pipeline = assemble(
        whole, machine.traces.update(config), _placement_of(config), machine.planner, num_layers=6, micro_batch=2
    )
    short = machine.pipeline(config)
    layers = [signature(whole, layer) for layer in range(6)]
    assert len(layers[0]) > 60 and all(layer == layers[0] for layer in layers)
    for a, b in zip(pipeline.ipus, short.ipus):
        assert a.total.cycles(3.0) == pytest.approx(b.total.cycles(3.0)) and a.link_bytes == b.link_bytes


def test_unlimited_depth_is_refused_with_a_way_out(machine, load):
    config = load(PACKED_LARGE, "data.packer=spfhp", "data.max_sequences_per_pack=null")
    with pytest.raises(ValueError, match="max_sequences_per_pack is unlimited; .* set one"):
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


def test_joining_query_and_key_to_the_mask_is_a_copy(machine, load):
    """In each layer they are joined to 16 columns, [2, 16, 512, 80] halves; the gradients, [2, 16, 512, 64], stay."""
    config = load(PACKED_LARGE)
    graph = machine.traces.training(config, shape_of(config), PACKED)
    entries = Lowering(graph, machine.planner, memory_proportion=0.2, serialized=5).run().entries
    attention = [entry for entry in entries if entry.half == ATTENTION]
    joined = [entry for entry in attention if entry.operator.startswith("aten.cat.")]
    sliced = [entry for entry in attention if entry.operator.startswith("aten.slice.") and entry.cost.vertices]
    for copies, phase, columns in ((joined, "forward", 80), (sliced, "backward", 64)):
        assert [entry.phase for entry in copies] == [phase, phase]
        num_bytes = -(-2 * 16 * 512 * columns // 1472) * 2
        assert all(entry.cost.vertices == vertices.copy(num_bytes) for entry in copies)
        assert all(entry.cost.layout_bytes == 0 for entry in copies)
    assert all(entry.cost.exchange == 0 for entry in sliced)
