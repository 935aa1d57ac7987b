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

from ipu_packed_bert.cycles import vertices
from ipu_packed_bert.cycles.layout import Cost, step, total
from ipu_packed_bert.cycles.lowering import (
    ATTENTION,
    CATEGORIES,
    COPIES,
    ENCODER,
    FEED_FORWARD,
    Edge,
    Lowered,
    Lowering,
    block_of,
    element_bytes,
    half_of,
)
from ipu_packed_bert.cycles.matmul import Planner
from ipu_packed_bert.cycles.parameters import Parameters
from ipu_packed_bert.cycles.target import FLOAT, HALF, Target
from ipu_packed_bert.cycles.tracing import Graph, layer_of
from ipu_packed_bert.cycles.update import IpuUpdate, UpdateCost, host_seconds, ipu_cost
from ipu_packed_bert.settings.schema import training_stages


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
    # Where the feed-forward halves of the layers lie elsewhere than their attention: their number on each IPU. Only
    # published runs of PopART do so; `layers_per_ipu` then counts the attention halves.
    feed_forward_per_ipu: Tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        return training_stages(self.layers_per_ipu)

    def halves(self, ipu: int) -> Dict[str, int]:
        """How many attention and feed-forward halves of layers lie on an IPU."""
        elsewhere = self.feed_forward_per_ipu or self.layers_per_ipu
        return {ATTENTION: self.layers_per_ipu[ipu], FEED_FORWARD: elsewhere[ipu]}

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
    cycles: float  # all of it, without the host
    seconds: float  # the host's part included
    once: UpdateCost  # what is paid once, by cause


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A network on the IPUs of a replica: costs, before the calibrated parameters are applied."""

    ipus: Tuple[Ipu, ...]
    placement: PipelinePlacement
    target: Target
    micro_batch: int  # packs
    updates: Tuple[IpuUpdate, ...]  # of each IPU, once per weight update
    unknown: Dict[str, int]

    def ipu_cycles(self, ipu: Ipu, parameters: Parameters) -> float:
        return parameters.cycles(ipu.total)

    def bottleneck(self, parameters: Parameters) -> Ipu:
        return max(self.ipus, key=lambda ipu: self.ipu_cycles(ipu, parameters))

    def copy_cycles(self, ipu: Ipu) -> float:
        """Return the cycles in which an IPU copies to its neighbours."""
        return self.target.link_cycles(sum(ipu.link_bytes.values()))

    def pipeline_cycle(self, parameters: Parameters) -> float:
        """Return the cycles in which the pipeline takes one more micro-batch: the slowest IPU's, then the copy phase.

        All neighbours copy at once, so the copy phase takes as long as the busiest link.
        """
        slowest = max(self.ipu_cycles(ipu, parameters) for ipu in self.ipus)
        return slowest + max(map(self.copy_cycles, self.ipus))

    def micro_batch_cycles(self, parameters: Parameters) -> float:
        """Return the cycles of one micro-batch through all IPUs, one after the other, without overlap."""
        return sum(self.ipu_cycles(ipu, parameters) + self.copy_cycles(ipu) for ipu in self.ipus)

    def category_cycles(self, parameters: Parameters) -> Dict[str, float]:
        """Return `micro_batch_cycles` by category; the rearrangements of each separately, as "<category>, layout"."""
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
        update = self.ipu_update(ipu.number, parameters).device * self.target.clock_hz
        return micro_batches * (self.ipu_cycles(ipu, parameters) + self.copy_cycles(ipu)) + update

    def ipu_update(self, number: int, parameters: Parameters) -> UpdateCost:
        """Return the cost of an update on IPU `number` beyond the pipeline, without the host."""
        return ipu_cost(
            self.updates[number], self.placement.replicas, len(self.ipus), self.target, parameters
        )

    def update_cost(self, parameters: Parameters) -> UpdateCost:
        """Return the cost of an update beyond the pipeline: the slowest IPU's part and the host's."""
        slowest = max(
            (self.ipu_update(ipu.number, parameters) for ipu in self.ipus),
            key=lambda cost: cost.device,
        )
        host = host_seconds(
            self.placement.replicas,
            len(self.ipus),
            self.target,
            replica_seconds=parameters.replica_seconds,
        )
        return replace(slowest, host=host)

    def step(self, accumulation: int, parameters: Parameters) -> Step:
        once = self.update_cost(parameters)
        cycle, update = self.pipeline_cycle(parameters), once.device * self.target.clock_hz
        cycles = (accumulation + self.placement.stages - 1) * cycle + update
        return Step(cycle, update, cycles, self.target.seconds(cycles) + once.host, once)

    def sequences_per_second(
        self, accumulation: int, packing_factor: float, parameters: Parameters
    ) -> float:
        """Throughput of all replicas; `packing_factor` sequences stand in a pack."""
        sequences = accumulation * self.micro_batch * self.placement.replicas * packing_factor
        return sequences / self.step(accumulation, parameters).seconds


def _edges(graph: Graph) -> List[Edge]:
    """Tensors that one block makes and another reads; parameters and batch fields are not copied."""
    made: Dict[int, str] = {}
    for operation in graph.operations:
        for output in operation.outputs:
            made.setdefault(output, block_of(operation.scope))
    found: Dict[Tuple[str, str, str, int], Edge] = {}
    for operation in graph.operations:
        reader = block_of(operation.scope)
        for index in operation.inputs():
            writer = made.get(index)
            value = graph.values[index]
            if writer is not None and writer != reader and value.elements > 1:
                key = (writer, reader, operation.phase, index)
                found[key] = Edge(
                    writer,
                    reader,
                    operation.phase,
                    value.elements * element_bytes(value.dtype),
                    index,
                )
    return list(found.values())


def _route(source: int, target: int, count: int, *, through: bool = False) -> List[int]:
    """Links that a tensor takes, each named by the IPU it leaves: along the pipeline, or the link back to IPU 0.

    through: every IPU on the way needs the tensor, so the link back is not used.
    """
    if not through and abs(source - target) == count - 1 and source != target:
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
    """Lower the graph for every IPU and add what the pipeline itself costs."""
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
    elements, tensors = _parameters_per_ipu(graph, placement, count)
    hidden = _hidden_elements(graph, crossing)
    carried = _carried_elements(graph, crossing, count)

    ipus = []
    for number, layers in enumerate(placement.layers_per_ipu):
        here = lowered[placement.memory_proportion[number]]
        parts: List[Tuple[str, int, Cost]] = []  # category, how many times, cost
        feed_forward = placement.halves(number)[FEED_FORWARD]
        for entry in here.entries:
            times = int(number == 0)
            if entry.block == "layer":
                times = feed_forward if entry.half == FEED_FORWARD else layers
            # Recomputed for the backward pass; that of the heads follows their forward pass at once.
            if placement.recompute and entry.phase == "forward" and entry.block != "heads":
                times *= 2
            if times:
                parts.append((entry.category, times, entry.cost))
        stash = step(target, vertices_cycles=2 * vertices.dynamic_slice(target.per_tile(hidden)))
        parts.append((COPIES, layers + (1 if number == 0 else 0), stash))
        if carried:
            carry = step(
                target, vertices_cycles=2 * vertices.dynamic_slice(target.per_tile(carried))
            )
            parts.append((COPIES, 1, carry))
        accumulate = step(
            target, vertices_cycles=vertices.scaled_add(target.per_tile(elements[number]))
        )
        parts.append((ENCODER, 1, accumulate))
        costs: Dict[str, Cost] = {category: Cost() for category in CATEGORIES}
        for category, times, cost in parts:
            costs[category] = costs[category] + cost * float(times)
        ipus.append(Ipu(number, layers, costs, total(costs.values()), links[number]))

    share = placement.replicas if placement.sharded else 1
    updates = [
        IpuUpdate(
            _update_cost(update, planner, elements[number] / share, placement),
            elements[number],
            tensors[number],
            2 * 8 * elements[number] / share if placement.off_chip else 0.0,
        )
        for number in range(count)
    ]
    unknown: Dict[str, int] = {}
    for result in lowered.values():
        unknown.update(result.unknown)
    return Pipeline(tuple(ipus), placement, target, micro_batch, tuple(updates), unknown)


def _hidden_elements(graph: Graph, crossing: Sequence[Edge]) -> int:
    """Elements of a layer's output: the largest tensor that passes from block to block in the forward pass."""
    sizes = [
        graph.values[edge.value].elements
        for edge in crossing
        if edge.phase == "forward" and edge.target.startswith("layer.") and edge.source != "mask"
    ]
    return max(sizes, default=0)


