"""Vertex estimators against the published per-vector numbers (poplibs performance estimators, SDK 3.4 line)."""

from math import ceil

import pytest

from ipu_packed_bert.cycles import exchange, vertices
from ipu_packed_bert.cycles.target import BOW, FLOAT, HALF, MK2, get_target

LARGE = 6 * 4 * 1000  # elements on a tile: 1000 half vectors for each of the six workers


def slope(function, step):
    """Tile cycles that `step` more elements cost, once the fixed part is paid."""
    return function(LARGE + step) - function(LARGE)


@pytest.mark.parametrize(
    "operation, kind, cycles, elements",
    [
        ("add", "half", 3, 4),
        ("add", "float", 3, 2),
        ("mul", "half", 3, 4),
        ("div", "half", 21, 4),
        ("div", "float", 10, 2),
        ("max", "half", 4, 4),
        ("max", "float", 3, 2),
        ("add", "int", 7, 1),
        ("compare", "half", 9, 4),
        ("compare", "float", 14, 4),
        ("compare", "int", 22, 4),
        ("logical", "bool", 5, 4),
    ],
)
def test_binary_costs_the_published_cycles_a_vector(operation, kind, cycles, elements):
    # One more vector for every worker: 6 workers x `elements`, in 6 x `cycles` tile cycles.
    assert slope(lambda n: vertices.binary(n, operation, kind), 6 * elements) == 6 * cycles


@pytest.mark.parametrize(
    "operation, kind, cycles, elements",
    [
        ("add", "half", 2, 4),
        ("mul", "float", 2, 2),
        ("div", "half", 8, 2),
        ("div", "float", 6, 2),
        ("compare", "half", 8, 4),
        ("compare", "int", 16, 4),
        ("max", "half", 3, 4),
        ("logical", "bool", 4, 4),
    ],
)
def test_scalar_operand(operation, kind, cycles, elements):
    assert slope(lambda n: vertices.scalar(n, operation, kind), 6 * elements) == 6 * cycles


@pytest.mark.parametrize(
    "operation, kind, cycles, elements",
    [
        ("exp", "half", 4, 4),
        ("exp", "float", 6, 2),
        ("tanh", "float", 12, 2),
        ("sigmoid", "half", 6, 4),
        ("log", "half", 4, 4),
        ("reciprocal", "half", 15, 4),
        ("sqrt", "float", 10, 2),
        ("rsqrt", "half", 19, 4),
        ("erf", "half", 13, 1),
    ],
)
def test_unary(operation, kind, cycles, elements):
    assert slope(lambda n: vertices.unary(n, operation, kind), 6 * elements) == 6 * cycles


def test_frames_by_hand():
    # 240 halves: 40 for each worker, 10 vectors. 11 + 6 (26 + 3 * 10).
    assert vertices.binary(240, "add", "half") == 11 + 6 * (26 + 30)
    assert vertices.binary(240, "add", "float") == 11 + 6 * (29 + 60)
    assert vertices.scalar(240, "mul", "half") == 11 + 6 * (20 + 20)
    # Gradient accumulation: 57 + 6 (15 + 6 + 3 (10 - 1)); a float gradient into a half accumulator takes 5 a vector.
    assert vertices.scaled_add(240) == 57 + 6 * (21 + 27)
    assert vertices.scaled_add(240, mixed=True) == 57 + 6 * (21 + 45)
    # GELU, both passes: 5 a vector of four halves, 10 a vector of two floats (popnn's table; SWISH's gradient takes 9).
    assert vertices.gelu(240) == 9 + 6 * (22 + 5 + 9 * 5 + 6)
    assert vertices.gelu_gradient(240) == 9 + 6 * (24 + 9 * 5)
    assert vertices.gelu_gradient(240, FLOAT) == 9 + 6 * (24 + 19 * 10)
    assert vertices.select(240) == 6 * (11 + 5 * 40)
    assert vertices.cast(240, HALF, FLOAT) == 12 + 6 * (37 + 20)
    assert vertices.dropout(240) == 150 + 2 * 60
    assert vertices.one_hot(3) == 11 + 74 * 3


def test_bias_over_rows_takes_two_cycles_for_eight_halves():
    more_rows = vertices.add_row_vector(64, 66) - vertices.add_row_vector(64, 60)  # one more row for every worker
    assert more_rows == 6 * 64 / 8 * 2
    assert vertices.add_row_vector(63, 60) > 3 * vertices.add_row_vector(64, 60)  # an odd width has no vector path


def test_gather_and_its_gradient_by_hand():
    # 1024 indices of one unsplit table with 12 halves of each row on the tile.
    # Forward: 171 indices a worker, each 19 + 6 vectors x 2. Gradient: every worker walks through all 1024.
    assert vertices.gather(1024, 12) == 6 * (30 + 171 * (19 + 12))
    assert vertices.gather_gradient(1024, 12) == 6 * (33 + 1024 * (12 + 5 * 3))
    # Sixteen parts of the table: a sixteenth of the indices hit, the others are looked at and left out.
    assert vertices.gather(1024, 12, row_split=16) == 6 * (30 + 11 * 31 + 160 * 8)


def test_rearranging_a_score_tensor_costs_ten_times_more_in_two_byte_atoms():
    # One attention-score tensor of BERT-large at 512, micro-batch 2: 5,699 halves on a tile.
    scores = 2 * 5699
    costs = {atom: vertices.rearrange(scores, factor) for atom, factor in vertices.REARRANGE_BYTE.items()}
    assert costs[8] == pytest.approx(5.6e3, rel=0.01)
    assert costs[4] == pytest.approx(36.2e3, rel=0.01)
    assert costs[2] == pytest.approx(59.3e3, rel=0.01)


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
        vertices.fill,
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
    # 11,398 bytes of mask: 2,850 cycles; half of that in a pair of tiles; 32-byte pieces hide behind the payload.
    assert exchange.receive(11_398, MK2) == pytest.approx(2850, rel=1e-3)
    assert exchange.receive(11_398, MK2, shared_by_pair=True) == pytest.approx(1425, rel=1e-3)
    assert exchange.scattered(11_398, 32, MK2) == exchange.receive(11_398, MK2)
    assert exchange.scattered(1200, 4, MK2) == 3 * 300  # pieces of 4 bytes do not: 3 issue slots each
    assert exchange.scattered(0, 32, MK2) == 0


def test_target_figures():
    # 64 multiply-adds a cycle and tile: 250.6 TFLOPS half on Mk2, 348.5 on Bow; 7.83 TB/s exchange.
    assert 2 * MK2.peak_macs_per_cycle * MK2.clock_hz == pytest.approx(250.6e12, rel=1e-3)
    assert 2 * BOW.peak_macs_per_cycle * BOW.clock_hz == pytest.approx(348.5e12, rel=1e-3)
    assert MK2.tiles * MK2.exchange_bytes_per_cycle * MK2.clock_hz == pytest.approx(7.83e12, rel=1e-3)
    assert MK2.per_tile(1473) == 2 and ceil(1472 / MK2.tiles) == 1
    # 2 MiB over a neighbour link: about 44 thousand cycles.
    assert MK2.link_cycles(2**21) == pytest.approx(44e3, rel=0.02)
    assert MK2.link_cycles(0) == 0
    with pytest.raises(ValueError, match="--target mk3"):
        get_target("mk3")
