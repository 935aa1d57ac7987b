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

# Largest k tried for u^(k). The functions approach the length itself, so larger ones seldom give a higher bound.
_MOST_PARTS = 48
# Most sequences per pack in phi. More would give more distinct prices, which take long to check.
_MOST_COUNTED = 64
# Lengths tried for t in `_counted_up_to`, the shortest ones; the best was among the first 60 in 35 cases.
_MOST_CAPS = 256
# Additions that checking prices may cost: some seconds.
_MOST_STEPS = 1 << 33


class FunctionPrices(NamedTuple):
    """Prices of the lengths that occur; no pack is worth more than `unit`."""

    by_length: np.ndarray  # int64 [lengths]
    unit: int


def best_prices(
    histogram: LengthHistogram, max_sequences_per_pack: Optional[int]
) -> FunctionPrices:
    """Return the prices with the highest bound; of equal bounds, the first.

    Args:
        histogram: lengths to pack, at least one.
        max_sequences_per_pack: packing depth; None for unlimited.

    Returns:
        Prices of the lengths that occur.
    """
    S = histogram.max_sequence_length
    lengths = histogram.lengths
    shortest = int(lengths[0])
    depth = S // shortest
    if max_sequences_per_pack is not None:
        depth = min(max_sequences_per_pack, depth)

    plain = FunctionPrices(lengths, S)
    depth_is_scarcer = histogram.tokens * depth < histogram.sequences * S
    if depth_is_scarcer:
        plain = FunctionPrices(np.ones_like(lengths), depth)
    candidates = [plain, _long_are_whole(histogram, depth)]
    if max_sequences_per_pack is not None and S * depth**2 <= _MOST_STEPS:
        candidates.append(_many_beside_long(lengths, S, depth))
        candidates.append(_counted_up_to(histogram, depth))
    candidates.append(_rounded_to_parts(histogram))
    candidates += _counted(histogram)

    counts = histogram.counts[lengths]
    bounds = [_bound(prices, counts) for prices in candidates]
    return candidates[bounds.index(max(bounds))]


