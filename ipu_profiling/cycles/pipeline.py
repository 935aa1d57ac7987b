"""From costs to the cycles of a pipelined training step.

Stages of four IPUs (PopART's pipelining): embeddings and layers of IPU 0, layers of IPUs 1 to 3, heads and loss back on
IPU 0 where the tied table is, then all of it backwards: 9 stages. In steady state every IPU works on a micro-batch of
each of its stages, then all of them copy to their neighbours:

    cycles of an update = (accumulation + stages - 1) * (slowest IPU + slowest copy) + once-per-update work

and then the host's part of a call (`update`), during which the IPUs wait.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Dict, List, NamedTuple, Sequence, Tuple

from ipu_packed_bert.settings.schema import training_stages
from ipu_profiling.cycles import vertices
from ipu_profiling.cycles.layout import Cost, step, total
from ipu_profiling.cycles.lowering import (
    ATTENTION,
    CATEGORIES,
    COPIES,
    ENCODER,
    FEED_FORWARD,
    Edge,
    Entry,
    Lowered,
    Lowering,
    block_of,
    element_bytes,
    half_of,
)
from ipu_profiling.cycles.matmul import Planner
from ipu_profiling.cycles.parameters import Parameters
from ipu_profiling.cycles.target import FLOAT, HALF, Target
from ipu_profiling.cycles.tracing import Graph, layer_of
from ipu_profiling.cycles.update import IpuUpdate, UpdateCost, host_seconds, ipu_cost


class PipelinePlacement(NamedTuple):
    """The settings of a configuration's `placement` and `engine` that the cycle model uses."""

    layers_per_ipu: Tuple[int, ...]
    memory_proportion: Tuple[float, ...]
    replicas: int = 1
    serialized: int = 1
    sharded: bool = False  # optimiser state and update split over replicas
    off_chip: bool = False  # optimiser state in streaming memory
    recompute: bool = True
    half_partials: bool = True
    # Feed-forward halves of layers on each IPU, if they are not on the IPU of their attention half. Only published
    # runs of PopART split layers so; `layers_per_ipu` then counts the attention halves.
    feed_forward_per_ipu: Tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """Stages of the pipeline, forward and backward."""
        return training_stages(self.layers_per_ipu)

    def halves(self, ipu: int) -> Dict[str, int]:
        """Count the attention and the feed-forward halves of layers on an IPU."""
        feed_forward = self.feed_forward_per_ipu or self.layers_per_ipu
        return {ATTENTION: self.layers_per_ipu[ipu], FEED_FORWARD: feed_forward[ipu]}

    def _ipu_of_layer(self, layer: int) -> int:
        """Return the IPU of encoder layer number `layer`."""
        end = 0
        for ipu, layers in enumerate(self.layers_per_ipu):
            end += layers
            if layer < end:
                return ipu
        raise ValueError(
            f"layer {layer} lies beyond placement.layers_per_ipu; place as many layers as model.num_layers"
        )


class Ipu(NamedTuple):
    """One IPU's share of a micro-batch, by category, before the calibrated parameters are applied."""

    number: int
    layers: int
    costs: Dict[str, Cost]  # category -> cost
    total: Cost  # of all categories
    link_bytes: Dict[str, float]  # block -> bytes that leave for a neighbour in the copy phase


