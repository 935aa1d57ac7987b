"""Attention within each sequence of a row: one call per long sequence, one for all short sequences of the same length.

Letters: N heads, A width of a head, T tokens of all sequences, laid end to end; L tokens of one
sequence, n sequences of the same length.

`ipu_packed_bert/model/blocks.py` holds the same functions but that of windows: neither package imports the other.
"""

from __future__ import annotations

from typing import Callable, Iterator, List, NamedTuple, Optional, Sequence

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


# Queries that are computed together under a window: each needs the keys of all their windows.
_LEAST_STEP = 128


class WindowPiece(NamedTuple):
    """Queries, the keys that they may attend to, and which of them each attends to, bool [queries, keys]."""

    queries: slice
    keys: slice
    seen: torch.Tensor


def window_pieces(
    queries: int,
    keys: int,
    before: Optional[int],
    after: Optional[int],
    device: Optional[torch.device] = None,
) -> Iterator[WindowPiece]:
    """Divide attention so that all keys of a piece are near its queries; queries without keys are left out.

    Args:
        queries: number of the queries; they are aligned with the keys at their ends.
        keys: number of the keys.
        before: keys that a query attends to before it; None: all.
        after: keys that a query attends to after it; None: all.
        device: device of the masks.
    """
    shift = keys - queries
    step = max(_LEAST_STEP, (before or 0) + (after or 0))
    for begin in range(0, queries, step):
        end = min(begin + step, queries)
        first = 0 if before is None else max(0, begin + shift - before)
        last = keys if after is None else min(keys, end + shift + after)
        if last <= first:
            continue
        places = torch.arange(begin + shift, end + shift, device=device)[:, None]
        distance = places - torch.arange(first, last, device=device)
        seen = torch.ones_like(distance, dtype=torch.bool)
        if before is not None:
            seen &= distance <= before
        if after is not None:
            seen &= -distance <= after
        yield WindowPiece(slice(begin, end), slice(first, last), seen)
