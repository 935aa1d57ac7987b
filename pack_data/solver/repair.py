"""Fewer packs out of a packing: the worst packs and some others are opened, and their sequences are packed anew.

A packing that is made from the longest sequence down wastes most at its end, where the sequences left are all of one
kind. A pack is as bad as it falls short of value 1 at prices of which no pack is worth more: all packs together fall
short by packs - bound. So a few bad packs hold most of what can be saved, and as many good ones give the sequences
that fill them. This is a large neighbourhood search (Shaw, 1998) with prices to choose the neighbourhood.
"""

from __future__ import annotations

import math
import time
from typing import Tuple

import numpy as np

from pack_data.solver.filling import Packs, fill_exactly
from pack_data.solver.free_slots import Strategy

_SHORT = 0.8  # of all that the packs fall short by: what the packs that are opened for it hold
_WORST = 1500  # of them opened at a time, at most
_OTHERS = 30  # packs opened beside them: as many, but at least so many
_FEWEST, _ROUNDS, _PATIENCE = 4, 200, 40  # of the worst opened at a time; rounds in all; without one pack less
_ROUNDED = 1e-9  # a pack is worth about 1


def mend(
    packs: Packs,
    prices: np.ndarray,
    max_sequences_per_pack: int,
    target: int,
    most: float = math.inf,
    until: float = math.inf,
) -> Packs:
    """As many packs or fewer, of the same sequences; `target` packs are enough.  Deterministic.

    prices float64 [S + 1] by length, of which no pack is worth more than 1.  most: strategies that are opened, and as
    many again in proportion to the packs won.  until: `time.perf_counter`'s, after which no further round is begun.
    """
    random = np.random.default_rng(0)
    strategies = [strategy for strategy, _ in packs]
    repeats = np.array([count for _, count in packs], np.int64)
    short = np.array([_short(strategy, prices) for strategy in strategies])
    number, patience, spent = int(repeats.sum()), _PATIENCE, 0.0
    gap = number - target
    many = most_at_once = int(min(_WORST, max(_FEWEST, most / 4)))
    for _ in range(_ROUNDS):
        if number <= target or not patience or spent >= most or time.perf_counter() > until:
            break
        worst, opened = _opened(short, repeats, many, random)
        spent += int(np.count_nonzero(opened))
        counts = np.zeros(len(prices), np.int64)
        for index in np.flatnonzero(opened).tolist():
            np.add.at(counts, list(strategies[index]), opened[index])
        had = int(opened.sum())
        least = max(math.ceil(float(counts @ prices) - _ROUNDED), had - (number - target))
        made = fill_exactly(counts, max_sequences_per_pack, least)
        fewer = had - sum(count for _, count in made)
        patience = _PATIENCE if fewer > 0 else patience - 1 if had < number else 0  # all were opened: the same again
        if fewer > 0:
            spent -= fewer * most / gap if most < math.inf else spent
        else:  # a smaller part may be easier
            many = worst // 2 if worst > 2 * _FEWEST else most_at_once
        if fewer < 0:
            continue
        number -= fewer
        repeats = repeats - opened
        left = np.flatnonzero(repeats)
        strategies = [strategies[index] for index in left.tolist()] + [strategy for strategy, _ in made]
        repeats = np.concatenate([repeats[left], np.array([count for _, count in made], np.int64)])
        short = np.concatenate([short[left], [_short(strategy, prices) for strategy, _ in made]])
    return list(zip(strategies, repeats.tolist()))


def _short(strategy: Strategy, prices: np.ndarray) -> float:
    """By how much a pack is worth less than 1."""
    return 1.0 - float(prices[list(strategy)].sum())


def _opened(short: np.ndarray, repeats: np.ndarray, most: int, random: np.random.Generator) -> Tuple[int, np.ndarray]:
    """How many of the worst packs to open, `most` at most, and int64 [strategies]: them and others at random."""
    worst_first = np.argsort(-short, kind="stable")
    missing = np.cumsum((short * repeats)[worst_first])
    many = int(np.searchsorted(missing, _SHORT * missing[-1])) + 1
    opened = np.zeros(len(repeats), np.int64)
    room = most
    for index in worst_first[:many].tolist():
        opened[index] = min(int(repeats[index]), room)
        room -= int(opened[index])
        if not room:
            break
    worst, ends = most - room, np.cumsum(repeats - opened)
    others = max(_OTHERS, worst)
    if others >= ends[-1]:
        return worst, repeats
    drawn = np.unique(random.integers(0, ends[-1], others))  # a pack that is drawn twice is opened once
    return worst, opened + np.bincount(np.searchsorted(ends, drawn, side="right"), minlength=len(repeats))
