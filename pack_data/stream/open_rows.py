"""Online best fit: open rows, and each sequence goes into the one with the least room that takes it.  Lengths only."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Dict, Iterable, List, Optional, Sequence


class OpenRows:
    """Rows of S slots and at most `depth` sequences that are not closed yet.  Rows that can take no more are `full`."""

    closed = 0  # rows so far

    def __init__(self, S: int, depth: Optional[int], rows: Iterable[Sequence[int]] = ()) -> None:
        self.S, self.depth = S, S if depth is None else min(depth, S)
        self.full: List[List[int]] = []
        self.sequences = self.tokens = 0
        self.long = 0  # sequences of more than half a row
        self._open: Dict[int, List[List[int]]] = {}  # by room
        self._rooms: List[int] = []  # with an open row, ascending
        for row in rows:
            self._count(row, 1)
            self._place(list(row), S - sum(row))

    def add(self, length: int) -> None:
        self.sequences += 1
        self.tokens += length
        if 2 * length > self.S:
            self.long += 1
        rooms = self._rooms
        at = bisect_left(rooms, length)
        if at == len(rooms):
            self._place([length], self.S - length)
            return
        room = rooms[at]
        rows = self._open[room]
        row = rows.pop()
        if not rows:
            del self._open[room], rooms[at]
        row.append(length)
        self._place(row, room - length)

    def pass_by(self, length: int, sequences: int, tokens: int) -> None:
        """Adds a sequence; closes rows so that fewer than so many sequences and at most so many tokens are held."""
        while self.tokens + length > tokens:
            self.close()
        self.add(length)
        while self.sequences >= sequences:
            self.close()

    def _count(self, row: Sequence[int], sign: int) -> None:
        self.sequences += sign * len(row)
        self.tokens += sign * sum(row)
        self.long += sign * (2 * max(row) > self.S)

    def _place(self, row: List[int], room: int) -> None:
        if not room or len(row) >= self.depth:
            self.full.append(row)
            return
        rows = self._open.get(room)
        if rows is None:
            self._open[room] = [row]
            insort(self._rooms, room)
        else:
            rows.append(row)

    def _taken_out(self, room: int, at: int) -> List[int]:
        rows = self._open[room]
        row = rows.pop(at)
        if not rows:
            del self._open[room], self._rooms[bisect_left(self._rooms, room)]
        return row

    def close(self, length: Optional[int] = None) -> List[int]:
        """Takes out a full row, else the one with the least room; `length`: the first of them that holds it."""
        row = self._next(length)
        self._count(row, -1)
        self.closed += 1
        return row

    def _next(self, length: Optional[int]) -> List[int]:
        for at, row in enumerate(self.full):
            if length is None or length in row:
                return self.full.pop(at)
        if length is None:
            return self._taken_out(self._rooms[0], 0)
        room = min(room for room, rows in self._open.items() if any(length in row for row in rows))
        return self._taken_out(room, next(at for at, row in enumerate(self._open[room]) if length in row))

    def rows(self) -> List[List[int]]:
        """All rows, so that `OpenRows(S, depth, rows)` goes on in the same way."""
        return self.full + [row for room in self._rooms for row in self._open[room]]
