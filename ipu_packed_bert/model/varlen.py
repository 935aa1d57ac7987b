"""Attention without the scores that packing masks: softmax over the block of each sequence, not over a whole row.

A dense mask multiplies S x S scores of a row and discards those between sequences; here a row of sequences of l1, l2,
... tokens costs l1^2 + l2^2 + ... only (variable-length attention, "Enhancing Training Efficiency Using Packing with
Flash Attention", section 2). It is for devices without static graphs. The classes replace parts of a network from
outside, have no parameters, and compute the same for every slot of a sequence. With blocks, the layers skip padding;
for the kernel, whose shapes are static, padding is an additional sequence that nobody reads.
Letters as in `bert.py`: B rows, S slots, N heads, A width of a head, D slots for sequences, H hidden size; T tokens,
with the kernel's padding B S.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Callable, NamedTuple, Optional, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from ipu_packed_bert.model.bert import AttentionDropout
from ipu_packed_bert.model.blocks import blocks_on, join_blocks, split_in_blocks
from ipu_packed_bert.model.packed import AttentionMask
from pack_data.store.attention_blocks import AttentionBlocks


class BlockRule(NamedTuple):
    """The rules of attention in blocks: fixed functions, so that a run can be repeated bit for bit."""

    # (tokens of a block, dropout) -> True: by plain products; False: by torch's operator.
    eager: Callable[[int, float], bool]
    # (blocks, rows, slots) -> True: in blocks; False: with a mask over whole rows.
    pays: Callable[[AttentionBlocks, int, int], bool]


SDPA_BLOCKS = BlockRule(eager=lambda tokens, dropout: False, pays=lambda blocks, rows, slots: True)


class _SequenceBoundaries(nn.Module):
    """Boundaries for the kernel, in place of `packed.AttentionMask`.

    Args:
        sequences: D, the most sequences in a row.
    """

    def __init__(self, sequences: int):
        super().__init__()
        self.numbers: torch.Tensor  # 2 k - 1: sequence k, 2 k: the padding after it
        self.register_buffer(
            "numbers", torch.arange(1, 2 * sequences + 1, dtype=torch.int32), persistent=False
        )

    def forward(self, input_mask_BS, dtype: torch.dtype) -> torch.Tensor:
        """Map sequence numbers to the boundaries of sequences and paddings in turn.

        Args:
            input_mask_BS: sequence numbers, rising from 1 to D; 0 in the padding that may follow each sequence.
            dtype: not used.

        Returns:
            int32 [2 B D + 1], first 0, last T. Lengths of 0 complete a row of fewer sequences, so the shape is static.
        """
        latest_BS = input_mask_BS.cummax(dim=1).values.clamp(min=1)
        runs_BS = 2 * latest_BS - (input_mask_BS > 0).to(latest_BS.dtype)
        lengths_BE = (runs_BS.unsqueeze(2) == self.numbers).sum(dim=1, dtype=torch.int32)
        ends = lengths_BE.flatten().cumsum(0, dtype=torch.int32)
        return F.pad(ends, (1, 0))


class _Tokens(NamedTuple):
    """The tokens of a micro-batch, with its rows laid end to end, and the blocks of their attention."""

    # int64 [T] of 0 to B S: the places of the tokens; None if there is no padding.
    slots: Optional[torch.Tensor]
    blocks: AttentionBlocks
    starts: Sequence[Sequence[int]]  # of each group of blocks, the first slots of its sequences


class _SequenceBlocks(AttentionMask):
    """Tokens and blocks of a micro-batch, in place of `packed.AttentionMask`, or the dense mask if blocks do not pay.

    They are copied from the device once for all layers. Blocks do not pay for many short sequences in short, full rows.

    Args:
        rule: the function `pays` decides between blocks and mask.
    """

    def __init__(self, rule: BlockRule):
        super().__init__("sdpa")
        self._pays = rule.pays

    def forward(self, input_mask_BS, dtype: torch.dtype) -> Any:
        """Map sequence numbers [B, S] to `_Tokens`, or to the mask [B, 1, S, S]."""
        rows, slots = input_mask_BS.shape
        device = input_mask_BS.device
        # The only wait for the device: sizes are computed on the host.
        mask_BS = input_mask_BS.cpu()
        offset = rows * slots  # larger than any sequence number
        numbers = (mask_BS + offset * torch.arange(rows).unsqueeze(1)).flatten()
        tokens = mask_BS.flatten().nonzero().squeeze(1)
        if not len(tokens):  # with one token, every parameter has a gradient
            tokens = tokens.new_zeros(1)

        _, lengths = numbers[tokens].unique_consecutive(return_counts=True)
        blocks = blocks_on(lengths.tolist(), device)
        if not self._pays(blocks, rows, slots):
            return super().forward(input_mask_BS, dtype)
        starts = [tokens[list(firsts)].tolist() for firsts in blocks.firsts]
        if len(tokens) == len(numbers):
            return _Tokens(None, blocks, starts)
        return _Tokens(tokens.to(device, non_blocking=True), blocks, starts)


def _without_padding(encode: Callable[..., torch.Tensor], *fields_and_mask: Any) -> torch.Tensor:
    """Call ``encode``, `bert.BertModel.forward`, with the tokens alone as one row, if the mask has their places.

    The hidden states of padding are 0.
    """
    *fields_BS, mask = fields_and_mask
    if not isinstance(mask, _Tokens) or mask.slots is None:
        return encode(*fields_BS, mask)
    rows, slots = fields_BS[0].shape
    fields_1T = [field.flatten()[mask.slots].unsqueeze(0) for field in fields_BS]
    tokens_TH = encode(*fields_1T, mask._replace(slots=None))[0]
    padding = tokens_TH.new_zeros(rows * slots, tokens_TH.shape[1])
    hidden = padding.index_copy(0, mask.slots, tokens_TH)
    return hidden.view(rows, slots, -1)


class _BlockContext(nn.Module):
    """`bert._SdpaContext` with a small attention for each sequence, or for all short ones of the same length.

    It takes an additive mask instead, if a micro-batch has one.
    """

    def __init__(self, rule: BlockRule):
        super().__init__()
        self._eager = rule.eager

    def forward(
        self, query_BNSA, key_BNSA, value_BNSA, tokens: Any, dropout: AttentionDropout
    ) -> torch.Tensor:
        rate = dropout.rate

        def attend(query, key, value, mask=None, starts=()):
            if self._eager(query.shape[2], rate):
                return _plainly(query, key, value, mask, partial(dropout, starts=starts))
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=rate)

        if isinstance(tokens, torch.Tensor):
            return attend(query_BNSA, key_BNSA, value_BNSA, tokens.to(query_BNSA.dtype))
        heads = [_end_to_end(head_BNSA) for head_BNSA in (query_BNSA, key_BNSA, value_BNSA)]
        contexts = []
        for piece, starts in zip(split_in_blocks(heads, tokens.blocks), tokens.starts):
            query, key, value = piece
            contexts.append(attend(query, key, value, starts=starts))
        return _rows(join_blocks(contexts, tokens.blocks), query_BNSA)


def _plainly(
    query, key, value, mask: Optional[torch.Tensor], drop: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Compute `F.scaled_dot_product_attention` by products and a softmax: faster in bfloat16 on a CPU."""
    scale = 1.0 / math.sqrt(query.shape[-1])
    scores = torch.matmul(query * scale, key.transpose(2, 3))
    if mask is not None:
        scores = scores + mask
    weights = drop(torch.softmax(scores, dim=-1))
    return torch.matmul(weights, value)


