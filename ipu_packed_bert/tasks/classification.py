"""Texts, or pairs of texts, with one label, several labels or a number: a class, a set of classes or a number for every
sequence of a pack, from its own [CLS].

Letters as in `model/bert.py`: B rows, S slots, D places for sequences, H hidden size; C classes.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ipu_packed_bert.model.bert import initialise
from ipu_packed_bert.model.loss import correct, cross_entropy
from ipu_packed_bert.model.packed import GatherSlots, PackedBert
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.finetuning import MULTI_LABEL, REGRESSION, SINGLE_LABEL, ClassificationConfig
from ipu_packed_bert.settings.placement import PlacedPart
from ipu_packed_bert.settings.schema import ModelConfig
from ipu_packed_bert.tasks.examples import ExampleTask, Inputs, LabelTask, LossAndCorrect, Scored
from ipu_packed_bert.tasks.files import ExampleSource, Faults, TableRow, is_label, plain_text, read_records
from ipu_packed_bert.tasks.scores import accuracy, macro_f1, matthews, micro_f1, pearson, spearman
from pack_data.reading.fields import named, shown

# What config.json says of a problem.
PROBLEM_TYPES = {
    SINGLE_LABEL: "single_label_classification",
    MULTI_LABEL: "multi_label_classification",
    REGRESSION: "regression",
}


class _PackedBertForSequenceClassification(PackedBert):
    """Names of weights as in Hugging Face's BertForSequenceClassification.

    kind "single_label": target labels int32 [B, D]; "multi_label": labels [B, D, C] of 0 and 1; "regression": labels
    [B, D], C = 1.
    """

    def __init__(self, model: ModelConfig, *, classes: int, kind: str, attention: str = "eager"):
        super().__init__(model, attention=attention, pooler=True)
        self.kind = kind
        self.first_slots = GatherSlots()
        self.dropout = nn.Dropout(model.hidden_dropout)
        self.classifier = nn.Linear(model.hidden_size, classes)
        initialise(self, model.initializer_range)

    def predictions(self, input_ids_BS, input_mask_BS, segment_ids_BS, positions_BS, cls_positions_BD) -> torch.Tensor:
        """[B, D, C]; of sequences that are not there finite, and without meaning.  At least float32."""
        hidden_BSH = self.hidden(input_ids_BS, input_mask_BS, segment_ids_BS, positions_BS)
        logits_BDC = self.classifier(self.dropout(self.bert.pooler(self.first_slots(hidden_BSH, cls_positions_BD))))
        return logits_BDC if logits_BDC.dtype == torch.float64 else logits_BDC.float()

    def forward(
        self,
        input_ids_BS,
        input_mask_BS,
        segment_ids_BS,
        positions_BS,
        cls_positions_BD,
        sequence_numbers_BD,
        labels,
        scale_B,
    ) -> LossAndCorrect:
        logits_BDC = self.predictions(input_ids_BS, input_mask_BS, segment_ids_BS, positions_BS, cls_positions_BD)
        present_BD = sequence_numbers_BD > 0
        weight_BD = present_BD.to(logits_BDC.dtype)
        if self.kind == SINGLE_LABEL:
            loss_BD, right_BD = cross_entropy(logits_BDC, labels), correct(logits_BDC, labels)
        elif self.kind == MULTI_LABEL:
            labels_BDC = labels.to(logits_BDC.dtype)
            loss_BD = F.binary_cross_entropy_with_logits(logits_BDC, labels_BDC, reduction="none").mean(2)
            right_BD = ((logits_BDC > 0) == (labels_BDC > 0)).all(2)
        else:
            loss_BD = (logits_BDC.squeeze(2) - labels.to(logits_BDC.dtype)) ** 2
            right_BD = torch.zeros_like(present_BD)
        loss = ((loss_BD * weight_BD).sum(1) * scale_B).sum()
        return LossAndCorrect(loss, (right_BD & present_BD).to(weight_BD.dtype).sum())


class _Text(NamedTuple):
    """One text of a table."""

    parts: Tuple[str, ...]
    labels: Optional[Tuple[str, ...]]  # None where the file doesn't tell; of regression none
    number: float  # regression
    where: str


class ClassificationTask(LabelTask):
    """Texts with one label, several or a number."""

    architecture = "BertForSequenceClassification"
    fields = (*ExampleTask.prediction_fields, "cls_positions", "sequence_numbers", "labels", "scale")
    prediction_fields = (*ExampleTask.prediction_fields, "cls_positions")
    heads: Tuple[PlacedPart, ...] = (PlacedPart("pooler", "bert.pooler"), PlacedPart("classifier", "classifier"))
    of_slots = False
    label_setting = "label_column"

    @classmethod
    def read(cls, source: ExampleSource, config: Config, *, labels: bool) -> List[_Text]:
        columns = config.of_task(ClassificationConfig)
        wanted = [columns.text_column] + ([columns.second_text_column] if columns.second_text_column else [])

        def text(record: TableRow, where: str) -> _Text:
            parts = tuple(record.values[name] for name in wanted)
            for part, name in zip(parts, wanted):
                if not plain_text(part):
                    raise ValueError(f"{where}: {named(name)} is {shown(part)}; must be a text")
            if not labels or columns.label_column not in record.values:
                return _Text(parts, None, math.nan, where)
            return _Text(parts, *_labels(record.values[columns.label_column], where, columns), where)

        hint = "; name them with --set task.text_column=... and task.label_column=..."
        return read_records(source, text, what="text", columns=wanted, hint=hint)

    @staticmethod
    def texts_of(example: _Text) -> Sequence[str]:
        return example.parts

    def begin(self, read: Dict[str, List[Any]], labels: Optional[Sequence[str]]) -> List[str]:
        found = super().begin(read, () if self.name == REGRESSION else labels)
        if self.name != REGRESSION and len(found) < 2:
            raise ValueError(
                f"{self.sources.get('training', self.config.start.checkpoint)}: has {len(found)} different labels in "
                f"{shown(self.config.of_task(ClassificationConfig).label_column)}; there must be two at least"
            )
        return found

    def inputs(self, examples: Sequence[_Text], what: str) -> Inputs:
        """[CLS] text [SEP], or [CLS] first [SEP] second [SEP]; what is too long loses its end, the longer of a pair
        first.

        Target `labels`: int32 [n], float32 [n, C] of 0 and 1, or float32 [n] by the kind; of texts without labels
        zeros.
        """
        slots, number = self.max_sequence_length, len(examples[0].parts)
        encoded = [
            [tokens.ids for tokens in self.tokenizer.encode([text.parts[part] for text in examples])]
            for part in range(number)
        ]
        rows = [self.tokenizer.joined(_shortened(parts, slots - number - 1)) for parts in zip(*encoded)]
        ids, segments = zip(*rows)
        inputs = Inputs.of(ids, np.concatenate(segments), targets={"labels": self._targets(examples, what)})
        cut = int((inputs.lengths == slots).sum())
        self.notes.append(
            f"{what}: {len(examples):,} texts of {inputs.lengths.mean():.0f} tokens"
            + (f", {cut:,} of them cut at {slots} or just as long" if cut else "")
        )
        return inputs

    def _targets(self, texts: Sequence[_Text], what: str) -> np.ndarray:
        if self.name == REGRESSION:
            return np.array([0.0 if text.labels is None else text.number for text in texts], np.float32)
        faults = Faults(self.sources[what])
        targets = np.zeros((len(texts), len(self.labels or ())), np.float32)
        for number, text in enumerate(texts):
            for label in text.labels or ():
                with faults.of_record():
                    targets[number, self.number_of(label, text.where)] = 1.0
        faults.refuse()
        return targets.argmax(axis=1).astype(np.int32) if self.name == SINGLE_LABEL else targets

    @property
    def scores(self) -> Tuple[str, ...]:
        """F1 alone is of the second of two labels."""
        if self.name == REGRESSION:
            return ("pearson", "spearman", "mean_squared_error")
        if self.name == MULTI_LABEL:
            return ("micro_f1", "macro_f1", "all_right")
        return ("accuracy", *(("f1",) if len(self.labels or ()) == 2 else ()), "macro_f1", "matthews")

    def network(self, attention: str) -> PackedBert:
        return _PackedBertForSequenceClassification(
            self.model, classes=max(1, len(self.labels or ())), kind=self.name, attention=attention
        )

    def score(self, outputs: Sequence[np.ndarray]) -> Scored:
        logits = np.stack(outputs).astype(np.float64)
        answers, metrics = self._answers(logits), {}
        if self.scorable and self.evaluation is not None:
            found = self._score(logits, self.evaluation.targets["labels"])
            metrics = {**{name: found[name] for name in self.scores}, "texts": len(logits)}
        return Scored(metrics, {"predictions.json": answers}, answers)

    def _answers(self, logits: np.ndarray) -> List[Dict[str, Any]]:
        """Plain values for each text, logits [n, C]: its label and probability, its labels and theirs, or its
        number.
        """
        names = self.labels or []
        if self.name == REGRESSION:
            return [{"prediction": float(value)} for value in logits[:, 0]]
        if self.name == MULTI_LABEL:
            return [
                {
                    "prediction": [names[each] for each in np.flatnonzero(row > _THRESHOLD)],
                    "probabilities": {names[each]: float(row[each]) for each in np.flatnonzero(row > _THRESHOLD)},
                }
                for row in _sigmoid(logits)
            ]
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities = weights / weights.sum(axis=1, keepdims=True)
        return [{"prediction": names[int(row.argmax())], "probability": float(row.max())} for row in probabilities]

    def _score(self, logits: np.ndarray, labels: np.ndarray) -> Dict[str, Optional[float]]:
        """In percent, but for the correlations (Matthews', Pearson's, Spearman's), which are in [-1, 1]."""
        if self.name == REGRESSION:
            found, wanted = logits[:, 0], labels.astype(np.float64)
            error = float(((found - wanted) ** 2).mean())
            return {"pearson": pearson(found, wanted), "spearman": spearman(found, wanted), "mean_squared_error": error}
        if self.name == MULTI_LABEL:
            given, asked = _sigmoid(logits) > _THRESHOLD, labels > 0
            return {
                "micro_f1": 100.0 * micro_f1(given, asked),
                "macro_f1": 100.0 * macro_f1(given, asked),
                "all_right": 100.0 * float((given == asked).all(axis=1).mean()),
            }
        classes = logits.argmax(axis=1)
        numbers = np.union1d(classes, labels)  # macro-F1 is of the classes that occur
        return {
            "accuracy": 100.0 * accuracy(classes, labels),
            "f1": 100.0 * micro_f1(classes == 1, labels == 1),
            "macro_f1": 100.0 * macro_f1(classes[:, None] == numbers, labels[:, None] == numbers),
            "matthews": matthews(classes, labels),
        }

    def export_settings(self) -> Dict[str, Any]:
        return {**super().export_settings(), "problem_type": PROBLEM_TYPES[self.name]}


_THRESHOLD = 0.5  # probability above which one of several labels is given


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-logits))


