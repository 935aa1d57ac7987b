"""BERT in plain torch, with the parameter names and shapes of Hugging Face's BertForPreTraining.

The encoder takes positions and an attention mask as inputs, so it is the same for a row of one sequence and for a row
of several. Every shape is static, and eager attention uses only operators that a static graph compiler lowers.

Letters in names of tensors: B rows of the micro-batch, S slots of a row, H hidden size, N attention heads, A width of
a head (H / N), I intermediate size, V vocabulary, P slots for masked tokens, D slots for sequences.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Sequence

import torch
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from ipu_packed_bert.settings.schema import ModelConfig


ATTENTIONS = ("eager", "sdpa")


class _BertEmbeddings(nn.Module):
    def __init__(self, model: ModelConfig):
        super().__init__()
        self.word_embeddings = nn.Embedding(model.vocabulary_size, model.hidden_size)
        self.position_embeddings = nn.Embedding(model.max_position_embeddings, model.hidden_size)
        self.token_type_embeddings = nn.Embedding(model.type_vocabulary_size, model.hidden_size)
        self.LayerNorm = nn.LayerNorm(model.hidden_size, eps=model.layer_norm_eps)
        self.dropout = nn.Dropout(model.hidden_dropout)

    def forward(self, input_ids_BS, segment_ids_BS, positions_BS) -> torch.Tensor:
        """Embed int32 ids, segments and positions [B, S] -> hidden states [B, S, H]."""
        # Positions restart in every sequence of a pack, so they are looked up, not added as a constant table
        # (paper section 3.2.1).
        summed_BSH = (
            self.word_embeddings(input_ids_BS)
            + self.position_embeddings(positions_BS)
            + self.token_type_embeddings(segment_ids_BS)
        )
        return self.dropout(self.LayerNorm(summed_BSH))


class AttentionDropout(nn.Dropout):
    """Dropout of attention weights; a module, so that it can be replaced from outside."""

    def forward(self, weights: torch.Tensor, starts: Sequence[int] = ()) -> torch.Tensor:
        """Drop weights of whole rows [B, N, S, S], or of sequences [n, N, L, L].

        Args:
            weights: the weights.
            starts: the first slots of the n sequences in the rows, which are laid end to end; empty: whole rows.
        """
        return super().forward(weights)

    @property
    def rate(self) -> float:
        """The probability of dropping a weight, 0 in evaluation."""
        return self.p if self.training else 0.0


class MaskedScores(nn.Module):
    """Scores of attention with an additive mask; a module, so that it can be replaced from outside."""

    def forward(self, query_BNSA, key_BNSA, mask_B1SS) -> torch.Tensor:
        """Compute scores [B, N, S, S]."""
        scores_BNSS = torch.matmul(query_BNSA, key_BNSA.transpose(2, 3))
        # The cast matters under autocast only, because a float32 mask would make the scores float32.
        return scores_BNSS + mask_B1SS.to(scores_BNSS.dtype)


class _SdpaContext(nn.Module):
    """Attention in one operator; a module, so that it can be replaced from outside."""

    def forward(
        self, query_BNSA, key_BNSA, value_BNSA, mask_B1SS, dropout: AttentionDropout
    ) -> torch.Tensor:
        """Compute the context [B, N, S, A]."""
        mask_B1SS = mask_B1SS.to(query_BNSA.dtype)
        return F.scaled_dot_product_attention(
            query_BNSA, key_BNSA, value_BNSA, attn_mask=mask_B1SS, dropout_p=dropout.rate
        )


class _BertSelfAttention(nn.Module):
    def __init__(self, model: ModelConfig, attention: str):
        super().__init__()
        self.num_heads = model.num_heads
        self.head_size = model.hidden_size // model.num_heads
        self.query = nn.Linear(model.hidden_size, model.hidden_size)
        self.key = nn.Linear(model.hidden_size, model.hidden_size)
        self.value = nn.Linear(model.hidden_size, model.hidden_size)
        self.scores = MaskedScores()
        self.context = _SdpaContext() if attention == "sdpa" else None
        self.dropout = AttentionDropout(model.attention_dropout)

    def _heads(self, projected_BSH) -> torch.Tensor:
        batch, slots, _ = projected_BSH.shape
        return projected_BSH.view(batch, slots, self.num_heads, self.head_size).transpose(1, 2)

    def forward(self, hidden_BSH, mask_B1SS) -> torch.Tensor:
        """Attend within each sequence; `mask_B1SS` comes from `packed.AttentionMask` for this kind of attention."""
        query_BNSA = self._heads(self.query(hidden_BSH))
        key_BNSA = self._heads(self.key(hidden_BSH))
        value_BNSA = self._heads(self.value(hidden_BSH))
        if self.context is not None:
            context_BNSA = self.context(query_BNSA, key_BNSA, value_BNSA, mask_B1SS, self.dropout)
        else:
            # The query is scaled, not the scores: S / A times fewer multiplications.
            scale = 1.0 / math.sqrt(self.head_size)
            scores_BNSS = self.scores(query_BNSA * scale, key_BNSA, mask_B1SS)
            weights_BNSS = self.dropout(torch.softmax(scores_BNSS, dim=-1))
            context_BNSA = torch.matmul(weights_BNSS, value_BNSA)
        return context_BNSA.transpose(1, 2).reshape(hidden_BSH.shape)


class _BertResidual(nn.Module):
    """Dense layer, dropout, residual sum and LayerNorm: the end of both halves of a layer."""

    def __init__(self, model: ModelConfig, in_features: int):
        super().__init__()
        self.dense = nn.Linear(in_features, model.hidden_size)
        self.LayerNorm = nn.LayerNorm(model.hidden_size, eps=model.layer_norm_eps)
        self.dropout = nn.Dropout(model.hidden_dropout)

    def forward(self, inner_BSX, hidden_BSH) -> torch.Tensor:
        return self.LayerNorm(self.dropout(self.dense(inner_BSX)) + hidden_BSH)


class _BertAttention(nn.Module):
    def __init__(self, model: ModelConfig, attention: str):
        super().__init__()
        self.self = _BertSelfAttention(model, attention)
        self.output = _BertResidual(model, model.hidden_size)

    def forward(self, hidden_BSH, mask_B1SS) -> torch.Tensor:
        return self.output(self.self(hidden_BSH, mask_B1SS), hidden_BSH)


class _BertIntermediate(nn.Module):
    def __init__(self, model: ModelConfig):
        super().__init__()
        self.dense = nn.Linear(model.hidden_size, model.intermediate_size)

    def forward(self, hidden_BSH) -> torch.Tensor:
        # The exact form (erf), as in Hugging Face's checkpoints. Some static compilers always compute the tanh form;
        # the two differ by less than 5e-4.
        return F.gelu(self.dense(hidden_BSH))


class _BertLayer(nn.Module):
    def __init__(self, model: ModelConfig, attention: str):
        super().__init__()
        self.attention = _BertAttention(model, attention)
        self.intermediate = _BertIntermediate(model)
        self.output = _BertResidual(model, model.intermediate_size)

    def forward(self, hidden_BSH, mask_B1SS) -> torch.Tensor:
        attended_BSH = self.attention(hidden_BSH, mask_B1SS)
        return self.output(self.intermediate(attended_BSH), attended_BSH)


class _BertEncoder(nn.Module):
    def __init__(self, model: ModelConfig, attention: str):
        super().__init__()
        self.layer = nn.ModuleList(_BertLayer(model, attention) for _ in range(model.num_layers))

    def forward(self, hidden_BSH, mask_B1SS) -> torch.Tensor:
        for layer in self.layer:
            hidden_BSH = layer(hidden_BSH, mask_B1SS)
        return hidden_BSH


class _BertPooler(nn.Module):
    def __init__(self, model: ModelConfig):
        super().__init__()
        self.dense = nn.Linear(model.hidden_size, model.hidden_size)

    def forward(self, first_tokens_BDH) -> torch.Tensor:
        """Pool the hidden states of the [CLS] slots, one for each sequence of a row."""
        return torch.tanh(self.dense(first_tokens_BDH))


class BertModel(nn.Module):
    """Embeddings and encoder, and the pooler, which the caller applies to the [CLS] slots.

    Args:
        model: sizes of the network.
        attention: one of `ATTENTIONS`.
        pooler: add a pooler, for heads that use [CLS].
    """

    def __init__(self, model: ModelConfig, *, attention: str, pooler: bool):
        super().__init__()
        self.embeddings = _BertEmbeddings(model)
        self.encoder = _BertEncoder(model, attention)
        self.pooler: Any = _BertPooler(model) if pooler else None

    def forward(self, input_ids_BS, segment_ids_BS, positions_BS, mask_B1SS) -> torch.Tensor:
        """Compute hidden states [B, S, H]."""
        hidden_BSH = self.embeddings(input_ids_BS, segment_ids_BS, positions_BS)
        return self.encoder(hidden_BSH, mask_B1SS)


class _BertPredictionHeadTransform(nn.Module):
    def __init__(self, model: ModelConfig):
        super().__init__()
        self.dense = nn.Linear(model.hidden_size, model.hidden_size)
        self.LayerNorm = nn.LayerNorm(model.hidden_size, eps=model.layer_norm_eps)

    def forward(self, hidden_BPH) -> torch.Tensor:
        return self.LayerNorm(F.gelu(self.dense(hidden_BPH)))


class VocabularyProduct(nn.Module):
    """Product of hidden states and the word embeddings; a module, so that it can be replaced from outside."""

    def forward(self, hidden_BPH, table_VH, bias_V) -> torch.Tensor:
        """Compute logits [B, P, V]."""
        return F.linear(hidden_BPH, table_VH, bias_V)


class _BertLMPredictionHead(nn.Module):
    def __init__(self, model: ModelConfig):
        super().__init__()
        self.transform = _BertPredictionHeadTransform(model)
        self.bias = nn.Parameter(torch.zeros(model.vocabulary_size))
        # The decoder's weight is the word embedding table, which the caller passes. Registered twice, it would have two
        # names, and functional transformations of the module would fail.
        self.product: nn.Module = VocabularyProduct()

    def forward(self, hidden_BPH, table_VH) -> torch.Tensor:
        return self.product(self.transform(hidden_BPH), table_VH, self.bias)


class BertPreTrainingHeads(nn.Module):
    """The head of masked tokens and, with next sentence prediction, its classifier."""

    def __init__(self, model: ModelConfig, *, next_sentence: bool):
        super().__init__()
        self.predictions = _BertLMPredictionHead(model)
        self.seq_relationship = nn.Linear(model.hidden_size, 2) if next_sentence else None


def initialise(module: nn.Module, initializer_range: float) -> None:
    """Set BERT's initial values: normal weights and zero biases; LayerNorm keeps one and zero.

    Args:
        module: the network, changed in place; the values are drawn from torch's generator.
        initializer_range: standard deviation of the weights.
    """
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            nn.init.normal_(part.weight, mean=0.0, std=initializer_range)
        if isinstance(part, nn.Linear):
            nn.init.zeros_(part.bias)
