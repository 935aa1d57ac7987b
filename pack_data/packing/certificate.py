"""A proof that no packing has fewer packs, checked without trusting the solver that found it.

Give every sequence length a price.  If no pack that obeys the limits is worth more than 1, then a packing needs at
least as many packs as all sequences together are worth: weak duality of the cutting-stock programme (Gilmore and
Gomory, "A linear programming approach to the cutting-stock problem", 1961).  Prices are whole numbers over one common
denominator, so the check is exact: it finds the most valuable pack by dynamic programming over whole numbers.
"""

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from pack_data.packing.dual_feasible import best_prices
from pack_data.packing.histogram import LengthHistogram
from pack_data.reading.fields import Fields
from pack_data.store.sequences import LONGEST

# What one proof may cost: additions of the dynamic programme, some minutes.
MOST_STEPS = 1 << 38


@dataclass(frozen=True)
class Certificate:
    """Prices by length; a length that is not listed is worth nothing."""

    max_sequence_length: int  # S
    max_sequences_per_pack: Optional[int]  # D, None = unlimited
    lengths: Tuple[int, ...]  # ascending, each at most S
    prices: Tuple[int, ...]  # price of lengths[i] in units of 1 / denominator, at least 0
    denominator: int  # no pack may be worth more than this

    def __post_init__(self) -> None:
        S, lengths = self.max_sequence_length, self.lengths
        if len(lengths) != len(self.prices) or not all(a < b for a, b in zip((0, *lengths), (*lengths, S + 1))):
            raise ValueError(f"certificate: it needs one price for each length, lengths ascending in 1..{S}")
        if self.denominator < 1 or min(self.prices, default=0) < 0:
            raise ValueError("certificate: a price is at least 0, the denominator at least 1")

    def to_json(self) -> Dict[str, Any]:
        """Plain values, as a recipe holds them."""
        return {
            "max_sequence_length": self.max_sequence_length,
            "max_sequences_per_pack": self.max_sequences_per_pack,
            "lengths": list(self.lengths),
            "prices": list(self.prices),
            "denominator": self.denominator,
        }

    @classmethod
    def from_json(cls, value: Union[Mapping[str, Any], Fields]) -> Certificate:
        """Inverse of `to_json`; raises ValueError unless the value has that form."""
        fields = Fields.of(value, "certificate", "make the recipe again")
        S = fields.integer("max_sequence_length", least=1, most=LONGEST)
        D = fields.optional("max_sequences_per_pack", Fields.integer, least=1)
        lengths, prices = fields.integers("lengths"), fields.integers("prices", least=0)
        denominator = fields.integer("denominator", least=1)
        with fields.refusing():
            return cls(S, D, tuple(lengths), tuple(prices), denominator)


@dataclass(frozen=True)
class Proof:
    """What `proven_bound` established."""

    best_pack_value: int  # no pack within the limits is worth more, in units of 1 / denominator
    worth: Fraction  # of all sequences, in packs
    lower_bound: int  # packs that any packing needs


def best_pack_value(
    lengths: Sequence[int], prices: Sequence[int], max_sequence_length: int, max_sequences_per_pack: Optional[int]
) -> int:
    """Price of the most valuable pack: at most D sequences, of these lengths and prices, of at most S tokens together.

    A dynamic programme over (sequences, tokens) in int64; ValueError where a pack could be worth 2^62 or more.
    """
    kept_lengths, kept_prices, dearest = [], [], 0
    for length, price in sorted(zip(lengths, prices)):
        if price > dearest:  # otherwise a shorter sequence is worth as much and can replace it
            kept_lengths.append(length)
            kept_prices.append(price)
            dearest = price
    if not kept_lengths:
        return 0
    room = max_sequence_length // kept_lengths[0]
    depth = room if max_sequences_per_pack is None else min(max_sequences_per_pack, room)
    if depth * dearest >= 2**62:
        raise ValueError(
            f"certificate: prices up to {dearest} at depth {depth} do not fit 64-bit arithmetic; make the recipe again"
        )
    S = max_sequence_length
    if S * len(kept_lengths) * (1 if depth == room else depth) > MOST_STEPS:
        raise ValueError(
            f"certificate: {len(kept_lengths)} prices, {S} slots and depth {depth} take more than {MOST_STEPS:,} "
            "steps to check; make the recipe again for shorter packs"
        )
    if depth == room:  # the limit on sequences has no effect: one table over tokens is enough
        length_array, price_array = np.array(kept_lengths), np.array(kept_prices, np.int64)
        fitting = np.searchsorted(length_array, np.arange(S + 1), side="right")
        worth = np.zeros(S + 1, np.int64)
        for tokens in range(kept_lengths[0], S + 1):
            n = fitting[tokens]
            worth[tokens] = (worth[tokens - length_array[:n]] + price_array[:n]).max()
        return int(worth.max())
    worth = np.zeros(S + 1, np.int64)  # worth[c]: the best with at most the sequences so far and c tokens
    for _ in range(depth):
        deeper = worth.copy()
        for length, price in zip(kept_lengths, kept_prices):
            np.maximum(deeper[length:], worth[: S + 1 - length] + price, out=deeper[length:])
        worth = deeper
    return int(worth[S])