class _KernelContext(nn.Module):
    """`bert._SdpaContext` by torch's variable-length kernel: one call, boundaries as a tensor."""

    def forward(
        self, query_BNSA, key_BNSA, value_BNSA, boundaries: torch.Tensor, dropout: AttentionDropout
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        slots = query_BNSA.shape[2]  # of the longest possible sequence
        context_TNA = varlen_attn(
            _end_to_end(query_BNSA),
            _end_to_end(key_BNSA),
            _end_to_end(value_BNSA),
            boundaries,
            boundaries,
            slots,
            slots,
        )
        return _rows(context_TNA, query_BNSA)


def _end_to_end(heads_BNSA) -> torch.Tensor:
    """Reshape [B, N, S, A] to [T, N, A]."""
    return heads_BNSA.transpose(1, 2).flatten(0, 1)


def _rows(context_TNA, like_BNSA) -> torch.Tensor:
    """Reshape [T, N, A] to [B, N, S, A]."""
    rows, heads, slots, width = like_BNSA.shape
    return context_TNA.view(rows, slots, heads, width).transpose(1, 2)


def attend_with_rule(network: Any, rule: BlockRule) -> None:
    """Let a network built for "sdpa" compute attention over whole rows by plain products where a rule says so."""
    for layer in network.bert.encoder.layer:
        layer.attention.self.context = _BlockContext(rule)


def attend_within_sequences(
    network: Any,
    *,
    sequences: int,
    kernel: bool,
    rule: BlockRule = SDPA_BLOCKS,
) -> None:
    """Replace the mask and the attention of a network built for "sdpa", in place.

    Args:
        network: a network with `attention_mask` and `bert`.
        sequences: D, the most sequences in a row.
        kernel: use torch's variable-length kernel, which must support this device and type, in place of blocks.
        rule: the rules of attention in blocks.
    """
    if kernel:
        network.attention_mask = _SequenceBoundaries(sequences)
    else:
        network.attention_mask = _SequenceBlocks(rule)
        network.bert.forward = partial(_without_padding, network.bert.forward)
    for layer in network.bert.encoder.layer:
        layer.attention.self.context = _KernelContext() if kernel else _BlockContext(rule)
