"""Bounds without a solver: prices from dual-feasible functions, the best of several families for a histogram.

A function f of a length, 0..S, is dual-feasible if lengths that fit into a pack together are worth at most f's unit
together. So f is a list of prices that proves a bound: as many packs as all sequences are worth. Source: Fekete and
Schepers, "New classes of fast lower bounds for bin packing problems" (2001), with their names; L2 is of Martello and
Toth, "Knapsack Problems" (1990). Each value is a whole number, so nothing is lost by rounding.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional

import numpy as np

from pack_data.histogram import LengthHistogram

_MOST = 24  # functions tried of each family; each costs some steps for each length that occurs
_PARTS = 64  # sequences of a pack down to which they are counted; more different prices would take long to check
_ROUNDED = 1e-12  # relative: of a worth in float64
_STEPS = 1 << 33  # additions that checking prices may cost: seconds


class FunctionPrices(NamedTuple):
    """What each length that occurs is worth; no pack is worth more than `unit`."""

    by_length: np.ndarray  # int64 [lengths]
    unit: int

    def packs(self, counts: np.ndarray) -> int:
        """The bound: packs that these sequences, int64 [lengths], need. Exact: counts may go to 10^15."""
        worth = sum(count * price for count, price in zip(counts.tolist(), self.by_length.tolist()))
        return -(-worth // self.unit)


class _Functions(NamedTuple):
    prices: np.ndarray  # int64 [functions, lengths]
    units: np.ndarray  # int64 [functions]


def best_prices(histogram: LengthHistogram, max_sequences_per_pack: Optional[int]) -> FunctionPrices:
    """Those with the highest bound; of equal ones the first. The histogram has at least one sequence."""
    counts = histogram.counts[histogram.lengths]
    families = _families(histogram, max_sequences_per_pack)
    worth = np.concatenate([family.prices @ counts.astype(float) / family.units for family in families])
    every = [
        FunctionPrices(row, unit) for family in families for row, unit in zip(family.prices, family.units.tolist())
    ]
    best = np.flatnonzero(worth > worth.max() * (1 - _ROUNDED) - 1)  # the others are a pack below
    bounds = [every[index].packs(counts) for index in best.tolist()]
    return every[best[bounds.index(max(bounds))]]


def _families(histogram: LengthHistogram, limit: Optional[int]) -> List[_Functions]:
    S, lengths = histogram.max_sequence_length, histogram.lengths
    room = S // int(lengths[0])
    depth = room if limit is None else min(limit, room)
    scarce_slots = histogram.tokens * depth >= histogram.sequences * S
    plain = _one(lengths, S) if scarce_slots else _one(np.ones_like(lengths), depth)
    families = [plain, _long_are_whole(histogram)]
    if limit is not None and S * depth**2 <= _STEPS:
        families.append(_many_beside_long(lengths, S, depth))
    families.append(_rounded_to_parts(lengths, S, np.arange(2, _MOST + 2)))
    short = lengths[(2 * lengths <= S) & (_PARTS * lengths >= S)]
    places = np.unique(np.linspace(0, len(short) - 1, min(_MOST, len(short))).astype(np.int64))
    return [*families, _counted_by(lengths, S, short[places])]


def _one(prices: np.ndarray, unit: int) -> _Functions:
    return _Functions(prices[None], np.array([unit]))


def _long_are_whole(histogram: LengthHistogram) -> _Functions:
    """L2: for the best k, a sequence is worth 1 above S - k tokens, tokens / S from k tokens on, and 0 below.

    What still fits beside one that is worth 1 is worth nothing.
    """
    S, lengths, counts = histogram.max_sequence_length, histogram.lengths, histogram.counts[histogram.lengths]
    number, tokens = (np.concatenate([[0], np.cumsum(amounts)]) for amounts in (counts, counts * lengths))
    every_k = np.append(lengths[2 * lengths <= S], (S + 1) // 2)  # between two lengths the longer one is the better k
    low, high = np.searchsorted(lengths, every_k), np.searchsorted(lengths, S - every_k, side="right")
    k = every_k[(S * (number[-1] - number[high]) + tokens[high] - tokens[low]).argmax()]
    return _one(np.where(lengths > S - k, S, np.where(lengths < k, 0, lengths)), S)


def _many_beside_long(lengths: np.ndarray, S: int, depth: int) -> _Functions:
    """Up to S / 2 a sequence is worth 1 / depth; a longer one, of which a pack has one, what its companions leave."""
    shortest = int(lengths[0])
    beside = np.minimum(depth - 1, (S - lengths) // shortest)
    return _one(np.where(2 * lengths > S, depth - beside, 1), depth)


def _rounded_to_parts(lengths: np.ndarray, S: int, k: np.ndarray) -> _Functions:
    """u^(k): a length is rounded down to (k + 1)-ths of a pack, which are worth 1 / k; a whole number of them stays."""
    k = k[:, None]
    parts, rest = np.divmod((k + 1) * lengths, S)
    return _Functions(np.where(rest == 0, k * lengths, S * parts), k[:, 0] * S)


def _counted_by(lengths: np.ndarray, S: int, p: np.ndarray) -> _Functions:
    """phi^(p / S): from p to S / 2 tokens a sequence counts as one of the S // p that fit; a longer one as many as it
    leaves no room for."""
    p = p[:, None]
    most = S // p
    return _Functions(np.where(2 * lengths > S, most - (S - lengths) // p, np.where(lengths < p, 0, 1)), most[:, 0])
