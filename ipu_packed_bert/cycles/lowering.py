"""From the traced graph to costs: what each ATen operator becomes on the IPU.

Products go through the planner, everything else through the vertex estimators. A view costs nothing until an operation
needs the data in another order (`layout`). An operator without an entry is costed as elementwise work and counted, so
that a report can name it; it is never free.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import ceil
from typing import Callable, Dict, List, NamedTuple, Optional, Set, Tuple

from ipu_packed_bert.cycles import vertices
from ipu_packed_bert.cycles.layout import (
    Cost,
    TensorLayout,
    block,
    bring,
    step,
    total,
    unknown_copy,
)
from ipu_packed_bert.cycles.matmul import (
    BACKWARD_DATA,
    FORWARD,
    WEIGHT_UPDATE,
    Planner,
    Product,
    Rearranged,
)
from ipu_packed_bert.cycles.target import FLOAT, HALF
from ipu_packed_bert.cycles.tracing import Graph, Operation, Value, layer_of

# The parts of the graph that packing changes; everything else is "encoder".
MASK_BUILD, MASK_APPLICATION, SCORES = "mask build", "mask application", "query/key product"
POSITIONS, CLS, MLM, LOSS, COPIES = (
    "position gather",
    "CLS gather",
    "MLM slots",
    "loss unpacking",
    "copies",
)
ENCODER = "encoder"
ATTENTION, FEED_FORWARD = "attention", "feed forward"  # the halves of an encoder layer
_SCORES_SCOPE = "attention.self.scores"
CATEGORIES = (MASK_BUILD, MASK_APPLICATION, SCORES, POSITIONS, CLS, LOSS, MLM, COPIES, ENCODER)

# A clone only asks for an order; its reader pays for that.
VIEWS = frozenset(
    "view _unsafe_view t transpose unsqueeze squeeze expand slice select detach unbind clone".split()
)
# Folded when the graph is compiled.
CONSTANTS = frozenset("zeros full full_like ones_like arange empty_like".split())
_BINARY = dict(add="add", mul="mul", div="div", addcmul="mul", clamp="max", bitwise_and="logical")
_BINARY.update(dict.fromkeys(("eq", "ne", "gt"), "compare"))
_UNARY = ("tanh", "sqrt")


class Entry(NamedTuple):
    """One operator's cost, and where it belongs."""

    operator: str
    block: str  # "embeddings", "mask", "layer" (any one of them) or "heads"
    phase: str
    category: str
    cost: Cost
    half: str = (
        ""  # of an encoder layer: ATTENTION or FEED_FORWARD, which may lie on different IPUs
    )


class Edge(NamedTuple):
    """A tensor made in one block and read in another."""

    source: str  # as Entry.block, with the layer's number: "layer.0"
    target: str
    phase: str
    num_bytes: int
    value: int


@dataclass(frozen=True, eq=False)
class Lowered:
    """Costs of a whole graph under one memory proportion."""

    entries: Tuple[Entry, ...]
    unknown: Dict[str, int]  # operator -> how often it was costed as elementwise


def short_name(operator: str) -> Tuple[str, bool]:
    """("add", in place?) of "aten.add_.Tensor"."""
    name = operator.split(".")[1]
    return (name[:-1], True) if name.endswith("_") and not name.endswith("__") else (name, False)


def block_of(scope: str) -> str:
    """Return the pipeline block of a scope."""
    layer = layer_of(scope)
    if layer is not None:
        return f"layer.{layer}"
    if scope.startswith("attention_mask"):
        return "mask"
    if scope.startswith("bert.embeddings"):
        return "embeddings"
    return "heads"


def half_of(scope: str) -> str:
    """Which half of an encoder layer a scope or a parameter's name lies in; "" outside the layers."""
    if layer_of(scope) is None:
        return ""
    return ATTENTION if ".attention" in scope else FEED_FORWARD


def element_bytes(dtype: str) -> int:
    """At rest on the device: 64-bit types are narrowed to 32 (PopTorch)."""
    return {"float16": 2, "bfloat16": 2, "bool": 1, "int8": 1, "uint8": 1, "int16": 2}.get(dtype, 4)


def _kind_of(dtype: str) -> str:
    """Return the type as the vertex tables name it."""
    if dtype in ("float16", "bfloat16"):
        return "half"
    if dtype in ("float32", "float64"):
        return "float"
    return "bool" if dtype == "bool" else "int"