class Step(NamedTuple):
    """Cycles and seconds of one weight update."""

    pipeline_cycle: float  # slowest IPU and copy phase
    update: float  # once per weight update
    cycles: float  # of the whole update, without the host
    seconds: float  # of the whole update, with the host
    once: UpdateCost  # seconds that are paid once, by cause


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A network on the IPUs of a replica: costs, before the calibrated parameters are applied."""

    ipus: Tuple[Ipu, ...]
    placement: PipelinePlacement
    target: Target
    micro_batch: int  # packs
    updates: Tuple[IpuUpdate, ...]  # of each IPU, once per weight update
    unknown: Dict[str, int]

    def bottleneck(self, parameters: Parameters) -> Ipu:
        """Return the slowest IPU."""
        return max(self.ipus, key=lambda ipu: parameters.cycles(ipu.total))

    def copy_cycles(self, ipu: Ipu) -> float:
        """Return the cycles in which an IPU copies to its neighbours."""
        return self.target.link_cycles(sum(ipu.link_bytes.values()))

    def pipeline_cycle(self, parameters: Parameters) -> float:
        """Return the cycles in which the pipeline takes one more micro-batch: the slowest IPU's, then the copy phase.

        All neighbours copy at once, so the copy phase takes as long as the busiest link.
        """
        slowest = parameters.cycles(self.bottleneck(parameters).total)
        return slowest + max(map(self.copy_cycles, self.ipus))

    def micro_batch_cycles(self, parameters: Parameters) -> float:
        """Return the cycles of one micro-batch through all IPUs, one after the other, without overlap."""
        return sum(parameters.cycles(ipu.total) + self.copy_cycles(ipu) for ipu in self.ipus)

    def category_cycles(self, parameters: Parameters) -> Dict[str, float]:
        """Return `micro_batch_cycles` by category; "<category>, layout" stands for its rearrangements."""
        cycles: Dict[str, float] = {}
        for ipu in self.ipus:
            for category, cost in ipu.costs.items():
                layout = parameters.factor * cost.layout_cycles(parameters.layout)
                cycles[category] = cycles.get(category, 0.0) + parameters.cycles(cost) - layout
                cycles[category + ", layout"] = cycles.get(category + ", layout", 0.0) + layout
            cycles[COPIES] = cycles.get(COPIES, 0.0) + self.copy_cycles(ipu)
        return cycles

    def work_cycles(self, ipu: Ipu, micro_batches: int, parameters: Parameters) -> float:
        """Return the cycles that an IPU works in an update, without waiting for others."""
        work = parameters.cycles(ipu.total) + self.copy_cycles(ipu)
        update = self._ipu_update(ipu.number, parameters).device * self.target.clock_hz
        return micro_batches * work + update

    def _ipu_update(self, number: int, parameters: Parameters) -> UpdateCost:
        """Return the cost of an update on IPU `number` beyond the pipeline, without the host."""
        return ipu_cost(
            self.updates[number], self.placement.replicas, len(self.ipus), self.target, parameters
        )

    def _update_cost(self, parameters: Parameters) -> UpdateCost:
        """Return the cost of an update beyond the pipeline: the slowest IPU's part and the host's."""
        costs = [self._ipu_update(ipu.number, parameters) for ipu in self.ipus]
        slowest = max(costs, key=lambda cost: cost.device)
        host = host_seconds(
            self.placement.replicas,
            len(self.ipus),
            self.target,
            replica_seconds=parameters.replica_seconds,
        )
        return replace(slowest, host=host)

    def step(self, accumulation: int, parameters: Parameters) -> Step:
        """Return the cycles and seconds of one weight update over `accumulation` micro-batches."""
        once = self._update_cost(parameters)
        cycle = self.pipeline_cycle(parameters)
        update = once.device * self.target.clock_hz
        cycles = (accumulation + self.placement.stages - 1) * cycle + update
        return Step(cycle, update, cycles, self.target.seconds(cycles) + once.host, once)

    def sequences_per_second(
        self, accumulation: int, packing_factor: float, parameters: Parameters
    ) -> float:
        """Return the throughput of all replicas at `packing_factor` sequences per pack."""
        sequences = accumulation * self.micro_batch * self.placement.replicas * packing_factor
        return sequences / self.step(accumulation, parameters).seconds


def _edges(graph: Graph) -> List[Edge]:
    """Return the tensors that one block writes and another reads; parameters and batch fields are not copied."""
    writers: Dict[int, str] = {}
    for operation in graph.operations:
        for output in operation.outputs:
            writers.setdefault(output, block_of(operation.scope))

    edges: Dict[Edge, None] = {}  # in order of their first use
    for operation in graph.operations:
        reader = block_of(operation.scope)
        for index in operation.inputs():
            writer = writers.get(index)
            value = graph.values[index]
            if writer is not None and writer != reader and value.elements > 1:
                num_bytes = value.elements * element_bytes(value.dtype)
                edges[Edge(writer, reader, operation.phase, num_bytes, index)] = None
    return list(edges)


def _route(source: int, target: int, count: int, *, through: bool = False) -> List[int]:
    """Return the links of a tensor, by the IPU that it leaves: along the pipeline, or the link back to IPU 0.

    through: every IPU on the way needs the tensor, so the link back is not used.
    """
    uses_link_back = abs(source - target) == count - 1 and source != target
    if uses_link_back and not through:
        return [source]
    return list(range(source, target, 1 if target > source else -1))


def assemble(
    graph: Graph,
    update: Graph,
    placement: PipelinePlacement,
    planner: Planner,
    *,
    num_layers: int,
    micro_batch: int,
) -> Pipeline:
    """Lower the graph for every IPU and add what the pipeline itself costs.

    Args:
        graph: forward and backward of a micro-batch, of a few layers.
        update: the weight update of a network of one layer.
        placement: the layers, replicas and memory of the IPUs.
        planner: the plans of products, for one target.
        num_layers: encoder layers of the whole network.
        micro_batch: packs of a micro-batch.
    """
    target = planner.target
    count = len(placement.layers_per_ipu)
    lowered: Dict[float, Lowered] = {}
    for proportion in sorted(set(placement.memory_proportion)):
        lowered[proportion] = Lowering(
            graph,
            planner,
            memory_proportion=proportion,
            serialized=placement.serialized,
            partial_bytes=HALF if placement.half_partials else FLOAT,
        ).run()
    crossing = _edges(graph)
    links = _link_bytes(graph, crossing, placement, num_layers, count)
    parameters = _parameters_per_ipu(graph, placement, count)

    # Every IPU stashes the outputs of its layers (IPU 0 also of the embeddings) and tensors that every layer reads.
    layer_output = _layer_output_elements(graph, crossing)
    carried = _carried_elements(graph, crossing, count)
    stash = _stash(layer_output, target)

    ipus = []
    for number, layers in enumerate(placement.layers_per_ipu):
        costs: Dict[str, Cost] = {category: Cost() for category in CATEGORIES}
        for entry in lowered[placement.memory_proportion[number]].entries:
            times = _calls(entry, placement, number)
            if times:
                costs[entry.category] = costs[entry.category] + entry.cost * float(times)
        costs[COPIES] = costs[COPIES] + stash * float(layers + int(number == 0))
        if carried:
            costs[COPIES] = costs[COPIES] + _stash(carried, target)
        add_gradients = vertices.scaled_add(target.per_tile(parameters[number][0]))
        costs[ENCODER] = costs[ENCODER] + step(target, vertices_cycles=add_gradients)
        ipus.append(Ipu(number, layers, costs, total(costs.values()), links[number]))

    share = placement.replicas if placement.sharded else 1
    updates = []
    for elements, tensors in parameters:
        cost = _update_cost(update, planner, elements / share, placement)
        # Two moments in float32, read and written.
        streamed_bytes = 2 * 8 * elements / share if placement.off_chip else 0.0
        updates.append(IpuUpdate(cost, elements, tensors, streamed_bytes))
    unknown: Dict[str, int] = {}
    for result in lowered.values():
        unknown.update(result.unknown)
    return Pipeline(tuple(ipus), placement, target, micro_batch, tuple(updates), unknown)


def _calls(entry: Entry, placement: PipelinePlacement, ipu: int) -> int:
    """Count the calls of an entry's operator in a micro-batch on one IPU."""
    times = int(ipu == 0)
    if entry.block == "layer":
        times = placement.halves(ipu)[entry.half]
    # Recomputed for the backward pass, except for the heads, whose backward pass follows at once.
    if placement.recompute and entry.phase == "forward" and entry.block != "heads":
        times *= 2
    return times


