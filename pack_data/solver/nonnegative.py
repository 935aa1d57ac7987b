"""Non-negative least squares over strategies: the minimum of |w (A x - b)| over x >= 0.

A column of A is a strategy, a row of `strategies`, int32 [strategies, 3]: its lengths, 0 if it has fewer than three.
b [S + 1] counts the sequences by length, w [S + 1] weights the lengths; index 0 is the absent length and has weight 0.

The solver is an interior-point method whose linear systems have the size of S, not of the strategies. A vertex of the
optimal face then follows by linear programming, because the mixture of fewest strategies loses least in rounding.
"""

from __future__ import annotations

from typing import Tuple

import numpy as np
from threadpoolctl import threadpool_limits

from pack_data.cli.terminal import progress_bar

# Most steps of the interior-point method; it takes 20 to 60.
_MAX_STEPS = 200
# The method ends at this complementarity gap, relative to the squared residual, plus an absolute one (|d| is about 1).
_GAP = 1e-7
_MIN_GAP = 1e-16
# Largest violation of the dual constraints at which it may end.
_INFEASIBILITY = 1e-11
# Share of the step to the boundary that is taken, so that x and s stay positive.
_STEP_SHARE = 0.995
# HiGHS works with absolute tolerances of 1e-7, so prices and the largest count are scaled to about this.
_VERTEX_SCALE = 1e3


def solve_fast(strategies: np.ndarray, weights: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return a mixture x of least residual, float64 [strategies], with few strategies in use.

    Args:
        strategies: lengths of each strategy, int32 [strategies, 3].
        weights: float64 [S + 1], 0 for the absent length.
        counts: sequences by length, float64 [S + 1].
    """
    scale = float((weights * counts).max())
    inner, price = _interior_point(strategies, weights, counts / scale)
    return scale * _vertex(strategies, inner, price, len(counts))


def _interior_point(
    strategies: np.ndarray, weights: np.ndarray, counts: np.ndarray
) -> Tuple[np.ndarray, np.ndarray]:
    """Return x > 0 near the minimum of |d - M x|, and its prices s = M^T (M x - d) > 0.

    M = w A, d = w b, and |d| is about 1. Mehrotra's predictor-corrector method on the optimality conditions
    s = -M^T r,  r = d - M x,  x s = 0.  Eliminating the steps in x and s leaves (I + M diag(x / s) M^T) dr = ..., an
    S x S system that is never singular.
    """
    from scipy.linalg import LinAlgError, cho_factor, cho_solve

    size = len(counts)
    number = len(strategies)
    columns = [np.ascontiguousarray(lengths, np.int64) for lengths in strategies.T]
    # Each pair of slots is an entry of the matrix M diag(u) M^T; entries of one slot with itself are halved, because
    # the matrix is added to its transpose.
    slot_pairs = ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2))
    entries = np.concatenate([columns[i] * size + columns[j] for i, j in slot_pairs])
    shares = [0.5 if i == j else 1.0 for i, j in slot_pairs]
    both_weights = np.outer(weights, weights)

    def transposed(v: np.ndarray) -> np.ndarray:  # M^T v
        weighted = weights * v
        return weighted[columns[0]] + weighted[columns[1]] + weighted[columns[2]]

    def times(u: np.ndarray) -> np.ndarray:  # M u
        return weights * sum(np.bincount(column, u, size) for column in columns)

    def gram(u: np.ndarray) -> np.ndarray:  # I + M diag(u) M^T
        amounts = np.concatenate([share * u for share in shares])
        half = np.bincount(entries, amounts, size * size).reshape(size, size)
        matrix: np.ndarray = (half + half.T) * both_weights
        matrix[np.diag_indices(size)] += 1.0
        return matrix

    def longest_step(dx: np.ndarray, ds: np.ndarray) -> float:  # keeps x and s at least 0
        longest = 1.0
        for v, dv in ((x, dx), (s, ds)):
            falling = dv < 0
            ratios = -v[falling] / dv[falling]
            longest = float(ratios.min(initial=longest))
        return longest

    def direction(target: np.ndarray) -> Tuple[np.ndarray, ...]:  # from x, s to x s = target
        right_side = primal - times((target + x * dual) / s)
        dr = cho_solve(factor, right_side, check_finite=False)
        ds = -dual - transposed(dr)
        dx = (target - x * ds) / s
        return dx, dr, ds

    d = weights * counts
    x = np.full(number, size / number)
    r = d - times(x)
    s = np.maximum(-transposed(r), 0.01) + 0.1
    # The matrices are small: on a busy machine the threads of BLAS wait for each other much longer than they work.
    with threadpool_limits(1, "blas"), progress_bar(None, "nnls, interior point") as bar:
        for _ in range(_MAX_STEPS):
            dual = s + transposed(r)
            primal = d - times(x) - r
            gap = float(x @ s) / number
            gap_is_closed = gap * number < _GAP * float(r @ r) + _MIN_GAP
            if gap_is_closed and np.abs(dual).max() < _INFEASIBILITY:
                break
            try:
                factor = cho_factor(gram(x / s), overwrite_a=True, check_finite=False)
            except LinAlgError:
                # x / s spans more digits than a float has, so no step improves x any more.
                break

            # The predictor aims at x s = 0.
            dx, dr, ds = direction(-x * s)
            step = longest_step(dx, ds)
            predicted = float((x + step * dx) @ (s + step * ds)) / number

            # The corrector aims at a positive gap and allows for the product dx ds.
            centre = (predicted / gap) ** 3 * gap
            dx, dr, ds = direction(centre - x * s - dx * ds)
            step = _STEP_SHARE * longest_step(dx, ds)
            x = x + step * dx
            r = r + step * dr
            s = s + step * ds
            bar.update()
    return x, s


def _vertex(strategies: np.ndarray, inner: np.ndarray, price: np.ndarray, size: int) -> np.ndarray:
    """Return a mixture of at most S strategies with the counts of `inner`, and so with the same residual.

    Only strategies whose amount exceeds their price can be part of a minimum, where one of the two is zero.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csc_matrix

    used = np.flatnonzero(inner > price)
    if not len(used):
        return inner
    rows = strategies[used].T.ravel()
    columns = np.tile(np.arange(len(used)), 3)
    slots = csc_matrix((np.ones(len(rows)), (rows, columns)), (size, len(used)))
    matrix = slots[1:]  # row 0 counts absent lengths
    counts = matrix @ inner[used]
    scale = _VERTEX_SCALE / counts.max()
    # Presolve looks for dominated columns and took up to 60 times as long as the solve, so it is off.
    solution = linprog(
        _VERTEX_SCALE * price[used],
        A_eq=matrix,
        b_eq=scale * counts,
        bounds=(0, None),
        method="highs-ds",
        options={"presolve": False},
    )
    if solution.status != 0:
        # The interior mixture has the same residual, with more strategies.
        return inner
    mixture = np.zeros(len(inner))
    mixture[used] = np.maximum(solution.x, 0.0) / scale
    return mixture
