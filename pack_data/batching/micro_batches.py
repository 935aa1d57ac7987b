"""Micro-batches of one update over ranks: the same number on every rank, within a token budget, with level work.

    plan = micro_batches(lengths, ranks=8, max_tokens=16384)
    for indices in plan.of[rank]:  # plan.steps of them on every rank
        loss_of(indices).backward()

The optimal packer fills as few micro-batches as it can, and its certificate bounds their number. Packs are halved until
every rank has equally many micro-batches. They are dealt to the ranks, the most work first, and sequences are exchanged
until the slowest rank gains no more.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from itertools import chain
from typing import Any, List, Optional, Tuple

import numpy as np

from pack_data.lengths.overlong import fit
from pack_data.packing.histogram import unfit
from pack_data.packing.packing import Packing
from pack_data.reading import hugging_face
from pack_data.reading.fields import whole_number
from pack_data.reading.words import counted
from pack_data.store.sequences import LONGEST

_Bins = List[List[int]]

# Total work is kept below this, so that sums fit int64.
_MOST_WORK = 1 << 62
# If a rate is a float, work is counted in units of a power of two, so that the total has this many bits, less than a
# float's 53.
_FLOAT_BITS = 52
# Sequences of a side that an exchange chooses from: 16,384 pairs take a fifth of a millisecond.
_MOST_CHOICES = 128
# Lighter sides that are tried for an exchange; further ones closed no gap in 300 random cases.
_PARTNERS = 16
# Exchanges at most, for each side.
_ROUNDS_PER_SIDE = 64


@dataclass(frozen=True, eq=False)
class MicroBatches:
    """The micro-batches of one update.

    Attributes:
        of: indices of the sequences of each micro-batch, `of[rank][step]`; each of 0..n - 1 occurs once.
        least_steps: no plan within the budget has fewer steps; proved by `packing`.
        slowest: work of the slowest rank; if synchronised, of the slowest micro-batch of each step, added up.
        least_slowest: no plan has less, whatever its steps.
        packing: packs of max_tokens; `prove(packing)` checks its lower bound, and least_steps is that over ranks.
    """

    of: List[List[np.ndarray]]
    least_steps: int
    slowest: float
    least_slowest: float
    packing: Packing

    @property
    def steps(self) -> int:
        """Micro-batches of each rank."""
        return len(self.of[0])

    @property
    def empty(self) -> int:
        """Micro-batches without a sequence; 0 unless there are fewer sequences than micro-batches."""
        sizes = [len(indices) for indices in chain.from_iterable(self.of)]
        return sizes.count(0)

    def __repr__(self) -> str:
        steps = counted(self.steps, "step")
        ranks = counted(len(self.of), "rank")
        slowest, least = (f"{round(work, 2):,}" for work in (self.slowest, self.least_slowest))
        return (
            f"MicroBatches({steps} on {ranks}, at least {self.least_steps}; slowest {slowest}, at least {least}: "
            ".of[rank][step], .packing)"
        )


def micro_batches(
    lengths: Any,
    *,
    ranks: int,
    max_tokens: int,
    max_sequences: Optional[int] = None,
    token_work: float = 1,
    square_work: float = 0,
    synchronised: bool = False,
) -> MicroBatches:
    """Share out the sequences of one update: equally many micro-batches on every rank, and level work.

    The result depends on the arguments only, so each rank computes the same plan from the same lengths without
    communication.

    Args:
        lengths: tokens of each sequence, whole numbers [n].
        ranks: processes that share the update.
        max_tokens: tokens of a micro-batch.
        max_sequences: sequences of a micro-batch; None for unlimited.
        token_work: work per token. The unit does not matter: a transformer of hidden size h takes about
            `token_work=6 * h, square_work=1`. With whole numbers the arithmetic is exact.
        square_work: work per squared length of a sequence.
        synchronised: True if ranks wait for each other at every micro-batch, as with FSDP, and not only at the end of
            the update. The slowest micro-batch of each step then counts.

    Returns:
        The micro-batches of every rank, with proven bounds on their number and on the work of the slowest rank.

    Raises:
        ValueError: sequences are longer than max_tokens, or an argument is out of range.
    """
    from pack_data.pack_lengths import pack  # it loads the solver

    ranks = whole_number("ranks", ranks, least=1)
    max_tokens = whole_number("max_tokens", max_tokens, least=1, most=LONGEST)
    if max_sequences is not None:
        max_sequences = whole_number("max_sequences", max_sequences, least=1)
    tokens = checked_lengths(lengths, max_tokens)
    work, unit = _work_of_each(tokens, token_work, square_work)

    packed = pack(tokens, max_sequence_length=max_tokens, max_sequences_per_pack=max_sequences)
    steps = -(-packed.packing.packs // ranks)
    batches = _halved([members.tolist() for members in packed.bins], steps * ranks, work)
    level = _Levelling(tokens, work, max_tokens, max_sequences, batches)
    if synchronised:
        level.exchange([[batch] for batch in range(len(batches))], only_slowest=False)
        sides = _step_by_step(level.work_of, ranks)
    else:
        sides = dealt(level.work_of, ranks, steps)
        level.exchange(sides, only_slowest=True)
        sides = [sorted(side, key=lambda batch: -level.work_of[batch]) for side in sides]

    work_of = level.work_of[np.array(sides, np.int64).reshape(ranks, steps)]
    members = [np.array(sorted(batch), np.int64) for batch in batches]
    return MicroBatches(
        of=[[members[batch] for batch in side] for side in sides],
        least_steps=-(-(packed.packing.lower_bound or 0) // ranks),
        slowest=_slowest(work_of, synchronised) * unit,
        least_slowest=_least_slowest(tokens, work, ranks, max_tokens, synchronised) * unit,
        packing=packed.packing,
    )


def checked_lengths(lengths: Any, max_tokens: int) -> np.ndarray:
    """Return the lengths as int64 [n]; ValueError lists those that no micro-batch can hold."""
    from pack_data.pack_lengths import one_each

    if hugging_face.is_data_set(lengths):
        lengths = hugging_face.lengths_of(lengths)
    array = one_each("lengths", lengths)
    if array.size and array.dtype.kind in "iu":
        problem = unfit(array, max_tokens, "max_tokens")
        if problem:
            raise ValueError(f"{problem}; cut or drop them, or raise max_tokens")
    return fit(array, max_tokens).lengths.astype(np.int64)


def _work_of_each(
    tokens: np.ndarray, token_work: float, square_work: float
) -> Tuple[np.ndarray, float]:
    """Return the work of each sequence in whole units, int64 [n], and the unit: 1 unless a rate is a float."""
    rates = {"token_work": token_work, "square_work": square_work}
    for name, rate in rates.items():
        if not isinstance(rate, float):
            rates[name] = whole_number(name, rate, least=0)
        elif not 0 <= rate < math.inf:
            raise ValueError(f"{name} = {rate}; must be a number of at least 0")
    token_rate, square_rate = rates.values()
    is_exact = all(isinstance(rate, int) for rate in rates.values())
    most_per_token = token_rate + square_rate * int(tokens.max(initial=0))
    most_work = int(tokens.sum()) * most_per_token
    if most_work >= (_MOST_WORK if is_exact else math.inf):
        raise ValueError(
            f"token_work = {token_work}, square_work = {square_work}: the work of all sequences exceeds 64-bit "
            "arithmetic; divide both by a common factor"
        )
    if is_exact:
        return token_rate * tokens + square_rate * tokens**2, 1
    unit = 2.0 ** (math.frexp(most_work)[1] - _FLOAT_BITS)
    squares = tokens.astype(np.float64) ** 2
    work = token_rate * tokens + square_rate * squares
    return np.rint(work / unit).astype(np.int64), unit


def _halved(bins: _Bins, number: int, work: np.ndarray) -> _Bins:
    """Halve the bins of most work until there are `number`; single sequences cannot be halved, so some may be empty."""

    def entry(place: int) -> Tuple[int, int]:
        return -int(work[bins[place]].sum()), place

    heap = list(map(entry, range(len(bins))))
    heapq.heapify(heap)
    while heap and len(bins) < number:
        _, place = heapq.heappop(heap)
        members = sorted(bins[place], key=lambda index: (-work[index], index))
        if len(members) < 2:
            continue
        bins[place] = members[::2]
        bins.append(members[1::2])
        heapq.heappush(heap, entry(place))
        heapq.heappush(heap, entry(len(bins) - 1))
    return bins + [[] for _ in range(number - len(bins))]


def dealt(amounts: np.ndarray, ranks: int, most: int) -> _Bins:
    """Deal items to ranks, at most `most` to each: the largest amount first, to the rank that has least.

    Source: the longest-processing-time rule of Graham, "Bounds on multiprocessing timing anomalies" (1969).

    Args:
        amounts: integers [items].
        ranks: number of ranks, from 1.
        most: items that a rank takes; ranks * most is at least the number of items.

    Returns:
        The numbers of the items of each rank.
    """
    shares: _Bins = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for item in np.argsort(-amounts, kind="stable").tolist():
        load, rank = heapq.heappop(heap)
        shares[rank].append(item)
        if len(shares[rank]) < most:
            heapq.heappush(heap, (load + int(amounts[item]), rank))
    return shares


def _step_by_step(work_of: np.ndarray, ranks: int) -> _Bins:
    """Deal micro-batches of similar work to each step; the most work of a step to the rank that has least."""
    order = np.argsort(-work_of, kind="stable").reshape(-1, ranks)
    load = np.zeros(ranks, np.int64)
    sides: _Bins = [[] for _ in range(ranks)]
    for step in order:
        least_first = np.argsort(load, kind="stable").tolist()
        for batch, rank in zip(step.tolist(), least_first):
            sides[rank].append(batch)
            load[rank] += work_of[batch]
    return sides


def _slowest(work_of: np.ndarray, synchronised: bool) -> int:
    """Return the work of the slowest rank, or of the slowest of each step, added up; work_of: [ranks, steps]."""
    if synchronised:
        slowest_of_steps = work_of.max(axis=0)
        return int(slowest_of_steps.sum())
    work_of_ranks = work_of.sum(axis=1)
    return int(work_of_ranks.max())


def _least_slowest(
    tokens: np.ndarray, work: np.ndarray, ranks: int, max_tokens: int, synchronised: bool
) -> int:
    """Return a bound on the work of the slowest rank, or of the slowest micro-batch of each step, added up.

    Some rank has at least the mean work. For each j, some rank has j + 1 of the j * ranks + 1 sequences of most work,
    so at least the j + 1 smallest of them. If ranks wait at every step, sequences of more than half a micro-batch need
    micro-batches of their own, and their steps take least if sequences of similar work share one.
    """
    most_first = -np.sort(-work)
    sums = np.concatenate([[0], np.cumsum(most_first)])
    firsts = np.arange(0, len(work), ranks)  # j * ranks
    number = np.arange(len(firsts))
    several = sums[firsts + 1] - sums[firsts - number]
    total = int(sums[-1])
    mean = -(-total // ranks)
    least = max(mean, int(several.max(initial=0)))
    if synchronised:
        alone = -np.sort(-work[2 * tokens > max_tokens])
        least = max(least, int(alone[::ranks].sum()))
    return least


class _Levelling:
    """Exchanges between sides: the micro-batches of one rank each, or single micro-batches."""

    def __init__(
        self,
        tokens: np.ndarray,
        work: np.ndarray,
        max_tokens: int,
        max_sequences: Optional[int],
        batches: _Bins,
    ) -> None:
        # Giving a sequence away for nothing is an exchange for a sequence without tokens, which has the last index.
        self._nothing = len(tokens)
        self._tokens = np.append(tokens, 0)
        self._work = np.append(work, 0)
        self._max_tokens = max_tokens
        self._max_sequences = max_sequences or len(tokens)
        self._batches = batches
        self._count_of = np.array([len(members) for members in batches], np.int64)
        self._tokens_of = np.array([tokens[members].sum() for members in batches], np.int64)
        self.work_of = np.array([work[members].sum() for members in batches], np.int64)

    def exchange(self, sides: _Bins, only_slowest: bool) -> None:
        """Lower the side of most work by exchanges with lighter ones; then the next, unless only the slowest counts."""
        load = np.array([self.work_of[side].sum() for side in sides], np.int64)
        total = int(load.sum())
        mean = -(-total // max(1, len(sides)))
        is_stuck = np.zeros(len(sides), bool)
        for _ in range(_ROUNDS_PER_SIDE * len(sides)):
            heavy = int(np.where(is_stuck, -1, load).argmax())
            if is_stuck[heavy] or load[heavy] <= mean:
                return
            is_stuck[heavy] = True
            for light in np.argsort(load, kind="stable")[:_PARTNERS].tolist():
                difference = int(load[heavy] - load[light])
                if self._exchanged(sides[heavy], sides[light], difference):
                    pair = [heavy, light]
                    load[pair] = [self.work_of[sides[side]].sum() for side in pair]
                    is_stuck[pair] = False
                    break
            if is_stuck[heavy] and only_slowest:
                return

    def _exchanged(self, heavy: List[int], light: List[int], difference: int) -> bool:
        """Make the exchange that brings two sides nearest; return False if there is none."""
        given, source = self._choices(heavy)
        taken, target = self._choices(light)
        taken = np.append(taken, np.full(len(light), self._nothing))
        target = np.append(target, light)
        fits = self._tokens[taken] <= self._room(given, source)[:, None]
        fits &= self._tokens[given][:, None] <= self._room(taken, target)
        leaves_some = self._count_of[source] > 1
        takes_more = self._count_of[target] < self._max_sequences
        fits &= (taken < self._nothing) | (leaves_some[:, None] & takes_more)
        gain = self._work[given][:, None] - self._work[taken]
        distance = np.where(fits, np.abs(2 * gain - difference), difference)
        nearest = int(distance.min(initial=difference))

        # Whole micro-batches can always change sides.
        batch_gain = self.work_of[heavy][:, None] - self.work_of[light]
        batch_distance = np.abs(2 * batch_gain - difference)
        if len(heavy) > 1 and batch_distance.min() < nearest:
            place, other = np.unravel_index(batch_distance.argmin(), batch_distance.shape)
            heavy[place], light[other] = light[other], heavy[place]
        elif nearest < difference:
            place, other = np.unravel_index(distance.argmin(), distance.shape)
            self._move(int(given[place]), source[place], target[other])
            self._move(int(taken[other]), target[other], source[place])
        else:
            return False
        return True

    def _choices(self, side: List[int]) -> Tuple[np.ndarray, np.ndarray]:
        """Return sequences of a side and the micro-batch of each; some of them, evenly spaced, if there are many."""
        members = [self._batches[batch] for batch in side]
        index = np.fromiter(chain.from_iterable(members), np.int64)
        batch = np.repeat(side, self._count_of[side])
        stride = len(index) // _MOST_CHOICES + 1
        return index[::stride], batch[::stride]

    def _room(self, index: np.ndarray, batch: np.ndarray) -> np.ndarray:
        """Return the tokens that can come in the place of each sequence."""
        return self._max_tokens - self._tokens_of[batch] + self._tokens[index]

    def _move(self, index: int, source: int, target: int) -> None:
        if index == self._nothing:
            return
        self._batches[source].remove(index)
        self._batches[target].append(index)
        amounts = ((self._count_of, 1), (self._tokens_of, self._tokens[index]))
        for amount_of, amount in (*amounts, (self.work_of, self._work[index])):
            amount_of[source] -= amount
            amount_of[target] += amount
