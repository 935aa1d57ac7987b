"""Vertex estimators against the published per-vector numbers (poplibs performance estimators, SDK 3.4 line)."""

from math import ceil

import pytest

from ipu_profiling.cycles import vertices
from ipu_profiling.cycles.target import BOW, FLOAT, HALF, MK2

# Every estimate, worked out by hand: 250 elements on the tile are 42 for the busiest of six workers, 11 vectors of four
# halves or 21 of two floats. Tables: poplibs, popopsCycleEstimators (SDK 3.4 line), cycles for so many elements.
BINARY = {
    "add": {"half": (3, 4), "float": (3, 2), "int": (7, 1)},
    "mul": {"half": (3, 4), "float": (3, 2), "int": (7, 1)},
    "div": {"half": (21, 4), "float": (10, 2), "int": (40, 1)},
    "max": {"half": (4, 4), "float": (3, 2), "int": (7, 1)},
    "compare": {"half": (9, 4), "float": (14, 4), "int": (22, 4), "bool": (6, 4)},
    "logical": {"bool": (5, 4)},
}
SCALAR = {
    "add": {"half": (2, 4), "float": (2, 2), "int": (6, 1)},
    "mul": {"half": (2, 4), "float": (2, 2), "int": (6, 1)},
    "div": {"half": (8, 2), "float": (6, 2), "int": (40, 1)},
    "max": {"half": (3, 4), "float": (3, 2), "int": (6, 1)},
    "compare": {"half": (8, 4), "float": (12, 4), "int": (16, 4), "bool": (5, 4)},
    "logical": {"bool": (4, 4)},
}
UNARY = {
    "exp": {"half": (4, 4), "float": (6, 2)},
    "tanh": {"half": (4, 4), "float": (12, 2)},
    "log": {"half": (4, 4), "float": (12, 2)},
    "reciprocal": {"half": (15, 4), "float": (6, 2)},
    "sqrt": {"half": (23, 4), "float": (10, 2)},
    "square": {"half": (2, 4), "float": (2, 2)},
}
_LARGE = 6 * 4 * 1000  # elements on a tile: 1000 half vectors for each of the six workers
WITH_A_START = ("exp", "tanh", "log")  # 33 cycles of start instead of 20


@pytest.mark.parametrize("name, table", [("BINARY", BINARY), ("SCALAR", SCALAR), ("UNARY", UNARY)])
def test_tables_are_the_published_ones(name, table):
    found = getattr(vertices, name)
    assert set(found) == {(operation, kind) for operation, kinds in table.items() for kind in kinds}
    for operation, kinds in table.items():
        for kind, (cycles, elements) in kinds.items():
            loop = cycles * ceil(42 / elements)
            if name == "BINARY":
                assert vertices.binary(250, operation, kind) == 11 + 6 * ((26 if kind == "half" else 29) + loop)
            elif name == "SCALAR":
                assert vertices.scalar(250, operation, kind) == 11 + 6 * (20 + loop)
            else:
                start = 33 if operation in WITH_A_START else 20
                assert vertices.unary(250, operation, kind) == 6 * (start + loop)
            # One more vector for every worker, once the fixed part is paid: 6 workers take 6 x `cycles` tile cycles.
            estimate = getattr(vertices, name.lower())
            more = estimate(_LARGE + 6 * elements, operation, kind) - estimate(_LARGE, operation, kind)
            assert more == 6 * cycles


