"""Lowering of each operator by hand, on graphs of one operation: compute sets, exchanges and syncs.

The machine has 10 tiles, a sync of 101 cycles and a dispatch of 53, so that no two parts look alike. How PopART lowers
each operator: poplibs (popnn NonLinearity, GroupNorm; popops) and popart's lowering, SDK 3.4 line. A compute set costs
a dispatch and a sync, with an exchange before it one sync more; a tile receives 4 bytes a cycle.
"""

from types import SimpleNamespace

import pytest

from ipu_profiling.cycles import lowering, vertices
from ipu_profiling.cycles.layout import Cost, TensorLayout
from ipu_profiling.cycles.lowering import Lowering
from ipu_profiling.cycles.target import FLOAT, HALF, Target
from ipu_profiling.cycles.tracing import Graph, Operation, Value

TARGET = Target("hand", clock_hz=1e9, tiles=10, sync_cycles=101, dispatch_cycles=53)


class PlannerByHand:
    """Plans of 1000, 100 and 10 cycles in two columns."""

    target = TARGET

    def plan(self, product, rearranged=None):
        return SimpleNamespace(compute_cycles=1000.0, exchange_cycles=100.0, sync_cycles=10.0, column_split=2)


def value_of(shape):
    """A tensor: (shape, dtype), or the shape of halves."""
    dtype = "float16"
    if shape and isinstance(shape[-1], str):
        shape, dtype = shape
    strides = []
    size = 1
    for length in reversed(shape):
        strides.insert(0, size)
        size *= length
    return Value(tuple(shape), tuple(strides), dtype, "")


def one(operator, inputs, output, *, scope="bert.x", phase="forward", arguments=None, parameters=()):
    """Lower one operation; return the lowering and the operation."""
    values = [value_of(shape) for shape in [*inputs, output]]
    for number, name in parameters:
        values[number] = values[number]._replace(name=name)
    if arguments is None:
        arguments = tuple({"value": number} for number in range(len(inputs)))
    operation = Operation(f"aten.{operator}.default", arguments, {}, (len(inputs),), scope, phase)
    indices = tuple(number for number, _ in parameters)
    graph = Graph(tuple(values), (operation,), indices, (), 1)
    return Lowering(graph, PlannerByHand(), memory_proportion=0.25), operation


def cost(operator, inputs, output, layouts=(), **options):
    lowered, operation = one(operator, inputs, output, **options)
    lowered._layouts.update(dict(layouts))
    return lowered.operation(operation)


def foreach(name, lists):
    """An optimiser's operation on lists of two tensors with 10,000 floats: 1,000 on a tile."""
    tensors = [((100, 60), "float32"), ((100, 40), "float32")]
    both = [{"value": 0}, {"value": 1}]
    return cost(f"_foreach_{name}_", tensors, tensors[0], arguments=(both,) * lists + (0.9,))


def sets(*work):
    """Compute sets: cycles, or (cycles, bytes received before)."""
    whole = Cost()
    for part in work:
        cycles, received = part if isinstance(part, tuple) else (part, 0)
        syncs = 2 if received else 1
        whole = whole + Cost(vertices=cycles, exchange=received / 4, sync=53 + 101 * syncs)
    return whole


def aligned(num_bytes):
    """Whole 8-byte atoms to other tiles: 587 + 0.44 a byte."""
    return Cost(vertices=587 + 0.44 * num_bytes, exchange=num_bytes / 4, sync=101)


def unknown(num_bytes):
    """Into another order, at the layout parameter."""
    return Cost(exchange=num_bytes / 4, sync=101, layout_calls=1, layout_bytes=num_bytes)


def rows(rows_on_tile, columns, size=HALF):
    """Sums of rows that lie whole on a tile."""
    return sets(vertices.reduce_rows(rows_on_tile, columns, size))


