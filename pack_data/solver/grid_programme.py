"""Whole packs in the shape of a fractional packing, for rows of any length.

The linear programme is solved on a grid of one or two thousand lengths. A sequence between two points of the grid
counts in part for each, so that the numbers of sequences and tokens stay the same. The strategies of the solution are
the shape of the packs: how long their sequences should be. Packs of that shape are then made of the sequences
themselves: each slot takes some of those nearest to it in rank, and the last two slots take a pair that fills the pack.
Only a part of the packs is made at a time, and the programme is solved again for the sequences that are left: they keep
the shape of the whole, so that pairs can be found until the end.
"""

from __future__ import annotations

import math
import time
from typing import List, Tuple

import numpy as np

from pack_data.solver.column_generation import Programme, Relaxation
from pack_data.solver.filling import fill_exactly
from pack_data.solver.free_slots import Packs, count_packs
from pack_data.solver.rounding import merge_runs

_POINTS = 1024  # of the grid
_POINTS_SHALLOW = 2048  # of the grid, if packs have at most this depth
_SHALLOW = 4
_SHARE = 0.6  # of the packs of the fractional packing that are made at a time
_FEW_PACKS = 8  # mean packs of a strategy; below it all are made at once
_MAX_STAGES = 24  # times that the programme is solved
_STAGES_BEFORE_FILLING = 2  # after which a stage may be the last
_MIN_PROGRESS = 0.02  # share of the packs that a stage makes at least, or it is the last
_KNOTS = 40  # of each of three kinds
# Distances from the wanted length within which a pair is sought, in packs.
_REACHES = (1 / 256, 1 / 32, 1 / 4)
_MIN_REACH = 16  # tokens
_MAX_SUMS = 64  # tokens that a pair may leave, up to which its sums are tried one after another
_THINNED = 0.3  # share of the sequences near a length that one strategy takes
_FULL = 0.98  # of a pack; a strategy of fewer tokens leaves slots empty on purpose
_SHORTFALL_SHARE = 1 / 8  # of the last slots that a pack of such a strategy may leave empty
# A pair may leave 1 / this of a pack in the first stage, and as much more in each further one, up to 1 / the second.
_FIRST_SHORTFALL = 2048
_LAST_SHORTFALL = 16


