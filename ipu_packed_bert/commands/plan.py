"""Print what a configuration would run and where, without a device; exit status 1 if it does not fit."""

from __future__ import annotations

import sys
from typing import Optional, Sequence

from ipu_packed_bert.commands.run_options import train


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Plan a configuration of pre-training or fine-tuning."""
    arguments = sys.argv[1:] if argv is None else argv
    if "--search" in arguments:
        raise ValueError(
            "--search: plan no longer searches; change batch and placement with --set, and compare the plans or, with "
            "packed-bert report, their speed"
        )
    return train("plan", arguments)
