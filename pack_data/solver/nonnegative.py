"""Non-negative least squares over strategies: min |w (A x - b)| over x >= 0.

A column of A is a strategy, int32 [strategies, 3]: its lengths, 0 where it has fewer than three. b [S + 1] counts the
sequences by length, w [S + 1] weights the lengths; index 0 is the absent length and has the weight 0.

Both solvers reach the least residual. The fast one is an interior-point method whose linear systems have the size of S,
not of the strategies, and then a vertex of the optimal face by linear programming, because the mixture of least
strategies is the one that rounding hurts least.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Tuple

import numpy as np

from pack_data.cli.command import progress_bar


def solve_reference(strategies: np.ndarray, weights: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The solve of the paper: a dense matrix [S, strategies] in scipy.optimize.nnls (Lawson and Hanson)."""
    from scipy.optimize import nnls

    matrix = np.zeros((len(counts), len(strategies)))
    for lengths in strategies.T:
        np.add.at(matrix, (lengths, np.arange(len(strategies))), 1.0)
    matrix *= weights[:, None]
    with progress_bar(None, "nnls, dense: about 20 s at 512") as bar:
        if len(counts) > 256:
            bar.announce()
        # SciPy 1.12 to 1.14 stop after 3 x columns steps, older and newer versions do not
        return nnls(matrix[1:], (weights * counts)[1:], maxiter=100 * len(strategies))[0]


def solve_fast(strategies: np.ndarray, weights: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The same minimum from sparse columns: an interior point, then a vertex with the same counts."""
    scale = float((weights * counts).max())
    inner, price = _interior_point(strategies, weights, counts / scale)
    return scale * _vertex(strategies, inner, price, len(counts))


def _interior_point(strategies: np.ndarray, weights: np.ndarray, counts: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """x > 0 near the minimum of |d - M x| with M = w A, d = w b, |d| of about 1; and s = M^T (M x - d) > 0, its prices.

    Mehrotra's predictor-corrector method on the optimality conditions  s = -M^T r,  r = d - M x,  x s = 0.  Eliminating
    the steps in x and s leaves (I + M diag(x / s) M^T) dr = ..., an S x S system that is never singular.
    """
    from scipy.linalg import LinAlgError, cho_factor, cho_solve

    size, number = len(counts), len(strategies)
    columns = [np.ascontiguousarray(lengths, np.int64) for lengths in strategies.T]
    pairs = np.concatenate([columns[i] * size + columns[j] for i in range(3) for j in range(i, 3)])
    shares = [0.5 if i == j else 1.0 for i in range(3) for j in range(i, 3)]
    both_weights = np.outer(weights, weights)

    def transposed(v: np.ndarray) -> np.ndarray:  # M^T v
        v = weights * v
        return v[columns[0]] + v[columns[1]] + v[columns[2]]

    def times(u: np.ndarray) -> np.ndarray:  # M u
        return weights * sum(np.bincount(column, u, size) for column in columns)

    def gram(u: np.ndarray) -> np.ndarray:  # I + M diag(u) M^T
        half = np.bincount(pairs, np.concatenate([share * u for share in shares]), size * size).reshape(size, size)
        matrix: np.ndarray = (half + half.T) * both_weights
        matrix[np.diag_indices(size)] += 1.0
        return matrix

    def longest_step(v: np.ndarray, dv: np.ndarray) -> float:  # keeps v + step dv >= 0
        falling = dv < 0
        return min(1.0, float(np.min(-v[falling] / dv[falling], initial=np.inf)))

    def direction(
        factor: Any, primal: np.ndarray, dual: np.ndarray, x: np.ndarray, s: np.ndarray, target: np.ndarray
    ) -> Tuple[np.ndarray, ...]:
        dr = cho_solve(factor, primal - times((target + x * dual) / s), check_finite=False)
        ds = -dual - transposed(dr)
        return (target - x * ds) / s, dr, ds

    d = weights * counts
    x = np.full(number, size / number)
    r = d - times(x)
    s = np.maximum(-transposed(r), 0.01) + 0.1
    with progress_bar(None, "nnls, interior point") as bar:
        for _ in range(200):
            dual = s + transposed(r)
            primal = d - times(x) - r
            gap = float(x @ s) / number
            if gap * number < 1e-7 * float(r @ r) + 1e-16 and np.abs(dual).max() < 1e-11:
                break
            try:
                factor = cho_factor(gram(x / s), overwrite_a=True, check_finite=False)
            except LinAlgError:  # x / s spans more digits than a float has: no step improves x any more
                break
            solve = partial(direction, factor, primal, dual, x, s)
            dx, dr, ds = solve(-x * s)
            step = min(longest_step(x, dx), longest_step(s, ds))
            predicted = float((x + step * dx) @ (s + step * ds)) / number
            dx, dr, ds = solve((predicted / gap) ** 3 * gap - x * s - dx * ds)
            step = 0.995 * min(longest_step(x, dx), longest_step(s, ds))
            x, r, s = x + step * dx, r + step * dr, s + step * ds
            bar.update()
    return x, s


def _vertex(strategies: np.ndarray, inner: np.ndarray, price: np.ndarray, size: int) -> np.ndarray:
    """A mixture of at most S strategies with the counts of `inner`, and so with the same residual.

    Only strategies whose amount is above their price can be part of a minimum, where one of the two is zero.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csc_matrix

    used = np.flatnonzero(inner > price)
    if not len(used):
        return inner
    rows, columns = strategies[used].T.ravel(), np.tile(np.arange(len(used)), 3)
    there = rows > 0
    matrix = csc_matrix((np.ones(there.sum()), (rows[there] - 1, columns[there])), (size - 1, len(used)))
    counts = matrix @ inner[used]
    scale = 1e3 / counts.max()  # HiGHS works with absolute tolerances of 1e-7
    # Without presolve, which looks for dominated columns and took up to 60 times as long as the solve.
    found = linprog(
        1e3 * price[used],
        A_eq=matrix,
        b_eq=scale * counts,
        bounds=(0, None),
        method="highs-ds",
        options={"presolve": False},
    )
    if found.status != 0:  # the interior mixture has the same residual, with more strategies
        return inner
    mixture = np.zeros(len(inner))
    mixture[used] = np.maximum(found.x, 0.0) / scale
    return mixture
