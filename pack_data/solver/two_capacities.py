"""Packs of two capacities: tokens, and a second amount of each sequence, such as images, masked tokens or squares.

The hardest sequence left opens a pack. Others are added so that both capacities fill at the same pace, and a pair that
fills the rest of both completes it. This is vector bin packing "bin by bin" with a rule for the direction
(Panigrahy, Talwar, Uyeda and Wieder, "Heuristics for vector bin packing", 2011). The bound comes from a surrogate of
the two capacities, after a step that makes L2 of two different sizes (`TwoPrices`); no solver is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from pack_data.packing.certificate import Certificate, Proof, plain_certificate, proven_bound
from pack_data.packing.histogram import LengthHistogram, whole_slots
from pack_data.reading.fields import Fields, packing_depth, whole_number
from pack_data.solver.free_slots import Packs, count_packs

# In this module the strategies of `Packs` hold groups of sequences, not lengths.

_MAX_CAPACITY = 1 << 36  # so that length x (capacity + 1) + weight fits int64
# Units of the capacity of a mix; sizes are rounded down to them.
_UNITS = 1 << 18
# Parts of a unit in the multipliers of a mix.
_PARTS = 1 << 20
# Shares of the tokens in the mixes that are tried.
_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
# Best steps that get the bounds of dual_feasible.py, beside the tokens alone. With one, the bounds are 2 packs lower.
_STEPS_PROVED = 3


class _Mix(NamedTuple):
    """One size from two: (tokens * length + weight * the sequence's weight) // parts.

    It is rounded down, so that the sizes of sequences that fit together do not exceed the mix of both capacities.
    """

    tokens: int
    weight: int
    parts: int

    @classmethod
    def of(cls, share: float, max_sequence_length: int, capacity: int) -> _Mix:
        """Return the mix with this share of the tokens, in about `_UNITS` units, or exactly."""
        if share == 1.0 and max_sequence_length <= _UNITS:
            return cls(tokens=1, weight=0, parts=1)
        if share == 0.0 and capacity <= _UNITS:
            return cls(tokens=0, weight=1, parts=1)
        scale = _UNITS * _PARTS
        return cls(
            tokens=round(share * scale / max_sequence_length),
            weight=round((1 - share) * scale / capacity),
            parts=_PARTS,
        )

    def sizes(self, length: Any, weight: Any) -> Any:
        """Return the size of one sequence or pack, int, or of many, int64 [n]."""
        return (self.tokens * length + self.weight * weight) // self.parts


@dataclass(frozen=True)
class TwoPrices:
    """The worth of each sequence, such that no pack within both capacities and the depth is worth more than 1.

    Proof: `first` and `second` define sizes that add up to at most X and Y in every pack, where X and Y are the sizes
    of a full pack, because sizes are a mix of tokens and weight, rounded down. A sequence gets the size Y if its first
    size is above X - k, 0 if its first size is below k, and its second size otherwise. Two sequences above X - k do not
    fit together, since 2 k <= X + 1, and sequences that fit beside one of them are below k. So these sizes add up to at
    most Y in every pack, too. They are the lengths of a packing of one capacity, Y, and a certificate for it holds
    here. With k = 0 all sequences keep their second size.
    """

    max_sequence_length: int
    capacity: int
    first: _Mix
    k: int
    second: _Mix
    certificate: Certificate  # of the sizes

    def __post_init__(self) -> None:
        for mix in (self.first, self.second):
            if min(*mix, self.k) < 0 or mix.parts < 1:
                raise ValueError(
                    f"certificate: first, second or k = {self.k} is negative, or parts are 0; pack again"
                )
            if mix.tokens * self.max_sequence_length + mix.weight * self.capacity >= 2**62:
                raise ValueError(
                    "certificate: the sizes of first or second exceed 64-bit arithmetic; pack again"
                )
        if 2 * self.k > self._full(self.first) + 1:
            raise ValueError(f"certificate: k = {self.k} is more than half a pack; pack again")
        if self.certificate.max_sequence_length != self._full(self.second):
            raise ValueError(
                f"certificate: max_sequence_length = {self.certificate.max_sequence_length} is not the size of a full "
                f"pack, {self._full(self.second)}; pack again"
            )

    @classmethod
    def from_json(cls, fields: Fields) -> TwoPrices:
        """Return the prices of an object as `dataclasses.asdict` writes it; ValueError if they are out of range."""
        mixes = [_Mix(*fields.integers(name, least=0)) for name in ("first", "second")]
        return cls(
            fields.integer("max_sequence_length", least=1),
            fields.integer("capacity", least=1),
            mixes[0],
            fields.integer("k", least=0),
            mixes[1],
            Certificate.from_json(fields.object("certificate")),
        )

    def _full(self, mix: _Mix) -> int:
        """Return the size of a full pack."""
        return int(mix.sizes(self.max_sequence_length, self.capacity))

    def sizes(self, lengths: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the sizes that the certificate has prices for, int64 [n].

        A sequence of size 0 is worth nothing.

        Args:
            lengths: tokens of each sequence, integers [n].
            weights: second amount of each sequence, integers [n].
        """
        first = self.first.sizes(lengths, weights)
        sizes: np.ndarray = self.second.sizes(lengths, weights)
        is_large = first > self._full(self.first) - self.k
        sizes = np.where(first < self.k, 0, sizes)
        return np.where(is_large, self._full(self.second), sizes)

    def prove(self, lengths: np.ndarray, weights: np.ndarray) -> Proof:
        """Check the prices in exact arithmetic, and derive the bound for these sequences.

        Args:
            lengths: tokens of each sequence, integers [n].
            weights: second amount of each sequence, integers [n].

        Raises:
            ValueError: a pack may be worth more than 1, or a sequence breaks a limit.
        """
        lengths, weights = within_capacities(
            lengths, weights, self.max_sequence_length, self.capacity
        )
        sizes = self.sizes(lengths, weights)
        return proven_bound(self.certificate, np.bincount(sizes).astype(np.int64))


@dataclass(frozen=True, eq=False)
class TwoCapacities:
    """The place of each of n sequences."""

    pack: np.ndarray  # int64 [n], 0..packs - 1
    slot: np.ndarray  # int64 [n], place in the pack, from 0
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
    """Pack sequences so that neither their lengths nor their weights exceed a capacity.

    The result depends on the arguments alone, because the work is counted, not timed. The work grows with the number of
    different pairs (length, weight): 100,000 take some seconds.

    Args:
        lengths: tokens of each sequence, integers [n].
        weights: second amount of each sequence, integers [n].
        max_sequence_length: slots of a pack.
        capacity: largest sum of the weights in a pack.
        max_sequences_per_pack: largest depth; None is unlimited.

    Raises:
        ValueError: a sequence does not fit into a pack; its number is in the message.
    """
    S = whole_slots(max_sequence_length)
    depth = packing_depth(max_sequences_per_pack)
    lengths, weights = within_capacities(lengths, weights, S, capacity)
    C = int(capacity)
    prices, lower_bound = _best_prices(lengths, weights, S, C, depth)
    keys = lengths * (C + 1) + weights
    keys, group, counts = np.unique(keys, return_inverse=True, return_counts=True)
    limits = S, C, depth or max(1, len(lengths))
    groups = _Groups(keys // (C + 1), keys % (C + 1), limits)
    packs = groups.packed(counts, lower_bound, prices)
    pack, slot = _deal(packs, group, lengths)
    return TwoCapacities(pack, slot, count_packs(packs), lower_bound, prices)


def within_capacities(
    lengths: np.ndarray,
    weights: np.ndarray,
    max_sequence_length: int,
    capacity: Any,
    names: Optional[np.ndarray] = None,
) -> Tuple[np.ndarray, np.ndarray]:
    """Check lengths and weights, and return both as int64 [n].

    Args:
        lengths: tokens of each sequence, integers [n].
        weights: second amount of each sequence, integers [n].
        max_sequence_length: largest length.
        capacity: largest weight.
        names: numbers of the sequences in messages, int [n]; None is 0, 1, 2, ...

    Raises:
        ValueError: a value is not an integer or is out of range; the number of its sequence is in the message.
    """
    C = whole_number("capacity", capacity, least=1, most=_MAX_CAPACITY)
    checked = []
    for name, values, least, most, limit in (
        ("length", lengths, 1, max_sequence_length, "max_sequence_length"),
        ("weight", weights, 0, C, "capacity"),
    ):
        values = np.asarray(values)
        are_integers = not values.size or np.issubdtype(values.dtype, np.integer)
        if values.shape != (len(lengths),) or not are_integers:
            raise ValueError(
                f"{name}s are whole numbers, one for each of {len(lengths)} sequences; got {values.dtype}"
            )
        wrong = np.flatnonzero((values < least) | (values > most))
        if len(wrong):
            first = int(wrong[0])
            number = first if names is None else int(names[first])
            rule = f"{name}s go from {least} to {limit} = {most}"
            raise ValueError(
                f"sequence {number} has {name} {values[first]}; {rule}: leave it out, or pass a larger {limit}"
            )
        checked.append(values.astype(np.int64))
    return checked[0], checked[1]


# ---- the bound -------------------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """A way to one size for each sequence."""

    worth: float  # packs that all sequences are worth at sizes as prices
    first: _Mix
    k: int
    second: _Mix


def _best_prices(
    lengths: np.ndarray,
    weights: np.ndarray,
    S: int,
    C: int,
    depth: Optional[int],
) -> Tuple[TwoPrices, int]:
    """Return the prices with the highest bound, over all pairs of mixes with the best k of each, and the bound."""
    mixes = [_Mix.of(share, S, C) for share in _SHARES]
    steps: List[_Step] = []
    for mix in mixes:
        steps += _steps(mix, mixes, lengths, weights, S, C)
    steps.sort(key=lambda step: -step.worth)
    tokens_alone = _Step(0.0, mixes[0], 0, mixes[0])

    proved = []
    for _, first, k, second in [*steps[:_STEPS_PROVED], tokens_alone]:
        slots = second.sizes(S, C)
        unpriced = TwoPrices(S, C, first, k, second, Certificate(slots, depth, (), (), 1))
        sizes = unpriced.sizes(lengths, weights)
        histogram = LengthHistogram.from_lengths(sizes[sizes > 0], slots)
        certificate = plain_certificate(histogram, depth)
        bound = math.ceil(certificate.worth(histogram.counts))
        proved.append((replace(unpriced, certificate=certificate), bound))
    return max(proved, key=lambda prices_and_bound: prices_and_bound[1])


def _steps(
    first: _Mix,
    mixes: Sequence[_Mix],
    lengths: np.ndarray,
    weights: np.ndarray,
    S: int,
    C: int,
) -> List[_Step]:
    """Return the step with the best k for each second mix."""
    sizes = first.sizes(lengths, weights)
    order = np.argsort(sizes, kind="stable")
    sizes = sizes[order]
    full = first.sizes(S, C)
    halves = np.unique(sizes[2 * sizes <= full])
    every_k = np.concatenate([[0], halves, [(full + 1) // 2]])
    low = np.searchsorted(sizes, every_k)
    high = np.searchsorted(sizes, full - every_k, side="right")
    steps = []
    for second in mixes:
        second_sizes = second.sizes(lengths, weights)[order]
        below = np.concatenate([[0], np.cumsum(second_sizes)])
        large = len(sizes) - high
        middle = (below[high] - below[low]) / second.sizes(S, C)
        worth = large + middle
        best = int(worth.argmax())
        step = _Step(float(worth[best]), first, int(every_k[best]), second)
        steps.append(step)
    return steps


# ---- the search ------------------------------------------------------------------------------------------------------


class _Rules(NamedTuple):
    """Rules by which a pack is filled."""

    askew: float  # the imbalance of what is left of a pack, 0..1, that may stay until the last pair
    hard: float  # preference for hard sequences over those that mend the balance
    near: float  # what a pair may leave of both capacities together


# The first is best if sequences are small or independent, the second if short ones are heavy.
_RULES = (
    _Rules(askew=0.2, hard=0.5, near=3e-3),
    _Rules(askew=0.0, hard=0.03, near=2e-3),
    _Rules(askew=0.05, hard=0.1, near=3e-3),
    _Rules(askew=0.0, hard=0.01, near=3e-3),
)

# What other values cost was measured on 24 sets of 700 sequences, which need 5,381 packs with these.

# Groups looked at for the next place: the hardest that fit, and some evenly from the others. With 16 of the hardest,
# one pack more. Without the others, 3,000 independent lengths and weights miss the bound of their test.
_HARDEST_LOOKED_AT = 64
_OTHERS_LOOKED_AT = 192
# Pairs looked at: first sequences, and second ones for each, by tokens and by weight. With 16 second ones, 2 packs
# more.
_FIRST_OF_PAIR = 64
_SECOND_OF_PAIR = 32
# Pairs are tried once the rest of a pack has room for at most this many mean sequences. At 9, 4 packs more.
_PAIRS_FROM = 3.0
_NO_FIT = 9.0  # cost of a pair that does not fit; both capacities together cost 2

# A capacity does not matter if at least 1 / this of it stays unused. At 10, one pack more.
_SCARCITY_RANGE = 20.0
# Cost of a capacity that does not matter. At 0.05, one pack more.
_MIN_COST = 1e-3
# The same if the depth matters. At 1e-3, a set of 3,000 at its depth misses the bound of its test.
_MIN_COST_CROWDED = 0.05
# The depth matters below this multiple of the mean number of sequences per pack. At 0, 58 packs more.
_CROWDED = 1.3
# If the depth matters, all seats but these take soft sequences first. With 2, 56 packs more.
_LAST_SEATS = 3

_GONE_SHARE = 0.3  # share of used-up groups at which the lists are made again
_TARGET_PERIOD = 64  # strategies after which the target is measured again. With 8, 2 packs more.

# Packs that are opened to be packed again: the worst ones, which hold this share of what all fall short of value 1. At
# 0.5, 4 packs more.
_SHORTFALL_OPENED = 0.8
# Packs drawn at random for a round: as many as worst ones, but at least these. At 0, image patches at depth 3 need 544
# packs in place of 539.
_MIN_OTHERS = 30
_MAX_WORST = 1000

# Work is counted in sequences and pairs looked for.
# Work of rounds that pack all sequences again; such a round is begun below half of it.
_WORK_OF_WHOLE_ROUNDS = 60_000
_MAX_WORK = 140_000  # work of all rounds
# The same for each of few sequences. Without it, as many packs in a fifth more time.
_MAX_WORK_PER_SEQUENCE = 7
_GAP_SHARE = 1e-3  # share of packs above the bound that is good enough
_PATIENCE = 12  # rounds without one pack less after which the search ends. With 24, one pack less.


@dataclass(frozen=True)
class _Groups:
    """Groups of sequences that are equal in length and weight: int64 [groups] each."""

    lengths: np.ndarray
    weights: np.ndarray
    limits: Tuple[int, int, int]  # S, C, depth

    def packed(self, counts: np.ndarray, lower_bound: int, prices: TwoPrices) -> Packs:
        """Pack `counts` sequences of each group: all by some rules, then the worst packs and others in rounds."""
        worth = self._worth(prices)
        best: Packs = [((group,), number) for group, number in enumerate(counts.tolist())]
        total = int(counts.sum())  # packs; at first one for each sequence
        good_enough = (1 + _GAP_SHARE) * lower_bound
        most_work = min(_MAX_WORK, _MAX_WORK_PER_SEQUENCE * total)
        random = np.random.default_rng(0)
        work = 0
        rules = 0  # index of the rules in use
        failures = 0  # rounds without one pack less
        rounds = 0
        while total > good_enough and work < most_work and failures < _PATIENCE:
            opens_all = rounds < len(_RULES) and 2 * work <= _WORK_OF_WHOLE_ROUNDS
            if opens_all:
                opened_indices = set(range(len(best)))
                tried_rules = rounds
            else:
                opened_indices = _opened(best, worth, random)
                tried_rules = rules
            opened = [pack for index, pack in enumerate(best) if index in opened_indices]
            filled, cost = self._filled(opened, _RULES[tried_rules % len(_RULES)])

            saved = count_packs(opened) - count_packs(filled)
            if saved >= 0:
                kept = [pack for index, pack in enumerate(best) if index not in opened_indices]
                best = kept + filled
            if saved > 0:
                failures = 0
                rules = tried_rules
            elif not opens_all:
                failures += 1
                rules += 1
            total -= max(0, saved)
            work += cost
            rounds += 1
        return best

    def _worth(self, prices: TwoPrices) -> np.ndarray:
        """Return the worth of a sequence of each group, in packs."""
        certificate = prices.certificate
        by_size = np.zeros(certificate.max_sequence_length + 1)
        by_size[list(certificate.lengths)] = certificate.prices
        return by_size[prices.sizes(self.lengths, self.weights)] / certificate.denominator

    def _filled(self, packs: Packs, rules: _Rules) -> Tuple[Packs, int]:
        """Pack the sequences of these packs again, and return the packs and the work done."""
        counts = np.zeros(len(self.lengths), np.int64)
        for groups, number in packs:
            np.add.at(counts, list(groups), number)
        filling = _TwoFilling(self.lengths, self.weights, counts, self.limits, rules)
        return filling.packs(), filling.work


def _opened(packs: Packs, worth: np.ndarray, random: np.random.Generator) -> Set[int]:
    """Return indices of the strategies that fall short of value 1 most, and of as many others at random."""
    numbers = np.array([number for _, number in packs])
    values = np.array([worth[list(groups)].sum() for groups, _ in packs])
    order = np.argsort(values, kind="stable")
    missing = np.cumsum(((1.0 - values) * numbers)[order])
    enough = int(np.searchsorted(missing, _SHORTFALL_OPENED * missing[-1])) + 1
    worst = min(_MAX_WORST, enough)
    others = random.permutation(order[worst:])[: max(_MIN_OTHERS, worst)]
    return {*order[:worst].tolist(), *others.tolist()}


class _TwoFilling:
    """Packs filled one after another from the sequences that are left, by groups (length, weight)."""

    def __init__(
        self,
        lengths: np.ndarray,
        weights: np.ndarray,
        counts: np.ndarray,
        limits: Tuple[int, int, int],
        rules: _Rules,
    ) -> None:
        self._S, self._C, self._depth = limits
        self._rules = rules
        self._lengths = lengths
        self._weights = weights
        self._left = counts  # changes as packs are filled
        self._hard = np.maximum(lengths / self._S, weights / self._C)
        present = np.flatnonzero(counts)
        self._order = present[np.argsort(-self._hard[present], kind="stable")]  # hardest first
        # The groups just below a key fit and fill one capacity best; of equal ones, the last fills the other best.
        self._keys = self._both_keys(lengths, weights)
        self._sorted = [present[np.argsort(keys[present], kind="stable")] for keys in self._keys]
        self._sums = np.array([counts @ lengths, counts @ weights, counts.sum()])
        self.work = 0  # sequences and pairs looked for
        self._list()

    def _both_keys(self, lengths: np.ndarray, weights: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Return keys that order by length and then weight, and by weight and then length."""
        by_length = lengths * (self._C + 1) + weights
        by_weight = weights * (self._S + 1) + lengths
        return by_length, by_weight

    def _list(self) -> None:
        """List the groups that are left, in each order."""
        self._order = self._order[self._left[self._order] > 0]
        self._softness = -self._hard[self._order]
        self._sorted = [order[self._left[order] > 0] for order in self._sorted]
        self._sorted_keys = [keys[order] for keys, order in zip(self._keys, self._sorted)]
        self._hardest = 0
        self._softest = len(self._order) - 1
        self._gone = 0  # groups of which none are left

    def _measure(self) -> None:
        """Measure the tokens and weight that each pack should hold, and how scarce each capacity is."""
        tokens, weight, number = self._sums.tolist()
        needed = np.array([tokens / self._S, weight / self._C])
        packs = max(needed.max(), number / self._depth)
        crowded = self._depth < _CROWDED * number / needed.max()
        self._target = np.array([tokens, weight]) / packs
        unused = 1 - needed / packs  # share of each capacity
        self._scarce = np.maximum(0.0, 1 - unused * _SCARCITY_RANGE)  # 0..1
        self._wanted = min(self._depth, round(number / packs)) if crowded else 0
        least_cost = _MIN_COST_CROWDED if crowded else _MIN_COST
        self._cost = np.maximum(self._scarce, least_cost) / (self._S, self._C)
        self._mean = float(self._sums[:2] @ self._cost) / number

    def packs(self) -> Packs:
        """Pack all sequences."""
        packs: Packs = []
        while True:
            while self._hardest < len(self._order) and not self._left[self._order[self._hardest]]:
                self._hardest += 1
            if self._hardest == len(self._order):
                return packs
            if self._gone > _GONE_SHARE * len(self._order):
                self._list()
            if len(packs) % _TARGET_PERIOD == 0:
                self._measure()
            pack = self._pack(int(self._order[self._hardest]))
            groups, numbers = np.unique(pack, return_counts=True)
            repeats = int((self._left[groups] // numbers).min())
            self._left[groups] -= repeats * numbers
            self._gone += int(np.count_nonzero(self._left[groups] == 0))
            tokens = self._lengths[groups] @ numbers
            weight = self._weights[groups] @ numbers
            sums = np.array([tokens, weight, numbers.sum()])
            self._sums -= repeats * sums
            strategy = np.repeat(groups, numbers).tolist()
            packs.append((tuple(strategy), repeats))

    def _pack(self, group: int) -> List[int]:
        """Return the groups of one pack with a sequence of this group; all of them stay among those that are left."""
        # While a pack is filled, its sequences are not among those that are left.
        self._pack_groups: List[int] = []
        self._tokens = self._S  # left of the pack, as is the weight
        self._weight = self._C
        self._add(group)
        self._add_soft()
        cost, pack = self._add_others()
        for member in self._pack_groups:
            self._left[member] += 1
        cost_without_pair = float(np.abs(self._missing()) @ self._cost)
        return self._pack_groups if cost_without_pair < cost else pack

    def _add_soft(self) -> None:
        """Add the softest sequences, until the pack has almost as many as it needs."""
        for _ in range(self._wanted - _LAST_SEATS):
            while self._softest and not self._left[self._order[self._softest]]:
                self._softest -= 1
            group = int(self._order[self._softest])
            if not len(self._fitting(np.array([group]))):
                break
            self._add(group)

    def _add_others(self) -> Tuple[float, List[int]]:
        """Add sequences until none fits; return the cost and the groups of the best pack that a pair completes."""
        cost = _NO_FIT
        pack = self._pack_groups
        candidates = self._order[:0]
        while len(self._pack_groups) < self._depth:
            candidates = self._fitting(candidates)
            if not len(candidates):
                candidates = self._candidates()
            if not len(candidates):
                break
            if self._pair_may_complete():
                pair_cost, pair = self._pair()
                if pair_cost < cost:
                    cost = pair_cost
                    pack = [*self._pack_groups, *pair]
                if cost <= self._rules.near:
                    break
            self._add(self._next(candidates))
        return cost, pack

    def _pair_may_complete(self) -> bool:
        """Return True if two more sequences may complete the pack."""
        number = len(self._pack_groups)
        if self._depth - number <= 2:
            return self._depth - number == 2
        room = self._tokens * self._cost[0] + self._weight * self._cost[1]
        return number + 2 >= self._wanted and bool(room <= _PAIRS_FROM * self._mean)

    def _add(self, group: int) -> None:
        self._pack_groups.append(group)
        self._left[group] -= 1
        self._tokens -= int(self._lengths[group])
        self._weight -= int(self._weights[group])
        self.work += 1

    def _missing(self) -> np.ndarray:
        """Return tokens and weight from what the pack holds to the target; below 0 if it holds more."""
        return self._target - (self._S - self._tokens, self._C - self._weight)

    def _fitting(self, groups: np.ndarray) -> np.ndarray:
        fits = self._left[groups] > 0
        fits &= self._lengths[groups] <= self._tokens
        fits &= self._weights[groups] <= self._weight
        return groups[fits]

    def _first_fitting(self) -> int:
        """Return the place of the hardest group that may fit."""
        most = max(self._tokens / self._S, self._weight / self._C)
        return max(self._hardest, int(np.searchsorted(self._softness, -most)))

    def _candidates(self) -> np.ndarray:
        """Return groups that fit, hardest first: the hardest and some of the others, or any if none of these fits."""
        start = self._first_fitting()
        stop = len(self._order)
        number = _HARDEST_LOOKED_AT
        if stop - start <= _HARDEST_LOOKED_AT + _OTHERS_LOOKED_AT:
            return self._fitting(self._order[start:])
        hardest = np.arange(start, start + number)
        places = np.concatenate([hardest, _evenly(start + number, stop, _OTHERS_LOOKED_AT)])
        candidates = self._fitting(self._order[places])
        while not len(candidates) and start < stop:
            candidates = self._fitting(self._order[start : start + number])
            start += number
            number *= 4
        return candidates

    def _next(self, candidates: np.ndarray) -> int:
        """Return the group that leaves the pack most balanced, or a harder group that is nearly as good.

        The rest of a scarce capacity counts up to the target, that of the other one up to the limit.
        """
        to_limit = np.array([self._tokens, self._weight], np.float64)
        to_target = np.maximum(self._missing(), to_limit / 2)
        room = self._scarce * to_target + (1 - self._scarce) * to_limit
        tokens = (room[0] - self._lengths[candidates]) / self._S
        weight_in_packs = self._target[0] / self._S / max(1e-9, self._target[1])
        weight = (room[1] - self._weights[candidates]) * weight_in_packs
        askew = (tokens - weight) / (np.abs(tokens) + np.abs(weight) + 1e-3)
        too_many_tokens = np.maximum(askew - self._rules.askew, 0)
        too_much_weight = np.maximum(-askew - self._rules.askew, 0)
        cost = self._scarce[0] * too_many_tokens + self._scarce[1] * too_much_weight
        cost -= self._rules.hard * self._hard[candidates]
        return int(candidates[cost.argmin()])

    def _pair(self) -> Tuple[float, List[int]]:
        """Return cost and groups of a pair that fills the pack: the hardest of the cheap pairs, or the cheapest."""
        self.work += 1
        first = self._first_of_pairs()
        if not len(first):
            return _NO_FIT, []
        tokens = self._tokens - self._lengths[first]
        weight = self._weight - self._weights[first]
        second = self._second_of_pairs(tokens, weight)
        tokens = tokens[:, None] - self._lengths[second]
        weight = weight[:, None] - self._weights[second]
        fits = (second >= 0) & (tokens >= 0) & (weight >= 0)
        fits &= self._left[second] > (second == first[:, None])

        # The target leaves some tokens and weight of the capacities unused.
        unused_tokens, unused_weight = (self._S, self._C) - self._target
        costs = self._cost[0] * np.abs(tokens - unused_tokens)
        costs += self._cost[1] * np.abs(weight - unused_weight)
        softer = np.minimum(self._hard[first][:, None], self._hard[second])
        ranks = np.where(costs <= self._rules.near, -softer, costs)
        best = int(np.where(fits, ranks, _NO_FIT).argmin())
        if not fits.flat[best]:
            return _NO_FIT, []
        row = best // second.shape[1]
        pair = [int(first[row]), int(second.flat[best])]
        return float(costs.flat[best]), pair

    def _first_of_pairs(self) -> np.ndarray:
        """Return groups for the first sequence of a pair: evenly from those of at least half the largest that fits."""
        start = self._first_fitting()
        stop = len(self._order)
        half = stop
        if start < stop:
            half = int(np.searchsorted(self._softness, self._softness[start] / 2, side="right"))
        end = min(stop, max(half, start + _FIRST_OF_PAIR))
        return self._fitting(self._order[_evenly(start, end, _FIRST_OF_PAIR)])

    def _second_of_pairs(self, tokens: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Return groups that fill best what each first sequence leaves, int64 [first, n]; -1 for none."""
        most = self._both_keys(tokens, weight)
        parts = []
        for keys, order, key in zip(self._sorted_keys, self._sorted, most):
            below = np.searchsorted(keys, key, side="right")
            places = below[:, None] - 1 - np.arange(_SECOND_OF_PAIR)
            groups = order[np.maximum(places, 0)]
            parts.append(np.where(places >= 0, groups, -1))
        return np.concatenate(parts, axis=1)


def _evenly(start: int, stop: int, most: int) -> np.ndarray:
    """Return at most this many places, evenly spaced."""
    number = min(most, stop - start)
    return start + np.arange(number) * (stop - start) // max(1, number)


def _deal(packs: Packs, group: np.ndarray, lengths: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Return pack and slot of each sequence, int64 [n], the longest first; group: of each sequence, int [n]."""
    groups_of_packs: List[Tuple[int, ...]] = []
    for strategy, repeats in packs:
        groups_of_packs += [strategy] * repeats
    depths_of_packs = [len(strategy) for strategy in groups_of_packs]
    groups = np.fromiter(chain.from_iterable(groups_of_packs), np.int64)
    pack_of_place = np.repeat(np.arange(len(groups_of_packs)), depths_of_packs)

    by_group = np.argsort(groups, kind="stable")
    sequences_by_group = np.argsort(group.ravel(), kind="stable")
    pack = np.empty(len(lengths), np.int64)
    pack[sequences_by_group] = pack_of_place[by_group]

    return pack, places(pack, -lengths)


def places(pack: np.ndarray, within: np.ndarray) -> np.ndarray:
    """Return the place of each sequence in its pack, int64 [n], in the order of `within`, and then as given."""
    order = np.lexsort((within, pack))
    first = np.searchsorted(pack[order], pack)
    place = np.empty(len(pack), np.int64)
    place[order] = np.arange(len(pack))
    return place - first
