"""Shortest-pack-first histogram-packing (paper section 3.1.1): `python -m pack_data.spfhp`.

The histogram is read from the longest length to the shortest; sequences go to the packs with the most space left
(worst fit); if none has enough, each remaining sequence opens a pack.
"""

from __future__ import annotations

from typing import Optional

from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.solver.free_slots import Packs, PacksByFreeSlots


def pack(histogram: LengthHistogram, *, max_sequences_per_pack: Optional[int]) -> Packing:
    """Pack in O(S^2) time, independent of the number of sequences.

    Args:
        histogram: lengths to pack.
        max_sequences_per_pack: packing depth; None for unlimited.
    """
    return Packing.by("spfhp", histogram, max_sequences_per_pack, _shortest_first)


def _shortest_first(histogram: LengthHistogram, max_sequences_per_pack: Optional[int]) -> Packs:
    packs = PacksByFreeSlots(max_sequences_per_pack)
    for length in histogram.lengths[::-1].tolist():
        left = int(histogram.counts[length])
        while left:
            free = packs.most_free()
            if free < length:
                packs.add((length,), left, histogram.max_sequence_length - length)
                break
            strategy, count = packs.pop(free)
            if count > left:
                packs.add(strategy, count - left, free)
                count = left
            packs.add(strategy + (length,), count, free - length)
            left -= count
    return packs.all()


if __name__ == "__main__":
    from pack_data.lengths.packer_command import run

    raise SystemExit(run("spfhp"))
