"""Attention that skips what packing masks: softmax over each sequence's own block, never over a whole row.

A dense mask multiplies S x S scores of a row and throws away those between sequences; here a row of sequences of l1,
l2, ... costs l1^2 + l2^2 + ... only (the variable-length attention of "Enhancing Training Efficiency Using Packing with
Flash Attention", section 2). For devices without static graphs; the classes replace pieces of a network from outside,
have no parameters, and compute the same for every slot of a sequence. With blocks padding goes through no layer; for
the kernel, whose shapes are static, it is a sequence of its own, which nobody reads. Letters as in `bert.py`: B rows, S
slots, N heads, A width of a head, D slots for sequences, H hidden size; T tokens, with the kernel's padding B S.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import nn
from torch.nn import functional as F

from ipu_packed_bert.model.blocks import AttentionBlocks, attend_in_blocks, blocks_of
from ipu_packed_bert.model.packed import AttentionMask


class BlockRule(NamedTuple):
    """How attention in blocks is computed; both are fixed functions, so that a run can be repeated bit for bit."""

    eager: Callable[[int, float], bool]  # (tokens of a block, dropout): by plain products, else by torch's operator
    pays: Callable[[AttentionBlocks, int, int], bool]  # (blocks, rows, slots): else a mask over whole rows


SDPA_BLOCKS = BlockRule(eager=lambda tokens, dropout: False, pays=lambda blocks, rows, slots: True)


class _SequenceBoundaries(nn.Module):
    """As `packed.AttentionMask`, for the kernel: sequence numbers [B, S], which rise from 1 to D, 0 in the padding that
    may follow each -> int32 [2 B D + 1], first 0, last T: where sequences and paddings, in turn, begin and end.

    Lengths of 0 where a row has fewer of them: the shape is static.
    """

    def __init__(self, sequences: int):
        super().__init__()
        self.numbers: torch.Tensor  # 2 k - 1: sequence k, 2 k: the padding behind it
        self.register_buffer("numbers", torch.arange(1, 2 * sequences + 1, dtype=torch.int32), persistent=False)

    def forward(self, input_mask_BS, dtype: torch.dtype) -> torch.Tensor:
        latest_BS = input_mask_BS.cummax(dim=1).values.clamp(min=1)
        runs_BS = 2 * latest_BS - (input_mask_BS > 0).to(latest_BS.dtype)
        lengths_BE = (runs_BS.unsqueeze(2) == self.numbers).sum(dim=1, dtype=torch.int32)
        return F.pad(lengths_BE.flatten().cumsum(0, dtype=torch.int32), (1, 0))


class _Tokens(NamedTuple):
    """Those of a micro-batch that are no padding, its rows laid end to end, and who of them attends to whom."""

    slots: Optional[torch.Tensor]  # int64 [T] of 0 to B S: where they are; None where they are alone already
    blocks: AttentionBlocks


class _SequenceBlocks(AttentionMask):
    """As `packed.AttentionMask`: the tokens and blocks of each micro-batch, read back from the device once for all
    layers, or the dense mask where the rule says that blocks do not pay: many short sequences in short, full rows."""

    def __init__(self, rule: BlockRule):
        super().__init__("sdpa")
        self._pays = rule.pays

    def forward(self, input_mask_BS, dtype: torch.dtype) -> Any:
        rows, slots = input_mask_BS.shape
        first = rows * slots  # more than any number
        numbers = (input_mask_BS + first * torch.arange(rows, device=input_mask_BS.device).unsqueeze(1)).flatten()
        tokens = input_mask_BS.flatten().nonzero().squeeze(1)
        if not len(tokens):  # each layer needs one, so that every parameter has a gradient
            tokens = tokens.new_zeros(1)
        blocks = blocks_of(numbers[tokens].unique_consecutive(return_counts=True)[1].tolist(), tokens.device)
        if not self._pays(blocks, rows, slots):
            return super().forward(input_mask_BS, dtype)
        return _Tokens(tokens if len(tokens) < len(numbers) else None, blocks)


def _without_padding(encode: Callable[..., torch.Tensor], *fields_and_mask: Any) -> torch.Tensor:
    """As `bert.BertModel.forward`, which `encode` is: only tokens go through it, as one row, where the mask says which
    they are. The hidden states of padding are 0."""
    *fields_BS, mask = fields_and_mask
    if not isinstance(mask, _Tokens) or mask.slots is None:
        return encode(*fields_BS, mask)
    rows, slots = fields_BS[0].shape
    tokens_TH = encode(*(field.flatten()[mask.slots].unsqueeze(0) for field in fields_BS), mask._replace(slots=None))[0]
    hidden_BSH = tokens_TH.new_zeros(rows * slots, tokens_TH.shape[1]).index_copy(0, mask.slots, tokens_TH)
    return hidden_BSH.view(rows, slots, -1)


class _BlockContext(nn.Module):
    """As `bert.SdpaContext`: a small attention for each sequence, or for all short ones of the same length.

    Takes an additive mask, too, where a micro-batch has one.
    """

    def __init__(self, rule: BlockRule):
        super().__init__()
        self._eager = rule.eager

    def forward(self, query_BNSA, key_BNSA, value_BNSA, tokens: Any, dropout: float) -> torch.Tensor:
        def attend(query, key, value, mask=None):
            compute = _plainly if self._eager(query.shape[2], dropout) else F.scaled_dot_product_attention
            return compute(query, key, value, attn_mask=mask, dropout_p=dropout)

        if isinstance(tokens, torch.Tensor):
            return attend(query_BNSA, key_BNSA, value_BNSA, tokens.to(query_BNSA.dtype))
        heads = [_end_to_end(each) for each in (query_BNSA, key_BNSA, value_BNSA)]
        return _rows(attend_in_blocks(heads, tokens.blocks, attend), query_BNSA)


def _plainly(query, key, value, *, attn_mask: Optional[torch.Tensor], dropout_p: float) -> torch.Tensor:
    """What `F.scaled_dot_product_attention` computes, by products and a softmax: faster in bfloat16 on a CPU."""
    scores = torch.matmul(query * (1.0 / math.sqrt(query.shape[-1])), key.transpose(2, 3))
    weights = torch.softmax(scores if attn_mask is None else scores + attn_mask, dim=-1)
    return torch.matmul(F.dropout(weights, dropout_p), value)


class _KernelContext(nn.Module):
    """As `bert.SdpaContext`, by the variable-length kernel of torch: one call, boundaries as a tensor."""

    def forward(self, query_BNSA, key_BNSA, value_BNSA, boundaries: torch.Tensor, dropout: float) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        slots = query_BNSA.shape[2]  # no sequence is longer
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
    """[B, N, S, A] -> [T, N, A]."""
    return heads_BNSA.transpose(1, 2).flatten(0, 1)


def _rows(context_TNA, like_BNSA) -> torch.Tensor:
    """[T, N, A] -> [B, N, S, A]."""
    rows, heads, slots, width = like_BNSA.shape
    return context_TNA.view(rows, slots, heads, width).transpose(1, 2)


def attend_within_sequences(network: Any, *, sequences: int, kernel: bool, rule: BlockRule = SDPA_BLOCKS) -> None:
    """Replace the mask and the attention of a network built for "sdpa", in place.

    network: anything with `attention_mask` and `bert`. sequences: D, the most in a row. kernel: whether torch's serves
    this device and type; else blocks, computed by the rule, or a dense mask where the rule says so.
    """
    network.attention_mask = _SequenceBoundaries(sequences) if kernel else _SequenceBlocks(rule)
    if not kernel:
        network.bert.forward = partial(_without_padding, network.bert.forward)
    for layer in network.bert.encoder.layer:
        layer.attention.self.context = _KernelContext() if kernel else _BlockContext(rule)
