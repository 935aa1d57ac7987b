"""Packs of what other libraries do with a stream, counted for `packed-bert stream` to compare with."""

from __future__ import annotations

from typing import List, Optional, Sequence

import numpy as np

from pack_data.packing.histogram import LengthHistogram
from pack_data.solver.free_slots import longest_first

WINDOW = 1000  # sequences in a window of TRL and of ms-swift


def windows(lengths: Sequence[int], S: int, depth: Optional[int], size: int = WINDOW) -> int:
    """Count the packs of best fit decreasing in windows of `size` sequences, as TRL packs."""
    packs = 0
    for start in range(0, len(lengths), size):
        histogram = LengthHistogram(np.bincount(lengths[start : start + size], minlength=S + 1))
        deepest = max(1, S // histogram.shortest)
        if depth is not None:
            deepest = min(depth, deepest)
        packs += sum(count for _, count in longest_first(histogram, deepest))
    return packs


def open_rows(lengths: Sequence[int], S: int, depth: Optional[int], size: int) -> int:
    """Count the packs of first fit into at most `size` open rows; the fullest row is closed for a new one.

    grain and torchtitan pack in this way.
    """
    deepest = S if depth is None else depth
    room = np.zeros(size, np.int64)  # slots left in each open row, oldest row first
    usable = np.zeros(size, np.int64)  # the same, but 0 in a row that holds `deepest` sequences
    held: List[int] = []  # sequences in each open row
    closed = 0
    for length in lengths:
        fitting = np.flatnonzero(usable[: len(held)] >= length)
        if len(fitting):
            row = int(fitting[0])
        else:
            if len(held) == size:
                fullest = int(usable.argmin())  # or full by depth
                held.pop(fullest)
                for array in (room, usable):
                    array[fullest:-1] = array[fullest + 1 :]
                closed += 1
            row = len(held)
            held.append(0)
            room[row] = S

        held[row] += 1
        room[row] -= length
        usable[row] = room[row] if held[row] < deepest else 0
    return closed + len(held)