def _bound(prices: FunctionPrices, counts: np.ndarray) -> int:
    """Return the number of packs that the prices prove, in exact arithmetic: counts, int64 [lengths], reach 10^15."""
    worth = 0
    for count, price in zip(counts.tolist(), prices.by_length.tolist()):
        worth += count * price
    return -(-worth // prices.unit)


def _long_are_whole(histogram: LengthHistogram, depth: int) -> FunctionPrices:
    """Compute L2: a sequence is worth 1 above S - k tokens, tokens / S from k tokens on, 0 below, for the best k.

    A sequence that fits beside one of worth 1 is worth nothing. At depth 2, sequences of k to S - k tokens are worth
    1 / 2 each, which proves that decreasing fit is optimal: by the formula of Tutte and Berge for the largest matching.
    """
    S = histogram.max_sequence_length
    lengths = histogram.lengths
    counts = histogram.counts[lengths]
    unit = S
    prices = lengths.copy()
    if depth == 2:
        unit = 2
        prices[:] = 1
    sequences_below = np.append(0, np.cumsum(counts))
    worth_below = np.append(0, np.cumsum(counts * prices))

    # Of all k between two lengths, the longer length is best.
    half = (S + 1) // 2
    short = lengths[2 * lengths <= S]
    candidates = np.append(short, half)

    first = np.searchsorted(lengths, candidates)
    first_long = np.searchsorted(lengths, S - candidates, side="right")
    long_sequences = sequences_below[-1] - sequences_below[first_long]
    worth = unit * long_sequences + worth_below[first_long] - worth_below[first]
    k = candidates[worth.argmax()]
    prices[lengths < k] = 0
    prices[lengths > S - k] = unit
    return FunctionPrices(prices, unit)


def _many_beside_long(lengths: np.ndarray, S: int, depth: int) -> FunctionPrices:
    """Price a sequence of up to S / 2 tokens at 1 / depth, and a longer one at the rest of 1 beside its companions."""
    shortest = int(lengths[0])
    fitting = (S - lengths) // shortest
    companions = np.minimum(depth - 1, fitting)
    is_long = 2 * lengths > S
    prices = np.where(is_long, depth - companions, 1)
    return FunctionPrices(prices, depth)


def _counted_up_to(histogram: LengthHistogram, depth: int) -> FunctionPrices:
    """Price a sequence of t to S / 2 tokens at 1 / depth, a shorter one at length / t of that, for the best t.

    A longer one is worth the rest of 1 beside its companions. Each of these is worth at most 1 / depth, and each of
    their tokens at most 1 / (t depth).
    """
    S = histogram.max_sequence_length
    lengths = histogram.lengths
    counts = histogram.counts[lengths].astype(float)
    is_long = 2 * lengths > S
    room = S - lengths

    def prices(t: int) -> np.ndarray:
        beside_long = np.minimum((depth - 1) * t, room)
        return np.where(is_long, depth * t - beside_long, np.minimum(lengths, t))

    # More prices take longer to check.
    most_prices = _MOST_STEPS // (S * depth)
    candidates = lengths[(2 * lengths <= S) & (depth * lengths <= most_prices)]
    candidates = candidates[:_MOST_CAPS].tolist()
    best = int(lengths[0])
    most_worth = 0.0
    for t in candidates:
        worth = float(prices(t) @ counts) / (depth * t)
        if worth > most_worth:
            best = t
            most_worth = worth
    return FunctionPrices(prices(best), depth * best)


def _rounded_to_parts(histogram: LengthHistogram) -> FunctionPrices:
    """Compute u^(k) for the best k: a length is rounded down to (k + 1)-ths of a pack, which are worth 1 / k.

    A length of exactly j such parts keeps its own worth. All k are tried at once: a sequence counts once for each j
    with j (k + 1)-ths of a pack below or at its length.
    """
    S = histogram.max_sequence_length
    counts = histogram.counts
    every_k = np.arange(2, _MOST_PARTS + 1)
    k = np.repeat(every_k, every_k)
    j = np.concatenate([np.arange(1, parts + 1) for parts in every_k])

    # Sequences of at least j parts, each worth 1 / k more; exact multiples are worth less than that.
    least, rest = np.divmod(j * S, k + 1)
    is_exact = rest == 0
    shorter = np.cumsum(counts) - counts
    longer = histogram.sequences - shorter[least + ~is_exact]
    excess_share = j / (k * (k + 1))
    excess = np.where(is_exact, counts[least] * excess_share, 0.0)
    worth = longer / k - excess
    worth_of_k = np.bincount(k, worth)
    best = 2 + int(worth_of_k[2:].argmax())

    lengths = histogram.lengths
    parts, rest = np.divmod((best + 1) * lengths, S)
    prices = np.where(rest == 0, best * lengths, S * parts)
    return FunctionPrices(prices, best * S)


def _counted(histogram: LengthHistogram) -> List[FunctionPrices]:
    """Compute phi^(p / S) for the best p; return an empty list if no length suits.

    A sequence of p to S / 2 tokens counts as one of the S // p that fit into a pack. A longer one counts as the number
    for which it leaves no room.
    """
    S = histogram.max_sequence_length
    lengths = histogram.lengths
    is_short = 2 * lengths <= S
    is_counted = _MOST_COUNTED * lengths >= S
    p = lengths[is_short & is_counted]
    if not len(p):
        return []

    up_to = np.cumsum(histogram.counts)
    short_sequences = int(up_to[S // 2])
    long_sequences = histogram.sequences - short_sequences
    fitting = S // p
    worth = fitting * long_sequences + short_sequences - up_to[p - 1]
    for j in range(1, _MOST_COUNTED // 2 + 1):
        longest = S - j * p  # longest length that leaves room for j sequences of p tokens
        leave_room = up_to[np.maximum(longest, 0)] - short_sequences
        worth -= np.where(2 * longest > S, leave_room, 0)
    bounds = worth / fitting
    best = int(p[bounds.argmax()])

    most = S // best
    long_prices = most - (S - lengths) // best
    short_prices = np.where(lengths < best, 0, 1)
    prices = np.where(is_short, short_prices, long_prices)
    return [FunctionPrices(prices, most)]
