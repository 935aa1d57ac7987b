"""Non-negative least squares histogram-packing (paper section 3.1.2): `python -m pack_data.nnlshp`.

Of all strategies of at most 3 lengths that fill a pack exactly, find the mixture x >= 0 whose counts A x are nearest to
the histogram b. Short lengths have a small weight, because they may serve as padding. Round the mixture, put each
remaining sequence into its own pack, and remove the sequences that the mixture uses too often, which are padding.

The paper spends 28 s and much memory on a dense solve; solver/nonnegative.py reaches the same minimum from the sparse
columns.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import Dict, List, Optional, Tuple

import numpy as np

from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.reading.fields import packing_depth, whole_number
from pack_data.solver.nonnegative import solve_fast

# Sequences per pack, as in the paper.
_DEEPEST = 3
# Slots of a pack. There are S^2 / 12 strategies and S x S matrices: 5.6 million, and half a gigabyte each, at this S.
_LONGEST = 8192
# Lengths up to this one are acceptable as padding, as in the paper.
_SHORT = 8
# Weight of those lengths, as in the paper.
_WEIGHT_OF_SHORT = 0.09
# Sequences left at which further rounds are not worth their time.
_FEW_LEFT = 100


def pack(
    histogram: LengthHistogram, *, max_sequences_per_pack: Optional[int], rounds: int = 1
) -> Packing:
    """Pack with strategies of at most 3 sequences.

    Args:
        histogram: lengths to pack.
        max_sequences_per_pack: packing depth, at most 3.
        rounds: most solutions of the problem. 1 rounds to nearest, as the paper does; more solve again for the
            sequences that are left (20 in MLPerf's variant).

    Raises:
        ValueError: the depth is above 3 or unlimited, or the packs are too long.
    """
    max_sequences_per_pack = packing_depth(max_sequences_per_pack)
    rounds = whole_number("rounds", rounds, least=1)
    if max_sequences_per_pack is None or max_sequences_per_pack > _DEEPEST:
        depth = "any number" if max_sequences_per_pack is None else max_sequences_per_pack
        raise ValueError(
            f"nnlshp packs at most {_DEEPEST} sequences together, not {depth}; for deeper packs use optimal or spfhp"
        )
    if histogram.max_sequence_length > _LONGEST:
        raise ValueError(
            f"nnlshp lists S^2 / 12 strategies, too many for max_sequence_length {histogram.max_sequence_length} "
            f"(at most {_LONGEST}); use optimal or spfhp"
        )
    S = histogram.max_sequence_length
    strategies = _strategies_filling(S, max_sequences_per_pack)
    weights = np.ones(S + 1)
    weights[: _SHORT + 1] = _WEIGHT_OF_SHORT if rounds == 1 else (_SHORT / (2 * S)) ** 0.5
    weights[0] = 0.0  # index 0 is the absent second or third length of a strategy

    start = time.perf_counter()
    mixture, remainder = _mix(histogram.counts, strategies, weights, rounds)
    repeats: Dict[Tuple[int, ...], int] = {}
    for index in np.flatnonzero(mixture).tolist():
        strategy = tuple(length for length in strategies[index].tolist() if length)
        repeats[strategy] = int(mixture[index])
    padding = _counts(strategies, mixture, S) + remainder - histogram.counts
    packs = _without(repeats, padding)
    for length in np.flatnonzero(remainder).tolist():
        packs.append(((length,), int(remainder[length])))
    return Packing.of(
        "nnlshp",
        histogram,
        max_sequences_per_pack,
        packs,
        solve_seconds=time.perf_counter() - start,
    )


def _strategies_filling(S: int, depth: int) -> np.ndarray:
    """Return all ways to fill S slots with at most `depth` lengths, int32 [n, 3], longest first, then zeros."""
    blocks = [np.array([[S, 0, 0]])]
    # Pairs have the third length 0, triples 1 or more. The lengths of a row never ascend.
    least_third = 0 if depth >= 2 else 1
    largest_third = S // 3 if depth >= 3 else 0
    for third in range(least_third, largest_third + 1):
        second = np.arange(max(third, 1), (S - third) // 2 + 1)
        blocks.append(np.stack([S - third - second, second, np.full_like(second, third)], axis=1))
    return np.concatenate(blocks).astype(np.int32)


def _counts(strategies: np.ndarray, repeats: np.ndarray, S: int) -> np.ndarray:
    """Return A x: the sequences of each length [S + 1] in a mixture, in the type of `repeats`; index 0 is 0."""
    counts = np.zeros(S + 1, repeats.dtype)
    used = np.flatnonzero(repeats)
    for lengths in strategies[used].T:
        np.add.at(counts, lengths, repeats[used])
    counts[0] = 0
    return counts


def _mix(
    counts: np.ndarray, strategies: np.ndarray, weights: np.ndarray, rounds: int
) -> Tuple[np.ndarray, np.ndarray]:
    """Return the packs of each strategy, int64 [strategies], and the sequences left without a pack, int64 [S + 1]."""
    S = len(counts) - 1
    mixture = np.zeros(len(strategies), np.int64)
    left = counts.copy()
    for _ in range(rounds):
        if not left.any():
            break
        exact = solve_fast(strategies, weights, left.astype(np.float64))
        if rounds == 1:
            packs = np.rint(exact).astype(np.int64)
        else:
            packs = np.where(exact < 2, np.rint(exact), np.floor(exact)).astype(np.int64)
            if not packs.any():
                # A small rest rounds to nothing: make one pack along the steepest descent of the residual.
                descent = (weights**2 * left)[strategies].sum(axis=1)
                packs[np.argmax(descent)] = 1
        mixture += packs
        # Sequences that are used too often are padding, so counts do not go below 0.
        left = np.maximum(left - _counts(strategies, packs, S), 0)
        if left.sum() < _FEW_LEFT < counts.sum():
            break
    return mixture, left


def _less(strategy: Tuple[int, ...], length: int, taken: int) -> Tuple[int, ...]:
    """Return a strategy with ``taken`` fewer sequences of a length."""
    kept = list(strategy)
    for _ in range(taken):
        kept.remove(length)
    return tuple(kept)


def _without(
    repeats: Dict[Tuple[int, ...], int], padding: np.ndarray
) -> List[Tuple[Tuple[int, ...], int]]:
    """Return the packs without the padding sequences; padding [S + 1] counts them by length."""
    remaining = Counter(repeats)
    holders = defaultdict(set)
    for strategy in remaining:
        for length in strategy:
            holders[length].add(strategy)
    for length in np.flatnonzero(padding).tolist():
        left = int(padding[length])
        for strategy in sorted(holders[length]):
            packs = remaining[strategy]
            per_pack = strategy.count(length)
            removed = min(left, packs * per_pack)
            # Remove this length from some packs entirely, and the last few from one more pack.
            emptied_packs, rest = divmod(removed, per_pack)
            for amount, taken in ((emptied_packs, per_pack), (1, rest)):
                if not amount or not taken:
                    continue
                kept = _less(strategy, length, taken)
                remaining[strategy] -= amount
                remaining[kept] += amount
                for other in set(kept) - {length}:
                    holders[other].add(kept)
            left -= removed
            if not left:
                break
    return list(remaining.items())


if __name__ == "__main__":
    from pack_data.lengths.packer_command import run

    raise SystemExit(run("nnlshp"))
