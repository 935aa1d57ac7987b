"""Accounts of builds, conversions and tasks: what came in, what goes out, and every reason for the difference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict

from pack_data.reading.words import counted


@dataclass(frozen=True)
class Account:
    """Counts of the records, tokens or labels of a file; `goes_out` is counted independently of the others.

    Raises ValueError if they do not add up.
    """

    came_in: int
    goes_out: int
    left_out: Dict[str, int]  # number by reason

    def __post_init__(self) -> None:
        if self.came_in != self.goes_out + sum(self.left_out.values()):
            raise ValueError(f"the counts do not add up: {self}")

    def text(self, unit: str) -> str:
        """Describe the account; ``unit`` is a plural such as "records"."""
        came_in = counted(self.came_in, unit[:-1])
        reasons = [f"{count:,} {reason}" for reason, count in self.left_out.items() if count]
        if not reasons:
            return came_in
        return f"{self.goes_out:,} of {came_in} (not {', '.join(reasons)})"
