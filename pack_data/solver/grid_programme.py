"""Prices for rows of any length, by the linear programme on a grid of one or two thousand lengths.

A sequence between two grid points counts for both in proportion, so that the numbers of sequences and tokens stay the
same.
"""

from __future__ import annotations

import numpy as np

from pack_data.solver.column_generation import Programme, even_indices

_POINTS = 1024  # points of the grid
# Number of knots. Half as many lower the bound of 20,000 chats, some long, at depth 9 from 2,283 to 2,278 packs.
_KNOTS = 240


def _weights(counts: np.ndarray, step: int, slots: int) -> np.ndarray:
    """Return the sequences at lengths 0, step, 2 step, ..., float64 [slots + 1].

    A sequence between two of them counts for both in proportion, one below the first for the first.
    """
    lengths = np.flatnonzero(counts)
    number = counts[lengths]
    position = np.clip(lengths / step, 1.0, slots)
    low = np.minimum(position.astype(np.int64), max(1, slots - 1))
    share_of_high = position - low
    size = slots + 2
    weights = np.bincount(low, number * (1 - share_of_high), size)
    weights += np.bincount(low + 1, number * share_of_high, size)
    return weights[: slots + 1]


def grid_prices(counts: np.ndarray, depth: int, lengths: np.ndarray) -> np.ndarray:
    """Return good prices, float64 [lengths]; no pack is worth much more than 1.

    Args:
        counts: sequences by length, int [S + 1]; at least one sequence.
        depth: most sequences of a pack.
        lengths: lengths to price, int [lengths].
    """
    S = len(counts) - 1
    step = -(-S // _POINTS)
    # Slots of a pack in steps. If the step does not divide S, the rest is left for the pairs.
    slots = S // step
    weights = _weights(counts, step, slots)
    points = np.flatnonzero(weights)
    weights = weights[points]

    shortest = int(points[0])
    deepest = min(depth, slots // shortest)
    programme = Programme(points, weights, slots, deepest)
    knots = even_indices(len(points), _KNOTS)
    solution = programme.solve_on(knots, lambda value, bound, prices: None)
    return np.interp(lengths, points * step, solution.prices)
