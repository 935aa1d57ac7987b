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

from ipu_profiling.cycles import vertices
from ipu_profiling.cycles.layout import (
    Cost,
    TensorLayout,
    block,
    bring,
    step,
    total,
    unknown_copy,
)
from ipu_profiling.cycles.matmul import (
    BACKWARD_DATA,
    FORWARD,
    WEIGHT_UPDATE,
    Planner,
    Product,
    Rearranged,
)
from ipu_profiling.cycles.target import FLOAT, HALF
from ipu_profiling.cycles.tracing import Graph, Operation, Value, layer_of

# The parts of the graph that packing changes; everything else is ENCODER.
MASK_BUILD = "mask build"
MASK_APPLICATION = "mask application"
SCORES = "query/key product"
POSITIONS = "position gather"
CLS = "CLS gather"
MLM = "MLM slots"
LOSS = "loss unpacking"
COPIES = "copies"
ENCODER = "encoder"
CATEGORIES = (MASK_BUILD, MASK_APPLICATION, SCORES, POSITIONS, CLS, LOSS, MLM, COPIES, ENCODER)
# Categories outside the layers, by the first words of a scope.
_CATEGORY_OF_SCOPE = (
    ("attention_mask", MASK_BUILD),
    ("bert.embeddings.position", POSITIONS),
    ("next_sentence_slots", CLS),
    ("bert.pooler", CLS),
    ("cls.seq_relationship", CLS),
    ("masked_lm_slots", MLM),
    ("cls.predictions", MLM),
)

# The halves of an encoder layer, which may lie on different IPUs.
ATTENTION = "attention"
FEED_FORWARD = "feed forward"
_SCORES_SCOPE = "attention.self.scores"

# Free operators. A clone only requests an order; the operator that reads it pays for the rearrangement.
VIEWS = frozenset(
    "view _unsafe_view t transpose unsqueeze squeeze expand slice select detach unbind clone".split()
)
# Operators that are folded when the graph is compiled.
CONSTANTS = frozenset("zeros full full_like ones_like arange empty_like".split())
# ATen operator -> operation in the tables of `vertices`.
_BINARY = dict(
    add="add",
    mul="mul",
    div="div",
    addcmul="mul",
    clamp="max",
    bitwise_and="logical",
    eq="compare",
    ne="compare",
    gt="compare",
)
_UNARY = ("tanh", "sqrt")


class Entry(NamedTuple):
    """The cost of one call of an operator, with its place in the network."""

    operator: str
    block: str  # "embeddings", "mask", "layer" (any one of them) or "heads"
    phase: str
    category: str
    cost: Cost
    half: str = ""  # of an encoder layer: ATTENTION or FEED_FORWARD


class Edge(NamedTuple):
    """A tensor written in one block and read in another."""

    source: str  # as Entry.block, with the layer's number: "layer.0"
    target: str
    phase: str
    num_bytes: int
    value: int


class _Matrix(NamedTuple):
    """A tensor as a matrix, its block on a tile, and the bytes of an element."""

    rows: int
    columns: int
    rows_t: int
    columns_t: int
    size: int

    def row_values(self) -> float:
        """Return the cycles of combining each row of the block with a value of its own."""
        return vertices.row_values(self.rows_t, self.columns_t, self.size)


@dataclass(frozen=True, eq=False)
class Lowered:
    """Costs of a whole graph under one memory proportion."""

    entries: Tuple[Entry, ...]
    unknown: Dict[str, int]  # operator -> number of calls that were costed as elementwise work


def _short_name(operator: str) -> str:
    """Shorten "aten.add_.Tensor" to "add", without the underscore of an in-place operator."""
    name = operator.split(".")[1]
    in_place = name.endswith("_") and not name.endswith("__")
    return name[:-1] if in_place else name


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
    """Return the half of the encoder layer in which a scope or a parameter lies; "" outside the layers."""
    if layer_of(scope) is None:
        return ""
    return ATTENTION if ".attention" in scope else FEED_FORWARD


