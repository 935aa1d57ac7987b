"""The search for fewer packs: the packing and its proof so far, the cost of a further step, and whether it pays.

First come a decreasing fit and the bounds that need no solver; they take milliseconds, and on most data they meet. If a
gap is left, a step is begun only if what it may win is worth its time. The time is estimated from counts, never taken
from a clock, so that the same input gives the same packs on any machine. What may be won: the slots of the packs above
the bound. A slot is an empty place in every epoch to come, so it is worth `_SECONDS_PER_SLOT` of a core.
"""

from __future__ import annotations

import math
import time
from fractions import Fraction
from typing import NamedTuple, Optional

import numpy as np

from pack_data.packing.certificate import Certificate, best_pack_value, plain_certificate
from pack_data.packing.histogram import LengthHistogram
from pack_data.solver.filling import SECONDS_PER_STRATEGY, depths_tried, fill_evenly, fill_exactly
from pack_data.solver.free_slots import Packs, count_packs, longest_first
from pack_data.solver.repair import mend

# ---- seconds that the search may take --------------------------------------------------------------------------------

_SECONDS_PER_SLOT = 2.5e-6  # worth of one slot less
# Always allowed, per sequence: counting the lengths and assigning the sequences to packs take as long.
_SECONDS_PER_SEQUENCE = 2e-6
# The same in rows of up to `LONG_ROWS` slots, where linear programmes take less than a second and mostly reach the
# bound.
_SECONDS_PER_SEQUENCE_SHORT_ROWS = 60e-6
# Calls with few sequences are often made during training and must return within milliseconds.
_SMALL_CALL_SEQUENCES = 1000
_SECONDS_PER_SEQUENCE_SMALL_CALL = 1e-5
_MAX_SECONDS_OF_MENDING = 5.0

# ---- gaps that can probably be closed --------------------------------------------------------------------------------

# Even optimal packings are often this many packs, plus this share of the bound, above the bound; less if most packs are
# at their depth. A larger gap, or one above the wide share, can nearly always be reduced.
_USUAL_GAP_PACKS = 3
_USUAL_GAP_SHARE = 1e-3
_USUAL_GAP_PACKS_FULL_SEATS = 1
_USUAL_GAP_SHARE_FULL_SEATS = 1e-4
_WIDE_GAP_SHARE = 0.006
_LIKELY_FACTOR = 16  # on the seconds that a gap is worth, if it can probably be reduced
_FULL_SEATS = 0.7  # share of the seats taken from which most packs count as being at their depth
LONG_ROWS = 2048  # slots; in longer rows linear programmes take seconds to minutes
# In long rows a gap of at most so many packs and such a share of the bound is left as it is.
_SMALL_GAP_PACKS = 5
_SMALL_GAP_SHARE = 1e-4

# ---- cost of a linear programme --------------------------------------------------------------------------------------

_PROGRAMME_SECONDS_PER_LENGTH = 2e-4  # in short rows
_PROGRAMME_SLOTS = 8192  # slots at which it takes 1.4 times as long
MAX_SINGLE_DEPTH = 64  # deeper tables of the programme are computed as products, S^2 additions each
_PRODUCT_SLOTS = 1024  # slots at which such products take 1.4 times as long
# Depth of the programme if packs are unlimited: at least this, and this multiple of a mean pack.
_MIN_PROGRAMME_DEPTH = 16
_PROGRAMME_DEPTH_IN_MEAN_PACKS = 4

# ---- packs filled evenly ---------------------------------------------------------------------------------------------

# Packs are filled evenly if the packs of the bound have this many slots per token, so that slots are not scarce, and if
# sequences take this share of their seats.
_SLOTS_TO_SPARE = 1.001
_MIN_SEATS_TAKEN = 0.8

# ---- exact prices ----------------------------------------------------------------------------------------------------

_PRICE_UNITS = 1 << 40  # prices are rounded down to multiples of 1 / this
# Prices of a linear programme are often fractions with a common denominator up to this, to within this error.
_MAX_SMALL_UNITS = 4096
_UNIT_ERROR = 1e-7
_UNITS_AT_A_TIME = 64  # denominators tried in one NumPy call


