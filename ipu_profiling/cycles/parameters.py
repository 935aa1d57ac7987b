"""The five parameters that no source states and that `calibration` fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ipu_profiling.cycles.layout import Cost


@dataclass(frozen=True)
class Parameters:
    """The fitted parameters."""

    # Multiplies all cycles on chip of a graph that is compiled from PyTorch, such as this engine's.
    factor: float = 1.0
    # Cycles per byte of rearrangements with unknown atom size, 0.44 to 5.148.
    layout: float = 3.125
    # Host time per call and replica of a PyTorch process (`update`).
    replica_seconds: float = 0.0
    # Cycles on chip of a PyTorch graph / cycles of the same graph written in PopART.
    framework: float = 1.0
    # Host time per call and replica of a PopART process.
    popart_replica_seconds: float = 0.0

    def cycles(self, cost: Cost) -> float:
        """Return all cycles of a cost."""
        return self.factor * cost.cycles(self.layout)

    def of_popart(self) -> Parameters:
        """Return the parameters of a graph that is written in PopART and runs in a PopART process."""
        return replace(
            self,
            factor=self.factor / self.framework,
            replica_seconds=self.popart_replica_seconds,
        )
