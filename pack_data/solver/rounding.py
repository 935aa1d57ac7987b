"""Whole packs from a fractional packing: round down, solve again for the sequences that are left, and repeat."""

from __future__ import annotations

from collections import defaultdict
from typing import Callable, Dict, List, Tuple

import numpy as np

from pack_data.packing.histogram import LengthHistogram
from pack_data.solver.column_generation import Relaxation, relax
from pack_data.solver.filling import take
from pack_data.solver.free_slots import PACKS_ERROR, Packs, count_packs, longest_first

_SHARE_TAKEN = 0.5  # of the packs that a step makes at least, if they can be made


def _fill(
    strategies: np.ndarray, repeats: np.ndarray, counts: np.ndarray
) -> Tuple[Packs, np.ndarray]:
    """Put into each slot the longest sequence left that is no longer, so that as few as possible stay without a slot.

    strategies: slot lengths, int [n, depth], 0 for no slot. repeats: int [n]. counts: sequences to place, int [S + 1].
    Return the packs, without slots that stayed empty, and the counts of the sequences without a slot.
    """
    left: List[int] = counts.tolist()
    # By length: 1 if sequences are left, else 0.
    present = bytearray((counts > 0).tobytes())
    packs: Packs = []
    for slots, wanted in zip(strategies.tolist(), repeats.tolist()):
        while wanted:
            pack: Dict[int, int] = defaultdict(int)
            for slot in slots:
                length = present.rfind(1, 1, slot + 1)
                if length > 0:
                    pack[length] += 1
                    present[length] = left[length] > pack[length]
            if not pack:
                break
            strategy, made = take(pack, left, present, wanted)
            packs.append((strategy, made))
            wanted -= made
    return packs, np.array(left, np.int64)


def whole_packs(
    relaxation: Relaxation,
    counts: np.ndarray,
    max_sequences_per_pack: int,
    target: int,
    progress: Callable[[int], None],
) -> Packs:
    """Pack sequences by a fractional packing of them; stop at `target` packs.

    Args:
        relaxation: the fractional packing, with a slot for every sequence.
        counts: sequences by length, int [S + 1].
        max_sequences_per_pack: largest depth.
        target: number of packs that is few enough.
        progress: called with the number of sequences that are left.
    """
    S = len(counts) - 1
    left = counts
    packed: Packs = []
    total = 0
    repeats = np.floor(relaxation.packs + PACKS_ERROR).astype(np.int64)
    best: Packs = []
    best_total = 0
    while True:
        strategies = relaxation.strategies
        packs, left = _fill(strategies, repeats, left)
        packed = packed + packs
        total += count_packs(packs)
        progress(int(left.sum()))
        rest = longest_first(LengthHistogram(left), max_sequences_per_pack)
        complete = total + count_packs(rest)
        if not best or complete < best_total:
            best = packed + rest
            best_total = complete
        if best_total <= target or not left.any():
            return best
        lengths = np.flatnonzero(left)
        relaxation = relax(
            lengths,
            left[lengths],
            S,
            max(1, min(max_sequences_per_pack, S // int(lengths[0]))),
            seeds=_shortened_to(lengths, strategies, S),
            good_enough=target - total,
            exact=True,
        )
        if total + np.ceil(relaxation.bound - PACKS_ERROR) >= best_total:
            return best  # no better packing is left
        repeats = _round(relaxation, left)


def _shortened_to(
    lengths: np.ndarray, strategies: np.ndarray, max_sequence_length: int
) -> np.ndarray:
    """Return the strategies with each length shortened to the next of these."""
    shorter = np.zeros(max_sequence_length + 1, np.int64)
    shorter[lengths] = lengths
    return np.maximum.accumulate(shorter)[strategies]


def _round(relaxation: Relaxation, counts: np.ndarray) -> np.ndarray:
    """Return the packs to make of each strategy, int [n]: rounded down; if that is too few, some are rounded up."""
    packs = relaxation.packs
    repeats = np.floor(packs + PACKS_ERROR).astype(np.int64)
    fractions = packs - repeats
    wanted = max(1, int(_SHARE_TAKEN * packs.sum()))
    depth = relaxation.strategies.shape[1]
    used = np.bincount(
        relaxation.strategies.ravel(), np.repeat(repeats, depth), minlength=len(counts)
    )
    left = counts - used.astype(np.int64)
    left[0] = 0  # empty slots, which need no sequences
    total = int(repeats.sum())
    for index in np.argsort(-fractions, kind="stable").tolist():
        if total >= wanted:
            break
        strategy = relaxation.strategies[index]
        needed = np.bincount(strategy[strategy > 0], minlength=len(counts))
        if (needed <= left).all():
            left = left - needed
            repeats[index] += 1
            total += 1
    # If every strategy has more slots of a length than there are sequences, `_fill` puts shorter ones there.
    if not total:
        repeats[int(np.argmax(fractions))] = 1
    return repeats
