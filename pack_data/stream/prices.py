"""What a sequence of each length is worth to a stream: prices of the packing programme over the lengths seen.

A pack of value 1 wastes nothing: over a whole stream, packs - (worth of all sequences) is the sum of (1 - value) over
the packs (linear programming duality).  So a stream that closes packs of value 1 only is as good as any packer that
sees all sequences at once.

The programme is solved on a grid of at most 256 steps, because the prices guide and need not prove anything.  Its
prices are often equal over a wide range of lengths; then a small share of the plain price, tokens / S, decides.

The programme does not see what waits. Where tokens are scarce in it and seats (sequences that a pack may hold) are
free, short sequences may pile up in the buffer until seats are scarce there. So the scarcer seats are in the buffer,
the more of the price is by the seat, 1 / depth: `scarce_seats`.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional

import numpy as np

from pack_data.solver.column_generation import MOST_SINGLE_DEPTH, relax

_GRID = 256  # steps of the grid of lengths, at most
_PLAIN = 0.01  # share of tokens / S in the prices
# Share of 1 / depth in the prices, by how scarce seats are. It costs packs where seats stay free.
_SEAT = (0.0, 0.0025, 0.005, 0.0075, 0.01)
_FREE, _LESS = 0.8, 0.025  # seats needed of those in the packs that the tokens fill: none is dear, each further step
_GROUP = 8  # sequences of a group that the buffer holds on average


class Prices(NamedTuple):
    """Prices of all lengths, and the tables that follow from them."""

    worth: np.ndarray  # float64 [S + 1]: the programme's price of each length
    price: np.ndarray  # float64 [S + 1]: with a share of tokens / S
    tables: List[
        np.ndarray
    ]  # tables[k] float64 [S + 1]: most that k more sequences add, by free slots; the last: any k
    group: np.ndarray  # int64 [S + 1]: number of the group of neighbouring lengths
    share: np.ndarray  # float64 [groups]: of all sequences

    def table(self, seats: int) -> np.ndarray:
        return self.tables[min(seats, len(self.tables) - 1)]


def steps_of(S: int) -> np.ndarray:
    """int64 [S + 1]: the step of the grid that is nearest to each length, at least 1."""
    unit = -(-S // _GRID)
    return np.clip(np.rint(np.arange(S + 1) / unit).astype(np.int64), 1, -(-S // unit))


def on_grid(counts: np.ndarray) -> np.ndarray:
    """float64 [steps + 1] of counts [S + 1]."""
    steps = steps_of(len(counts) - 1)
    return np.bincount(steps, weights=counts, minlength=int(steps[-1]) + 1)


def solve(counts: np.ndarray, S: int, depth: Optional[int]) -> np.ndarray:
    """float64 [steps + 1]: prices on the grid for these counts [steps + 1] (see `on_grid`), non-decreasing."""
    steps = len(counts) - 1
    known = np.flatnonzero(counts)
    most = steps // int(known[0])
    relaxation = relax(known, counts[known], steps, most if depth is None else min(depth, most))
    worth = np.zeros(steps + 1)
    worth[known] = relaxation.prices
    return np.maximum.accumulate(worth)


def scarce_seats(sequences: int, tokens: int, S: int, depth: Optional[int]) -> int:
    """How scarce seats are, 0 (free) to 4: sequences against the seats of the packs that their tokens fill."""
    if depth is None or depth > MOST_SINGLE_DEPTH:
        return 0
    used = sequences * S / (tokens * depth)
    return min(max(0, int((used - _FREE) / _LESS)), len(_SEAT) - 1)


def prices(
    counts: np.ndarray, worth: np.ndarray, S: int, depth: Optional[int], waiting: int, scarce: int = 0
) -> Prices:
    """Prices of all lengths, from the programme's on the grid.  Deterministic.

    counts, worth float [steps + 1], as of `solve`; waiting: sequences that the buffer holds; scarce: of `scarce_seats`.
    """
    steps, unit = len(counts) - 1, -(-S // _GRID)
    known = np.flatnonzero(counts)
    plain = np.arange(steps + 1) / steps
    seat = _SEAT[scarce]
    coarse = (1 - _PLAIN - seat) * worth + _PLAIN * plain + seat / (depth or 1)
    grid, fine = np.arange(steps + 1), np.minimum(np.arange(S + 1) / unit, steps)
    tables = [np.interp(fine, grid, table) for table in _tables(coarse, known, depth)]
    groups = max(1, min(len(counts), waiting // _GROUP))
    middle = (np.cumsum(counts) - counts / 2) / counts.sum()
    _, group = np.unique(np.minimum(middle * groups, groups - 1).astype(np.int64), return_inverse=True)
    share = np.bincount(group, weights=counts) / counts.sum()
    nearest = np.minimum(np.rint(fine).astype(np.int64), steps)
    seen = np.append(0, known)  # nothing is worth nothing: below the shortest seen, prices go down to 0
    return Prices(
        np.interp(fine, seen, np.append(0.0, worth[known])),
        np.interp(fine, seen, np.append(0.0, coarse[known])),
        tables,
        group.ravel()[nearest],
        share,
    )


def _tables(price: np.ndarray, known: np.ndarray, depth: Optional[int]) -> List[np.ndarray]:
    """[steps + 1] by seats, 0 to as many as are needed: the last one holds for any number of seats in the limit."""
    steps = len(price) - 1
    items = [(length, float(price[length])) for length in known.tolist() if price[length] > 0]
    nothing = np.zeros(steps + 1)
    if depth is None or depth > MOST_SINGLE_DEPTH:  # one table, for any number of sequences
        table = nothing
        lengths = np.array([length for length, _ in items], np.int64)
        values = np.array([value for _, value in items])
        for free in range(1, steps + 1):
            fitting = int(np.searchsorted(lengths, free, side="right"))
            table[free] = max(table[free - 1], (table[free - lengths[:fitting]] + values[:fitting]).max(initial=0.0))
        return [nothing * 0, table]
    tables = [nothing]
    for _ in range(depth):
        before = tables[-1]
        table = before.copy()
        for length, value in items:
            np.maximum(table[length:], before[: steps + 1 - length] + value, out=table[length:])
        if len(tables) > 1 and np.array_equal(table, before):
            break
        tables.append(table)
    return tables
