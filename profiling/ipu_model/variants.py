"""The model with its packed parts written in other ways: every variant computes the same numbers.

Replaces modules of `PackedBertForPreTraining` from outside, as an engine would. tests/profiling proves the equality.
Letters as in the model: B rows, S slots, N heads, A width of a head, H hidden size, K gathered slots, C classes.
"""
from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ipu_model.workload import Arrangement
from ipu_packed_bert.model.packed import PackedBertForPreTraining

HIDDEN = -1000.0                          # exactly no attention, in every type (the model's own constant)


def build(model: Any, loss: Any, arrangement: Arrangement, *, sequences: int = 16) -> nn.Module:
    """The model in the wanted arrangement; `sequences`: what the one-hot codes of a "product" mask have room for."""
    built = PackedBertForPreTraining(model, loss)
    apply(built, arrangement, sequences=sequences)
    return built


def apply(model: nn.Module, arrangement: Arrangement, *, sequences: int = 16) -> None:
    """Rewrite `model` in place; parameters keep their names and values."""
    layers = model.bert.encoder.layer
    if arrangement.mask == "row":
        model.attention_mask = RowMask()
    elif arrangement.mask == "product":
        model.attention_mask = SequenceCodes(sequences)
        for layer in layers:
            layer.attention.self.__class__ = ProductMaskedAttention
    elif arrangement.mask == "none":
        model.attention_mask = NoMask()
        for layer in layers:
            layer.attention.self.__class__ = UnmaskedAttention
    elif arrangement.apply == "select":
        model.attention_mask = SameSequence()
        for layer in layers:
            layer.attention.self.__class__ = SelectMaskedAttention
    elif arrangement.mask == "layer":
        model.attention_mask = Numbers()
        for layer in layers:
            layer.attention.self.block_mask = BlockMask(arrangement.mask_form)
            layer.attention.self.__class__ = RebuildingAttention
    elif arrangement.mask_form == "arithmetic":
        model.attention_mask = BlockMask("arithmetic")
    if arrangement.cls == "fixed":
        model.next_sentence_slots = FirstSlots()
    elif arrangement.cls == "one_hot":
        model.next_sentence_slots = OneHotSlots()
    if arrangement.mlm == "one_hot":
        model.masked_lm_slots = OneHotSlots()
    positions = {"fixed": FixedPositions, "one_hot": OneHotPositions}.get(arrangement.positions)
    if positions is not None:
        model.bert.embeddings.position_embeddings.__class__ = positions


# Masks ---------------------------------------------------------------------------------------------------------------

class RowMask(nn.Module):
    """Padding mask of unpacked sequences, [B, 1, 1, S]."""

    def forward(self, input_mask_BS, dtype):
        zero = torch.zeros((), dtype=dtype, device=input_mask_BS.device)
        return torch.where(input_mask_BS > 0, zero, torch.full_like(zero, HIDDEN))[:, None, None, :]


class NoMask(nn.Module):
    def forward(self, input_mask_BS, dtype):
        return None


class BlockMask(nn.Module):
    """The model's own mask, by selection or by arithmetic."""

    def __init__(self, form: str):
        super().__init__()
        self.form = form

    def forward(self, input_mask_BS, dtype):
        rows, columns = input_mask_BS.unsqueeze(2), input_mask_BS.unsqueeze(1)
        if self.form == "arithmetic":
            return ((rows != columns).to(dtype) * HIDDEN).unsqueeze(1)
        zero = torch.zeros((), dtype=dtype, device=input_mask_BS.device)
        return torch.where(rows == columns, zero, torch.full_like(zero, HIDDEN)).unsqueeze(1)


class SameSequence(nn.Module):
    def forward(self, input_mask_BS, dtype):
        return (input_mask_BS.unsqueeze(2) == input_mask_BS.unsqueeze(1)).unsqueeze(1)


class Numbers(nn.Module):
    """Hands the sequence numbers on: [B, S] travels from IPU to IPU instead of [B, 1, S, S]."""

    def forward(self, input_mask_BS, dtype):
        return input_mask_BS


class SequenceCodes(nn.Module):
    """Two codes of each slot's sequence number whose product is the additive mask.

    For slots i and j in sequences a and b: onehot(a) . HIDDEN * (1 - onehot(b)) is 0 where a = b and HIDDEN where not.
    Appended to query and key, the codes make the score product add the mask: no [S, S] tensor is made, moved or added.
    Exact in every type: within a sequence only zeros are added. Returns [B, 2, S, C], C = sequences (0 is padding).
    """

    def __init__(self, sequences: int):
        super().__init__()
        self.sequences = sequences

    def forward(self, input_mask_BS, dtype):
        numbers_C = torch.arange(self.sequences, dtype=input_mask_BS.dtype, device=input_mask_BS.device)
        own_BSC = (input_mask_BS.unsqueeze(2) == numbers_C).to(dtype)
        return torch.stack((own_BSC, (1.0 - own_BSC) * HIDDEN), dim=1)


