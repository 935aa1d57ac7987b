"""The layout of tensors on the tiles, and the cost of rearranging them.

A product writes its result in groups of 16 columns. Permutes and reshapes are views; they cost nothing until an
operation needs the elements in another order. The cost of that differs by a factor of ten with the number of bytes that
stay together (8, 4 or 2), and the case of attention scores and masks in Poplar is not published. Rearrangements are
therefore counted in bytes. Cycles per byte are the model's layout parameter, between those of 8-byte and 2-byte atoms.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil
from operator import add, attrgetter
from typing import Iterable, Tuple

from ipu_profiling.cycles import vertices
from ipu_profiling.cycles.target import Target

_ATOM = 8  # bytes of the largest atom that moves in one access
_GROUP_BYTES = 32  # a group of 16 halves, which products keep together: it is received in one piece
_BLOCK = 64  # columns of a tile's block unless an operation determines them: four groups of 16


@dataclass(frozen=True)
class Cost:
    """Work of one or several operations on the fullest tile, in tile cycles; rearrangements in bytes."""

    matmul: float = 0.0  # products, their reductions and planned operand transforms
    vertices: float = 0.0  # all other computation
    exchange: float = 0.0
    sync: float = 0.0  # syncs and dispatch
    layout_calls: float = 0.0  # rearrangements whose atom size is unknown
    layout_bytes: float = 0.0  # and their bytes on the fullest tile

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(add, _values(self), _values(other)))

    def __mul__(self, factor: float) -> Cost:
        return Cost(*(value * factor for value in _values(self)))

    def layout_cycles(self, cycles_per_byte: float) -> float:
        """Return the cycles of the rearrangements with unknown atom size, at a given layout parameter."""
        return self.layout_calls * vertices.REARRANGE_CALL + self.layout_bytes * cycles_per_byte

    def cycles(self, cycles_per_byte: float) -> float:
        """Return all cycles, at a given layout parameter."""
        return (
            self.matmul
            + self.vertices
            + self.exchange
            + self.sync
            + self.layout_cycles(cycles_per_byte)
        )


_values = attrgetter(*(field.name for field in fields(Cost)))


def total(costs: Iterable[Cost]) -> Cost:
    """Add up costs."""
    result = Cost()
    for cost in costs:
        result = result + cost
    return result


@dataclass(frozen=True)
class TensorLayout:
    """The spread of a tensor over the tiles."""

    origin: int  # the value whose operation chose the layout; equal origins mean equal layouts
    grouped: bool  # in groups of 16 of the last dimension, as products write and read
    permuted: bool = False  # read through a permute since then
    columns: int = _BLOCK  # width of a tile's block of rows


def block(rows: int, columns: int, layout: TensorLayout, target: Target) -> Tuple[int, int]:
    """Return the rows and columns of the fullest tile's block of a [rows, columns] tensor."""
    on_tile = target.per_tile(rows * columns)
    width = min(columns, layout.columns, on_tile)
    return ceil(on_tile / width), width


def step(target: Target, *, vertices_cycles: float = 0.0, exchange_bytes: float = 0.0) -> Cost:
    """Cost one compute set, and the exchange phase before it if bytes move."""
    syncs = 2 if exchange_bytes > 0 else 1
    return Cost(
        vertices=vertices_cycles,
        exchange=target.receive(exchange_bytes),
        sync=target.dispatch_cycles + target.sync_cycles * syncs,
    )


def _aligned_copy(num_bytes: float, target: Target) -> Cost:
    """Cost a copy to other tiles in atoms of 8 bytes or more, between equally grouped layouts."""
    return Cost(
        vertices=vertices.rearrange(num_bytes, vertices.REARRANGE_BYTE[8]),
        exchange=target.receive(num_bytes),
        sync=target.sync_cycles,
    )


def unknown_copy(num_bytes: float, target: Target) -> Cost:
    """Cost a copy in another order; its exchange is known, the size of its atoms is not unless there is one only."""
    if num_bytes <= _ATOM:
        return Cost(exchange=target.receive(num_bytes), sync=target.sync_cycles)
    return Cost(
        exchange=target.scattered(num_bytes, _GROUP_BYTES),
        sync=target.sync_cycles,
        layout_calls=1.0,
        layout_bytes=num_bytes,
    )


def bring(
    elements: int, element_bytes: int, have: TensorLayout, want: TensorLayout, target: Target
) -> Cost:
    """Cost the change of a tensor of `elements`, spread over all tiles, from one layout to another."""
    if (have.origin, have.permuted) == (want.origin, want.permuted):
        return Cost()
    num_bytes = target.per_tile(elements) * element_bytes
    if have.grouped and want.grouped and have.permuted == want.permuted:
        return _aligned_copy(num_bytes, target)
    return unknown_copy(num_bytes, target)
