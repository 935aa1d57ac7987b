"""The numbers that no source gives: four of them fitted, the others what a source says until a draw says otherwise.

A field is a number, or an array with one number for each of many draws (`uncertainty`): everything that the pipeline
computes from them is then an array, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from ipu_packed_bert.cycles import vertices
from ipu_packed_bert.cycles.layout import Cost


@dataclass(frozen=True)
class Parameters:
    """The fitted parameters (`calibration`), and factors on what the sources say."""

    factor: Any = 1.0  # on everything that happens on chip, in a graph made from PyTorch, as this engine's
    layout: Any = 3.125  # cycles a byte of rearrangements with unknown atoms, 0.44 to 5.148
    replica_seconds: Any = 0.0  # of the host, a call and replica that a process serves (`update`)
    framework: Any = 1.0  # how many times longer all of that on chip takes than in a graph written in PopART
    square: Optional[Any] = None  # as layout, of tensors of slots by slots; None: the same
    products: Any = 1.0  # on the planner's cycles of products with weights
    batched: Any = 1.0  # on those of attention's products
    wide: Any = 1.0  # further, on those with the mask's columns: the planner may split them otherwise
    exchange: Any = 1.0
    sync: Any = 1.0
    links: Any = 1.0  # on the seconds of IPU-Links
    gateways: Any = 1.0  # on those of gateway links
    streaming: Any = 1.0  # on those of streaming memory

    def layout_cycles(self, cost: Cost) -> Any:
        """Of a cost's rearrangements, without the factor."""
        square = self.layout if self.square is None else self.square
        other = cost.layout_bytes - cost.square_bytes
        return cost.layout_calls * vertices.REARRANGE_CALL + other * self.layout + cost.square_bytes * square

    def product_cycles(self, cost: Cost) -> Any:
        """Of a cost's products, without the factor."""
        batched = self.batched * (cost.batched + (self.wide - 1.0) * cost.wide)
        return self.products * (cost.matmul - cost.batched) + batched

    def cycles(self, cost: Cost) -> Any:
        """All of a cost, with the factor."""
        return self.factor * (
            self.product_cycles(cost)
            + cost.vertices
            + self.exchange * cost.exchange
            + self.sync * cost.sync
            + self.layout_cycles(cost)
        )