class Limits(NamedTuple):
    """The limits of a search."""

    depth: int  # sequences that fit into one pack
    max_sequences_per_pack: Optional[int]  # None = unlimited
    until: float  # time of `time.perf_counter` after which no step is begun; inf without a budget

    @classmethod
    def of(
        cls,
        histogram: LengthHistogram,
        max_sequences_per_pack: Optional[int],
        budget: Optional[float],
    ) -> Limits:
        """Return the limits for these lengths; budget: seconds, None without one."""
        depth = histogram.max_sequence_length // max(1, histogram.shortest)
        if max_sequences_per_pack is not None:
            depth = min(depth, max_sequences_per_pack)
        until = math.inf if budget is None else time.perf_counter() + budget
        return cls(depth, max_sequences_per_pack, until)

    @property
    def _binding(self) -> bool:
        """True if a pack could hold more sequences without the limit on them."""
        return self.max_sequences_per_pack == self.depth


class FoundPacks(NamedTuple):
    """A packing, and prices that prove a lower bound."""

    histogram: LengthHistogram
    limits: Limits
    packs: Packs
    certificate: Certificate
    worth: Fraction  # of all sequences at the prices of the certificate, in packs

    @property
    def lower_bound(self) -> int:
        """Number of packs that no packing within the limits goes below."""
        return math.ceil(self.worth)

    @property
    def gap(self) -> int:
        """Packs above the bound."""
        return count_packs(self.packs) - self.lower_bound

    def pays(self, seconds: float) -> bool:
        """Return True if a step that takes so long is worth it; within a budget it always is."""
        if self.gap <= 0:
            return False
        if self.limits.until < math.inf:
            return time.perf_counter() < self.limits.until
        return seconds <= self._patience

    @property
    def _seats_are_scarce(self) -> bool:
        most_sequences = self.limits.depth * self.lower_bound
        return self.limits._binding and self.histogram.sequences > _FULL_SEATS * most_sequences

    @property
    def _patience(self) -> float:
        """Seconds that the packs above the bound are worth."""
        gap = self.gap
        bound = self.lower_bound
        sequences = self.histogram.sequences
        long_rows = self.histogram.max_sequence_length > LONG_ROWS
        if long_rows and gap <= min(_SMALL_GAP_PACKS, _SMALL_GAP_SHARE * bound):
            return 0.0

        usual_gap = _USUAL_GAP_PACKS + _USUAL_GAP_SHARE * bound
        if self._seats_are_scarce:
            usual_gap = _USUAL_GAP_PACKS_FULL_SEATS + _USUAL_GAP_SHARE_FULL_SEATS * bound
        likely = gap > 1 and gap > min(_WIDE_GAP_SHARE * bound, usual_gap)
        worth = gap * self.histogram.max_sequence_length * _SECONDS_PER_SLOT
        if likely:
            worth *= _LIKELY_FACTOR
        elif sequences <= _SMALL_CALL_SEQUENCES:
            most = _SMALL_CALL_SEQUENCES * _SECONDS_PER_SEQUENCE_SMALL_CALL
            return min(max(worth, sequences * _SECONDS_PER_SEQUENCE_SMALL_CALL), most)
        elif long_rows and not self.limits._binding:
            # The decreasing fit is nearly always optimal here.
            return sequences * _SECONDS_PER_SEQUENCE
        return max(
            worth,
            sequences * (_SECONDS_PER_SEQUENCE if long_rows else _SECONDS_PER_SEQUENCE_SHORT_ROWS),
        )

    @property
    def deepest(self) -> int:
        """Sequences of a pack that linear programmes allow.

        Their time grows with the depth, so in long rows it is a few times the mean number of sequences in a pack.
        Whether a bound holds at any depth is checked apart (`proved_by`).
        """
        depth = self.limits.depth
        if self.limits._binding or self.histogram.max_sequence_length <= _PRODUCT_SLOTS:
            return depth
        mean_packs = _PROGRAMME_DEPTH_IN_MEAN_PACKS * self.histogram.sequences / self.lower_bound
        return min(depth, max(_MIN_PROGRAMME_DEPTH, math.ceil(mean_packs)))

    @property
    def programme_seconds(self) -> float:
        """Estimated seconds of a linear programme."""
        S = self.histogram.max_sequence_length
        seconds = (
            _PROGRAMME_SECONDS_PER_LENGTH
            * len(self.histogram.lengths)
            * math.sqrt(1 + S / _PROGRAMME_SLOTS)
        )
        if self.deepest > MAX_SINGLE_DEPTH:
            seconds *= math.hypot(1, S / _PRODUCT_SLOTS)
        return seconds

    def _filling_seconds(self, strategies: float) -> float:
        """Return the estimated seconds for so many strategies of `fill_exactly`, at all depths it tries."""
        return (
            strategies
            * SECONDS_PER_STRATEGY
            * len(depths_tried(self.histogram.counts, self.limits.depth))
        )

    def with_fewer(self, packs: Packs) -> FoundPacks:
        """Return these packs if they are fewer, else those so far, with the same proof."""
        return self._replace(packs=min(self.packs, packs, key=count_packs))

    def mended(self, most_seconds: float = math.inf) -> FoundPacks:
        """Return fewer packs if opening the worst of them leads there."""
        if not self.pays(SECONDS_PER_STRATEGY):
            return self
        prices = np.zeros(self.histogram.max_sequence_length + 1)
        prices[list(self.certificate.lengths)] = np.array(self.certificate.prices, np.float64)
        prices /= self.certificate.denominator
        most_strategies = math.inf
        if self.limits.until == math.inf:
            seconds = min(most_seconds, self._patience, _MAX_SECONDS_OF_MENDING)
            most_strategies = seconds / self._filling_seconds(1)
        packs = mend(
            self.packs,
            prices,
            self.limits.depth,
            self.lower_bound,
            most_strategies,
            self.limits.until,
        )
        return self.with_fewer(packs)

    def proved_by(self, prices: np.ndarray, most_steps: float = math.inf) -> FoundPacks:
        """Return the same packs with the bound of these prices, in whole numbers, if it is higher.

        prices: float64 by length that occurs. most_steps: additions that the proof may take.
        """
        S = self.histogram.max_sequence_length
        limit = self.limits.max_sequences_per_pack
        lengths = self.histogram.lengths.tolist()
        counts = self.histogram.counts[lengths].tolist()
        best = self
        for units in {_PRICE_UNITS: None, _small_units(prices): None}:
            rounded = (
                np.floor(prices * units)
                if units == _PRICE_UNITS
                else np.floor(prices * units + 0.5)
            )
            whole = rounded.astype(np.int64).tolist()
            if S * len(set(whole)) * min(S, limit or 1) > most_steps:
                continue
            denominator = max(1, best_pack_value(lengths, whole, S, limit))
            worth = Fraction(sum(count * price for count, price in zip(counts, whole)), denominator)
            # With very many sequences rounded prices may prove less than those of the certificate so far.
            if (math.ceil(worth), worth) > (best.lower_bound, best.worth):
                certificate = Certificate(S, limit, tuple(lengths), tuple(whole), denominator)
                best = best._replace(certificate=certificate, worth=worth)
        return best