# (estimate, its arguments, the value by hand); the published formula is in poplibs' file that stands above.
PINNED = [
    # popops, VectorInner: 13 + 6 (25 + groups of eight halves x (15 + 2 x further rows of the busiest worker)).
    (vertices.add_row_vector, (64, 13), 13 + 6 * (25 + 8 * (15 + 2 * 2))),
    (vertices.add_row_vector, (12, 13), 13 + 6 * (25 + 2 * (13 + 4 * 2))),  # no multiple of eight: 13, and 4 a row
    (vertices.add_row_vector, (10, 13), 13 + 6 * (25 + 10 * 9 * 3)),  # no vectors: 9 an element and row
    (vertices.add_row_vector, (10, 13, FLOAT), 13 + 6 * (25 + 5 * (11 + 3 * 2))),
    (vertices.add_row_vector, (9, 13, FLOAT), 13 + 6 * (25 + 5 * (11 + 3 * 2))),
    (vertices.multiply_row_vector, (12, 13), 13 + 6 * (25 + 3 * (9 + 2))),  # a vector of four halves and row: 1 cycle
    (vertices.multiply_row_vector, (10, 13), 13 + 6 * (25 + 10 * 9 * 3)),
    (vertices.multiply_row_vector, (10, 13, FLOAT), 13 + 6 * (25 + 5 * (9 + 2))),
    (vertices.multiply_row_vector, (9, 13, FLOAT), 13 + 6 * (25 + 9 * 9 * 3)),
    # popops, VectorOuter: 3 rows for the busiest worker, 2 cycles a vector, 7 a row, or 25 where rows are not aligned.
    (vertices.row_values, (13, 12), 11 + 6 * (15 + 3 * (7 + 3 * 2))),
    (vertices.row_values, (13, 10), 11 + 6 * (15 + 3 * (25 + 3 * 2))),
    (vertices.row_values, (13, 10, FLOAT), 11 + 6 * (15 + 3 * (7 + 5 * 2))),
    (vertices.row_values, (13, 9, FLOAT), 11 + 6 * (15 + 3 * (25 + 5 * 2))),
    # popops, ScaledAdd: 57 + 6 (15 + 6 + 3 x further vectors).
    (vertices.scaled_add, (250,), 57 + 6 * (21 + 3 * 10)),
    (vertices.scaled_add, (250, FLOAT), 57 + 6 * (21 + 3 * 20)),
    (vertices.scaled_add, (1,), 57 + 6 * 21),
    (vertices.scaled_add, (0,), 57 + 6 * 21),
    # popnn, PerformanceEstimation: GELU 5 a further vector of halves, 10 of floats; its gradient the same.
    (vertices.gelu, (250,), 9 + 6 * (22 + 5 + 10 * 5 + 6)),
    (vertices.gelu, (250, FLOAT), 9 + 6 * (22 + 5 + 20 * 10 + 6)),
    (vertices.gelu, (1,), 9 + 6 * (22 + 5 + 6)),
    (vertices.gelu, (0,), 9 + 6 * (22 + 5 + 6)),
    (vertices.gelu_gradient, (250,), 9 + 6 * (24 + 10 * 5)),
    (vertices.gelu_gradient, (250, FLOAT), 9 + 6 * (24 + 20 * 10)),
    (vertices.gelu_gradient, (1,), 9 + 6 * 24),
    (vertices.gelu_gradient, (0,), 9 + 6 * 24),
    (vertices.tanh_gradient, (250,), 9 + 6 * (24 + 11 * 3)),
    (vertices.tanh_gradient, (250, FLOAT), 9 + 6 * (24 + 21 * 3)),
    # popops, Select, Cast; poplibs' memory copies; poprand, Bernoulli with scale.
    (vertices.select, (250,), 6 * (11 + 5 * 42)),
    (vertices.select_scalars, (250,), 6 * (30 + 4 * 42)),
    (vertices.cast, (250, HALF, FLOAT), 12 + 6 * (19 + 18 + 21)),
    (vertices.cast, (250, FLOAT, HALF), 12 + 6 * (19 + 18 + 21)),
    (vertices.cast, (250, HALF, HALF), 12 + 6 * (19 + 18 + 11)),
    (vertices.cast_integer, (250,), 12 + 6 * (19 + 18 + 2 * 42)),
    (vertices.copy, (800,), 288 + 100),
    (vertices.dropout, (250,), 6 + 144 + 2 * 63),
    (vertices.dropout, (250, FLOAT), 6 + 144 + 2 * 125),
    # popops, reduction/CycleEstimationFunctions: a run of 250 is 42 a worker and 2 over; two rows are one a worker.
    (vertices.reduce_rows, (1, 250), 6 * (22 + 11 + 2)),
    (vertices.reduce_rows, (1, 251, FLOAT), 6 * (22 + 21 + 1)),
    (vertices.reduce_rows, (2, 250), 6 * (17 + 1 * (12 + 63))),
    (vertices.reduce_rows, (13, 250, FLOAT), 6 * (17 + 3 * (12 + 125))),
    (vertices.reduce_columns, (250, 7), 6 * (16 + 11 * (11 + 3 * 7))),
    (vertices.reduce_generic, (250, 7), 6 * (30 + 42 * (24 + 7))),
    (vertices.inverse_deviation, (255,), 6 * (10 + 5 * 22)),  # 43 rows a worker, two at a time
    # popops, MultiSlice and MultiUpdateAdd: 100 indices are 17 a worker; of three parts of a table, 6 of them hit.
    (vertices.gather, (100, 11), 6 * (30 + 17 * (19 + 6 * 2))),
    (vertices.gather, (100, 11, FLOAT), 6 * (30 + 17 * (19 + 11 * 2))),
    (vertices.gather_gradient, (100, 11), 6 * (33 + 100 * (12 + 5 * 3))),
    (vertices.gather_gradient, (100, 11, FLOAT), 6 * (33 + 100 * (11 + 10 * 3))),
    (vertices.gather_gradient, (100, 1), 6 * (33 + 100 * 12)),
    (vertices.gather_gradient, (100, 0), 6 * (33 + 100 * 12)),
    # popops, DynamicSlice: 24 and 2 a 64-bit access, of which 42 halves are 10 and 42 floats 21.
    (vertices.dynamic_slice, (250,), 25 + 6 * (39 + 24 + 2 * 10)),
    (vertices.dynamic_slice, (250, FLOAT), 25 + 6 * (39 + 24 + 2 * 21)),
    (vertices.one_hot, (2.5,), 11 + 74 * 3),
    (vertices.argmax, (250,), 9 + 6 * (27 + 3 * 42)),
    (vertices.rearrange, (1000, 3.125), 587 + 3125),
    (vertices._busiest, (250,), 42),
    (vertices._vectors, (43, HALF), 11),
    (vertices._vectors, (43, FLOAT), 22),
]


