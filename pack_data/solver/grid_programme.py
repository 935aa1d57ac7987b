"""Whole packs in the shape of a fractional packing, for rows of any length.

The linear programme is solved on a grid of one or two thousand lengths. A sequence between two grid points counts for
both in proportion, so that the numbers of sequences and tokens stay the same. The strategies of the solution give the
shape of the packs, that is, how long their sequences should be. Packs of that shape are filled with real sequences:
each slot takes some of those nearest to it in rank, and the last two slots take a pair that fills the pack. Each stage
makes a part of the packs, and the programme is solved again for the sequences that are left. These keep the overall
distribution of lengths, so pairs can be found until the end.
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

# Points of the grid; more of them if packs have at most `_SHALLOW` sequences, which makes tables of few sequences.
_POINTS = 1024
_POINTS_SHALLOW = 2048
_SHALLOW = 4
_SHARE = 0.6  # share of the packs of the fractional packing that one stage makes
_FEW_PACKS = 8  # mean number of packs per strategy below which a stage makes all of them
_MAX_STAGES = 24  # most solutions of the programme
_STAGES_BEFORE_FILLING = 2  # stages before the rest may be filled without the programme
_MIN_PROGRESS = 0.02  # share of the packs below which a stage is the last
_KNOTS = 40  # number of knots that are even in index, in sequences and in tokens, each
# Distances from the wanted length within which a pair is sought, in packs.
_REACHES = (1 / 256, 1 / 32, 1 / 4)
_MIN_REACH = 16  # tokens
# Empty slots up to which each sum of a pair is tried; above, one search covers all sums.
_MAX_SUMS = 64
_THINNED = 0.3  # share of the sequences near a length that one strategy takes
_FULL = 0.98  # share of a pack; a strategy of fewer tokens leaves slots empty on purpose
_SHORTFALL_SHARE = 1 / 8  # share of the last slots that a pack of such a strategy may leave empty
# A pair may leave 1 / `_FIRST_SHORTFALL` of a pack empty in the first stage, as much more in each further stage, and at
# most 1 / `_LAST_SHORTFALL`.
_FIRST_SHORTFALL = 2048
_LAST_SHORTFALL = 16


class _Grid:
    """Lengths 0, g, 2 g, ... S; a sequence between two of them counts for both in proportion."""

    def __init__(self, S: int, points: int) -> None:
        self.step = -(-S // points)
        # Slots of a pack in steps. If the step does not divide S, the rest is left for the pairs.
        self.slots = S // self.step

    def weights(self, counts: np.ndarray) -> np.ndarray:
        """Return the sequences at each point, float64 [slots + 1]; those below the first point count for it."""
        lengths = np.flatnonzero(counts)
        number = counts[lengths].astype(float)
        position = np.clip(lengths / self.step, 1.0, self.slots)
        low = np.ones_like(lengths)
        if self.slots > 1:
            below = np.floor(position).astype(np.int64)
            low = np.minimum(below, self.slots - 1)
        high = low + 1

        share_of_high = position - low
        size = self.slots + 2
        weights = np.bincount(low, number * (1 - share_of_high), size)
        weights += np.bincount(high, number * share_of_high, size)
        return np.asarray(weights[: self.slots + 1])


class _Supply:
    """The sequences that are left: int64 [S + 1] by length."""

    def __init__(self, counts: np.ndarray) -> None:
        self.left = counts.copy()
        self._present = (counts > 0).astype(np.uint8)

    def take(self, length: int, number: int) -> None:
        self.left[length] -= number
        self._present[length] = self.left[length] > 0

    def like(self, slots: List[int], wanted: int, short: int) -> Packs:
        """Take up to `wanted` packs in the shape of these slots, longest first, each full but for `short` tokens."""
        S = len(self.left) - 1
        available = int(self.left.sum()) // len(slots)
        wanted = min(wanted, available)
        if wanted < 1:
            return []

        runs: List[List[Tuple[int, int]]] = []
        for position, length in enumerate(slots[:-2]):
            run = self._around(min(length, S), wanted)
            for near, count in run:
                self.take(near, count)
            # Short sequences in one slot meet long ones in the next.
            runs.append(run[::-1] if position % 2 else run)

        begun: Packs = [((), wanted)]
        if runs:
            begun = merge_runs(runs, wanted)
        packs: Packs = []
        for lengths, count in begun:
            packs += self._completed(lengths, count, slots, short)
        return packs

    def _completed(
        self, lengths: Tuple[int, ...], count: int, slots: List[int], short: int
    ) -> Packs:
        """Fill the last slots of `count` packs with these lengths; put back the sequences of those that stay open."""
        room = len(self.left) - 1 - sum(lengths)
        packs: Packs = []
        while count:
            last = self._last(room, slots, short)
            if not last:
                break
            repeats = count
            for length in last:
                available = int(self.left[length]) // last.count(length)
                repeats = min(repeats, available)
            for length in last:
                self.take(length, repeats)
            packs.append((lengths + last, repeats))
            count -= repeats
        for length in lengths:
            self.take(length, -count)
        return packs

    def _around(self, length: int, wanted: int) -> List[Tuple[int, int]]:
        """Return (length, number) of `wanted` sequences, evenly from those nearest in rank to this length, ascending.

        Only a share of the nearest is taken, so that the rest keeps its distribution and no length loses its partners.
        """
        below = np.cumsum(self.left)
        every = int(below[-1])
        width = min(every, int(wanted / _THINNED) + 1)
        # Ranks from start to stop, around the middle of this length.
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
        """Return one or two lengths that fill the room but for `short` tokens, near the last slots; () if none do."""
        wished = sum(slots[-2:])
        # If a strategy leaves much of the pack empty, the limit on sequences is scarce, not the slots.
        if sum(slots) < _FULL * (len(self.left) - 1):
            room = min(room, wished)
            short = max(short, int(wished * _SHORTFALL_SHARE))
        if len(slots) > 1 and short > _MAX_SUMS:
            return self._pair_below(room, slots[-2], short)
        for reach in self._reaches():
            for total in range(room, max(0, room - short - 1), -1):
                last: Tuple[int, ...] = ()
                if len(slots) > 1:
                    last = self._pair(total, slots[-2], reach)
                elif total < len(self.left) and self._present[total]:
                    last = (total,)
                if last:
                    return last
        return ()

    def _reaches(self) -> List[int]:
        return [max(_MIN_REACH, int(reach * len(self.left))) for reach in _REACHES]

    def _pair_below(self, room: int, near: int, short: int) -> Tuple[int, ...]:
        """Return two lengths of `room` tokens or up to `short` less: the largest total within the first reach."""
        lengths = np.flatnonzero(self._present)
        partner = np.searchsorted(lengths, room - lengths, side="right") - 1
        has_partner = partner >= 0
        longer = lengths[has_partner]
        shorter = lengths[partner[has_partner]]

        fits = longer + shorter >= room - short
        fits &= (longer != shorter) | (self.left[longer] > 1)
        fits &= longer >= shorter
        longer = longer[fits]
        shorter = shorter[fits]
        totals = longer + shorter
        distances = np.abs(longer - near)
        for reach in self._reaches():
            in_reach = np.flatnonzero(distances <= reach)
            if len(in_reach):
                best = in_reach[totals[in_reach].argmax()]
                return int(longer[best]), int(shorter[best])
        return ()

    def _pair(self, total: int, near: int, reach: int) -> Tuple[int, ...]:
        """Return two lengths that sum to `total`, the longer one nearest to `near`; () if there are none."""
        low = (total + 1) // 2
        high = min(total - 1, len(self.left) - 1)
        centre = min(max(near, low), high)
        start = max(low, centre - reach)
        stop = min(high, centre + reach)
        if stop < start:
            return ()
        longer = self._present[start : stop + 1]
        shorter = self._present[total - stop : total - start + 1][::-1]
        lengths = start + np.flatnonzero(longer & shorter)
        # A single sequence is not a pair.
        if len(lengths) and 2 * int(lengths[0]) == total and self.left[total // 2] < 2:
            lengths = lengths[1:]
        if not len(lengths):
            return ()
        distances = np.abs(lengths - centre)
        length = int(lengths[distances.argmin()])
        return length, total - length


def _knots(weights: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return indices of lengths, ascending: the first, the last, and some evenly in index, sequences and tokens."""
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
    """The linear programme on the grid and its solution.

    Args:
        counts: sequences by length, int [S + 1]; at least one sequence.
        depth: most sequences of a pack.
    """

    def __init__(self, counts: np.ndarray, depth: int) -> None:
        self._counts = counts
        self._depth = depth
        self._S = len(counts) - 1
        points = _POINTS_SHALLOW if depth <= _SHALLOW else _POINTS
        self._grid = _Grid(self._S, points)
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
        """Return good prices, float64 [lengths]; no pack is worth much more than 1."""
        return np.interp(lengths, self._points * self._grid.step, self._solution.prices)

    def packs(self, target: int, until: float = math.inf) -> Packs:
        """Pack all sequences.

        Args:
            target: number of packs that is few enough.
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
            shortfall = self._S * (stage + 1) // _FIRST_SHORTFALL
            short = max(1, min(self._S // _LAST_SHORTFALL, shortfall))
            packs_of_stage = self._stage(supply, solution, short, few)
            progress = count_packs(packs_of_stage)
            packs_before = total
            packs += packs_of_stage
            total += progress

            left = int(supply.left.sum())
            stalled = progress < _MIN_PROGRESS * max(1, fewest - packs_before)
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
        """Make a share of the packs of this solution, or all of them if they are few."""
        numbers = solution.packs + 0.5 if few else solution.packs * _SHARE
        # Strategies of two sequences have the fewest ways to fill a pack, so they come first.
        depths = (solution.strategies > 0).sum(axis=1)
        order = np.lexsort((-solution.packs, depths))
        packs: Packs = []
        for index in order.tolist():
            strategy = solution.strategies[index]
            slots = (strategy[strategy > 0] * self._grid.step).tolist()
            packs += supply.like(slots, int(numbers[index]), short)
        return packs
