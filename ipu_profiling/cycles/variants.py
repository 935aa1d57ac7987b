"""Variants of the network that compute the same numbers with other graphs.

Modules of `PackedBertForPreTraining` are replaced from outside, as an engine does. tests/ipu_profiling/cycles proves
that the results are equal and that the arrangement `tracing.PACKED` is the graph of the IPU engine.
Letters as in the model: B rows, S slots, N heads, A width of a head, H hidden size, K gathered slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ipu_packed_bert.model.bert import MaskedScores
from ipu_packed_bert.model.packed import PackedBertForPreTraining
from ipu_packed_bert.model.products import OneHotSlots, mask_in_product
from ipu_profiling.cycles.tracing import PACKED, POPART, UNPACKED

_HIDDEN = -1000.0  # exactly no attention, in every type (the model's own constant)


def build(
    model: Any, loss: Any, arrangement: str, *, slots: int, depth: int, columns: int
) -> nn.Module:
    """Build the network in an arrangement, for packs of `slots` and up to `depth` sequences.

    columns: width of the codes of a mask in the product, `settings.schema.mask_columns`.
    """
    built: Any = PackedBertForPreTraining(model, loss)
    built.masked_lm_slots = OneHotSlots(slots)
    built.next_sentence_slots = OneHotSlots(slots)
    if arrangement == PACKED:
        mask_in_product(built, sequences=depth, columns=columns)
    elif arrangement == POPART:
        built.attention_mask = _VariantNumbers()
        for layer in built.bert.encoder.layer:
            layer.attention.self.scores = _RebuildingScores()
    elif arrangement == UNPACKED:
        built.attention_mask = _RowMask()
        built.next_sentence_slots = _FirstSlots()
        built.bert.embeddings.position_embeddings.__class__ = _FixedPositions
    return built


class _RowMask(nn.Module):
    """Padding mask of unpacked sequences, [B, 1, 1, S]."""

    def forward(self, input_mask_BS, dtype):
        zero = torch.zeros((), dtype=dtype, device=input_mask_BS.device)
        mask_BS = torch.where(input_mask_BS > 0, zero, torch.full_like(zero, _HIDDEN))
        return mask_BS[:, None, None, :]


class _VariantNumbers(nn.Module):
    """No mask but the sequence numbers: [B, S] is copied from IPU to IPU instead of [B, 1, S, S]."""

    def forward(self, input_mask_BS, dtype):
        return input_mask_BS


class _BlockMask(nn.Module):
    """The model's mask by arithmetic, [B, 1, S, S]."""

    def forward(self, input_mask_BS, dtype):
        rows = input_mask_BS.unsqueeze(2)
        columns = input_mask_BS.unsqueeze(1)
        return ((rows != columns).to(dtype) * _HIDDEN).unsqueeze(1)


class _RebuildingScores(MaskedScores):
    """Scores of a layer that builds the mask from the sequence numbers itself."""

    def __init__(self):
        super().__init__()
        self.block_mask = _BlockMask()

    def forward(self, query_BNSA, key_BNSA, input_mask_BS):
        mask = self.block_mask(input_mask_BS, query_BNSA.dtype)
        return super().forward(query_BNSA, key_BNSA, mask)


class _FirstSlots(nn.Module):
    """[CLS] at the first slots, as in unpacked rows; packs of this variant need all [CLS] tokens first."""

    def forward(self, hidden_BSH, slots_BK):
        return hidden_BSH.narrow(1, 0, slots_BK.shape[1])


class _FixedPositions(nn.Embedding):
    """The same positions in every row: a slice of the table."""

    def forward(self, positions_BS):
        return self.weight[: positions_BS.shape[1]]
