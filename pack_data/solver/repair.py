"""Mend a packing: open the worst packs and some others, and pack their sequences again.

A packing that starts with the longest sequences wastes most slots in its last packs, because the sequences left then
are of one kind. At prices at which no pack is worth more than 1, the shortfall of a pack is 1 less its worth, and all
shortfalls add up to packs - bound. So a few bad packs contain most of the possible gain, and as many good ones supply
the sequences that fill them. This is a large neighbourhood search (Shaw, 1998) with prices to choose the neighbourhood.
"""

from __future__ import annotations

import math
import time
from typing import Tuple

import numpy as np

from pack_data.solver.filling import fill_exactly
from pack_data.solver.free_slots import PACKS_ERROR, Packs, Strategy, count_packs

_SHORTFALL_OPENED = 0.8  # share of the total shortfall that the worst packs of a round hold
_MAX_WORST = 1500  # most worst packs opened in a round
_MIN_OTHERS = 30  # packs drawn at random for a round: as many as worst ones, but at least these
_PATIENCE = 40  # rounds without one pack less after which the search ends


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
        prices: float64 [S + 1] by length; no pack is worth more than 1.
        max_sequences_per_pack: largest depth.
        target: number of packs that is few enough.
        most_strategies: number of strategies that may be opened; it grows in proportion to the packs saved.
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
    first_most_worst = int(min(_MAX_WORST, max(1, most_strategies / 4)))
    most_worst = first_most_worst
    while number > target and patience and opened_strategies < most_strategies:
        if time.perf_counter() > until:
            break
        worst, opened = _opened(shortfalls, repeats, most_worst, random)
        opened_strategies += int(np.count_nonzero(opened))
        counts = np.zeros(len(prices), np.int64)
        for index in np.flatnonzero(opened).tolist():
            np.add.at(counts, list(strategies[index]), opened[index])
        opened_packs = int(opened.sum())
        bound = math.ceil(float(counts @ prices) - PACKS_ERROR)
        few_enough = max(bound, opened_packs - (number - target))
        packed = fill_exactly(counts, max_sequences_per_pack, few_enough)
        saved = opened_packs - count_packs(packed)

        if saved > 0:
            patience = _PATIENCE
            opened_strategies -= saved * most_strategies / gap
        else:
            # If all packs were opened, the next round would be the same: end.
            patience = patience - 1 if opened_packs < number else 0
            # A round with fewer packs may succeed.
            most_worst = worst // 2 if worst > 1 else first_most_worst
        if saved < 0:
            continue
        number -= saved
        repeats = repeats - opened
        kept = np.flatnonzero(repeats)
        new_repeats = np.array([count for _, count in packed], np.int64)
        new_shortfalls = [_shortfall(strategy, prices) for strategy, _ in packed]
        strategies = [strategies[index] for index in kept.tolist()]
        strategies += [strategy for strategy, _ in packed]
        repeats = np.concatenate([repeats[kept], new_repeats])
        shortfalls = np.concatenate([shortfalls[kept], new_shortfalls])
    return list(zip(strategies, repeats.tolist()))


def _shortfall(strategy: Strategy, prices: np.ndarray) -> float:
    """Return 1 less the worth of a pack."""
    return 1.0 - float(prices[list(strategy)].sum())


def _opened(
    shortfalls: np.ndarray, repeats: np.ndarray, most_worst: int, random: np.random.Generator
) -> Tuple[int, np.ndarray]:
    """Return the number of worst packs to open, and the packs of each strategy to open, with others at random."""
    worst_first = np.argsort(-shortfalls, kind="stable")
    missing = np.cumsum((shortfalls * repeats)[worst_first])
    strategies = int(np.searchsorted(missing, _SHORTFALL_OPENED * missing[-1])) + 1
    worst_first = worst_first[:strategies]
    ends = np.minimum(np.cumsum(repeats[worst_first]), most_worst)
    opened = np.zeros(len(repeats), np.int64)
    opened[worst_first] = np.diff(ends, prepend=0)
    worst = int(ends[-1])
    others = max(_MIN_OTHERS, worst)
    ends = np.cumsum(repeats - opened)
    if others >= ends[-1]:
        return worst, repeats
    # A pack that is drawn twice is opened once only.
    drawn = np.unique(random.integers(0, ends[-1], others))
    strategies_drawn = np.searchsorted(ends, drawn, side="right")
    return worst, opened + np.bincount(strategies_drawn, minlength=len(repeats))