class _Attention(nn.Module):
    """What all variants share with the model's BertSelfAttention, whose parameters and sizes they keep."""

    def projected(self, hidden_BSH):
        query_BNSA = self._heads(self.query(hidden_BSH)) * (1.0 / math.sqrt(self.head_size))
        return query_BNSA, self._heads(self.key(hidden_BSH)), self._heads(self.value(hidden_BSH))

    def _heads(self, projected_BSH):
        batch, slots, _ = projected_BSH.shape
        return projected_BSH.view(batch, slots, self.num_heads, self.head_size).transpose(1, 2)

    def context(self, scores_BNSS, value_BNSA, like_BSH):
        weights_BNSS = self.dropout(torch.softmax(scores_BNSS, dim=-1))
        return torch.matmul(weights_BNSS, value_BNSA).transpose(1, 2).reshape(like_BSH.shape)


class ProductMaskedAttention(_Attention):
    def forward(self, hidden_BSH, codes_B2SC):
        query_BNSA, key_BNSA, value_BNSA = self.projected(hidden_BSH)
        batch, _, slots, classes = codes_B2SC.shape
        own, other = (codes_B2SC[:, i].unsqueeze(1).expand(batch, self.num_heads, slots, classes) for i in (0, 1))
        scores_BNSS = torch.matmul(torch.cat((query_BNSA, own), dim=3), torch.cat((key_BNSA, other), dim=3).transpose(2, 3))
        return self.context(scores_BNSS, value_BNSA, hidden_BSH)


class UnmaskedAttention(_Attention):
    def forward(self, hidden_BSH, mask):
        query_BNSA, key_BNSA, value_BNSA = self.projected(hidden_BSH)
        return self.context(torch.matmul(query_BNSA, key_BNSA.transpose(2, 3)), value_BNSA, hidden_BSH)


class SelectMaskedAttention(_Attention):
    def forward(self, hidden_BSH, same_B1SS):
        query_BNSA, key_BNSA, value_BNSA = self.projected(hidden_BSH)
        scores_BNSS = torch.matmul(query_BNSA, key_BNSA.transpose(2, 3))
        hidden = torch.full((), HIDDEN, dtype=scores_BNSS.dtype, device=scores_BNSS.device)
        return self.context(torch.where(same_B1SS, scores_BNSS, hidden), value_BNSA, hidden_BSH)


class RebuildingAttention(_Attention):
    def forward(self, hidden_BSH, input_mask_BS):
        query_BNSA, key_BNSA, value_BNSA = self.projected(hidden_BSH)
        scores_BNSS = torch.matmul(query_BNSA, key_BNSA.transpose(2, 3))
        return self.context(scores_BNSS + self.block_mask(input_mask_BS, scores_BNSS.dtype), value_BNSA, hidden_BSH)


# Slots and positions --------------------------------------------------------------------------------------------------

class FirstSlots(nn.Module):
    """[CLS] where unpacked sequences have it; in packs this needs data with all [CLS] tokens first (or last)."""

    def forward(self, hidden_BSH, slots_BK):
        return hidden_BSH.narrow(1, 0, slots_BK.shape[1])


class OneHotSlots(nn.Module):
    """A gather as a product with a one-hot matrix: exact, since every sum has one term."""

    def forward(self, hidden_BSH, slots_BK):
        numbers_S = torch.arange(hidden_BSH.shape[1], dtype=slots_BK.dtype, device=slots_BK.device)
        return torch.matmul((slots_BK.unsqueeze(2) == numbers_S).to(hidden_BSH.dtype), hidden_BSH)


class FixedPositions(nn.Embedding):
    """The same positions in every row: a slice of the table."""

    def forward(self, positions_BS):
        return self.weight[: positions_BS.shape[1]]


class OneHotPositions(nn.Embedding):
    def forward(self, positions_BS):
        numbers_R = torch.arange(self.num_embeddings, dtype=positions_BS.dtype, device=positions_BS.device)
        return torch.matmul((positions_BS.unsqueeze(2) == numbers_R).to(self.weight.dtype), self.weight)
