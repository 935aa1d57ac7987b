"""Non-negative least squares: the mixture meets the conditions of the optimum, which are sufficient."""

import numpy as np
import scipy.linalg
import scipy.optimize
from hypothesis import given
from scipy.linalg import cho_factor
from threadpoolctl import threadpool_info, threadpool_limits

from pack_data import nnlshp
from pack_data.packing.histogram import LengthHistogram
from pack_data.solver.nonnegative import solve_fast
from tests.pack_data_strategies import histograms


def check_optimum(histogram):
    """Solve, and check the conditions of Karush, Kuhn and Tucker; return the mixture."""
    S = histogram.max_sequence_length
    strategies = nnlshp._strategies_filling(S, 3)
    weights = np.ones(S + 1)
    weights[:9] = 0.09
    weights[0] = 0.0
    counts = histogram.counts.astype(float)
    mixture = solve_fast(strategies, weights, counts)
    assert (mixture >= 0).all()
    rest = weights**2 * (counts - nnlshp._counts(strategies, mixture, S))
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
    squad = LengthHistogram.published("squad_1_1_384")
    lengths = np.repeat(-(-squad.lengths // 8), squad.counts[squad.lengths])
    histogram = LengthHistogram.from_lengths(lengths, 48)
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
