"""The search for fewer packs: the packing and its proof so far, the cost of a further step, and whether it pays.

A decreasing fit and the bounds that need no solver come first; they take milliseconds, and on most data they meet. If
a gap is left, a step is begun only if its possible gain is worth its time. The time is estimated from counts, not
measured, so that the same input gives the same packs on any machine. The possible gain is the slots of the packs above
the bound. Each is saved in every epoch to come, so it is worth `_SECONDS_PER_SLOT` of a core.
"""

from __future__ import annotations

import math
import time
from fractions import Fraction
from typing import List, NamedTuple, Optional

import numpy as np

from pack_data.packing.certificate import Certificate, best_pack_value, plain_certificate
from pack_data.packing.histogram import LengthHistogram
from pack_data.solver.exchange import SECONDS_PER_PACK, exchange
from pack_data.solver.filling import SECONDS_PER_STRATEGY, fewest, fill_exactly, fill_seats
from pack_data.solver.free_slots import Packs, count_packs, longest_first
from pack_data.solver.repair import mend
from pack_data.solver.small import EXACT_SEQUENCES, MOST_SEQUENCES, search_fewer

# ---- seconds that the search may take --------------------------------------------------------------------------------

# Seconds of a core that one slot less is worth.
_SECONDS_PER_SLOT = 2.5e-6
# Seconds always allowed per sequence. With a tenth of it, windows of DNA need a pack more, in 2.4 s in place of 0.15 s.
_SECONDS_PER_SEQUENCE = 2e-5
# The same in rows of up to `LONG_ROWS` slots, where linear programmes take less than a second and mostly reach the
# bound.
_SECONDS_PER_SEQUENCE_SHORT_ROWS = 60e-6
# Most seconds of one call of `mended`.
_MAX_SECONDS_OF_MENDING = 5.0

# ---- gaps that can probably be closed --------------------------------------------------------------------------------

# Even optimal packings are often one pack and this share of the bound above the bound. A larger gap can nearly always
# be reduced. At a tenth of it, 30 cases take a fifth more time, with as many packs.
_USUAL_GAP_SHARE = 1e-3
# Share of the bound above which exchanges come before mending, which then takes long: sequences near a third of a pack
# leave a gap of 0.06, and all other families less than 0.01. At 0, 30 cases take a fifth more time and one pack more.
_FAR_GAP_SHARE = 0.02
# Factor on the seconds that a gap is worth if it can probably be reduced.
_LIKELY_FACTOR = 16
# Slots above which a row is long: there linear programmes take seconds to minutes.
LONG_ROWS = 2048
# In long rows a gap of this share of the bound is left: sets of 20,000 lengths and more. At 0, 30 cases of up to 3,000
# lengths need as many packs.
_SMALL_GAP_SHARE = 1e-4

# ---- cost of a linear programme --------------------------------------------------------------------------------------

# Measured seconds of a programme per length that occurs, in short rows.
_PROGRAMME_SECONDS_PER_LENGTH = 2e-4
# Slots at which a programme takes twice as long as in short rows.
_PROGRAMME_SLOTS = 8192
# Depth above which the tables of the programme are computed as products, of S^2 additions each.
MAX_SINGLE_DEPTH = 64
# Slots at which the products make a programme 1.4 times as long.
_PRODUCT_SLOTS = 1024

# ---- smaller limits on sequences per pack ----------------------------------------------------------------------------

# Estimated seconds of searches at all limits up to twice the mean. Above, only powers of two among them are tried.
# Without this bound, 100,000 windows of DNA at 131,072 slots took about 80 s instead of 7 s, with as many packs.
_SECONDS_OF_SMALLER_DEPTHS = 1.0

# ---- a depth that is chosen for the user -----------------------------------------------------------------------------

# It needs at most this multiple of the packs without a limit.
_MOST_EXCESS_OF_DEPTH = 1.01

# ---- exact prices ----------------------------------------------------------------------------------------------------

