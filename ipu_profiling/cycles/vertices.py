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

from ipu_profiling.cycles.target import FLOAT, HALF

_WORKERS = 6  # hardware threads of a tile, which take turns


def _busiest(n: float) -> int:
    """Return the elements of the busiest of the six workers."""
    return ceil(n / _WORKERS)


def _vectors(w: float, element_bytes: int) -> int:
    """Count the 64-bit accesses to `w` elements."""
    return ceil(w * element_bytes / 8)


class _Loop(NamedTuple):
    """An inner loop: it takes `cycles` worker cycles for every `elements` elements."""

    cycles: int
    elements: int

    def __call__(self, w: float) -> float:
        return self.cycles * ceil(w / self.elements)


def _loops(table: str) -> Dict[Tuple[str, str], _Loop]:
    """Read a table of loops, each written as cycles/elements, into a dictionary by (operation, type)."""
    head, *lines = table.strip().splitlines()
    kinds = head.split()[1:]
    loops = {}
    for line in lines:
        operation, *cells = line.split()
        for kind, cell in zip(kinds, cells):
            if cell != "-":
                cycles, elements = cell.split("/")
                loops[operation, kind] = _Loop(int(cycles), int(elements))
    return loops


# Inner loops by operation and type, as worker cycles / elements; "-": no such vertex. Both operands are full tensors.
BINARY = _loops(
    """
    operation  half  float   int  bool
    add         3/4    3/2   7/1     -
    mul         3/4    3/2   7/1     -
    div        21/4   10/2  40/1     -
    max         4/4    3/2   7/1     -
    compare     9/4   14/4  22/4   6/4
    logical       -      -     -   5/4
    """
)
# The same with a scalar as one operand.
SCALAR = _loops(
    """
    operation  half  float   int  bool
    add         2/4    2/2   6/1     -
    mul         2/4    2/2   6/1     -
    div         8/2    6/2  40/1     -
    max         3/4    3/2   6/1     -
    compare     8/4   12/4  16/4   5/4
    logical       -      -     -   4/4
    """
)
UNARY = _loops(
    """
    operation   half  float
    exp          4/4    6/2
    tanh         4/4   12/2
    log          4/4   12/2
    reciprocal  15/4    6/2
    sqrt        23/4   10/2
    square       2/4    2/2
    """
)


def binary(n: float, operation: str, kind: str) -> float:
    """Count the cycles of an elementwise operation on two full operands, not in place."""
    overhead = 26 if kind == "half" else 29
    loop = BINARY[operation, kind]
    return 11 + 6 * (overhead + loop(_busiest(n)))


def scalar(n: float, operation: str, kind: str) -> float:
    """Count the cycles of an elementwise operation with one value for all elements."""
    loop = SCALAR[operation, kind]
    return 11 + 6 * (20 + loop(_busiest(n)))


def unary(n: float, operation: str, kind: str) -> float:
    """Count the cycles of an elementwise function."""
    start = 33 if operation in ("exp", "tanh", "log") else 20
    loop = UNARY[operation, kind]
    return 6 * (start + loop(_busiest(n)))


def add_row_vector(length: int, repeats: int, element_bytes: int = HALF) -> float:
    """Count the cycles of adding a vector to each of `repeats` rows, such as a bias or a row of a padding mask."""
    rows = ceil(repeats / _WORKERS)
    if element_bytes == FLOAT:
        loop = ceil(length / 2) * (11 + 3 * (rows - 1))
    elif length % 4:  # no vectors
        loop = length * 9 * rows
    elif length % 8:
        loop = ceil(length / 8) * (13 + 4 * (rows - 1))
    else:
        loop = ceil(length / 8) * (15 + 2 * (rows - 1))
    return 13 + 6 * (25 + loop)


def multiply_row_vector(length: int, repeats: int, element_bytes: int = HALF) -> float:
    """Count the cycles of multiplying each of `repeats` rows by a vector, not in place.

    The loop is pipelined: one cycle per 64-bit access and row.
    """
    rows = ceil(repeats / _WORKERS)
    width = 8 // element_bytes
    if length % width:  # no vectors
        return 13 + 6 * (25 + length * 9 * rows)
    return 13 + 6 * (25 + ceil(length / width) * (9 + (rows - 1)))


def row_values(rows: int, columns: int, element_bytes: int = HALF) -> float:
    """Count the cycles of applying one value per row (x - row maximum, x * scale) to a [rows, columns] block."""
    aligned = columns * element_bytes % 8 == 0
    per_row = 7 if aligned else 25
    loop = ceil(rows / _WORKERS) * (per_row + _vectors(columns, element_bytes) * 2)
    return 11 + 6 * (15 + loop)


def scaled_add(n: float, element_bytes: int = HALF) -> float:
    """Count the cycles of A += s * B: gradient accumulation, momentum."""
    further_vectors = max(0, _vectors(_busiest(n), element_bytes) - 1)
    return 57 + 6 * (15 + 6 + 3 * further_vectors)


def gelu(n: float, element_bytes: int = HALF) -> float:
    """Count the cycles of GELU (tanh form, which PopTorch uses for both forms)."""
    per_vector = 5 if element_bytes == HALF else 10
    further_vectors = max(0, _vectors(_busiest(n), element_bytes) - 1)
    return 9 + 6 * (22 + 5 + further_vectors * per_vector + 6)