def element_bytes(dtype: str) -> int:
    """Return the bytes of an element on the device, where 64-bit types are narrowed to 32 bits (PopTorch)."""
    narrow = {"float16": 2, "bfloat16": 2, "bool": 1, "int8": 1, "uint8": 1, "int16": 2}
    return narrow.get(dtype, 4)


def _kind_of(dtype: str) -> str:
    """Return the type as the vertex tables name it."""
    if dtype in ("float16", "bfloat16"):
        return "half"
    if dtype in ("float32", "float64"):
        return "float"
    return "bool" if dtype == "bool" else "int"


def _producers(graph: Graph) -> Dict[int, Operation]:
    """Map every value to the operation that wrote it, the first of several that write in place."""
    producers: Dict[int, Operation] = {}
    for operation in graph.operations:
        for output in operation.outputs:
            producers.setdefault(output, operation)
    return producers


def _variable_inputs(graph: Graph, operation: Operation) -> List[int]:
    """Return the inputs that are not constants: not buffers, nor scalars that tracing wrapped in 0-d tensors."""
    variable = []
    for index in operation.inputs():
        value = graph.values[index]
        wrapped_scalar = value.elements == 1 and not value.name
        if index not in graph.buffers and not wrapped_scalar:
            variable.append(index)
    return variable


def _derived_from(graph: Graph, name: str) -> Set[int]:
    """Return the values that depend on the batch field `name` and on no other field or parameter."""
    derived = {index for index, value in enumerate(graph.values) if value.name == name}
    for operation in graph.operations:
        inputs = _variable_inputs(graph, operation)
        if inputs and derived.issuperset(inputs):
            derived.update(operation.outputs)
    return derived


