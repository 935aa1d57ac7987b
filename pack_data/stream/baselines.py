"""How others pack a stream, to compare with: best fit in windows, and a buffer of open rows filled by first fit."""

from __future__ import annotations

from typing import List, Optional, Sequence

import numpy as np

from pack_data.packing.histogram import LengthHistogram
from pack_data.solver.free_slots import longest_first

WINDOW = 1000  # sequences


def windows(lengths: Sequence[int], S: int, depth: Optional[int], size: int = WINDOW) -> int:
    """Packs of best fit decreasing in windows of `size` sequences, as TRL packs."""
    packs = 0
    for start in range(0, len(lengths), size):
        histogram = LengthHistogram(np.bincount(lengths[start : start + size], minlength=S + 1))
        most = max(1, S // histogram.shortest)
        packs += sum(count for _, count in longest_first(histogram, most if depth is None else min(depth, most)))
    return packs


def open_rows(lengths: Sequence[int], S: int, depth: Optional[int], size: int) -> int:
    """Packs of first fit into open rows that hold at most `size` sequences; then the fullest row is closed.

    grain and torchtitan pack in this way; they limit rows, not sequences.
    """
    most = S if depth is None else depth
    free = np.zeros(size, np.int64)  # of the open rows, oldest first; a row without seats has no room
    room = np.zeros(size, np.int64)  # slots that are left in each
    held: List[int] = []
    waiting = closed = 0
    for length in lengths:
        if waiting == size:
            fullest = int(room[: len(held)].argmin())
            waiting -= held.pop(fullest)
            for row in (free, room):
                row[fullest : len(held)] = row[fullest + 1 : len(held) + 1]
            closed += 1
        number = len(held)
        at = int((free[:number] >= length).argmax()) if number else 0
        if not number or free[at] < length:
            at = number
            free[at] = room[at] = S
            held.append(0)
        held[at] += 1
        waiting += 1
        room[at] -= length
        free[at] = room[at] if held[at] < most else 0
    return closed + len(held)
