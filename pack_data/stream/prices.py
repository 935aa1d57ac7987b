"""The lengths that a stream has shown: whether their order is random, and what a sequence of each length is worth.

Worth is the price of the packing programme. A row of value 1 wastes nothing: over a whole stream, packs - (worth of all
sequences) is the sum of (1 - value) over the packs (linear programming duality).

Prices hold for sequences that are yet to come only if these are like those seen. So each window of arrivals is compared
with all that came before (Kolmogorov-Smirnov). The order within a window, which the buffer mixes, does not matter.

Prices are used only where they gain: without them, 20,000 sequences and a buffer of 1,024 need 1.2 % more packs for
SQuAD at depth 4, 1.1 % for patches of images at 1,024 slots and depth 4, and 0.45 % for lengths near half a row. Where
lengths vary more and rows are far from the depth, they cost up to 0.9 % (uniform lengths).
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional

import numpy as np

from pack_data.reading.fields import Fields

_Knots = List[List[float]]  # lengths, ascending, and their prices

# Steps of the grid of lengths on which the programme is solved, in a tenth of a second. Half as many need 0.2 % more
# packs for SQuAD.
_GRID = 256
# The programme is solved exactly up to this number of lengths, and of sequences in a row: a grid misjudges data of two
# lengths by a fifth.
_FEW_LENGTHS = 64
# With a limit on depth, the programme gets this share more of the shortest sequences and less of the longest, so that
# seats have a price before short sequences pile up. Without it Wikipedia at depth 3 needs 0.35 % more packs. If lengths
# are alike, it costs packs instead (SQuAD 0.2 %).
_MORE_SHORT = 0.1
_GROWTH = 8  # prices are computed again when this many times the sequences have been seen
# Distance of two samples above which the order is not random, in units of its spread at random, so that one in 10,000
# windows is above it by chance.
_MOST_DISTANCE = 2.4
_CALM_WINDOWS = 8  # windows without such a sign after which the order counts as random again
# Steps of length in which samples are compared. Their number bounds the work for each window in long rows.
_COMPARED = 4096
# Standard deviation, as a share of the mean, below which lengths are alike: then hardly any short sequence fills up a
# row. Measured: 0.41 and below gain by rows that begin with the oldest sequence, 0.52 and above lose.
_ALIKE = 0.47


def solve(counts: np.ndarray, S: int, depth: Optional[int]) -> _Knots:
    """Return lengths, ascending, and their non-decreasing prices, for sequences by length, [S + 1]."""
    unit = -(-S // _GRID)
    lengths = np.flatnonzero(counts)
    if len(lengths) <= _FEW_LENGTHS and _FEW_LENGTHS * lengths[0] >= S:
        unit = 1
    steps = -(-S // unit)
    nearest = np.clip(np.rint(np.arange(S + 1) / unit).astype(np.int64), 1, steps)
    on_grid = np.bincount(nearest, weights=counts, minlength=steps + 1)
    known = np.flatnonzero(on_grid)
    deepest = steps // int(known[0])
    if depth is not None:
        deepest = min(depth, deepest)
    # Imported here because loading SciPy takes longer than all else that a stream imports.
    from pack_data.solver.column_generation import relax

    # A coarse programme would price slots alone: patches of images at depth 4 would need 1 % more packs.
    exact = relax(known, on_grid[known], steps, deepest, exact=True)
    prices = np.maximum.accumulate(exact.prices)
    return [(known * unit).astype(float).tolist(), prices.tolist()]


class _Moments(NamedTuple):
    """Sums over sequences, from which the mean and the variance of their lengths follow."""

    sequences: int = 0
    tokens: int = 0
    squares: int = 0  # of lengths

    def plus(self, lengths: np.ndarray, counts: np.ndarray) -> _Moments:
        """Return the sums of `counts[i]` more sequences of `lengths[i]`."""
        return _Moments(
            self.sequences + int(counts.sum()),
            self.tokens + int(counts @ lengths),
            self.squares + int(counts @ lengths**2),
        )

    @property
    def mean(self) -> float:
        """Mean tokens of a sequence; 0 if there is none."""
        return self.tokens / max(self.sequences, 1)

    @property
    def are_alike(self) -> bool:
        """True if lengths vary so little that hardly any short sequence fills up a row."""
        variance = self.squares / max(self.sequences, 1) - self.mean**2
        return variance < (_ALIKE * self.mean) ** 2


class Lengths:
    """Lengths seen since the order changed last, and their prices once they were asked for."""

    def __init__(self, S: int, depth: Optional[int], window: int) -> None:
        self._S = S
        self._depth = depth
        self._window = window  # sequences that are compared with those before
        self._arrived: List[int] = []  # fewer than a window
        # Windows in random order since the order changed, at most `_CALM_WINDOWS`.
        self._calm = _CALM_WINDOWS
        self._unit = -(-S // _COMPARED)
        self.all = _Moments()  # of the whole stream, whatever its order
        self._forget()

    def _forget(self) -> None:
        self._counts = np.zeros(self._S + 1, np.int64)  # of whole windows
        self._by_step = np.zeros(self._S // self._unit + 1, np.int64)  # the same, in steps
        self.seen = _Moments()  # of the same sequences
        self._at_prices = 0  # sequences seen when the prices were computed
        self._knots: Optional[_Knots] = None
        # Price of each length, [S + 1]; None: not needed so far.
        self.worth: Optional[List[float]] = None

    @property
    def in_random_order(self) -> bool:
        """True unless the last windows show an order."""
        return self._calm >= _CALM_WINDOWS

    def add(self, length: int) -> None:
        """Count a sequence; all properties may change when a window is full."""
        self._arrived.append(length)
        if len(self._arrived) < self._window:
            return
        window = np.array(self._arrived)
        self._arrived = []
        if self._is_random(window):
            self._calm = min(self._calm + 1, _CALM_WINDOWS)
        else:
            self._calm = 0
            self._forget()
        self._count(*np.unique(window, return_counts=True))

    def add_counts(self, counts: np.ndarray) -> None:
        """Count sequences by length, int [S + 1]."""
        known = np.flatnonzero(counts)
        self._count(known, counts[known])

    def _count(self, lengths: np.ndarray, counts: np.ndarray) -> None:
        """Count `counts[i]` sequences of `lengths[i]`; the lengths differ."""
        self._counts[lengths] += counts
        np.add.at(self._by_step, lengths // self._unit, counts)
        self.seen = self.seen.plus(lengths, counts)
        self.all = self.all.plus(lengths, counts)
        if self.worth is not None and self.seen.sequences >= _GROWTH * self._at_prices:
            self.solve()

    def solve(self) -> None:
        """Compute the prices of what was seen."""
        self._at_prices = self.seen.sequences
        counts: np.ndarray = self._counts
        if self._depth is not None and not self.seen.are_alike:
            counts = counts * (1 + _MORE_SHORT * np.linspace(1, -1, self._S + 1))
        self._price(solve(counts, self._S, self._depth))

    def _price(self, knots: _Knots) -> None:
        self._knots = knots
        lengths, prices = knots
        # A sequence of no tokens is worth nothing: below the shortest length seen, prices go down to 0.
        everywhere = np.interp(np.arange(self._S + 1), [0, *lengths], [0.0, *prices])
        self.worth = everywhere.tolist()

    def _is_random(self, window: np.ndarray) -> bool:
        """Return True if a window of lengths is like what was seen."""
        seen = self.seen.sequences
        if not seen:
            return True
        steps = np.bincount(window // self._unit, minlength=len(self._by_step))
        below = np.cumsum(steps) / self._window
        seen_below = np.cumsum(self._by_step) / seen
        spread = (1 / self._window + 1 / seen) ** 0.5
        return float(np.abs(below - seen_below).max()) <= _MOST_DISTANCE * spread

    # ---- state -------------------------------------------------------------------------------------------------------

    def state(self) -> Dict[str, Any]:
        """Return values for `read`."""
        known = np.flatnonzero(self._counts)
        return {
            "arrived": list(self._arrived),
            "seen": [known.tolist(), self._counts[known].tolist()],
            "all": list(self.all),
            "calm": self._calm,
            "at_prices": self._at_prices,
            "prices": self._knots,
        }

    def read(self, fields: Fields) -> None:
        """Continue from the `Fields` of a state."""
        S = self._S
        self._arrived = fields.integers("arrived", least=1, most=S)
        if len(self._arrived) >= self._window:
            raise fields.error("arrived", f"must have fewer than {self._window} lengths")
        lengths, counts = fields.list_of("seen", Fields.integers, length=2, least=1, most=1 << 53)
        if len(lengths) != len(counts) or max(lengths, default=0) > S:
            raise fields.error("seen", f"must be lengths up to {S} and their numbers")
        if lengths != sorted(set(lengths)):
            raise fields.error("seen", "must have ascending lengths")
        self._count(np.array(lengths, np.int64), np.array(counts, np.int64))
        self.all = _Moments(*fields.integers("all", length=3, least=0, most=1 << 106))
        self._calm = fields.integer("calm", least=0, most=_CALM_WINDOWS)
        self._at_prices = fields.integer("at_prices", least=0)
        knots = fields.optional(
            "prices", Fields.list_of, Fields.list_of, Fields.number, length=2, least=0
        )
        if knots is not None:
            places, prices = knots
            if len(places) != len(prices) or places != sorted(set(places)):
                raise fields.error("prices", "must be ascending lengths and their prices")
            self._price(knots)
