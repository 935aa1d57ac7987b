"""Non-negative least squares: the mixture meets the conditions of the optimum, and a dense solver finds no better."""

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
from hypothesis import given
from scipy.linalg import cho_factor
from threadpoolctl import threadpool_info, threadpool_limits

from pack_data import nnlshp
from pack_data.packing.histogram import LengthHistogram
from pack_data.solver.nonnegative import solve_fast
from tests.pack_data_strategies import histograms


def squad_in_units_of(tokens):
    """Return the published histogram of SQuAD with lengths in units of some tokens, small enough for a dense solver."""
    squad = LengthHistogram.published("squad_1_1_384")
    lengths = np.repeat(-(-squad.lengths // tokens), squad.counts[squad.lengths])
    return LengthHistogram.from_lengths(lengths, 384 // tokens)


def programme(histogram):
    """Return strategies, weights and counts as NNLSHP passes them."""
    S = histogram.max_sequence_length
    weights = np.ones(S + 1)
    weights[:9] = 0.09
    weights[0] = 0.0
    return nnlshp._strategies_filling(S, 3), weights, histogram.counts.astype(float)


def solve_dense(strategies, weights, counts):
    """Solve as the paper does: a dense matrix [S, strategies] in scipy.optimize.nnls (Lawson and Hanson)."""
    matrix = np.zeros((len(counts), len(strategies)))
    for lengths in strategies.T:
        np.add.at(matrix, (lengths, np.arange(len(strategies))), 1.0)
    matrix *= weights[:, None]
    # SciPy 1.12 to 1.14 stop after 3 x columns steps, other versions do not.
    return scipy.optimize.nnls(matrix[1:], (weights * counts)[1:], maxiter=100 * len(strategies))[0]


@pytest.mark.parametrize("tokens", [8, 6])
def test_the_solver_reaches_the_least_residual(tokens, monkeypatch):
    histogram = squad_in_units_of(tokens)
    strategies, weights, counts = programme(histogram)
    packs = nnlshp.pack(histogram, max_sequences_per_pack=3).packs
    counts_of = []
    for solve in (solve_fast, solve_dense):
        mixture = solve(strategies, weights, counts)
        counts_of.append(nnlshp._counts(strategies, mixture, histogram.max_sequence_length))
    fast, least = (np.linalg.norm(weights * (counts - met)) for met in counts_of)
    assert fast == pytest.approx(least, rel=1e-5)
    assert least > 1  # the histogram cannot be met exactly, so there is something to minimise
    # The residual is strictly convex in the counts: whatever the mixture, the counts are the same.
    assert np.allclose(*counts_of, atol=1e-4 * counts.max())
    monkeypatch.setattr(nnlshp, "solve_fast", solve_dense)
    assert packs == pytest.approx(nnlshp.pack(histogram, max_sequences_per_pack=3).packs, rel=2e-3)


def check_optimum(histogram):
    """Solve, and check the conditions of Karush, Kuhn and Tucker; return the mixture."""
    strategies, weights, counts = programme(histogram)
    mixture = solve_fast(strategies, weights, counts)
    assert (mixture >= 0).all()
    rest = weights**2 * (counts - nnlshp._counts(strategies, mixture, histogram.max_sequence_length))
    gradient = rest[strategies].sum(axis=1)
    scale = float((weights * counts).max())
    assert gradient.max() <= 1e-5 * scale  # no strategy would lower the residual
    assert abs(gradient @ mixture) <= 1e-5 * scale**2  # none in use would raise it
    return mixture


@given(histogram=histograms(max_sequence_length=24, max_count=50))
def test_the_solver_meets_the_optimality_conditions(histogram):
    if histogram.sequences:
        check_optimum(histogram)


def test_few_strategies_are_used_unless_the_linear_programme_fails(monkeypatch):
    """The vertex only saves strategies: where the programme fails, the same residual comes without it."""
    histogram = squad_in_units_of(8)
    vertex = check_optimum(histogram)
    assert np.count_nonzero(vertex) <= 48
    failed = scipy.optimize.OptimizeResult(status=4, x=None)
    monkeypatch.setattr(scipy.optimize, "linprog", lambda *args, **options: failed)
    interior = check_optimum(histogram)
    assert np.count_nonzero(interior) > np.count_nonzero(vertex)
    nnlshp.pack(histogram, max_sequences_per_pack=3).check(histogram)


def blas_threads():
    """Return the numbers of threads that the BLAS libraries of this process use."""
    return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}


def test_the_solver_uses_one_thread_of_blas_and_gives_the_others_back(monkeypatch):
    """Small products wait for each other's threads: beside a busy process, nnlshp took 20 times its processor time."""
    threads_at_steps = []

    def factor_and_count(matrix, **options):
        threads_at_steps.append(blas_threads())
        return cho_factor(matrix, **options)

    monkeypatch.setattr(scipy.linalg, "cho_factor", factor_and_count)
    histogram = LengthHistogram.from_lengths([3, 5, 8, 8, 13], 16)
    with threadpool_limits(2, "blas"):
        nnlshp.pack(histogram, max_sequences_per_pack=3)
        assert blas_threads() == {2}
    assert threads_at_steps
    assert all(threads == {1} for threads in threads_at_steps)