def _stash(elements: int, target: Target) -> Cost:
    """Cost writing a tensor to the stash of a pipeline and reading it back."""
    cycles = vertices.dynamic_slice(target.per_tile(elements))
    return step(target, vertices_cycles=2 * cycles)


def _layer_output_elements(graph: Graph, crossing: Sequence[Edge]) -> int:
    """Return the elements of a layer's output, the largest tensor that layers read from another block."""
    largest = 0
    for edge in crossing:
        into_layer = edge.phase == "forward" and edge.target.startswith("layer.")
        if into_layer and edge.source != "mask":
            largest = max(largest, graph.values[edge.value].elements)
    return largest


def _carried_elements(graph: Graph, crossing: Sequence[Edge], count: int) -> int:
    """Count the elements of tensors that every layer reads and every IPU must keep, such as a mask built once."""
    if count == 1:
        return 0
    readers = _layer_readers(crossing)
    carried = [value for value in readers if len(readers[value]) > 1]
    return sum(graph.values[value].elements for value in carried)


def _link_bytes(
    graph: Graph,
    crossing: Sequence[Edge],
    placement: PipelinePlacement,
    num_layers: int,
    count: int,
) -> List[Dict[str, float]]:
    """Return the bytes that leave each IPU in one copy phase, over its busier direction, by their block."""
    directions: Dict[str, List[Dict[str, float]]] = {
        "forward": [{} for _ in range(count)],
        "backward": [{} for _ in range(count)],
    }
    homes = [placement._ipu_of_layer(layer) for layer in range(num_layers)]
    readers = _layer_readers(crossing)

    seen = set()
    for edge in crossing:
        within_layers = edge.source.startswith("layer.") and edge.target.startswith("layer.")
        if within_layers and {edge.source, edge.target} != {"layer.0", "layer.1"}:
            continue  # the first pair represents all
        for_all_layers = (
            not edge.source.startswith("layer.") and len(readers.get(edge.value, ())) > 1
        )

        destination = edge.target
        if within_layers:  # copied between layers on different IPUs
            pairs = list(zip(homes, homes[1:]))
            if edge.phase == "backward":
                pairs = list(zip(homes[1:], homes))
            destination = "layers"
        elif for_all_layers:  # handed on from IPU to IPU
            pairs = [(0, homes[-1])]
            destination = "layers"
        else:
            pairs = [(_home(edge.source, homes, graph), _home(edge.target, homes, graph))]
        key = (edge.value, edge.phase, destination)
        if key in seen:
            continue
        seen.add(key)

        category = edge.source.split(".")[0]
        sent = directions[edge.phase]
        for source, target in pairs:
            for link in _route(source, target, count, through=for_all_layers):
                sent[link][category] = sent[link].get(category, 0.0) + edge.num_bytes

    # Activations go one way while gradients go the other: the busier direction counts.
    return [
        max(both, key=lambda by_block: sum(by_block.values())) for both in zip(*directions.values())
    ]


