"""packedBERT: the changes of packing to BERT (paper section 3.2).

Three changes, all with constant shapes: positions are looked up (in `_BertEmbeddings`), a block mask built from the
sequence numbers keeps the sequences of a pack apart, and the heads work on a fixed number of gathered slots per pack.
Letters as in `bert.py`: B rows, S slots, P slots for masked tokens, D slots for sequences, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch
from torch import nn

from ipu_packed_bert.model.bert import ATTENTIONS, BertModel, BertPreTrainingHeads, initialise
from ipu_packed_bert.model.loss import PretrainingLoss, PretrainingOutput
from pack_data.store.packs import FIELDS

if TYPE_CHECKING:
    from ipu_packed_bert.settings.schema import LossConfig, ModelConfig

# Arguments of `PackedBertForPreTraining.forward`.
BATCH_FIELDS = (*FIELDS, "mlm_scale", "nsp_scale")


def hidden_score(attention: str) -> float:
    """Return the number that a mask adds to a hidden score.

    -1000 fits into float16, and exp(-1000 + any difference of scores in training) is exactly 0 in every type.
    scaled_dot_product_attention accepts -inf, which is exact for any scores, because no row is completely masked.

    Args:
        attention: "eager" or "sdpa".
    """
    return -1000.0 if attention == "eager" else float("-inf")


def _additive(seen: torch.Tensor, hidden: float, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 where a slot is seen, else the number that hides it."""
    zero = torch.zeros((), dtype=dtype, device=seen.device)
    return torch.where(seen, zero, torch.full_like(zero, hidden))


class AttentionMask(nn.Module):
    """Additive mask in which the slots of a sequence attend to one another (paper section 3.2.2).

    The mask of a row with a sequence of two tokens, a sequence of three and one slot of padding; 0: seen, x: hidden:

        sequence   1 1 2 2 2 0
               1   0 0 x x x x
               1   0 0 x x x x
               2   x x 0 0 0 x
               2   x x 0 0 0 x
               2   x x 0 0 0 x
               0   x x x x x 0      padding attends to padding, because an empty softmax would be NaN
    """

    def __init__(self, attention: str):
        super().__init__()
        self.hidden = hidden_score(attention)
        # Type of the products, if autocast gives them another type than the weights. A mask of that type is kept once;
        # otherwise each layer copies it and keeps its copy for the backward pass.
        self.products: Optional[torch.dtype] = None

    def forward(self, input_mask_BS, dtype: torch.dtype) -> torch.Tensor:
        """Map int32 sequence numbers [B, S], 0 in padding, to a mask [B, 1, S, S] of type `products` or ``dtype``."""
        dtype = dtype if self.products is None else self.products
        same_B1SS = (input_mask_BS.unsqueeze(2) == input_mask_BS.unsqueeze(1)).unsqueeze(1)
        return _additive(same_B1SS, self.hidden, dtype)


class PaddingMask(nn.Module):
    """The mask of BERT without packs, in place of `AttentionMask` for rows of one sequence.

    An empty row attends to its padding, because an empty softmax would be NaN.

    Args:
        hidden: the number that is added to a hidden score, see `hidden_score`.
    """

    def __init__(self, hidden: float):
        super().__init__()
        self.hidden = hidden

    def forward(self, input_mask_BS, dtype: torch.dtype) -> torch.Tensor:
        """Map sequence numbers [B, S] to a mask [B, 1, 1, S]."""
        real_BS = input_mask_BS > 0
        empty_B1 = ~real_BS.any(dim=1, keepdim=True)
        return _additive((real_BS | empty_B1)[:, None, None, :], self.hidden, dtype)


class GatherSlots(nn.Module):
    """Selection of the slots of a head."""

    def forward(self, hidden_BSH, slots_BK) -> torch.Tensor:
        """Gather hidden states [B, S, H] of slots [B, K] -> [B, K, H]."""
        index_BKH = slots_BK.to(torch.int64).unsqueeze(2).expand(-1, -1, hidden_BSH.shape[2])
        return torch.gather(hidden_BSH, 1, index_BKH)


