"""Lowering of each operator, on hand-written graphs of one operation: compute sets, exchanges and syncs.

The machine has 10 tiles, a sync of 101 cycles and a dispatch of 53, so that no two parts look alike. How PopART lowers
each operator: poplibs (popnn NonLinearity, GroupNorm; popops) and popart's lowering, SDK 3.4 line. A compute set costs
a dispatch and a sync, with an exchange before it one sync more; a tile receives 4 bytes a cycle.
"""

from types import SimpleNamespace

import pytest

from ipu_profiling.cycles import lowering, vertices
from ipu_profiling.cycles.layout import Cost, TensorLayout
from ipu_profiling.cycles.lowering import Lowering, _broadcast_form
from ipu_profiling.cycles.matmul import BACKWARD_DATA, FORWARD, WEIGHT_UPDATE
from ipu_profiling.cycles.target import FLOAT, HALF, Target
from ipu_profiling.cycles.tracing import Graph, Operation, Value
from tests.tolerances import same

TARGET = Target("hand", clock_hz=1e9, tiles=10, sync_cycles=101, dispatch_cycles=53)
LAYER = "bert.encoder.layer.0."


class PlannerByHand:
    """Plans of 1000, 100 and 10 cycles in two columns; remembers what it was asked for."""

    def __init__(self):
        self.target, self.asked = TARGET, []

    def plan(self, product, rearranged=FORWARD):
        self.asked.append((product, rearranged))
        return SimpleNamespace(compute_cycles=1000.0, exchange_cycles=100.0, sync_cycles=10.0, column_split=2)


PLANNED = Cost(matmul=1000.0, exchange=100.0, sync=10.0 + 53)


def one(operator, inputs, output, *, scope="bert.x", phase="forward", arguments=None, parameters=(), **options):
    """A lowering of one operation. inputs, output: (shape, dtype) or a shape of halves."""
    values = [Value(*_typed(each)) for each in [*inputs, output]]
    for number, name in parameters:
        values[number] = values[number]._replace(name=name)
    if arguments is None:
        arguments = tuple({"value": number} for number in range(len(inputs)))
    operation = Operation(f"aten.{operator}.default", arguments, {}, (len(inputs),), scope, phase)
    graph = Graph(tuple(values), (operation,), tuple(number for number, _ in parameters), (), 1)
    made = Lowering(graph, PlannerByHand(), memory_proportion=0.25, **options)
    return made, operation


def _typed(each):
    shape, dtype = each if each and isinstance(each[-1], str) else (each, "float16")
    strides, size = [], 1
    for length in reversed(shape):
        strides.insert(0, size)
        size *= length
    return tuple(shape), tuple(strides), dtype, ""


def cost(operator, inputs, output, layouts=(), **options):
    made, operation = one(operator, inputs, output, **options)
    made._layouts.update(dict(layouts))
    return made.operation(operation)


def sets(*work):
    """Compute sets: cycles, or (cycles, bytes received before)."""
    whole = Cost()
    for each in work:
        cycles, received = each if isinstance(each, tuple) else (each, 0)
        syncs = 2 if received else 1
        whole = whole + Cost(vertices=cycles, exchange=received / 4, sync=53 + 101 * syncs)
    return whole


def aligned(num_bytes):
    """Whole 8-byte atoms to other tiles: 587 + 0.44 a byte."""
    return Cost(vertices=587 + 0.44 * num_bytes, exchange=num_bytes / 4, sync=101)


def unknown(num_bytes):
    """Into another order, at the layout parameter."""
    return Cost(exchange=num_bytes / 4, sync=101, layout_calls=1, layout_bytes=num_bytes)


HALVES = (100, 60)  # 6,000: 600 on a tile, 10 rows of 60
S = vertices
GROUPED, OTHER = TensorLayout(0, True), TensorLayout(1, True)
PERMUTED = TensorLayout(0, True, permuted=True)

