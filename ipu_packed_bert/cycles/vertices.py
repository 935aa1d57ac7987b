"""Cycles of single operations on one tile, as small pure functions.

Source, unless a function says otherwise: poplibs' performance estimators, SDK 3.4 line (popops, popnn, poprand),
restated. Every function returns TILE cycles; `n` is the number of elements on the fullest tile, `w` = ceil(n / 6) that
of its busiest worker, and a worker instruction takes 6 tile cycles because six workers take turns.
A multi-vertex costs frame + 6 * (overhead + loop(w)); where the estimators give a worker's cycles, the functions here
give six times as many.
"""

from __future__ import annotations

from math import ceil, floor
from typing import Dict, NamedTuple, Tuple

from ipu_packed_bert.cycles.target import FLOAT, HALF

_WORKERS = 6


def busiest(n: float) -> int:
    """Elements of the busiest of the six workers."""
    return ceil(n / _WORKERS)


def vectors(w: float, element_bytes: int) -> int:
    """64-bit accesses for w elements."""
    return ceil(w * element_bytes / 8)


class _Loop(NamedTuple):
    """Worker cycles of an inner loop: `cycles` for every `elements`."""

    cycles: float
    elements: int

    def __call__(self, w: float) -> float:
        return self.cycles * ceil(w / self.elements)


# (operation, type) -> loop. Types: half, float, int, bool. Both operands full.
BINARY: Dict[Tuple[str, str], _Loop] = {
    ("add", "half"): _Loop(3, 4),
    ("add", "float"): _Loop(3, 2),
    ("add", "int"): _Loop(7, 1),
    ("mul", "half"): _Loop(3, 4),
    ("mul", "float"): _Loop(3, 2),
    ("mul", "int"): _Loop(7, 1),
    ("div", "half"): _Loop(21, 4),
    ("div", "float"): _Loop(10, 2),
    ("div", "int"): _Loop(40, 1),
    ("max", "half"): _Loop(4, 4),
    ("max", "float"): _Loop(3, 2),
    ("max", "int"): _Loop(7, 1),
    ("compare", "half"): _Loop(9, 4),
    ("compare", "float"): _Loop(14, 4),
    ("compare", "int"): _Loop(22, 4),
    ("compare", "bool"): _Loop(6, 4),
    ("logical", "bool"): _Loop(5, 4),
}
# The same with one operand a scalar.
SCALAR: Dict[Tuple[str, str], _Loop] = {
    ("add", "half"): _Loop(2, 4),
    ("add", "float"): _Loop(2, 2),
    ("add", "int"): _Loop(6, 1),
    ("mul", "half"): _Loop(2, 4),
    ("mul", "float"): _Loop(2, 2),
    ("mul", "int"): _Loop(6, 1),
    ("div", "half"): _Loop(8, 2),
    ("div", "float"): _Loop(6, 2),
    ("div", "int"): _Loop(40, 1),
    ("max", "half"): _Loop(3, 4),
    ("max", "float"): _Loop(3, 2),
    ("max", "int"): _Loop(6, 1),
    ("compare", "half"): _Loop(8, 4),
    ("compare", "float"): _Loop(12, 4),
    ("compare", "int"): _Loop(16, 4),
    ("compare", "bool"): _Loop(5, 4),
    ("logical", "bool"): _Loop(4, 4),
}
UNARY: Dict[Tuple[str, str], _Loop] = {
    ("exp", "half"): _Loop(4, 4),
    ("exp", "float"): _Loop(6, 2),
    ("tanh", "half"): _Loop(4, 4),
    ("tanh", "float"): _Loop(12, 2),
    ("log", "half"): _Loop(4, 4),
    ("log", "float"): _Loop(12, 2),
    ("reciprocal", "half"): _Loop(15, 4),
    ("reciprocal", "float"): _Loop(6, 2),
    ("sqrt", "half"): _Loop(23, 4),
    ("sqrt", "float"): _Loop(10, 2),
    ("square", "half"): _Loop(2, 4),
    ("square", "float"): _Loop(2, 2),
}


def binary(n: float, operation: str, kind: str) -> float:
    """Elementwise, with both operands full, not in place."""
    overhead = 26 if kind == "half" else 29
    return 11 + 6 * (overhead + BINARY[operation, kind](busiest(n)))


def scalar(n: float, operation: str, kind: str) -> float:
    """Elementwise with one value for all elements."""
    return 11 + 6 * (20 + SCALAR[operation, kind](busiest(n)))


def unary(n: float, operation: str, kind: str) -> float:
    start = 33 if operation in ("exp", "tanh", "log") else 20
    return 6 * (start + UNARY[operation, kind](busiest(n)))


def add_row_vector(length: int, repeats: int, element_bytes: int = HALF) -> float:
    """Count the cycles of adding a vector to each of `repeats` rows, such as a bias or a row of a padding mask."""
    if element_bytes == FLOAT:
        return 13 + 6 * (25 + ceil(length / 2) * (11 + 3 * (ceil(repeats / _WORKERS) - 1)))
    if length % 4:
        return 13 + 6 * (25 + length * 9 * ceil(repeats / _WORKERS))
    group = 15 if length % 8 == 0 else 13
    per_row = 2 if length % 8 == 0 else 4
    return 13 + 6 * (25 + ceil(length / 8) * (group + per_row * (ceil(repeats / _WORKERS) - 1)))


def multiply_row_vector(length: int, repeats: int, element_bytes: int = HALF) -> float:
    """Each of `repeats` rows times a vector of `length`, not in place, pipelined: one cycle per vector and row."""
    width = 8 // element_bytes
    if length % width:
        return 13 + 6 * (25 + length * 9 * ceil(repeats / _WORKERS))
    return 13 + 6 * (25 + ceil(length / width) * (9 + (ceil(repeats / _WORKERS) - 1)))


