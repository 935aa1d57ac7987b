"""A proof that no packing has fewer packs, checked without trusting the solver that found it.

Give every sequence length a price. If no pack that obeys the limits is worth more than 1, then a packing needs at
least as many packs as all sequences together are worth: weak duality of the cutting-stock programme (Gilmore and
Gomory, "A linear programming approach to the cutting-stock problem", 1961). Prices are whole numbers over one common
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

# Additions of the dynamic programme that one proof may cost: some minutes.
_MOST_STEPS = 1 << 38
# Packs are worth less than this, so that the sums of the dynamic programme fit into int64.
_MOST_VALUE = 1 << 62

_Pair = Tuple[int, int]  # a length in tokens and its price


@dataclass(frozen=True)
class Certificate:
    """Prices by length; a length that is not listed has the price 0."""

    max_sequence_length: int  # S
    max_sequences_per_pack: Optional[int]  # D, None = unlimited
    lengths: Tuple[int, ...]  # ascending, each at most S
    prices: Tuple[int, ...]  # price of lengths[i] in units of 1 / denominator, at least 0
    denominator: int  # no pack may be worth more than this

    def __post_init__(self) -> None:
        S = self.max_sequence_length
        bounded = (0, *self.lengths, S + 1)
        ascending = all(low < high for low, high in zip(bounded, bounded[1:]))
        if not ascending or len(self.lengths) != len(self.prices):
            raise ValueError(
                f"certificate: lengths must ascend from 1 to {S}, with one price each; make it again"
            )
        if self.denominator < 1 or min(self.prices, default=0) < 0:
            raise ValueError(
                "certificate: prices must be at least 0, the denominator at least 1; make it again"
            )

    def worth(self, counts: np.ndarray) -> Fraction:
        """Return the worth of all sequences in packs; counts: integers [S + 1], the sequences of each length."""
        priced = zip(self.lengths, self.prices)
        units = sum(int(counts[length]) * price for length, price in priced if length < len(counts))
        return Fraction(units, self.denominator)

    def to_json(self) -> Dict[str, Any]:
        """Return plain values, as a recipe holds them."""
        return {
            "max_sequence_length": self.max_sequence_length,
            "max_sequences_per_pack": self.max_sequences_per_pack,
            "lengths": list(self.lengths),
            "prices": list(self.prices),
            "denominator": self.denominator,
        }

    @classmethod
    def from_json(cls, value: Union[Mapping[str, Any], Fields]) -> Certificate:
        """Read a certificate.

        Args:
            value: an object that `to_json` returned.

        Raises:
            ValueError: a field is missing, or its value is out of range.
        """
        fields = Fields.of(value, "certificate", "make the recipe again")
        S = fields.integer("max_sequence_length", least=1, most=LONGEST)
        D = fields.optional("max_sequences_per_pack", Fields.integer, least=1)
        lengths = fields.integers("lengths")
        prices = fields.integers("prices", least=0)
        denominator = fields.integer("denominator", least=1)
        with fields.refusing():
            return cls(S, D, tuple(lengths), tuple(prices), denominator)


@dataclass(frozen=True)
class Proof:
    """The bound that `proven_bound` derives."""

    best_pack_value: int  # no pack within the limits is worth more, in units of 1 / denominator
    worth: Fraction  # of all sequences, in packs
    lower_bound: int  # packs that any packing needs


def proven_bound(certificate: Certificate, counts: np.ndarray) -> Proof:
    """Check a certificate and derive the lower bound.

    Args:
        certificate: prices by length.
        counts: integers [S + 1], the sequences of each length.

    Raises:
        ValueError: a pack within the limits is worth more than 1, or that takes too long to check.
    """
    lengths = certificate.lengths
    prices = certificate.prices
    S = certificate.max_sequence_length
    D = certificate.max_sequences_per_pack
    unit = certificate.denominator

    # Quick bounds from above come first.
    best = _divisible_value(lengths, prices, S, D)
    if best > unit:
        best = _beside_long_value(lengths, prices, S)
    if best > unit:
        best = best_pack_value(lengths, prices, S, D)
    if best > unit:
        raise ValueError(
            f"certificate: a pack within the limits is worth {best}/{unit}, more than 1, so the prices prove nothing; "
            "make the recipe again"
        )
    worth = certificate.worth(counts)
    return Proof(best, worth, math.ceil(worth))


def plain_certificate(
    histogram: LengthHistogram, max_sequences_per_pack: Optional[int]
) -> Certificate:
    """Return the best certificate that needs no solver, by `dual_feasible.best_prices`."""
    S = histogram.max_sequence_length
    if not histogram.sequences:
        return Certificate(S, max_sequences_per_pack, (), (), 1)
    prices = best_prices(histogram, max_sequences_per_pack)
    lengths = tuple(histogram.lengths.tolist())
    return Certificate(
        S, max_sequences_per_pack, lengths, tuple(prices.by_length.tolist()), prices.unit
    )


# ---- the most valuable pack ------------------------------------------------------------------------------------------


def best_pack_value(
    lengths: Sequence[int],
    prices: Sequence[int],
    max_sequence_length: int,
    max_sequences_per_pack: Optional[int],
) -> int:
    """Return the price of the most valuable pack, by a dynamic programme in int64.

    Args:
        lengths: tokens of a sequence, [n].
        prices: of a sequence of each length, [n].
        max_sequence_length: tokens that a pack holds at most.
        max_sequences_per_pack: sequences that a pack holds at most; None for unlimited.

    Raises:
        ValueError: a pack could be worth 2^62 or more, or the programme would take hours.
    """
    pairs = _undominated(lengths, prices)
    if not pairs:
        return 0
    S = max_sequence_length
    room = S // pairs[0][0]
    depth = room if max_sequences_per_pack is None else min(max_sequences_per_pack, room)
    dearest = pairs[-1][1]
    if depth * dearest >= _MOST_VALUE:
        raise ValueError(
            f"certificate: prices up to {dearest} at depth {depth} do not fit 64-bit arithmetic; make the recipe again"
        )
    steps = S * len(pairs)
    if depth < room:
        steps *= depth
    if steps > _MOST_STEPS:
        raise ValueError(
            f"certificate: {len(pairs)} prices, {S} slots and depth {depth} take more than {_MOST_STEPS:,} steps to "
            "check; make the recipe again for shorter packs"
        )
    return _best_of_limited(pairs, S, depth) if depth < room else _best_of_unlimited(pairs, S)


def _undominated(lengths: Sequence[int], prices: Sequence[int]) -> List[_Pair]:
    """Return the pairs in ascending order, without lengths whose price a shorter length reaches."""
    pairs: List[_Pair] = []
    dearest = 0
    for length, price in sorted(zip(lengths, prices)):
        if price > dearest:
            pairs.append((length, price))
            dearest = price
    return pairs


def _best_of_unlimited(pairs: Sequence[_Pair], S: int) -> int:
    """Return the value of the best pack of any number of sequences."""
    lengths, prices = np.array(pairs, np.int64).T
    fitting = np.searchsorted(lengths, np.arange(S + 1), side="right")
    worth = np.zeros(S + 1, np.int64)  # worth[c]: value of the best pack of exactly c tokens
    for tokens in range(int(lengths[0]), S + 1):
        n = fitting[tokens]
        worth[tokens] = (worth[tokens - lengths[:n]] + prices[:n]).max()
    return int(worth.max())


def _best_of_limited(pairs: Sequence[_Pair], S: int, depth: int) -> int:
    """Return the value of the best pack of at most ``depth`` sequences."""
    # worth[c] is the value of the best pack of at most c tokens; each round allows one more sequence.
    worth = np.zeros(S + 1, np.int64)
    for _ in range(depth):
        deeper = worth.copy()
        for length, price in pairs:
            np.maximum(deeper[length:], worth[: S + 1 - length] + price, out=deeper[length:])
        worth = deeper
    return int(worth[S])


# ---- quick bounds on it ----------------------------------------------------------------------------------------------


def _divisible_value(
    lengths: Sequence[int], prices: Sequence[int], S: int, D: Optional[int]
) -> int:
    """Return the value of the best pack if parts of sequences could be packed, rounded down.

    This is D times the concave hull of the prices at the mean length, S / D tokens.
    """
    if D is None:
        return max((S * price // length for length, price in zip(lengths, prices)), default=0)
    corners: List[_Pair] = [(0, 0)]
    for pair in _undominated(lengths, prices):
        while len(corners) > 1 and _turns_up(corners[-2], corners[-1], pair):
            corners.pop()
        corners.append(pair)
    for (low, cheap), (high, dear) in zip(corners, corners[1:]):
        if D * high >= S:
            width = high - low
            return (D * cheap * width + (S - D * low) * (dear - cheap)) // width
    return D * corners[-1][1]


def _turns_up(a: _Pair, b: _Pair, c: _Pair) -> bool:
    """Return True if b is not above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - b[0]) <= (c[1] - b[1]) * (b[0] - a[0])


def _beside_long_value(lengths: Sequence[int], prices: Sequence[int], S: int) -> int:
    """Return the value of the best pack of at most one sequence longer than S / 2 and parts of shorter ones.

    A token beside the long sequence is worth at most the highest price per token of the sequences that still fit.
    """
    price = dict(zip(lengths, prices))
    short = sorted(length for length in price if 2 * length <= S)
    rates = [Fraction(price[length], length) for length in short]
    best_rates = [Fraction(0), *accumulate(rates, max)]
    values = [S * best_rates[-1]]
    for length in price:
        if 2 * length > S:
            fitting = bisect(short, S - length)
            values.append(price[length] + (S - length) * best_rates[fitting])
    return math.floor(max(values))