def _home(block: str, homes: Sequence[int], graph: Graph) -> int:
    """Return the IPU of a traced block; the last traced layer stands for the last layer of the network."""
    if not block.startswith("layer."):
        return 0
    layer = int(block[len("layer.") :])
    return homes[-1 if layer == graph.num_layers - 1 else layer]


def _layer_readers(crossing: Sequence[Edge]) -> Dict[int, set]:
    """Map every tensor that layers read from other blocks to these layers."""
    readers: Dict[int, set] = {}
    for edge in crossing:
        if edge.phase == "forward" and edge.target.startswith("layer."):
            readers.setdefault(edge.value, set()).add(edge.target)
    return readers


def _parameters_per_ipu(
    graph: Graph, placement: PipelinePlacement, count: int
) -> List[Tuple[int, int]]:
    """Return the parameter elements on each IPU and the number of their tensors."""
    sizes: Dict[str, List[int]] = {"": [], ATTENTION: [], FEED_FORWARD: []}
    for index in graph.parameters:
        value = graph.values[index]
        if layer_of(value.name) in (None, 0):
            sizes[half_of(value.name)].append(value.elements)
    per_ipu = []
    for number in range(count):
        times = {"": int(number == 0), **placement.halves(number)}
        elements = sum(times[part] * sum(sizes[part]) for part in sizes)
        tensors = sum(times[part] * len(sizes[part]) for part in sizes)
        per_ipu.append((elements, tensors))
    return per_ipu


def _update_cost(
    update: Graph, planner: Planner, elements: float, placement: PipelinePlacement
) -> Cost:
    """Scale the traced update from the traced parameters to those of one IPU (or one replica's share of them)."""
    traced = sum(update.values[index].elements for index in update.parameters)
    lowering = Lowering(update, planner, memory_proportion=placement.memory_proportion[0])
    cost = total(map(lowering.operation, update.operations))
    return cost * (elements / traced)