def split_rows(rows, columns_on_tile, parts, rows_on_tile, size=HALF):
    """Rows of which a tile has a part: partial sums, their sums on `rows` / 10 tiles, and the results back."""
    outputs = -(-rows // 10)
    partial_sums = vertices.reduce_rows(rows_on_tile, columns_on_tile, size)
    their_sums = vertices.reduce_rows(outputs, parts, FLOAT)
    results_back = Cost(exchange=rows_on_tile * 4 / 4, sync=101)
    return sets(partial_sums, (their_sums, parts * outputs * 4)) + results_back


def cheapest(table_rows, columns, indices, size=HALF, *, gradient=False):
    """The cheapest of the splits in powers of two, as the library's planner tries them."""
    costs = []
    split = 1
    while split <= min(table_rows, 10):
        width = -(-columns // min(-(-columns * size // 4), 10 // split))
        if gradient:
            vertex = vertices.gather_gradient(indices, width, size, row_split=split)
            moved = indices * width * size
        else:
            vertex = vertices.gather(indices, width, size, row_split=split)
            moved = indices * columns * size / 10 * (split > 1)
        exchange = Cost(exchange=moved / 4, sync=101 if moved else 0)
        costs.append(sets((vertex, indices * 4)) + exchange)
        split *= 2
    return min(costs, key=lambda candidate: candidate.cycles(0.0))


SCOPE = {
    "FLOAT": FLOAT,
    "GROUPED": TensorLayout(0, True),
    "HALF": HALF,
    "HALVES": (100, 60),  # 6,000: 600 on a tile, 10 rows of 60
    "LAYER": "bert.encoder.layer.0.",
    "PERMUTED": TensorLayout(0, True, permuted=True),
    "PLANNED": Cost(matmul=1000.0, exchange=100.0, sync=10.0 + 53),
    "S": vertices,
    "WEIGHT": ((1, "bert.encoder.layer.0.output.dense.weight"),),
}
# Call -> its working. [100, 60] halves lie in 10 whole rows a tile; [100, 200] in 2,000: 32 rows of 64 columns, 4 parts
# a row.
BY_HAND = [
    ("cost('add', [HALVES], HALVES)", "sets(S.scalar(600, 'add', 'half'))"),
    ("cost('div', [HALVES, HALVES], HALVES)", "aligned(1200) + sets(S.binary(600, 'div', 'half'))"),
    ("cost('mul', [HALVES, (60,)], HALVES)", "sets((0, 120), S.multiply_row_vector(60, 10))"),
    ("cost('add', [HALVES, (60,)], HALVES)", "sets((0, 120), S.add_row_vector(60, 10))"),
    ("cost('mul', [HALVES, (100, 1)], HALVES)", "sets((0, 20), S.row_values(10, 60))"),
    (
        "cost('add', [(4, 100, 60), (4, 1, 1)], (4, 100, 60))",
        "sets((0, (40 + 60) * 2), S.binary(2400, 'add', 'half'))",
    ),
    (
        "cost('eq', [((100, 60), 'int32'), ((60,), 'int32')], ((100, 60), 'bool'))",
        "sets((0, 240), S.binary(600, 'compare', 'int'))",
    ),
    (
        "cost('add', [(4, 100, 60), (1, 100, 60)], (4, 100, 60))",
        "unknown(4800) + sets(S.binary(2400, 'add', 'half'))",
    ),
    ("cost('add', [(4, 60, 60), (1, 60, 60)], (4, 60, 60))", "unknown(2880) + sets(S.binary(1440, 'add', 'half'))"),
    ("cost('tanh', [HALVES], HALVES)", "sets(S.unary(600, 'tanh', 'half'))"),
    ("cost('sqrt', [((100, 60), 'float32')], ((100, 60), 'float32'))", "sets(S.unary(600, 'sqrt', 'float'))"),
    ("cost('gelu', [HALVES], HALVES)", "sets(S.gelu(600))"),
    ("cost('gelu_backward', [HALVES, HALVES], HALVES)", "aligned(1200) + sets(S.gelu_gradient(600))"),
    ("cost('tanh_backward', [HALVES, HALVES], HALVES)", "aligned(1200) + sets(S.tanh_gradient(600))"),
    ("cost('_to_copy', [HALVES], ((100, 60), 'float32'))", "sets(S.cast(600, HALF, FLOAT))"),
    ("cost('_to_copy', [((100, 60), 'float32')], HALVES)", "sets(S.cast(600, FLOAT, HALF))"),
    ("cost('_to_copy', [((100, 60), 'int32')], HALVES)", "sets(S.cast_integer(600))"),
    ("cost('_to_copy', [((100, 60), 'int64')], ((100, 60), 'int32'))", "Cost()"),
    ("cost('where', [((100, 60), 'bool')], HALVES)", "sets(S.select_scalars(600))"),
    ("cost('cat', [HALVES, HALVES], (200, 60))", "sets((S.copy(2400), 2400))"),
    ("cost('erfinv', [HALVES], HALVES)", "sets(S.binary(600, 'div', 'float'))"),
    ("cost('view', [HALVES], (6000,))", "Cost()"),
    ("cost('zeros', [], HALVES)", "Cost()"),
    ("cost('sum', [HALVES], (100,))", "rows(10, 60)"),
    ("cost('sum', [(100, 200)], (100,))", "split_rows(100, 64, 4, 32)"),
    ("cost('sum', [HALVES], (60,))", "sets(S.reduce_columns(60, 10), (S.reduce_generic(6, 10), 10 * 6 * 4))"),
    ("cost('sum', [HALVES], ())", "sets(S.reduce_rows(1, 600), (S.reduce_rows(1, 10, FLOAT), 40))"),
    ("cost('argmax', [HALVES], ((100,), 'int64'))", "sets(S.argmax(600))"),
    ("cost('argmax', [(100, 200)], ((100,), 'int64'))", "sets(S.argmax(32 * 64), (S.argmax(40), 40 * 8))"),
    (
        "cost('_softmax', [HALVES], HALVES)",
        "rows(10, 60) * 2.0 + sets(S.row_values(10, 60), S.unary(600, 'exp', 'half'), S.unary(10, "
        "'reciprocal', 'float'), S.cast(10, FLOAT, HALF), S.row_values(10, 60))",
    ),
    (
        "cost('_softmax_backward_data', [HALVES, HALVES], HALVES)",
        "aligned(1200) + sets(S.binary(600, 'mul', 'half'), S.row_values(10, 60), S.binary(600, 'add', "
        "'half')) + rows(10, 60)",
    ),
    (
        "cost('_log_softmax', [HALVES], HALVES)",
        "rows(10, 60) * 2.0 + sets(S.row_values(10, 60), S.unary(600, 'exp', 'half'), S.unary(10, 'log', "
        "'float'), S.row_values(10, 60))",
    ),
    (
        "cost('_log_softmax_backward_data', [HALVES, HALVES], HALVES)",
        "rows(10, 60) + sets(S.unary(600, 'exp', 'half'), S.row_values(10, 60), S.binary(600, 'add', 'half'))",
    ),
    (
        "cost('nll_loss_forward', [HALVES, ((100,), 'int64')], ())",
        "sets(S.one_hot(10), S.binary(600, 'mul', 'half')) + rows(10, 60)",
    ),
    ("cost('nll_loss_backward', [(), HALVES], HALVES)", "sets(S.one_hot(10), S.row_values(10, 60))"),
    (
        "cost('native_layer_norm', [HALVES, (60,), (60,)], HALVES)",
        "rows(10, 60) * 2.0 + sets(S.inverse_deviation(10), S.row_values(10, 60), S.row_values(10, 60), "
        "S.multiply_row_vector(60, 10), S.add_row_vector(60, 10))",
    ),
    (
        "cost('native_layer_norm_backward', [HALVES, HALVES], HALVES)",
        "aligned(1200) + sets(S.row_values(10, 60), S.row_values(10, 60)) + sets(S.reduce_columns(60, 10), "
        "(S.reduce_generic(6, 10), 240)) * 2.0 + sets(S.multiply_row_vector(60, 10)) + rows(10, 60) * 2.0 + "
        "sets(*[S.binary(600, 'add', 'half')] * 4)",
    ),
    ("cost('embedding', [(320, 60), ((100,), 'int32')], (100, 60))", "cheapest(320, 60, 100)"),
    ("cost('embedding', [(2, 60), ((100,), 'int32')], (100, 60))", "cheapest(2, 60, 100)"),
    (
        "cost('embedding_dense_backward', [(100, 60), ((100,), 'int32')], (320, 60))",
        "cheapest(320, 60, 100, gradient=True)",
    ),
    (
        "foreach('norm', 1)",
        "sets(S.unary(1000, 'square', 'float') + S.reduce_rows(1, 1000, FLOAT), (S.reduce_rows(1, 10, FLOAT), 40))",
    ),
    ("foreach('sqrt', 1)", "sets(S.unary(1000, 'sqrt', 'float'))"),
    ("foreach('add', 2)", "sets(S.scaled_add(1000, FLOAT))"),
    ("foreach('mul', 2)", "sets(S.binary(1000, 'mul', 'float'))"),
    ("foreach('mul', 1)", "sets(S.scalar(1000, 'mul', 'float'))"),
    ("foreach('add', 1)", "sets(S.scalar(1000, 'add', 'float'))"),
    ("foreach('frac', 1)", "sets(S.binary(1000, 'div', 'float'))"),
    ("cost('add', [HALVES, HALVES], HALVES, {0: GROUPED, 1: GROUPED})", "sets(S.binary(600, 'add', 'half'))"),
    (
        "cost('add', [HALVES, HALVES], HALVES, {0: GROUPED, 1: PERMUTED})",
        "unknown(1200) + sets(S.binary(600, 'add', 'half'))",
    ),
    ("cost('where', [((100, 60), 'bool'), HALVES], HALVES)", "sets(S.select(600)) + unknown(1200)"),
    ("cost('where', [((1, 60, 60), 'bool'), (4, 60, 60)], (4, 60, 60))", "sets(S.select(1440)) + unknown(2880)"),
    ("cost('mm', [(100, 60), (60, 80)], (100, 80), parameters=WEIGHT)", "PLANNED"),
    ("cost('mm', [(100, 60), (60, 80)], (100, 80), {0: PERMUTED}, parameters=WEIGHT)", "PLANNED + unknown(1200)"),
    ("cost('mm', [(100, 60), (60, 80)], (100, 80), {0: PERMUTED}, parameters=WEIGHT, phase='backward')", "PLANNED"),
    (
        "cost('addmm', [(80,), (100, 60), (60, 80)], (100, 80), parameters=((2, 'w'),))",
        "PLANNED + sets((S.add_row_vector(48, 17), 96))",
    ),
    (
        "cost('bmm', [(4, 50, 20), (4, 20, 50)], (4, 50, 50), scope=LAYER + 'attention.self')",
        "PLANNED + unknown(800) * 2.0",
    ),
    (
        "cost('bmm', [(4, 50, 50), (4, 50, 20)], (4, 50, 20), scope=LAYER + 'attention.self')",
        "PLANNED + unknown(2000) + unknown(800)",
    ),
]
# Scope of an operation -> its category.
CATEGORIES = [
    ("LAYER + 'attention.self.scores'", "SCORES"),
    ("LAYER + 'output.dense'", "ENCODER"),
    ("'attention_mask.x'", "MASK_BUILD"),
    ("'bert.embeddings.position_embeddings'", "POSITIONS"),
    ("'next_sentence_slots'", "CLS"),
    ("'bert.pooler.dense'", "CLS"),
    ("'cls.seq_relationship'", "CLS"),
    ("'masked_lm_slots'", "MLM"),
    ("'cls.predictions.transform'", "MLM"),
    ("'loss'", "LOSS"),
]


def test_costs_by_hand():
    scope = {**globals(), **SCOPE}
    faults = []
    for call, working in BY_HAND:
        found = vars(eval(call, scope))
        expected = vars(eval(working, scope))
        if found != pytest.approx(expected):
            faults.append(f"{call}: {found}, by hand {expected}")
    assert not faults, "\n".join(faults)


def test_categories_follow_the_scope():
    for text, category in CATEGORIES:
        lowered, operation = one("gelu", [(100, 60)], (100, 60), scope=eval(text, SCOPE))
        assert lowered._category(operation) == getattr(lowering, category), text


def test_results_take_the_layout_of_their_largest_operand():
    permuted = SCOPE["PERMUTED"]
    for operator, shapes, expected in (
        ("add", [(100, 60), (60,)], permuted),
        ("erfinv", [(3,)], TensorLayout(1, grouped=False)),
        ("view", [(100, 60)], permuted),
    ):
        lowered, operation = one(operator, shapes, (100, 60))
        lowered._layouts[0] = permuted
        lowered.operation(operation)
        assert lowered._layout(len(shapes)) == expected, operator