def _carried_elements(graph: Graph, crossing: Sequence[Edge], count: int) -> int:
    """Elements of tensors, such as a mask made once, that every layer reads and every IPU must therefore keep."""
    if count == 1:
        return 0
    return sum(
        graph.values[value].elements
        for value, readers in _layer_readers(crossing).items()
        if len(readers) > 1
    )


def _link_bytes(
    graph: Graph,
    crossing: Sequence[Edge],
    placement: PipelinePlacement,
    num_layers: int,
    count: int,
) -> List[Dict[str, float]]:
    """Bytes that leave each IPU in one copy phase, over its busier direction, by the block they come from."""
    directions: Dict[str, List[Dict[str, float]]] = {
        phase: [{} for _ in range(count)] for phase in ("forward", "backward")
    }
    homes = [placement._ipu_of_layer(layer) for layer in range(num_layers)]
    readers = _layer_readers(crossing)

    def home(block: str) -> int:
        if not block.startswith("layer."):
            return 0
        layer = int(block[len("layer.") :])
        return homes[-1 if layer == graph.num_layers - 1 else layer]

    seen = set()
    for edge in crossing:
        within_layers = edge.source.startswith("layer.") and edge.target.startswith("layer.")
        if within_layers and {edge.source, edge.target} != {"layer.0", "layer.1"}:
            continue  # the first pair represents all
        for_all_layers = (
            not edge.source.startswith("layer.") and len(readers.get(edge.value, ())) > 1
        )
        if within_layers:  # from layer to layer: copied where they lie on different IPUs
            pairs = (
                list(zip(homes, homes[1:]))
                if edge.phase == "forward"
                else list(zip(homes[1:], homes))
            )
        elif for_all_layers:  # handed on from IPU to IPU
            pairs = [(0, homes[-1])]
        else:
            pairs = [(home(edge.source), home(edge.target))]
        key = (edge.value, edge.phase, "layers" if within_layers or for_all_layers else edge.target)
        if key in seen:
            continue
        seen.add(key)
        category = edge.source.split(".")[0]
        for source, target in pairs:
            for link in _route(source, target, count, through=for_all_layers):
                leaving = directions[edge.phase][link]
                leaving[category] = leaving.get(category, 0.0) + edge.num_bytes
    # Activations go one way while gradients go the other: the busier direction counts.
    return [
        max(both, key=lambda sent: sum(sent.values()))
        for both in zip(directions["forward"], directions["backward"])
    ]