# Prices are rounded down to multiples of 1 / this, which fit int64 in sums of 2^22 prices. Below 10^11 sequences
# it costs less than a tenth of a pack.
_PRICE_UNITS = 1 << 40


class Limits(NamedTuple):
    """The limits of a search."""

    depth: int  # sequences that fit into one pack
    max_sequences_per_pack: Optional[int]  # None = unlimited
    until: float  # time of `time.perf_counter` after which no step is begun; inf without a budget
    programmes: float = math.inf  # linear programmes of a search, at most
    patience: float = math.inf  # seconds of a step, at most

    @classmethod
    def of(
        cls,
        histogram: LengthHistogram,
        max_sequences_per_pack: Optional[int],
        budget: Optional[float],
    ) -> Limits:
        """Return the limits for these lengths.

        Args:
            histogram: lengths to pack.
            max_sequences_per_pack: packing depth; None for unlimited.
            budget: seconds after which no step is begun; None for no such limit.
        """
        depth = _most_together(histogram)
        if max_sequences_per_pack is not None:
            depth = min(depth, max_sequences_per_pack)
        until = math.inf if budget is None else time.perf_counter() + budget
        return cls(depth, max_sequences_per_pack, until)

    @property
    def _binding(self) -> bool:
        """True if a pack could hold more sequences without the limit on them."""
        return self.max_sequences_per_pack == self.depth


