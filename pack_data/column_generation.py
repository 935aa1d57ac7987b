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
_COARSE_ROWS = (24, 96)  # rows of the programmes solved before the full one
_FULL_ROWS = 1536  # beyond, the full programme takes minutes and the finest of these instead
_FINEST_ROWS = 256
_CANDIDATES = 512  # strategies sought a round


class PackTables:
    """Most valuable packs of up to k sequences, by max-plus products: value_(i + j)(c) = max_s value_i(s) + value_j(c - s).

    A slot may stay empty, so value_k is non-decreasing in k and in the capacity c.
    lengths int [m] ascending; prices float64 [m] by length, non-decreasing.
    """

    def __init__(self, lengths: np.ndarray, prices: np.ndarray, max_sequence_length: int) -> None:
        steps = np.zeros(max_sequence_length + 1, np.int64)
        steps[lengths] = np.arange(1, len(lengths) + 1)
        steps = np.maximum.accumulate(steps)
        self._longest = np.concatenate([[0], lengths])[steps]  # the longest length that fits, 0 for none
        self._tables: Dict[int, np.ndarray] = {0: np.zeros(len(steps)), 1: np.concatenate([[0.0], prices])[steps]}

    def _table(self, sequences: int) -> np.ndarray:
        """float64 [S + 1]: the best value by capacity."""
        if sequences not in self._tables:
            a, b = self._table((sequences + 1) // 2), self._table(sequences // 2)
            windows = _windows(b)
            table = np.empty(len(a))
            rows = max(1, _CHUNK // len(a))
            for start in range(0, len(a), rows):
                stop = min(len(a), start + rows)
                share = stop if b is not a else stop // 2 + 1  # of two equal factors the first may have the smaller share
                (windows[start:stop, :share] + a[:share]).max(axis=1, out=table[start:stop])
            self._tables[sequences] = table
        return self._tables[sequences]

    def best(self, sequences: int, capacities: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """The best value of at most `sequences` sequences for each capacity, and the tokens its first half takes."""
        a, b = self._table((sequences + 1) // 2), self._table(sequences // 2)
        windows = _windows(b)
        value, share = np.empty(len(capacities)), np.empty(len(capacities), np.int64)
        rows = max(1, _CHUNK // len(a))
        for start in range(0, len(capacities), rows):
            sums = windows[capacities[start:start + rows]] + a
            share[start:start + rows] = sums.argmax(axis=1)
            value[start:start + rows] = sums[np.arange(len(sums)), share[start:start + rows]]
        return value, share

    def packs(self, sequences: int, capacities: np.ndarray) -> np.ndarray:
        """int64 [len(capacities), sequences]: the lengths in a best pack for each capacity, 0 for an empty slot."""
        if sequences == 0:
            return np.zeros((len(capacities), 0), np.int64)
        if sequences == 1:
            return self._longest[capacities][:, None]
        _, share = self.best(sequences, capacities)
        return np.hstack([self.packs((sequences + 1) // 2, share), self.packs(sequences // 2, capacities - share)])


def _windows(b: np.ndarray) -> np.ndarray:
    """View [S + 1, S + 1]: windows[c, s] = b[c - s], -inf for s > c."""
    return sliding_window_view(np.concatenate([b[::-1], np.full(len(b) - 1, -np.inf)]), len(b))[::-1]


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


def _hats(lengths: np.ndarray, knots: np.ndarray) -> csc_matrix:
    """Sparse [knots, lengths]: piecewise linear interpolation between the lengths at the indices `knots`, from first to last."""
    m, k = len(lengths), len(knots)
    right = np.clip(np.searchsorted(knots, np.arange(m), side="right"), 1, k - 1)
    low, high = lengths[knots[right - 1]], lengths[knots[right]]
    share = (lengths - low) / (high - low)
    columns = np.arange(m)
    return coo_matrix(
        (np.concatenate([1 - share, share]), (np.concatenate([right - 1, right]), np.concatenate([columns, columns]))),
        shape=(k, m)).tocsc()


def _solve_master(slots: csc_matrix, wanted: np.ndarray) -> _Master:
    """The linear programme over the strategies that `slots` [rows, strategies] lists; wanted float [rows]."""
    k, n = slots.shape
    shorter = diags([np.ones(k - 1), -np.ones(k - 1)], [0, -1], shape=(k, k - 1)).tocsc()  # a slot of row l + 1 holds l
    cost = np.concatenate([np.ones(n), np.zeros(k - 1)])
    scale = max(1.0, float(wanted.mean()))  # keeps the solver's absolute tolerances meaningful for millions of sequences
    result = linprog(cost, A_ub=-hstack([slots, shorter]).tocsc(), b_ub=-wanted / scale, method="highs-ds")
    if result.x is None:
        raise RuntimeError(f"HiGHS found no solution of the packing programme: {result.message}")
    prices = np.maximum.accumulate(np.maximum(-result.ineqlin.marginals, 0.0))
    return _Master(result.fun * scale, prices, np.maximum(result.x[:n], 0.0) * scale)


def relax(
    lengths: np.ndarray, counts: np.ndarray, max_sequence_length: int, depth: int, *,
    seeds: Optional[np.ndarray] = None, good_enough: float = 0.0, rounds: int = 60,
    progress: Callable[[float, float], None] = lambda value, bound: None,
) -> Relaxation:
    """Solves the linear programme over `lengths` (ascending, all with counts > 0), packs of S slots, `depth` sequences.

    seeds: strategies to start from, int [n, any].  Stops at the optimum, or as soon as the full programme's value is at
    most `good_enough` or cannot be a whole pack above the bound and some rounds have passed.

    Coarse programmes come first: their prices are piecewise linear in the length, between a few lengths (rows) only.  Such
    prices bound the full programme all the same, and the strategies found are nearly the right ones, for a fraction of the
    time.  Deep packs, too, are expensive and rarely needed: strategies grow deeper than a mean pack only once shallower
    ones do not improve any more, while the bound holds for the full depth all the time.
    """
    S = max_sequence_length
    m = len(lengths)
    weights = counts.astype(float)
    pool = Pool(lengths, S)
    random = np.random.default_rng(0)
    stride = -(-2 * m // _CANDIDATES)
    offset = 0
    bound, best_prices = -1.0, np.zeros(m)

    def price(prices: np.ndarray, reach: int) -> np.ndarray:
        """Improves the bound with these prices; best packs of at most `reach` sequences that contain given lengths."""
        nonlocal bound, best_prices, offset
        tables = PackTables(lengths, prices, S)
        most = tables.best(depth, np.array([S]))[0][0]
        if most > 0 and weights @ prices / most > bound:
            bound, best_prices = float(weights @ prices / most), prices / most
        with_lengths = lengths
        if m > _CANDIDATES:  # the lengths with the best packs, and others in turn
            value = prices + tables.best(reach - 1, S - lengths)[0]
            with_lengths = np.union1d(
                lengths[np.argsort(-value, kind="stable")[:_CANDIDATES // 2]], lengths[offset % stride::stride])
            offset += 1
        return np.hstack([with_lengths[:, None], tables.packs(reach - 1, S - with_lengths)])

    for prices in first_prices(lengths, counts, S, depth):
        price(prices, 1)
    reach = min(depth, max(4, int(weights.sum() / bound) + 2))
    singles = lengths[:, None]
    pool.add(singles)
    for prices in first_prices(lengths, counts, S, reach):
        pool.add(price(prices, reach))
    if seeds is not None:
        pool.add(seeds)

    levels = [rows for rows in _COARSE_ROWS if 2 * rows < m]
    levels.append(m if m <= _FULL_ROWS else _FINEST_ROWS)
    for rows in levels:
        full = rows == m
        hats = None if full else _hats(lengths, np.unique(np.linspace(0, m - 1, rows).round().astype(np.int64)))
        if full and len(levels) > 1:
            # Prices that are all but right leave a choice of strategies; noise takes from all over it.
            pool.keep(pool.worth(best_prices, pool.strategies) > 1 - 1e-3)
            pool.add(singles)
            for _ in range(8):
                pool.add(price(best_prices * (1 + 1e-6 * random.random(m)), reach))
        for round_ in range(rounds):
            slots = pool.matrix(pool.strategies)
            if full:
                master = _solve_master(slots, weights)
            else:
                master = _solve_master(hats @ slots, hats @ weights)
                master = master._replace(prices=hats.T @ master.prices)
            progress(master.value, bound)
            used = master.packs > 0
            strategies, packs = pool.strategies[used], master.packs[used]
            if master.value - bound <= (_TOLERANCE if full else 1e-5) * master.value:
                break
            if full and (master.value <= good_enough or round_ >= 8 and master.value <= np.ceil(bound - 1e-6)):
                break
            if len(pool.strategies) > 3 * m:  # forget what the prices like least
                worth = pool.worth(master.prices, pool.strategies)
                pool.keep(used | (worth >= np.partition(worth, -3 * m)[-3 * m]))
            added = 0
            for smoothing in (0.8, 0.4, 0.0):
                candidates = price(smoothing * best_prices + (1 - smoothing) * master.prices, reach)
                added += pool.add(candidates[pool.worth(master.prices, candidates) > 1 + _TOLERANCE])
                if added:
                    break
            if not added and reach < depth:
                reach = min(depth, 2 * reach)
                candidates = price(master.prices, reach)
                added = pool.add(candidates[pool.worth(master.prices, candidates) > 1 + _TOLERANCE])
            if not added:
                break
    return Relaxation(master.value, bound, best_prices, strategies, packs)
