"""A task of your own: a label for each text, from the mean of its tokens (docs/how_to/add_task.md)."""

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
    column: str = setting("text", "of the text")


class Output(NamedTuple):
    loss: torch.Tensor  # sum over the sequences, times the scale of their row
    correct: torch.Tensor


# B rows, S slots, D places for sequences in a row, H features of a token, C classes.
class MeanBert(PackedBert):
    def __init__(self, model, classes, depth, attention):
        super().__init__(model, attention=attention, pooler=False)
        self.depth, self.classifier = depth, nn.Linear(model.hidden_size, classes)
        initialise(self, model.initializer_range)

    def predictions(self, input_ids, input_mask, segment_ids, positions):
        hidden_BSH = self.hidden(input_ids, input_mask, segment_ids, positions)
        places = torch.arange(1, self.depth + 1, dtype=input_mask.dtype, device=input_mask.device)
        own_BDS = (input_mask[:, None, :] == places[:, None]).to(
            hidden_BSH.dtype
        )  # which slots are whose
        mean_BDH = own_BDS @ hidden_BSH / own_BDS.sum(2, keepdim=True).clamp(min=1)
        return self.classifier(mean_BDH).to(torch.promote_types(hidden_BSH.dtype, torch.float32))

    def forward(
        self, input_ids, input_mask, segment_ids, positions, sequence_numbers, labels, scale
    ):
        logits_BDC = self.predictions(input_ids, input_mask, segment_ids, positions)
        there_BD = (sequence_numbers > 0).to(logits_BDC.dtype)
        loss_BD, right_BD = cross_entropy(logits_BDC, labels), correct(logits_BDC, labels)
        return Output(
            ((loss_BD * there_BD).sum(1) * scale).sum(),
            (right_BD.to(there_BD.dtype) * there_BD).sum(),
        )


class Text(NamedTuple):
    text: str
    labels: Optional[Tuple[str, ...]]  # None where the file does not tell
    where: str


class MeanTask(LabelTask):
    settings = MeanConfig
    architecture = "BertModel"  # that transformers loads of the exported folder
    fields = (*LabelTask.prediction_fields, "sequence_numbers", "labels", "scale")
    heads = (PlacedPart("classifier", "classifier"),)
    of_slots = False  # predictions are of sequences
    label_setting = "column"
    scores = ("accuracy",)

    @classmethod
    def read(cls, source, config, *, labels):
        column = config.of_task(MeanConfig).column

        def text(record, where):
            told = labels and "label" in record.values
            return Text(record.values[column], (record.values["label"],) if told else None, where)

        return read_records(source, text, what="text", columns=(column,))

    @staticmethod
    def texts_of(example):
        return (example.text,)

    def inputs(self, examples, what):
        cut = [
            each.ids[: self.max_sequence_length - 2]
            for each in self.tokenizer.encode([each.text for each in examples])
        ]
        ids, segments = zip(*(self.tokenizer.joined([each]) for each in cut))
        numbers = [
            self.number_of(*each.labels, each.where) if each.labels else 0 for each in examples
        ]
        return Inputs.of(
            ids, np.concatenate(segments), targets={"labels": np.array(numbers, np.int32)}
        )

    def network(self, attention):
        return MeanBert(self.model, len(self.labels), self.max_sequences_per_pack, attention)

    def score(self, outputs):
        answers = [{"prediction": self.labels[int(logits.argmax())]} for logits in outputs]
        metrics = {}
        if self.scorable:
            right = [
                (answer["prediction"],) == each.labels
                for answer, each in zip(answers, self.examples)
            ]
            metrics = {"accuracy": 100.0 * sum(right) / len(right)}
        return Scored(metrics, {"predictions.json": answers}, answers)
