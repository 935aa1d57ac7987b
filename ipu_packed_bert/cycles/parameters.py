"""The four parameters that no source states and that `calibration` fits."""

from __future__ import annotations

from dataclasses import dataclass

from ipu_packed_bert.cycles.layout import Cost


@dataclass(frozen=True)
class Parameters:
    """The fitted parameters."""

    # Multiplies all cycles on chip of a graph that is compiled from PyTorch, such as this engine's.
    factor: float = 1.0
    # Cycles per byte of rearrangements with unknown atom size, 0.44 to 5.148.
    layout: float = 3.125
    # Host time per call and replica of a process (`update`).
    replica_seconds: float = 0.0
    # Cycles on chip of a PyTorch graph / cycles of the same graph written in PopART.
    framework: float = 1.0

    def cycles(self, cost: Cost) -> float:
        """Return all cycles of a cost."""
        return self.factor * cost.cycles(self.layout)
