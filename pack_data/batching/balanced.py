"""Batches of packed rows in which the ranks of each step take equally long.

The cost of a row is linear in its tokens and quadratic in each of its sequences' lengths; a step takes as long as the
rank with the largest sum. Rows of nearly equal cost share a step. They are packed without the shortest sequences, a few
percent of all tokens, or more where that is not enough; these then level the ranks of each step; the rest is evened out
by exchanges of up to two sequences. No row gets more tokens than it may have. (Partitions of the costs alone, as by the
differencing method of Karmarkar and Karp, do not see that limit.)
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

# Shares of the tokens that are kept back, in the shortest sequences. The next one is tried where the longest ranks take
# ENOUGH longer than the mean: where few sequences cost most of a step, only many short ones level it.
LEVELLING, ENOUGH = (0.03, 0.12), 1e-3
_FREE = 0.004  # share of a row that stays free for exchanges
# Exchanges end where the longest rank is so near its lower bound, or after so many tries in a row without a gain.
_NEAR, _PATIENCE = 5e-4, 40
# Sequences of a row that an exchange chooses from, and ranks that are asked for room before a sequence is left.
_CHOICE, _ASKED = 16, 8


@dataclass(frozen=True)
class StepCost:
    """Cost of a sequence: linear * tokens + quadratic * tokens**2, in any unit. ValueError unless one is above 0."""

    linear: float
    quadratic: float

    def __post_init__(self) -> None:
        values = (self.linear, self.quadratic)
        if not all(np.isfinite(value) and value >= 0 for value in values) or not any(values):
            raise ValueError(
                f"cost is {self.linear} a token and {self.quadratic} a token squared; give finite numbers of at least "
                "0, one of them above 0"
            )

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """float64, the cost of each sequence."""
        tokens = np.asarray(lengths, np.float64)
        costs: np.ndarray = self.linear * tokens + self.quadratic * tokens * tokens
        return costs


def lower_bound(costs: np.ndarray, ranks: int) -> float:
    """The least that the longest of `ranks` ranks can have of these sequences: the mean, or one sequence alone."""
    return max(float(costs.sum()) / ranks, float(costs.max(initial=0.0)))


def step_bound(lengths: np.ndarray, cost: StepCost, ranks: int, slots: int) -> float:
    """The least that the longest of `ranks` ranks of `slots` tokens each can have of these sequences.

    Beside `lower_bound`: the k longest sequences are on at most k ranks, and these also have the tokens for which the
    other ranks have no slots.
    """
    longest = np.sort(lengths)[::-1][:ranks].astype(np.float64)
    count, tokens = np.arange(1, len(longest) + 1), np.cumsum(longest)
    quadratic, total = cost.quadratic * np.cumsum(longest**2), float(lengths.sum())
    more = cost.linear * np.maximum(0.0, total - (ranks - count) * slots - tokens)
    # On fewer than k ranks the mean of these is no lower, only if their squares outweigh the free slots of all ranks.
    more[quadratic < cost.linear * (ranks * slots - total)] = 0.0
    alone = (quadratic + cost.linear * tokens + more) / count
    return max(lower_bound(cost.of(lengths), ranks), float(alone.max(initial=0.0)))


class _Step:
    """The rows of one step while they are levelled. Row i belongs to rank `rank[i]`."""

    def __init__(
        self, rows: Sequence[np.ndarray], ranks: int, most: int, lengths: np.ndarray, costs: np.ndarray
    ) -> None:
        """Gives the rows to the ranks, at most `most` to each: the most expensive first, to the rank that has least."""
        self.ranks, self.rows, self._lengths, self._costs = ranks, list(rows), lengths, costs
        self.tokens = np.array([int(lengths[row].sum()) for row in rows], np.int64)
        work = np.array([float(costs[row].sum()) for row in rows])
        self.load = np.zeros(ranks)
        self.rank = np.zeros(len(rows), np.int64)
        held = [0] * ranks
        for number in np.argsort(-work, kind="stable").tolist():
            rank = min((rank for rank in range(ranks) if held[rank] < most), key=self.load.__getitem__)
            self.rank[number] = rank
            self.load[rank] += work[number]
            held[rank] += 1
        self.of_rank = [np.flatnonzero(self.rank == rank) for rank in range(ranks)]

    def batches(self) -> List[List[List[int]]]:
        """For each rank its rows, as numbers of sequences; those that hold some."""
        return [[self.rows[row].tolist() for row in own if len(self.rows[row])] for own in self.of_rank]

    def level(self, numbers: np.ndarray, slots: int) -> np.ndarray:
        """Puts further sequences, the longest first, where the load is least and the row has room. Returns the rest."""
        left: List[int] = []
        more: List[List[int]] = [[] for _ in self.rows]
        # Lists: single numbers of arrays take ten times as long.
        tokens, loads, rows = self.tokens.tolist(), self.load.tolist(), [own.tolist() for own in self.of_rank]
        heap = [(load, rank) for rank, load in enumerate(loads) if rows[rank]]
        heapq.heapify(heap)
        numbers = numbers[np.argsort(-self._lengths[numbers], kind="stable")]
        columns = (numbers, self._lengths[numbers], self._costs[numbers])
        without_room = 0  # tokens of the last sequence that found none: another of as many finds none either
        for number, length, cost in zip(*(column.tolist() for column in columns)):
            if length == without_room:
                left.append(number)
                continue
            found = False
            asked: List[Tuple[float, int]] = []
            while heap and not found and len(asked) < _ASKED:
                load, rank = heapq.heappop(heap)
                row = min(rows[rank], key=tokens.__getitem__)
                found = tokens[row] + length <= slots
                if found:
                    tokens[row] += length
                    more[row].append(number)
                    load += cost
                    loads[rank] = load
                asked.append((load, rank))
            for entry in asked:
                heapq.heappush(heap, entry)
            if not found:
                left.append(number)
                without_room = length
        self.tokens, self.load = np.array(tokens, np.int64), np.array(loads)
        for row, numbers_of_row in enumerate(more):
            if numbers_of_row:
                self.rows[row] = np.concatenate([self.rows[row], numbers_of_row])
        return np.array(left, np.int64)

    def exchange(self, slots: int, rng: np.random.Generator) -> None:
        """Brings the longest rank down: it and the shortest exchange up to two sequences of a row of each."""
        if not self.rows:
            return
        bound = lower_bound(self._costs[np.concatenate(self.rows)], self.ranks)
        holding = np.flatnonzero([len(own) > 0 for own in self.of_rank])
        failed = 0
        while failed < _PATIENCE:
            heavy = int(self.load.argmax())
            if self.load[heavy] <= bound * (1 + _NEAR):
                return
            # After a try without a gain another partner and other rows are drawn.
            near = holding[np.argsort(self.load[holding], kind="stable")[: 1 + failed]]
            light = int(near[rng.integers(len(near))])
            one, other = (int(own[rng.integers(len(own))]) for own in (self.of_rank[heavy], self.of_rank[light]))
            if light != heavy and self._exchange(one, other, heavy, light, slots, rng):
                failed = 0
            else:
                failed += 1

    def _exchange(self, one: int, other: int, heavy: int, light: int, slots: int, rng: np.random.Generator) -> bool:
        """The exchange of these two rows that brings their ranks nearest to each other; whether there is one."""
        give, take = self._parts(one, rng), self._parts(other, rng)
        order = np.argsort(take.tokens, kind="stable")
        sums = take.tokens[order]
        # Both rows keep to their slots where the taken part has from `first` to before `last` tokens.
        first = np.searchsorted(sums, give.tokens - (slots - int(self.tokens[other])))
        last = np.searchsorted(sums, give.tokens + (slots - int(self.tokens[one])), side="right")
        count = last - first
        if not count.any():
            return False
        given = np.repeat(np.arange(len(count)), count)
        taken = order[np.repeat(first - (np.cumsum(count) - count), count) + np.arange(len(given))]
        half = (self.load[heavy] - self.load[light]) / 2
        moved = give.costs[given] - take.costs[taken]
        best = int(np.argmin(np.abs(moved - half)))
        if not 0 < moved[best] < 2 * half * (1 - 1e-9):
            return False
        out, back = give.members(int(given[best])), take.members(int(taken[best]))
        own, theirs = self.rows[one], self.rows[other]
        self.rows[one] = np.concatenate([np.delete(own, out), theirs[back]])
        self.rows[other] = np.concatenate([np.delete(theirs, back), own[out]])
        tokens = int(give.tokens[given[best]] - take.tokens[taken[best]])
        self.tokens[one] -= tokens
        self.tokens[other] += tokens
        self.load[heavy] -= moved[best]
        self.load[light] += moved[best]
        return True

    def _parts(self, row: int, rng: np.random.Generator) -> _RowParts:
        numbers = self.rows[row]
        size = len(numbers)
        if size <= _CHOICE:
            some = np.arange(size)
        else:  # evenly spaced places, from a place drawn at random
            some = (int(rng.integers(size)) + np.arange(_CHOICE) * (size // _CHOICE)) % size
        left, right = _PAIRS[len(some)]
        pairs = np.append(some, size)[left], np.append(some, size)[right]
        tokens, costs = np.append(self._lengths[numbers], 0), np.append(self._costs[numbers], 0.0)
        return _RowParts(pairs[0], pairs[1], tokens[pairs[0]] + tokens[pairs[1]], costs[pairs[0]] + costs[pairs[1]])


def _parts_of(size: int) -> Tuple[np.ndarray, np.ndarray]:
    """Of `size` members the part of none, those of one and those of two; the number `size` stands for none."""
    first, second = np.triu_indices(size, 1)
    none = np.full(size + 1, size)
    return np.concatenate([[size], np.arange(size), first]), np.concatenate([none, second])


_PAIRS = [_parts_of(size) for size in range(_CHOICE + 1)]


class _RowParts(NamedTuple):
    """Parts of no, one or two sequences of a row, by their places in it; a place behind the last is none."""

    first: np.ndarray
    second: np.ndarray
    tokens: np.ndarray
    costs: np.ndarray

    def members(self, part: int) -> List[int]:
        # Part 0 is the empty one; a part has its absent place in `second`, and the first part in both.
        absent = int(self.first[0])
        return [place for place in (int(self.first[part]), int(self.second[part])) if place != absent]


def balanced_batches(
    lengths: np.ndarray,
    cost: StepCost,
    max_sequence_length: int,
    *,
    batch_size: int,
    ranks: int,
    levelling: float = LEVELLING[0],
    rng: np.random.Generator,
    pack: Callable[[np.ndarray, int], List[np.ndarray]],
) -> List[List[List[int]]]:
    """The example numbers of each row of each batch; batch number t * ranks + r is step t of rank r.

    lengths: int64 [examples], 1 to max_sequence_length (S). A batch has at most batch_size rows of at most S tokens.
    levelling: share of the tokens that is kept back. pack: rows of the examples with these lengths, of at most so many
    slots; called with lengths and slots.
    """
    costs, slots = cost.of(lengths), max_sequence_length
    order = np.argsort(lengths, kind="stable")
    kept_back = order[: int(np.searchsorted(np.cumsum(lengths[order]), levelling * int(lengths.sum())))]
    coarse = np.sort(order[len(kept_back) :])
    room = max(1, int(slots * (1 - levelling - _FREE)))
    # A sequence that is longer than the others' rows has a row of its own.
    alone = coarse[lengths[coarse] > room]
    together = coarse[lengths[coarse] <= room]
    rows = [together[row] for row in pack(lengths[together], room)] if len(together) else []
    rows += [np.array([number]) for number in alone.tolist()]
    if not rows:  # a few short sequences
        rows, kept_back = _first_fit(kept_back, lengths, slots), kept_back[:0]

    steps = _steps(np.array([costs[row].sum() for row in rows]), batch_size, ranks, rng)
    free = [max(0, sum(slots - int(lengths[rows[row]].sum()) for row in step)) for step in steps]
    shares = np.cumsum(free) / max(1, sum(free)) * int(lengths[kept_back].sum())
    kept_back = rng.permutation(kept_back)
    cuts = np.searchsorted(np.cumsum(lengths[kept_back]), shares, side="right")

    batches: List[List[List[int]]] = []
    rest = np.zeros(0, np.int64)
    begin = 0
    for step, end in zip(steps[:-1], cuts.tolist()):
        more = np.concatenate([kept_back[begin:end], rest])
        spread = _spread([rows[row] for row in step], more, ranks, batch_size, lengths, costs, slots)
        state = spread or _Step([rows[row] for row in step], ranks, batch_size, lengths, costs)
        rest = more[:0] if spread else state.level(more, slots)
        state.exchange(slots, rng)
        batches += state.batches()
        begin = max(begin, end)
    # The last step takes what is left; what has no room in its rows has rows of its own, there and in further steps.
    state = _Step([rows[row] for row in steps[-1]], ranks, batch_size, lengths, costs)
    rest = state.level(np.concatenate([kept_back[begin:], rest]), slots)
    left = [*state.rows, *_first_fit(rest, lengths, slots)]
    for at in range(0, len(left), ranks * batch_size):
        given = left[at : at + ranks * batch_size]
        state = _spread(given, rest[:0], ranks, batch_size, lengths, costs, slots) or _Step(
            given, ranks, batch_size, lengths, costs
        )
        state.exchange(slots, rng)
        batches += state.batches()
    return batches


def _spread(
    rows: Sequence[np.ndarray],
    more: np.ndarray,
    ranks: int,
    most: int,
    lengths: np.ndarray,
    costs: np.ndarray,
    slots: int,
) -> Optional[_Step]:
    """The sequences of rows that are no whole number a rank, one by one; None where that does not fit, or is whole."""
    if not rows or len(rows) % ranks == 0:
        return None
    state = _Step([np.zeros(0, np.int64)] * (ranks * most), ranks, most, lengths, costs)
    return None if len(state.level(np.concatenate([*rows, more]), slots)) else state


def _steps(work: np.ndarray, batch_size: int, ranks: int, rng: np.random.Generator) -> List[List[int]]:
    """Rows to steps: sorted by work, in groups of one row a rank; each step gets one of the next groups, at random."""
    groups = np.split(np.argsort(-work, kind="stable"), range(ranks, len(work), ranks))
    count = -(-len(work) // (batch_size * ranks))
    steps: List[List[int]] = [[] for _ in range(count)]
    for at in range(0, len(groups), count):
        for step, group in zip(rng.permutation(count).tolist(), groups[at : at + count]):
            steps[step] += group.tolist()
    # A step with too few rows for all ranks comes last.
    return sorted(steps, key=lambda step: len(step) < batch_size * ranks)


def _first_fit(numbers: np.ndarray, lengths: np.ndarray, slots: int) -> List[np.ndarray]:
    """Rows of these sequences, the longest first, each in the first row that has room."""
    rows: List[List[int]] = []
    free = np.zeros(0, np.int64)
    for number in numbers[np.argsort(-lengths[numbers], kind="stable")].tolist():
        fits = np.flatnonzero(free >= lengths[number])
        if not len(fits):
            rows.append([])
            free = np.append(free, slots)
        row = int(fits[0]) if len(fits) else len(rows) - 1
        rows[row].append(number)
        free[row] -= lengths[number]
    return [np.array(row) for row in rows]


def karmarkar_karp(costs: Sequence[float], ranks: int) -> List[List[int]]:
    """The differencing method for `ranks` parts (Karmarkar and Karp, 1982): numbers of the costs of each part.

    It knows nothing of tokens. It stands here for comparison.
    """
    heap: List[Tuple[float, int, List[Tuple[float, List[int]]]]] = [
        (-cost, number, [(0.0, [])] * (ranks - 1) + [(cost, [number])]) for number, cost in enumerate(costs)
    ]
    heapq.heapify(heap)
    count = len(heap)
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        sums = sorted((a + b, first + second) for (a, first), (b, second) in zip(one, reversed(other)))
        least = sums[0][0]
        count += 1
        heapq.heappush(heap, (least - sums[-1][0], count, [(total - least, numbers) for total, numbers in sums]))
    return [numbers for _, numbers in heap[0][2]] if heap else [[] for _ in range(ranks)]