def _most_together(histogram: LengthHistogram) -> int:
    """Return how many of the shortest sequences fit into one pack."""
    S = histogram.max_sequence_length
    lengths = histogram.lengths
    alone = np.minimum(histogram.counts[lengths], S // lengths)
    tokens = np.cumsum(np.repeat(lengths, alone))
    return int(np.searchsorted(tokens, S, side="right"))


class ProvedPacks(NamedTuple):
    """A packing, and prices that prove a lower bound."""

    histogram: LengthHistogram
    limits: Limits
    packs: Packs
    certificate: Certificate
    worth: Fraction  # of all sequences at the prices of the certificate, in packs

    @property
    def lower_bound(self) -> int:
        """The proven least number of packs."""
        return math.ceil(self.worth)

    @property
    def gap(self) -> int:
        """Packs above the bound."""
        return count_packs(self.packs) - self.lower_bound

    def pays(self, seconds: float) -> bool:
        """Return True if a step of this many seconds is worth its time; within a budget it always is."""
        if self.gap <= 0:
            return False
        if self.limits.until < math.inf:
            return time.perf_counter() < self.limits.until
        return seconds <= self._patience

    @property
    def few(self) -> bool:
        """True if the sequences are few enough to search for fewer packs whatever these are worth."""
        return self.histogram.sequences <= MOST_SEQUENCES

    @property
    def _likely(self) -> bool:
        """True if the gap can probably be reduced."""
        bound = self.lower_bound
        return self.gap > 1 + _USUAL_GAP_SHARE * bound

    @property
    def _patience(self) -> float:
        """Seconds that the packs above the bound are worth, at most those of the limits."""
        gap = self.gap
        long_rows = self.histogram.max_sequence_length > LONG_ROWS
        if long_rows and gap <= _SMALL_GAP_SHARE * self.lower_bound:
            return 0.0

        worth = gap * self.histogram.max_sequence_length * _SECONDS_PER_SLOT
        if self._likely:
            worth *= _LIKELY_FACTOR
        allowed = _SECONDS_PER_SEQUENCE_SHORT_ROWS
        if long_rows:
            allowed = _SECONDS_PER_SEQUENCE
        seconds = max(worth, self.histogram.sequences * allowed)
        return min(seconds, self.limits.patience)

    @property
    def _usual_depth(self) -> int:
        """The limit, or twice the mean number of sequences per pack, beyond which a limit hardly matters."""
        return min(self.limits.depth, self._twice_the_mean)

    @property
    def _twice_the_mean(self) -> int:
        return 2 * math.ceil(self.histogram.sequences / self.lower_bound)

    @property
    def deepest(self) -> int:
        """The largest number of sequences per pack in linear programmes.

        Their time grows with the depth, so in long rows it is a few times the mean number of sequences per pack.
        `proved_by` checks the bound for packs of any depth.
        """
        depth = self.limits.depth
        if self.limits._binding or self.histogram.max_sequence_length <= _PRODUCT_SLOTS:
            return depth
        return min(depth, 2 * self._twice_the_mean)

    @property
    def programme_seconds(self) -> float:
        """Estimated seconds of a linear programme."""
        S = self.histogram.max_sequence_length
        if self.few:
            return math.inf
        seconds = (
            _PROGRAMME_SECONDS_PER_LENGTH * len(self.histogram.lengths) * (1 + S / _PROGRAMME_SLOTS)
        )
        if self.deepest > MAX_SINGLE_DEPTH:
            seconds *= math.hypot(1, S / _PRODUCT_SLOTS)
        return seconds

    def smaller_limits(self) -> List[Limits]:
        """Return the limits with smaller depths that may lead to fewer packs, the deepest first.

        Such packs can only close the gap that is left, so each step may take the time that this gap is worth.
        """
        patience = self._patience
        if patience == 0:
            return []
        limits = [Limits.of(self.histogram, depth, None) for depth in self._smaller_depths()]
        return [smaller._replace(patience=patience) for smaller in limits]

    def _smaller_depths(self) -> List[int]:
        """Return the smaller depths that may lead to fewer packs, in descending order.

        Beyond the usual depth the limit hardly matters, so only powers of two are tried, which users choose most. If
        the searches take long, only powers of two up to the usual depth are. Below the mean of these packs no packing
        has as few.
        """
        if self.gap <= 0:
            return []
        most = self.limits.depth - 1
        fewest = math.ceil(self.histogram.sequences / (count_packs(self.packs) - 1))
        usual = set(range(fewest, min(most, self._usual_depth) + 1))
        powers = {1 << exponent for exponent in range(most.bit_length())}
        if self.few:
            return sorted(usual, reverse=True)

        depths = usual | {depth for depth in powers if depth > self._usual_depth}
        seconds = 2 * len(self.packs) * SECONDS_PER_STRATEGY + self.lower_bound * SECONDS_PER_PACK
        if self._twice_the_mean * seconds > _SECONDS_OF_SMALLER_DEPTHS:
            depths = usual & powers
        return sorted(depths, reverse=True)

    def with_fewer(self, packs: Packs) -> ProvedPacks:
        """Return the same proof with these packs, if any, if they are fewer."""
        if packs and count_packs(packs) < count_packs(self.packs):
            return self._replace(packs=packs)
        return self

    def mended(self, most_seconds: float = math.inf) -> ProvedPacks:
        """Return fewer packs if packing the worst ones again saves some."""
        if not self.pays(SECONDS_PER_STRATEGY):
            return self
        prices = np.zeros(self.histogram.max_sequence_length + 1)
        prices[list(self.certificate.lengths)] = self.certificate.prices
        prices /= self.certificate.denominator
        most_strategies = math.inf
        if self.limits.until == math.inf:
            seconds = min(most_seconds, self._patience, _MAX_SECONDS_OF_MENDING)
            most_strategies = seconds / (2 * SECONDS_PER_STRATEGY)
        packs = mend(
            self.packs,
            prices,
            self.limits.depth,
            self.lower_bound,
            most_strategies,
            self.limits.until,
        )
        return self.with_fewer(packs)

    def exchanged(self, most_seconds: float = math.inf) -> ProvedPacks:
        """Return as many packs as the bound, or a few more, if exchanges between balanced packs lead there."""
        bound = self.lower_bound
        seconds = bound * SECONDS_PER_PACK
        pays = seconds <= most_seconds and self.pays(seconds)
        if not pays and not self.few:
            return self
        counts = self.histogram.counts
        most = bound + self.gap if self._likely else bound + 1

        def balanced(number: int) -> Packs:
            in_time = time.perf_counter() < self.limits.until
            return exchange(counts, self.limits.depth, number) if in_time else []

        return self.with_fewer(fewest(balanced, bound, most))

    def searched(self) -> ProvedPacks:
        """Return fewer packs by exchanges, or by a search that is exhaustive if sequences are very few.

        A packing hardly ever needs more than the usual depth. So all larger limits lead to the same packs.
        """
        S = self.histogram.max_sequence_length
        depth = self._usual_depth
        usual = self._replace(limits=self.limits._replace(depth=depth))
        best = self.with_fewer(usual.exchanged().packs)
        if self.histogram.sequences <= EXACT_SEQUENCES:
            depth = self.limits.depth
        return best.with_fewer(search_fewer(best.packs, S, depth, best.lower_bound))

    def proved_by(self, prices: np.ndarray, most_steps: float = math.inf) -> ProvedPacks:
        """Return the same packs with the bound of these prices, in whole numbers, if it is higher.

        Args:
            prices: float64, one for each length that occurs.
            most_steps: additions that the proof may take.
        """
        S = self.histogram.max_sequence_length
        limit = self.limits.max_sequences_per_pack
        lengths = self.histogram.lengths.tolist()
        whole_prices = np.floor(prices * _PRICE_UNITS).astype(np.int64).tolist()
        steps = S * len(set(whole_prices)) * min(S, limit or 1)
        if steps > most_steps:
            return self
        denominator = max(1, best_pack_value(lengths, whole_prices, S, limit))
        certificate = Certificate(S, limit, tuple(lengths), tuple(whole_prices), denominator)
        worth = certificate.worth(self.histogram.counts)
        # With very many sequences rounded prices may prove less than those of the certificate so far.
        if worth <= self.worth:
            return self
        return self._replace(certificate=certificate, worth=worth)


def pack_quickly(histogram: LengthHistogram, limits: Limits) -> ProvedPacks:
    """Pack by decreasing fit and prove the plain bounds; then fill packs exactly and mend the worst, if that pays."""
    certificate = plain_certificate(histogram, limits.max_sequences_per_pack)
    worth = certificate.worth(histogram.counts)
    packs = longest_first(histogram, limits.depth)
    best = ProvedPacks(histogram, limits, packs, certificate, worth)
    if best.gap <= 0:
        return best

    bound = best.lower_bound
    if best.few:
        return best.searched()
    if limits._binding:
        packs = fill_seats(histogram.counts, limits.depth, bound, count_packs(best.packs))
        best = best.with_fewer(packs)
    # In short rows the programme leads further than all other steps: if it pays, they take no longer than it would.
    most_seconds = math.inf
    if histogram.max_sequence_length <= LONG_ROWS and best.pays(best.programme_seconds):
        most_seconds = best.programme_seconds
    filling = 2 * len(best.packs) * SECONDS_PER_STRATEGY
    if filling <= most_seconds and best.pays(filling):
        best = best.with_fewer(fill_exactly(histogram.counts, limits.depth, bound))
    if best.gap > _FAR_GAP_SHARE * bound:
        best = best.exchanged(most_seconds).mended(most_seconds)
    else:
        best = best.mended(most_seconds).exchanged(most_seconds)
    return best


def fewest_packs(histogram: LengthHistogram, max_sequences_per_pack: Optional[int]) -> int:
    """Return the packs of the quick search; None is unlimited."""
    return count_packs(
        pack_quickly(histogram, Limits.of(histogram, max_sequences_per_pack, None)).packs
    )


def smallest_depth(histogram: LengthHistogram) -> int:
    """Return the smallest packing depth that needs at most 1 % more packs than no limit."""
    unlimited = pack_quickly(histogram, Limits.of(histogram, None, None)).packs
    most = int(_MOST_EXCESS_OF_DEPTH * count_packs(unlimited))
    depth = max([1, *(len(strategy) for strategy, _ in unlimited)])
    too_small = -(-histogram.sequences // max(1, most)) - 1
    while depth - too_small > 1:
        between = (too_small + depth) // 2
        if fewest_packs(histogram, between) > most:
            too_small = between
        else:
            depth = between
    return depth
