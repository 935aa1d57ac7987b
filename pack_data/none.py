"""No packing, the paper's baseline NONE: each pack holds one sequence. `python -m pack_data.none`."""

from __future__ import annotations

import time
from typing import Optional

from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.reading.fields import packing_depth


def pack(histogram: LengthHistogram, *, max_sequences_per_pack: Optional[int] = 1) -> Packing:
    """Put each sequence into its own pack, at any depth.

    Args:
        histogram: lengths to pack.
        max_sequences_per_pack: is checked only.
    """
    packing_depth(max_sequences_per_pack)
    start = time.perf_counter()
    packs = [((length,), histogram.counts[length]) for length in histogram.lengths.tolist()]
    return Packing.of("none", histogram, 1, packs, solve_seconds=time.perf_counter() - start)


if __name__ == "__main__":
    from pack_data.lengths.packer_command import run

    raise SystemExit(run("none"))