def _labels(raw: Any, where: str, columns: ClassificationConfig) -> Tuple[Tuple[str, ...], float]:
    """The labels of a text, or its number."""

    def refused(rule: str) -> ValueError:
        return ValueError(f"{where}: {named(columns.label_column)} is {shown(raw)}; must be {rule}")

    if columns.name == REGRESSION:
        try:
            number = math.nan if isinstance(raw, bool) else float(raw)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not abs(number) <= 1e38:  # a target is float32
            raise refused("a number")
        return (), number
    if columns.name == MULTI_LABEL:
        parts = raw if isinstance(raw, list) else [part.strip() for part in str(raw).split("|")]
        twice = isinstance(raw, list) and len(set(map(str, raw))) < len(raw)  # as in a list of 0 and 1
        if raw is None or isinstance(raw, dict) or twice or not all(map(is_label, parts)):
            raise refused("labels of at most 1,000 characters, each once")
        return tuple(dict.fromkeys(str(part) for part in parts if part != "")), math.nan
    if raw == "" or not is_label(raw):
        raise refused("one label, of at most 1,000 characters")
    return (str(raw),), math.nan


def _shortened(parts: Sequence[np.ndarray], room: int) -> List[np.ndarray]:
    """The beginnings of one or two lists of tokens that fit into `room`; the longer one gives way first."""
    if len(parts) == 1:
        return [parts[0][:room]]
    first, second = parts
    keep_second = max(room - len(first), min(len(second), room // 2))
    keep_first = room - min(len(second), keep_second)
    return [first[:keep_first], second[:keep_second]]
