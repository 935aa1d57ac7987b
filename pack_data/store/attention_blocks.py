"""Groups of sequences in a row that attention computes together."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np

# Tokens of the longest sequences that are computed together with others of their length. The overhead of a call is
# about 20 microseconds, the time of the copies that move a longer sequence to the others.
MAX_GROUPED_TOKENS = 64


class AttentionBlocks(NamedTuple):
    """Groups of tokens that attend to one another: short sequences of one length together, long ones alone."""

    groups: Tuple[Tuple[int, int], ...]  # number of sequences, their length
    order: Any  # int64 [T]: the tokens, group by group; None if they are already in this order
    back: Any  # int64 [T]: the place of each token in that order
    firsts: Tuple[Tuple[int, ...], ...] = ()  # of each group, the first tokens of its sequences


def blocks_of(lengths: Sequence[int]) -> AttentionBlocks:
    """Group sequences that are laid end to end.

    Args:
        lengths: tokens of each sequence; 0: no sequence.

    Returns:
        The groups, with the orders of the tokens as arrays.
    """
    grouped: Dict[int, List[int]] = {}  # length -> first tokens
    alone: List[Tuple[int, List[int]]] = []
    first = 0
    for length in lengths:
        if 0 < length <= MAX_GROUPED_TOKENS:
            grouped.setdefault(length, []).append(first)
        elif length:
            alone.append((length, [first]))
        first += length

    order = back = None
    groups = [*grouped.items(), *alone]
    if all(len(starts) == 1 for _, starts in groups):
        groups.sort(key=lambda group: group[1])
    else:
        ranges = []
        for length, starts in groups:
            ranges += [np.arange(start, start + length) for start in starts]
        order = np.concatenate(ranges)
        back = np.argsort(order)
    return AttentionBlocks(
        tuple((len(starts), length) for length, starts in groups),
        order,
        back,
        tuple(tuple(starts) for _, starts in groups),
    )
