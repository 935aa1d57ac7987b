"""Three heuristics for streams that look at lengths only.

`OpenRows` is online best fit: `PackStream` runs it beside its own choice and follows it where it does better.
`windows` and `open_rows` count the packs of what other libraries do, for `packed-bert stream` to compare with.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Dict, Iterable, List, Optional, Sequence

import numpy as np

from pack_data.packing.histogram import LengthHistogram
from pack_data.solver.free_slots import longest_first

WINDOW = 1000  # sequences in a window of TRL and of ms-swift


class OpenRows:
    """Rows of S slots and at most `depth` sequences that are filled by online best fit and are not closed yet.

    A sequence goes into the row with the least room that takes it.
    """

    def __init__(self, S: int, depth: Optional[int], rows: Iterable[Sequence[int]] = ()) -> None:
        """Begin with these rows, each a list of lengths."""
        self._S = S
        self._depth = S if depth is None else min(depth, S)
        self.full: List[List[int]] = []  # rows that take no further sequence
        self.closed = 0  # rows taken out so far
        self.sequences = 0  # in all rows that are not closed, as are the next two
        self.tokens = 0
        self.long = 0  # sequences of more than half a row
        self._open: Dict[int, List[List[int]]] = {}  # room of a row -> the rows with this room
        self._rooms: List[int] = []  # keys of `_open`, ascending
        for row in rows:
            self._count(row, 1)
            self._place(list(row), S - sum(row))

    def add(self, length: int) -> None:
        """Put a sequence into the row with the least room that takes it, or into a new row."""
        self._count([length], 1)
        index = bisect_left(self._rooms, length)
        if index == len(self._rooms):
            self._place([length], self._S - length)
            return
        room = self._rooms[index]
        row = self._take_out(room, -1)
        row.append(length)
        self._place(row, room - length)

    def pass_by(self, length: int, sequences: int, tokens: int) -> None:
        """Add a sequence and close rows until fewer than `sequences` sequences and at most `tokens` tokens are held."""
        while self.tokens + length > tokens:
            self.close()
        self.add(length)
        while self.sequences >= sequences:
            self.close()

    def close(self, length: Optional[int] = None) -> List[int]:
        """Take out a full row, else the row with the least room; with `length`, the first of them that holds it."""
        row = self._next(length)
        self._count(row, -1)
        self.closed += 1
        return row

    def rows(self) -> List[List[int]]:
        """Return copies of all rows, in an order from which `OpenRows(S, depth, rows)` goes on in the same way."""
        rows = list(self.full)
        for room in self._rooms:
            rows += self._open[room]
        return [list(row) for row in rows]

    def _count(self, row: Sequence[int], sign: int) -> None:
        self.sequences += sign * len(row)
        self.tokens += sign * sum(row)
        self.long += sign * (2 * max(row) > self._S)  # two such sequences do not share a row

    def _place(self, row: List[int], room: int) -> None:
        if not room or len(row) >= self._depth:
            self.full.append(row)
        elif room in self._open:
            self._open[room].append(row)
        else:
            self._open[room] = [row]
            insort(self._rooms, room)

    def _take_out(self, room: int, index: int) -> List[int]:
        rows = self._open[room]
        row = rows.pop(index)
        if not rows:
            del self._open[room]
            del self._rooms[bisect_left(self._rooms, room)]
        return row

    def _next(self, length: Optional[int]) -> List[int]:
        for index, row in enumerate(self.full):
            if length is None or length in row:
                return self.full.pop(index)
        room, index = next(
            (room, index)
            for room in self._rooms
            for index, row in enumerate(self._open[room])
            if length is None or length in row
        )
        return self._take_out(room, index)


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
    """Count the packs of first fit into open rows that hold at most `size` sequences; then the fullest row is closed.

    grain and torchtitan pack in this way; they limit rows, not sequences.
    """
    deepest = S if depth is None else depth
    room = np.zeros(size, np.int64)  # slots left in each open row, oldest row first
    usable = np.zeros(size, np.int64)  # the same, but 0 in a row that holds `deepest` sequences
    held: List[int] = []  # sequences in each open row
    waiting = 0
    closed = 0
    for length in lengths:
        if waiting == size:
            fullest = int(room[: len(held)].argmin())
            waiting -= held.pop(fullest)
            for array in (room, usable):
                array[fullest : len(held)] = array[fullest + 1 : len(held) + 1]
            closed += 1

        fitting = np.flatnonzero(usable[: len(held)] >= length)
        if len(fitting):
            row = int(fitting[0])
        else:
            row = len(held)
            held.append(0)
            room[row] = S

        held[row] += 1
        waiting += 1
        room[row] -= length
        usable[row] = room[row] if held[row] < deepest else 0
    return closed + len(held)
