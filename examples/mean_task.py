"""A task of your own: a label for each text, from the mean of its tokens (docs/how_to/add_task.md)."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from ipu_packed_bert.model.bert import initialise
from ipu_packed_bert.model.loss import correct, cross_entropy
from ipu_packed_bert.model.packed import PackedBert
from ipu_packed_bert.settings.finetuning import TaskConfig
from ipu_packed_bert.settings.placement import PlacedPart
from ipu_packed_bert.settings.reader import setting
from ipu_packed_bert.tasks.classification import label_settings, refuse_too_long
from ipu_packed_bert.tasks.examples import ExampleTask, Inputs, Scored
from ipu_packed_bert.tasks.files import ExampleSource, Faults, table_rows


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
        own_BDS = (input_mask[:, None, :] == places[:, None]).to(hidden_BSH.dtype)  # which slots are whose
        mean_BDH = own_BDS @ hidden_BSH / own_BDS.sum(2, keepdim=True).clamp(min=1)
        return self.classifier(mean_BDH).to(torch.promote_types(hidden_BSH.dtype, torch.float32))

    def forward(self, input_ids, input_mask, segment_ids, positions, sequence_numbers, labels, scale):
        logits_BDC = self.predictions(input_ids, input_mask, segment_ids, positions)
        there_BD = (sequence_numbers > 0).to(logits_BDC.dtype)
        loss_BD, right_BD = cross_entropy(logits_BDC, labels), correct(logits_BDC, labels)
        return Output(((loss_BD * there_BD).sum(1) * scale).sum(), (right_BD.to(there_BD.dtype) * there_BD).sum())


class MeanTask(ExampleTask):
    settings = MeanConfig
    architecture = "BertModel"  # that transformers loads of the exported folder
    fields = (*ExampleTask.prediction_fields, "sequence_numbers", "labels", "scale")
    heads = (PlacedPart("classifier", "classifier"),)
    of_slots = False  # predictions are of sequences
    scores = ("accuracy",)

    def __init__(self, config, tokenizer, model, labels=None, asked=None):
        super().__init__(config, tokenizer, model, asked)
        files = {what: self.file(what) for what in ("training", "evaluation")}
        read = {what: self.drawn(records(file, config), what) for what, file in files.items() if file}
        if "training" in read:
            labels = sorted({label for _, _, label in read["training"]})
        self.labels = list(labels)  # a checkpoint's, where nothing is learnt
        self.wanted = [label if self.reads_labels else None for _, _, label in read.get("evaluation", ())]
        for what, found in read.items():
            setattr(self, what, self.inputs(found))
        self.pack()

    @staticmethod
    def texts(config):
        return [text for _, text, _ in records(ExampleSource.of(config.data.training), config)]

    def inputs(self, found):
        room, rows = self.max_sequence_length - 2, []
        for (where, _, _), tokens in zip(found, self.tokenizer.encode([text for _, text, _ in found])):
            if not self.cuts:
                refuse_too_long(where, len(tokens.ids), room)
            rows.append(self.tokenizer.joined([tokens.ids[:room]]))
        lengths, (ids, segments) = [len(ids) for ids, _ in rows], map(np.concatenate, zip(*rows))
        numbers = [self.labels.index(label) if label in self.labels else 0 for _, _, label in found]
        return Inputs(np.array(lengths), ids, segments, targets={"labels": np.array(numbers, np.int32)})

    @property
    def scorable(self):
        return None not in self.wanted

    def network(self, attention):
        return MeanBert(self.model, len(self.labels), self.max_sequences_per_pack, attention)

    def score(self, outputs):
        answers = [{"prediction": self.labels[int(logits.argmax())]} for logits in outputs]
        right = [answer["prediction"] == label for answer, label in zip(answers, self.wanted)]
        metrics = {"accuracy": 100.0 * sum(right) / len(right)} if self.scorable else {}
        return Scored(metrics, {"predictions.json": answers}, answers)

    def export_settings(self):
        return label_settings(self.labels)


def records(source, config):
    faults = Faults(source)
    rows, column = list(table_rows(source, faults)), config.of_task(MeanConfig).column
    faults.refuse()
    return [(f"{source} line {row.line}", row.values[column], row.values.get("label")) for row in rows]
