"""Attention within each sequence of a row: one call for a long sequence, one for all short ones of the same length.

Letters as in `bert.py`: N heads, A width of a head, T tokens, the sequences laid end to end; L tokens of one sequence,
n sequences of the same length.
"""

from __future__ import annotations

from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

# Sequences up to this length are computed together with others of their length.  A call takes about 20 microseconds
# besides its arithmetic, as much as the copies that bring a longer sequence to its like.
TOGETHER = 64

_Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class AttentionBlocks(NamedTuple):
    """Which tokens attend to each other."""

    groups: Tuple[Tuple[int, int], ...]  # sequences, their length
    order: Optional[torch.Tensor]  # int64 [T]: the tokens group by group; None where they stand so already
    back: Optional[torch.Tensor]  # int64 [T]: where each token is in that order


def blocks_of(lengths: Sequence[int], device: Optional[torch.device] = None) -> AttentionBlocks:
    """The blocks of sequences of these lengths, laid end to end.

    A length of 0 is no sequence.  device: of the tensors to which the blocks will be applied.
    """
    alone: List[Tuple[int, int]] = []  # first token, length
    together: Dict[int, List[int]] = {}
    first = 0
    for length in lengths:
        if 0 < length <= TOGETHER:
            together.setdefault(length, []).append(first)
        elif length:
            alone.append((first, length))
        first += length
    if all(len(starts) == 1 for starts in together.values()):
        return AttentionBlocks(tuple((1, length) for length in lengths if length), None, None)
    groups = [(len(starts), length) for length, starts in together.items()] + [(1, length) for _, length in alone]
    begins = [(start, length) for length, starts in together.items() for start in starts] + alone
    order = torch.cat([torch.arange(start, start + length) for start, length in begins])
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return AttentionBlocks(tuple(groups), order.to(device), back.to(device))


def attend_in_blocks(heads: Sequence[torch.Tensor], blocks: AttentionBlocks, attend: _Attend) -> torch.Tensor:
    """Context [T, N, A] of every token.

    heads: query, key and value [T, N, A]; keys may have fewer heads, values another width.
    attend: the same, [n, N, L, A] each -> context [n, N, L, A].
    """
    if blocks.order is not None:
        heads = [each.index_select(0, blocks.order) for each in heads]
    sizes = [count * length for count, length in blocks.groups]
    contexts = []
    for (count, length), pieces in zip(blocks.groups, zip(*(each.split(sizes) for each in heads))):
        query_nNLA, key_nNLA, value_nNLA = (piece.unflatten(0, (count, length)).transpose(1, 2) for piece in pieces)
        contexts.append(attend(query_nNLA, key_nNLA, value_nNLA).transpose(1, 2).flatten(0, 1))
    context_TNA = torch.cat(contexts)
    return context_TNA if blocks.back is None else context_TNA.index_select(0, blocks.back)
