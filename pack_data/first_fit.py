"""First-fit decreasing over samples: `python -m pack_data.first_fit`.

From the longest to the shortest, each sample goes to the first pack that has room. Fine-tuning libraries pack by this
rule or by best fit, usually without a limit on depth.
"""

from __future__ import annotations

from typing import List, Optional

import numpy as np

from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.solver.free_slots import Packs, Strategy


def pack(histogram: LengthHistogram, *, max_sequences_per_pack: Optional[int]) -> Packing:
    """Pack as first-fit decreasing packs each sample, in time that depends on S only.

    Args:
        histogram: lengths to pack.
        max_sequences_per_pack: packing depth; None for unlimited.
    """
    return Packing.by("first_fit", histogram, max_sequences_per_pack, _runs_of_packs)


def _runs_of_packs(histogram: LengthHistogram, max_sequences_per_pack: Optional[int]) -> Packs:
    """Return runs of equal packs, in the order in which their first packs were opened.

    The pack chosen for a sequence stays the first with room for others of this length until it is full for them. So
    the runs are filled in turn, each pack with as many sequences as fit, and only the run in which the sequences of a
    length end is split. The cost depends on S alone.
    """
    S = histogram.max_sequence_length
    depth = S if max_sequences_per_pack is None else max_sequences_per_pack
    # Slots left in each pack of a run, sequences that the depth still allows, and packs; int64 [3, runs].
    runs = np.zeros((3, 0), np.int64)
    strategies: List[Strategy] = []
    for length in histogram.lengths[::-1].tolist():
        left = int(histogram.counts[length])
        free, seats, packs = runs
        times = np.minimum(free // length, seats)  # for each pack
        placed = np.concatenate([[0], np.cumsum(times * packs)])
        # Number of runs whose packs are all filled.
        filled = int(np.searchsorted(placed, left, side="right")) - 1
        for run in np.flatnonzero(times[:filled]).tolist():
            strategies[run] += (length,) * int(times[run])
        free[:filled] -= times[:filled] * length
        seats[:filled] -= times[:filled]
        left -= int(placed[filled])
        if not left:
            continue

        if filled < len(strategies):  # the sequences end inside this run
            run_free, run_seats, run_packs = runs[:, filled].tolist()
            strategy = strategies[filled]
            number = int(times[filled])
        else:  # they need new packs, which come last
            run_free, run_seats, strategy = S, depth, ()
            number = min(S // length, depth)
            run_packs = -(-left // number)

        # Split the run into filled packs, one pack with the rest, and packs that are left as they were.
        full, rest = divmod(left, number)
        parts = []
        split = []
        for part_packs, added in (
            (full, number),
            (min(1, rest), rest),
            (run_packs - full - min(1, rest), 0),
        ):
            if part_packs:
                parts.append((run_free - added * length, run_seats - added, part_packs))
                split.append(strategy + (length,) * added)
        runs = np.hstack([runs[:, :filled], np.transpose(parts), runs[:, filled + 1 :]])
        strategies[filled : filled + 1] = split
    return list(zip(strategies, runs[2].tolist()))


if __name__ == "__main__":
    from pack_data.lengths.packer_command import run

    raise SystemExit(run("first_fit"))
