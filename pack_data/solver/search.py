"""The search for fewer packs: what was found, what a further step costs, and whether it pays.

First come a decreasing fit and the bounds that need no solver; they take milliseconds, and on most data they meet.
Where a gap stays, a step is begun only if what it may win is worth its time. The time is estimated from counts, never
taken from a clock, so that the same input gives the same packs on any machine. What may be won: the slots of the packs
above the bound. A slot is an empty place in every epoch to come, so it is worth `_SLOT` seconds of a core.
"""

from __future__ import annotations

import math
import time
from fractions import Fraction
from typing import NamedTuple, Optional

import numpy as np

from pack_data.packing.certificate import Certificate, best_pack_value, plain_certificate
from pack_data.packing.histogram import LengthHistogram
from pack_data.solver.filling import MADE, Packs, depths_tried, fill_evenly, fill_exactly
from pack_data.solver.free_slots import longest_first
from pack_data.solver.repair import mend

_SLOT = 2.5e-6  # seconds that one slot less is worth
_SEQUENCE = 2e-6  # seconds for each sequence that are spent in any case: counting and dealing take as long
# The same where rows are short and sequences more than a call has in the middle of a training: there linear programmes
# take less than a second and mostly end at the bound.
_SHORT_ROWS, _CALL = 60e-6, 1000
_SHORT_CALL = 1e-5  # seconds for each sequence of such a call, and for as many as it can have, unless the gap is wide
# A gap of such a share, or above what bounds leave where nothing can be won (so many packs and such a share), is nearly
# always won: so many times the seconds pay. Bounds leave less where most packs hold as many sequences as they may.
_WIDE, _USUAL, _CERTAIN = 0.006, (3, 0.001), 16
_USUAL_DEEP, _FULL = (1, 0.0001), 0.7  # where packs are so full of sequences
# Rows of more than `LARGE` slots are not searched further at a gap of so few packs and of such a share of the bound.
LARGE, _FEW, _NEAR_ENOUGH = 2048, 5, 1e-4
_LENGTH, _LONG = 2e-4, 8192  # seconds of a linear programme for each length; slots at which they are 1.4 times that
# Sequences of a pack above which its tables are products of the slots; slots from which that takes long.
DEEP, _DEEP_TABLES = 64, 1024
# Sequences of a pack that the tables allow at least where packs have no limit, and how many times the mean number.
_SHALLOW, _TIMES_MEAN = 16, 4
_SCARCE = 1.001  # a bound of so many times the slots that the tokens take: slots are not what is scarce
_MENDING = 5.0  # seconds at most
_DENSE = 0.8  # of the sequences that so many packs could hold
_PRICE_UNITS = 1 << 40  # prices are rounded down to multiples of 1 / this
_SMALL_UNITS, _WHOLE = 4096, 1e-7  # or are fractions with so small a denominator, up to so much


class Limits(NamedTuple):
    """What a search keeps to."""

    depth: int  # sequences that can be in one pack
    asked: Optional[int]  # max_sequences_per_pack; None = unlimited
    until: float  # `time.perf_counter`'s, after which no step is begun; inf: what pays is done

    @classmethod
    def of(cls, histogram: LengthHistogram, max_sequences_per_pack: Optional[int], budget: Optional[float]) -> Limits:
        room = histogram.max_sequence_length // max(1, histogram.shortest)
        depth = room if max_sequences_per_pack is None else min(max_sequences_per_pack, room)
        until = math.inf if budget is None else time.perf_counter() + budget
        return cls(depth, max_sequences_per_pack, until)

    @property
    def binding(self) -> bool:
        """Whether a pack could hold more sequences than it may."""
        return self.asked == self.depth


