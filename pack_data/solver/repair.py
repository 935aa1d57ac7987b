"""Mend a packing: the worst packs and some others are opened, and their sequences are packed anew.

A packing that is made from the longest sequence down wastes most at its end, where the sequences left are all of one
kind. A pack is as bad as it falls short of value 1 at prices of which no pack is worth more: all packs together fall
short by packs - bound. So a few bad packs hold most of what can be saved, and as many good ones supply the sequences
that fill them. This is a large neighbourhood search (Shaw, 1998) with prices to choose the neighbourhood.
"""

from __future__ import annotations

import math
import time
from typing import Tuple

import numpy as np

from pack_data.solver.filling import fill_exactly
from pack_data.solver.free_slots import Packs, Strategy, count_packs

_SHORTFALL_OPENED = 0.8  # share of the total shortfall that the worst packs of a round hold
_MAX_WORST = 1500  # worst packs opened in a round, at most
_MIN_WORST = 4  # and at least
_MIN_OTHERS = 30  # packs drawn at random for a round: as many as worst ones, but at least these
_MAX_ROUNDS = 200
_PATIENCE = 40  # rounds without one pack less, after which the search ends
_ROUNDING = 1e-9  # error of the sum of the prices in a pack


def mend(
    packs: Packs,
    prices: np.ndarray,
    max_sequences_per_pack: int,
    target: int,
    most_strategies: float = math.inf,
    until: float = math.inf,
) -> Packs:
    """Return as many packs or fewer, of the same sequences; the result depends on the arguments alone.

    Args:
        packs: the packing to mend.
        prices: of which no pack is worth more than 1, float64 [S + 1] by length.
        max_sequences_per_pack: largest depth.
        target: number of packs that is few enough.
        most_strategies: strategies that may be opened, and as many again in proportion to the packs won.
        until: time of `time.perf_counter` after which no further round begins.
    """
    random = np.random.default_rng(0)
    strategies = [strategy for strategy, _ in packs]
    repeats = np.array([count for _, count in packs], np.int64)
    shortfalls = np.array([_shortfall(strategy, prices) for strategy in strategies])
    number = count_packs(packs)
    gap = number - target
    patience = _PATIENCE
    opened_strategies = 0.0
    first_most_worst = int(min(_MAX_WORST, max(_MIN_WORST, most_strategies / 4)))
    most_worst = first_most_worst
    for _ in range(_MAX_ROUNDS):
        if (
            number <= target
            or not patience
            or opened_strategies >= most_strategies
            or time.perf_counter() > until
        ):
            break
        worst, opened = _opened(shortfalls, repeats, most_worst, random)
        opened_strategies += int(np.count_nonzero(opened))
        counts = np.zeros(len(prices), np.int64)
        for index in np.flatnonzero(opened).tolist():
            np.add.at(counts, list(strategies[index]), opened[index])
        before = int(opened.sum())
        bound = math.ceil(float(counts @ prices) - _ROUNDING)
        packed = fill_exactly(
            counts, max_sequences_per_pack, max(bound, before - (number - target))
        )
        won = before - count_packs(packed)

        if won > 0:
            patience = _PATIENCE
            opened_strategies -= (
                won * most_strategies / gap if most_strategies < math.inf else opened_strategies
            )
        else:
            # If all packs were opened, the next round would be the same: end.
            patience = patience - 1 if before < number else 0
            # A round with fewer packs may succeed.
            most_worst = worst // 2 if worst > 2 * _MIN_WORST else first_most_worst
        if won < 0:
            continue
        number -= won
        repeats = repeats - opened
        kept = np.flatnonzero(repeats)
        new_repeats = np.array([count for _, count in packed], np.int64)
        new_shortfalls = [_shortfall(strategy, prices) for strategy, _ in packed]
        strategies = [strategies[index] for index in kept.tolist()] + [
            strategy for strategy, _ in packed
        ]
        repeats = np.concatenate([repeats[kept], new_repeats])
        shortfalls = np.concatenate([shortfalls[kept], new_shortfalls])
    return list(zip(strategies, repeats.tolist()))


def _shortfall(strategy: Strategy, prices: np.ndarray) -> float:
    """Return by how much a pack is worth less than 1."""
    return 1.0 - float(prices[list(strategy)].sum())


def _opened(
    shortfalls: np.ndarray, repeats: np.ndarray, most_worst: int, random: np.random.Generator
) -> Tuple[int, np.ndarray]:
    """Return the number of worst packs to open, and the packs of each strategy to open, others at random included."""
    worst_first = np.argsort(-shortfalls, kind="stable")
    missing = np.cumsum((shortfalls * repeats)[worst_first])
    strategies = int(np.searchsorted(missing, _SHORTFALL_OPENED * missing[-1])) + 1
    opened = np.zeros(len(repeats), np.int64)
    room = most_worst
    for index in worst_first[:strategies].tolist():
        opened[index] = min(int(repeats[index]), room)
        room -= int(opened[index])
        if not room:
            break

    worst = most_worst - room
    others = max(_MIN_OTHERS, worst)
    ends = np.cumsum(repeats - opened)
    if others >= ends[-1]:
        return worst, repeats
    # A pack that is drawn twice is opened once only.
    drawn = np.unique(random.integers(0, ends[-1], others))
    strategies_drawn = np.searchsorted(ends, drawn, side="right")
    return worst, opened + np.bincount(strategies_drawn, minlength=len(repeats))
