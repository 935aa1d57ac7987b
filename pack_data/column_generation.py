"""The cutting-stock linear programme over a length histogram with a limit on sequences per pack, by column generation.

    minimise    sum_j x_j                              x_j >= 0: packs made with strategy j
    subject to  sum_j a_lj x_j >= n_l  for every l     a_lj: slots for length l in strategy j; n_l: sequences of length l

and "a slot for length l may hold the next shorter length" columns of cost 0, so that only maximal packs are needed.  The
prices (duals) of the rows are then non-decreasing in l.  A strategy improves the programme if its prices add up to more
than 1; the best ones come out of a knapsack over (sequences, tokens), solved for all lengths at once by `PackTables`.
Gilmore and Gomory, "A linear programming approach to the cutting-stock problem" (1961); prices smoothed towards the best
ones so far as in Pessoa, Sadykov, Uchoa and Vanderbeck, "Automation and combination of linear-programming based
stabilization techniques in column generation" (2018).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from scipy.optimize import linprog
from scipy.sparse import coo_matrix, csc_matrix, diags, hstack

_TOLERANCE = 1e-9  # relative; the linear programmes are solved to about 1e-9 themselves
_CHUNK = 1 << 17  # elements of one block of the knapsack tables, so that a block stays in the cache


class PackTables:
    """Most valuable packs of up to k sequences for every capacity 0..S, by max-plus products of smaller ones.

    prices [S + 1] by length, non-decreasing, prices[0] = 0: a slot may stay empty, so value_k is non-decreasing in k and
    in the capacity, and value_(i + j)(c) = max_s value_i(s) + value_j(c - s).
    """

    def __init__(self, lengths: np.ndarray, prices: np.ndarray, max_sequence_length: int) -> None:
        stairs = np.zeros(max_sequence_length + 1, np.int64)
        stairs[lengths] = np.arange(1, len(lengths) + 1)
        stairs = np.maximum.accumulate(stairs)
        self._longest = np.concatenate([[0], lengths])[stairs]  # the longest length that fits, 0 for none
        self._values: Dict[int, np.ndarray] = {1: np.concatenate([[0.0], prices])[stairs]}
        self._splits: Dict[int, Tuple[int, int, np.ndarray]] = {}

    def values(self, sequences: int) -> np.ndarray:
        """float64 [S + 1]: the best price of at most this many sequences (at least 0), by capacity."""
        if sequences == 0:
            return np.zeros_like(self._values[1])
        if sequences not in self._values:
            first = 1 << (sequences.bit_length() - 1)
            first = first // 2 if first == sequences else first
            second = sequences - first
            self._values[sequences], taken = _max_plus(self.values(first), self.values(second))
            self._splits[sequences] = first, second, taken
        return self._values[sequences]

    def packs(self, sequences: int, capacities: np.ndarray) -> np.ndarray:
        """int64 [len(capacities), sequences]: the lengths in a best pack for each capacity, 0 for an empty slot."""
        if sequences == 0:
            return np.zeros((len(capacities), 0), np.int64)
        if sequences == 1:
            return self._longest[capacities][:, None]
        self.values(sequences)
        first, second, taken = self._splits[sequences]
        share = taken[capacities]
        return np.hstack([self.packs(first, share), self.packs(second, capacities - share)])


def _max_plus(a: np.ndarray, b: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """(max over s of a[s] + b[c - s], the s that attains it), for c = 0..S."""
    n = len(a)
    windows = sliding_window_view(np.concatenate([b[::-1], np.full(n - 1, -np.inf)]), n)[::-1]  # windows[c, s] = b[c - s]
    best, split = np.empty(n), np.empty(n, np.int64)
    rows = max(1, _CHUNK // n)
    for start in range(0, n, rows):
        stop = min(n, start + rows)
        sums = windows[start:stop, :stop] + a[:stop]
        split[start:stop] = sums.argmax(axis=1)
        best[start:stop] = sums[np.arange(stop - start), split[start:stop]]
    return best, split


class Pool:
    """Strategies as a matrix [lengths, strategies] of slot counts, each once."""

    def __init__(self, lengths: np.ndarray, max_sequence_length: int) -> None:
        self.lengths = lengths
        self._row = np.zeros(max_sequence_length + 1, np.int64)
        self._row[lengths] = np.arange(1, len(lengths) + 1)
        self.strategies = np.zeros((0, 1), np.int64)

    def add(self, strategies: np.ndarray) -> int:
        """Adds int [n, depth] lengths (0 = empty slot); returns how many were new."""
        before = len(self.strategies)
        width = max(strategies.shape[1], self.strategies.shape[1])
        both = [np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in (self.strategies, strategies)]
        self.strategies = np.unique(-np.sort(-np.vstack(both), axis=1), axis=0)
        return len(self.strategies) - before

    def keep(self, which: np.ndarray) -> None:
        self.strategies = self.strategies[which]

    def worth(self, prices: np.ndarray, strategies: np.ndarray) -> np.ndarray:
        """The prices [lengths] in each of the strategies added up."""
        return np.concatenate([[0.0], prices])[self._row[strategies]].sum(axis=1)

    def matrix(self, strategies: np.ndarray) -> csc_matrix:
        """Sparse [lengths, strategies]: slots of each length."""
        rows = self._row[strategies].ravel()
        columns = np.repeat(np.arange(len(strategies)), strategies.shape[1])
        used = rows > 0
        return coo_matrix(
            (np.ones(int(used.sum())), (rows[used] - 1, columns[used])), shape=(len(self.lengths), len(strategies))).tocsc()


@dataclass(frozen=True)
class Relaxation:
    """The linear programme's outcome."""

    value: float  # of the strategies found: an upper bound of the programme's optimum
    bound: float  # of the prices: a lower bound of it (up to rounding; the certificate makes it exact)
    prices: np.ndarray  # float64 [lengths], non-decreasing, no pack worth more than 1 (up to rounding)
    strategies: np.ndarray  # int64 [n, depth]: the strategies in use, longest first, 0 = empty slot
    packs: np.ndarray  # float64 [n]: packs made with each