class FoundPacks(NamedTuple):
    """Packs, and prices that prove how few there can be."""

    histogram: LengthHistogram
    limits: Limits
    packs: Packs
    certificate: Certificate
    worth: Fraction  # of all sequences at these prices, in packs

    @property
    def lower_bound(self) -> int:
        """No packing within the limits has fewer packs."""
        return math.ceil(self.worth)

    @property
    def gap(self) -> int:
        """Packs that could at most be won."""
        return number(self.packs) - self.lower_bound

    def pays(self, seconds: float) -> bool:
        """Whether a step that takes so long is worth it; while there is a budget it always is."""
        if self.gap <= 0:
            return False
        if self.limits.until < math.inf:
            return time.perf_counter() < self.limits.until
        return seconds <= self.patience

    @property
    def patience(self) -> float:
        """Seconds that the packs which may be won are worth."""
        gap, S, sequences = self.gap, self.histogram.max_sequence_length, self.histogram.sequences
        if S > LARGE and gap <= min(_FEW, _NEAR_ENOUGH * self.lower_bound):
            return 0.0
        scarce = self.limits.binding and sequences > _FULL * self.limits.depth * self.lower_bound
        least, share = _USUAL_DEEP if scarce else _USUAL
        likely = gap > 1 and gap > min(_WIDE * self.lower_bound, least + share * self.lower_bound)
        worth = gap * S * _SLOT * (_CERTAIN if likely else 1)
        if sequences <= _CALL and not likely:
            return min(max(worth, sequences * _SHORT_CALL), _CALL * _SHORT_CALL)
        if S > LARGE and not self.limits.binding and not likely:  # the decreasing fit is nearly always at the optimum
            return sequences * _SEQUENCE
        return max(worth, sequences * (_SHORT_ROWS if S <= LARGE else _SEQUENCE))

    @property
    def deepest(self) -> int:
        """Sequences of a pack that linear programmes allow: in long rows a few times as many as packs hold on average,
        because their time grows with the depth. Whether a bound holds at any depth is checked apart (`proved_by`)."""
        depth, S = self.limits.depth, self.histogram.max_sequence_length
        if self.limits.binding or S <= _DEEP_TABLES:
            return depth
        return min(depth, max(_SHALLOW, math.ceil(_TIMES_MEAN * self.histogram.sequences / self.lower_bound)))

    @property
    def programme_seconds(self) -> float:
        """What a linear programme takes, about."""
        S = self.histogram.max_sequence_length
        deep = math.hypot(1, S / _DEEP_TABLES) if self.deepest > DEEP else 1.0
        return _LENGTH * len(self.histogram.lengths) * math.sqrt(1 + S / _LONG) * deep

    def with_fewer(self, packs: Packs) -> FoundPacks:
        """These packs, where they are fewer."""
        return self._replace(packs=min(self.packs, packs, key=number))

    def mended(self, most_seconds: float = math.inf) -> FoundPacks:
        """Fewer packs, where opening the worst of them leads there: until that has won nothing for too long."""
        if not self.pays(MADE):
            return self
        prices = np.zeros(self.histogram.max_sequence_length + 1)
        prices[list(self.certificate.lengths)] = np.array(self.certificate.prices, np.float64)
        prices /= self.certificate.denominator
        depth, until = self.limits.depth, self.limits.until
        seconds = math.inf if until < math.inf else min(most_seconds, self.patience, _MENDING)
        most = seconds / (MADE * len(depths_tried(self.histogram.counts, depth)))
        return self.with_fewer(mend(self.packs, prices, depth, self.lower_bound, most, until))

    def proved_by(self, prices: np.ndarray, most_steps: float = math.inf) -> FoundPacks:
        """The bound of these prices, float64 by length that occurs, in whole numbers, where it is a higher one.

        most_steps: additions that the proof may take.
        """
        S, limit, lengths = self.histogram.max_sequence_length, self.limits.asked, self.histogram.lengths
        counts = self.histogram.counts[lengths].tolist()
        found = self
        for units in {_PRICE_UNITS: None, _small_units(prices): None}:
            whole = np.floor(prices * units + (0 if units == _PRICE_UNITS else 0.5)).astype(np.int64)
            if S * len(np.unique(whole)) * min(S, limit or 1) > most_steps:
                continue
            denominator = max(1, best_pack_value(lengths.tolist(), whole.tolist(), S, limit))
            worth = Fraction(sum(count * price for count, price in zip(counts, whole.tolist())), denominator)
            # With very many sequences rounded prices may prove less than the plain ones.
            if (math.ceil(worth), worth) > (found.lower_bound, found.worth):
                certificate = Certificate(S, limit, tuple(lengths.tolist()), tuple(whole.tolist()), denominator)
                found = found._replace(certificate=certificate, worth=worth)
        return found


def number(packs: Packs) -> int:
    """Packs in all."""
    return sum(count for _, count in packs)


def _small_units(prices: np.ndarray) -> int:
    """The least denominator of which all prices are nearly multiples, as those of a linear programme often are."""
    for start in range(1, _SMALL_UNITS, 64):
        multiples = prices * np.arange(start, start + 64)[:, None]
        whole = (np.abs(multiples - np.rint(multiples)) <= _WHOLE).all(axis=1)
        if whole.any():
            return start + int(whole.argmax())
    return _PRICE_UNITS


def found_quickly(histogram: LengthHistogram, limits: Limits) -> FoundPacks:
    """A decreasing fit and the plain bounds; then, where it pays, packs filled exactly, and the worst opened again."""
    certificate = plain_certificate(histogram, limits.asked)
    counts = histogram.counts[list(certificate.lengths)].tolist()
    worth = Fraction(sum(map(int.__mul__, counts, certificate.prices)), certificate.denominator)
    found = FoundPacks(histogram, limits, longest_first(histogram, limits.depth), certificate, worth)
    if found.gap <= 0:
        return found
    # Packs of as many sequences as may be are no help where slots are what is scarce, or where few have so many.
    bound, S = found.lower_bound, histogram.max_sequence_length
    if (
        limits.binding
        and bound * S > _SCARCE * histogram.tokens
        and histogram.sequences > _DENSE * limits.depth * bound
    ):
        found = found.with_fewer(fill_evenly(histogram.counts, limits.depth))
    # In short rows the programme leads further than all other steps: where it pays, they take no longer than it would.
    most = found.programme_seconds if S <= LARGE and found.pays(found.programme_seconds) else math.inf
    filling = len(found.packs) * MADE * len(depths_tried(histogram.counts, limits.depth))
    if filling <= most and found.pays(filling):
        found = found.with_fewer(fill_exactly(histogram.counts, limits.depth, found.lower_bound))
    return found.mended(most)
