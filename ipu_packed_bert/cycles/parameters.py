"""The four numbers that no source gives and that `calibration` fits."""

from __future__ import annotations

from dataclasses import dataclass

from ipu_packed_bert.cycles.layout import Cost


@dataclass(frozen=True)
class Parameters:
    """The fitted parameters."""

    factor: float = 1.0  # on all cycles on chip, for a graph made from PyTorch as this engine's
    layout: float = 3.125  # cycles per byte of rearrangements with unknown atom size, 0.44 to 5.148
    replica_seconds: float = 0.0  # host time per call and replica that a process serves (`update`)
    framework: float = (
        1.0  # cycles on chip of a PyTorch graph / cycles of the same graph written in PopART
    )

    def cycles(self, cost: Cost) -> float:
        """Return all cycles of a cost."""
        return self.factor * cost.cycles(self.layout)
