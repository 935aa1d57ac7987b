"""What a configuration would run and where, without a device; exit status 1 where it does not fit."""

from __future__ import annotations

import sys
from typing import Optional, Sequence

from ipu_packed_bert.commands import pretrain


def main(argv: Optional[Sequence[str]] = None) -> int:
    """`pretrain --plan` under a name of its own."""
    return pretrain.main([*(sys.argv[1:] if argv is None else argv), "--plan"])
