"""The worth of a sequence of each length to a stream: prices of the packing programme over the lengths seen so far.

A pack of value 1 wastes nothing: over a whole stream, packs - (worth of all sequences) is the sum of (1 - value) over
the packs (linear programming duality). So a stream that closes packs of value 1 only is as good as any packer that
sees all sequences at once.

The programme is solved on a grid of at most 256 steps, because the prices guide and need not prove anything. Its
prices are often equal over a wide range of lengths; then a small share of the plain price, tokens / S, decides.

The programme does not see the buffer. If tokens are scarce in it and seats (sequences that a pack may hold) are free,
short sequences may pile up in the buffer until seats are scarce there. So the scarcer seats are in the buffer, the more
of the price is by the seat, 1 / depth: `scarce_seats`.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional

import numpy as np

from pack_data.solver.column_generation import MAX_SINGLE_DEPTH, relax

_GRID = 256  # steps of the grid of lengths, at most
_PLAIN_SHARE = 0.01  # of tokens / S in the prices
# Share of 1 / depth in the prices, by how scarce seats are. It costs packs if seats stay free.
_SEAT_SHARES = (0.0, 0.0025, 0.005, 0.0075, 0.01)
_FREE_SEATS = 0.8  # seats needed, as a share of those in the packs that the tokens fill, up to which none is dear
_SCARCITY_STEP = 0.025  # of this share, from one seat share to the next
_GROUP_SEQUENCES = 8  # sequences of a group that the buffer holds on average


class Prices(NamedTuple):
    """Prices of all lengths, and the tables that follow from them."""

    worth: np.ndarray  # float64 [S + 1]: the programme's price of each length
    price: np.ndarray  # float64 [S + 1]: with a share of tokens / S
    # tables[k] float64 [S + 1]: most that k more sequences add, by free slots; the last one: any k
    tables: List[np.ndarray]
    group: np.ndarray  # int64 [S + 1]: number of the group of neighbouring lengths
    share: np.ndarray  # float64 [groups]: of all sequences

    def table(self, seats: int) -> np.ndarray:
        """Return the most that `seats` more sequences add, by free slots, float64 [S + 1]."""
        return self.tables[min(seats, len(self.tables) - 1)]


def steps_of(S: int) -> np.ndarray:
    """Return the step of the grid that is nearest to each length, at least 1, int64 [S + 1]."""
    unit = -(-S // _GRID)
    nearest = np.rint(np.arange(S + 1) / unit).astype(np.int64)
    return np.clip(nearest, 1, -(-S // unit))


def on_grid(counts: np.ndarray) -> np.ndarray:
    """Return the sequences at each step of the grid, float64 [steps + 1], from counts [S + 1]."""
    steps = steps_of(len(counts) - 1)
    return np.bincount(steps, weights=counts, minlength=int(steps[-1]) + 1)


def solve(counts: np.ndarray, S: int, depth: Optional[int]) -> np.ndarray:
    """Return non-decreasing prices on the grid for these counts (see `on_grid`), both float64 [steps + 1]."""
    steps = len(counts) - 1
    known = np.flatnonzero(counts)
    deepest = steps // int(known[0])
    if depth is not None:
        deepest = min(depth, deepest)
    worth = np.zeros(steps + 1)
    worth[known] = relax(known, counts[known], steps, deepest).prices
    return np.maximum.accumulate(worth)


def scarce_seats(sequences: int, tokens: int, S: int, depth: Optional[int]) -> int:
    """Return how scarce seats are for these sequences, from 0 (free) to 4."""
    if depth is None or depth > MAX_SINGLE_DEPTH:
        return 0
    # Share of the seats in the packs that the tokens fill.
    needed_share = sequences * S / (tokens * depth)
    scarcity = int((needed_share - _FREE_SEATS) / _SCARCITY_STEP)
    return min(max(0, scarcity), len(_SEAT_SHARES) - 1)


def prices(
    counts: np.ndarray,
    worth: np.ndarray,
    S: int,
    depth: Optional[int],
    waiting: int,
    scarce: int = 0,
) -> Prices:
    """Return prices of all lengths from those of the programme on the grid.

    counts, worth: of `solve`, float [steps + 1]. waiting: sequences that the buffer holds. scarce: of `scarce_seats`.
    """
    steps = len(counts) - 1
    grid = np.arange(steps + 1)
    seat_share = _SEAT_SHARES[scarce]
    plain = grid / steps
    worth_share = 1 - _PLAIN_SHARE - seat_share
    price_of_seat = seat_share / (depth or 1)
    mixed = worth_share * worth + _PLAIN_SHARE * plain + price_of_seat
    known = np.flatnonzero(counts)

    unit = -(-S // _GRID)
    place = np.minimum(np.arange(S + 1) / unit, steps)  # of each length on the grid
    tables = [np.interp(place, grid, table) for table in _tables(mixed, known, depth)]
    # A sequence of no tokens is worth nothing: below the shortest length seen, prices go down to 0.
    seen = np.append(0, known)

    groups = max(1, min(len(counts), waiting // _GROUP_SEQUENCES))
    total = counts.sum()
    rank = (np.cumsum(counts) - counts / 2) / total
    numbers = np.minimum(rank * groups, groups - 1).astype(np.int64)
    _, group = np.unique(numbers, return_inverse=True)
    group = group.ravel()
    nearest = np.minimum(np.rint(place).astype(np.int64), steps)
    return Prices(
        worth=np.interp(place, seen, np.append(0.0, worth[known])),
        price=np.interp(place, seen, np.append(0.0, mixed[known])),
        tables=tables,
        group=group[nearest],
        share=np.bincount(group, weights=counts) / total,
    )


def _tables(price: np.ndarray, known: np.ndarray, depth: Optional[int]) -> List[np.ndarray]:
    """Return most values [steps + 1] by seats, 0 to as many as are needed; the last table holds for any number."""
    steps = len(price) - 1
    lengths = known[price[known] > 0]
    values = price[lengths]
    nothing = np.zeros(steps + 1)
    if depth is None or depth > MAX_SINGLE_DEPTH:
        # One table for any number of sequences.
        table = nothing.copy()
        for free in range(1, steps + 1):
            fitting = int(np.searchsorted(lengths, free, side="right"))
            room_left = free - lengths[:fitting]
            with_one_more = table[room_left] + values[:fitting]
            table[free] = max(table[free - 1], with_one_more.max(initial=0.0))
        return [nothing, table]

    tables = [nothing]
    for _ in range(depth):
        before = tables[-1]
        table = before.copy()
        for length, value in zip(lengths.tolist(), values.tolist()):
            above = table[length:]
            np.maximum(above, before[: len(above)] + value, out=above)
        if len(tables) > 1 and np.array_equal(table, before):
            break
        tables.append(table)
    return tables