class _Grid:
    """Points 0, g, 2 g, ... S of lengths; a sequence between two counts for both in proportion."""

    def __init__(self, S: int, points: int) -> None:
        self.step = -(-S // points)
        self.slots = S // self.step  # of a pack; a rest of S below one step is left for the pairs

    def weights(self, counts: np.ndarray) -> np.ndarray:
        """Return the sequences at each point, float64 [slots + 1]; those below the first point count for it."""
        lengths = np.flatnonzero(counts)
        number = counts[lengths].astype(float)
        place = np.clip(lengths / self.step, 1.0, self.slots)
        low = np.ones_like(lengths)
        if self.slots > 1:
            low = np.minimum(np.floor(place).astype(np.int64), self.slots - 1)
        share = place - low
        weights = np.bincount(low, number * (1 - share), self.slots + 2)
        weights += np.bincount(low + 1, number * share, self.slots + 2)
        return np.asarray(weights[: self.slots + 1])


class _Supply:
    """The sequences that are left, by length."""

    def __init__(self, counts: np.ndarray) -> None:
        self.left = counts.copy()
        self._present = (counts > 0).astype(np.uint8)

    def take(self, length: int, number: int) -> None:
        self.left[length] -= number
        self._present[length] = self.left[length] > 0

    def like(self, slots: List[int], wanted: int, short: int) -> Packs:
        """Take up to `wanted` packs in the shape of these slots, longest first, each full but for `short` tokens."""
        S = len(self.left) - 1
        wanted = min(wanted, int(self.left.sum()) // len(slots))
        if wanted < 1:
            return []
        runs: List[List[Tuple[int, int]]] = []
        for position, length in enumerate(slots[:-2]):
            run = self._around(min(length, S), wanted)
            for near, count in run:
                self.take(near, count)
            # Short ones in one slot meet long ones in the next.
            runs.append(run[::-1] if position % 2 else run)

        packs: Packs = []
        for lengths, count in merge_runs(runs, wanted) if runs else [((), wanted)]:
            room = S - sum(lengths)
            while count:
                last = self._last(room, slots, short)
                if not last:
                    break
                made = min(
                    count, *(int(self.left[length]) // last.count(length) for length in last)
                )
                for length in last:
                    self.take(length, made)
                packs.append((lengths + last, made))
                count -= made
            for length in lengths:  # of packs that were not filled
                self.take(length, -count)
        return packs

    def _around(self, length: int, wanted: int) -> List[Tuple[int, int]]:
        """Return (length, number) of `wanted` sequences, evenly from those nearest in rank to this length, ascending.

        Not all of the nearest: the rest keeps its shape, only thinner, and no length is left without a partner.
        """
        below = np.cumsum(self.left)
        every = int(below[-1])
        width = min(every, int(wanted / _THINNED) + 1)
        middle = (int(below[length - 1]) + int(below[length])) // 2
        start = max(0, min(middle - width // 2, every - width))
        stop = start + width
        first = int(np.searchsorted(below, start, side="right"))
        last = int(np.searchsorted(below, stop, side="left"))
        run = []
        taken = 0
        for near, end in enumerate(below[first : last + 1].tolist(), start=first):
            # Python integers do not overflow; counts go to 10^15.
            reached = (min(end, stop) - start) * wanted // width
            if reached > taken:
                run.append((near, reached - taken))
                taken = reached
        return run

    def _last(self, room: int, slots: List[int], short: int) -> Tuple[int, ...]:
        """Return one or two lengths that fill the room up to `short` tokens, as the last slots do; () if none do."""
        wished = sum(slots[-2:])
        # If a strategy leaves much of the pack empty, the limit on sequences is scarce, not the slots.
        if sum(slots) < _FULL * (len(self.left) - 1):
            room = min(room, wished)
            short = max(short, int(wished * _SHORTFALL_SHARE))
        if len(slots) > 1 and short > _MAX_SUMS:
            return self._pair_below(room, slots[-2], short)
        for reach in self._reaches():
            for total in range(room, max(0, room - short - 1), -1):
                if len(slots) > 1:
                    last = self._pair(total, slots[-2], reach)
                else:
                    last = (total,) if total < len(self.left) and self._present[total] else ()
                if last:
                    return last
        return ()

    def _reaches(self) -> List[int]:
        return [max(_MIN_REACH, int(reach * len(self.left))) for reach in _REACHES]

    def _pair_below(self, room: int, near: int, short: int) -> Tuple[int, ...]:
        """Return two lengths of `room` tokens or up to `short` less, the most in the first reach that has any."""
        lengths = np.flatnonzero(self._present)
        fitting = np.searchsorted(lengths, room - lengths, side="right") - 1
        longer = lengths[fitting >= 0]
        shorter = lengths[fitting[fitting >= 0]]
        good = longer + shorter >= room - short
        good &= (longer != shorter) | (self.left[longer] > 1)
        good &= longer >= shorter
        longer, shorter = longer[good], shorter[good]
        totals = longer + shorter
        for reach in self._reaches():
            places = np.flatnonzero(np.abs(longer - near) <= reach)
            if len(places):
                best = places[totals[places].argmax()]
                return int(longer[best]), int(shorter[best])
        return ()

    def _pair(self, total: int, near: int, reach: int) -> Tuple[int, ...]:
        """Return two lengths of together `total` tokens, the longer as near to `near` as possible; () if none is."""
        low = (total + 1) // 2
        high = min(total - 1, len(self.left) - 1)
        centre = min(max(near, low), high)
        start = max(low, centre - reach)
        stop = min(high, centre + reach)
        if stop < start:
            return ()
        longer = self._present[start : stop + 1]
        shorter = self._present[total - stop : total - start + 1][::-1]
        places = np.flatnonzero(longer & shorter)
        if len(places) and 2 * (start + int(places[0])) == total and self.left[total // 2] < 2:
            places = places[1:]  # one sequence is no pair
        if not len(places):
            return ()
        distances = np.abs(places - (centre - start))
        length = start + int(places[distances.argmin()])
        return length, total - length


def _knots(weights: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return indices of lengths, ascending: the first and the last, and some even in index, sequences and tokens."""
    last = len(lengths) - 1
    present = np.flatnonzero(weights > 0)
    if not len(present):
        return np.array([0, last])
    even = np.linspace(0, len(present) - 1, _KNOTS).astype(int)
    chosen = [np.array([0, last]), present[:4], present[-4:], present[even]]
    for amount in (weights, weights * lengths):
        sums = np.cumsum(amount)
        parts = np.linspace(0, sums[-1], _KNOTS + 2)[1:-1]
        chosen.append(np.searchsorted(sums, parts))
    return np.unique(np.minimum(np.concatenate(chosen), last))


class Shape:
    """The programme on the grid.

    Args:
        counts: sequences by length, int [S + 1]; at least one sequence.
        depth: most sequences of a pack.
    """

    def __init__(self, counts: np.ndarray, depth: int) -> None:
        self._counts = counts
        self._depth = depth
        self._S = len(counts) - 1
        self._grid = _Grid(self._S, _POINTS_SHALLOW if depth <= _SHALLOW else _POINTS)
        weights = self._grid.weights(counts)
        self._points = np.flatnonzero(weights)
        deepest = self._grid.slots // int(self._points[0])
        self._programme = Programme(
            self._points, weights[self._points], self._grid.slots, min(depth, deepest)
        )
        self._solution = self._solve(counts)

    def _solve(self, left: np.ndarray) -> Relaxation:
        weights = self._grid.weights(left)[self._points]
        return self._programme.solve_again(weights, _knots(weights, self._points))

    def prices(self, lengths: np.ndarray) -> np.ndarray:
        """Return good prices, of which no pack is worth much more than 1, float64 [lengths]."""
        return np.interp(lengths, self._points * self._grid.step, self._solution.prices)

    def packs(self, target: int, until: float = math.inf) -> Packs:
        """Pack all sequences; `target` packs are few enough.

        until: time of `time.perf_counter` after which no stage is begun.
        """
        supply = _Supply(self._counts)
        solution = self._solution
        packs: Packs = []
        total = 0
        best: Packs = []
        fewest = 0
        for stage in range(_MAX_STAGES):
            few = solution.value < _FEW_PACKS * len(solution.packs)
            short = max(
                1, min(self._S // _LAST_SHORTFALL, self._S * (stage + 1) // _FIRST_SHORTFALL)
            )
            made = self._stage(supply, solution, short, few)
            packs += made
            progress = count_packs(made)
            total += progress
            left = int(supply.left.sum())
            stalled = progress < _MIN_PROGRESS * max(1, fewest - (total - progress))
            done = not left or stalled or time.perf_counter() > until
            if done or few or stage >= _STAGES_BEFORE_FILLING:
                rest = fill_exactly(supply.left, self._depth, target - total) if left else []
                complete = total + count_packs(rest)
                if not best or complete < fewest:
                    best = packs + rest
                    fewest = complete
                if done or fewest <= target:
                    break
            solution = self._solve(supply.left)
        return best

    def _stage(self, supply: _Supply, solution: Relaxation, short: int, few: bool) -> Packs:
        """Make a part of the packs of this solution, all of them if they are few."""
        numbers = solution.packs + 0.5 if few else solution.packs * _SHARE
        # Two sequences fill a pack in few ways, so they choose first.
        slots_of = (solution.strategies > 0).sum(axis=1)
        packs: Packs = []
        for index in np.lexsort((-solution.packs, slots_of)).tolist():
            strategy = solution.strategies[index]
            slots = (strategy[strategy > 0] * self._grid.step).tolist()
            packs += supply.like(slots, int(numbers[index]), short)
        return packs