def divisible_pack_value(
    lengths: Sequence[int], prices: Sequence[int], max_sequence_length: int, max_sequences_per_pack: Optional[int]
) -> int:
    """What no pack is worth more than, quickly found: the most valuable pack if parts of sequences could be packed.

    The value is that of the concave hull of the prices at a mean sequence of S / D tokens, times D, rounded down.
    """
    S, D = max_sequence_length, max_sequences_per_pack
    if D is None:
        return max((S * price // length for length, price in zip(lengths, prices)), default=0)
    hull: List[Tuple[int, int]] = [(0, 0)]  # corners (length, price) of the hull from above, up to the dearest
    for length, price in sorted(zip(lengths, prices)):
        if price <= hull[-1][1]:
            continue
        while len(hull) > 1 and _turns_up(hull[-2], hull[-1], (length, price)):
            hull.pop()
        hull.append((length, price))
    for (low, cheap), (high, dear) in zip(hull, hull[1:]):
        if D * high >= S:
            return (D * cheap * (high - low) + (S - D * low) * (dear - cheap)) // (high - low)
    return D * hull[-1][1]


def beside_long_value(lengths: Sequence[int], prices: Sequence[int], max_sequence_length: int) -> int:
    """What no pack is worth more than, quickly found: parts of sequences beside at most one longer than S / 2, whole.

    A token beside it is worth at most what it is in the dearest sequence that still fits.
    """
    S, price = max_sequence_length, dict(zip(lengths, prices))
    short = sorted(length for length in price if 2 * length <= S)
    rates = [Fraction(0), *accumulate((Fraction(price[length], length) for length in short), max)]
    beside = (price[length] + (S - length) * rates[bisect(short, S - length)] for length in price if 2 * length > S)
    return math.floor(max([S * rates[-1], *beside]))


def _turns_up(a: Tuple[int, int], b: Tuple[int, int], c: Tuple[int, int]) -> bool:
    return (b[1] - a[1]) * (c[0] - b[0]) <= (c[1] - b[1]) * (b[0] - a[0])


def plain_certificate(histogram: LengthHistogram, max_sequences_per_pack: Optional[int]) -> Certificate:
    """The best of those that need no solver (dual_feasible.py)."""
    S, lengths = histogram.max_sequence_length, histogram.lengths
    if not len(lengths):
        return Certificate(S, max_sequences_per_pack, (), (), 1)
    prices = best_prices(histogram, max_sequences_per_pack)
    return Certificate(
        S, max_sequences_per_pack, tuple(lengths.tolist()), tuple(prices.by_length.tolist()), prices.unit
    )


def proven_bound(certificate: Certificate, counts: np.ndarray) -> Proof:
    """Checks the certificate and derives the bound for counts, int [S + 1]: sequences of each length.

    Raises ValueError where some pack is worth more than the certificate's denominator.
    """
    limits = certificate.max_sequence_length, certificate.max_sequences_per_pack
    best = divisible_pack_value(certificate.lengths, certificate.prices, *limits)
    if best > certificate.denominator:
        best = beside_long_value(certificate.lengths, certificate.prices, certificate.max_sequence_length)
    if best > certificate.denominator:
        best = best_pack_value(certificate.lengths, certificate.prices, *limits)
    if best > certificate.denominator:
        raise ValueError(
            f"certificate: a pack within the limits is worth {best}/{certificate.denominator}, more than 1, "
            "so the prices prove nothing; make the recipe again"
        )
    worth = sum(int(counts[length]) * price for length, price in zip(certificate.lengths, certificate.prices))
    return Proof(best, Fraction(worth, certificate.denominator), -(-worth // certificate.denominator))
