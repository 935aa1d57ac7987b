"""Prices for rows of any length, by the linear programme on a grid of one or two thousand lengths.

A sequence between two grid points counts for both in proportion, so that the numbers of sequences and tokens stay the
same.
"""

from __future__ import annotations

import numpy as np

from pack_data.solver.column_generation import Programme

# Points of the grid; more of them if packs have at most `_SHALLOW` sequences, which makes tables of few sequences.
_POINTS = 1024
_POINTS_SHALLOW = 2048
_SHALLOW = 4
_KNOTS = 40  # number of knots that are even in index, in sequences and in tokens, each


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
        share_of_low = 1 - share_of_high
        weights = np.bincount(low, number * share_of_low, size)
        weights += np.bincount(high, number * share_of_high, size)
        within = weights[: self.slots + 1]
        return np.asarray(within)


def _knots(weights: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return indices of lengths, ascending: the first, the last, and some evenly in index, sequences and tokens."""
    last = len(lengths) - 1
    present = np.flatnonzero(weights > 0)
    if not len(present):
        return np.array([0, last])
    even = np.linspace(0, len(present) - 1, _KNOTS).astype(int)
    ends = np.array([0, last])
    shortest = present[:4]
    longest = present[-4:]
    chosen = [ends, shortest, longest, present[even]]
    for amount in (weights, weights * lengths):
        sums = np.cumsum(amount)
        parts = np.linspace(0, sums[-1], _KNOTS + 2)
        inner = parts[1:-1]
        chosen.append(np.searchsorted(sums, inner))
    knots = np.concatenate(chosen)
    return np.unique(np.minimum(knots, last))


def grid_prices(counts: np.ndarray, depth: int, lengths: np.ndarray) -> np.ndarray:
    """Return good prices, float64 [lengths]; no pack is worth much more than 1.

    Args:
        counts: sequences by length, int [S + 1]; at least one sequence.
        depth: most sequences of a pack.
        lengths: lengths to price, int [lengths].
    """
    S = len(counts) - 1
    number = _POINTS
    if depth <= _SHALLOW:
        number = _POINTS_SHALLOW
    grid = _Grid(S, number)
    weights = grid.weights(counts)
    points = np.flatnonzero(weights)
    weights = weights[points]

    shortest = int(points[0])
    deepest = min(depth, grid.slots // shortest)
    programme = Programme(points, weights, grid.slots, deepest)
    knots = _knots(weights, points)
    solution = programme.solve_on(knots, lambda value, bound, prices: None)
    priced = points * grid.step
    return np.interp(lengths, priced, solution.prices)
