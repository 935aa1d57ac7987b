"""Non-negative least squares histogram-packing (paper section 3.1.2): `python -m pack_data.nnlshp`.

Of all strategies of at most 3 lengths that fill a pack exactly, find the mixture x >= 0 whose counts A x come nearest
to the histogram b. Short lengths have a small weight, because they may serve as padding. Round the mixture; give each
sequence that is left a pack of its own; take out again what the mixture uses too often, which was padding.

The paper's 28 s and its memory go into a dense solve; solver/nonnegative.py reaches the same minimum from the sparse
columns.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from functools import partial
from typing import Dict, List, Optional, Tuple

import numpy as np

from pack_data.cli.command import positive_int, run_main
from pack_data.lengths.packer_command import run_packer
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.reading.fields import packing_depth, whole_number
from pack_data.solver.nonnegative import solve_fast

_DEEPEST = 3
_LONGEST = 8192  # S^2 / 12 strategies and S x S matrices: 5.6 million and half a gigabyte each here
_SHORT = 8  # lengths up to this one are acceptable as padding


def pack(
    histogram: LengthHistogram, *, max_sequences_per_pack: Optional[int], rounds: int = 1
) -> Packing:
    """Pack with strategies of at most 3 sequences.

    rounds: 1 solves once and rounds to nearest, as the paper; more solve again for what is left (MLPerf's variant: 20).
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
    weights[: _SHORT + 1] = 0.09 if rounds == 1 else (_SHORT / (2 * S)) ** 0.5
    weights[0] = 0.0  # index 0 is the absent second or third length of a strategy

    start = time.perf_counter()
    mixture, remainder = _mix(histogram.counts, strategies, weights, rounds)
    repeats = {
        tuple(length for length in strategies[index].tolist() if length): int(mixture[index])
        for index in np.flatnonzero(mixture).tolist()
    }
    padding = _counts(strategies, mixture, S) + remainder - histogram.counts
    packs = _without(repeats, padding)
    packs.extend(
        ((length,), int(remainder[length])) for length in np.flatnonzero(remainder).tolist()
    )
    return Packing.of(
        "nnlshp",
        histogram,
        max_sequences_per_pack,
        packs,
        solve_seconds=time.perf_counter() - start,
    )


def _strategies_filling(S: int, depth: int) -> np.ndarray:
    """int32 [strategies, 3]: every way to fill S slots with at most `depth` lengths, longest first, then zeros."""
    blocks = [np.array([[S, 0, 0]])]
    # third length 0: the pairs; third length 1 and more: the triples; a row's lengths never ascend
    for third in range(0 if depth >= 2 else 1, S // 3 + 1 if depth >= 3 else 1):
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
    """int64 [strategies], how often to make each; int64 [S + 1], the sequences that are then still without a pack."""
    S = len(counts) - 1
    mixture = np.zeros(len(strategies), np.int64)
    left = counts.copy()
    for _ in range(rounds):
        if not left.any():
            break
        exact = solve_fast(strategies, weights, left.astype(np.float64))
        if rounds == 1:
            whole = np.rint(exact).astype(np.int64)
        else:
            whole = np.where(exact < 2, np.rint(exact), np.floor(exact)).astype(np.int64)
            if not whole.any():  # a small rest rounds to nothing: one pack along the steepest descent of the residual
                whole[np.argmax((weights**2 * left)[strategies].sum(axis=1))] = 1
        mixture += whole
        # What is used too often is padding, which needs no other place.
        left = np.maximum(left - _counts(strategies, whole, S), 0)
        if left.sum() < 100 < counts.sum():
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
            packs, inside = remaining[strategy], strategy.count(length)
            # all of this length out of some packs, then the last few out of one pack more
            whole, rest = divmod(min(left, packs * inside), inside)
            for amount, taken in ((whole, inside), (1, rest)):
                if not amount or not taken:
                    continue
                kept = _less(strategy, length, taken)
                remaining[strategy] -= amount
                remaining[kept] += amount
                for other in set(kept) - {length}:
                    holders[other].add(kept)
            left -= whole * inside + rest
            if not left:
                break
    return list(remaining.items())


main = partial(
    run_packer,
    pack=pack,
    name="nnlshp",
    description="Non-negative least squares histogram-packing: strategies that fill a pack.",
    options={
        "--rounds": dict(
            type=positive_int,
            default=1,
            metavar="N",
            help="solve again for what is left, N times at most: 1 is the paper (default), 20 the MLPerf variant",
        )
    },
)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
