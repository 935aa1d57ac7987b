"""Vertex estimators by hand, from the published per-vector numbers (poplibs performance estimators, SDK 3.4 line)."""

from ipu_profiling.cycles import vertices
from ipu_profiling.cycles.target import FLOAT, HALF, MK2

# Call -> its working. 250 elements on the tile are 42 for the busiest of six workers, 11 vectors of four halves or 21
# of two floats. The published formula is in the file of poplibs that stands above.
BY_HAND = [
    # popops, cycles for so many elements in the tables: 3/4 add half, 10/2 div float, 9/4 compare half, 4/4 exp half.
    ("binary(250, 'add', 'half')", "11 + 6 * (26 + 3 * 11)"),
    ("binary(250, 'div', 'float')", "11 + 6 * (29 + 10 * 21)"),
    ("binary(250, 'compare', 'int')", "11 + 6 * (29 + 22 * 11)"),
    ("scalar(250, 'mul', 'half')", "11 + 6 * (20 + 2 * 11)"),
    ("scalar(250, 'logical', 'bool')", "11 + 6 * (20 + 4 * 11)"),
    ("unary(250, 'exp', 'half')", "6 * (33 + 4 * 11)"),
    ("unary(250, 'sqrt', 'float')", "6 * (20 + 10 * 21)"),
    # popops, VectorInner: 13 + 6 (25 + groups of eight halves x (15 + 2 x further rows of the busiest worker)).
    ("add_row_vector(64, 13)", "13 + 6 * (25 + 8 * (15 + 2 * 2))"),
    ("add_row_vector(12, 13)", "13 + 6 * (25 + 2 * (13 + 4 * 2))"),  # no multiple of eight: 13, and 4 a row
    ("add_row_vector(10, 13)", "13 + 6 * (25 + 10 * 9 * 3)"),  # no vectors: 9 an element and row
    ("add_row_vector(10, 13, FLOAT)", "13 + 6 * (25 + 5 * (11 + 3 * 2))"),
    ("add_row_vector(9, 13, FLOAT)", "13 + 6 * (25 + 5 * (11 + 3 * 2))"),
    ("multiply_row_vector(12, 13)", "13 + 6 * (25 + 3 * (9 + 2))"),  # a vector of four halves and row: 1 cycle
    ("multiply_row_vector(10, 13)", "13 + 6 * (25 + 10 * 9 * 3)"),
    ("multiply_row_vector(10, 13, FLOAT)", "13 + 6 * (25 + 5 * (9 + 2))"),
    ("multiply_row_vector(9, 13, FLOAT)", "13 + 6 * (25 + 9 * 9 * 3)"),
    # popops, VectorOuter: 3 rows for the busiest worker, 2 cycles a vector, 7 a row, or 25 where rows are not aligned.
    ("row_values(13, 12)", "11 + 6 * (15 + 3 * (7 + 3 * 2))"),
    ("row_values(13, 10)", "11 + 6 * (15 + 3 * (25 + 3 * 2))"),
    ("row_values(13, 10, FLOAT)", "11 + 6 * (15 + 3 * (7 + 5 * 2))"),
    ("row_values(13, 9, FLOAT)", "11 + 6 * (15 + 3 * (25 + 5 * 2))"),
    # popops, ScaledAdd: 57 + 6 (15 + 6 + 3 x further vectors).
    ("scaled_add(250)", "57 + 6 * (21 + 3 * 10)"),
    ("scaled_add(250, FLOAT)", "57 + 6 * (21 + 3 * 20)"),
    ("scaled_add(1)", "57 + 6 * 21"),
    ("scaled_add(0)", "57 + 6 * 21"),
    # popnn, PerformanceEstimation: GELU 5 a further vector of halves, 10 of floats; its gradient the same.
    ("gelu(250)", "9 + 6 * (22 + 5 + 10 * 5 + 6)"),
    ("gelu(250, FLOAT)", "9 + 6 * (22 + 5 + 20 * 10 + 6)"),
    ("gelu(1)", "9 + 6 * (22 + 5 + 6)"),
    ("gelu(0)", "9 + 6 * (22 + 5 + 6)"),
    ("gelu_gradient(250)", "9 + 6 * (24 + 10 * 5)"),
    ("gelu_gradient(250, FLOAT)", "9 + 6 * (24 + 20 * 10)"),
    ("gelu_gradient(1)", "9 + 6 * 24"),
    ("gelu_gradient(0)", "9 + 6 * 24"),
    ("tanh_gradient(250)", "9 + 6 * (24 + 11 * 3)"),
    ("tanh_gradient(250, FLOAT)", "9 + 6 * (24 + 21 * 3)"),
    # popops, Select, Cast; poplibs' memory copies; poprand, Bernoulli with scale.
    ("select(250)", "6 * (11 + 5 * 42)"),
    ("select_scalars(250)", "6 * (30 + 4 * 42)"),
    ("cast(250, HALF, FLOAT)", "12 + 6 * (19 + 18 + 21)"),
    ("cast(250, FLOAT, HALF)", "12 + 6 * (19 + 18 + 21)"),
    ("cast(250, HALF, HALF)", "12 + 6 * (19 + 18 + 11)"),
    ("cast_integer(250)", "12 + 6 * (19 + 18 + 2 * 42)"),
    ("copy(800)", "288 + 100"),
    ("dropout(250)", "6 + 144 + 2 * 63"),
    ("dropout(250, FLOAT)", "6 + 144 + 2 * 125"),
    # popops, reduction/CycleEstimationFunctions: a run of 250 is 42 a worker and 2 over; two rows are one a worker.
    ("reduce_rows(1, 250)", "6 * (22 + 11 + 2)"),
    ("reduce_rows(1, 251, FLOAT)", "6 * (22 + 21 + 1)"),
    ("reduce_rows(2, 250)", "6 * (17 + 1 * (12 + 63))"),
    ("reduce_rows(13, 250, FLOAT)", "6 * (17 + 3 * (12 + 125))"),
    ("reduce_columns(250, 7)", "6 * (16 + 11 * (11 + 3 * 7))"),
    ("reduce_generic(250, 7)", "6 * (30 + 42 * (24 + 7))"),
    ("inverse_deviation(255)", "6 * (10 + 5 * 22)"),  # 43 rows a worker, two at a time
    # popops, MultiSlice and MultiUpdateAdd: 100 indices are 17 a worker; of three parts of a table, 6 of them hit.
    ("gather(100, 11)", "6 * (30 + 17 * (19 + 6 * 2))"),
    ("gather(100, 11, FLOAT)", "6 * (30 + 17 * (19 + 11 * 2))"),
    ("gather_gradient(100, 11)", "6 * (33 + 100 * (12 + 5 * 3))"),
    ("gather_gradient(100, 11, FLOAT)", "6 * (33 + 100 * (11 + 10 * 3))"),
    ("gather_gradient(100, 1)", "6 * (33 + 100 * 12)"),
    ("gather_gradient(100, 0)", "6 * (33 + 100 * 12)"),
    # popops, DynamicSlice: 24 and 2 a 64-bit access, of which 42 halves are 10 and 42 floats 21.
    ("dynamic_slice(250)", "25 + 6 * (39 + 24 + 2 * 10)"),
    ("dynamic_slice(250, FLOAT)", "25 + 6 * (39 + 24 + 2 * 21)"),
    ("one_hot(2.5)", "11 + 74 * 3"),
    ("argmax(250)", "9 + 6 * (27 + 3 * 42)"),
    ("rearrange(1000, 3.125)", "587 + 3125"),
    ("_busiest(250)", "42"),
    ("_vectors(43, HALF)", "11"),
    ("_vectors(43, FLOAT)", "22"),
    ("gather(100, 11, row_split=3)", "6 * (30 + 6 * (19 + 6 * 2) + 11 * 8)"),
    ("gather_gradient(100, 11, row_split=3)", "6 * (33 + 34 * (12 + 5 * 3) + 66 * 5)"),
    # An exchange: 1,200 bytes in pieces of 4 take 3 issue slots each, in pieces of 32 the time of the payload.
    ("MK2.scattered(1200, 4)", "3 * 300"),
    ("MK2.scattered(1200, 32)", "1200 / 4"),
    ("MK2.scattered(0, 32)", "0"),
]


def test_estimates_by_hand():
    scope = {**vars(vertices), "FLOAT": FLOAT, "HALF": HALF, "MK2": MK2}
    faults = []
    for call, working in BY_HAND:
        cycles = eval(call, scope)
        if cycles != eval(working):
            faults.append(f"{call} is {cycles}, by hand {working}")
    assert not faults, "\n".join(faults)
