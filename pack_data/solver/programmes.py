"""Fewer packs and higher bounds by linear programmes: the steps of the search that need SciPy."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Optional

import numpy as np

from pack_data.cli.command import progress_bar
from pack_data.solver.column_generation import FULL_ROWS, Programme, Relaxation, relax, with_dearest_long
from pack_data.solver.filling import Packs
from pack_data.solver.grid_programme import Shape
from pack_data.solver.rounding import whole_packs
from pack_data.solver.search import LARGE, FoundPacks, number

_SMALL = 256  # lengths; up to so many the full programme is solved wherever the coarse one leaves a gap
_QUICK = 1000  # lengths; up to so many it takes a second or two
_ENOUGH = 2e-4  # of the packs: a gap at which the full programme is not begun
_NEAR_ENOUGH = 1e-4  # of the bound: a gap below which a programme on a grid of lengths seldom leads
_LONG = 8.0  # seconds of a programme over all lengths, from which one on a grid of lengths takes its place
_TABLES = 1 << 20
_ON_KNOTS, _KNOTS = 1 << 18, 64  # slots x sequences of a pack up to which prices on so many knots take a second or two
_STEPS = 1 << 33  # additions that a proof of prices between the plain ones may cost: seconds


def improved(found: FoundPacks) -> FoundPacks:
    """Fewer packs and a higher bound, as far as linear programmes lead there and it pays."""
    S, m, depth = found.histogram.max_sequence_length, len(found.histogram.lengths), found.deepest
    if m > _QUICK and S * depth <= _ON_KNOTS:
        found = _on_knots(found)
    near_enough = S > LARGE and found.gap <= max(1, _NEAR_ENOUGH * found.lower_bound)
    if not near_enough and found.pays(found.programme_seconds):
        by_shape = S > LARGE and found.programme_seconds > _LONG
        found = _by_shape(found) if by_shape else _by_programme(found).mended()
    return found


def _by_programme(found: FoundPacks) -> FoundPacks:
    """From the linear programme over the lengths."""
    histogram, depth, packs = found.histogram, found.deepest, found.packs
    S, counts, lengths = histogram.max_sequence_length, histogram.counts, histogram.lengths
    with _Progress(histogram.sequences, found.limits.until) as bar, contextlib.suppress(_TimeIsUp):
        relaxation = relax(lengths, counts[lengths], S, depth, incumbent=number(packs), progress=bar.programme)
        bar.keep(relaxation.bound, relaxation.prices)
        packs = _fewer(packs, relaxation, counts, depth, bar)
        gap = number(packs) - _target(relaxation)
        if not relaxation.exact and gap > 2 and len(lengths) > _QUICK:  # the full programme takes a minute or more
            packs = min(packs, Shape(counts, depth).packs(_target(relaxation), found.limits.until), key=number)
            gap = number(packs) - _target(relaxation)
            if gap <= _ENOUGH * number(packs):
                gap = 0
        if not relaxation.exact and (gap > 2 and len(lengths) <= FULL_ROWS or gap > 0 and len(lengths) <= _SMALL):
            full = relax(
                lengths, counts[lengths], S, depth, incumbent=number(packs), exact=True, progress=bar.programme
            )
            bar.keep(full.bound, full.prices)
            packs = _fewer(packs, full, counts, depth, bar)
    found = found._replace(packs=packs)
    return found if bar.prices is None else found.proved_by(bar.prices)


def _on_knots(found: FoundPacks) -> FoundPacks:
    """From prices that are piecewise linear in the length.

    The knots are densest among the shortest and the longest: where sequences are scarcer than slots, what a longest
    one is worth depends on how many of the very shortest there are to go beside it.
    """
    histogram = found.histogram
    counts, lengths = histogram.counts, histogram.lengths
    near = np.unique(np.geomspace(1, len(lengths), _KNOTS).astype(np.int64))
    with _Progress(histogram.sequences, found.limits.until) as bar, contextlib.suppress(_TimeIsUp):
        programme = Programme(lengths, counts[lengths], histogram.max_sequence_length, found.deepest)
        programme.solve_on(np.union1d(near - 1, len(lengths) - near), bar.programme)
        bar.keep(programme.bound, programme.prices)
    return found if bar.prices is None else found.proved_by(bar.prices).mended()


def _by_shape(found: FoundPacks) -> FoundPacks:
    """From the linear programme on a grid of lengths."""
    histogram, depth = found.histogram, found.deepest
    lengths, S = histogram.lengths, histogram.max_sequence_length
    shape = Shape(histogram.counts, depth)
    # One short sequence must not make the tables too deep: then the shortest, one pack at most, are worth nothing.
    dear = (np.cumsum(lengths * histogram.counts[lengths]) > S) | (S * depth <= _TABLES)
    room = S // int(lengths[dear].min(initial=S))
    if S * min(depth, room) <= _TABLES:
        prices = np.zeros(len(lengths))
        prices[dear] = with_dearest_long(lengths[dear], shape.prices(lengths[dear]), S, min(depth, room))
        found = found.proved_by(prices, _STEPS).mended()
    if found.gap > 0:
        found = found.with_fewer(shape.packs(found.lower_bound, found.limits.until)).mended()
    return found


class _TimeIsUp(Exception):
    """The budget is spent."""


class _Progress:
    """Sequences packed, and how near the linear programme is to its bound. Raises _TimeIsUp when asked too late."""

    def __init__(self, sequences: int, until: float) -> None:
        self._sequences, self._until = sequences, until
        self.prices: Optional[np.ndarray] = None  # of the highest bound so far
        self._bound = 0.0
        self._bar = progress_bar(sequences, "packing", unit=" sequences")

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.close()

    def keep(self, bound: float, prices: np.ndarray) -> None:
        """Keeps the prices of the highest bound."""
        if self.prices is None or bound > self._bound:
            self.prices, self._bound = prices, bound

    def programme(self, value: float, bound: float, prices: np.ndarray) -> None:
        self.keep(bound, prices)
        self._bar.set_postfix_str(f"bound {bound:,.1f}, programme {value:,.1f} packs")
        self._check()

    def left(self, sequences: int) -> None:
        self._bar.n = self._sequences - sequences
        self._bar.refresh()
        self._check()

    def _check(self) -> None:
        if time.perf_counter() > self._until:
            raise _TimeIsUp


def _target(relaxation: Relaxation) -> int:
    """The bound rounded up to whole packs; a rounding error above a whole number does not count."""
    return int(np.ceil(relaxation.bound * (1 - 1e-12) - 1e-6))


def _fewer(packs: Packs, relaxation: Relaxation, counts: np.ndarray, depth: int, shown: _Progress) -> Packs:
    """These packs, or those that the relaxation leads to if they are fewer."""
    if number(packs) <= _target(relaxation):
        return packs
    return min(packs, whole_packs(relaxation, counts, depth, _target(relaxation), shown.left), key=number)