ELEMENTWISE = [
    # operator, inputs, output, cost
    ("add", [HALVES], HALVES, sets(S.scalar(600, "add", "half"))),
    ("div", [HALVES, HALVES], HALVES, aligned(1200) + sets(S.binary(600, "div", "half"))),
    ("mul", [HALVES, (60,)], HALVES, sets((0, 120), S.multiply_row_vector(60, 10))),
    ("add", [HALVES, (60,)], HALVES, sets((0, 120), S.add_row_vector(60, 10))),
    ("mul", [HALVES, (100, 1)], HALVES, sets((0, 20), S.row_values(10, 60))),
    ("add", [(4, 100, 60), (4, 1, 1)], (4, 100, 60), sets((0, (40 + 60) * 2), S.binary(2400, "add", "half"))),
    (
        "eq",
        [((100, 60), "int32"), ((60,), "int32")],
        ((100, 60), "bool"),
        sets((0, 240), S.binary(600, "compare", "int")),
    ),
    ("add", [(4, 100, 60), (1, 100, 60)], (4, 100, 60), unknown(4800) + sets(S.binary(2400, "add", "half"))),
    ("add", [(4, 60, 60), (1, 60, 60)], (4, 60, 60), unknown(2880) + sets(S.binary(1440, "add", "half"))),
    ("tanh", [HALVES], HALVES, sets(S.unary(600, "tanh", "half"))),
    ("sqrt", [((100, 60), "float32")], ((100, 60), "float32"), sets(S.unary(600, "sqrt", "float"))),
    ("gelu", [HALVES], HALVES, sets(S.gelu(600))),
    ("gelu_backward", [HALVES, HALVES], HALVES, aligned(1200) + sets(S.gelu_gradient(600))),
    ("tanh_backward", [HALVES, HALVES], HALVES, aligned(1200) + sets(S.tanh_gradient(600))),
    ("_to_copy", [HALVES], ((100, 60), "float32"), sets(S.cast(600, HALF, FLOAT))),
    ("_to_copy", [((100, 60), "float32")], HALVES, sets(S.cast(600, FLOAT, HALF))),
    ("_to_copy", [((100, 60), "int32")], HALVES, sets(S.cast_integer(600))),
    ("_to_copy", [((100, 60), "int64")], ((100, 60), "int32"), Cost()),  # the device has no 64-bit types
    ("where", [((100, 60), "bool")], HALVES, sets(S.select_scalars(600))),
    ("cat", [HALVES, HALVES], (200, 60), sets((S.copy(2400), 2400))),
    ("erfinv", [HALVES], HALVES, sets(S.binary(600, "div", "float"))),  # unknown: never free
    ("view", [HALVES], (6000,), Cost()),
    ("zeros", [], HALVES, Cost()),
]


@pytest.mark.parametrize(
    "operator, inputs, output, expected", ELEMENTWISE, ids=[f"{n}-{each[0]}" for n, each in enumerate(ELEMENTWISE)]
)
def test_elementwise(operator, inputs, output, expected):
    same(cost(operator, inputs, output), expected)


def test_where_brings_its_operands_to_the_largest():
    # A bool of the same shape: two bytes to move for each byte; it has no columns that products group, so unknown.
    found = cost("where", [((100, 60), "bool"), HALVES], HALVES)
    same(found, sets(S.select(600)) + unknown(1200))
    # A matrix for four others, of slots by slots.
    found = cost("where", [((1, 60, 60), "bool"), (4, 60, 60)], (4, 60, 60))
    same(found, sets(S.select(1440)) + unknown(2880))


def test_layouts_that_agree_cost_nothing_and_permuted_ones_are_unknown():
    lead = {0: GROUPED, 1: GROUPED}
    same(cost("add", [HALVES, HALVES], HALVES, lead), sets(S.binary(600, "add", "half")))
    found = cost("add", [HALVES, HALVES], HALVES, {0: GROUPED, 1: PERMUTED})
    same(found, unknown(1200) + sets(S.binary(600, "add", "half")))
    same(cost("gelu_backward", [HALVES, HALVES], HALVES, lead), sets(S.gelu_gradient(600)))
    square = cost("gelu_backward", [(4, 60, 60), (4, 60, 60)], (4, 60, 60), {0: GROUPED, 1: PERMUTED})
    same(square, unknown(2880) + sets(S.gelu_gradient(1440)))


