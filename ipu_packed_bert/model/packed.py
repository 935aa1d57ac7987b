"""packedBERT: what packing changes in BERT (paper section 3.2), and nothing else.

Three changes, all with constant shapes: positions are looked up (in `bert.BertEmbeddings`), a block mask built from the
sequence numbers keeps the sequences of a pack apart, and the heads work on gathered slots, as many for each pack.
Letters as in `bert.py`: B rows, S slots, P slots for masked tokens, D slots for sequences, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import nn

from ipu_packed_bert.model.bert import ATTENTIONS, BertModel, BertPreTrainingHeads, initialise
from ipu_packed_bert.model.loss import PretrainingLoss, PretrainingOutput
from ipu_packed_bert.settings.schema import LossConfig, ModelConfig
from pack_data.store.packs import FIELDS

BATCH_FIELDS = (*FIELDS, "mlm_scale", "nsp_scale")


def hidden_score(attention: str) -> float:
    """What a mask adds to a score that must not count.

    -1000 fits float16, and exp(-1000 + any difference of scores met in training) is exactly 0 in every type.
    scaled_dot_product_attention takes -inf, which is exact for any scores, since no row is all masked.
    """
    return -1000.0 if attention == "eager" else float("-inf")


class AttentionMask(nn.Module):
    """Sequence numbers of the slots -> additive mask: slots with equal numbers see each other (paper section 3.2.2).

    For a row of a sequence of two tokens, one of three and one slot of padding, where 0 is "seen" and x "hidden":

        sequence   1 1 2 2 2 0
               1   0 0 x x x x
               1   0 0 x x x x
               2   x x 0 0 0 x
               2   x x 0 0 0 x
               2   x x 0 0 0 x
               0   x x x x x 0      padding sees padding, so that no softmax is over nothing, which would be NaN
    """

    def __init__(self, attention: str):
        super().__init__()
        self.hidden = hidden_score(attention)
        # Of the products where autocast gives them another type than the weights'. A mask of that type is made once and
        # kept once; else each layer makes its own copy, and keeps it for the backward pass.
        self.products: Optional[torch.dtype] = None

    def forward(self, input_mask_BS, dtype: torch.dtype) -> torch.Tensor:
        """int32 sequence numbers [B, S], 0 in padding -> mask [B, 1, S, S] of `products`, else of `dtype`."""
        dtype = dtype if self.products is None else self.products
        same_B1SS = (input_mask_BS.unsqueeze(2) == input_mask_BS.unsqueeze(1)).unsqueeze(1)
        seen = torch.zeros((), dtype=dtype, device=input_mask_BS.device)
        return torch.where(same_B1SS, seen, torch.full_like(seen, self.hidden))


class PaddingMask(nn.Module):
    """The mask of BERT without packs, in place of `AttentionMask` where each row holds one sequence: [B, 1, 1, S].

    hidden: as `AttentionMask.hidden`. An empty row sees its padding, else its softmax would be over nothing.
    """

    def __init__(self, hidden: float):
        super().__init__()
        self.hidden = hidden

    def forward(self, input_mask_BS, dtype: torch.dtype) -> torch.Tensor:
        real_BS = input_mask_BS > 0
        seen_B11S = (real_BS | ~real_BS.any(dim=1, keepdim=True))[:, None, None, :]
        seen = torch.zeros((), dtype=dtype, device=input_mask_BS.device)
        return torch.where(seen_B11S, seen, torch.full_like(seen, self.hidden))


class GatherSlots(nn.Module):
    """hidden [B, S, H], slots [B, K] -> the hidden states of those slots [B, K, H]."""

    def forward(self, hidden_BSH, slots_BK) -> torch.Tensor:
        index_BKH = slots_BK.to(torch.int64).unsqueeze(2).expand(-1, -1, hidden_BSH.shape[2])
        return torch.gather(hidden_BSH, 1, index_BKH)


class PackedBert(nn.Module):
    """The encoder under the block mask: what the networks of all tasks share.

    `attention_mask` (with each layer's `attention.self.scores`, which takes what it makes) and modules of the class
    `GatherSlots` may be replaced from outside; they have no parameters.
    """

    def __init__(self, model: ModelConfig, *, attention: str, pooler: bool):
        super().__init__()
        if attention not in ATTENTIONS:
            raise ValueError(f"attention is {attention!r}; it is one of {', '.join(ATTENTIONS)}")
        self.attention_mask: Any = AttentionMask(attention)
        self.bert = BertModel(model, attention=attention, pooler=pooler)

    def hidden(self, input_ids_BS, input_mask_BS, segment_ids_BS, positions_BS) -> torch.Tensor:
        """int32 fields of the slots -> hidden states [B, S, H]."""
        mask_B1SS = self.attention_mask(input_mask_BS, self.bert.embeddings.word_embeddings.weight.dtype)
        return self.bert(input_ids_BS, segment_ids_BS, positions_BS, mask_B1SS)


class _PretrainingLogits(NamedTuple):
    mlm_BPV: torch.Tensor
    nsp_BD2: Optional[torch.Tensor]  # None where the model has no next sentence head


class PackedBertForPreTraining(PackedBert):
    """BERT with both pre-training heads over packs; a pack of one sequence is the unpacked case.

    Without next sentence prediction (`loss.next_sentence` false) the pooler and its classifier do not exist, and the
    remaining names are those of Hugging Face's BertForMaskedLM. `cls.predictions.product` may be replaced from outside
    too.
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
        """Logits of the gathered slots; those of unused slots are finite and mean nothing."""
        hidden_BSH = self.hidden(input_ids_BS, input_mask_BS, segment_ids_BS, positions_BS)
        classifier, pooler = self.cls.seq_relationship, self.bert.pooler
        # Both sets of slots are gathered before the first head: only the gathered rows, not the whole hidden state,
        # then have to reach the place where the heads are.
        masked_BPH = self.masked_lm_slots(hidden_BSH, masked_lm_positions_BP)
        first_BDH = None if classifier is None else self.next_sentence_slots(hidden_BSH, next_sentence_positions_BD)
        mlm_BPV = self.cls.predictions(masked_BPH, self.bert.embeddings.word_embeddings.weight)
        nsp_BD2 = None if classifier is None or pooler is None else classifier(pooler(first_BDH))
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
        """The fields of `BATCH_FIELDS`, int32 (the two scales float32) -> scaled sums over the rows, see `loss.py`."""
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
