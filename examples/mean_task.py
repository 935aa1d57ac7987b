"""A user-defined task: classify each text by the mean of its tokens (docs/how_to/add_task.md)."""

from dataclasses import dataclass
from typing import NamedTuple, Optional, Tuple

import numpy as np
import torch
from torch import nn

from ipu_packed_bert.model.bert import initialise
from ipu_packed_bert.model.loss import correct, cross_entropy
from ipu_packed_bert.model.packed import PackedBert
from ipu_packed_bert.settings.finetuning import TaskConfig
from ipu_packed_bert.settings.placement import PlacedPart
from ipu_packed_bert.settings.reader import setting
from ipu_packed_bert.tasks.examples import Inputs, LabelTask, Scored
from ipu_packed_bert.tasks.files import read_records


@dataclass(frozen=True)
class MeanConfig(TaskConfig):
    """The column of the texts; their labels are in the column label."""

    column: str = setting("text", "column of the text")


class Output(NamedTuple):
    loss: torch.Tensor  # sum over the sequences, times the scale of their row
    correct: torch.Tensor


# Suffixes: B rows, S slots, up to D sequences in a row, H features of a token, C classes.
class MeanBert(PackedBert):
    def __init__(self, model, classes, depth, attention):
        super().__init__(model, attention=attention, pooler=False)
        self.depth, self.classifier = depth, nn.Linear(model.hidden_size, classes)
        initialise(self, model.initializer_range)

    def predictions(self, input_ids, input_mask, segment_ids, positions):
        hidden_BSH = self.hidden(input_ids, input_mask, segment_ids, positions)
        numbers = torch.arange(1, self.depth + 1, dtype=input_mask.dtype, device=input_mask.device)
        # 1 for each slot of each sequence
        slots_BDS = (input_mask[:, None, :] == numbers[:, None]).to(hidden_BSH.dtype)
        mean_BDH = slots_BDS @ hidden_BSH / slots_BDS.sum(2, keepdim=True).clamp(min=1)
        return self.classifier(mean_BDH).to(torch.promote_types(hidden_BSH.dtype, torch.float32))

    def forward(
        self, input_ids, input_mask, segment_ids, positions, sequence_numbers, labels, scale
    ):
        logits_BDC = self.predictions(input_ids, input_mask, segment_ids, positions)
        used_BD = (sequence_numbers > 0).to(logits_BDC.dtype)
        loss_BD = cross_entropy(logits_BDC, labels) * used_BD
        correct_BD = correct(logits_BDC, labels).to(used_BD.dtype) * used_BD
        return Output((loss_BD.sum(1) * scale).sum(), correct_BD.sum())


class Text(NamedTuple):
    text: str
    labels: Optional[Tuple[str, ...]]  # None if the file has no labels
    where: str


class MeanTask(LabelTask):
    settings = MeanConfig
    architecture = "BertModel"  # of the exported directory, for transformers
    fields = (*LabelTask.prediction_fields, "sequence_numbers", "labels", "scale")
    heads = (PlacedPart("classifier", "classifier"),)
    of_slots = False  # one prediction per sequence
    label_setting = "column"
    scores = ("accuracy",)

    @classmethod
    def read(cls, source, config, *, labels):
        column = config.of_task(MeanConfig).column

        def text(record, where):
            has_label = labels and "label" in record.values
            label = (record.values["label"],) if has_label else None
            return Text(record.values[column], label, where)

        return read_records(source, text, what="text", columns=(column,))

    @staticmethod
    def texts_of(example):
        return (example.text,)

    def inputs(self, examples, what):
        special_tokens = self.tokenizer.template(1).tokens  # [CLS] and [SEP]
        longest = self.max_sequence_length - len(special_tokens)
        texts = self.tokenizer.encode([example.text for example in examples])
        joined = [self.tokenizer.joined([text.ids[:longest]]) for text in texts]
        ids, segments = zip(*joined)
        numbers = np.zeros(len(examples), np.int32)
        for index, example in enumerate(examples):
            if example.labels:
                numbers[index] = self.number_of(example.labels[0], example.where)
        return Inputs.of(ids, np.concatenate(segments), targets={"labels": numbers})

    def network(self, attention):
        return MeanBert(self.model, len(self.labels or ()), self.max_sequences_per_pack, attention)

    def score(self, outputs):
        names = self.labels or []
        answers = [{"prediction": names[int(logits.argmax())]} for logits in outputs]
        metrics = {}
        if self.scorable:
            pairs = [(answers[number], self.examples[number]) for number in self.scored]
            hits = [(answer["prediction"],) == example.labels for answer, example in pairs]
            metrics = {"accuracy": 100.0 * sum(hits) / len(hits)}
        return Scored(metrics, {"predictions.json": answers}, answers)
