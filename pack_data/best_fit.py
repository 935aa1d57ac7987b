"""Best-fit decreasing over samples: `python -m pack_data.best_fit`.

From the longest to the shortest, each sample goes to the fullest pack that has room; of equally full ones, to the one
that was changed last. Fine-tuning libraries pack by this rule or by first fit, usually without a limit on depth.
Longest-pack-first histogram-packing (lpfhp) is the same rule, and gives the same packs.
"""

from __future__ import annotations

from typing import Optional

from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.solver.free_slots import longest_first


def pack(histogram: LengthHistogram, *, max_sequences_per_pack: Optional[int]) -> Packing:
    """Pack as best-fit decreasing packs each sample, in time that depends on S only.

    Args:
        histogram: lengths to pack.
        max_sequences_per_pack: packing depth; None for unlimited.
    """
    return Packing.by("best_fit", histogram, max_sequences_per_pack, longest_first)


if __name__ == "__main__":
    from pack_data.lengths.packer_command import run

    raise SystemExit(run("best_fit"))