class PackedBert(nn.Module):
    """The encoder with the block mask, which the networks of all tasks share.

    `attention_mask` (together with each layer's `attention.self.scores`, which uses its output) and modules of the
    class `GatherSlots` may be replaced from outside; they have no parameters.

    Args:
        model: sizes of the network.
        attention: "eager" or "sdpa".
        pooler: add a pooler.

    Raises:
        ValueError: there is no such attention.
    """

    def __init__(self, model: ModelConfig, *, attention: str, pooler: bool):
        super().__init__()
        if attention not in ATTENTIONS:
            raise ValueError(f"attention is {attention!r}; must be one of {', '.join(ATTENTIONS)}")
        self.attention_mask: Any = AttentionMask(attention)
        self.bert = BertModel(model, attention=attention, pooler=pooler)

    def hidden(self, input_ids_BS, input_mask_BS, segment_ids_BS, positions_BS) -> torch.Tensor:
        """Compute hidden states [B, S, H] from int32 fields of the slots."""
        mask_B1SS = self.attention_mask(
            input_mask_BS, self.bert.embeddings.word_embeddings.weight.dtype
        )
        return self.bert(input_ids_BS, segment_ids_BS, positions_BS, mask_B1SS)


class _PretrainingLogits(NamedTuple):
    mlm_BPV: torch.Tensor
    nsp_BD2: Optional[torch.Tensor]  # None if the model has no next sentence head


class PackedBertForPreTraining(PackedBert):
    """BERT with both pre-training heads over packs; a pack of one sequence is the unpacked case.

    Without next sentence prediction the pooler and its classifier do not exist, and the remaining names are those of
    Hugging Face's BertForMaskedLM. `cls.predictions.product` may be replaced from outside too.

    Args:
        model: sizes of the network.
        loss: normalisation of the loss, and the switch of next sentence prediction.
        attention: "eager" or "sdpa".
    """

    def __init__(self, model: ModelConfig, loss: LossConfig, *, attention: str = "eager"):
        super().__init__(model, attention=attention, pooler=loss.next_sentence)
        self.masked_lm_slots: nn.Module = GatherSlots()
        self.next_sentence_slots: nn.Module = GatherSlots()
        self.cls = BertPreTrainingHeads(model, next_sentence=loss.next_sentence)
        self.loss = PretrainingLoss(loss)
        initialise(self, model.initializer_range)

    def logits(
        self,
        input_ids_BS,
        input_mask_BS,
        segment_ids_BS,
        positions_BS,
        masked_lm_positions_BP,
        next_sentence_positions_BD,
    ) -> _PretrainingLogits:
        """Compute the logits of the gathered slots; those of unused slots are finite and arbitrary."""
        classifier = self.cls.seq_relationship
        table_VH = self.bert.embeddings.word_embeddings.weight
        hidden_BSH = self.hidden(input_ids_BS, input_mask_BS, segment_ids_BS, positions_BS)
        # Both sets of slots are gathered before the first head, so that only the gathered rows are copied to the device
        # of the heads, not the whole hidden state.
        masked_BPH = self.masked_lm_slots(hidden_BSH, masked_lm_positions_BP)
        if classifier is None:
            return _PretrainingLogits(self.cls.predictions(masked_BPH, table_VH), None)

        first_BDH = self.next_sentence_slots(hidden_BSH, next_sentence_positions_BD)
        mlm_BPV = self.cls.predictions(masked_BPH, table_VH)
        nsp_BD2 = classifier(self.bert.pooler(first_BDH))
        return _PretrainingLogits(mlm_BPV, nsp_BD2)

    def forward(
        self,
        input_ids_BS,
        input_mask_BS,
        segment_ids_BS,
        positions_BS,
        masked_lm_positions_BP,
        masked_lm_ids_BP,
        masked_lm_weights_BP,
        next_sentence_positions_BD,
        next_sentence_labels_BD,
        next_sentence_weights_BD,
        mlm_scale_B,
        nsp_scale_B,
    ) -> PretrainingOutput:
        """Compute scaled sums over the rows, see `loss.py`, from the fields of `BATCH_FIELDS`.

        All fields are int32 except the two scales, which are float32.
        """
        logits = self.logits(
            input_ids_BS,
            input_mask_BS,
            segment_ids_BS,
            positions_BS,
            masked_lm_positions_BP,
            next_sentence_positions_BD,
        )
        return self.loss(
            logits.mlm_BPV,
            logits.nsp_BD2,
            masked_lm_ids_BP,
            masked_lm_weights_BP,
            next_sentence_labels_BD,
            next_sentence_weights_BD,
            mlm_scale_B,
            nsp_scale_B,
        )
