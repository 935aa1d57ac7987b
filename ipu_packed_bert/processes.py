"""How many processes a run has: one, or those that poprun started."""

from __future__ import annotations

import os
from typing import Mapping


def refuse_torchrun(environment: Mapping[str, str] = os.environ) -> None:
    """Raises ValueError in a process that torchrun, or a launcher like it, started beside others.

    Each of them would make the whole run. poprun's processes pass, as the IPU engine shares the work among them.
    """
    size = environment.get("WORLD_SIZE", "1")
    if size != "1" and not any(name.startswith("POPDIST_") for name in environment):
        raise ValueError(
            f"WORLD_SIZE is {size}: every process of torchrun would make this whole run for itself; "
            "start it once, without torchrun"
        )
