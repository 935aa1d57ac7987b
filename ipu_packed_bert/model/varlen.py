"""Attention that skips what packing masks: softmax over each sequence's own block, never over a whole row.

A dense mask multiplies S x S scores of a row and throws away those between sequences; here a row of sequences of l1,
l2, ... costs l1^2 + l2^2 + ... only (the variable-length attention of "Enhancing Training Efficiency Using Packing with
Flash Attention", section 2). For devices without static graphs; the classes replace pieces of a network from outside,
have no parameters, and compute the same for every slot of a sequence. Padding gets the context 0, or its own, and
nobody reads it. Letters as in `bert.py`: B rows, S slots, N heads, A width of a head, D slots for sequences; T = B S.
"""

from __future__ import annotations

import math
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


class _Boundaries(NamedTuple):
    """Where the sequences of a micro-batch are, its rows laid end to end, each with the padding behind it."""

    cumulative: torch.Tensor  # int32 [2 B D + 1], first 0, last T; lengths of 0 where a row has fewer or no padding
    blocks: Optional[AttentionBlocks]  # of the same, for calls that need numbers; None where a kernel reads the tensor


class SequenceBoundaries(nn.Module):
    """As `packed.AttentionMask`: sequence numbers [B, S], which rise from 1 to D; padding, 0, may follow each.

    blocks: read the lengths back from the device, once for all layers. Else all shapes are static.
    """

    def __init__(self, sequences: int, *, blocks: bool):
        super().__init__()
        self.blocks = blocks
        self.numbers: torch.Tensor  # 2 k - 1: sequence k, 2 k: the padding behind it
        self.register_buffer("numbers", torch.arange(1, 2 * sequences + 1, dtype=torch.int32), persistent=False)

    def forward(self, input_mask_BS, dtype: torch.dtype) -> _Boundaries:
        latest_BS = input_mask_BS.cummax(dim=1).values.clamp(min=1)
        runs_BS = 2 * latest_BS - (input_mask_BS > 0).to(latest_BS.dtype)
        lengths_BE = (runs_BS.unsqueeze(2) == self.numbers).sum(dim=1, dtype=torch.int32)
        cumulative = F.pad(lengths_BE.flatten().cumsum(0, dtype=torch.int32), (1, 0))
        if not self.blocks:
            return _Boundaries(cumulative, None)
        lengths = lengths_BE.flatten().tolist()
        return _Boundaries(cumulative, blocks_of(lengths, cumulative.device, padding=2))


class MaskWhereCheaper(AttentionMask):
    """Boundaries, or the dense mask for a micro-batch whose blocks do not pay: many short sequences in short rows."""

    def __init__(self, sequences: int, rule: BlockRule):
        super().__init__("sdpa")
        self._boundaries = SequenceBoundaries(sequences, blocks=True)
        self._pays = rule.pays

    def forward(self, input_mask_BS, dtype: torch.dtype) -> Any:
        found = self._boundaries(input_mask_BS, dtype)
        return found if self._pays(found.blocks, *input_mask_BS.shape) else super().forward(input_mask_BS, dtype)


class BlockContext(nn.Module):
    """As `bert.SdpaContext`: a small attention for each sequence, or for all short ones of the same length.

    Takes an additive mask, too, where a micro-batch has one.
    """

    def __init__(self, rule: BlockRule):
        super().__init__()
        self._eager = rule.eager

    def forward(self, query_BNSA, key_BNSA, value_BNSA, boundaries: Any, dropout: float) -> torch.Tensor:
        def attend(query, key, value, mask=None):
            compute = _plainly if self._eager(query.shape[2], dropout) else F.scaled_dot_product_attention
            return compute(query, key, value, attn_mask=mask, dropout_p=dropout)

        if isinstance(boundaries, torch.Tensor):
            return attend(query_BNSA, key_BNSA, value_BNSA, boundaries.to(query_BNSA.dtype))
        assert boundaries.blocks is not None, "made for the kernel"
        heads = [_end_to_end(each) for each in (query_BNSA, key_BNSA, value_BNSA)]
        return _rows(attend_in_blocks(heads, boundaries.blocks, attend), query_BNSA)


def _plainly(query, key, value, *, attn_mask: Optional[torch.Tensor], dropout_p: float) -> torch.Tensor:
    """What `F.scaled_dot_product_attention` computes, by products and a softmax: faster in bfloat16 on a CPU."""
    scores = torch.matmul(query * (1.0 / math.sqrt(query.shape[-1])), key.transpose(2, 3))
    weights = torch.softmax(scores if attn_mask is None else scores + attn_mask, dim=-1)
    return torch.matmul(F.dropout(weights, dropout_p), value)


class KernelContext(nn.Module):
    """As `bert.SdpaContext`, by the variable-length kernel of torch: one call, boundaries as a tensor."""

    def forward(self, query_BNSA, key_BNSA, value_BNSA, boundaries: _Boundaries, dropout: float) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        slots = query_BNSA.shape[2]  # no sequence is longer
        context_TNA = varlen_attn(
            _end_to_end(query_BNSA),
            _end_to_end(key_BNSA),
            _end_to_end(value_BNSA),
            boundaries.cumulative,
            boundaries.cumulative,
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


def attend_within_sequences(
    network: Any, *, sequences: int, kernel: bool, rule: BlockRule = SDPA_BLOCKS, or_mask: bool = False
) -> None:
    """Replace the mask and the attention of a network built for "sdpa", in place.

    network: anything with `attention_mask` and `bert`. sequences: D, the most in a row. kernel: whether torch's serves
    this device and type; else blocks, computed by the rule. or_mask: a dense mask where the rule says so.
    """
    network.attention_mask = (
        MaskWhereCheaper(sequences, rule) if or_mask else SequenceBoundaries(sequences, blocks=not kernel)
    )
    for layer in network.bert.encoder.layer:
        layer.attention.self.context = KernelContext() if kernel else BlockContext(rule)
