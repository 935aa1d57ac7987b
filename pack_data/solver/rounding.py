"""Whole packs from a fractional packing: round down, solve again for the sequences that are left, and repeat."""

from __future__ import annotations

from typing import Callable, Dict, List, Optional, Tuple

import numpy as np

from pack_data.packing.histogram import LengthHistogram
from pack_data.solver.column_generation import Relaxation, relax
from pack_data.solver.fit_decreasing import fit_decreasing

Packs = List[Tuple[Tuple[int, ...], int]]  # (lengths of a pack, packs like it)


def fill(strategies: np.ndarray, repeats: np.ndarray, counts: np.ndarray) -> Tuple[Packs, np.ndarray]:
    """Puts each sequence into a free slot of its length or, if there is none, of the next longer length.

    strategies int [n, depth]: slot lengths, 0 = no slot; repeats int [n]; counts int [S + 1]: sequences to place.
    Returns the packs, without slots that stayed empty, and the counts of the sequences without a slot.
    """
    left = counts.copy()
    used = repeats > 0
    strategies, repeats = strategies[used], repeats[used]
    rows, columns = np.nonzero(strategies)
    slot_lengths = strategies[rows, columns]
    order = np.argsort(-slot_lengths, kind="stable")
    slots = list(zip(slot_lengths[order].tolist(), rows[order].tolist(), columns[order].tolist()))
    runs: Dict[Tuple[int, int], List[Tuple[int, int]]] = {}  # (row, column) -> (length, packs) in turn
    free: List[List[int]] = []  # [row, column, packs], the shortest slot last
    next_slot = 0
    for length in np.flatnonzero(left)[::-1].tolist():
        while next_slot < len(slots) and slots[next_slot][0] >= length:
            _, row, column = slots[next_slot]
            free.append([row, column, int(repeats[row])])
            next_slot += 1
        wanted = int(left[length])
        while wanted and free:
            row, column, packs = free[-1]
            placed = min(packs, wanted)
            runs.setdefault((row, column), []).append((length, placed))
            wanted -= placed
            if placed == packs:
                free.pop()
            else:
                free[-1][2] -= placed
        left[length] = wanted
    contents: List[List[List[Tuple[int, int]]]] = [[] for _ in repeats]
    for (row, _), run in runs.items():
        contents[row].append(run)
    packs_made: Packs = []
    for row, total in enumerate(repeats.tolist()):
        packs_made += merge_runs(contents[row], total)
    return packs_made, left