@pytest.mark.parametrize(
    "estimate, arguments, by_hand", PINNED, ids=[f"{case[0].__name__}{case[1]}" for case in PINNED]
)
def test_pinned(estimate, arguments, by_hand):
    assert estimate(*arguments) == by_hand


def test_pinned_with_options():
    assert vertices.gather(100, 11, row_split=3) == 6 * (30 + 6 * (19 + 6 * 2) + 11 * 8)
    assert vertices.gather_gradient(100, 11, row_split=3) == 6 * (33 + 34 * (12 + 5 * 3) + 66 * 5)
    assert vertices.gather_gradient(100, 11, FLOAT, row_split=3) == 6 * (33 + 34 * (11 + 10 * 3) + 66 * 5)
    assert vertices.REARRANGE_BYTE == {8: 0.44, 4: 3.125, 2: 5.148} and vertices.REARRANGE_CALL == 587


@pytest.mark.parametrize(
    "estimate",
    [
        lambda n: vertices.binary(n, "add", "half"),
        lambda n: vertices.unary(n, "exp", "half"),
        vertices.gelu,
        vertices.gelu_gradient,
        vertices.select,
        vertices.dropout,
        vertices.scaled_add,
        vertices.copy,
        vertices.argmax,
        vertices.dynamic_slice,
        lambda n: vertices.gather(n, 16),
        lambda n: vertices.gather_gradient(n, 16),
        lambda n: vertices.reduce_rows(8, n),
        lambda n: vertices.reduce_columns(64, n),
        lambda n: vertices.row_values(n, 64),
        lambda n: vertices.add_row_vector(64, n),
    ],
)
def test_more_elements_never_cost_less(estimate):
    costs = [estimate(n) for n in range(1, 400)]
    assert all(a <= b for a, b in zip(costs, costs[1:]))


def test_exchange_payload_and_fragments():
    # 11,398 bytes of mask: 2,850 cycles; 32-byte pieces hide behind the payload.
    assert MK2.receive(11_398) == pytest.approx(2850, rel=1e-3)
    assert MK2.scattered(11_398, 32) == MK2.receive(11_398)
    assert MK2.scattered(1200, 4) == 3 * 300  # pieces of 4 bytes do not: 3 issue slots each
    assert MK2.scattered(0, 32) == 0


def test_target_figures():
    # 64 multiply-adds a cycle and tile: 250.6 TFLOPS half on Mk2, 348.5 on Bow; 7.83 TB/s exchange.
    flops_per_cycle = 2 * 4 * MK2.amp_units_half * MK2.tiles
    assert flops_per_cycle * MK2.clock_hz == pytest.approx(250.6e12, rel=1e-3)
    assert flops_per_cycle * BOW.clock_hz == pytest.approx(348.5e12, rel=1e-3)
    assert MK2.tiles * MK2.exchange_bytes_per_cycle * MK2.clock_hz == pytest.approx(7.83e12, rel=1e-3)
    assert MK2.per_tile(1473) == 2 and ceil(1472 / MK2.tiles) == 1
    # 2 MiB over a neighbour link: about 44 thousand cycles.
    assert MK2.link_cycles(2**21) == pytest.approx(44e3, rel=0.02)
    assert MK2.link_cycles(0) == 0
