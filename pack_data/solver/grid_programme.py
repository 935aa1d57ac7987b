"""Whole packs in the shape of a fractional packing, for rows of any length.

The linear programme is solved on a grid of a thousand or two lengths. A sequence between two points of the grid counts
in part for each, so that sequences and tokens stay as many. The strategies of the solution say how long the sequences
of a pack ought to be. Packs of that shape are then made of the sequences themselves: each slot takes some of those
nearest to it in rank, and the last two slots take a pair that fills the pack. Only a part of the packs is made at a
time, and the programme is solved again for the sequences that are left: what is left stays like the whole, so that
there is something to fill packs with until the end.
"""

from __future__ import annotations

import math
import time
from typing import List, Tuple

import numpy as np

from pack_data.solver.column_generation import Programme, Relaxation
from pack_data.solver.filling import Packs, fill_exactly
from pack_data.solver.rounding import merge_runs

_GRID, _FINE_GRID, _SHALLOW = 1024, 2048, 4  # points; the fine one for packs of so few sequences
_SHARE = 0.6  # of the packs of the fractional packing that are made at a time
_FEW = 8  # packs of a strategy; where there are fewer on average, all are made at once
_STAGES, _STALLED = 24, 0.02
_KNOTS = 40  # of each of three kinds
_REACHES = (1 / 256, 1 / 32, 1 / 4)  # of a pack: how far from the length wished for a pair is looked for, in turn
_ONE_BY_ONE = 64  # tokens that may be left: up to so many, sums are looked for one after another
_THINNED = 0.3  # of the sequences near a length are taken for one strategy
_FULL = 0.98  # of a pack; a strategy of fewer tokens leaves slots empty on purpose


