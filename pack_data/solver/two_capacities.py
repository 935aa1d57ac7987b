"""Packs of two capacities: tokens, and a second amount of each sequence, such as images, masked tokens or squares.

A pack is opened by the hardest sequence left. Others are added so that both capacities fill at the same pace, and two
that fill what is left of both end it. This is vector bin packing "bin by bin" with a rule for the direction (Panigrahy,
Talwar, Uyeda and Wieder, "Heuristics for vector bin packing", 2011). The bound comes from a surrogate of the two
capacities, after a step that makes L2 of two different sizes (`TwoPrices`); no solver is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from pack_data.packing.certificate import Certificate, Proof, plain_certificate, proven_bound
from pack_data.packing.histogram import LengthHistogram, whole_slots
from pack_data.reading.fields import packing_depth, whole_number

_MOST_CAPACITY = 1 << 36
_UNITS = 1 << 18  # of the capacity of a mix; its sizes are rounded down to them
_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)  # of the tokens in a mix
_BEST = 3  # candidates that get the bounds of dual_feasible.py, beside the tokens alone

Packs = List[Tuple[Tuple[int, ...], int]]  # (groups of a pack, packs like it)


class Mix(NamedTuple):
    """One size out of two: (tokens * length + weight * the sequence's weight) // parts.

    Rounded down, so that sizes of sequences which fit together do not exceed the mix of both capacities.
    """

    tokens: int
    weight: int
    parts: int

    @classmethod
    def of(cls, share: float, max_sequence_length: int, capacity: int) -> Mix:
        """This share of the tokens' capacity and the rest of the other, in about `_UNITS` units, or exactly."""
        if share in (0.0, 1.0) and (max_sequence_length if share else capacity) <= _UNITS:
            return cls(int(share), 1 - int(share), 1)
        scale = _UNITS << 20
        return cls(round(share * scale / max_sequence_length), round((1 - share) * scale / capacity), 1 << 20)

    def sizes(self, length: Any, weight: Any) -> Any:
        """Of one sequence or pack, int, or of many, int64 [n]."""
        return (self.tokens * length + self.weight * weight) // self.parts


@dataclass(frozen=True)
class TwoPrices:
    """What each sequence is worth, so that no pack within both capacities and the depth is worth more than 1.

    Why no pack is: `first` and `second` are sizes whose sums keep to X and Y, those of a full pack, because they are
    the same mix of tokens and weight, rounded down. Now a sequence gets the size Y if its first size is above X - k,
    0 if its first size is below k, and its second size otherwise. Two sequences above X - k do not fit together, since
    2 k <= X + 1, and what fits beside one is below k: so these sizes keep to Y in every pack, too. They are lengths of
    a packing of one capacity, Y, and any certificate for it holds here. With k = 0 the second size is left as it is.
    """

    max_sequence_length: int
    capacity: int
    first: Mix
    k: int
    second: Mix
    certificate: Certificate  # of the sizes

    def __post_init__(self) -> None:
        mixes = self.first, self.second
        if min(*self.first, *self.second, self.k) < 0 or min(mix.parts for mix in mixes) < 1:
            raise ValueError("certificate: a multiplier and k are at least 0, and parts at least 1; pack again")
        totals = [mix.tokens * self.max_sequence_length + mix.weight * self.capacity for mix in mixes]
        if max(totals) >= 2**62:
            raise ValueError("certificate: its sizes do not fit 64-bit arithmetic; pack again")
        if 2 * self.k > self.first.sizes(self.max_sequence_length, self.capacity) + 1:
            raise ValueError(f"certificate: k = {self.k} is more than half a pack; pack again")
        if self.certificate.max_sequence_length != self.second.sizes(self.max_sequence_length, self.capacity):
            raise ValueError("certificate: it is for other capacities than the two; pack again")

    def sizes(self, lengths: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """int64 [n]: the sizes that the certificate has prices for; a sequence of size 0 is worth nothing."""
        X, Y = (mix.sizes(self.max_sequence_length, self.capacity) for mix in (self.first, self.second))
        first, second = (mix.sizes(lengths, weights) for mix in (self.first, self.second))
        sizes: np.ndarray = np.where(first > X - self.k, Y, np.where(first < self.k, 0, second))
        return sizes

    def prove(self, lengths: np.ndarray, weights: np.ndarray) -> Proof:
        """Checks the prices in exact arithmetic, and derives the bound for these sequences, integers [n].

        Raises ValueError where some pack may be worth more than 1, or where a sequence breaks a limit.
        """
        lengths, weights = within_capacities(lengths, weights, self.max_sequence_length, self.capacity)
        return proven_bound(self.certificate, np.bincount(self.sizes(lengths, weights)).astype(np.int64))


@dataclass(frozen=True, eq=False)
class TwoCapacities:
    """Where each of n sequences stands: pack int64 [n], 0..packs - 1, and slot int64 [n], its place there, from 0."""

    pack: np.ndarray
    slot: np.ndarray
    packs: int
    lower_bound: int  # no packing within both capacities and the depth has fewer packs
    prices: TwoPrices  # prove it


def pack_two(
    lengths: np.ndarray,
    weights: np.ndarray,
    *,
    max_sequence_length: int,
    capacity: int,
    max_sequences_per_pack: Optional[int],
) -> TwoCapacities:
    """Packs sequences of these lengths and weights, integers [n], so that neither sum exceeds its capacity.

    Deterministic: the work is counted. It grows with the pairs (length, weight) that occur: 100,000 take some seconds.
    Raises ValueError, which names the sequence, where one does not fit into a pack.
    """
    S, D = whole_slots(max_sequence_length), packing_depth(max_sequences_per_pack)
    lengths, weights = within_capacities(lengths, weights, S, capacity)
    C = int(capacity)
    prices, lower_bound = _best_prices(lengths, weights, S, C, D)
    # Sequences that are equal in both are one group.
    keys, group, counts = np.unique(lengths * (C + 1) + weights, return_inverse=True, return_counts=True)
    groups = _Groups(keys // (C + 1), keys % (C + 1), (S, C, D or max(1, len(lengths))))
    packs = groups.packed(counts, lower_bound, prices)
    return TwoCapacities(*_dealt(packs, group, lengths), _number(packs), lower_bound, prices)


def within_capacities(
    lengths: np.ndarray, weights: np.ndarray, S: int, capacity: Any, names: Optional[np.ndarray] = None
) -> Tuple[np.ndarray, np.ndarray]:
    """Both as int64 [n]. ValueError, which names the sequence by number or by these numbers, for one beyond a limit."""
    C = whole_number("capacity", capacity, least=1, most=_MOST_CAPACITY)
    found = []
    for name, values, least, most, limit in (
        ("length", lengths, 1, S, "max_sequence_length"),
        ("weight", weights, 0, C, "capacity"),
    ):
        values = np.asarray(values)
        if values.shape != (len(lengths),) or (values.size and not np.issubdtype(values.dtype, np.integer)):
            raise ValueError(f"{name}s are whole numbers, one for each of {len(lengths)} sequences; got {values.dtype}")
        wrong = np.flatnonzero((values < least) | (values > most))
        if len(wrong):
            number, value = int((wrong if names is None else names[wrong])[0]), values[wrong[0]]
            rule = f"{name}s go from {least} to {limit} = {most}"
            raise ValueError(f"sequence {number} has {name} {value}; {rule}: leave it out, or choose a larger {limit}")
        found.append(values.astype(np.int64))
    return found[0], found[1]


# ---- the bound -------------------------------------------------------------------------------------------------------


def _best_prices(lengths: np.ndarray, weights: np.ndarray, S: int, C: int, D: Optional[int]) -> Tuple[TwoPrices, int]:
    """The prices with the highest bound, of all pairs of mixes with the best k of each, and the bound."""
    mixes = [Mix.of(share, S, C) for share in _SHARES]
    steps = sorted((step for mix in mixes for step in _steps(mix, mixes, lengths, weights, S, C)), key=lambda s: -s[0])
    best: Tuple[Optional[TwoPrices], int] = (None, -1)
    for _, first, k, second in [*steps[:_BEST], (0.0, mixes[0], 0, mixes[0])]:
        Y = second.sizes(S, C)
        unpriced = TwoPrices(S, C, first, k, second, Certificate(Y, D, (), (), 1))
        sizes = unpriced.sizes(lengths, weights)
        histogram = LengthHistogram.from_lengths(sizes[sizes > 0], Y)
        certificate = plain_certificate(histogram, D)
        counts = histogram.counts[histogram.lengths].tolist()
        worth = sum(count * price for count, price in zip(counts, certificate.prices))
        bound = -(-worth // certificate.denominator)
        if bound > best[1]:
            best = TwoPrices(S, C, first, k, second, certificate), bound
    assert best[0] is not None
    return best[0], best[1]


def _steps(
    first: Mix, mixes: Sequence[Mix], lengths: np.ndarray, weights: np.ndarray, S: int, C: int
) -> List[Tuple[float, Mix, int, Mix]]:
    """(packs that all are worth, first, k, second) with the best k for each second mix, at sizes as prices."""
    order = np.argsort(first.sizes(lengths, weights), kind="stable")
    sizes, X = first.sizes(lengths, weights)[order], first.sizes(S, C)
    every_k = np.concatenate([[0], np.unique(sizes[2 * sizes <= X]), [(X + 1) // 2]])
    low, high = np.searchsorted(sizes, every_k), np.searchsorted(sizes, X - every_k, side="right")
    found = []
    for second in mixes:
        below = np.concatenate([[0], np.cumsum(second.sizes(lengths, weights)[order])])
        worth = len(sizes) - high + (below[high] - below[low]) / second.sizes(S, C)
        best = int(worth.argmax())
        found.append((float(worth[best]), first, int(every_k[best]), second))
    return found


# ---- the search ------------------------------------------------------------------------------------------------------


class _Rules(NamedTuple):
    """How a pack is filled."""

    askew: float  # the imbalance of what is left of a pack, 0..1, that may stay until the last pair
    hard: float  # how much a hard sequence is preferred to one that mends the balance
    near: float  # what a pair may leave of both capacities together


# The first is best where sequences are small or independent, the second where short ones are heavy.
_ROUNDS = tuple(_Rules(*rules) for rules in ((0.2, 0.5, 3e-3), (0.0, 0.03, 2e-3), (0.05, 0.1, 3e-3), (0.0, 0.01, 3e-3)))
_PAIRS_FROM = 3.0  # mean sequences that what is left of a pack has room for, from which pairs are tried
_WINDOW, _EVENLY = 64, 192  # sequences looked at: the hardest that fit, and as many evenly from the others
_FIRST, _SECOND = 64, 32  # of pairs: first ones, and second ones for each, by tokens and by weight
_SCARCE = 20.0  # a capacity that is needed for 1 / this less than the other does not matter
_SPARE = 1e-3  # what the other then counts
_SPARE_CROWDED, _AFTER = 0.05, 3  # the same where the depth matters; then all but so many are soft ones
_GONE = 0.3  # of the groups, after which the lists are made again
_TARGETS = 64  # strategies after which the target is measured again
_CROWDED = 1.3  # the depth in mean sequences of a pack, below which the limit on sequences matters
_SHORT = 0.8  # of all that packs fall short of value 1 by: what the worst that are opened to be packed again hold
_WORST, _FEWEST = 1000, 30  # of them at most; others at least
# Sequences and pairs looked for, after which all are not packed again, and nothing is, and that for each sequence.
_ROUND_WORK, _WORK, _WORK_EACH = 60_000, 140_000, 7
_NEAR_ENOUGH, _PATIENCE = 1e-3, 12  # packs above the bound, of all, that are few enough; tries without one pack less
_NONE = 9.0  # cost of what does not fit


@dataclass(frozen=True)
class _Groups:
    """Sequences that are equal in both are one group: int64 [groups] each."""

    lengths: np.ndarray
    weights: np.ndarray
    limits: Tuple[int, int, int]  # S, C, depth

    def packed(self, counts: np.ndarray, lower_bound: int, prices: TwoPrices) -> Packs:
        """Packs for so many of each group: all by some rules, then the worst and some others again and again."""
        worth = np.zeros(prices.certificate.max_sequence_length + 1)
        worth[list(prices.certificate.lengths)] = prices.certificate.prices
        worth = worth[prices.sizes(self.lengths, self.weights)] / prices.certificate.denominator
        best: Packs = [((group,), number) for group, number in enumerate(counts.tolist())]
        fewest = sequences = int(counts.sum())
        random, work, tries, rules, failed = np.random.default_rng(0), 0, 0, 0, 0
        most = min(_WORK, _WORK_EACH * sequences)
        while fewest > (1 + _NEAR_ENOUGH) * lower_bound and work < most and failed < _PATIENCE:
            whole = tries < len(_ROUNDS) and 2 * work <= _ROUND_WORK
            opened = set() if whole else _opened(best, worth, random)
            part = [pack for index, pack in enumerate(best) if whole or index in opened]
            packs, cost = self._filled(part, _ROUNDS[(tries if whole else rules) % len(_ROUNDS)])
            fewer = _number(part) - _number(packs)
            if fewer >= 0:
                best = [*(pack for index, pack in enumerate(best) if not whole and index not in opened), *packs]
            if whole and fewer > 0:
                rules = tries
            elif not whole and fewer <= 0:
                rules += 1
            failed = 0 if whole or fewer > 0 else failed + 1
            fewest, work, tries = fewest - max(0, fewer), work + cost, tries + 1
        return best

    def _filled(self, packs: Packs, rules: _Rules) -> Tuple[Packs, int]:
        """The sequences of these packs, packed again, and the work done."""
        groups = np.fromiter(chain.from_iterable(held for held, _ in packs), np.int64)
        repeats = np.repeat([number for _, number in packs], [len(held) for held, _ in packs])
        there, place = np.unique(groups, return_inverse=True)
        counts = np.bincount(place.ravel(), repeats).astype(np.int64)
        filling = _TwoFilling(self.lengths[there], self.weights[there], counts, self.limits, rules)
        return [(tuple(there[list(held)].tolist()), number) for held, number in filling.packs()], filling.work


def _number(packs: Packs) -> int:
    return sum(repeats for _, repeats in packs)


def _opened(packs: Packs, worth: np.ndarray, random: np.random.Generator) -> Set[int]:
    """Indices of the strategies that fall short of value 1 most, and of as many others at random."""
    short = np.array([number * (1.0 - float(worth[list(groups)].sum())) for groups, number in packs])
    order = np.argsort(-short / [number for _, number in packs], kind="stable")
    missing = np.cumsum(short[order])
    many = min(_WORST, int(np.searchsorted(missing, _SHORT * missing[-1])) + 1)
    return {*order[:many].tolist(), *random.permutation(order[many:])[: max(_FEWEST, many)].tolist()}


class _TwoFilling:
    """The sequences that are left, by groups (length, weight)."""

    def __init__(
        self, lengths: np.ndarray, weights: np.ndarray, counts: np.ndarray, limits: Tuple[int, int, int], rules: _Rules
    ) -> None:
        self._S, self._C, self._depth = limits
        self._rules, self._lengths, self._weights, self._left = rules, lengths, weights, counts.copy()
        self._hard = np.maximum(lengths / self._S, weights / self._C)
        self._order = np.argsort(-self._hard, kind="stable")  # hardest first
        # Below a key stand the groups that fit and fill one capacity best, and of these the other.
        self._keys = (lengths * (self._C + 1) + weights, weights * (self._S + 1) + lengths)
        self._sorted = [np.argsort(keys, kind="stable") for keys in self._keys]
        self._sums = np.array([counts @ lengths, counts @ weights, counts.sum()])
        self.work = 0
        self._list()

    def _list(self) -> None:
        """The groups that are left, in each order."""
        self._order = self._order[self._left[self._order] > 0]
        self._softness = -self._hard[self._order]
        self._sorted = [order[self._left[order] > 0] for order in self._sorted]
        self._sorted_keys = [keys[order] for keys, order in zip(self._keys, self._sorted)]
        self._hardest = self._gone = 0
        self._softest = len(self._order) - 1

    def _measure(self) -> None:
        """What a pack should hold so that all others can hold the same, and how scarce each capacity is, 0..1."""
        tokens, weight, number = self._sums.tolist()
        used = np.array([tokens / self._S, weight / self._C])
        packs = max(used.max(), number / self._depth)
        self._target = np.array([tokens, weight]) / packs
        self._scarce = np.maximum(0.0, 1 - (1 - used / packs) * _SCARCE)
        crowded = self._depth < _CROWDED * number / used.max()
        self._wanted = min(self._depth, round(number / packs)) if crowded else 0
        self._cost = np.maximum(self._scarce, _SPARE_CROWDED if crowded else _SPARE) / (self._S, self._C)
        self._mean = float(self._sums[:2] @ self._cost) / number

    def packs(self) -> Packs:
        """Packs for all."""
        packs: Packs = []
        while True:
            while self._hardest < len(self._order) and not self._left[self._order[self._hardest]]:
                self._hardest += 1
            if self._hardest == len(self._order):
                return packs
            if self._gone > _GONE * len(self._order):
                self._list()
            if len(packs) % _TARGETS == 0:
                self._measure()
            groups, number = np.unique(self._pack(int(self._order[self._hardest])), return_counts=True)
            repeats = int((self._left[groups] // number).min())
            self._left[groups] -= repeats * number
            self._gone += int(np.count_nonzero(self._left[groups] == 0))
            amounts = self._lengths[groups] @ number, self._weights[groups] @ number, number.sum()
            self._sums -= repeats * np.array(amounts)
            packs.append((tuple(np.repeat(groups, number).tolist()), repeats))

    # What the pack being filled holds; a sequence that it holds is not left.

    def _pack(self, group: int) -> List[int]:
        """The groups of one pack with a sequence of this group; all are among those that are left."""
        self._held: List[int] = []
        self._tokens, self._weight = self._S, self._C  # what is left of the pack
        self._add(group)
        for _ in range(self._wanted - _AFTER):
            while self._softest and not self._left[self._order[self._softest]]:
                self._softest -= 1
            group = int(self._order[self._softest])
            if not len(self._fitting(np.array([group]))):
                break
            self._add(group)
        cost, best = _NONE, self._held
        candidates = self._order[:0]
        while len(self._held) < self._depth:
            candidates = self._fitting(candidates)
            if not len(candidates):
                candidates = self._candidates()
            if not len(candidates):
                break
            seats = self._depth - len(self._held)
            room = self._tokens * self._cost[0] + self._weight * self._cost[1]
            enough = len(self._held) + 2 >= self._wanted and room <= _PAIRS_FROM * self._mean
            if seats == 2 or (seats > 2 and enough):
                pair_cost, pair = self._pair()
                if pair_cost < cost:
                    cost, best = pair_cost, [*self._held, *pair]
                if cost <= self._rules.near:
                    break
            self._add(self._next(candidates))
        for held in self._held:
            self._left[held] += 1
        missing = np.abs(self._missing())
        return self._held if float(missing @ self._cost) < cost else best

    def _add(self, group: int) -> None:
        self._held.append(group)
        self._left[group] -= 1
        self._tokens -= int(self._lengths[group])
        self._weight -= int(self._weights[group])
        self.work += 1

    def _missing(self) -> np.ndarray:
        """Tokens and weight from what the pack holds to the target; below 0 where it holds more."""
        return self._target - (self._S - self._tokens, self._C - self._weight)

    def _fitting(self, groups: np.ndarray) -> np.ndarray:
        fit = (self._lengths[groups] <= self._tokens) & (self._weights[groups] <= self._weight)
        return groups[fit & (self._left[groups] > 0)]

    def _from(self) -> int:
        """The place of the hardest group that may fit."""
        most = max(self._tokens / self._S, self._weight / self._C)
        return max(self._hardest, int(np.searchsorted(self._softness, -most)))

    def _candidates(self) -> np.ndarray:
        """Groups that fit, hardest first: the hardest, and some of all others; where none of them does, any."""
        start, stop = self._from(), len(self._order)
        if stop - start <= _WINDOW + _EVENLY:
            return self._fitting(self._order[start:])
        others = start + _WINDOW + np.arange(_EVENLY) * (stop - start - _WINDOW) // _EVENLY
        found = self._fitting(self._order[np.concatenate([np.arange(start, start + _WINDOW), others])])
        many = _WINDOW
        while not len(found) and start < stop:
            found = self._fitting(self._order[start : start + many])
            start, many = start + many, 4 * many
        return found

    def _next(self, candidates: np.ndarray) -> int:
        """The one that leaves the pack least askew, or a harder one where it is not too much so.

        What is left of a scarce capacity counts up to the target, of the other up to the limit.
        """
        room = np.array([self._tokens, self._weight], np.float64)
        room = self._scarce * np.maximum(self._missing(), room / 2) + (1 - self._scarce) * room
        tokens = (room[0] - self._lengths[candidates]) / self._S
        weight = (room[1] - self._weights[candidates]) * (self._target[0] / self._S / max(1e-9, self._target[1]))
        askew = (tokens - weight) / (np.abs(tokens) + np.abs(weight) + 1e-3)
        allowed = self._rules.askew
        cost = self._scarce[0] * np.maximum(askew - allowed, 0) + self._scarce[1] * np.maximum(-askew - allowed, 0)
        return int(candidates[(cost - self._rules.hard * self._hard[candidates]).argmin()])

    def _pair(self) -> Tuple[float, List[int]]:
        """(cost, two groups) that fill what is left: of pairs that leave little the hardest, or that of least cost."""
        self.work += 1
        start, stop = self._from(), len(self._order)
        half = int(np.searchsorted(self._softness, self._softness[start] / 2, side="right")) if start < stop else stop
        span = min(stop, max(half, start + _FIRST)) - start
        number = min(_FIRST, span)
        first = self._fitting(self._order[start + np.arange(number) * span // max(1, number)])
        if not len(first):
            return _NONE, []
        tokens, weight = self._tokens - self._lengths[first], self._weight - self._weights[first]
        most = tokens * (self._C + 1) + weight, weight * (self._S + 1) + tokens
        parts = []
        for keys, order, key in zip(self._sorted_keys, self._sorted, most):
            places = np.searchsorted(keys, key, side="right")[:, None] - 1 - np.arange(_SECOND)
            parts.append(np.where(places >= 0, order[np.maximum(places, 0)], -1))
        second = np.concatenate(parts, axis=1)
        lengths, weights = self._lengths[second], self._weights[second]
        fit = (second >= 0) & (lengths <= tokens[:, None]) & (weights <= weight[:, None])
        fit &= self._left[second] > (second == first[:, None])
        missing = self._missing()
        costs = self._cost[0] * np.abs((missing[0] - self._lengths[first])[:, None] - lengths)
        costs += self._cost[1] * np.abs((missing[1] - self._weights[first])[:, None] - weights)
        softer = np.minimum(self._hard[first][:, None], self._hard[second])
        ranks = np.where(fit, np.where(costs <= self._rules.near, -softer, costs), _NONE)
        best = int(ranks.argmin())
        if not fit.flat[best]:
            return _NONE, []
        return float(costs.flat[best]), [int(first[best // second.shape[1]]), int(second.flat[best])]


def _dealt(packs: Packs, group: np.ndarray, lengths: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """(pack, slot) int64 [n] of each sequence, where its group is int [n]; in a pack the longest comes first."""
    every = [groups for groups, repeats in packs for _ in range(repeats)]
    groups = np.fromiter(chain.from_iterable(every), np.int64)
    places = np.repeat(np.arange(len(every)), [len(groups) for groups in every])
    pack = np.empty(len(lengths), np.int64)
    pack[np.argsort(group.ravel(), kind="stable")] = places[np.argsort(groups, kind="stable")]
    order = np.lexsort((-lengths, pack))
    held = np.bincount(pack)
    slot = np.empty(len(lengths), np.int64)
    slot[order] = np.arange(len(lengths)) - np.repeat(np.cumsum(held) - held, held)
    return pack, slot