def _layer_readers(crossing: Sequence[Edge]) -> Dict[int, set]:
    """Which layers read a tensor that another block made."""
    readers: Dict[int, set] = {}
    for edge in crossing:
        if edge.phase == "forward" and edge.target.startswith("layer."):
            readers.setdefault(edge.value, set()).add(edge.target)
    return readers


def _parameters_per_ipu(
    graph: Graph, placement: PipelinePlacement, count: int
) -> Tuple[List[int], List[int]]:
    """Parameter elements on each IPU, and the tensors that they are in."""
    sizes: Dict[str, List[int]] = {"": [], ATTENTION: [], FEED_FORWARD: []}
    for index in graph.parameters:
        value = graph.values[index]
        if layer_of(value.name) in (None, 0):
            sizes[half_of(value.name)].append(value.elements)
    elements, tensors = [], []
    for number in range(count):
        times = {"": int(number == 0), **placement.halves(number)}
        elements.append(sum(times[part] * sum(found) for part, found in sizes.items()))
        tensors.append(sum(times[part] * len(found) for part, found in sizes.items()))
    return elements, tensors


def _update_cost(
    update: Graph, planner: Planner, elements: float, placement: PipelinePlacement
) -> Cost:
    """Scale the traced update from the traced parameters to those of one IPU (or one replica's share of them)."""
    traced = sum(update.values[index].elements for index in update.parameters)
    lowering = Lowering(update, planner, memory_proportion=placement.memory_proportion[0])
    return total(lowering.operation(operation) for operation in update.operations) * (
        elements / traced
    )
