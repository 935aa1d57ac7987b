"""Non-negative least squares: the fast solver held against the dense one and against the conditions of the optimum."""

import numpy as np
import pytest
from hypothesis import given
from scipy.optimize import nnls

from pack_data import nnlshp
from pack_data.packing.histogram import LengthHistogram
from pack_data.solver.nonnegative import solve_fast
from tests.pack_data_strategies import histograms


def coarse(factor: int) -> LengthHistogram:
    """SQuAD with lengths in units of `factor` tokens: the shape of real data, small enough for the dense solver."""
    whole = LengthHistogram.published("squad_1_1_384")
    lengths = np.repeat(-(-whole.lengths // factor), whole.counts[whole.lengths])
    return LengthHistogram.from_lengths(lengths, 384 // factor)


def residual(strategies, weights, counts, mixture) -> float:
    return float(np.linalg.norm(weights * (counts - nnlshp._counts(strategies, mixture, len(counts) - 1))))


def solve_reference(strategies, weights, counts):
    """The solve of the paper: a dense matrix [S, strategies] in scipy.optimize.nnls (Lawson and Hanson)."""
    matrix = np.zeros((len(counts), len(strategies)))
    for lengths in strategies.T:
        np.add.at(matrix, (lengths, np.arange(len(strategies))), 1.0)
    matrix *= weights[:, None]
    # SciPy 1.12 to 1.14 stop after 3 x columns steps, older and newer versions do not
    return nnls(matrix[1:], (weights * counts)[1:], maxiter=100 * len(strategies))[0]


def weights_of(S: int) -> np.ndarray:
    weights = np.ones(S + 1)
    weights[:9] = 0.09
    weights[0] = 0.0
    return weights


@pytest.mark.parametrize("factor", [8, 6])
def test_the_fast_solver_reaches_the_least_residual(factor, monkeypatch):
    histogram = coarse(factor)
    S = histogram.max_sequence_length
    strategies, weights = nnlshp._strategies_filling(S, 3), weights_of(S)
    counts = histogram.counts.astype(float)
    fast = solve_fast(strategies, weights, counts)
    reference = solve_reference(strategies, weights, counts)
    least = residual(strategies, weights, counts, reference)
    assert least > 1  # the histogram cannot be met exactly, so there is something to minimise
    assert residual(strategies, weights, counts, fast) == pytest.approx(least, rel=1e-5)
    # The minimum is strictly convex in the counts: whatever the mixture, these are the same.
    assert np.allclose(
        nnlshp._counts(strategies, fast, S), nnlshp._counts(strategies, reference, S), atol=1e-4 * counts.max()
    )
    assert np.count_nonzero(fast) <= S
    packs = nnlshp.pack(histogram, max_sequences_per_pack=3).packs
    monkeypatch.setattr(nnlshp, "solve_fast", solve_reference)
    assert packs == pytest.approx(nnlshp.pack(histogram, max_sequences_per_pack=3).packs, rel=2e-3)


@given(histogram=histograms(max_sequence_length=24, max_count=50))
def test_the_fast_solver_meets_the_optimality_conditions(histogram):
    S = histogram.max_sequence_length
    if not histogram.sequences:
        return
    strategies, weights = nnlshp._strategies_filling(S, 3), weights_of(S)
    counts = histogram.counts.astype(float)
    mixture = solve_fast(strategies, weights, counts)
    assert (mixture >= 0).all()
    rest = weights**2 * (counts - nnlshp._counts(strategies, mixture, S))
    gradient = rest[strategies].sum(axis=1)
    scale = float((weights * counts).max())
    assert gradient.max() <= 1e-5 * scale  # no strategy would lower the residual
    assert abs(gradient @ mixture) <= 1e-5 * scale**2  # none in use would raise it


def test_a_solver_failure_keeps_the_interior_mixture(monkeypatch):
    """The vertex only saves strategies: where the linear programme fails, the same residual comes without it."""
    import scipy.optimize

    histogram = coarse(8)
    S = histogram.max_sequence_length
    strategies, weights = nnlshp._strategies_filling(S, 3), weights_of(S)
    counts = histogram.counts.astype(float)
    vertex = solve_fast(strategies, weights, counts)
    failed = scipy.optimize.OptimizeResult(status=4, x=None)
    monkeypatch.setattr(scipy.optimize, "linprog", lambda *args, **options: failed)
    interior = solve_fast(strategies, weights, counts)
    assert residual(strategies, weights, counts, interior) == pytest.approx(
        residual(strategies, weights, counts, vertex), rel=1e-5
    )
    nnlshp.pack(histogram, max_sequences_per_pack=3).check(histogram)