def row_values(rows: int, columns: int, element_bytes: int = HALF) -> float:
    """One value for each row (x - row maximum, x * row scale) over a [rows, columns] block of the tile."""
    per_row = 7 if columns * element_bytes % 8 == 0 else 25
    return 11 + 6 * (15 + ceil(rows / _WORKERS) * (per_row + vectors(columns, element_bytes) * 2))


def scaled_add(n: float, element_bytes: int = HALF) -> float:
    """Count the cycles of A += s * B: gradient accumulation, momentum."""
    return 57 + 6 * (15 + 6 + 3 * max(0, vectors(busiest(n), element_bytes) - 1))


def gelu(n: float, element_bytes: int = HALF) -> float:
    """Count the cycles of GELU (tanh form, which PopTorch uses for both forms)."""
    per_vector = 5 if element_bytes == HALF else 10
    return 9 + 6 * (22 + 5 + max(0, vectors(busiest(n), element_bytes) - 1) * per_vector + 6)


def gelu_gradient(n: float, element_bytes: int = HALF) -> float:
    """Five worker cycles per half vector (9 in the same table is SWISH's)."""
    per_vector = 5 if element_bytes == HALF else 10
    return 9 + 6 * (24 + max(0, vectors(busiest(n), element_bytes) - 1) * per_vector)


def tanh_gradient(n: float, element_bytes: int = HALF) -> float:
    return 9 + 6 * (24 + vectors(busiest(n), element_bytes) * 3)


def select(n: float) -> float:
    """where(condition, a, b), all three full: no vector path."""
    return 6 * (11 + 5 * busiest(n))


def select_scalars(n: float) -> float:
    """where(condition, one value, another value)."""
    return 6 * (30 + 4 * busiest(n))


def cast(n: float, from_bytes: int, to_bytes: int) -> float:
    """Between half and float: one 64-bit store a cycle."""
    return 12 + 6 * (19 + 18 + vectors(busiest(n), max(from_bytes, to_bytes)))


def cast_integer(n: float) -> float:
    """Between bool or int and a floating type: 2 cycles an element."""
    return 12 + 6 * (19 + 18 + 2 * busiest(n))


def copy(num_bytes: float) -> float:
    """Within the tile's memory, aligned: 8 bytes a cycle after the call of the six workers."""
    return 288 + num_bytes / 8


def dropout(n: float, element_bytes: int = HALF) -> float:
    """Mask and scale in one vertex; the backward pass runs it again from the saved seed."""
    return 6 + 144 + 2 * ceil(n / (4 if element_bytes == HALF else 2))


def reduce_rows(rows: float, run: float, element_bytes: int = HALF) -> float:
    """Sum or maximum of `rows` contiguous runs of `run` elements each, one result a run, on the tile."""
    per_worker = ceil(rows / _WORKERS)
    if rows <= 1:
        return 6 * (22 + vectors(ceil(run / _WORKERS), element_bytes) + run % (8 // element_bytes))
    return 6 * (17 + per_worker * (12 + vectors(run, element_bytes)))


def reduce_columns(outputs: float, strides: float) -> float:
    """Column sums of a [strides, outputs] block: bias gradients, gamma and beta of a LayerNorm (half)."""
    return 6 * (16 + ceil(ceil(outputs / _WORKERS) / 4) * (11 + 3 * strides))


def reduce_generic(outputs: float, strides: float) -> float:
    return 6 * (30 + ceil(outputs / _WORKERS) * (24 + strides))


def inverse_deviation(rows: float) -> float:
    """1 / sigma of the rows on the tile, float."""
    return 6 * (10 + 5 * ceil(busiest(rows) / 2))


def gather(
    indices: float, row_elements: float, element_bytes: int = HALF, *, row_split: int = 1
) -> float:
    """Multi-slice: the tile holds one of `row_split` parts of a table's rows and looks at all indices."""
    inside = ceil(indices / row_split / _WORKERS)
    outside = ceil(indices / _WORKERS) - inside
    half_vectors = ceil(row_elements / 2) if element_bytes == HALF else ceil(row_elements)
    return 6 * (30 + inside * (19 + half_vectors * 2) + outside * 8)


def gather_gradient(
    indices: float, row_elements: float, element_bytes: int = HALF, *, row_split: int = 1
) -> float:
    """Multi-update-add: no two workers may share a row, so each goes through all indices of the tile."""
    inside = ceil(indices / row_split)
    outside = ceil(indices) - inside
    start = 12 if element_bytes == HALF else 11
    return 6 * (
        33 + inside * (start + max(0, ceil(row_elements * element_bytes / 4) - 1) * 3) + outside * 5
    )


def dynamic_slice(elements: float, element_bytes: int = HALF) -> float:
    """Take or put a slice at a position known only at run time: pipeline stashes, serial loops."""
    return 25 + 6 * (39 + 24 + 2 * floor(busiest(elements) * element_bytes / 8))


def one_hot(indices: float) -> float:
    """Count the cycles of turning indices on the tile into rows of zeros with a one."""
    return 11 + 74 * ceil(indices)


def argmax(n: float) -> float:
    return 9 + 6 * (27 + 3 * busiest(n))


# Rearranging data inside a tile: poplibs' regression over ten thousand random cases, 587 + bytes * factor.
REARRANGE_CALL = 587
REARRANGE_BYTE = {8: 0.44, 4: 3.125, 2: 5.148}  # cycles a byte, by the size of the contiguous atoms


def rearrange(num_bytes: float, cycles_per_byte: float) -> float:
    return REARRANGE_CALL + num_bytes * cycles_per_byte
