"""Accounts of files of examples: what came in, what goes out, and every reason for the difference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict


@dataclass(frozen=True)
class Account:
    """Counts of the records, tokens or labels of a file; `goes_out` is counted independently of the others."""

    came_in: int
    goes_out: int
    left_out: Dict[str, int]  # number by reason

    def __post_init__(self) -> None:
        assert self.came_in == self.goes_out + sum(self.left_out.values()), self

    def text(self, unit: str) -> str:
        """Describe the account; ``unit`` is a plural such as "records"."""
        reasons = [f"{count:,} {reason}" for reason, count in self.left_out.items() if count]
        if not reasons:
            return f"{self.came_in:,} {unit}"
        return f"{self.goes_out:,} of {self.came_in:,} {unit} (not {', '.join(reasons)})"