def gelu_gradient(n: float, element_bytes: int = HALF) -> float:
    """Count the cycles of GELU's gradient: 5 worker cycles per half vector (the 9 in the same table are SWISH's)."""
    per_vector = 5 if element_bytes == HALF else 10
    further_vectors = max(0, _vectors(_busiest(n), element_bytes) - 1)
    return 9 + 6 * (24 + further_vectors * per_vector)


def tanh_gradient(n: float, element_bytes: int = HALF) -> float:
    """Count the cycles of the gradient of tanh."""
    return 9 + 6 * (24 + _vectors(_busiest(n), element_bytes) * 3)


def select(n: float) -> float:
    """Count the cycles of where(condition, a, b) with three full operands, which has no vector path."""
    return 6 * (11 + 5 * _busiest(n))


def select_scalars(n: float) -> float:
    """Count the cycles of where(condition, scalar, scalar)."""
    return 6 * (30 + 4 * _busiest(n))


def cast(n: float, from_bytes: int, to_bytes: int) -> float:
    """Count the cycles of a conversion between half and float: one 64-bit store a cycle."""
    stores = _vectors(_busiest(n), max(from_bytes, to_bytes))
    return 12 + 6 * (19 + 18 + stores)


def cast_integer(n: float) -> float:
    """Count the cycles of a conversion between bool or int and a floating type: 2 cycles an element."""
    return 12 + 6 * (19 + 18 + 2 * _busiest(n))


def copy(num_bytes: float) -> float:
    """Count the cycles of an aligned copy within a tile: 8 bytes a cycle after the call of the six workers."""
    return 288 + num_bytes / 8


def dropout(n: float, element_bytes: int = HALF) -> float:
    """Count the cycles of dropout, mask and scale in one vertex; the backward pass repeats it from the saved seed."""
    vector = 4 if element_bytes == HALF else 2
    return 6 + 144 + 2 * ceil(n / vector)


def reduce_rows(rows: float, run: float, element_bytes: int = HALF) -> float:
    """Count the cycles of the sum or maximum of each of `rows` contiguous runs of `run` elements."""
    if rows <= 1:
        rest = run % (8 // element_bytes)
        return 6 * (22 + _vectors(_busiest(run), element_bytes) + rest)
    return 6 * (17 + _busiest(rows) * (12 + _vectors(run, element_bytes)))


def reduce_columns(outputs: float, strides: float) -> float:
    """Count the cycles of the column sums of a [strides, outputs] block of halves.

    Gradients of a bias, and of gamma and beta of a LayerNorm, are such sums.
    """
    vectors_of_outputs = ceil(_busiest(outputs) / 4)
    return 6 * (16 + vectors_of_outputs * (11 + 3 * strides))


def reduce_generic(outputs: float, strides: float) -> float:
    """Count the cycles of the column sums of a [strides, outputs] block without a vector path."""
    return 6 * (30 + _busiest(outputs) * (24 + strides))


def inverse_deviation(rows: float) -> float:
    """Count the cycles of 1 / sigma of the rows on the tile, in float."""
    return 6 * (10 + 5 * ceil(_busiest(rows) / 2))


def gather(
    indices: float, row_elements: float, element_bytes: int = HALF, *, row_split: int = 1
) -> float:
    """Count the cycles of a multi-slice: the tile holds one of `row_split` parts of the table and reads all indices."""
    hits = ceil(indices / row_split / _WORKERS)
    misses = _busiest(indices) - hits
    half_vectors = ceil(row_elements / 2) if element_bytes == HALF else ceil(row_elements)
    return 6 * (30 + hits * (19 + half_vectors * 2) + misses * 8)


def gather_gradient(
    indices: float, row_elements: float, element_bytes: int = HALF, *, row_split: int = 1
) -> float:
    """Count the cycles of a multi-update-add.

    No two workers may share a row, so each of them goes through all indices of the tile.
    """
    hits = ceil(indices / row_split)
    misses = ceil(indices) - hits
    start = 12 if element_bytes == HALF else 11
    further_words = max(0, ceil(row_elements * element_bytes / 4) - 1)
    return 6 * (33 + hits * (start + further_words * 3) + misses * 5)


def dynamic_slice(elements: float, element_bytes: int = HALF) -> float:
    """Count the cycles of reading or writing a slice at a run-time position: pipeline stashes, serial loops."""
    accesses = floor(_busiest(elements) * element_bytes / 8)
    return 25 + 6 * (39 + 24 + 2 * accesses)


def one_hot(indices: float) -> float:
    """Count the cycles of turning indices on the tile into rows of zeros with a one."""
    return 11 + 74 * ceil(indices)


def argmax(n: float) -> float:
    """Count the cycles of the position of the largest element."""
    return 9 + 6 * (27 + 3 * _busiest(n))


# Rearranging data inside a tile: poplibs' regression over ten thousand random cases, 587 + bytes * factor.
REARRANGE_CALL = 587  # cycles
# Cycles a byte, by the bytes of the contiguous atoms.
REARRANGE_BYTE = {8: 0.44, 4: 3.125, 2: 5.148}


def rearrange(num_bytes: float, cycles_per_byte: float) -> float:
    """Count the cycles of a rearrangement inside a tile."""
    return REARRANGE_CALL + num_bytes * cycles_per_byte
