"""Where a tensor's elements lie, and what it costs to rearrange them.

A product writes its result in groups of 16 columns. Permutes and reshapes are views; they cost nothing until an
operation needs the elements in another order. How much that costs depends on how many bytes stay together (8, 4 or 2),
by a factor of ten, and which case Poplar has for attention scores and masks is not published. So a rearrangement is
counted in bytes, and cycles per byte is the model's layout parameter: its lower bound is 8-byte atoms, its upper bound
2-byte atoms.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil
from operator import add, attrgetter
from typing import Iterable, Tuple

from ipu_packed_bert.cycles import vertices
from ipu_packed_bert.cycles.target import Target

_ATOM = 8  # bytes of the largest atom that moves in one access
_GROUP_BYTES = 32  # a group of 16 halves, which products keep together: it arrives in one piece
_BLOCK = 64  # columns of a tile's block where no operation fixed it: four groups of 16


@dataclass(frozen=True)
class Cost:
    """Work of one or several operations on the fullest tile, in tile cycles; rearrangements in bytes."""

    matmul: float = 0.0  # products, their reductions and planned operand transforms
    vertices: float = 0.0  # everything else that computes
    exchange: float = 0.0
    sync: float = 0.0  # syncs and dispatch
    layout_calls: float = 0.0  # rearrangements whose atom size is unknown
    layout_bytes: float = 0.0  # and their bytes on the fullest tile

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(add, _values(self), _values(other)))

    def __mul__(self, factor: float) -> Cost:
        return Cost(*(value * factor for value in _values(self)))

    def layout_cycles(self, cycles_per_byte: float) -> float:
        return self.layout_calls * vertices.REARRANGE_CALL + self.layout_bytes * cycles_per_byte

    def cycles(self, cycles_per_byte: float) -> float:
        """All of it, at a given layout parameter."""
        return (
            self.matmul
            + self.vertices
            + self.exchange
            + self.sync
            + self.layout_cycles(cycles_per_byte)
        )


_values = attrgetter(*(field.name for field in fields(Cost)))


def total(costs: Iterable[Cost]) -> Cost:
    result = Cost()
    for cost in costs:
        result = result + cost
    return result


@dataclass(frozen=True)
class TensorLayout:
    """How a tensor is spread over the tiles."""

    origin: int  # the value for which it was chosen; equal origins mean equal layouts
    grouped: bool  # in groups of 16 of the last dimension, as products write and read
    permuted: bool = False  # read through a permute since then
    columns: int = _BLOCK  # width of a tile's block of rows


def block(rows: int, columns: int, layout: TensorLayout, target: Target) -> Tuple[int, int]:
    """(rows, columns) of the fullest tile's block of a [rows, columns] tensor."""
    on_tile = target.per_tile(rows * columns)
    width = min(columns, layout.columns, on_tile)
    return ceil(on_tile / width), width


def step(target: Target, *, vertices_cycles: float = 0.0, exchange_bytes: float = 0.0) -> Cost:
    """One compute set, and the exchange phase before it where bytes move."""
    moves = exchange_bytes > 0
    return Cost(
        vertices=vertices_cycles,
        exchange=target.receive(exchange_bytes),
        sync=target.dispatch_cycles + target.sync_cycles * (2 if moves else 1),
    )


def _aligned_copy(num_bytes: float, target: Target) -> Cost:
    """To other tiles in atoms of 8 bytes or more: both sides are grouped alike."""
    return Cost(
        vertices=vertices.rearrange(num_bytes, vertices.REARRANGE_BYTE[8]),
        exchange=target.receive(num_bytes),
        sync=target.sync_cycles,
    )


def unknown_copy(num_bytes: float, target: Target) -> Cost:
    """Into another order: the exchange is known; the size of the atoms is not, except for a single atom."""
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