def _small_units(prices: np.ndarray) -> int:
    """Return the least denominator of which all prices are nearly multiples."""
    for start in range(1, _MAX_SMALL_UNITS, _UNITS_AT_A_TIME):
        units = np.arange(start, start + _UNITS_AT_A_TIME)
        multiples = prices * units[:, None]
        fits = (np.abs(multiples - np.rint(multiples)) <= _UNIT_ERROR).all(axis=1)
        if fits.any():
            return int(units[fits.argmax()])
    return _PRICE_UNITS


def found_quickly(histogram: LengthHistogram, limits: Limits) -> FoundPacks:
    """Pack by decreasing fit and prove the plain bounds; then fill packs exactly and mend the worst, if that pays."""
    certificate = plain_certificate(histogram, limits.max_sequences_per_pack)
    counts = histogram.counts[list(certificate.lengths)].tolist()
    worth = Fraction(sum(map(int.__mul__, counts, certificate.prices)), certificate.denominator)
    found = FoundPacks(
        histogram, limits, longest_first(histogram, limits.depth), certificate, worth
    )
    if found.gap <= 0:
        return found

    # Packs of as many sequences as possible are no help if slots are scarce, or if few packs have so many.
    bound = found.lower_bound
    slots_to_spare = bound * histogram.max_sequence_length > _SLOTS_TO_SPARE * histogram.tokens
    if (
        limits._binding
        and slots_to_spare
        and histogram.sequences > _MIN_SEATS_TAKEN * limits.depth * bound
    ):
        found = found.with_fewer(fill_evenly(histogram.counts, limits.depth))

    # In short rows the programme leads further than all other steps: if it pays, they take no longer than it would.
    most_seconds = math.inf
    if histogram.max_sequence_length <= LONG_ROWS and found.pays(found.programme_seconds):
        most_seconds = found.programme_seconds
    filling = found._filling_seconds(len(found.packs))
    if filling <= most_seconds and found.pays(filling):
        found = found.with_fewer(fill_exactly(histogram.counts, limits.depth, found.lower_bound))
    return found.mended(most_seconds)
