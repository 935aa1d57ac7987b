"""Bounds without a solver: prices from dual-feasible functions, the best of several families for a histogram.

A function f of a length, 0..S, is dual-feasible if lengths that fit into a pack together are worth at most f's unit
together. So f is a list of prices that proves a bound: as many packs as all sequences are worth. Source: Fekete and
Schepers, "New classes of fast lower bounds for bin packing problems" (2001), with their names; L2 is of Martello and
Toth, "Knapsack Problems" (1990). Each value is a whole number, so nothing is lost by rounding.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional

import numpy as np

from pack_data.packing.histogram import LengthHistogram

_MOST_PARTS = 48  # k up to which u^(k) is tried
_MOST_COUNTED = 64  # sequences of a pack in phi; more different prices would take long to check
_STEPS = 1 << 33  # additions that checking prices may cost: seconds


class FunctionPrices(NamedTuple):
    """What each length that occurs is worth; no pack is worth more than `unit`."""

    by_length: np.ndarray  # int64 [lengths]
    unit: int

    def packs(self, counts: np.ndarray) -> int:
        """The bound: packs that these sequences, int64 [lengths], need. Exact: counts may go to 10^15."""
        worth = sum(count * price for count, price in zip(counts.tolist(), self.by_length.tolist()))
        return -(-worth // self.unit)


def best_prices(histogram: LengthHistogram, max_sequences_per_pack: Optional[int]) -> FunctionPrices:
    """Those with the highest bound; of equal ones the first. The histogram has at least one sequence."""
    S, lengths = histogram.max_sequence_length, histogram.lengths
    room = S // int(lengths[0])
    depth = room if max_sequences_per_pack is None else min(max_sequences_per_pack, room)
    scarce_slots = histogram.tokens * depth >= histogram.sequences * S
    found = [FunctionPrices(lengths, S) if scarce_slots else FunctionPrices(np.ones_like(lengths), depth)]
    found.append(_long_are_whole(histogram))
    if max_sequences_per_pack is not None and S * depth**2 <= _STEPS:
        found.append(_many_beside_long(lengths, S, depth))
    found += [_rounded_to_parts(histogram), *_counted(histogram)]
    counts = histogram.counts[lengths]
    bounds = [prices.packs(counts) for prices in found]
    return found[bounds.index(max(bounds))]


def _long_are_whole(histogram: LengthHistogram) -> FunctionPrices:
    """L2: for the best k, a sequence is worth 1 above S - k tokens, tokens / S from k tokens on, and 0 below.

    What still fits beside one that is worth 1 is worth nothing.
    """
    S, lengths, counts = histogram.max_sequence_length, histogram.lengths, histogram.counts[histogram.lengths]
    number, tokens = (np.concatenate([[0], np.cumsum(amounts)]) for amounts in (counts, counts * lengths))
    every_k = np.append(lengths[2 * lengths <= S], (S + 1) // 2)  # between two lengths the longer one is the better k
    low, high = np.searchsorted(lengths, every_k), np.searchsorted(lengths, S - every_k, side="right")
    k = every_k[(S * (number[-1] - number[high]) + tokens[high] - tokens[low]).argmax()]
    return FunctionPrices(np.where(lengths > S - k, S, np.where(lengths < k, 0, lengths)), S)


def _many_beside_long(lengths: np.ndarray, S: int, depth: int) -> FunctionPrices:
    """Up to S / 2 a sequence is worth 1 / depth; a longer one, of which a pack has one, what its companions leave."""
    shortest = int(lengths[0])
    beside = np.minimum(depth - 1, (S - lengths) // shortest)
    return FunctionPrices(np.where(2 * lengths > S, depth - beside, 1), depth)


def _rounded_to_parts(histogram: LengthHistogram) -> FunctionPrices:
    """u^(k) for the best k: a length is rounded down to (k + 1)-ths of a pack, which are worth 1 / k; a whole number of
    them keeps its worth.

    All k at once: a sequence counts once for each j with j (k + 1)-ths of a pack below it or as long.
    """
    S, counts, lengths = histogram.max_sequence_length, histogram.counts, histogram.lengths
    k = np.repeat(np.arange(2, _MOST_PARTS + 1), np.arange(2, _MOST_PARTS + 1))
    j = np.arange(len(k)) - np.repeat(np.flatnonzero(np.diff(k, prepend=0)), np.arange(2, _MOST_PARTS + 1)) + 1
    least, rest = np.divmod(j * S, k + 1)
    shorter = np.cumsum(counts) - counts
    worth = (histogram.sequences - shorter[least + (rest > 0)]) / k
    worth -= np.where(rest == 0, counts[least] * (j / (k * (k + 1))), 0.0)
    best = 2 + int(np.bincount(k, worth)[2:].argmax())
    parts, rest = np.divmod((best + 1) * lengths, S)
    return FunctionPrices(np.where(rest == 0, best * lengths, S * parts), best * S)


def _counted(histogram: LengthHistogram) -> List[FunctionPrices]:
    """phi^(p / S) for the best p, none where no length suits: from p to S / 2 tokens a sequence counts as one of the
    S // p that fit; a longer one as many as it leaves no room for."""
    S, lengths = histogram.max_sequence_length, histogram.lengths
    p = lengths[(2 * lengths <= S) & (_MOST_COUNTED * lengths >= S)]
    if not len(p):
        return []
    up_to = np.cumsum(histogram.counts)
    short, most = int(up_to[S // 2]), S // p
    worth = most * (histogram.sequences - short) + short - up_to[p - 1]
    for j in range(1, _MOST_COUNTED // 2 + 1):  # those that leave room for j
        longest = S - j * p
        worth -= np.where(2 * longest > S, up_to[np.maximum(longest, 0)] - short, 0)
    best = int(p[(worth / most).argmax()])
    counted = np.where(2 * lengths > S, S // best - (S - lengths) // best, np.where(lengths < best, 0, 1))
    return [FunctionPrices(counted, S // best)]