def first_prices(lengths: np.ndarray, counts: np.ndarray, max_sequence_length: int, depth: int) -> List[np.ndarray]:
    """Prices [lengths] that are good before anything is solved.

    By tokens, and by tokens with every length above S - t priced as a whole pack and none below t (Martello and Toth's
    bound L2, 1990), at the best t; by sequences; and mixtures of tokens and sequences.
    """
    S = max_sequence_length
    tokens = lengths / S
    below = np.concatenate([[0], np.cumsum(counts)]).astype(float)
    tokens_below = np.concatenate([[0.0], np.cumsum(counts * tokens)])
    thresholds = np.concatenate([[0], lengths[lengths <= S // 2]])
    low = np.searchsorted(lengths, thresholds)
    high = np.searchsorted(lengths, S - thresholds, side="right")
    bounds = below[-1] - below[high] + tokens_below[high] - tokens_below[low]
    t = thresholds[int(np.argmax(bounds))]
    prices = [np.where(lengths > S - t, 1.0, np.where(lengths < t, 0.0, tokens))]
    prices += [(1 - share) * tokens + share / depth for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    return prices


class _Master(NamedTuple):
    value: float
    prices: np.ndarray  # [lengths]
    packs: np.ndarray  # [strategies]


def _solve_master(pool: Pool, counts: np.ndarray) -> _Master:
    """The linear programme over the pool."""
    m, n = len(counts), len(pool.strategies)
    shorter = diags([np.ones(m - 1), -np.ones(m - 1)], [0, -1], shape=(m, m - 1)).tocsc()  # a slot of row l + 1 holds l
    slots = hstack([pool.matrix(pool.strategies), shorter]).tocsc()
    cost = np.concatenate([np.ones(n), np.zeros(m - 1)])
    scale = max(1.0, float(counts.mean()))  # keeps the solver's absolute tolerances meaningful for millions of sequences
    result = linprog(cost, A_ub=-slots, b_ub=-counts / scale, method="highs-ds")
    if result.x is None:
        raise RuntimeError(f"HiGHS found no solution of the packing programme: {result.message}")
    prices = np.maximum.accumulate(np.maximum(-result.ineqlin.marginals, 0.0))
    return _Master(result.fun * scale, prices, np.maximum(result.x[:n], 0.0) * scale)


def relax(
    lengths: np.ndarray, counts: np.ndarray, max_sequence_length: int, depth: int, *,
    seeds: Optional[np.ndarray] = None, good_enough: Optional[float] = None, rounds: int = 400, exact_rounds: int = 12,
    progress: Callable[[float, float], None] = lambda value, bound: None,
) -> Relaxation:
    """Solves the linear programme over `lengths` (ascending, all with counts > 0), packs of S slots, `depth` sequences.

    seeds: strategies to start from, int [n, any].  Stops at the optimum; also as soon as the value is at most
    `good_enough`, after `rounds`, and, after `exact_rounds`, once the value cannot fall below the next whole number.

    Deep packs are expensive and rarely needed: strategies grow deeper than a mean pack only once shallower ones do not
    improve any more, while the bound holds for the full depth all the time.
    """
    S = max_sequence_length
    m = len(lengths)
    weights = counts.astype(float)
    pool = Pool(lengths, S)

    def price(prices: np.ndarray, reach: int) -> Tuple[float, np.ndarray]:
        """The value of the best pack, and for every length a best pack of at most `reach` sequences that contains it."""
        tables = PackTables(lengths, prices, S)
        most = (prices + tables.values(depth - 1)[S - lengths]).max()
        return float(most), np.hstack([lengths[:, None], tables.packs(reach - 1, S - lengths)])

    bound, best_prices = -1.0, np.zeros(m)

    def improve(prices: np.ndarray, most: float) -> None:
        nonlocal bound, best_prices
        if most > 0 and weights @ prices / most > bound:
            bound, best_prices = float(weights @ prices / most), prices / most

    reach = depth
    for prices in first_prices(lengths, counts, S, depth):
        most, _ = price(prices, 1)
        improve(prices, most)
    reach = min(depth, max(4, int(weights.sum() / bound) + 2))
    for prices in first_prices(lengths, counts, S, reach):
        pool.add(price(prices, reach)[1])
    if seeds is not None:
        pool.add(seeds)

    for round_ in range(rounds):
        master = _solve_master(pool, counts)
        progress(master.value, bound)
        used = master.packs > 0
        strategies, packs = pool.strategies[used], master.packs[used]
        if master.value - bound <= _TOLERANCE * master.value:
            break
        if good_enough is not None and master.value <= good_enough:
            break
        if round_ >= exact_rounds and np.ceil(bound - 1e-6) >= master.value:
            break
        if len(pool.strategies) > 3 * m:  # forget what the prices like least
            worth = pool.worth(master.prices, pool.strategies)
            pool.keep(used | (worth >= np.partition(worth, -3 * m)[-3 * m]))
        smoothing, added = 0.8, 0
        while not added:
            prices = smoothing * best_prices + (1 - smoothing) * master.prices
            most, candidates = price(prices, reach)
            improve(prices, most)
            added = pool.add(candidates[pool.worth(master.prices, candidates) > 1 + _TOLERANCE])
            if smoothing > 0.3:
                smoothing *= 0.6
            elif smoothing > 0:
                smoothing = 0.0
            elif reach < depth:
                reach = min(depth, 2 * reach)
            else:
                break
        if not added:
            break
    return Relaxation(master.value, bound, best_prices, strategies, packs)