def follow(
    strategies: np.ndarray, repeats: np.ndarray, counts: np.ndarray, prices: np.ndarray, least: float
) -> Tuple[Packs, np.ndarray]:
    """Makes packs like these strategies, where the strategies fit the sequences in total but not length by length.

    Each slot but the last takes the sequences nearest to it in rank; short ones in one slot meet long ones in the next.
    The last slot takes the length that gives the pack the total of its strategy. Only packs worth at least `least` are
    made; prices [S + 1] by length. Returns them and the counts of the sequences left.
    """
    S = len(counts) - 1
    left = counts.copy()
    packs: Packs = []
    for index in np.argsort(-repeats, kind="stable").tolist():
        slots = strategies[index][strategies[index] > 0].tolist()
        wanted = min(int(repeats[index]), int(left.sum()) // len(slots))
        if not wanted:
            continue
        runs: List[List[Tuple[int, int]]] = []
        for position, length in enumerate(slots[:-1]):
            run = _nearest_in_rank(left, length, wanted)
            for near, count in run:
                left[near] -= count
            runs.append(run[::-1] if position % 2 else run)
        for held, count in merge_runs(runs, wanted) if runs else [((), wanted)]:
            room = S - sum(held)
            worth = prices[list(held)].sum()
            while count:
                fitting = np.flatnonzero(left[: max(0, min(room, sum(slots) - sum(held))) + 1])
                if not len(fitting) or worth + prices[fitting[-1]] < least:
                    fitting = np.flatnonzero(left[: max(0, room) + 1])
                    if not len(fitting) or worth + prices[fitting[-1]] < least:
                        break
                last = int(fitting[-1])
                packed = min(count, int(left[last]))
                packs.append((held + (last,), packed))
                left[last] -= packed
                count -= packed
            for length in held:
                left[length] += count
    return packs, left


def _nearest_in_rank(counts: np.ndarray, length: int, wanted: int) -> List[Tuple[int, int]]:
    """The `wanted` sequences nearest in rank to the middle of those of this length: (length, how many), ascending."""
    below = np.cumsum(counts)
    middle = (int(below[length - 1]) + int(below[length])) // 2
    start = max(0, min(middle - wanted // 2, int(below[-1]) - wanted))
    first = int(np.searchsorted(below, start, side="right"))
    last = int(np.searchsorted(below, start + wanted, side="left"))
    ends = np.clip(below[first : last + 1], None, start + wanted)
    taken = np.diff(np.concatenate([[start], ends]))
    near = np.flatnonzero(taken)
    return list(zip((near + first).tolist(), taken[near].tolist()))


def merge_runs(runs: List[List[Tuple[int, int]]], total: int) -> Packs:
    """Packs from runs of lengths, a list of runs for each slot of `total` packs; a short list leaves its slot empty."""
    if all(len(run) == 1 and run[0][1] == total for run in runs):
        return [(tuple(run[0][0] for run in runs), total)] if runs else []
    ends = {0, total}
    steps = []
    for run in runs:
        bounds = np.cumsum([count for _, count in run])
        ends.update(bounds.tolist())
        steps.append((bounds, [length for length, _ in run]))
    marks = sorted(ends)
    packs: Packs = []
    for start, stop in zip(marks, marks[1:]):
        held = []
        for bounds, lengths in steps:
            index = int(np.searchsorted(bounds, start, side="right"))
            if index < len(lengths):
                held.append(lengths[index])
        if held:
            packs.append((tuple(held), stop - start))
    return packs


def whole_packs(
    relaxation: Relaxation,
    counts: np.ndarray,
    max_sequences_per_pack: int,
    target: int,
    progress: Callable[[int], None] = lambda left: None,
) -> Packs:
    """Packs `counts` int [S + 1] by a fractional packing of them; stops as soon as `target` packs are enough."""
    S = len(counts) - 1
    left, made, total = counts, [], 0
    best: Optional[Packs] = None
    best_total = 0

    def depth_of(lengths: np.ndarray) -> int:
        return max(1, min(max_sequences_per_pack, S // int(lengths[0])))

    while not relaxation.exact:
        lengths = np.flatnonzero(left)
        prices = np.zeros(S + 1)
        prices[lengths] = relaxation.prices
        slack = (target + 0.5 - total - relaxation.bound) / max(1.0, relaxation.bound)
        repeats = np.floor(relaxation.packs + 1e-6).astype(np.int64)
        packs, left = follow(relaxation.strategies, repeats, left, prices, 1 - max(1e-9, 0.2 * slack))
        made += packs
        placed = sum(count for _, count in packs)
        total += placed
        progress(int(left.sum()))
        lengths = np.flatnonzero(left)
        if not len(lengths):
            return made
        relaxation = relax(
            lengths,
            left[lengths],
            S,
            depth_of(lengths),
            seeds=_on(lengths, relaxation.strategies, S),
            good_enough=target - total,
            rounds=12,
            exact=placed < 0.1 * relaxation.bound,
        )  # few packs could be made: now the single lengths matter

    take = np.floor(relaxation.packs + 1e-6).astype(np.int64)
    while True:
        pool = relaxation.strategies
        packs, left = fill(relaxation.strategies, take, left)
        made = made + packs
        total += sum(count for _, count in packs)
        progress(int(left.sum()))
        rest = fit_decreasing(
            LengthHistogram(left), max_sequences_per_pack, lambda free: np.argsort(free, kind="stable")
        )
        complete = total + sum(count for _, count in rest)
        if best is None or complete < best_total:
            best, best_total = made + rest, complete
        if best_total <= target or not left.any():
            return best
        lengths = np.flatnonzero(left)
        relaxation = relax(
            lengths,
            left[lengths],
            S,
            depth_of(lengths),
            seeds=_on(lengths, pool, S),
            good_enough=target - total,
            rounds=8,
            exact=True,
        )
        if total + np.ceil(relaxation.bound - 1e-6) >= best_total:  # no better packing is left
            return best
        take = _round(relaxation, left)


def _on(lengths: np.ndarray, strategies: np.ndarray, max_sequence_length: int) -> np.ndarray:
    """The strategies with each length shortened to the next of these."""
    shorter = np.zeros(max_sequence_length + 1, np.int64)
    shorter[lengths] = lengths
    return np.maximum.accumulate(shorter)[strategies]


def _round(relaxation: Relaxation, counts: np.ndarray) -> np.ndarray:
    """int [n], packs to make of each strategy: rounded down; if that is under half of them, some are rounded up."""
    packs = relaxation.packs
    take = np.floor(packs + 1e-6).astype(np.int64)
    fraction = packs - take
    wanted = max(1, int(0.5 * packs.sum()))
    used = np.bincount(
        relaxation.strategies.ravel(), np.repeat(take, relaxation.strategies.shape[1]), minlength=len(counts)
    )
    left = counts - used.astype(np.int64)
    left[0] = 0  # empty slots, which need no sequences
    total = int(take.sum())
    for index in np.argsort(-fraction, kind="stable").tolist():
        if total >= wanted:
            break
        strategy = relaxation.strategies[index]
        needed = np.bincount(strategy[strategy > 0], minlength=len(counts))
        if (needed <= left).all():
            left = left - needed
            take[index] += 1
            total += 1
    if not total:  # every strategy has more slots of a length than there are sequences; `fill` puts shorter ones there
        take[int(np.argmax(fraction))] = 1
    return take
