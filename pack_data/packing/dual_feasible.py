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

_MOST_PARTS = 48  # largest k that is tried for u^(k)
_MOST_COUNTED = 64  # sequences of a pack in phi; more distinct prices would take long to check
_MOST_STEPS = 1 << 33  # additions that checking prices may cost: seconds


class FunctionPrices(NamedTuple):
    """Prices of the lengths that occur; no pack is worth more than `unit`."""

    by_length: np.ndarray  # int64 [lengths]
    unit: int


def best_prices(
    histogram: LengthHistogram, max_sequences_per_pack: Optional[int]
) -> FunctionPrices:
    """Return the prices with the highest bound; of equal ones, the first.

    Args:
        histogram: has at least one sequence.
        max_sequences_per_pack: packing depth; None for unlimited.
    """
    S = histogram.max_sequence_length
    lengths = histogram.lengths
    depth = room = S // int(lengths[0])
    if max_sequences_per_pack is not None:
        depth = min(max_sequences_per_pack, room)

    if histogram.tokens * depth >= histogram.sequences * S:  # slots are scarcer than the depth
        plain = FunctionPrices(lengths, S)
    else:
        plain = FunctionPrices(np.ones_like(lengths), depth)
    candidates = [plain, _long_are_whole(histogram)]
    if max_sequences_per_pack is not None and S * depth**2 <= _MOST_STEPS:
        candidates.append(_many_beside_long(lengths, S, depth))
    candidates.append(_rounded_to_parts(histogram))
    candidates += _counted(histogram)

    counts = histogram.counts[lengths]
    bounds = [_bound(prices, counts) for prices in candidates]
    return candidates[bounds.index(max(bounds))]


def _bound(prices: FunctionPrices, counts: np.ndarray) -> int:
    """Return the packs that sequences need, by exact arithmetic: counts, int64 [lengths], may go to 10^15."""
    worth = 0
    for count, price in zip(counts.tolist(), prices.by_length.tolist()):
        worth += count * price
    return -(-worth // prices.unit)


def _long_are_whole(histogram: LengthHistogram) -> FunctionPrices:
    """L2: for the best k, a sequence is worth 1 above S - k tokens, tokens / S from k tokens on, and 0 below.

    What still fits beside one that is worth 1 is worth nothing.
    """
    S = histogram.max_sequence_length
    lengths = histogram.lengths
    counts = histogram.counts[lengths]
    sequences_below = np.append(0, np.cumsum(counts))
    tokens_below = np.append(0, np.cumsum(counts * lengths))

    short = lengths[2 * lengths <= S]
    candidates = np.append(short, (S + 1) // 2)  # between two lengths the longer one is better
    first = np.searchsorted(lengths, candidates)
    first_whole = np.searchsorted(lengths, S - candidates, side="right")
    whole = sequences_below[-1] - sequences_below[first_whole]
    tokens = tokens_below[first_whole] - tokens_below[first]
    worth = S * whole + tokens
    k = candidates[worth.argmax()]

    prices = lengths.copy()
    prices[lengths < k] = 0
    prices[lengths > S - k] = S
    return FunctionPrices(prices, S)


def _many_beside_long(lengths: np.ndarray, S: int, depth: int) -> FunctionPrices:
    """Up to S / 2 a sequence is worth 1 / depth; a longer one, of which a pack has one, what its companions leave."""
    shortest = int(lengths[0])
    fitting = (S - lengths) // shortest
    companions = np.minimum(depth - 1, fitting)
    is_long = 2 * lengths > S
    return FunctionPrices(np.where(is_long, depth - companions, 1), depth)


def _rounded_to_parts(histogram: LengthHistogram) -> FunctionPrices:
    """u^(k) for the best k: a length is rounded down to (k + 1)-ths of a pack, which are worth 1 / k.

    A whole number of such parts keeps its worth. All k are tried at once: a sequence counts once for each j with
    j (k + 1)-ths of a pack below its length, and for the j that meets it.
    """
    S = histogram.max_sequence_length
    counts = histogram.counts
    every_k = np.arange(2, _MOST_PARTS + 1)
    k = np.repeat(every_k, every_k)
    j = np.concatenate([np.arange(1, parts + 1) for parts in every_k])

    least, rest = np.divmod(j * S, k + 1)
    shorter = np.cumsum(counts) - counts
    is_met = rest == 0
    longer = histogram.sequences - shorter[least + ~is_met]
    overrated = counts[least] * (j / (k * (k + 1)))
    worth = longer / k - np.where(is_met, overrated, 0.0)
    best = 2 + int(np.bincount(k, worth)[2:].argmax())

    lengths = histogram.lengths
    parts, rest = np.divmod((best + 1) * lengths, S)
    prices = np.where(rest == 0, best * lengths, S * parts)
    return FunctionPrices(prices, best * S)


def _counted(histogram: LengthHistogram) -> List[FunctionPrices]:
    """phi^(p / S) for the best p, none if no length suits.

    From p to S / 2 tokens a sequence counts as one of the S // p that fit; a longer one as many as it leaves no room
    for.
    """
    S = histogram.max_sequence_length
    lengths = histogram.lengths
    is_short = 2 * lengths <= S
    p = lengths[is_short & (_MOST_COUNTED * lengths >= S)]
    if not len(p):
        return []

    up_to = np.cumsum(histogram.counts)
    short = int(up_to[S // 2])
    fitting = S // p
    long = histogram.sequences - short
    worth = fitting * long + short - up_to[p - 1]
    for j in range(1, _MOST_COUNTED // 2 + 1):
        longest = S - j * p  # of those that leave room for j
        leave_room = up_to[np.maximum(longest, 0)] - short
        worth -= np.where(2 * longest > S, leave_room, 0)
    best = int(p[(worth / fitting).argmax()])

    most = S // best
    long_prices = most - (S - lengths) // best
    short_prices = np.where(lengths < best, 0, 1)
    return [FunctionPrices(np.where(is_short, short_prices, long_prices), most)]
