"""Attention within each sequence of a row: one call per long sequence, one for all short sequences of the same length.

Letters as in `bert.py`: N heads, A width of a head, T tokens of all sequences, laid end to end; L tokens of one
sequence, n sequences of the same length.

`padding_free/blocks.py` holds the same functions: neither package imports the other.
"""

from __future__ import annotations

from typing import Callable, Iterator, List, Optional, Sequence

import torch

from pack_data.store.attention_blocks import AttentionBlocks, blocks_of

_Attend = Callable[..., torch.Tensor]


def blocks_on(lengths: Sequence[int], device: Optional[torch.device] = None) -> AttentionBlocks:
    """Group sequences that are laid end to end, with the orders of the tokens as tensors.

    Args:
        lengths: tokens of each sequence; 0: no sequence.
        device: device of the tensors that the blocks will select from.
    """
    blocks = blocks_of(lengths)
    if blocks.order is None:
        return blocks
    # The host does not wait until the device has them.
    order = torch.tensor(blocks.order).to(device, non_blocking=True)
    back = torch.tensor(blocks.back).to(device, non_blocking=True)
    return blocks._replace(order=order, back=back)


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
