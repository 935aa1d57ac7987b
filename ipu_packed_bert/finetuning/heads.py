"""The heads of fine-tuning over packs: every sequence of a row has its own answer, its own class, its own loss.

A pack of one sequence is the unpacked case.  Names of weights are those of Hugging Face's BertForQuestionAnswering and
BertForSequenceClassification.  Letters as in `model/bert.py`: B rows, S slots, D slots for sequences, H hidden size, C classes.

A batch is a dict of tensors: input_ids, input_mask (number of the sequence in the row, 0 in padding), segment_ids and
positions [B, S]; cls_positions (slot of each sequence's [CLS]) and sequence_numbers (which sequence of the data set, from 1;
0 where the row has none) [B, D]; the targets of the task [B, D, ...]; scale, a scalar: 1 / sequences of the whole update,
so that the losses of an update's micro-batches, summed, are its mean, however its sequences are packed.
"""
from __future__ import annotations

from typing import Dict, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ipu_packed_bert.config import ModelConfig
from ipu_packed_bert.model.bert import BertModel, initialise
from ipu_packed_bert.model.packed import AttentionMask, GatherSlots

Fields = Dict[str, torch.Tensor]


class FinetuningOutput(NamedTuple):
    """Scalars over a micro-batch."""

    loss: torch.Tensor  # sum over its sequences, times the scale
    correct: torch.Tensor  # sequences that are right: both ends of the answer, or the class; 0 for regression


def span_log_probabilities(logits_BS, input_mask_BS, present_BD) -> torch.Tensor:
    """Log-probabilities of each sequence's slots, [B, D, S]: a softmax over the slots of the sequence alone.

    The mask is added to the logits: 0 on the slots of sequence d, -inf on all others, whose probability is then exactly 0
    whatever the logits there, so neighbours cannot be felt.  A sequence that is not there sees every slot: its values are
    finite and mean nothing, where an empty softmax would be NaN.
    """
    numbers_D = torch.arange(1, present_BD.shape[1] + 1, dtype=input_mask_BS.dtype, device=input_mask_BS.device)
    other_BDS = input_mask_BS.unsqueeze(1) != numbers_D.view(1, -1, 1)
    seen = torch.zeros((), dtype=logits_BS.dtype, device=logits_BS.device)
    mask_BDS = torch.where(other_BDS & present_BD.unsqueeze(2), torch.full_like(seen, float("-inf")), seen)
    return torch.log_softmax(logits_BS.unsqueeze(1) + mask_BDS, dim=2)


class PackedBert(nn.Module):
    """What both tasks share: the encoder under the block mask."""

    of_slots: bool  # whether the logits are those of slots [B, S, ...] or of sequences [B, D, ...]

    def __init__(self, model: ModelConfig, *, attention: str, pooler: bool):
        super().__init__()
        self.attention_mask = AttentionMask(attention)
        self.bert = BertModel(model, attention=attention, pooler=pooler)

    def hidden(self, fields: Fields) -> torch.Tensor:
        mask_B1SS = self.attention_mask(fields["input_mask"], self.bert.embeddings.word_embeddings.weight.dtype)
        return self.bert(fields["input_ids"], fields["segment_ids"], fields["positions"], mask_B1SS)


class PackedBertForQuestionAnswering(PackedBert):
    """Start and end of an answer in every sequence.  Targets: start_positions, end_positions [B, D], slots of the row."""

    of_slots = True

    def __init__(self, model: ModelConfig, *, attention: str = "eager"):
        super().__init__(model, attention=attention, pooler=False)
        self.qa_outputs = nn.Linear(model.hidden_size, 2)
        initialise(self, model.initializer_range)

    def logits(self, fields: Fields) -> torch.Tensor:
        """[B, S, 2]: of every slot to be the start and the end of its sequence's answer; at least float32."""
        logits_BS2 = self.qa_outputs(self.hidden(fields))
        return logits_BS2 if logits_BS2.dtype == torch.float64 else logits_BS2.float()

    def forward(self, fields: Fields) -> FinetuningOutput:
        logits_BS2 = self.logits(fields)
        present_BD = fields["sequence_numbers"] > 0
        weight_BD = present_BD.to(logits_BS2.dtype)
        loss_BD, right_BD = torch.zeros_like(weight_BD), present_BD
        for end, name in enumerate(("start_positions", "end_positions")):
            target_BD = fields[name].to(torch.int64)
            log_BDS = span_log_probabilities(logits_BS2[:, :, end], fields["input_mask"], present_BD)
            loss_BD = loss_BD - 0.5 * torch.gather(log_BDS, 2, target_BD.unsqueeze(2)).squeeze(2)
            right_BD = right_BD & (torch.argmax(log_BDS, dim=2) == target_BD)
        # A sequence that is not there has a finite loss (its slot 0 is seen), and weighs nothing.
        return FinetuningOutput((loss_BD * weight_BD).sum() * fields["scale"], right_BD.to(weight_BD.dtype).sum())


class PackedBertForSequenceClassification(PackedBert):
    """Classes, sets of labels or a number for every sequence, from its own [CLS].

    kind "single_label": target labels [B, D]; "multi_label": labels [B, D, C] of 0 and 1; "regression": labels [B, D], C = 1.
    """

    of_slots = False

    def __init__(self, model: ModelConfig, *, classes: int, kind: str, attention: str = "eager"):
        super().__init__(model, attention=attention, pooler=True)
        self.kind = kind
        self.first_slots = GatherSlots()
        self.dropout = nn.Dropout(model.hidden_dropout)
        self.classifier = nn.Linear(model.hidden_size, classes)
        initialise(self, model.initializer_range)

    def logits(self, fields: Fields) -> torch.Tensor:
        """[B, D, C]; of sequences that are not there finite, and without meaning.  At least float32."""
        first_BDH = self.first_slots(self.hidden(fields), fields["cls_positions"])
        logits_BDC = self.classifier(self.dropout(self.bert.pooler(first_BDH)))
        return logits_BDC if logits_BDC.dtype == torch.float64 else logits_BDC.float()

    def forward(self, fields: Fields) -> FinetuningOutput:
        logits_BDC = self.logits(fields)
        present_BD = fields["sequence_numbers"] > 0
        weight_BD = present_BD.to(logits_BDC.dtype)
        labels = fields["labels"]
        if self.kind == "single_label":
            labels_BD = labels.to(torch.int64)
            loss_BD = F.cross_entropy(logits_BDC.flatten(0, 1), labels_BD.flatten(), reduction="none").view(labels_BD.shape)
            right_BD = torch.argmax(logits_BDC, dim=2) == labels_BD
        elif self.kind == "multi_label":
            labels_BDC = labels.to(logits_BDC.dtype)
            loss_BD = F.binary_cross_entropy_with_logits(logits_BDC, labels_BDC, reduction="none").mean(2)
            right_BD = ((logits_BDC > 0) == (labels_BDC > 0)).all(2)
        else:
            loss_BD = (logits_BDC.squeeze(2) - labels.to(logits_BDC.dtype)) ** 2
            right_BD = torch.zeros_like(present_BD)
        right = (right_BD & present_BD).to(weight_BD.dtype).sum()
        return FinetuningOutput((loss_BD * weight_BD).sum() * fields["scale"], right)