class Lowering:
    """The costs of one graph on one IPU, on its fullest tile.

    Args:
        graph: the traced graph.
        planner: the plans of matrix products, for one target.
        memory_proportion: share of a tile's memory that a product may use for temporaries.
        partial_bytes: bytes of the partial sums of half-precision products.
        serialized: parts of the vocabulary product (`placement.embedding_serialization_factor`).
    """

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
        self.serialized = serialized
        self.unknown: Counter = Counter()
        self._layouts: Dict[int, TensorLayout] = {}
        # Masks and scales that the fused dropout vertex computes itself.
        self._dropout: Set[int] = set()
        self._parameters = set(graph.parameters)
        self._mask = _derived_from(graph, "input_mask")
        self._producers = _producers(graph)
        self._vocabulary = 0  # tokens
        for index in graph.parameters:
            value = graph.values[index]
            if value.name.endswith("word_embeddings.weight"):
                self._vocabulary = max(self._vocabulary, value.shape[0])

    # The whole graph ------------------------------------------------------------------------------------------------

    def run(self) -> Lowered:
        """Lower the whole graph; a planner lowers the same graph with the same settings only once."""
        settings = (self.memory_proportion, self.partial_bytes, self.serialized)
        known = self.planner.lowered.setdefault(id(self.graph), (self.graph, {}))[1]
        if settings not in known:
            known[settings] = self._run()
        return known[settings]

    def _run(self) -> Lowered:
        middle_layer = self.graph.num_layers // 2  # stands for all layers
        entries: List[Entry] = []
        for operation in self.graph.operations:
            layer = layer_of(operation.scope)
            if layer not in (None, middle_layer):
                continue
            entry = Entry(
                operation.operator,
                block_of(operation.scope) if layer is None else "layer",
                operation.phase,
                self._category(operation),
                self.operation(operation),
                half_of(operation.scope),
            )
            entries.append(entry)
        return Lowered(tuple(entries), dict(self.unknown))

    def _category(self, operation: Operation) -> str:
        """Return the category of an operation, by its scope and by whether it reads the mask."""
        scope = operation.scope
        inputs = _variable_inputs(self.graph, operation)
        if inputs and self._mask.issuperset(inputs):
            return MASK_BUILD
        if layer_of(scope) is not None:
            if not self._mask.isdisjoint(inputs):
                return MASK_APPLICATION
            # A mask in the product widens it; joining query and key with their codes is MASK_APPLICATION.
            return SCORES if scope.endswith(_SCORES_SCOPE) else ENCODER

        if scope.startswith("loss"):
            indices = [*operation.inputs(), *operation.outputs]
            largest = max((self.graph.values[index].elements for index in indices), default=0)
            has_vocabulary = self._vocabulary and largest >= self._vocabulary
            return MLM if has_vocabulary else LOSS
        for prefix, category in _CATEGORY_OF_SCOPE:
            if scope.startswith(prefix):
                return category
        return ENCODER

    # One operation --------------------------------------------------------------------------------------------------

    def operation(self, operation: Operation) -> Cost:
        """Return the cost of one call and record the layout of its result."""
        name = _short_name(operation.operator)
        if name.startswith("_foreach_"):
            return self._foreach(operation, name[len("_foreach_") :].rstrip("_"))
        if name in VIEWS:
            self._view(operation, name)
            return self._slice_of_gradients(operation, name)
        if name in CONSTANTS:
            return Cost()
        if name == "bernoulli" or not self._dropout.isdisjoint(operation.inputs()):
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
                self._layouts[output] = self._layout_of_largest_operand(operation, output)
        return cost

    def _layout(self, index: int) -> TensorLayout:
        """Return a value's layout; parameters, inputs and values of other layers are grouped if they have columns."""
        if index not in self._layouts:
            value = self.graph.values[index]
            floating = _kind_of(value.dtype) in ("half", "float")
            self._layouts[index] = TensorLayout(index, grouped=floating and len(value.shape) >= 2)
        return self._layouts[index]

    def _keep_layout(self, operation: Operation, index: int) -> None:
        """Give the result of an operation the layout of another value."""
        self._layouts[operation.outputs[0]] = self._layout(index)

    def _group(self, operation: Operation, columns: int) -> None:
        """Give the result of an operation a new grouped layout."""
        output = operation.outputs[0]
        self._layouts[output] = TensorLayout(output, grouped=True, columns=columns)

    def _layout_of_largest_operand(self, operation: Operation, output: int) -> TensorLayout:
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
            layout = self._layout(source)
            if name in ("t", "transpose", "permute"):
                layout = replace(layout, permuted=True)
            self._layouts[output] = layout

    def _slice_of_gradients(self, operation: Operation, name: str) -> Cost:
        """Cost query's and key's columns of a joined gradient: PopART copies the slice, each byte on its tile."""
        if name != "slice" or operation.phase != "backward" or layer_of(operation.scope) is None:
            return Cost()
        joined = self._value(operation).elements
        columns = self._output(operation)
        if not joined > columns.elements > joined / 2:
            return Cost()  # the columns of the mask: nothing reads them
        return self._steps(vertices.copy(self._tile_bytes(columns)))

    def _value(self, operation: Operation, position: int = 0) -> Value:
        return self.graph.values[operation.inputs()[position]]

    def _output(self, operation: Operation) -> Value:
        return self.graph.values[operation.outputs[0]]

    def _on_tile(self, value: Value) -> int:
        """Return the elements of a value on the fullest tile."""
        return self.target.per_tile(value.elements)

    def _tile_bytes(self, value: Value) -> int:
        return self._on_tile(value) * element_bytes(value.dtype)

    def _steps(self, *cycles: float) -> Cost:
        """Cost one compute set, without an exchange, for each of these vertex cycles."""
        return total(step(self.target, vertices_cycles=c) for c in cycles)

    # Dropout: one vertex computes the mask and applies it -----------------------------------------------------------

    def _in_dropout(self, operation: Operation) -> Cost:
        name = _short_name(operation.operator)
        if name in ("bernoulli", "div") and len(operation.inputs()) == 1:
            self._dropout.update(operation.outputs)
            return Cost()  # counted where the mask is applied, by the same vertex
        value = self._output(operation)
        source = next(i for i in operation.inputs() if i not in self._dropout)
        self._keep_layout(operation, source)
        size = element_bytes(value.dtype)
        return self._steps(vertices.dropout(self._on_tile(value), size))

    # Elementwise ----------------------------------------------------------------------------------------------------

    def _binary(self, operation: Operation) -> Cost:
        name = _short_name(operation.operator)
        out = self._output(operation)
        inputs = operation.inputs()
        producers = [
            self._producers[index].operator for index in inputs if index in self._producers
        ]
        if name == "add" and any("embedding_dense_backward" in operator for operator in producers):
            # The table is tied to the decoder: the scatter adds into the decoder's gradient in place (PopART's
            # TiedGatherAccumulate) and contains this sum.
            return Cost()

        values = self.graph.values
        tensors = [i for i in inputs if values[i].elements > 1 or out.elements == 1]
        work = _BINARY[name]
        kind = _kind_of(values[tensors[0]].dtype if tensors else out.dtype)
        if (work, kind) not in vertices.BINARY:
            kind = "int"
        if len(tensors) < 2:
            return self._steps(vertices.scalar(self._on_tile(out), work, kind))

        lead = max(tensors, key=lambda index: values[index].elements)
        self._keep_layout(operation, lead)
        moved = Cost()
        cycles = 0.0
        for index in tensors:
            if index != lead:
                exchange, operand_cycles = self._with_operand(index, lead, out, work, kind)
                moved = moved + exchange
                cycles += operand_cycles
        return moved + self._steps(cycles)

    def _with_operand(
        self, index: int, lead: int, out: Value, work: str, kind: str
    ) -> Tuple[Cost, float]:
        """Return the cost of bringing an operand to the largest one's tiles, and the cycles of combining them."""
        value = self.graph.values[index]
        size = element_bytes(value.dtype)
        layout = self._layout(lead)
        matrix = self._as_matrix(out, lead)
        rows = matrix.rows_t
        columns = matrix.columns_t
        elementwise = vertices.binary(self._on_tile(out), work, kind)

        form = _broadcast_form(value, out)
        if form == "full":
            moved = bring(value.elements, size, self._layout(index), layout, self.target)
            return moved, elementwise
        if form == "row":
            moved = step(self.target, exchange_bytes=columns * size)
            if kind not in ("half", "float"):
                return moved, elementwise
            if work == "mul":
                return moved, vertices.multiply_row_vector(columns, rows, size)
            return moved, vertices.add_row_vector(columns, rows, size)
        if form == "column":
            moved = step(self.target, exchange_bytes=rows * size)
            return moved, vertices.row_values(rows, columns, size)
        if form == "outer":  # both operands are broadcast: a row against a column
            return step(self.target, exchange_bytes=(rows + columns) * size), elementwise
        # Every tile receives the whole block, such as a block mask for all heads.
        return unknown_copy(self._on_tile(out) * size, self.target), elementwise

    def _unary(self, operation: Operation) -> Cost:
        name = _short_name(operation.operator)
        value = self._output(operation)
        return self._steps(vertices.unary(self._on_tile(value), name, _kind_of(value.dtype)))

    def _elementwise_unknown(self, operation: Operation) -> Cost:
        """Cost an operator without an entry as a float division of its largest tensor."""
        indices = [*operation.inputs(), *operation.outputs]
        largest = max(self.graph.values[index].elements for index in indices)
        return self._steps(vertices.binary(self.target.per_tile(largest), "div", "float"))

    def _activation(self, operation: Operation, estimate: Callable[[float, int], float]) -> Cost:
        """Cost an elementwise function whose estimate depends on the bytes of an element."""
        value = self._output(operation)
        return self._steps(estimate(self._on_tile(value), element_bytes(value.dtype)))

    def _op_gelu(self, operation: Operation) -> Cost:
        return self._activation(operation, vertices.gelu)

    def _op_gelu_backward(self, operation: Operation) -> Cost:
        return self._gradient_to(operation) + self._activation(operation, vertices.gelu_gradient)

    def _gradient_to(self, operation: Operation) -> Cost:
        """Cost bringing the incoming gradient into the layout of the saved activation."""
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
        return self._gradient_to(operation) + self._activation(operation, vertices.tanh_gradient)

    def _op__to_copy(self, operation: Operation) -> Cost:
        source = self._value(operation).dtype
        result = self._output(operation)
        kinds = {_kind_of(source), _kind_of(result.dtype)}
        n = self._on_tile(result)
        if len(kinds) == 1:
            return Cost()  # the device has no 64-bit types
        if kinds == {"half", "float"}:
            return self._steps(vertices.cast(n, element_bytes(source), element_bytes(result.dtype)))
        return self._steps(vertices.cast_integer(n))

    def _op_where(self, operation: Operation) -> Cost:
        values = self.graph.values
        out = self._output(operation)
        n = self._on_tile(out)
        tensors = [i for i in operation.inputs() if values[i].elements > 1]
        if len(tensors) < 2:
            return self._steps(vertices.select_scalars(n))

        def size_of(index: int) -> Tuple[int, int]:
            return values[index].elements, element_bytes(values[index].dtype)

        lead = max(tensors, key=size_of)
        self._keep_layout(operation, lead)
        cost = self._steps(vertices.select(n))
        for index in tensors:
            if index == lead:
                continue
            value = values[index]
            size = max(2, element_bytes(value.dtype))  # a byte costs as much to move as two
            if _broadcast_form(value, out) == "block":
                moved = unknown_copy(n * size, self.target)
            else:
                have, want = self._layout(index), self._layout(lead)
                moved = bring(value.elements, size, have, want, self.target)
            cost = cost + moved
        return cost

    def _op_cat(self, operation: Operation) -> Cost:
        """PopART copies the concatenation into a clone of itself; both sides have one order, so whole atoms move."""
        num_bytes = self._tile_bytes(self._output(operation))
        return step(self.target, vertices_cycles=vertices.copy(num_bytes), exchange_bytes=num_bytes)

    _op_stack = _op_slice_backward = _op_cat

    # Reductions -----------------------------------------------------------------------------------------------------

    def _as_matrix(self, value: Value, index: int) -> _Matrix:
        """View a tensor as a matrix. `index` is the value whose layout spreads it over the tiles."""
        columns = max(1, value.shape[-1]) if value.shape else 1
        rows = max(1, value.elements // columns)
        rows_t, columns_t = block(rows, columns, self._layout(index), self.target)
        return _Matrix(rows, columns, rows_t, columns_t, element_bytes(value.dtype))

    def _row_reduction(self, matrix: _Matrix) -> Cost:
        """Cost the sum or maximum of each row, with the result on each tile of the row."""
        rows_t = matrix.rows_t
        cost = self._steps(vertices.reduce_rows(rows_t, matrix.columns_t, matrix.size))
        parts = ceil(matrix.columns / matrix.columns_t)
        if parts > 1:
            outputs = self.target.per_tile(matrix.rows)
            cost = cost + step(
                self.target,
                vertices_cycles=vertices.reduce_rows(outputs, parts, FLOAT),
                exchange_bytes=parts * outputs * FLOAT,
            )
            result_to_tiles = self.target.receive(rows_t * FLOAT)
            cost = cost + Cost(exchange=result_to_tiles, sync=self.target.sync_cycles)
        return cost

    def _column_reduction(self, matrix: _Matrix) -> Cost:
        """Cost the sum of each column, in float if the column spans several tiles."""
        cost = self._steps(vertices.reduce_columns(matrix.columns_t, matrix.rows_t))
        parts = ceil(matrix.rows / matrix.rows_t)
        if parts > 1:
            outputs = self.target.per_tile(matrix.columns)
            cost = cost + step(
                self.target,
                vertices_cycles=vertices.reduce_generic(outputs, parts),
                exchange_bytes=parts * outputs * FLOAT,
            )
        return cost

    def _op_sum(self, operation: Operation) -> Cost:
        index = operation.inputs()[0]
        value, out = self.graph.values[index], self._output(operation)
        matrix = self._as_matrix(value, index)
        if out.elements <= 1:
            n = self._on_tile(value)
            used = min(self.target.tiles, value.elements)
            return self._steps(vertices.reduce_rows(1, n, matrix.size)) + step(
                self.target,
                vertices_cycles=vertices.reduce_rows(1, used, FLOAT),
                exchange_bytes=used * FLOAT,
            )
        if out.elements == matrix.rows or (
            value.shape and out.elements * value.shape[-1] == value.elements
        ):
            return self._row_reduction(matrix)
        return self._column_reduction(matrix)

    def _op_argmax(self, operation: Operation) -> Cost:
        index = operation.inputs()[0]
        matrix = self._as_matrix(self.graph.values[index], index)
        cost = self._steps(vertices.argmax(matrix.rows_t * matrix.columns_t))
        parts = ceil(matrix.columns / matrix.columns_t)
        if parts > 1:
            outputs = self.target.per_tile(matrix.rows)
            cost = cost + step(
                self.target,
                vertices_cycles=vertices.argmax(outputs * parts),
                exchange_bytes=outputs * parts * 8,
            )
        return cost

    # Softmax, LayerNorm and the losses: as PopART lowers them -------------------------------------------------------

    def _op__softmax(self, operation: Operation) -> Cost:
        """Cost (log-)softmax: maximum, subtraction, exponential, sum, then a reciprocal or a logarithm per row."""
        index = operation.inputs()[0]
        value = self.graph.values[index]
        matrix = self._as_matrix(value, index)
        rows_t = matrix.rows_t

        subtraction = matrix.row_values()
        exponential = vertices.unary(rows_t * matrix.columns_t, "exp", _kind_of(value.dtype))
        if _short_name(operation.operator) == "_log_softmax":
            of_sums = [vertices.unary(rows_t, "log", "float")]
        else:
            of_sums = [
                vertices.unary(rows_t, "reciprocal", "float"),
                vertices.cast(rows_t, FLOAT, matrix.size),
            ]
        reduction = self._row_reduction(matrix)
        return (
            reduction
            + self._steps(subtraction, exponential)
            + reduction
            + self._steps(*of_sums, subtraction)
        )

    _op__log_softmax = _op__softmax

    def _op__softmax_backward_data(self, operation: Operation) -> Cost:
        """Cost the gradient of (log-)softmax: a product or an exponential, its row sums, and their subtraction."""
        gradient, result = operation.inputs()[:2]
        value = self.graph.values[gradient]
        matrix = self._as_matrix(value, result)
        elements = matrix.rows_t * matrix.columns_t
        kind = _kind_of(value.dtype)

        subtraction = matrix.row_values()
        sum_of_both = vertices.binary(elements, "add", kind)
        row_sums = self._row_reduction(matrix)
        if _short_name(operation.operator) == "_log_softmax_backward_data":
            exponential = vertices.unary(elements, "exp", kind)
            return self._steps(exponential, subtraction, sum_of_both) + row_sums

        product = vertices.binary(elements, "mul", kind)
        moved = self._gradient_to(operation)
        self._keep_layout(operation, result)
        return moved + (self._steps(product, subtraction, sum_of_both) + row_sums)

    _op__log_softmax_backward_data = _op__softmax_backward_data

    def _op_nll_loss_forward(self, operation: Operation) -> Cost:
        index = operation.inputs()[0]
        value = self.graph.values[index]
        matrix = self._as_matrix(value, index)
        one_hot = vertices.one_hot(self.target.per_tile(matrix.rows))
        elements = matrix.rows_t * matrix.columns_t
        product = vertices.binary(elements, "mul", _kind_of(value.dtype))
        return self._steps(one_hot, product) + self._row_reduction(matrix)

    def _op_nll_loss_backward(self, operation: Operation) -> Cost:
        index = operation.inputs()[1]
        matrix = self._as_matrix(self.graph.values[index], index)
        one_hot = vertices.one_hot(self.target.per_tile(matrix.rows))
        self._keep_layout(operation, index)
        return self._steps(one_hot, matrix.row_values())

    def _op_native_layer_norm(self, operation: Operation) -> Cost:
        index = operation.inputs()[0]
        matrix = self._as_matrix(self.graph.values[index], index)
        self._keep_layout(operation, index)

        mean_and_deviation = self._row_reduction(matrix) * 2.0
        row_values = matrix.row_values()
        return mean_and_deviation + self._steps(
            vertices.inverse_deviation(matrix.rows_t),
            row_values,  # minus the mean
            row_values,  # over the deviation
            vertices.multiply_row_vector(matrix.columns_t, matrix.rows_t, matrix.size),
            vertices.add_row_vector(matrix.columns_t, matrix.rows_t, matrix.size),
        )

    def _op_native_layer_norm_backward(self, operation: Operation) -> Cost:
        index = operation.inputs()[1]  # the saved input
        value = self.graph.values[index]
        matrix = self._as_matrix(value, index)
        rows_t = matrix.rows_t
        columns_t = matrix.columns_t
        row_values = matrix.row_values()
        elementwise = vertices.binary(rows_t * columns_t, "add", _kind_of(value.dtype))
        self._keep_layout(operation, index)
        return (
            self._gradient_to(operation)
            + self._steps(row_values, row_values)
            + self._column_reduction(matrix) * 2.0
            + self._steps(vertices.multiply_row_vector(columns_t, rows_t, matrix.size))
            + self._row_reduction(matrix) * 2.0
            + self._steps(*[elementwise] * 4)
        )

    # Gathers --------------------------------------------------------------------------------------------------------

    def _gather(
        self, table_rows: int, columns: int, indices: int, size: int, *, gradient: bool
    ) -> Cost:
        """Return the cost of the cheapest split of the table over rows and columns."""
        costs = []
        row_split = 1
        while row_split <= min(table_rows, self.target.tiles):
            column_split = min(ceil(columns * size / 4), self.target.tiles // row_split)
            width = ceil(columns / column_split)
            moved = 0.0  # bytes
            if gradient:
                cycles = vertices.gather_gradient(indices, width, size, row_split=row_split)
                moved = float(indices * width * size)  # every part receives all gradient rows
            else:
                cycles = vertices.gather(indices, width, size, row_split=row_split)
                if row_split > 1:
                    moved = indices * columns * size / self.target.tiles
            sync = self.target.sync_cycles if moved else 0.0
            lookup = step(self.target, vertices_cycles=cycles, exchange_bytes=indices * 4)
            costs.append(lookup + Cost(exchange=self.target.receive(moved), sync=sync))
            row_split *= 2
        return min(costs, key=lambda cost: cost.cycles(0.0))

    def _op_embedding(self, operation: Operation) -> Cost:
        table = self._value(operation, 0)
        indices = self._value(operation, 1).elements
        self._group(operation, 16)
        rows, columns = table.shape
        return self._gather(rows, columns, indices, element_bytes(table.dtype), gradient=False)

    def _op_embedding_dense_backward(self, operation: Operation) -> Cost:
        gradient = self._value(operation, 0)
        indices = self._value(operation, 1).elements
        rows, columns = self._output(operation).shape
        return self._gather(rows, columns, indices, element_bytes(gradient.dtype), gradient=True)

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
        """Return the cost of a product, and the columns of a tile's block of its result."""
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
        """Return True if a value is a parameter or a view of one."""
        while index not in self._parameters:
            producer = self._producers.get(index)
            if producer is None or _short_name(producer.operator) not in VIEWS:
                return False
            index = producer.inputs()[0]
        return True

    def _matrix(self, operation: Operation, left: int, right: int) -> Cost:
        """Cost [M, K] x [K, N], a pass that its phase and its operands tell: forward, backward data, weight update."""
        a = self.graph.values[left]
        sizes = [*a.shape, self.graph.values[right].shape[1]]  # M, K, N
        parts = 1
        if self._vocabulary and operation.scope.startswith("cls.predictions.product"):
            # To save memory the vocabulary product runs in parts, one after the other.
            for axis in (2, 1, 0):
                if sizes[axis] >= self._vocabulary:
                    parts = self.serialized
                    sizes[axis] = ceil(sizes[axis] / parts)
                    break

        if operation.phase == "forward":
            rearranged = FORWARD
        elif self._is_weight(right) or self._is_weight(left):
            rearranged = BACKWARD_DATA
        else:
            rearranged = WEIGHT_UPDATE
        rows, inner, columns = sizes
        cost, width = self._product(1, rows, inner, columns, a.dtype, rearranged, parts)
        self._group(operation, width)

        # An activation must be rearranged if it is read through a permute; plans of backward passes contain that.
        permuted = self._layout(left).permuted and not self._is_weight(left)
        if rearranged == FORWARD and permuted:
            cost = cost + unknown_copy(self._tile_bytes(a), self.target)
        return cost

    def _op_mm(self, operation: Operation) -> Cost:
        left, right = operation.inputs()[:2]
        return self._matrix(operation, left, right)

    def _op_addmm(self, operation: Operation) -> Cost:
        bias, left, right = operation.inputs()[:3]
        cost = self._matrix(operation, left, right)
        out = self._output(operation)
        matrix = self._as_matrix(out, operation.outputs[0])
        return cost + step(
            self.target,
            vertices_cycles=vertices.add_row_vector(matrix.columns_t, matrix.rows_t, matrix.size),
            exchange_bytes=matrix.columns_t * matrix.size,
        )

    def _op_bmm(self, operation: Operation) -> Cost:
        """Cost a product of attention: both operands come from other operations and must be rearranged."""
        left = self._value(operation, 0)
        right = self._value(operation, 1)
        matrices, rows, inner = left.shape
        columns = right.shape[2]
        cost, width = self._product(matrices, rows, inner, columns, left.dtype, FORWARD)
        for value in (left, right):
            cost = cost + unknown_copy(self._tile_bytes(value), self.target)
        self._group(operation, width)
        return cost

    # The optimiser: lists of tensors, each list one multi-tensor operation ------------------------------------------

    def _foreach(self, operation: Operation, name: str) -> Cost:
        first = operation.arguments[0]
        elements = sum(self.graph.values[part["value"]].elements for part in first)
        n = self.target.per_tile(elements)
        lists = sum(isinstance(argument, list) for argument in operation.arguments)
        if name == "norm":
            squares = vertices.unary(n, "square", "float") + vertices.reduce_rows(1, n, FLOAT)
            sum_over_tiles = step(
                self.target,
                vertices_cycles=vertices.reduce_rows(1, self.target.tiles, FLOAT),
                exchange_bytes=self.target.tiles * FLOAT,
            )
            return self._steps(squares) + sum_over_tiles
        if name in _UNARY:
            return self._steps(vertices.unary(n, name, "float"))
        if name == "add" and lists == 2:
            return self._steps(vertices.scaled_add(n, FLOAT))
        if name in _BINARY:
            estimate = vertices.scalar if lists < 2 else vertices.binary
            return self._steps(estimate(n, _BINARY[name], "float"))
        self.unknown[operation.operator] += 1
        return self._steps(vertices.binary(n, "div", "float"))


def _broadcast_form(value: Value, out: Value) -> str:
    """Return how `value` is broadcast to `out`.

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
