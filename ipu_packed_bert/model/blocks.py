"""Attention within each sequence of a row: one call per long sequence, one for all short sequences of the same length.

Letters as in `bert.py`: N heads, A width of a head, T tokens of all sequences, laid end to end; L tokens of one
sequence, n sequences of the same length.
"""

from __future__ import annotations

from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

# Tokens of the longest sequences that are computed together with others of their length. The overhead of a call is
# about 20 microseconds, the time of the copies that move a longer sequence to the others.
MAX_GROUPED_TOKENS = 64

_Attend = Callable[..., torch.Tensor]


class AttentionBlocks(NamedTuple):
    """Groups of tokens that attend to one another."""

    groups: Tuple[Tuple[int, int], ...]  # number of sequences, their length
    # int64 [T]: the tokens, group by group; None if they are already in this order.
    order: Optional[torch.Tensor]
    back: Optional[torch.Tensor]  # int64 [T]: the place of each token in that order


def blocks_of(lengths: Sequence[int], device: Optional[torch.device] = None) -> AttentionBlocks:
    """Group sequences that are laid end to end.

    Args:
        lengths: tokens of each sequence; 0: no sequence.
        device: device of the tensors that the blocks will select from.
    """
    single_starts: List[Tuple[int, int]] = []  # first token, length
    grouped_starts: Dict[int, List[int]] = {}  # length -> first tokens
    first = 0
    for length in lengths:
        if 0 < length <= MAX_GROUPED_TOKENS:
            grouped_starts.setdefault(length, []).append(first)
        elif length:
            single_starts.append((first, length))
        first += length
    if all(len(starts) == 1 for starts in grouped_starts.values()):
        in_order = tuple((1, length) for length in lengths if length)
        return AttentionBlocks(in_order, None, None)

    groups = []
    ranges = []
    for length, starts in grouped_starts.items():
        groups.append((len(starts), length))
        for start in starts:
            ranges.append(torch.arange(start, start + length))
    for start, length in single_starts:
        groups.append((1, length))
        ranges.append(torch.arange(start, start + length))
    order = torch.cat(ranges)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    # The host does not wait until the device has them.
    order = order.to(device, non_blocking=True)
    back = back.to(device, non_blocking=True)
    return AttentionBlocks(tuple(groups), order, back)


def attend_in_blocks(
    heads: Sequence[torch.Tensor],
    blocks: AttentionBlocks,
    attend: _Attend,
) -> torch.Tensor:
    """Compute attention block by block.

    Args:
        heads: query, key and value [T, N, A]; keys may have fewer heads, values another width.
        blocks: groups of tokens that attend to one another.
        attend: attention of one group: query, key and value [n, N, L, A] -> context [n, N, L, A].

    Returns:
        Context [T, N, A] of every token.
    """
    contexts = []
    for piece in split_in_blocks(heads, blocks):
        contexts.append(attend(*piece))
    return join_blocks(contexts, blocks)


def split_in_blocks(
    heads: Sequence[torch.Tensor], blocks: AttentionBlocks
) -> Iterator[List[torch.Tensor]]:
    """Yield the heads [T, N, A] of each group as [n, N, L, A]."""
    if blocks.order is not None:
        heads = [head.index_select(0, blocks.order) for head in heads]
    sizes = [count * length for count, length in blocks.groups]
    pieces_by_group = zip(*(head.split(sizes) for head in heads))
    for (count, length), pieces in zip(blocks.groups, pieces_by_group):
        group_heads = []
        for piece in pieces:
            piece_nLNA = piece.unflatten(0, (count, length))
            group_heads.append(piece_nLNA.transpose(1, 2))
        yield group_heads


def join_blocks(pieces: Sequence[torch.Tensor], blocks: AttentionBlocks) -> torch.Tensor:
    """Return the results [n, N, L, A] of all groups as [T, N, A]."""
    flat = [piece_nNLA.transpose(1, 2).flatten(0, 1) for piece_nNLA in pieces]
    context_TNA = torch.cat(flat)
    if blocks.back is None:
        return context_TNA
    return context_TNA.index_select(0, blocks.back)
