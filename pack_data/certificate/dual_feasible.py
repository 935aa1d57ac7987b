"""Bounds without a solver: prices from dual-feasible functions, the best of several families for a histogram.

A function f of a length, 0..S, is dual-feasible if lengths that fit into a pack together are worth at most f's unit
together. So f is a list of prices that proves a bound: as many packs as all sequences are worth. Source: Fekete and
Schepers, "New classes of fast lower bounds for bin packing problems" (2001), with their names; L2 is of Martello and
Toth, "Knapsack Problems" (1990). Each value is a whole number, so nothing is lost by rounding.
"""

from __future__ import annotations

from typing import Iterator, NamedTuple, Optional

import numpy as np

from pack_data.histogram import LengthHistogram

_MOST = 24  # functions tried of each family; each costs some steps for each length that occurs
_PARTS = 64  # sequences of a pack down to which they are counted; more different prices would take long to check
_STEPS = 1 << 33  # additions that checking prices may cost: seconds


class Prices(NamedTuple):
    """What each length that occurs is worth; no pack is worth more than `unit`."""

    by_length: np.ndarray  # int64 [lengths]
    unit: int

    def packs(self, counts: np.ndarray) -> int:
        """The bound: packs that these sequences, int64 [lengths], need."""
        worth = int(counts @ self.by_length)
        if float(counts.sum()) * float(self.by_length.max(initial=0)) >= 2.0**62:  # beyond int64: exactly, by Python
            worth = sum(count * price for count, price in zip(counts.tolist(), self.by_length.tolist()))
        return -(-worth // self.unit)


def best_prices(histogram: LengthHistogram, max_sequences_per_pack: Optional[int]) -> Prices:
    """Those with the highest bound; of equal ones the first. The histogram has at least one sequence."""
    counts = histogram.counts[histogram.lengths]
    return max(_families(histogram, max_sequences_per_pack), key=lambda prices: prices.packs(counts))


def _families(histogram: LengthHistogram, limit: Optional[int]) -> Iterator[Prices]:
    S, lengths = histogram.max_sequence_length, histogram.lengths
    room = S // int(lengths[0])
    depth = room if limit is None else min(limit, room)
    tokens, sequences = Prices(lengths, S), Prices(np.ones_like(lengths), depth)
    scarce_slots = histogram.tokens * depth >= histogram.sequences * S
    yield tokens if scarce_slots else sequences  # the one with the highest worth, rounded or not
    yield _long_are_whole(histogram)
    if limit is not None and S * depth**2 <= _STEPS:
        yield _many_beside_long(lengths, S, depth)
    for k in range(2, _MOST + 2):
        yield _rounded_to_parts(lengths, S, k)
    short = lengths[(2 * lengths <= S) & (_PARTS * lengths >= S)]
    for index in np.unique(np.linspace(0, len(short) - 1, min(_MOST, len(short))).astype(np.int64)).tolist():
        yield _counted_by(lengths, S, int(short[index]))


def _long_are_whole(histogram: LengthHistogram) -> Prices:
    """L2: for the best k, a sequence is worth 1 above S - k tokens, tokens / S from k tokens on, and 0 below.

    What still fits beside one that is worth 1 is worth nothing.
    """
    S, lengths, counts = histogram.max_sequence_length, histogram.lengths, histogram.counts[histogram.lengths]
    number, tokens = (np.concatenate([[0], np.cumsum(amounts)]) for amounts in (counts, counts * lengths))
    every_k = np.append(lengths[2 * lengths <= S], (S + 1) // 2)  # between two lengths the longer one is the better k
    low, high = np.searchsorted(lengths, every_k), np.searchsorted(lengths, S - every_k, side="right")
    k = every_k[(S * (number[-1] - number[high]) + tokens[high] - tokens[low]).argmax()]
    return Prices(np.where(lengths > S - k, S, np.where(lengths < k, 0, lengths)), S)


def _many_beside_long(lengths: np.ndarray, S: int, depth: int) -> Prices:
    """Up to S / 2 a sequence is worth 1 / depth; a longer one, of which a pack has one, what its companions leave."""
    shortest = int(lengths[0])
    beside = np.minimum(depth - 1, (S - lengths) // shortest)
    return Prices(np.where(2 * lengths > S, depth - beside, 1), depth)


def _rounded_to_parts(lengths: np.ndarray, S: int, k: int) -> Prices:
    """u^(k): a length is rounded down to (k + 1)-ths of a pack, which are worth 1 / k; a whole number of them stays."""
    parts, rest = np.divmod((k + 1) * lengths, S)
    return Prices(np.where(rest == 0, k * lengths, S * parts), k * S)


def _counted_by(lengths: np.ndarray, S: int, p: int) -> Prices:
    """phi^(p / S): from p to S / 2 tokens a sequence counts as one of the S // p that fit; a longer one as many as it
    leaves no room for."""
    most = S // p
    return Prices(np.where(2 * lengths > S, most - (S - lengths) // p, np.where(lengths < p, 0, 1)), most)
