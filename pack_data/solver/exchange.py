"""Pack into a given number of packs: balance them without regard to their slots, then exchange what does not fit.

The start puts every sequence, the longest first, into the pack with most room for each seat, with some noise. So most
packs are nearly full and some are too full. A pack that is too full gives a sequence to another one and takes a shorter
one in return, or none, until it fits. Among thousands of packs there is nearly always one with the right difference. If
there is none, an exchange at random lets the search go on.
"""

from __future__ import annotations

import heapq
from typing import List

import numpy as np

from pack_data.solver.free_slots import Packs

SECONDS_PER_PACK = 5e-5  # measured mean time of a success, on one core
# Sequences up to which the search runs: each takes 100 to 200 bytes, and half a million some seconds.
_MOST_SEQUENCES = 1 << 19
# Seats of a pack up to which it runs: exchanges of two packs grow with their square.
_MOST_SEATS = 1 << 7
# Share by which noise reduces the room of a pack in the start. With it, 27 of 43 searches succeed; with 0.02, 23 do.
# With 0.2, 29 do, but 3,000 chats, some of them long, need one pack more at depth 16.
_NOISE = 0.05
# Exchanges tried for a pack, step by step until one makes it fit. Without the last step, one search fewer succeeds.
# Without the middle one, the searches take four times as long.
_EXCHANGES = (1 << 11, 1 << 14, 1 << 19)
# Most exchanges at random. Also most exchanges that help only a little, beyond two for each pack that fits and the
# share below. With half of it, 2,000 small calls need 8 more than 38,545 packs; with twice, 4 fewer in a fifth more
# time.
_PATIENCE = 100
# Exchanges that help only a little, as a share of the packs. Without them three fewer of the 43 searches succeed; 0.06
# and 0.24 are as good.
_PARTIAL_SHARE = 0.12
# Packs from which an exchange at random chooses one. With 8 or 16 of them, 25 of 84 sets of rows cut at random miss
# their bound; with 4, 31 do; with 1, 43.
_DISTURBED = 8


def exchange(counts: np.ndarray, depth: int, packs: int) -> Packs:
    """Return exactly this many packs, or none if the search does not get there.

    Args:
        counts: sequences by length, int [S + 1].
        depth: most sequences of a pack.
        packs: number of packs, which have room for all tokens.
    """
    S = len(counts) - 1
    sequences = int(counts.sum())
    if sequences > _MOST_SEQUENCES or packs * depth < sequences:
        return []
    random = np.random.default_rng(0)
    rows = _balanced(counts, depth, packs, random)
    if rows.shape[1] > _MOST_SEATS:
        return []
    room = S - rows.sum(axis=1)
    # A heap, because it is sorted: (slots left, below 0; index of the pack), the fullest first
    too_full = sorted((int(room[row]), row) for row in np.flatnonzero(room < 0).tolist())
    partial_left = _PATIENCE + _PARTIAL_SHARE * packs
    disturbances_left = _PATIENCE
    while too_full:
        _, row = heapq.heappop(too_full)
        changed = [row]
        if not _relieve(rows, room, row, random):
            changed = _disturb(rows, room, row, random)
            disturbances_left -= 1
        elif room[row] < 0:
            partial_left -= 1
        else:
            partial_left += 2
        if partial_left < 0 or disturbances_left < 0:
            return []
        for index in changed:
            if room[index] < 0:
                heapq.heappush(too_full, (int(room[index]), index))
    return [(tuple(row[row > 0].tolist()), 1) for row in rows]


def _balanced(
    counts: np.ndarray, depth: int, packs: int, random: np.random.Generator
) -> np.ndarray:
    """Return the lengths in each pack, int64 [packs, seats], 0 for an empty seat; some packs may be too full."""
    S = len(counts) - 1
    rows: List[List[int]] = [[] for _ in range(packs)]
    room = [S] * packs
    # Minus the slots for each seat, with noise.
    order = [(-S / depth, row) for row in range(packs)]
    lengths = np.repeat(np.arange(S + 1), counts)[::-1].tolist()
    noise = (1 - _NOISE * random.random(len(lengths))).tolist()
    for length, factor in zip(lengths, noise):
        row = order[0][1]
        rows[row].append(length)
        room[row] -= length
        seats = depth - len(rows[row])
        if seats:
            heapq.heapreplace(order, (-room[row] / seats * factor, row))
        else:
            heapq.heappop(order)
    deepest = max(map(len, rows))
    width = min(depth, deepest + 1, _MOST_SEATS + 1)
    padded = np.zeros((packs, width), np.int64)
    for index, lengths_of_row in enumerate(rows):
        seated = lengths_of_row[:width]
        padded[index, : len(seated)] = seated
    return padded


def _relieve(rows: np.ndarray, room: np.ndarray, row: int, random: np.random.Generator) -> bool:
    """Exchange a sequence of a pack that is too full, so that it fits or lacks fewer slots; False if none helps."""
    packs, width = rows.shape
    missing = -int(room[row])
    for exchanges in _EXCHANGES:
        others = np.arange(packs)
        if exchanges < packs * width**2:
            others = random.integers(0, packs, max(1, exchanges // width**2))
        others = others[room[others] > 0]
        moved = rows[row][None, :, None] - rows[others][:, None, :]
        fits = moved <= room[others][:, None, None]
        gain = np.where(fits, np.minimum(moved, missing), 0)
        best = gain.max(initial=0)
        if not best:
            continue
        is_partial = best < missing
        if is_partial and exchanges < _EXCHANGES[1]:
            continue
        # Of equal gains the smallest change keeps most room in one piece.
        costs = np.where(gain == best, moved, np.iinfo(np.int64).max)
        _exchange_cheapest(rows, room, row, others, costs)
        return True
    return False


def _disturb(
    rows: np.ndarray, room: np.ndarray, row: int, random: np.random.Generator
) -> List[int]:
    """Exchange a sequence of a pack that is too full for one of some packs that fit; return the packs changed.

    Both may be too full afterwards, by as few slots as possible.
    """
    others = random.choice(np.flatnonzero(room >= 0), _DISTURBED)
    moved = rows[row][None, :, None] - rows[others][:, None, :]
    excess = np.maximum(0, moved - room[others][:, None, None])
    excess += np.maximum(0, -room[row] - moved)
    costs = np.where(moved == 0, np.iinfo(np.int64).max, excess)
    return [row, _exchange_cheapest(rows, room, row, others, costs)]


def _exchange_cheapest(
    rows: np.ndarray, room: np.ndarray, row: int, others: np.ndarray, costs: np.ndarray
) -> int:
    """Exchange two sequences at the least cost, and return the other pack.

    costs: int [others, sequence of this pack, sequence of the other one].
    """
    index = int(costs.argmin())
    place, mine, its = np.unravel_index(index, costs.shape)
    other = int(others[place])
    change = rows[row, mine] - rows[other, its]
    rows[row, mine] -= change
    rows[other, its] += change
    room[row] += change
    room[other] -= change
    return other
