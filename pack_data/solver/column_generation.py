"""The cutting-stock linear programme over a length histogram with a limit on sequences per pack, by column generation.

    minimise    sum_j x_j                              x_j >= 0: packs made with strategy j
    subject to  sum_j a_lj x_j >= n_l  for every l     a_lj: slots for length l in strategy j
                                                       n_l: sequences of length l

A slot for length l may also hold the next shorter length, by columns of cost 0, so that only maximal packs are needed.
The prices (duals) of the rows are then non-decreasing in l. A strategy improves the programme if its prices add up to
more than 1. The best ones are solutions of a knapsack over (sequences, tokens), which `PackTables` solves for all
lengths at once. Source: Gilmore and Gomory, "A linear programming approach to the cutting-stock problem" (1961). Prices
are smoothed towards the best ones so far: Pessoa, Sadykov, Uchoa and Vanderbeck, "Automation and combination of
linear-programming based stabilization techniques in column generation" (2018).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from scipy.ndimage import maximum_filter1d
from scipy.optimize import linprog
from scipy.sparse import coo_matrix, csc_matrix, diags, hstack

from pack_data.solver.search import DEEP

_TOLERANCE = 1e-9  # relative; HiGHS solves the linear programmes to about 1e-9
_ROUNDED = 1e-12  # of a price or a slope; a pack is worth about 1
_CHUNK = 1 << 17  # elements of one block of the knapsack tables, so that a block stays in the cache
_CALL = 3000  # elements that NumPy handles in the time of one call
# The same for a sliding maximum: a call, and for each element of the table.
_FILTER_CALL, _FILTER = 60_000, 16
_COARSE_ROWS = (24, 96)  # rows of the programmes solved before the full one
# Rows up to which the full programme is solved. It takes seconds if lengths are scarce, a minute or more if tokens are.
FULL_ROWS = 4200
_FEW, _MANY = 40, 1000  # mean number of sequences of a length; number of lengths
_INTERIOR_ROWS = 150  # rows from which the interior-point method, with crossover to a vertex, is faster
_CANDIDATES = 512  # strategies sought in a round


# called after every programme solved with its value, the bound so far and the prices that give it
_Progress = Callable[[float, float, np.ndarray], None]


class _Piece(NamedTuple):
    """Lengths whose prices lie on one line."""

    shortest: int
    longest: int
    price: float  # of the shortest
    slope: float  # price of one more token

    def add_to(self, table: np.ndarray, before: np.ndarray) -> None:
        """Raises `table` to the best that one sequence of these lengths adds to `before`, both float64 [S + 1]."""
        rest = len(before) - self.shortest  # capacities that are left beside the shortest: 0..rest - 1
        line = self.slope * np.arange(rest)
        window = self.longest - self.shortest + 1
        best = before[:rest] - line
        if window > 1:
            # over capacities that are 0..window - 1 smaller
            best = maximum_filter1d(best, window, mode="constant", cval=-np.inf, origin=(window - 1) // 2)
        np.maximum(table[self.shortest :], best + (line + self.price), out=table[self.shortest :])


def _pieces(lengths: np.ndarray, prices: np.ndarray) -> List[_Piece]:
    """The fewest pieces, taken from the shortest length on; lengths that are worth nothing are left out."""
    some = prices > 0
    lengths, prices = lengths[some], prices[some]
    if not len(lengths):
        return []
    slopes = np.diff(prices) / np.diff(lengths)
    # Interpolated prices are rounded, so slopes that ought to be equal differ by this much.
    bends = np.flatnonzero(np.abs(np.diff(slopes)) > _ROUNDED) + 1
    pieces: List[_Piece] = []
    start = 0
    for bend in (*bends.tolist(), len(lengths) - 1):
        if bend >= start:
            _add_straight(pieces, lengths[start : bend + 1], prices[start : bend + 1])
            start = bend + 1
    return pieces


def _add_straight(pieces: List[_Piece], lengths: np.ndarray, prices: np.ndarray) -> None:
    """Adds these lengths as one piece, or as several where small bends of one direction have added up."""
    longest, slope = len(lengths) - 1, 0.0
    if longest:
        slope = float((prices[-1] - prices[0]) / (lengths[-1] - lengths[0]))
    if longest > 1:
        off = np.abs(prices - (prices[0] + slope * (lengths - lengths[0])))
        worst = int(off.argmax())
        if off[worst] > _ROUNDED:
            _add_straight(pieces, lengths[: worst + 1], prices[: worst + 1])
            _add_straight(pieces, lengths[worst + 1 :], prices[worst + 1 :])
            return
    pieces.append(_Piece(int(lengths[0]), int(lengths[-1]), float(prices[0]), slope))


class PackTables:
    """Most valuable packs of up to k sequences, by max-plus products.

        value_(i + j)(c) = max over s of value_i(s) + value_j(c - s)         c: tokens in the pack, the capacity

    A slot may stay empty, so value_k is non-decreasing in k and in c. With few different prices one sequence is added
    at a time (i = 1), because value_1 has few steps s. So it is with prices that are piecewise linear in the length, in
    few pieces: a piece is the maximum over a sliding window. A length inside a piece that no sequence has then
    counts as well, at its price on the line; the values are upper bounds, which is what a bound of the programme needs.
    With many steps and pieces, the number of sequences is doubled each time.
    lengths int [m] ascending; prices float64 [m] by length, non-decreasing.
    """

    def __init__(self, lengths: np.ndarray, prices: np.ndarray, max_sequence_length: int, most_sequences: int) -> None:
        steps = np.zeros(max_sequence_length + 1, np.int64)
        steps[lengths] = np.arange(1, len(lengths) + 1)
        steps = np.maximum.accumulate(steps)
        self._longest = np.concatenate([[0], lengths])[steps]  # the longest length that fits, 0 for none
        one = np.concatenate([[0.0], prices])[steps]
        self._tables: Dict[int, np.ndarray] = {0: np.zeros(len(steps)), 1: one}
        self._steps = np.flatnonzero(np.diff(one, prepend=0.0))  # the shortest length of each price
        self._enough = max_sequence_length // max(1, int(self._steps[0])) if len(self._steps) else 1
        products = 2 * int(np.ceil(np.log2(max(2, most_sequences)))) - 1
        self._pieces = _pieces(lengths, prices)
        stepwise = len(self._steps) * (_CALL + len(steps))
        windowed = len(self._pieces) * (_FILTER_CALL + _FILTER * len(steps))
        if windowed > stepwise:
            self._pieces = []
        self._single = most_sequences <= DEEP and (
            most_sequences * min(stepwise, windowed) < products * len(steps) ** 2 / 2
        )

    def _parts(self, sequences: int) -> Tuple[int, int]:
        """Sequences in the two factors of the product."""
        return (1, sequences - 1) if self._single else ((sequences + 1) // 2, sequences // 2)

    def _table(self, sequences: int) -> np.ndarray:
        """float64 [S + 1]: the best value by capacity."""
        sequences = min(sequences, self._enough)  # no more fit
        if sequences not in self._tables:
            self._tables[sequences] = self._one_more(sequences) if self._single else self._product(sequences)
        return self._tables[sequences]

    def _one_more(self, sequences: int) -> np.ndarray:
        while sequences - 1 not in self._tables:
            self._table(max(self._tables) + 1)
        one, before = self._tables[1], self._tables[sequences - 1]
        if sequences > 2 and before is self._tables[sequences - 2]:
            return before
        table = before.copy()
        for piece in self._pieces:
            piece.add_to(table, before)
        if self._pieces:
            return before if (table == before).all() else table
        for step, price in zip(self._steps.tolist(), one[self._steps].tolist()):
            np.maximum(table[step:], before[: len(before) - step] + price, out=table[step:])
        return before if (table == before).all() else table

    def _product(self, sequences: int) -> np.ndarray:
        a, b = map(self._table, self._parts(sequences))
        windows = _windows(b)
        table = np.empty(len(a))
        for start in range(0, len(a), _rows_of(len(a))):
            stop = min(len(a), start + _rows_of(len(a)))
            # of two equal factors the first may have the smaller share
            share = stop if b is not a else stop // 2 + 1
            (windows[start:stop, :share] + a[:share]).max(axis=1, out=table[start:stop])
        return table

    def value(self, sequences: int, capacities: np.ndarray) -> np.ndarray:
        """The best value of at most `sequences` sequences for each capacity."""
        if self._single or sequences < 2:
            return self._table(sequences)[capacities]
        return self._best(sequences, capacities)[0]

    def _best(self, sequences: int, capacities: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """The best value, and the tokens that its first factor takes."""
        a, b = map(self._table, self._parts(sequences))
        value, share = np.empty(len(capacities)), np.empty(len(capacities), np.int64)
        if self._single:
            steps = np.concatenate([[0], self._steps])
            padded = np.concatenate([b, np.full(len(b), -np.inf)])  # a negative index is a step above the capacity
            for start in range(0, len(capacities), _rows_of(len(steps))):
                some = slice(start, start + _rows_of(len(steps)))
                sums = padded[capacities[some, None] - steps] + a[steps]
                best = sums.argmax(axis=1)
                share[some], value[some] = steps[best], sums[np.arange(len(sums)), best]
            return value, share
        windows = _windows(b)
        for start in range(0, len(capacities), _rows_of(len(a))):
            some = slice(start, start + _rows_of(len(a)))
            sums = windows[capacities[some]] + a
            best = sums.argmax(axis=1)
            share[some], value[some] = best, sums[np.arange(len(sums)), best]
        return value, share

    def packs(self, sequences: int, capacities: np.ndarray) -> np.ndarray:
        """int64 [len(capacities), sequences]: the lengths in a best pack for each capacity, 0 for an empty slot."""
        if sequences == 0:
            return np.zeros((len(capacities), 0), np.int64)
        if sequences == 1:
            return self._longest[capacities][:, None]
        _, share = self._best(sequences, capacities)
        first, second = self._parts(sequences)
        return np.hstack([self.packs(first, share), self.packs(second, capacities - share)])


def _rows_of(columns: int) -> int:
    """Rows of a block of the knapsack tables."""
    return max(1, _CHUNK // columns)


def _windows(b: np.ndarray) -> np.ndarray:
    """View [S + 1, S + 1]: windows[c, s] = b[c - s], -inf for s > c."""
    return sliding_window_view(np.concatenate([b[::-1], np.full(len(b) - 1, -np.inf)]), len(b))[::-1]


class _Master(NamedTuple):
    value: float
    prices: np.ndarray  # [lengths]
    packs: np.ndarray  # [strategies]


def with_dearest_long(lengths: np.ndarray, prices: np.ndarray, max_sequence_length: int, depth: int) -> np.ndarray:
    """Prices of which no pack is worth more than 1, from the given ones, both float64 [lengths], non-decreasing.

    Those of lengths up to half a pack are scaled. A pack has at most one longer sequence, which is worth what the best
    companions leave of 1: no price could be higher. (Up to rounding; the certificate makes it exact.)
    """
    S, short = max_sequence_length, lengths <= max_sequence_length // 2
    if not short.any():
        return np.ones(len(lengths))
    room = S - lengths[~short]
    if prices[short][0] == prices[short][-1]:  # all alike: as many as fit
        together, beside = min(depth, S // int(lengths[0])), np.minimum(depth - 1, room // int(lengths[0]))
        return np.concatenate([np.full(short.sum(), 1.0), together - beside]) / together
    tables = PackTables(lengths[short], prices[short], S, depth)
    most = max(float(tables.value(depth, np.array([S]))[0]), 1e-9)
    return np.concatenate([prices[short] / most, 1.0 - tables.value(depth - 1, room) / most])


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

    def solve(self, weights: np.ndarray) -> _Master:
        """The full programme over these strategies; float weights [lengths].

        A length for which no strategy has a slot goes into slots of the next longer one that has: it shares that row
        and its price.
        """
        rows = np.unique(self._row[self.strategies])
        rows = rows[rows > 0] - 1
        group = np.searchsorted(rows, np.arange(len(weights)))
        master = _solve_master(self.matrix(self.strategies)[rows], np.bincount(group, weights))
        return master._replace(prices=master.prices[group])

    def matrix(self, strategies: np.ndarray) -> csc_matrix:
        """Sparse [lengths, strategies]: slots of each length."""
        rows = self._row[strategies].ravel()
        columns = np.repeat(np.arange(len(strategies)), strategies.shape[1])
        used = rows > 0
        shape = len(self.lengths), len(strategies)
        return coo_matrix((np.ones(int(used.sum())), (rows[used] - 1, columns[used])), shape=shape).tocsc()


@dataclass(frozen=True)
class Relaxation:
    """The solution of the linear programme."""

    value: float  # of the strategies found: an upper bound of the programme's optimum
    bound: float  # of the prices: a lower bound of it (up to rounding; the certificate makes it exact)
    prices: np.ndarray  # float64 [lengths], non-decreasing, no pack worth more than 1 (up to rounding)
    strategies: np.ndarray  # int64 [n, depth]: the strategies in use, longest first, 0 = empty slot
    packs: np.ndarray  # float64 [n]: packs made with each
    exact: bool  # whether they have a slot for every sequence; else they fit in total only (`Programme.solve_coarse`)


def _first_prices(lengths: np.ndarray, counts: np.ndarray, max_sequence_length: int, depth: int) -> List[np.ndarray]:
    """Good prices [lengths], known before any programme is solved.

    They are: tokens / S; tokens / S with 1 for every length above S - t and 0 for every length below t, at the best t
    (Martello and Toth's bound L2, 1990); 1 / depth for each sequence; and mixtures of the first and the last.
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


def _hats(lengths: np.ndarray, knots: np.ndarray) -> csc_matrix:
    """Sparse [knots, lengths]: piecewise linear interpolation between the lengths at the ascending indices `knots`."""
    m, k = len(lengths), len(knots)
    if k == 1:
        return csc_matrix(np.ones((1, m)))
    right = np.clip(np.searchsorted(knots, np.arange(m), side="right"), 1, k - 1)
    low, high = lengths[knots[right - 1]], lengths[knots[right]]
    share = (lengths - low) / (high - low)
    columns = np.arange(m)
    return coo_matrix(
        (np.concatenate([1 - share, share]), (np.concatenate([right - 1, right]), np.concatenate([columns, columns]))),
        shape=(k, m),
    ).tocsc()


def _solve_master(slots: csc_matrix, wanted: np.ndarray) -> _Master:
    """The linear programme over the strategies that `slots` [rows, strategies] lists; wanted float [rows]."""
    k, n = slots.shape
    shorter = diags([np.ones(k - 1), -np.ones(k - 1)], [0, -1], shape=(k, k - 1)).tocsc()  # a slot of row l + 1 holds l
    cost = np.concatenate([np.ones(n), np.zeros(k - 1)])
    scale = max(1.0, float(wanted.mean()))  # the solver's tolerances are absolute
    for method in ("highs-ipm", "highs-ds") if k > _INTERIOR_ROWS else ("highs-ds",):
        result = linprog(cost, A_ub=-hstack([slots, shorter]).tocsc(), b_ub=-wanted / scale, method=method)
        if result.status == 0:
            break
    if result.x is None:
        raise RuntimeError(f"HiGHS found no solution of the packing programme: {result.message}")
    prices = np.maximum.accumulate(np.maximum(-result.ineqlin.marginals, 0.0))
    return _Master(result.fun * scale, prices, np.maximum(result.x[:n], 0.0) * scale)


class Programme:
    """The programme over `lengths` (ascending, all with counts > 0), packs of S slots and at most `depth` sequences.

    Deep packs take long to find and are rarely needed. So strategies deeper than a mean pack are sought only when
    shallower ones no longer improve the programme. The bound always holds for the full depth.
    """

    def __init__(self, lengths: np.ndarray, counts: np.ndarray, max_sequence_length: int, depth: int) -> None:
        self.lengths, self.depth, self.S = lengths, depth, max_sequence_length
        self.weights = counts.astype(float)
        self.pool = Pool(lengths, max_sequence_length)
        self.bound, self.prices = -1.0, np.zeros(len(lengths))
        self._stride, self._turn = -(-2 * len(lengths) // _CANDIDATES), 0
        tables = [self._bound(prices) for prices in _first_prices(lengths, counts, self.S, depth)]
        self.reach = min(depth, max(4, int(self.weights.sum() / self.bound) + 2))
        self.pool.add(lengths[-1:, None])
        for table in tables:
            self.pool.add(self._packs(table, self.reach))

    def _bound(self, prices: np.ndarray) -> PackTables:
        """Improves the bound with these prices."""
        tables = PackTables(self.lengths, prices, self.S, self.depth)
        most = float(tables.value(self.depth, np.array([self.S]))[0])
        if most > 0 and self.weights @ prices / most > self.bound:
            self.bound, self.prices = float(self.weights @ prices / most), prices / most
        return tables

    def _packs(self, tables: PackTables, reach: int) -> np.ndarray:
        """Best packs of at most `reach` sequences that contain given lengths."""
        lengths, S = self.lengths, self.S
        if len(lengths) > _CANDIDATES and reach > 1:  # the lengths with the best packs, and other lengths in turn
            value = tables.value(1, lengths) + tables.value(reach - 1, S - lengths)
            best = lengths[np.argsort(-value, kind="stable")[: _CANDIDATES // 2]]
            lengths = np.union1d(best, lengths[self._turn % self._stride :: self._stride])
            self._turn += 1
        return np.hstack([lengths[:, None], tables.packs(reach - 1, S - lengths)])

    def price(self, prices: np.ndarray, reach: int) -> np.ndarray:
        """Improves the bound with these prices, and returns best packs of at most `reach` sequences."""
        return self._packs(self._bound(prices), reach)

    def _improve(self, prices: np.ndarray) -> int:
        """Adds strategies worth more than 1 at these prices of the master; returns how many."""
        for smoothing in (0.8, 0.4, 0.0):
            candidates = self.price(smoothing * self.prices + (1 - smoothing) * prices, self.reach)
            added = self.pool.add(candidates[self.pool.worth(prices, candidates) > 1 + _TOLERANCE])
            if added:
                return added
        if self.reach == self.depth:
            return 0
        self.reach = min(self.depth, 2 * self.reach)
        candidates = self.price(prices, self.reach)
        return self.pool.add(candidates[self.pool.worth(prices, candidates) > 1 + _TOLERANCE])

    def _forget(self, prices: np.ndarray, used: np.ndarray, limit: int) -> None:
        """Keeps the strategies in use and those worth most at these prices, about `limit` in all."""
        if len(self.pool.strategies) > limit:
            worth = self.pool.worth(prices, self.pool.strategies)
            self.pool.keep(used | (worth >= np.partition(worth, -limit)[-limit]))

    def solve_on(self, knots: np.ndarray, progress: _Progress) -> Relaxation:
        """The coarse programme with these rows (see `solve_coarse`), to 1e-5 or a fraction of a pack."""
        hats = _hats(self.lengths, knots)
        wanted = hats @ self.weights
        self.pool.add(self.lengths[knots][:, None])  # so that each row can be met
        for _ in range(40):
            master = _solve_master(hats @ self.pool.matrix(self.pool.strategies), wanted)
            progress(master.value, self.bound, self.prices)
            prices = hats.T @ master.prices
            used = master.packs > 0
            result = self.pool.strategies[used], master.packs[used]
            spare = np.ceil(self.bound - 1e-6) - self.bound  # what rounding up to whole packs adds
            if master.value - self.bound <= max(1e-5 * master.value, 0.2 * spare):
                break
            self._forget(prices, used, 3 * len(self.lengths))
            if not self._improve(prices):
                break
        return Relaxation(master.value, self.bound, self.prices, *result, exact=False)

    def solve_again(self, weights: np.ndarray, knots: np.ndarray) -> Relaxation:
        """`solve_on` for other counts of the same lengths, float [lengths], with the strategies and prices so far."""
        self.weights = weights
        self.bound = float(weights @ self.prices)
        return self.solve_on(knots, lambda value, bound, prices: None)

    def _solve_coarse(self, progress: _Progress, rounds: int = 60) -> Relaxation:
        """Solves for prices that are piecewise linear in the length, between knots.

        Such prices give a bound of the full programme. Its optimal prices mostly have few kinks, so few knots give
        nearly the full bound. The strategies have, between two knots, the right number of slots and the right mean
        length, but not the right number for each length. Knots are added where the two differ most.
        """
        lengths, weights, m = self.lengths, self.weights, len(self.lengths)
        first = lengths[:8]
        special = np.concatenate(
            [first, self.S // 2 + np.arange(2), self.S // 3 + np.arange(2), self.S - first, self.S - first + 1]
        )
        special = np.clip(np.searchsorted(lengths, special), 0, m - 1)
        knots = np.unique(np.concatenate([np.linspace(0, m - 1, min(m, 24)).round().astype(np.int64), special]))
        settled, settled_bound = 0, self.bound
        for _ in range(rounds):
            hats = _hats(lengths, knots)
            self.pool.add(lengths[knots][:, None])  # so that each row can be met
            slots = self.pool.matrix(self.pool.strategies)
            master = _solve_master(hats @ slots, hats @ weights)
            prices = hats.T @ master.prices
            used = master.packs > 0
            result = self.pool.strategies[used], master.packs[used]
            excess = slots @ master.packs - weights
            self._forget(prices, used, 1500)
            added = self._improve(prices)
            progress(master.value, self.bound, self.prices)
            if added and master.value - self.bound > 1e-7 * master.value:
                continue
            settled = settled + 1 if self.bound <= settled_bound * (1 + 1e-9) else 0
            settled_bound = self.bound
            if settled == 3 or len(knots) == m:
                break
            knots = np.union1d(knots, self._new_knots(knots, excess))
        return Relaxation(master.value, self.bound, self.prices, *result, exact=len(knots) == m)

    def _new_knots(self, knots: np.ndarray, excess: np.ndarray, most: int = 24) -> np.ndarray:
        """New knots where slots and sequences differ most; float excess [lengths]: slots - sequences."""
        lengths = self.lengths.astype(float)
        number = np.concatenate([[0.0], np.cumsum(excess)])
        mass = np.concatenate([[0.0], np.cumsum(excess * lengths)])
        index = np.setdiff1d(np.arange(len(lengths)), knots)
        if not len(index):
            return index
        stretch = np.searchsorted(knots, index) - 1
        low, high = knots[stretch], knots[stretch + 1]
        rising = (mass[index + 1] - mass[low + 1]) - lengths[low] * (number[index + 1] - number[low + 1])
        falling = lengths[high] * (number[high] - number[index + 1]) - (mass[high] - mass[index + 1])
        misfit = np.abs(rising / (lengths[index] - lengths[low]) + falling / (lengths[high] - lengths[index]))
        order = np.argsort(-misfit, kind="stable")
        _, first = np.unique(stretch[order], return_index=True)  # the worst of each stretch
        chosen = order[np.sort(first)][:most]
        return index[chosen]


def relax(
    lengths: np.ndarray,
    counts: np.ndarray,
    max_sequence_length: int,
    depth: int,
    *,
    seeds: Optional[np.ndarray] = None,
    good_enough: float = 0.0,
    incumbent: float = np.inf,
    rounds: int = 60,
    exact: bool = False,
    progress: _Progress = lambda value, bound, prices: None,
) -> Relaxation:
    """Solves the linear programme over `lengths` (ascending, all with counts > 0), packs of S slots, `depth` sequences.

    seeds: strategies to start from, int [n, any]. Stops at the optimum; when the value is at most `good_enough`; when
    the bound shows that a packing of `incumbent` packs is optimal; and, after some rounds, when no whole pack can be
    saved. With more than FULL_ROWS lengths only the coarse programme is solved, unless `exact` asks for the full one.
    """
    m = len(lengths)
    programme = Programme(lengths, counts, max_sequence_length, depth)
    pool, weights = programme.pool, programme.weights
    if np.ceil(programme.bound - 1e-6) >= incumbent:
        nothing = np.zeros((0, 1), np.int64), np.zeros(0)
        return Relaxation(incumbent, programme.bound, programme.prices, *nothing, exact=True)
    if seeds is not None:
        pool.add(seeds)
    if m > FULL_ROWS and not exact:
        return programme._solve_coarse(progress)
    if (seeds is None or not exact) and m > 2 * _COARSE_ROWS[0]:
        known = programme.bound
        for rows in _COARSE_ROWS:
            if 2 * rows < m:
                knots = np.unique(np.linspace(0, m - 1, rows).round().astype(np.int64))
                coarse = programme.solve_on(knots, progress)
                if not exact and programme.bound == known and (weights.sum() < _FEW * m or m > _MANY):
                    # The first bound was not improved, so tokens are scarce, not lengths. The full programme would then
                    # need very long for the last thousandth, and with few sequences of a length rounding would undo it.
                    return coarse
        pool.keep(pool.worth(programme.prices, pool.strategies) > 1 - 1e-3)
        pool.add(lengths[-1:, None])
        # Many strategies are equally good at nearly optimal prices; noise on the prices finds different ones. That
        # helps where tokens are scarce: then every length matters. Otherwise few lengths do, and each adds a row.
        random = np.random.default_rng(0)
        for _ in range(5 if programme.bound == known or m <= _CANDIDATES else 0):
            pool.add(programme.price(programme.prices * (1 + 1e-6 * random.random(m)), programme.reach))
    for round_ in range(rounds):
        master = pool.solve(weights)
        progress(master.value, programme.bound, programme.prices)
        used = master.packs > 0
        result = pool.strategies[used], master.packs[used]
        if master.value - programme.bound <= _TOLERANCE * master.value or master.value <= good_enough:
            break
        if np.ceil(programme.bound - 1e-6) >= incumbent:
            break
        if round_ >= 8 and master.value <= np.ceil(programme.bound - 1e-6):
            break
        programme._forget(master.prices, used, 3 * m)
        if not programme._improve(master.prices):
            break
    return Relaxation(master.value, programme.bound, programme.prices, *result, exact=True)