def _producers(graph: Graph) -> Dict[int, Operation]:
    """Which operation made a value; in-place operations keep the first."""
    made: Dict[int, Operation] = {}
    for operation in graph.operations:
        for output in operation.outputs:
            made.setdefault(output, operation)
    return made


def _derived_from(graph: Graph, name: str) -> Set[int]:
    """Values that depend on the batch field `name` and on no other field and no parameter; constants do not count."""
    found = {index for index, value in enumerate(graph.values) if value.name == name}
    for operation in graph.operations:
        inputs = [i for i in operation.inputs() if not _is_constant(graph, i)]
        if inputs and all(i in found for i in inputs):
            found.update(operation.outputs)
    return found


def _is_constant(graph: Graph, index: int) -> bool:
    """Return whether a value is a buffer of the model, or a scalar that tracing wrapped in a 0-d tensor."""
    return index in graph.buffers or (
        graph.values[index].elements == 1 and not graph.values[index].name
    )


class Lowering:
    """Lowers one graph for one IPU. Costs are those of the fullest tile."""

    def __init__(
        self,
        graph: Graph,
        planner: Planner,
        *,
        memory_proportion: float,
        partial_bytes: int = HALF,
        serialized: int = 1,
    ):
        self.graph = graph
        self.planner = planner
        self.target = planner.target
        self.memory_proportion = memory_proportion
        self.partial_bytes = partial_bytes
        self.serialized = (
            serialized  # parts of the vocabulary product (embedding_serialization_factor)
        )
        self.unknown: Counter = Counter()
        self._layouts: Dict[int, TensorLayout] = {}
        self._dropout: Set[int] = (
            set()
        )  # masks and scales that the fused dropout vertex makes itself
        self._parameters = set(graph.parameters)
        self._mask = _derived_from(graph, "input_mask")
        self._made = _producers(graph)
        self._vocabulary = max(
            (
                graph.values[i].shape[0]
                for i in graph.parameters
                if graph.values[i].name.endswith("word_embeddings.weight")
            ),
            default=0,
        )

    # The whole graph ------------------------------------------------------------------------------------------------

    def run(self) -> Lowered:
        """Lower the whole graph; a planner lowers the same graph with the same settings only once."""
        settings = (self.memory_proportion, self.partial_bytes, self.serialized)
        known = self.planner.lowered.setdefault(id(self.graph), (self.graph, {}))[1]
        if settings not in known:
            known[settings] = self._run()
        return known[settings]

    def _run(self) -> Lowered:
        chosen = (
            self.graph.num_layers // 2
        )  # the layer lowered for all; of three the one in the middle
        entries: List[Entry] = []
        for operation in self.graph.operations:
            layer = layer_of(operation.scope)
            if layer not in (None, chosen):
                continue
            cost = self.operation(operation)
            name = block_of(operation.scope) if layer is None else "layer"
            half = half_of(operation.scope)
            category = self._category(operation)
            entries.append(Entry(operation.operator, name, operation.phase, category, cost, half))
        return Lowered(tuple(entries), dict(self.unknown))

    def _category(self, operation: Operation) -> str:
        scope = operation.scope
        inputs = [i for i in operation.inputs() if not _is_constant(self.graph, i)]
        if inputs and all(i in self._mask for i in inputs):
            return MASK_BUILD
        if layer_of(scope) is not None:
            if any(i in self._mask for i in inputs):
                return MASK_APPLICATION
            # With the mask in the product it is wider; joining query and key with their codes is MASK_APPLICATION.
            return SCORES if scope.endswith(_SCORES_SCOPE) else ENCODER
        if scope.startswith("attention_mask"):
            return MASK_BUILD
        if scope.startswith("bert.embeddings.position"):
            return POSITIONS
        if scope.startswith(("next_sentence_slots", "bert.pooler", "cls.seq_relationship")):
            return CLS
        if scope.startswith(("masked_lm_slots", "cls.predictions")):
            return MLM
        if scope.startswith("loss"):
            largest = max(
                [
                    self.graph.values[i].elements
                    for i in list(operation.inputs()) + list(operation.outputs)
                ]
                or [0]
            )
            return MLM if self._vocabulary and largest >= self._vocabulary else LOSS
        return ENCODER

    # One operation --------------------------------------------------------------------------------------------------

    def operation(self, operation: Operation) -> Cost:
        """Cost of one call; records the layout of its result."""
        name, in_place = short_name(operation.operator)
        if name.startswith("_foreach_"):
            return self._foreach(operation, name[len("_foreach_") :].rstrip("_"))
        if name in VIEWS:
            self._view(operation, name)
            return self._slice_of_gradients(operation, name)
        if name in CONSTANTS:
            return Cost()
        if name == "bernoulli" or any(i in self._dropout for i in operation.inputs()):
            return self._in_dropout(operation)
        handler: Optional[Callable[[Operation], Cost]] = getattr(self, "_op_" + name, None)
        if handler is None and name in _BINARY:
            handler = self._binary
        if handler is None and name in _UNARY:
            handler = self._unary
        if handler is None:
            self.unknown[operation.operator] += 1
            handler = self._elementwise_unknown
        cost = handler(operation)
        for output in operation.outputs:
            if output not in self._layouts:
                self._layouts[output] = self._made_by(operation, output)
        return cost

    def _layout(self, index: int) -> TensorLayout:
        """Return a value's layout; parameters, inputs and values of other layers are grouped if they have columns."""
        if index not in self._layouts:
            self._layouts[index] = TensorLayout(
                index,
                grouped=len(self.graph.values[index].shape) >= 2
                and _kind_of(self.graph.values[index].dtype) in ("half", "float"),
            )
        return self._layouts[index]

    def _made_by(self, operation: Operation, output: int) -> TensorLayout:
        """Return the layout of an elementwise result, which is that of its largest operand."""
        value = self.graph.values[output]
        for index in operation.inputs():
            if self.graph.values[index].elements == value.elements and len(value.shape) > 0:
                return self._layout(index)
        return TensorLayout(output, grouped=False)

    def _view(self, operation: Operation, name: str) -> None:
        source = operation.inputs()[0]
        for output in operation.outputs:
            if source in self._dropout:
                self._dropout.add(output)
            have = self._layout(source)
            if name in ("t", "transpose", "permute"):
                have = replace(have, permuted=True)
            self._layouts[output] = have

    def _slice_of_gradients(self, operation: Operation, name: str) -> Cost:
        """Cost query's and key's columns of a joined gradient: PopART copies the slice, each byte on its tile."""
        if name != "slice" or operation.phase != "backward" or layer_of(operation.scope) is None:
            return Cost()
        before, after = self._value(operation), self._output(operation)
        if not before.elements > after.elements > before.elements / 2:
            return Cost()  # the columns of the mask: nothing reads them
        return self._copied(after)

    def _value(self, operation: Operation, position: int = 0) -> Value:
        return self.graph.values[operation.inputs()[position]]

    def _output(self, operation: Operation) -> Value:
        return self.graph.values[operation.outputs[0]]

    def _on_tile(self, value: Value) -> int:
        return self.target.per_tile(value.elements)

    # Dropout: one vertex makes the mask and applies it --------------------------------------------------------------

    def _in_dropout(self, operation: Operation) -> Cost:
        name, _ = short_name(operation.operator)
        if name in ("bernoulli", "div") and len(operation.inputs()) == 1:
            self._dropout.update(operation.outputs)
            return Cost()  # counted where the mask is applied, by the same vertex
        value = self._output(operation)
        source = next(i for i in operation.inputs() if i not in self._dropout)
        self._layouts[operation.outputs[0]] = self._layout(source)
        size = element_bytes(value.dtype)
        return step(self.target, vertices_cycles=vertices.dropout(self._on_tile(value), size))

    # Elementwise ----------------------------------------------------------------------------------------------------

    def _binary(self, operation: Operation) -> Cost:
        name, _ = short_name(operation.operator)
        out = self._output(operation)
        made = [self._made.get(i) for i in operation.inputs()]
        if name == "add" and any(
            m is not None and m.operator.startswith("aten.embedding_dense_backward") for m in made
        ):
            # The table is tied to the decoder: the scatter adds into the decoder's gradient in place (PopART's
            # TiedGatherAccumulate) and contains this sum.
            return Cost()
        tensors = [
            i for i in operation.inputs() if self.graph.values[i].elements > 1 or out.elements == 1
        ]
        kind = _kind_of(self.graph.values[tensors[0]].dtype if tensors else out.dtype)
        if (_BINARY[name], kind) not in vertices.BINARY:
            kind = "int"
        work, n = _BINARY[name], self._on_tile(out)
        if len(tensors) < 2:
            return step(self.target, vertices_cycles=vertices.scalar(n, work, kind))
        lead = max(tensors, key=lambda i: self.graph.values[i].elements)
        self._layouts[operation.outputs[0]] = lead_layout = self._layout(lead)
        moved = Cost()
        cycles = 0.0
        for index in tensors:
            if index == lead:
                continue
            value = self.graph.values[index]
            form = _broadcast_form(value, out)
            size = element_bytes(value.dtype)
            if form == "full":
                moved = moved + bring(
                    value.elements, size, self._layout(index), lead_layout, self.target
                )
                cycles += vertices.binary(n, work, kind)
            elif form == "row":
                rows, columns = self._block(out, lead_layout)
                vector = vertices.multiply_row_vector if work == "mul" else vertices.add_row_vector
                cycles += (
                    vector(columns, rows, size)
                    if kind in ("half", "float")
                    else vertices.binary(n, work, kind)
                )
                moved = moved + step(self.target, exchange_bytes=columns * size)
            elif form == "column":
                rows, columns = self._block(out, lead_layout)
                cycles += vertices.row_values(rows, columns, size)
                moved = moved + step(self.target, exchange_bytes=rows * size)
            elif form == "outer":  # both operands are broadcast: a row against a column
                rows, columns = self._block(out, lead_layout)
                cycles += vertices.binary(n, work, kind)
                moved = moved + step(self.target, exchange_bytes=(rows + columns) * size)
            else:  # every tile receives the whole block, such as a block mask for all heads
                moved = moved + unknown_copy(n * size, self.target)
                cycles += vertices.binary(n, work, kind)
        return moved + step(self.target, vertices_cycles=cycles)

    def _block(self, value: Value, layout: TensorLayout) -> Tuple[int, int]:
        columns = value.shape[-1] if value.shape else 1
        return block(
            max(1, value.elements // max(1, columns)), max(1, columns), layout, self.target
        )

    def _unary(self, operation: Operation) -> Cost:
        name, _ = short_name(operation.operator)
        value = self._output(operation)
        return step(
            self.target,
            vertices_cycles=vertices.unary(self._on_tile(value), name, _kind_of(value.dtype)),
        )

    def _elementwise_unknown(self, operation: Operation) -> Cost:
        values = [self.graph.values[i] for i in list(operation.inputs()) + list(operation.outputs)]
        largest = max(values, key=lambda value: value.elements)
        return step(
            self.target, vertices_cycles=vertices.binary(self._on_tile(largest), "div", "float")
        )

    def _op_gelu(self, operation: Operation) -> Cost:
        value = self._output(operation)
        return step(
            self.target,
            vertices_cycles=vertices.gelu(self._on_tile(value), element_bytes(value.dtype)),
        )

    def _op_gelu_backward(self, operation: Operation) -> Cost:
        value = self._output(operation)
        size = element_bytes(value.dtype)
        moved = self._gradient_to(operation)
        return moved + step(
            self.target, vertices_cycles=vertices.gelu_gradient(self._on_tile(value), size)
        )

    def _gradient_to(self, operation: Operation) -> Cost:
        """Bringing the incoming gradient into the layout of the saved activation."""
        gradient, saved = operation.inputs()[:2]
        value = self.graph.values[gradient]
        return bring(
            value.elements,
            element_bytes(value.dtype),
            self._layout(gradient),
            self._layout(saved),
            self.target,
        )

    def _op_tanh_backward(self, operation: Operation) -> Cost:
        value = self._output(operation)
        return self._gradient_to(operation) + step(
            self.target,
            vertices_cycles=vertices.tanh_gradient(
                self._on_tile(value), element_bytes(value.dtype)
            ),
        )

    def _op__to_copy(self, operation: Operation) -> Cost:
        before, after = self._value(operation), self._output(operation)
        old, new = _kind_of(before.dtype), _kind_of(after.dtype)
        n = self._on_tile(after)
        if old == new:
            return Cost()  # the device has no 64-bit types
        if "half" in (old, new) and "float" in (old, new):
            return step(
                self.target,
                vertices_cycles=vertices.cast(
                    n, element_bytes(before.dtype), element_bytes(after.dtype)
                ),
            )
        return step(self.target, vertices_cycles=vertices.cast_integer(n))

    def _op_where(self, operation: Operation) -> Cost:
        out = self._output(operation)
        n = self._on_tile(out)
        tensors = [i for i in operation.inputs() if self.graph.values[i].elements > 1]
        if len(tensors) < 2:
            return step(self.target, vertices_cycles=vertices.select_scalars(n))
        lead = max(
            tensors,
            key=lambda i: (
                self.graph.values[i].elements,
                element_bytes(self.graph.values[i].dtype),
            ),
        )
        self._layouts[operation.outputs[0]] = self._layout(lead)
        cost = step(self.target, vertices_cycles=vertices.select(n))
        for index in tensors:
            value = self.graph.values[index]
            size = max(2, element_bytes(value.dtype))  # a byte costs as much to move as two
            if index == lead:
                continue
            if _broadcast_form(value, out) == "block":
                cost = cost + unknown_copy(n * size, self.target)
            else:
                cost = cost + bring(
                    value.elements, size, self._layout(index), self._layout(lead), self.target
                )
        return cost

    def _copied(self, value: Value) -> Cost:
        """Within each tile's memory."""
        return step(
            self.target,
            vertices_cycles=vertices.copy(self._on_tile(value) * element_bytes(value.dtype)),
        )

    def _op_cat(self, operation: Operation) -> Cost:
        """PopART copies the concatenation into a clone of itself; both sides have one order, so whole atoms move."""
        value = self._output(operation)
        num_bytes = self._on_tile(value) * element_bytes(value.dtype)
        return step(self.target, vertices_cycles=vertices.copy(num_bytes), exchange_bytes=num_bytes)

    _op_stack = _op_slice_backward = _op_cat

    # Reductions -----------------------------------------------------------------------------------------------------

    def _rows(self, value: Value, index: int) -> Tuple[int, int, int, int]:
        """(rows, columns, rows on the tile, columns on the tile) of a tensor seen as a matrix."""
        columns = value.shape[-1] if value.shape else 1
        rows = max(1, value.elements // max(1, columns))
        return (rows, columns) + block(rows, columns, self._layout(index), self.target)

    def _row_reduction(
        self, rows: int, columns: int, rows_t: int, columns_t: int, size: int
    ) -> Cost:
        """Sum or maximum of each row, with the result on each tile of the row."""
        cost = step(self.target, vertices_cycles=vertices.reduce_rows(rows_t, columns_t, size))
        parts = ceil(columns / columns_t)
        if parts > 1:
            outputs = self.target.per_tile(rows)
            cost = cost + step(
                self.target,
                vertices_cycles=vertices.reduce_rows(outputs, parts, FLOAT),
                exchange_bytes=parts * outputs * FLOAT,
            )
            cost = cost + Cost(
                exchange=self.target.receive(rows_t * FLOAT), sync=self.target.sync_cycles
            )
        return cost

    def _column_reduction(self, rows: int, columns: int, rows_t: int, columns_t: int) -> Cost:
        cost = step(self.target, vertices_cycles=vertices.reduce_columns(columns_t, rows_t))
        parts = ceil(rows / rows_t)
        if parts > 1:
            outputs = self.target.per_tile(columns)
            cost = cost + step(
                self.target,
                vertices_cycles=vertices.reduce_generic(outputs, parts),
                exchange_bytes=parts * outputs * FLOAT,
            )
        return cost

    def _op_sum(self, operation: Operation) -> Cost:
        index = operation.inputs()[0]
        value, out = self.graph.values[index], self._output(operation)
        rows, columns, rows_t, columns_t = self._rows(value, index)
        size = element_bytes(value.dtype)
        if out.elements <= 1:
            n = self._on_tile(value)
            used = min(self.target.tiles, value.elements)
            return step(self.target, vertices_cycles=vertices.reduce_rows(1, n, size)) + step(
                self.target,
                vertices_cycles=vertices.reduce_rows(1, used, FLOAT),
                exchange_bytes=used * FLOAT,
            )
        if out.elements == rows or (
            value.shape and out.elements * value.shape[-1] == value.elements
        ):
            return self._row_reduction(rows, columns, rows_t, columns_t, size)
        return self._column_reduction(rows, columns, rows_t, columns_t)

    def _op_argmax(self, operation: Operation) -> Cost:
        index = operation.inputs()[0]
        value = self.graph.values[index]
        rows, columns, rows_t, columns_t = self._rows(value, index)
        cost = step(self.target, vertices_cycles=vertices.argmax(rows_t * columns_t))
        parts = ceil(columns / columns_t)
        if parts > 1:
            outputs = self.target.per_tile(rows)
            cost = cost + step(
                self.target,
                vertices_cycles=vertices.argmax(outputs * parts),
                exchange_bytes=outputs * parts * 8,
            )
        return cost

    # Softmax, LayerNorm and the losses: as PopART lowers them -------------------------------------------------------

    def _steps(self, *cycles: float) -> Cost:
        return total(step(self.target, vertices_cycles=c) for c in cycles)

    def _op__softmax(self, operation: Operation) -> Cost:
        """Softmax or log-softmax: maximum, subtraction, exponential, sum, then a reciprocal or a logarithm per row."""
        index = operation.inputs()[0]
        value = self.graph.values[index]
        shape = self._rows(value, index)
        rows_t, columns_t = shape[2:]
        size = element_bytes(value.dtype)

        subtraction = vertices.row_values(rows_t, columns_t, size)
        exponential = vertices.unary(rows_t * columns_t, "exp", _kind_of(value.dtype))
        if short_name(operation.operator)[0] == "_log_softmax":
            of_sums = [vertices.unary(rows_t, "log", "float")]
        else:
            of_sums = [
                vertices.unary(rows_t, "reciprocal", "float"),
                vertices.cast(rows_t, FLOAT, size),
            ]
        return (
            self._row_reduction(*shape, size)
            + self._steps(subtraction, exponential)
            + self._row_reduction(*shape, size)
            + self._steps(*of_sums, subtraction)
        )

    _op__log_softmax = _op__softmax

    def _op__softmax_backward_data(self, operation: Operation) -> Cost:
        """Gradient of softmax or log-softmax: a product or an exponential, its row sums, and their subtraction."""
        gradient, result = operation.inputs()[:2]
        value = self.graph.values[gradient]
        shape = self._rows(value, result)
        rows_t, columns_t = shape[2:]
        elements = rows_t * columns_t
        size = element_bytes(value.dtype)
        kind = _kind_of(value.dtype)

        logarithm = short_name(operation.operator)[0] == "_log_softmax_backward_data"
        first = (
            vertices.unary(elements, "exp", kind)
            if logarithm
            else vertices.binary(elements, "mul", kind)
        )
        subtraction = vertices.row_values(rows_t, columns_t, size)
        cost = self._steps(first, subtraction, vertices.binary(elements, "add", kind))
        cost = cost + self._row_reduction(*shape, size)
        if logarithm:
            return cost
        self._layouts[operation.outputs[0]] = self._layout(result)
        return self._gradient_to(operation) + cost

    _op__log_softmax_backward_data = _op__softmax_backward_data

    def _op_nll_loss_forward(self, operation: Operation) -> Cost:
        index = operation.inputs()[0]
        value = self.graph.values[index]
        shape = self._rows(value, index)
        size, kind = element_bytes(value.dtype), _kind_of(value.dtype)
        labels = self.target.per_tile(shape[0])
        return self._steps(
            vertices.one_hot(labels), vertices.binary(shape[2] * shape[3], "mul", kind)
        ) + self._row_reduction(*shape, size)

    def _op_nll_loss_backward(self, operation: Operation) -> Cost:
        index = operation.inputs()[1]
        value = self.graph.values[index]
        shape = self._rows(value, index)
        size = element_bytes(value.dtype)
        self._layouts[operation.outputs[0]] = self._layout(index)
        return self._steps(
            vertices.one_hot(self.target.per_tile(shape[0])),
            vertices.row_values(shape[2], shape[3], size),
        )

    def _op_native_layer_norm(self, operation: Operation) -> Cost:
        index = operation.inputs()[0]
        value = self.graph.values[index]
        shape = self._rows(value, index)
        rows_t, columns_t = shape[2:]
        size = element_bytes(value.dtype)
        row = vertices.row_values(rows_t, columns_t, size)
        self._layouts[operation.outputs[0]] = self._layout(index)
        return self._row_reduction(*shape, size) * 2.0 + self._steps(
            vertices.inverse_deviation(rows_t),
            row,
            row,
            vertices.multiply_row_vector(columns_t, rows_t, size),
            vertices.add_row_vector(columns_t, rows_t, size),
        )

    def _op_native_layer_norm_backward(self, operation: Operation) -> Cost:
        index = operation.inputs()[1]  # the saved input
        value = self.graph.values[index]
        shape = self._rows(value, index)
        rows_t, columns_t = shape[2:]
        n, size, kind = rows_t * columns_t, element_bytes(value.dtype), _kind_of(value.dtype)
        row = vertices.row_values(rows_t, columns_t, size)
        self._layouts[operation.outputs[0]] = self._layout(index)
        return (
            self._gradient_to(operation)
            + self._steps(row, row)
            + self._column_reduction(*shape) * 2.0
            + self._steps(vertices.multiply_row_vector(columns_t, rows_t, size))
            + self._row_reduction(*shape, size) * 2.0
            + self._steps(*[vertices.binary(n, "add", kind)] * 4)
        )

    # Gathers --------------------------------------------------------------------------------------------------------

    def _gather(
        self, table_rows: int, columns: int, indices: int, size: int, *, gradient: bool
    ) -> Cost:
        """Find the cheapest split of the table over rows and columns."""
        best: Optional[Cost] = None
        row_split = 1
        while row_split <= min(table_rows, self.target.tiles):
            column_split = min(ceil(columns * size / 4), self.target.tiles // row_split)
            width = ceil(columns / column_split)
            if gradient:
                cycles = vertices.gather_gradient(indices, width, size, row_split=row_split)
                moved = float(
                    indices * width * size
                )  # every part of the table receives all gradient rows
            else:
                cycles = vertices.gather(indices, width, size, row_split=row_split)
                moved = indices * columns * size / self.target.tiles if row_split > 1 else 0.0
            cost = step(self.target, vertices_cycles=cycles, exchange_bytes=indices * 4) + Cost(
                exchange=self.target.receive(moved), sync=self.target.sync_cycles if moved else 0.0
            )
            if best is None or cost.cycles(0.0) < best.cycles(0.0):
                best = cost
            row_split *= 2
        assert best is not None
        return best

    def _op_embedding(self, operation: Operation) -> Cost:
        table, indices = self._value(operation, 0), self._value(operation, 1)
        self._layouts[operation.outputs[0]] = TensorLayout(
            operation.outputs[0], grouped=True, columns=16
        )
        return self._gather(
            table.shape[0],
            table.shape[1],
            indices.elements,
            element_bytes(table.dtype),
            gradient=False,
        )

    def _op_embedding_dense_backward(self, operation: Operation) -> Cost:
        gradient, indices = self._value(operation, 0), self._value(operation, 1)
        out = self._output(operation)
        return self._gather(
            out.shape[0],
            out.shape[1],
            indices.elements,
            element_bytes(gradient.dtype),
            gradient=True,
        )

    # Products -------------------------------------------------------------------------------------------------------

    def _product(
        self,
        matrices: int,
        rows: int,
        inner: int,
        columns: int,
        dtype: str,
        rearranged: Rearranged,
        parts: int = 1,
    ) -> Tuple[Cost, int]:
        """Cost, and the columns of a tile's block of the result."""
        size = element_bytes(dtype)
        product = Product(
            matrices,
            rows,
            inner,
            columns,
            element_bytes=size,
            partial_bytes=self.partial_bytes if size == HALF else FLOAT,
            memory_proportion=self.memory_proportion,
        )
        plan = self.planner.plan(product, rearranged)
        width = min(columns, ceil(ceil(columns / 16) / plan.column_split) * 16)
        cost = Cost(
            matmul=plan.compute_cycles,
            exchange=plan.exchange_cycles,
            sync=plan.sync_cycles + self.target.dispatch_cycles,
        )
        return cost * float(parts), width

    def _is_weight(self, index: int) -> bool:
        """Whether a value is a parameter, or a view of one."""
        while True:
            if index in self._parameters:
                return True
            made = self._made.get(index)
            if made is None or short_name(made.operator)[0] not in VIEWS:
                return False
            index = made.inputs()[0]

    def _matrix(self, operation: Operation, left: int, right: int) -> Cost:
        """[M, K] x [K, N]: forward, backward data or weight update, by the phase and by which operand is a weight."""
        a, b = self.graph.values[left], self.graph.values[right]
        (rows, inner), columns = a.shape, b.shape[1]
        parts = 1
        if (
            self.serialized > 1
            and self._vocabulary
            and operation.scope.startswith("cls.predictions.product")
        ):
            # To save memory the vocabulary product runs in parts, one after the other.
            if columns >= self._vocabulary:
                parts, columns = self.serialized, ceil(columns / self.serialized)
            elif inner >= self._vocabulary:
                parts, inner = self.serialized, ceil(inner / self.serialized)
            elif rows >= self._vocabulary:
                parts, rows = self.serialized, ceil(rows / self.serialized)
        if operation.phase == "forward":
            rearranged = FORWARD
        else:
            rearranged = (
                BACKWARD_DATA if self._is_weight(right) or self._is_weight(left) else WEIGHT_UPDATE
            )
        cost, width = self._product(1, rows, inner, columns, a.dtype, rearranged, parts)
        self._layouts[operation.outputs[0]] = TensorLayout(
            operation.outputs[0], grouped=True, columns=width
        )
        if rearranged == FORWARD:  # the plan contains the rearrangements of backward passes
            cost = cost + self._operand(left)
        return cost

    def _operand(self, index: int) -> Cost:
        """Rearranging an activation for a product: free unless it is read through a permute."""
        value = self.graph.values[index]
        if self._is_weight(index) or not self._layout(index).permuted:
            return Cost()
        return unknown_copy(self._on_tile(value) * element_bytes(value.dtype), self.target)

    def _op_mm(self, operation: Operation) -> Cost:
        left, right = operation.inputs()[:2]
        return self._matrix(operation, left, right)

    def _op_addmm(self, operation: Operation) -> Cost:
        bias, left, right = operation.inputs()[:3]
        cost = self._matrix(operation, left, right)
        out = self._output(operation)
        rows, columns = self._block(out, self._layout(operation.outputs[0]))
        size = element_bytes(out.dtype)
        return cost + step(
            self.target,
            vertices_cycles=vertices.add_row_vector(columns, rows, size),
            exchange_bytes=columns * size,
        )

    def _op_bmm(self, operation: Operation) -> Cost:
        """Attention: both operands come from other operations and must be rearranged."""
        left, right = operation.inputs()[:2]
        a, b = self.graph.values[left], self.graph.values[right]
        cost, width = self._product(
            a.shape[0], a.shape[1], a.shape[2], b.shape[2], a.dtype, FORWARD
        )
        for index in (left, right):
            value = self.graph.values[index]
            num_bytes = self._on_tile(value) * element_bytes(value.dtype)
            cost = cost + unknown_copy(num_bytes, self.target)
        self._layouts[operation.outputs[0]] = TensorLayout(
            operation.outputs[0], grouped=True, columns=width
        )
        return cost

    # The optimiser: lists of tensors, each list one multi-tensor operation ------------------------------------------

    def _foreach(self, operation: Operation, name: str) -> Cost:
        first = operation.arguments[0]
        elements = sum(self.graph.values[part["value"]].elements for part in first)
        n = self.target.per_tile(elements)
        lists = sum(1 for argument in operation.arguments if isinstance(argument, list))
        if name == "norm":
            squares = vertices.unary(n, "square", "float") + vertices.reduce_rows(1, n, FLOAT)
            return step(self.target, vertices_cycles=squares) + step(
                self.target,
                vertices_cycles=vertices.reduce_rows(1, self.target.tiles, FLOAT),
                exchange_bytes=self.target.tiles * FLOAT,
            )
        if name in _UNARY:
            return step(self.target, vertices_cycles=vertices.unary(n, name, "float"))
        if name == "add" and lists == 2:
            return step(self.target, vertices_cycles=vertices.scaled_add(n, FLOAT))
        if name in _BINARY:
            form = vertices.scalar if lists < 2 else vertices.binary
            return step(self.target, vertices_cycles=form(n, _BINARY[name], "float"))
        self.unknown[operation.operator] += 1
        return step(self.target, vertices_cycles=vertices.binary(n, "div", "float"))


def _broadcast_form(value: Value, out: Value) -> str:
    """How `value` is broadcast to `out`.

    "full": not at all; "row": one vector for many rows; "column": one value per row; "outer": a row against a column;
    "block": a matrix for many others.
    """
    rank = len(out.shape)
    shape = (1,) * (rank - len(value.shape)) + tuple(value.shape)
    spread = [i for i in range(rank) if shape[i] == 1 and out.shape[i] > 1]
    if not spread:
        return "full"
    kept = [i for i in range(rank) if shape[i] > 1]
    if rank - 1 in spread:
        return "column" if spread == [rank - 1] else "outer"
    # Rows share a vector if the dimension before the last is spread, or only the last is kept.
    if rank - 2 in spread or kept == [rank - 1]:
        return "outer" if value.elements * 2 > out.elements else "row"
    return "block"
