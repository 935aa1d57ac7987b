"""Longest-pack-first histogram-packing: `python -m pack_data.lpfhp`.

The variant of SPFHP in the paper's code: sequences go to the fullest packs that still have room, as many of one length
into each pack as fit, also into new packs. This is best-fit decreasing, so `best_fit` gives the same packs.
"""

from __future__ import annotations

import time
from typing import Optional

from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.reading.fields import packing_depth
from pack_data.solver.free_slots import longest_first


def pack(histogram: LengthHistogram, *, max_sequences_per_pack: Optional[int]) -> Packing:
    """Pack in time that depends on S, not on the number of sequences.

    Args:
        histogram: lengths to pack.
        max_sequences_per_pack: packing depth; None for unlimited.
    """
    max_sequences_per_pack = packing_depth(max_sequences_per_pack)
    start = time.perf_counter()
    groups = longest_first(histogram, max_sequences_per_pack)
    return Packing.of(
        "lpfhp",
        histogram,
        max_sequences_per_pack,
        groups,
        solve_seconds=time.perf_counter() - start,
    )


if __name__ == "__main__":
    from pack_data.lengths.packer_command import run

    raise SystemExit(run("lpfhp"))