def rows(rows_on_tile, columns, size=HALF):
    """Sum of rows that lie whole on a tile."""
    return sets(S.reduce_rows(rows_on_tile, columns, size))


def split_rows(rows, columns_on_tile, parts, rows_on_tile, size=HALF):
    """Rows of which a tile has a part: partial sums, their sums on `rows` / 10 tiles, and the results back."""
    outputs = -(-rows // 10)
    return sets(
        S.reduce_rows(rows_on_tile, columns_on_tile, size), (S.reduce_rows(outputs, parts, FLOAT), parts * outputs * 4)
    ) + Cost(exchange=rows_on_tile * 4 / 4, sync=101)


# [100, 60] halves lie in 10 whole rows a tile; [100, 200] in 2,000: 32 rows of 64 columns, 4 parts a row.
COMPOSITE = [
    ("sum", [HALVES], (100,), rows(10, 60)),
    ("sum", [(100, 200)], (100,), split_rows(100, 64, 4, 32)),
    ("sum", [HALVES], (60,), sets(S.reduce_columns(60, 10), (S.reduce_generic(6, 10), 10 * 6 * 4))),
    ("sum", [HALVES], (), sets(S.reduce_rows(1, 600), (S.reduce_rows(1, 10, FLOAT), 40))),
    ("argmax", [HALVES], ((100,), "int64"), sets(S.argmax(600))),
    ("argmax", [(100, 200)], ((100,), "int64"), sets(S.argmax(32 * 64), (S.argmax(40), 40 * 8))),
    (
        "_softmax",
        [HALVES],
        HALVES,
        rows(10, 60) * 2.0
        + sets(
            S.row_values(10, 60),
            S.unary(600, "exp", "half"),
            S.unary(10, "reciprocal", "float"),
            S.cast(10, FLOAT, HALF),
            S.row_values(10, 60),
        ),
    ),
    (
        "_softmax_backward_data",
        [HALVES, HALVES],
        HALVES,
        aligned(1200)
        + sets(S.binary(600, "mul", "half"), S.row_values(10, 60), S.binary(600, "add", "half"))
        + rows(10, 60),
    ),
    (
        "_log_softmax",
        [HALVES],
        HALVES,
        rows(10, 60) * 2.0
        + sets(S.row_values(10, 60), S.unary(600, "exp", "half"), S.unary(10, "log", "float"), S.row_values(10, 60)),
    ),
    (
        "_log_softmax_backward_data",
        [HALVES, HALVES],
        HALVES,
        rows(10, 60) + sets(S.unary(600, "exp", "half"), S.row_values(10, 60), S.binary(600, "add", "half")),
    ),
    (
        "nll_loss_forward",
        [HALVES, ((100,), "int64")],
        (),
        sets(S.one_hot(10), S.binary(600, "mul", "half")) + rows(10, 60),
    ),
    ("nll_loss_backward", [(), HALVES], HALVES, sets(S.one_hot(10), S.row_values(10, 60))),
    (
        "native_layer_norm",
        [HALVES, (60,), (60,)],
        HALVES,
        rows(10, 60) * 2.0
        + sets(
            S.inverse_deviation(10),
            S.row_values(10, 60),
            S.row_values(10, 60),
            S.multiply_row_vector(60, 10),
            S.add_row_vector(60, 10),
        ),
    ),
    (
        "native_layer_norm_backward",
        [HALVES, HALVES],
        HALVES,
        aligned(1200)
        + sets(S.row_values(10, 60), S.row_values(10, 60))
        + sets(S.reduce_columns(60, 10), (S.reduce_generic(6, 10), 240)) * 2.0
        + sets(S.multiply_row_vector(60, 10))
        + rows(10, 60) * 2.0
        + sets(*[S.binary(600, "add", "half")] * 4),
    ),
]


@pytest.mark.parametrize(
    "operator, inputs, output, expected", COMPOSITE, ids=[f"{n}-{each[0]}" for n, each in enumerate(COMPOSITE)]
)
def test_composite(operator, inputs, output, expected):
    same(cost(operator, inputs, output), expected)


def cheapest(table_rows, columns, indices, size=HALF, *, gradient=False):
    """The cheapest of the splits in powers of two, as the library's planner tries them."""
    found = []
    split = 1
    while split <= min(table_rows, 10):
        width = -(-columns // min(-(-columns * size // 4), 10 // split))
        if gradient:
            vertex, moved = S.gather_gradient(indices, width, size, row_split=split), indices * width * size
        else:
            vertex, moved = S.gather(indices, width, size, row_split=split), indices * columns * size / 10 * (split > 1)
        found.append(sets((vertex, indices * 4)) + Cost(exchange=moved / 4, sync=101 if moved else 0))
        split *= 2
    return min(found, key=lambda each: each.cycles(0.0))


GATHERS = [
    ("embedding", [(320, 60), ((100,), "int32")], (100, 60), cheapest(320, 60, 100)),
    ("embedding", [(2, 60), ((100,), "int32")], (100, 60), cheapest(2, 60, 100)),
    ("embedding_dense_backward", [(100, 60), ((100,), "int32")], (320, 60), cheapest(320, 60, 100, gradient=True)),
]


@pytest.mark.parametrize(
    "operator, inputs, output, expected", GATHERS, ids=[f"{n}-{g[0]}" for n, g in enumerate(GATHERS)]
)
def test_gathers(operator, inputs, output, expected):
    same(cost(operator, inputs, output), expected)


WEIGHT = ((1, LAYER + "output.dense.weight"),)


def product(operator="mm", left=(100, 60), right=(60, 80), **options):
    made, operation = one(operator, [left, right], (left[0], right[1]), **options)
    return made.operation(operation), made.planner.asked, made, operation


def test_products_with_weights():
    found, asked, made, operation = product(parameters=WEIGHT)
    same(found, PLANNED)
    ((planned, rearranged),) = asked
    assert (planned.matrices, planned.rows, planned.inner, planned.columns) == (1, 100, 60, 80)
    assert (planned.element_bytes, planned.partial_bytes, planned.memory_proportion) == (2, 2, 0.25)
    assert rearranged == FORWARD
    # 80 columns are 5 groups of 16, of which a tile has 3 where they are split in two: 48.
    assert made._layout(operation.outputs[0]) == TensorLayout(operation.outputs[0], True, columns=48)
    assert product(phase="backward", parameters=WEIGHT)[1][0][1] == BACKWARD_DATA
    assert product(phase="backward", parameters=((0, "x"),))[1][0][1] == BACKWARD_DATA
    assert product(phase="backward")[1][0][1] == WEIGHT_UPDATE


def test_float_products_have_float_partials():
    made, operation = one("mm", [((100, 60), "float32"), ((60, 80), "float32")], ((100, 80), "float32"))
    made.operation(operation)
    assert made.planner.asked[0][0].element_bytes == made.planner.asked[0][0].partial_bytes == 4
    made, operation = one("mm", [(100, 60), (60, 80)], (100, 80), partial_bytes=FLOAT)
    made.operation(operation)
    assert (made.planner.asked[0][0].element_bytes, made.planner.asked[0][0].partial_bytes) == (2, 4)


def test_an_operand_read_through_a_permute_is_rearranged_first():
    made, operation = one("mm", [(100, 60), (60, 80)], (100, 80), parameters=WEIGHT)
    made._layouts[0] = PERMUTED
    same(made.operation(operation), PLANNED + unknown(1200))
    backward, operation = one("mm", [(100, 60), (60, 80)], (100, 80), phase="backward", parameters=WEIGHT)
    backward._layouts[0] = PERMUTED
    same(backward.operation(operation), PLANNED)  # the plan contains it


def test_a_bias_is_added_by_rows():
    found = cost("addmm", [(80,), (100, 60), (60, 80)], (100, 80), parameters=((2, "w"),))
    # 800 on a tile in blocks of 48 columns: 17 rows; its tile receives 48 halves of the bias.
    same(found, PLANNED + sets((S.add_row_vector(48, 17), 96)))


VOCABULARY = ((1, "bert.embeddings.word_embeddings.weight"),)


@pytest.mark.parametrize(
    "left, right, asked",
    [
        ((100, 60), (60, 320), (100, 60, 64)),  # columns are the words: five products of 64
        ((100, 320), (320, 60), (100, 64, 60)),  # they are summed over
        ((320, 100), (100, 60), (64, 100, 60)),  # rows: the weights' gradient
    ],
)
def test_the_vocabulary_product_runs_in_parts(left, right, asked):
    options = {"scope": "cls.predictions.product", "serialized": 5}
    made, operation = one(
        "mm", [left, right, (320, 8)], (left[0], right[1]), parameters=((2, VOCABULARY[0][1]),), **options
    )
    operation = operation._replace(arguments=({"value": 0}, {"value": 1}))
    found = made.operation(operation)
    planned = made.planner.asked[0][0]
    assert (planned.rows, planned.inner, planned.columns) == asked
    same(found, PLANNED * 5.0)
    # In no other place, and where the words are not in it.
    options["scope"] = "bert.x"
    made, operation = one(
        "mm", [left, right, (320, 8)], (left[0], right[1]), parameters=((2, VOCABULARY[0][1]),), **options
    )
    same(made.operation(operation._replace(arguments=({"value": 0}, {"value": 1}))), PLANNED)


def test_attention_products_rearrange_both_operands():
    # [4, 50, 20] x [4, 20, 50]: 400 halves a tile each.
    found = cost("bmm", [(4, 50, 20), (4, 20, 50)], (4, 50, 50), scope=LAYER + "attention.self")
    same(found, PLANNED + unknown(800) * 2.0)
    # Probabilities are of slots by slots: 1,000 halves a tile.
    found = cost("bmm", [(4, 50, 50), (4, 50, 20)], (4, 50, 20), scope=LAYER + "attention.self")
    same(found, PLANNED + unknown(2000) + unknown(800))


def test_joining_and_slicing_are_copies():
    scores = LAYER + "attention.self.scores"
    shapes = [(4, 50, 20), (4, 50, 10), (4, 50, 30), (4, 30, 50), (4, 50, 50), (4, 50, 20)]
    values = tuple(Value(*_typed(shape)) for shape in shapes)
    join = Operation("aten.cat.default", ([{"value": 0}, {"value": 1}],), {}, (2,), scores, "forward")
    multiply = Operation("aten.bmm.default", ({"value": 2}, {"value": 3}), {}, (4,), scores, "forward")
    slices = Operation("aten.slice.Tensor", ({"value": 2},), {}, (5,), scores, "backward")
    made = Lowering(Graph(values, (join, multiply, slices), (), (), 1), PlannerByHand(), memory_proportion=0.25)
    same(made.operation(join), sets((S.copy(1200), 1200)))
    same(made.operation(multiply), PLANNED + unknown(1200) * 2.0)
    # The gradient of query or key: 4 x 50 x 20 of 30 columns, 400 halves a tile, copied where they lie.
    same(made.operation(slices), sets(S.copy(800)))
    # The mask's own columns are read by nobody; slices forward, and outside the layers, are views.
    narrow = slices._replace(outputs=(1,))
    for free in (
        narrow,
        slices._replace(phase="forward"),
        slices._replace(scope="bert.x"),
        slices._replace(outputs=(2,)),
    ):
        same(made.operation(free), Cost())


def test_dropout_is_one_vertex():
    values = tuple(Value(*_typed(HALVES)) for _ in range(4))
    draw = Operation("aten.bernoulli.default", ({"value": 0},), {}, (1,), "bert.x", "forward")
    scale = Operation("aten.div.default", ({"value": 1}, 0.9), {}, (2,), "bert.x", "forward")
    use = Operation("aten.mul.default", ({"value": 0}, {"value": 2}), {}, (3,), "bert.x", "forward")
    made = Lowering(Graph(values, (draw, scale, use), (), (), 1), PlannerByHand(), memory_proportion=0.25)
    assert [made.operation(each) for each in (draw, scale)] == [Cost(), Cost()]
    same(made.operation(use), sets(S.dropout(600)))
    assert made._layout(3) == made._layout(0)


def test_the_gradient_of_a_tied_table_is_added_in_place():
    values = tuple(Value(*_typed(s)) for s in [HALVES, ((100,), "int32"), (320, 60), (320, 60), (320, 60)])
    inputs = ({"value": 0}, {"value": 1})
    scatter = Operation("aten.embedding_dense_backward.default", inputs, {}, (2,), "bert.x", "backward")
    add = Operation("aten.add.Tensor", ({"value": 2}, {"value": 3}), {}, (4,), "bert.x", "backward")
    made = Lowering(Graph(values, (scatter, add), (), (), 1), PlannerByHand(), memory_proportion=0.25)
    assert made.operation(scatter) != Cost() and made.operation(add) == Cost()
    other = Lowering(Graph(values, (add,), (), (), 1), PlannerByHand(), memory_proportion=0.25)
    assert other.operation(add) != Cost()


LIST = [((100, 60), "float32"), ((100, 40), "float32")]  # 10,000 floats in two tensors: 1,000 on a tile
FOREACH = [
    (
        "norm",
        1,
        sets(S.unary(1000, "square", "float") + S.reduce_rows(1, 1000, FLOAT), (S.reduce_rows(1, 10, FLOAT), 40)),
    ),
    ("sqrt", 1, sets(S.unary(1000, "sqrt", "float"))),
    ("add", 2, sets(S.scaled_add(1000, FLOAT))),
    ("mul", 2, sets(S.binary(1000, "mul", "float"))),
    ("mul", 1, sets(S.scalar(1000, "mul", "float"))),
    ("add", 1, sets(S.scalar(1000, "add", "float"))),
    ("frac", 1, sets(S.binary(1000, "div", "float"))),
]


@pytest.mark.parametrize("name, lists, expected", FOREACH)
def test_optimiser_operations_on_lists(name, lists, expected):
    made, operation = one(f"_foreach_{name}_", LIST, LIST[0])
    found = made.operation(operation._replace(arguments=([{"value": 0}, {"value": 1}],) * lists + (0.9,)))
    same(found, expected)
    assert dict(made.unknown) == ({operation.operator: 1} if name == "frac" else {})


def test_unknown_operators_are_counted():
    made, operation = one("erfinv", [HALVES, (3,)], (5,))
    same(made.operation(operation), sets(S.binary(600, "div", "float")))  # of the largest tensor
    assert dict(made.unknown) == {"aten.erfinv.default": 1}


# [1, 100, 60] for [4, 100, 60] and so on: how a tensor spreads over another.
@pytest.mark.parametrize(
    "shape, out, form",
    [
        ((100, 60), (100, 60), "full"),
        ((60,), (100, 60), "row"),
        ((1, 60), (100, 60), "row"),
        ((100, 1), (100, 60), "column"),
        ((4, 1, 1), (4, 100, 60), "outer"),
        ((4, 1, 60), (4, 100, 60), "row"),
        ((1, 100, 60), (4, 100, 60), "block"),
        ((100, 60), (4, 100, 60), "block"),
        ((1, 3), (1, 3), "full"),
        ((1, 60), (1, 60), "full"),
        ((60,), (1, 60), "full"),
    ],
)
def test_forms_of_broadcast(shape, out, form):
    assert _broadcast_form(Value(*_typed(shape)), Value(*_typed(out))) == form


def test_names_types_and_places():
    dtypes = ("float16", "bfloat16", "bool", "int8", "uint8", "int16", "float32", "int64")
    assert [lowering.element_bytes(dtype) for dtype in dtypes] == [2, 2, 1, 1, 1, 2, 4, 4]
    assert [lowering._kind_of(t) for t in ("float16", "bfloat16", "float32", "float64", "bool", "int64")] == [
        "half",
        "half",
        "float",
        "float",
        "bool",
        "int",
    ]
    assert lowering._short_name("aten.add_.Tensor") == "add"
    assert lowering._short_name("aten.__and__.Tensor") == "__and__"
    scopes = (LAYER + "attention.self", "attention_mask", "bert.embeddings.x", "cls.x")
    assert [lowering.block_of(s) for s in scopes] == ["layer.0", "mask", "embeddings", "heads"]
    scopes = (LAYER + "attention.output.dense", LAYER + "output.dense", "cls.x")
    assert [lowering.half_of(scope) for scope in scopes] == ["attention", "feed forward", ""]


@pytest.mark.parametrize(
    "scope, shapes, category",
    [
        (LAYER + "attention.self.scores", [HALVES], lowering.SCORES),
        (LAYER + "output.dense", [HALVES], lowering.ENCODER),
        ("attention_mask.x", [HALVES], lowering.MASK_BUILD),
        ("bert.embeddings.position_embeddings", [HALVES], lowering.POSITIONS),
        ("bert.embeddings.word_embeddings", [HALVES], lowering.ENCODER),
        ("next_sentence_slots", [HALVES], lowering.CLS),
        ("bert.pooler.dense", [HALVES], lowering.CLS),
        ("cls.seq_relationship", [HALVES], lowering.CLS),
        ("masked_lm_slots", [HALVES], lowering.MLM),
        ("cls.predictions.transform", [HALVES], lowering.MLM),
        ("loss", [HALVES], lowering.LOSS),
    ],
)
def test_categories(scope, shapes, category):
    made, operation = one("gelu", shapes, HALVES, scope=scope)
    assert made._category(operation) == category


def test_categories_of_what_comes_from_the_mask_and_of_the_largest_losses():
    options = {"parameters": ((0, "input_mask"),)}
    made, operation = one("exp", [((2, 50), "int32")], (2, 50), scope="bert.x", **options)
    assert made._category(operation) == lowering.MASK_BUILD and 1 in made._mask
    made, operation = one("add", [((2, 50), "int32"), HALVES], HALVES, scope=LAYER + "attention.self", **options)
    assert made._category(operation) == lowering.MASK_APPLICATION and 2 not in made._mask
    for size, category in ((320, lowering.MLM), (319, lowering.LOSS)):
        made, operation = one("exp", [(size,), (320, 8)], (size,), scope="loss", parameters=((1, VOCABULARY[0][1]),))
        operation = operation._replace(arguments=({"value": 0},))
        assert made._category(operation) == category


def test_results_take_the_layout_of_their_largest_operand():
    made, operation = one("add", [HALVES, (60,)], HALVES)
    made._layouts[0] = PERMUTED
    made.operation(operation)
    assert made._layout(2) == PERMUTED
    made, operation = one("erfinv", [(3,)], HALVES)
    made.operation(operation)
    assert made._layout(1) == TensorLayout(1, grouped=False)
    made, operation = one("transpose", [HALVES], (60, 100))
    made.operation(operation)
    assert made._layout(1).permuted and not made._layout(0).permuted
    made, operation = one("view", [HALVES], (6000,))
    made.operation(operation)
    assert made._layout(1) == made._layout(0) == TensorLayout(0, grouped=True)
    made, _ = one("view", [((100, 60), "int32"), (60,)], (6000,))
    assert not made._layout(0).grouped and not made._layout(1).grouped
