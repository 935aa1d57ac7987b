"""The cutting-stock linear programme over a length histogram with a limit on sequences per pack, by column generation.

    minimise    sum_j x_j                              x_j >= 0: packs made with strategy j
    subject to  sum_j a_lj x_j >= n_l  for every l     a_lj: slots for length l in strategy j
                                                       n_l: sequences of length l

A slot for length l may also hold the next shorter length, by columns of cost 0, so that only maximal packs are needed.
The prices (duals) of the rows are then non-decreasing in l. A strategy improves the programme if its prices add up to
more than 1. The best ones are solutions of a knapsack over (sequences, tokens), which `_PackTables` solves for all
lengths at once. Source: Gilmore and Gomory, "A linear programming approach to the cutting-stock problem" (1961). Prices
are smoothed towards the best ones so far: Pessoa, Sadykov, Uchoa and Vanderbeck, "Automation and combination of
linear-programming based stabilization techniques in column generation" (2018).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Dict, NamedTuple, Optional, Tuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from scipy.optimize import linprog
from scipy.sparse import coo_matrix, csc_matrix, diags, hstack, identity

from pack_data.solver.free_slots import PACKS_ERROR
from pack_data.solver.search import MAX_SINGLE_DEPTH

# ---- numerical errors ------------------------------------------------------------------------------------------------

_TOLERANCE = 1e-9  # relative; HiGHS solves the linear programmes to about 1e-9

# ---- cost of the knapsack tables, in elements that NumPy adds in the same time ---------------------------------------

_BLOCK = 1 << 17  # elements of one block of the tables, so that a block stays in the cache
_CALL_COST = 3000  # of the overhead of one NumPy call

# ---- size of the programmes ------------------------------------------------------------------------------------------

_COARSE_ROWS = (24, 96)  # rows of the programmes solved before the full one
# Number of rows from which the interior-point method, with crossover to a vertex, is faster.
_INTERIOR_ROWS = 150
_CANDIDATES = 512  # strategies sought in one round
# Strategies that are kept after a round, beside those in use. If all are kept, Wikipedia at depths 4 and 6 needs one
# pack more than its bound, 8,135,727.
_STRATEGIES_PER_LENGTH = 3

# ---- rounds ----------------------------------------------------------------------------------------------------------

# Weights of the best prices so far, tried in turn until a strategy improves the programme.
_SMOOTHING = (0.8, 0.4, 0.0)
_GAP_ON_KNOTS = 1e-5  # relative gap at which a programme on knots ends
_MAX_ROUNDS = 60  # of one programme; the 400 programmes of 121 packings took at most 10
_ROUNDS_BEFORE_ROUNDING = 8  # after these the programme ends if no whole pack can be saved
_NEAR_ONE = 1e-3  # strategies worth more than 1 - this are kept for the full programme
_NOISE = 1e-6  # on the prices, relative, to find other strategies that are equally good
_NOISY_ROUNDS = 5  # with 0, one of 34 cases needs a pack more

# The prices to begin with are mixtures of tokens / S and 1 / depth, by these shares of the latter. The bound L2
# (Martello and Toth, 1990) beside them saved no pack.
_FIRST_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)

# Called after every programme solved with its value, the bound so far and the prices that give it.
_Progress = Callable[[float, float, np.ndarray], None]


# ---- the knapsack: best packs at given prices ------------------------------------------------------------------------


class _PackTables:
    """Most valuable packs of up to k sequences, by max-plus products.

        value_(i + j)(c) = max over s of value_i(s) + value_j(c - s)         c: tokens in the pack, the capacity

    A slot may stay empty, so value_k is non-decreasing in k and in c. With few different prices one sequence is added
    at a time (i = 1), because value_1 has few steps s. With many the number of sequences is doubled each time.
    lengths int [m] ascending; prices float64 [m] by length, non-decreasing.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        prices: np.ndarray,
        max_sequence_length: int,
        most_sequences: int,
    ) -> None:
        slots = max_sequence_length + 1
        # By capacity: the 1-based index of the longest length that fits.
        fitting = np.zeros(slots, np.int64)
        fitting[lengths] = np.arange(1, len(lengths) + 1)
        fitting = np.maximum.accumulate(fitting)
        self._longest = np.concatenate([[0], lengths])[fitting]  # 0 if none fits
        values = np.concatenate([[0.0], prices])[fitting]
        self._tables: Dict[int, np.ndarray] = {0: np.zeros(slots), 1: values}
        # The shortest length of each price.
        self._steps = np.flatnonzero(np.diff(values, prepend=0.0))
        self._most_fitting = 1
        if len(self._steps):
            shortest = max(1, int(self._steps[0]))
            self._most_fitting = max_sequence_length // shortest

        doublings = int(np.ceil(np.log2(max(2, most_sequences))))
        products = 2 * doublings - 1
        product_cost = products * slots**2 / 2
        step_cost = len(self._steps) * (_CALL_COST + slots)
        single_cost = most_sequences * step_cost
        self._single = most_sequences <= MAX_SINGLE_DEPTH and single_cost < product_cost

    def _factors(self, sequences: int) -> Tuple[int, int]:
        """Return the sequences in the two factors of the product."""
        if self._single:
            return 1, sequences - 1
        return (sequences + 1) // 2, sequences // 2

    def _table(self, sequences: int) -> np.ndarray:
        """Return the best value by capacity, float64 [S + 1]."""
        sequences = min(sequences, self._most_fitting)
        if sequences not in self._tables:
            compute = self._one_more if self._single else self._product
            self._tables[sequences] = compute(sequences)
        return self._tables[sequences]

    def _one_more(self, sequences: int) -> np.ndarray:
        before = self._table(sequences - 1)
        if sequences > 2 and before is self._tables[sequences - 2]:
            return before
        table = before.copy()
        prices = self._tables[1][self._steps]
        for step, price in zip(self._steps.tolist(), prices.tolist()):
            above = table[step:]
            np.maximum(above, before[: len(above)] + price, out=above)
        return before if (table == before).all() else table

    def _product(self, sequences: int) -> np.ndarray:
        a, b = map(self._table, self._factors(sequences))
        windows = _windows(b)
        table = np.empty(len(a))
        rows = _rows_of_block(len(a))
        for start in range(0, len(a), rows):
            stop = min(len(a), start + rows)
            # Of two equal factors the first may have the smaller share.
            share = stop // 2 + 1 if b is a else stop
            sums = windows[start:stop, :share] + a[:share]
            sums.max(axis=1, out=table[start:stop])
        return table

    def value(self, sequences: int, capacities: np.ndarray) -> np.ndarray:
        """Return the best value of at most `sequences` sequences for each capacity."""
        if self._single or sequences < 2:
            return self._table(sequences)[capacities]
        return self._best(sequences, capacities)[0]

    def _best(self, sequences: int, capacities: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Return the best value for each capacity, and the tokens that its first factor takes."""
        a, b = map(self._table, self._factors(sequences))
        if self._single:
            shares = np.concatenate([[0], self._steps])
            a = a[shares]
            # A negative index means a step above the capacity, which is worth -inf.
            padded = np.concatenate([b, np.full(len(b), -np.inf)])
        else:
            shares = np.arange(len(a))
            windows = _windows(b)
        values = np.empty(len(capacities))
        best_shares = np.empty(len(capacities), np.int64)
        rows = _rows_of_block(len(shares))
        for start in range(0, len(capacities), rows):
            block = slice(start, start + rows)
            if self._single:
                left = capacities[block, None] - shares
                sums = padded[left] + a
            else:
                sums = windows[capacities[block]] + a
            best = sums.argmax(axis=1)
            best_shares[block] = shares[best]
            values[block] = np.take_along_axis(sums, best[:, None], axis=1)[:, 0]
        return values, best_shares

    def packs(self, sequences: int, capacities: np.ndarray) -> np.ndarray:
        """Return the lengths in a best pack for each capacity, int64 [capacities, sequences], 0 for an empty slot."""
        if sequences == 0:
            return np.zeros((len(capacities), 0), np.int64)
        if sequences == 1:
            return self._longest[capacities][:, None]
        _, share = self._best(sequences, capacities)
        first, second = self._factors(sequences)
        packs = self.packs(first, share), self.packs(second, capacities - share)
        return np.hstack(packs)


def _rows_of_block(columns: int) -> int:
    """Return the rows of a block of the knapsack tables."""
    return max(1, _BLOCK // columns)


def _windows(b: np.ndarray) -> np.ndarray:
    """Return a view [S + 1, S + 1]: windows[c, s] = b[c - s], -inf for s > c."""
    below = np.full(len(b) - 1, -np.inf)
    padded = np.concatenate([b[::-1], below])
    return sliding_window_view(padded, len(b))[::-1]


def with_dearest_long(
    lengths: np.ndarray, prices: np.ndarray, max_sequence_length: int, depth: int
) -> np.ndarray:
    """Return the highest prices, float64 [lengths], non-decreasing, at which no pack is worth more than 1.

    Prices of lengths up to half a pack are scaled. A pack has at most one longer sequence, whose price is 1 less the
    worth of its best companions; it could not be higher. (Up to rounding; the certificate makes it exact.)
    """
    S = max_sequence_length
    short = lengths <= S // 2
    if not short.any():
        return np.ones(len(lengths))
    room = S - lengths[~short]
    short_prices = prices[short]
    tables = _PackTables(lengths[short], short_prices, S, depth)
    full_pack = np.array([S])
    dearest = max(float(tables.value(depth, full_pack)[0]), _TOLERANCE)
    long_prices = 1.0 - tables.value(depth - 1, room) / dearest
    return np.concatenate([short_prices / dearest, long_prices])


# ---- the programme over some strategies ------------------------------------------------------------------------------


class _Master(NamedTuple):
    """A solution of the programme over some strategies."""

    value: float
    prices: np.ndarray  # float64 [lengths]
    packs: np.ndarray  # float64 [strategies]


class _Pool:
    """Strategies, int64 [strategies, depth], each once."""

    def __init__(self, lengths: np.ndarray, max_sequence_length: int) -> None:
        self._lengths = lengths
        self._row = np.zeros(max_sequence_length + 1, np.int64)  # of each length, from 1
        self._row[lengths] = np.arange(1, len(lengths) + 1)
        self.strategies = np.zeros((0, 1), np.int64)

    def add(self, strategies: np.ndarray) -> int:
        """Add lengths, int [n, depth], 0 for an empty slot; return how many strategies were new."""
        before = len(self.strategies)
        width = max(strategies.shape[1], self.strategies.shape[1])
        parts = []
        for part in (self.strategies, strategies):
            missing = width - part.shape[1]
            parts.append(np.pad(part, ((0, 0), (0, missing))))
        both = np.vstack(parts)
        longest_first = -np.sort(-both, axis=1)
        self.strategies = np.unique(longest_first, axis=0)
        return len(self.strategies) - before

    def keep(self, chosen: np.ndarray) -> None:
        """Keep these strategies alone; a mask, bool [strategies]."""
        self.strategies = self.strategies[chosen]

    def worth(self, prices: np.ndarray, strategies: np.ndarray) -> np.ndarray:
        """Return the sum of the prices [lengths] in each of the strategies."""
        prices_of_rows = np.concatenate([[0.0], prices])
        return prices_of_rows[self._row[strategies]].sum(axis=1)

    def matrix(self) -> csc_matrix:
        """Return the slots of each length, sparse [lengths, strategies]."""
        number, depth = self.strategies.shape
        rows = self._row[self.strategies].ravel()
        columns = np.repeat(np.arange(number), depth)
        shape = len(self._lengths) + 1, number
        slots = coo_matrix((np.ones(len(rows)), (rows, columns)), shape).tocsc()
        return slots[1:]  # row 0 counts empty slots


def _solve_master(slots: csc_matrix, wanted: np.ndarray) -> _Master:
    """Solve the linear programme over strategies with these slots [rows, strategies]; wanted: float [rows]."""
    rows, strategies = slots.shape
    # Columns of cost 0: a slot of the next longer row holds this one.
    ones = np.ones(rows - 1)
    shorter = diags([ones, -ones], [0, -1], shape=(rows, rows - 1)).tocsc()
    cost = np.concatenate([np.ones(strategies), np.zeros(rows - 1)])
    constraints = -hstack([slots, shorter]).tocsc()
    scale = max(1.0, float(wanted.mean()))  # the solver's tolerances are absolute
    methods = ("highs-ipm", "highs-ds") if rows > _INTERIOR_ROWS else ("highs-ds",)
    for method in methods:
        result = linprog(cost, A_ub=constraints, b_ub=-wanted / scale, method=method)
        if result.status == 0:
            break
    if result.x is None:
        raise RuntimeError(f"HiGHS found no solution of the packing programme: {result.message}")
    prices = np.maximum.accumulate(np.maximum(-result.ineqlin.marginals, 0.0))
    packs = np.maximum(result.x[:strategies], 0.0)
    return _Master(result.fun * scale, prices, packs * scale)


# ---- the whole programme ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Relaxation:
    """The solution of the linear programme."""

    value: float  # of its strategies: an upper bound of the programme's optimum
    # Bound that the prices prove: at most the optimum (up to rounding; the certificate makes it exact).
    bound: float
    # float64 [lengths], non-decreasing; no pack is worth more than 1 (up to rounding).
    prices: np.ndarray
    strategies: np.ndarray  # int64 [n, depth]: the strategies in use, longest first, 0 = empty slot
    packs: np.ndarray  # float64 [n]: packs made with each
    exact: bool  # True if they have a slot for every sequence, False if they fit in total only (`solve_on`)


def _hats(lengths: np.ndarray, knots: np.ndarray) -> csc_matrix:
    """Return the piecewise linear interpolation between lengths, sparse [knots, lengths].

    knots: ascending indices, the first and the last length among them.
    """
    if len(knots) == 1:
        return csc_matrix(np.ones((1, len(lengths))))
    columns = np.arange(len(lengths))
    left = np.searchsorted(knots[1:-1], columns, side="right")
    right = left + 1
    low = lengths[knots[left]]
    high = lengths[knots[right]]
    share = (lengths - low) / (high - low)
    shares = np.concatenate([1 - share, share])
    rows = np.concatenate([left, right])
    return coo_matrix((shares, (rows, np.tile(columns, 2)))).tocsc()


def even_indices(rows: int, number: int) -> np.ndarray:
    """Return about `number` indices of rows, evenly spaced, including the first and the last."""
    even = np.linspace(0, rows - 1, number)
    return np.unique(even.round().astype(np.int64))


class Programme:
    """The programme over `lengths` (ascending, all with counts > 0), packs of S slots and at most `depth` sequences.

    Deep packs take long to find and are rarely needed. So strategies deeper than a mean pack are sought only when
    shallower ones no longer improve the programme. The bound always holds for the full depth.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        counts: np.ndarray,
        max_sequence_length: int,
        depth: int,
    ) -> None:
        self._lengths = lengths
        self._depth = depth
        self._S = max_sequence_length
        self._weights = counts.astype(float)
        self._pool = _Pool(lengths, max_sequence_length)
        self._stride = -(-2 * len(lengths) // _CANDIDATES)
        self._turn = 0  # which of the lengths at this stride are sought next
        self.bound = -1.0
        self.prices = np.zeros(len(lengths))  # that give the bound
        tokens = lengths / self._S
        tables = [self._bound((1 - share) * tokens + share / depth) for share in _FIRST_SHARES]
        self._first_bound = self.bound
        mean_depth = int(self._weights.sum() / self.bound)
        # Depth of the strategies that are sought.
        self._reach = min(depth, max(4, mean_depth + 2))
        self._add_longest()
        for table in tables:
            self._pool.add(self._packs(table, self._reach))

    def _add_longest(self) -> None:
        """Add a strategy with a slot that any sequence fits into."""
        self._pool.add(self._lengths[-1:, None])

    def _bound(self, prices: np.ndarray) -> _PackTables:
        """Improve the bound with these prices."""
        tables = _PackTables(self._lengths, prices, self._S, self._depth)
        full_pack = np.array([self._S])
        dearest = float(tables.value(self._depth, full_pack)[0])
        if dearest > 0:
            bound = float(self._weights @ prices / dearest)
            if bound > self.bound:
                self.bound = bound
                self.prices = prices / dearest
        return tables

    def _packs(self, tables: _PackTables, reach: int) -> np.ndarray:
        """Return best packs of at most `reach` sequences that contain certain lengths."""
        lengths = self._lengths
        S = self._S
        # If there are many lengths, take those with the best packs, and others in turn.
        if len(lengths) > _CANDIDATES and reach > 1:
            value = tables.value(1, lengths) + tables.value(reach - 1, S - lengths)
            order = np.argsort(-value, kind="stable")
            best = lengths[order[: _CANDIDATES // 2]]
            start = self._turn % self._stride
            lengths = np.union1d(best, lengths[start :: self._stride])
            self._turn += 1
        companions = tables.packs(reach - 1, S - lengths)
        return np.hstack([lengths[:, None], companions])

    def _add_improving(self, prices: np.ndarray, smoothing: float) -> int:
        """Add strategies worth more than 1 at these prices of the master; return how many.

        They are sought at prices smoothed towards the best ones so far.
        """
        smoothed = smoothing * self.prices + (1 - smoothing) * prices
        tables = self._bound(smoothed)
        candidates = self._packs(tables, self._reach)
        improving = self._pool.worth(prices, candidates) > 1 + _TOLERANCE
        return self._pool.add(candidates[improving])

    def _improve(self, prices: np.ndarray) -> int:
        """Add strategies worth more than 1, deeper ones if necessary; return how many."""
        for smoothing in _SMOOTHING:
            added = self._add_improving(prices, smoothing)
            if added:
                return added
        if self._reach == self._depth:
            return 0
        self._reach = min(self._depth, 2 * self._reach)
        return self._add_improving(prices, 0.0)

    def _whole_bound(self) -> float:
        """Return the bound rounded up to whole packs."""
        return float(np.ceil(self.bound - PACKS_ERROR))

    def _solve(
        self,
        rows: csc_matrix,
        enough: Callable[[float, int], bool],
        progress: _Progress,
    ) -> Relaxation:
        """Solve the programme until `enough` of its value and the number of the round is True.

        rows: weight of each length in each row of the programme, sparse [rows, lengths].
        """
        wanted = rows @ self._weights
        for round_ in range(_MAX_ROUNDS):
            master = _solve_master(rows @ self._pool.matrix(), wanted)
            progress(master.value, self.bound, self.prices)
            used = master.packs > 0
            strategies = self._pool.strategies[used]
            if enough(master.value, round_):
                break
            prices = rows.T @ master.prices
            worth = self._pool.worth(prices, self._pool.strategies)
            best = np.sort(worth)[-_STRATEGIES_PER_LENGTH * len(self._lengths) :]
            self._pool.keep(used | (worth >= best[0]))
            if not self._improve(prices):
                break
        packs = master.packs[used]
        exact = len(wanted) == len(self._lengths)
        return Relaxation(master.value, self.bound, self.prices, strategies, packs, exact)

    def solve_on(self, knots: np.ndarray, progress: _Progress) -> Relaxation:
        """Solve for prices that are piecewise linear in the length, to 1e-5.

        Such prices give a bound of the full programme. Its optimal prices mostly have few kinks, so few knots give
        nearly the full bound.

        Args:
            knots: indices of lengths, ascending.
            progress: called after every programme solved.
        """
        self._pool.add(self._lengths[knots][:, None])  # so that each row can be met

        def enough(value: float, _: int) -> bool:
            return value - self.bound <= _GAP_ON_KNOTS * value

        hats = _hats(self._lengths, knots)
        return self._solve(hats, enough, progress)

    def _begin_full(self, good_enough_coarse: bool, progress: _Progress) -> Optional[Relaxation]:
        """Collect strategies for the full programme from coarse ones; return a coarse solution if it is good enough."""
        rows = len(self._lengths)
        for coarse_rows in _COARSE_ROWS:
            if 2 * coarse_rows < rows:
                coarse = self.solve_on(even_indices(rows, coarse_rows), progress)
                # If programmes do not improve the first bound, tokens are scarce, not lengths. The full programme may
                # then take a minute for the last thousandth.
                if good_enough_coarse and self.bound == self._first_bound:
                    return coarse

        worth = self._pool.worth(self.prices, self._pool.strategies)
        self._pool.keep(worth > 1 - _NEAR_ONE)
        self._add_longest()
        # Many strategies are equally good at nearly optimal prices; noise on the prices finds different ones.
        random = np.random.default_rng(0)
        for _ in range(_NOISY_ROUNDS):
            noise = 1 + _NOISE * random.random(rows)
            tables = self._bound(self.prices * noise)
            self._pool.add(self._packs(tables, self._reach))
        return None

    def _solve_full(
        self,
        good_enough: float,
        incumbent: float,
        progress: _Progress,
    ) -> Relaxation:
        """Solve the programme with a row for every length."""

        def enough(value: float, round_: int) -> bool:
            whole_bound = self._whole_bound()
            at_optimum = value - self.bound <= _TOLERANCE * value
            no_pack_to_save = round_ >= _ROUNDS_BEFORE_ROUNDING and value <= whole_bound
            good = value <= good_enough or whole_bound >= incumbent
            return at_optimum or no_pack_to_save or good

        all_rows = identity(len(self._lengths), format="csc")
        return self._solve(all_rows, enough, progress)


def relax(
    lengths: np.ndarray,
    counts: np.ndarray,
    max_sequence_length: int,
    depth: int,
    *,
    seeds: Optional[np.ndarray] = None,
    good_enough: float = 0.0,
    incumbent: float = np.inf,
    exact: bool = False,
    progress: _Progress = lambda value, bound, prices: None,
) -> Relaxation:
    """Solve the linear programme over these lengths.

    Stop at the optimum, at a value of `good_enough`, if the bound shows that a packing of `incumbent` packs is optimal,
    and, after some rounds, if no whole pack can be saved. If the full programme would take very long for a last
    thousandth, a coarse one is solved, unless `exact` asks for the full one.

    Args:
        lengths: ascending, int [m].
        counts: sequences of each length, above 0, int [m].
        max_sequence_length: slots of a pack.
        depth: most sequences of a pack.
        seeds: strategies to start from, int [n, any].
        good_enough: value of the programme that is low enough.
        incumbent: number of packs of the best packing so far.
        exact: True to solve the full programme.
        progress: called after every programme solved.
    """
    programme = Programme(lengths, counts, max_sequence_length, depth)
    if programme._whole_bound() >= incumbent:
        strategies = np.zeros((0, 1), np.int64)
        return Relaxation(
            incumbent, programme.bound, programme.prices, strategies, np.zeros(0), exact=True
        )
    if seeds is not None:
        programme._pool.add(seeds)
    few_rows = len(lengths) <= 2 * _COARSE_ROWS[0]
    if not few_rows and seeds is None:
        coarse = programme._begin_full(not exact, progress)
        if coarse is not None:
            return coarse
    return programme._solve_full(good_enough, incumbent, progress)