class _Grid:
    """Points 0, g, 2 g, ... S of lengths; a sequence between two counts for both in proportion."""

    def __init__(self, S: int, points: int) -> None:
        self.step = -(-S // points)
        self.slots = S // self.step  # of a pack; a rest of S below one step is left for the pairs

    def weights(self, counts: np.ndarray) -> np.ndarray:
        """float64 [slots + 1]: the sequences at each point; those below the first point stand at it."""
        lengths = np.flatnonzero(counts)
        number = counts[lengths].astype(float)
        place = np.clip(lengths / self.step, 1.0, self.slots)
        low = np.minimum(np.floor(place).astype(np.int64), self.slots - 1) if self.slots > 1 else np.ones_like(lengths)
        share = place - low
        weights = np.bincount(low, number * (1 - share), self.slots + 2) + np.bincount(
            low + 1, number * share, self.slots + 2
        )
        return np.asarray(weights[: self.slots + 1])


class _Supply:
    """The sequences that are left, by length."""

    def __init__(self, counts: np.ndarray) -> None:
        self.left = counts.copy()
        self._there = (counts > 0).astype(np.uint8)

    def take(self, length: int, number: int) -> None:
        self.left[length] -= number
        self._there[length] = self.left[length] > 0

    def like(self, slots: List[int], wanted: int, short: int) -> Packs:
        """Up to `wanted` packs in the shape of these slots, longest first; what does not fill a pack is put back."""
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
        for held, count in merge_runs(runs, wanted) if runs else [((), wanted)]:
            room = S - sum(held)
            while count:
                last = self._last(room, slots, short)
                if not last:
                    break
                made = min(count, *(int(self.left[length]) // last.count(length) for length in last))
                for length in last:
                    self.take(length, made)
                packs.append((held + last, made))
                count -= made
            for length in held:
                self.take(length, -count)
        return packs

    def _around(self, length: int, wanted: int) -> List[Tuple[int, int]]:
        """`wanted` sequences, evenly out of those nearest in rank to this length: (length, how many), ascending.

        Not all of the nearest: what is left stays as it was, only thinner, and no length goes without a partner.
        """
        below = np.cumsum(self.left)
        every = int(below[-1])
        width = min(every, int(wanted / _THINNED) + 1)
        middle = (int(below[length - 1]) + int(below[length])) // 2
        start = max(0, min(middle - width // 2, every - width))
        first = int(np.searchsorted(below, start, side="right"))
        last = int(np.searchsorted(below, start + width, side="left"))
        run, taken = [], 0
        for near, end in enumerate(below[first : last + 1].tolist(), start=first):
            reached = (min(end, start + width) - start) * wanted // width  # in Python's integers: counts go to 10^15
            if reached > taken:
                run.append((near, reached - taken))
                taken = reached
        return run

    def _last(self, room: int, slots: List[int], short: int) -> Tuple[int, ...]:
        """One or two lengths that fill the room up to `short` tokens, as the last slots do; none: ()."""
        wished = sum(slots[-2:])
        # A strategy that leaves much of the pack empty is meant to: there the limit on sequences is what is scarce.
        if sum(slots) < _FULL * (len(self.left) - 1):
            room, short = min(room, wished), max(short, wished // 8)
        if len(slots) > 1 and short > _ONE_BY_ONE:
            return self._pair_below(room, slots[-2], short)
        for reach in _REACHES:
            for total in range(room, max(0, room - short - 1), -1):
                if len(slots) > 1:
                    last = self._pair(total, slots[-2], max(16, int(reach * len(self.left))))
                else:
                    last = (total,) if total < len(self.left) and self._there[total] else ()
                if last:
                    return last
        return ()

    def _pair_below(self, room: int, near: int, short: int) -> Tuple[int, ...]:
        """Two lengths of `room` tokens together or up to `short` less, the most in the first reach that has any."""
        lengths = np.flatnonzero(self._there)
        fitting = np.searchsorted(lengths, room - lengths, side="right") - 1
        longer, shorter = lengths[fitting >= 0], lengths[fitting[fitting >= 0]]
        good = (
            (longer + shorter >= room - short) & ((longer != shorter) | (self.left[longer] > 1)) & (longer >= shorter)
        )
        longer, shorter = longer[good], shorter[good]
        for reach in _REACHES:
            here = np.flatnonzero(np.abs(longer - near) <= max(16, int(reach * len(self.left))))
            if len(here):
                best = here[(longer + shorter)[here].argmax()]
                return int(longer[best]), int(shorter[best])
        return ()

    def _pair(self, total: int, near: int, reach: int) -> Tuple[int, ...]:
        """Two lengths of together `total` tokens, the longer as near to `near` as can be; none within reach: ()."""
        low, high = (total + 1) // 2, min(total - 1, len(self.left) - 1)
        centre = min(max(near, low), high)
        start, stop = max(low, centre - reach), min(high, centre + reach)
        if stop < start:
            return ()
        found = np.flatnonzero(self._there[start : stop + 1] & self._there[total - stop : total - start + 1][::-1])
        if len(found) and 2 * (start + int(found[0])) == total and self.left[total // 2] < 2:
            found = found[1:]  # one sequence is no pair
        if not len(found):
            return ()
        length = start + int(found[np.abs(found - (centre - start)).argmin()])
        return length, total - length


def _knots(weights: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Indices of lengths, ascending: the first and the last, and some even in index, in sequences and in tokens."""
    there = np.flatnonzero(weights > 0)
    if not len(there):
        return np.array([0, len(lengths) - 1])
    chosen = [
        np.array([0, len(lengths) - 1]),
        there[:4],
        there[-4:],
        there[np.linspace(0, len(there) - 1, _KNOTS).astype(int)],
    ]
    for amount in (weights, weights * lengths):
        sums = np.cumsum(amount)
        chosen.append(np.searchsorted(sums, np.linspace(0, sums[-1], _KNOTS + 2)[1:-1]))
    return np.unique(np.minimum(np.concatenate(chosen), len(lengths) - 1))


class Shape:
    """The programme on the grid for `counts` int [S + 1], at least one sequence, at most `depth` in a pack."""

    def __init__(self, counts: np.ndarray, depth: int) -> None:
        self._counts, self._depth = counts, depth
        self._grid = _Grid(len(counts) - 1, _FINE_GRID if depth <= _SHALLOW else _GRID)
        weights = self._grid.weights(counts)
        self._points = np.flatnonzero(weights)
        deepest = self._grid.slots // int(self._points[0])
        self._programme = Programme(self._points, weights[self._points], self._grid.slots, min(depth, deepest))
        self._solved = self._solve(counts)

    def _solve(self, left: np.ndarray) -> Relaxation:
        weights = self._grid.weights(left)[self._points]
        return self._programme.solve_again(weights, _knots(weights, self._points))

    def prices(self, lengths: np.ndarray) -> np.ndarray:
        """float64 by length: good prices, of which no pack is worth much more than 1."""
        return np.interp(lengths, self._points * self._grid.step, self._solved.prices)

    def packs(self, target: int, until: float = math.inf) -> Packs:
        """Packs for all; `target` packs are enough. until: `time.perf_counter`'s, after which nothing new is begun."""
        S, depth, supply, solved = len(self._counts) - 1, self._depth, _Supply(self._counts), self._solved
        made: Packs = []
        best: Packs = []
        fewest, total = 0, 0
        for stage in range(_STAGES):
            before = total
            few = solved.value < _FEW * len(solved.packs)
            share, rounding = (1.0, 0.5) if few else (_SHARE, 0.0)
            short = max(1, min(S // 16, S * (stage + 1) // 2048))
            # Two sequences fill a pack in few ways, so they choose first.
            slots_of = (solved.strategies > 0).sum(axis=1)
            for index in np.lexsort((-solved.packs, slots_of)).tolist():
                slots = (solved.strategies[index][solved.strategies[index] > 0] * self._grid.step).tolist()
                packs = supply.like(slots, int(solved.packs[index] * share + rounding), short)
                made += packs
                total += sum(count for _, count in packs)
            left = int(supply.left.sum())
            done = not left or total - before < _STALLED * max(1, fewest - before) or time.perf_counter() > until
            if done or few or stage >= 2:
                rest = fill_exactly(supply.left, depth, target - total) if left else []
                complete = total + sum(count for _, count in rest)
                if not best or complete < fewest:
                    best, fewest = made + rest, complete
                if done or fewest <= target:
                    break
            solved = self._solve(supply.left)
        return best
