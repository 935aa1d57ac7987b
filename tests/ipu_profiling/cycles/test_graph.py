"""Tracing and lowering: the graph is the engine's, no operator is lost, nothing that works is free."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ipu_packed_bert.model.packed import PackedBertForPreTraining
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import (
    DataConfig,
    EngineConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    PlacementConfig,
    mask_columns,
)
from ipu_packed_bert.tasks.pretraining import Pretraining
from ipu_profiling.cycles import tracing
from ipu_profiling.cycles.layout import Cost, total
from ipu_profiling.cycles.lowering import (
    CATEGORIES,
    CONSTANTS,
    VIEWS,
    Lowering,
    _short_name,
)
from ipu_profiling.cycles.matmul import Planner
from ipu_profiling.cycles.target import MK2
from ipu_profiling.cycles.tracing import ADDITIVE, PACKED, capture, capture_update, layer_of
from ipu_profiling.cycles.workload import MicroBatchShape, _batch_shapes
from tests.fakes.sdk import installed
from tests.imports import ROOT

_SIZES = {"vocabulary_size": 320, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 32}
MODEL = ModelConfig(num_layers=3, num_heads=4, **_SIZES)
SHAPE = MicroBatchShape(micro_batch=2, slots=32, depth=3, masked=8)


def arranged(model, arrangement):
    from ipu_profiling.cycles.variants import build

    columns = mask_columns(model, SHAPE.depth)
    return build(model, LossConfig(), arrangement, slots=SHAPE.slots, depth=SHAPE.depth, columns=columns)


def trace(num_layers=3, arrangement=ADDITIVE):
    model = replace(MODEL, num_layers=num_layers)
    return capture(lambda: arranged(model, arrangement), _batch_shapes(SHAPE), num_layers)


@pytest.fixture(scope="module")
def graph():
    return trace()


def lowering_of(graph):
    return Lowering(graph, Planner(MK2), memory_proportion=0.25)


def cost_of(entries, **wanted):
    chosen = [entry for entry in entries if all(getattr(entry, name) == value for name, value in wanted.items())]
    return total(entry.cost for entry in chosen)


@pytest.mark.parametrize("mask, arrangement", [("product", PACKED), ("additive", ADDITIVE)])
def test_the_default_arrangements_are_what_the_ipu_engine_runs(mask, arrangement):
    """engine/ipu/ adapts the network for the device; the traced default is that graph, operator by operator."""
    model = replace(MODEL, num_layers=2)
    config = Config(
        model=model,
        data=DataConfig(max_sequence_length=SHAPE.slots, max_sequences_per_pack=SHAPE.depth),
        engine=EngineConfig(recompute_layers=False, mask=mask),
        placement=PlacementConfig(layers_per_ipu=(2,)),
    )

    def adapted():
        network = PackedBertForPreTraining(model, LossConfig())
        engine.program._adapt(network, config, Pretraining(config))
        return network

    with installed() as (engine, _):
        of_engine = capture(adapted, _batch_shapes(SHAPE), 2)
    traced = trace(2, arrangement)
    assert len(traced.operations) > 300
    assert of_engine.values == traced.values
    assert of_engine.operations == traced.operations
    assert of_engine.buffers == traced.buffers


def test_one_layer_stands_for_all_and_categories_add_up(graph):
    lowered = lowering_of(graph).run()
    calls = Counter(layer_of(operation.scope) for operation in graph.operations)
    assert len(lowered.entries) == calls[1] + calls[None]
    four_layers = lowering_of(trace(num_layers=4)).run()
    assert cost_of(four_layers.entries, block="layer") == cost_of(lowered.entries, block="layer")
    parts = total(cost_of(lowered.entries, category=category) for category in CATEGORIES)
    assert parts.cycles(3.0) == pytest.approx(cost_of(lowered.entries).cycles(3.0))
    assert lowered.unknown == {}


def test_only_views_constants_and_fused_operators_are_free(graph):
    lowering = lowering_of(graph)
    free = Counter()
    for operation in graph.operations:
        if lowering.operation(operation) == Cost():
            free[_short_name(operation.operator)] += 1
    # _to_copy: 64-bit integers are 32-bit ones on the device. bernoulli and div: inside the dropout vertex.
    # add: the tied table's gradient, which the scatter adds into.
    assert set(free) <= VIEWS | CONSTANTS | {"_to_copy", "bernoulli", "div", "add"}
    assert free["add"] == 1


def test_an_unknown_operator_is_counted_and_costs_something(graph):
    operations = list(graph.operations)
    places = [place for place, item in enumerate(operations) if item.operator.startswith("aten.gelu.")]
    (place,) = [place for place in places if layer_of(operations[place].scope) == 1]
    operations[place] = operations[place]._replace(operator="aten.made_up.default")
    lowering = lowering_of(replace(graph, operations=tuple(operations)))
    assert lowering.run().unknown == {"aten.made_up.default": 1}
    assert lowering.operation(operations[place]).vertices > 0


def test_a_lamb_update_has_no_unknown_operator():
    from ipu_packed_bert.model.optimizer import build_optimizer

    model = replace(MODEL, num_layers=1)
    graph = capture_update(
        lambda: PackedBertForPreTraining(model, LossConfig()),
        lambda network: build_optimizer(network, OptimizerConfig(), betas=(0.9, 0.999)),
        1,
    )
    lowering = lowering_of(graph)
    assert total(map(lowering.operation, graph.operations)).vertices > 0
    assert lowering.unknown == {}


def test_a_graph_survives_its_file_and_a_damaged_file_is_traced_again(graph, tmp_path):
    again = tracing.Graph.from_json(graph.to_json())
    assert lowering_of(again).run().entries == lowering_of(graph).run().entries
    traced = []

    def make():
        traced.append(graph)
        return graph

    for _ in range(2):
        tracing.cached("key", tmp_path, make)
    assert len(traced) == 1
    (stored,) = tmp_path.glob("trace_*.json")
    stored.write_text("damaged")
    tracing.cached("key", tmp_path, make)
    assert len(traced) == 2


def test_cached_graphs_depend_on_the_sources_of_the_model(monkeypatch):
    """After packages moved, a changed model was not traced again."""
    read = []
    read_bytes = Path.read_bytes

    def recorded(path):
        read.append(path)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", recorded)
    tracing.sources_digest()
    assert set((ROOT / "ipu_packed_bert" / "model").glob("*.py")) < set(read)
