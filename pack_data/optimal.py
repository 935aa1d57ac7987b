"""The optimal packer, with a proof: `python -m pack_data.optimal`.

The cutting-stock linear programme (solver/column_generation.py) says how few packs there can be. Its solution is
rounded to whole packs (solver/rounding.py); its prices, as whole numbers, become a certificate that anyone can check.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from fractions import Fraction
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import numpy as np

from pack_data.certificate import Certificate, best_pack_value, plain_certificate, proven_bound
from pack_data.cli.command import positive_seconds, progress_bar, run_main
from pack_data.histogram import LengthHistogram
from pack_data.lengths.packer_command import run_packer
from pack_data.packing import Packing
from pack_data.proof import prove, statement
from pack_data.reading.fields import packing_depth
from pack_data.solver.column_generation import DEEP, FULL_ROWS, Programme, Relaxation, relax, with_dearest_long
from pack_data.solver.filling import fill_evenly, fill_exactly
from pack_data.solver.free_slots import longest_first
from pack_data.solver.grid_programme import Shape
from pack_data.solver.repair import mend
from pack_data.solver.rounding import Packs, whole_packs

_PRICE_UNITS = 1 << 40  # prices are rounded down to multiples of 1 / this
_SMALL = 256  # lengths; up to so many the full programme is solved wherever the coarse one leaves a gap
_QUICK = 1000  # lengths; up to so many it takes a second or two
# Slots from which the tables of the programme, S x S, cost more than they bring where the gap is already so small.
_LARGE, _NEAR_ENOUGH = 2048, 2e-4
_TOO_WIDE, _TABLES = 8192, 1 << 20
_ON_KNOTS, _KNOTS = 1 << 18, 64  # slots x sequences of a pack up to which prices on so many knots take a second or two
_SCARCE = 1.001  # a bound of so many times the slots that the tokens take: slots are not what is scarce
_STEPS = 1 << 33  # additions that a proof of prices between the plain ones may cost: seconds


def pack(
    histogram: LengthHistogram,
    *,
    max_sequences_per_pack: Optional[int],
    budget: Optional[float] = None,
    progress: Optional[bool] = None,
) -> Packing:
    """Packs into very nearly as few packs as any packing of this depth can; the result carries the proof.

    What holds always: no packing of this depth has fewer packs than `lower_bound`, an exact proof, and `packs -
    lower_bound` is the most that a better packing could save. What is measured: that gap is 0 or 1, seldom 2, on data
    sets of up to 2,048 slots. Beyond 2,048 slots the work ends where it is below 0.02 %, and more than a thousand
    different lengths are packed by a programme on a grid of lengths (solver/grid_programme.py). The gap has no
    guaranteed limit.

    max_sequences_per_pack None is unlimited.  budget: seconds, after which no further improvement is begun; then the
    result depends on how fast the machine is.  progress: whether to show it on stderr; None: where that is a terminal,
    if it takes long.
    """
    max_sequences_per_pack = packing_depth(max_sequences_per_pack)
    start = time.perf_counter()
    until = math.inf if budget is None else start + budget
    room = histogram.max_sequence_length // max(1, histogram.shortest)
    depth = room if max_sequences_per_pack is None else min(max_sequences_per_pack, room)
    found = _without_programme(histogram, max_sequences_per_pack, depth, until)
    S, m = histogram.max_sequence_length, len(histogram.lengths)
    if m > _QUICK and S * depth <= _ON_KNOTS and not _near_enough(found, S) and time.perf_counter() < until:
        found = _on_knots(histogram, max_sequences_per_pack, depth, found, until, progress)
    if not _near_enough(found, S) and time.perf_counter() < until:
        # The tables of the programme are products of S x S where packs are deep.
        if S > _LARGE and m > _QUICK or S > _TOO_WIDE and depth > DEEP:
            found = _by_shape(histogram, max_sequences_per_pack, depth, found, until)
        else:
            found = _by_programme(histogram, max_sequences_per_pack, depth, found, until, progress)
    return Packing.of(
        "optimal",
        histogram,
        max_sequences_per_pack,
        found.packs,
        solve_seconds=time.perf_counter() - start,
        lower_bound=found.lower_bound,
        lp_bound=float(found.worth),
        certificate=found.certificate,
    )


class _Found(NamedTuple):
    """Packs, and prices that prove how few there can be."""

    packs: Packs
    certificate: Certificate
    worth: Fraction  # of all sequences at these prices, in packs

    @property
    def lower_bound(self) -> int:
        return math.ceil(self.worth)

    @property
    def gap(self) -> int:
        return _number(self.packs) - self.lower_bound

    def mended(self, depth: int, until: float) -> _Found:
        """Fewer packs, where opening the worst of them leads there."""
        if self.gap <= 0:
            return self
        prices = np.zeros(self.certificate.max_sequence_length + 1)
        prices[list(self.certificate.lengths)] = np.array(self.certificate.prices, np.float64)
        return self.with_fewer(mend(self.packs, prices / self.certificate.denominator, depth, self.lower_bound, until))

    def with_fewer(self, packs: Packs) -> _Found:
        """These packs, where they are fewer."""
        return self._replace(packs=min(self.packs, packs, key=_number))

    def proved_by(
        self, histogram: LengthHistogram, limit: Optional[int], prices: np.ndarray, most_steps: float = math.inf
    ) -> _Found:
        """The bound of these prices, float64 by length that occurs, in whole numbers, where it is a higher one.

        most_steps: additions that the proof may take.
        """
        S, lengths = histogram.max_sequence_length, histogram.lengths.tolist()
        units = np.floor(prices * _PRICE_UNITS).astype(np.int64)
        if S * len(np.unique(units)) * min(S, limit or 1) > most_steps:
            return self
        denominator = max(1, best_pack_value(lengths, units.tolist(), S, limit))
        every = sum(count * price for count, price in zip(histogram.counts[lengths].tolist(), units.tolist()))
        worth = Fraction(every, denominator)
        # With very many sequences rounded prices may prove less than the plain ones.
        if (math.ceil(worth), worth) <= (self.lower_bound, self.worth):
            return self
        certificate = Certificate(S, limit, tuple(lengths), tuple(units.tolist()), denominator)
        return self._replace(certificate=certificate, worth=worth)


def _near_enough(found: _Found, S: int) -> bool:
    """Whether more work would cost more than it could bring."""
    return found.gap <= 0 or S > _LARGE and found.gap <= max(1, _NEAR_ENOUGH * found.lower_bound)


def _without_programme(histogram: LengthHistogram, limit: Optional[int], depth: int, until: float) -> _Found:
    """What takes a second or two at most. limit: on sequences in a pack; depth: those that can be in one."""
    certificate = plain_certificate(histogram, limit)
    proof = proven_bound(certificate, histogram.counts)
    S, lengths, packs = histogram.max_sequence_length, histogram.lengths, longest_first(histogram, depth)
    found = _Found(packs, certificate, proof.worth)
    no_limit = (depth + 1) * histogram.shortest > histogram.max_sequence_length
    if found.gap <= 0 or not no_limit and len(histogram.lengths) <= _QUICK and S <= _LARGE:
        return found
    if not no_limit:
        found = found.proved_by(histogram, limit, with_dearest_long(lengths, np.ones(len(lengths)), S, depth), _STEPS)
        # Where slots are scarcer than sequences, packs of as many sequences as may be are no help.
        if found.lower_bound * S > _SCARCE * histogram.tokens:
            found = found.with_fewer(fill_evenly(histogram.counts, depth))
    if found.gap > 0:
        found = found.with_fewer(fill_exactly(histogram.counts, depth, found.lower_bound))
    # Where the whole programme takes no longer, it is left to find what is missing.
    return found if len(lengths) <= _QUICK and S <= _LARGE else found.mended(depth, until)


def _by_programme(
    histogram: LengthHistogram,
    limit: Optional[int],
    depth: int,
    found: _Found,
    until: float,
    progress: Optional[bool],
) -> _Found:
    """Fewer packs than those found and a higher bound, as far as the linear programme leads to them."""
    S, counts, lengths, packs = histogram.max_sequence_length, histogram.counts, histogram.lengths, found.packs
    shown = False if progress is None and len(lengths) <= _QUICK else progress
    with _Progress(histogram.sequences, shown, until) as bar, contextlib.suppress(_TimeIsUp):
        relaxation = relax(lengths, counts[lengths], S, depth, incumbent=_number(packs), progress=bar.programme)
        bar.keep(relaxation.bound, relaxation.prices)
        packs = _fewer(packs, relaxation, counts, depth, bar)
        gap = _number(packs) - _target(relaxation)
        if not relaxation.exact and gap > 2 and len(lengths) > _QUICK:  # the full programme takes a minute or more
            packs = min(packs, Shape(counts, depth).packs(_target(relaxation), until), key=_number)
            gap = _number(packs) - _target(relaxation)
            if gap <= _NEAR_ENOUGH * _number(packs):
                gap = 0
        if not relaxation.exact and (gap > 2 and len(lengths) <= FULL_ROWS or gap > 0 and len(lengths) <= _SMALL):
            full = relax(
                lengths, counts[lengths], S, depth, incumbent=_number(packs), exact=True, progress=bar.programme
            )
            bar.keep(full.bound, full.prices)
            packs = _fewer(packs, full, counts, depth, bar)
    found = found._replace(packs=packs)
    return found if bar.prices is None else found.proved_by(histogram, limit, bar.prices)


def _on_knots(
    histogram: LengthHistogram,
    limit: Optional[int],
    depth: int,
    found: _Found,
    until: float,
    progress: Optional[bool],
) -> _Found:
    """A higher bound, from prices that are piecewise linear in the length, and fewer packs at these prices.

    The knots are densest among the shortest and the longest: where sequences are scarcer than slots, what a longest
    one is worth depends on how many of the very shortest there are to go beside it.
    """
    S, counts, lengths = histogram.max_sequence_length, histogram.counts, histogram.lengths
    near = np.unique(np.geomspace(1, len(lengths), _KNOTS).astype(np.int64))
    shown = False if progress is None else progress
    with _Progress(histogram.sequences, shown, until) as bar, contextlib.suppress(_TimeIsUp):
        programme = Programme(lengths, counts[lengths], S, depth)
        programme.solve_on(np.union1d(near - 1, len(lengths) - near), bar.programme)
        bar.keep(programme.bound, programme.prices)
    return found if bar.prices is None else found.proved_by(histogram, limit, bar.prices).mended(depth, until)


def _by_shape(histogram: LengthHistogram, limit: Optional[int], depth: int, found: _Found, until: float) -> _Found:
    """Fewer packs than those found and a higher bound, from the linear programme on a grid of lengths."""
    lengths, S = histogram.lengths, histogram.max_sequence_length
    shape = Shape(histogram.counts, depth)
    # One short sequence must not make the tables too deep: then the shortest, one pack at most, are worth nothing.
    dear = (np.cumsum(lengths * histogram.counts[lengths]) > S) | (S * depth <= _TABLES)
    room = S // int(lengths[dear].min(initial=S))
    if S * min(depth, room) <= _TABLES:
        prices = np.zeros(len(lengths))
        prices[dear] = with_dearest_long(lengths[dear], shape.prices(lengths[dear]), S, min(depth, room))
        found = found.proved_by(histogram, limit, prices, _STEPS)
        found = found.mended(depth, until)
    if not _near_enough(found, S):
        found = found.with_fewer(shape.packs(found.lower_bound, until)).mended(depth, until)
    return found


class _TimeIsUp(Exception):
    """The budget is spent."""


class _Progress:
    """Sequences packed, and how near the linear programme is to its bound. Raises _TimeIsUp when asked too late."""

    def __init__(self, sequences: int, shown: Optional[bool], until: float) -> None:
        self._sequences, self._until = sequences, until
        self.prices: Optional[np.ndarray] = None  # of the highest bound so far
        self._bound = 0.0
        self._bar = progress_bar(sequences, "packing", shown=shown, unit=" sequences")

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


def _number(packs: Packs) -> int:
    return sum(count for _, count in packs)


def _target(relaxation: Relaxation) -> int:
    """The bound rounded up to whole packs; a rounding error above a whole number does not count."""
    return int(np.ceil(relaxation.bound * (1 - 1e-12) - 1e-6))


def _fewer(packs: Packs, relaxation: Relaxation, counts: np.ndarray, depth: int, shown: _Progress) -> Packs:
    """These packs, or those that the relaxation leads to if they are fewer."""
    if _number(packs) <= _target(relaxation):
        return packs
    return min(packs, whole_packs(relaxation, counts, depth, _target(relaxation), shown.left), key=_number)


def main(argv: Optional[Sequence[str]] = None) -> int:
    lines: List[str] = []

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--budget",
            type=positive_seconds,
            metavar="SECONDS",
            help="stop improving after so long, with the best packing found and its proven gap; the result then "
            "depends on how fast the machine is",
        )
        parser.add_argument(
            "--progress", action="store_true", default=None, help="show progress even where stderr is no terminal"
        )

    def options(args: argparse.Namespace) -> Dict[str, Any]:
        return {"budget": args.budget, "quiet": args.json, "progress": args.progress}

    def pack_and_report(
        histogram: LengthHistogram,
        *,
        max_sequences_per_pack: Optional[int],
        budget: Optional[float],
        quiet: bool,
        progress: Optional[bool],
    ) -> Packing:
        packing = pack(histogram, max_sequences_per_pack=max_sequences_per_pack, budget=budget, progress=progress)
        proof = prove(packing)
        if not quiet:
            lines.append(statement(packing, proof))
        return packing

    status = run_packer(
        argv,
        pack_and_report,
        name="optimal",
        add_options=add_options,
        options=options,
        description="As few packs as possible, with a proof: the cutting-stock linear programme, rounded.",
    )
    for line in lines:
        print("\n" + line)
    return status


if __name__ == "__main__":
    raise SystemExit(run_main(main))
