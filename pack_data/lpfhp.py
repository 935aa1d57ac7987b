"""Longest-pack-first histogram-packing: `python -m pack_data.lpfhp`.

The variant of SPFHP in the paper's code: sequences go to the fullest packs that still have room, as many of one length
into each pack as fit, also into new packs. This is best-fit decreasing, so `best_fit` gives the same packs.
"""

from __future__ import annotations

from typing import Optional

from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.solver.free_slots import longest_first


def pack(histogram: LengthHistogram, *, max_sequences_per_pack: Optional[int]) -> Packing:
    """Pack in time that depends on S, not on the number of sequences.

    Args:
        histogram: lengths to pack.
        max_sequences_per_pack: packing depth; None for unlimited.
    """
    return Packing.by("lpfhp", histogram, max_sequences_per_pack, longest_first)


if __name__ == "__main__":
    from pack_data.lengths.packer_command import run

    raise SystemExit(run("lpfhp"))
