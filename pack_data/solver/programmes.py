"""Fewer packs and higher bounds by linear programmes: the steps of the search that need SciPy."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any, Optional

import numpy as np

from pack_data.cli.terminal import progress_bar
from pack_data.solver.column_generation import relax, with_dearest_long
from pack_data.solver.free_slots import PACKS_ERROR, count_packs
from pack_data.solver.grid_programme import grid_prices
from pack_data.solver.rounding import whole_packs
from pack_data.solver.search import LONG_ROWS, Limits, ProvedPacks

# Packs above the bound of a coarse programme for which the full one is not solved: it may take a minute. At 0, 34 cases
# need as many packs.
_SMALL_FULL_GAP = 2
# Estimated seconds of a programme over all lengths of long rows above which a grid of lengths is used. At 2 s, 3,000
# chats at 32,768 slots took 106 s in place of 6 s, with as many packs.
_MAX_SECONDS = 0.75
# Slots x depth up to which tables over all slots prove the prices of the grid.
_MAX_TABLE = 1 << 20
# Additions that proving the prices of the grid may take: some seconds.
_MAX_PROOF_STEPS = 1 << 33


def improved(best: ProvedPacks) -> ProvedPacks:
    """Return fewer packs and a higher bound by the linear programmes that pay."""
    long_rows = best.histogram.max_sequence_length > LONG_ROWS
    if long_rows and best.gap <= 1:
        return best
    if long_rows and best.programme_seconds > _MAX_SECONDS:
        return _by_grid(best)
    return _by_programme(best).mended()


def _by_programme(best: ProvedPacks) -> ProvedPacks:
    """Return packs and prices of the linear programme over the lengths."""
    histogram = best.histogram
    counts = histogram.counts
    lengths = histogram.lengths
    depth = best.deepest
    with _Progress(histogram.sequences, best.limits) as bar, contextlib.suppress(_TimeIsUp):
        for exact in (False, True):
            relaxation = relax(
                lengths,
                counts[lengths],
                histogram.max_sequence_length,
                depth,
                incumbent=count_packs(best.packs),
                exact=exact,
                progress=bar.programme,
            )
            bar.keep(relaxation.bound, relaxation.prices)
            # A numerical error above a whole number does not count.
            target = math.ceil(relaxation.bound - PACKS_ERROR)
            gap = count_packs(best.packs) - target
            if relaxation.exact and gap > 0:
                best = best.with_fewer(whole_packs(relaxation, counts, depth, target, bar.left))
            if relaxation.exact or gap <= _SMALL_FULL_GAP:
                break
    return best if bar.prices is None else best.proved_by(bar.prices)


def _by_grid(best: ProvedPacks) -> ProvedPacks:
    """Return the packing with prices of the linear programme on a grid of lengths, and packs exchanged towards it."""
    histogram = best.histogram
    depth = best.deepest
    lengths = histogram.lengths
    S = histogram.max_sequence_length
    # A few short sequences must not make the tables too deep. If they would, the shortest sequences, up to one pack of
    # them, are worth nothing.
    priced = np.cumsum(lengths * histogram.counts[lengths]) > S
    if S * depth <= _MAX_TABLE:
        priced[:] = True
    deepest = min(depth, S // int(lengths[priced].min(initial=S)))
    if S * deepest <= _MAX_TABLE:
        prices = np.zeros(len(lengths))
        short_prices = grid_prices(histogram.counts, depth, lengths[priced])
        prices[priced] = with_dearest_long(lengths[priced], short_prices, S, deepest)
        best = best.proved_by(prices, _MAX_PROOF_STEPS)
    return best.exchanged().mended()


class _TimeIsUp(Exception):
    """The budget is spent."""


class _Progress:
    """A progress bar of sequences packed and of the programme's bound, which raises _TimeIsUp after the budget."""

    def __init__(self, sequences: int, limits: Limits) -> None:
        self._sequences = sequences
        self._until = limits.until
        self._programmes_left = limits.programmes
        self.prices: Optional[np.ndarray] = None  # of the highest bound so far
        self._bound = -math.inf
        self._bar = progress_bar(sequences, "packing", unit=" sequences")

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.close()

    def keep(self, bound: float, prices: np.ndarray) -> None:
        """Keep the prices if their bound is the highest so far."""
        if bound > self._bound:
            self.prices = prices
            self._bound = bound

    def programme(self, value: float, bound: float, prices: np.ndarray) -> None:
        """Show the value and the bound of a programme, and keep its prices."""
        self.keep(bound, prices)
        self._bar.set_postfix_str(f"bound {bound:,.1f}, programme {value:,.1f} packs")
        self._check()

    def left(self, sequences: int) -> None:
        """Show the number of sequences that are left to pack."""
        self._bar.n = self._sequences - sequences
        self._bar.refresh()
        self._check()

    def _check(self) -> None:
        self._programmes_left -= 1
        if self._programmes_left < 0 or time.perf_counter() > self._until:
            raise _TimeIsUp
