"""Classification and regression of texts or pairs of texts.

The [CLS] of each sequence of a pack predicts one label, several labels or a number.
Suffixes as in `model/bert.py`: B rows, S slots, D places for sequences, H hidden size; C classes.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ipu_packed_bert.model.bert import initialise
from ipu_packed_bert.model.loss import at_least_float32, correct, cross_entropy
from ipu_packed_bert.model.packed import GatherSlots, PackedBert
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.finetuning import (
    MULTI_LABEL,
    REGRESSION,
    SINGLE_LABEL,
    ClassificationConfig,
)
from ipu_packed_bert.settings.placement import PlacedPart
from ipu_packed_bert.settings.schema import ModelConfig
from ipu_packed_bert.tasks.examples import ExampleTask, LabelTask, LossAndCorrect, Scored
from ipu_packed_bert.tasks.files import (
    ExampleSource,
    Faults,
    TableRow,
    is_label,
    plain_text,
    read_records,
)
from ipu_packed_bert.tasks.inputs import Inputs
from ipu_packed_bert.tasks.scores import (
    MAJORITY,
    MAJORITY_SET,
    MEAN_LABEL_ERROR,
    macro_f1,
    matthews,
    micro_f1,
    pearson,
    spearman,
)
from pack_data.reading.account import Account
from pack_data.reading.fields import named, shown

# Values of problem_type in config.json.
PROBLEM_TYPES = {
    SINGLE_LABEL: "single_label_classification",
    MULTI_LABEL: "multi_label_classification",
    REGRESSION: "regression",
}
_THRESHOLD = 0.5  # probability above which a label is predicted, if there may be several
_LARGEST_TARGET = 1e38  # largest target of regression, which is float32


class _PackedBertForSequenceClassification(PackedBert):
    """A packed BERT with the weight names of Hugging Face's BertForSequenceClassification.

    Labels are int32 [B, D] for kind "single_label", 0 and 1 [B, D, C] for "multi_label", and [B, D] with C = 1 for
    "regression".
    """

    def __init__(self, model: ModelConfig, *, classes: int, kind: str, attention: str = "eager"):
        super().__init__(model, attention=attention, pooler=True)
        self.kind = kind
        self.first_slots = GatherSlots()
        self.dropout = nn.Dropout(model.head_dropout)
        self.classifier = nn.Linear(model.hidden_size, classes)
        initialise(self, model.initializer_range)

    def predictions(
        self, input_ids_BS, input_mask_BS, segment_ids_BS, positions_BS, cls_positions_BD
    ) -> torch.Tensor:
        """Compute class logits [B, D, C], at least float32; those of absent sequences are finite but meaningless."""
        hidden_BSH = self.hidden(input_ids_BS, input_mask_BS, segment_ids_BS, positions_BS)
        pooled_BDH = self.bert.pooler(self.first_slots(hidden_BSH, cls_positions_BD))
        logits_BDC = self.classifier(self.dropout(pooled_BDH))
        return at_least_float32(logits_BDC)

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
        logits_BDC = self.predictions(
            input_ids_BS, input_mask_BS, segment_ids_BS, positions_BS, cls_positions_BD
        )
        present_BD = sequence_numbers_BD > 0
        weight_BD = present_BD.to(logits_BDC.dtype)
        if self.kind == SINGLE_LABEL:
            loss_BD = cross_entropy(logits_BDC, labels)
            correct_BD = correct(logits_BDC, labels)
        elif self.kind == MULTI_LABEL:
            labels_BDC = labels.to(logits_BDC.dtype)
            loss_BDC = F.binary_cross_entropy_with_logits(logits_BDC, labels_BDC, reduction="none")
            loss_BD = loss_BDC.mean(2)
            correct_BD = ((logits_BDC > 0) == (labels_BDC > 0)).all(2)
        else:
            difference_BD = logits_BDC.squeeze(2) - labels.to(logits_BDC.dtype)
            loss_BD = difference_BD**2
            correct_BD = torch.zeros_like(present_BD)
        loss = ((loss_BD * weight_BD).sum(1) * scale_B).sum()
        return LossAndCorrect(loss, (correct_BD & present_BD).to(weight_BD.dtype).sum())


class _Text(NamedTuple):
    """One record of a table."""

    parts: Tuple[str, ...]
    labels: Optional[Tuple[str, ...]]  # None if the file has none; empty for regression
    number: float  # target of regression
    where: str  # file and line, for messages


class ClassificationTask(LabelTask):
    """Texts with one label, several labels or a number."""

    architecture = "BertForSequenceClassification"
    fields = (
        *ExampleTask.prediction_fields,
        "cls_positions",
        "sequence_numbers",
        "labels",
        "scale",
    )
    prediction_fields = (*ExampleTask.prediction_fields, "cls_positions")
    heads: Tuple[PlacedPart, ...] = (
        PlacedPart("pooler", "bert.pooler"),
        PlacedPart("classifier", "classifier"),
    )
    of_slots = False
    label_setting = "label_column"

    def __init__(self, config: Config, *arguments: Any, **options: Any):
        super().__init__(config, *arguments, **options)
        if self.name == REGRESSION:  # no prediction of a number is right or wrong
            self.metrics = tuple(metric for metric in self.metrics if metric.name == "loss")

    @classmethod
    def read(cls, source: ExampleSource, config: Config, *, labels: bool) -> List[_Text]:
        columns = config.of_task(ClassificationConfig)
        text_columns = [columns.text_column]
        if columns.second_text_column:
            text_columns.append(columns.second_text_column)

        def text(record: TableRow, where: str) -> _Text:
            parts = tuple(record.values[name] for name in text_columns)
            for part, name in zip(parts, text_columns):
                if not plain_text(part):
                    raise ValueError(f"{where}: {named(name)} is {shown(part)}; must be a text")
            target = None
            if labels and columns.label_column in record.values:
                raw = record.values[columns.label_column]
                target = source.label(partial(_target, columns, raw, where))
            if target is None:
                return _Text(parts, None, math.nan, where)
            return _Text(parts, *target, where)

        hint = "; name them with --set task.text_column=... and task.label_column=..."
        return read_records(source, text, what="text", columns=text_columns, hint=hint)

    @staticmethod
    def texts_of(example: _Text) -> Sequence[str]:
        return example.parts

    def begin(self, read: Dict[str, List[Any]], labels: Optional[Sequence[str]]) -> List[str]:
        if self.name == REGRESSION:
            return super().begin(read, ())
        labels = super().begin(read, labels)
        if len(labels) < 2:
            raise ValueError(
                f"{self.sources.get('training', self.config.start.checkpoint)}: has {len(labels)} different labels in "
                f"{shown(self.config.of_task(ClassificationConfig).label_column)}; at least two are needed"
            )
        return labels

    def inputs(self, examples: Sequence[_Text], what: str) -> Inputs:
        """Make [CLS] text [SEP] or [CLS] first [SEP] second [SEP], truncated to a row.

        The longer text of a pair is truncated first. The target `labels` is int32 [n], float32 [n, C] of 0 and 1, or
        float32 [n], depending on the kind, with zeros for texts without labels.
        """
        slots = self.max_sequence_length
        parts = list(zip(*(text.parts for text in examples)))
        room = slots - len(self.tokenizer.template(len(parts)).tokens)
        encoded = []
        for texts in parts:
            encoded.append([tokens.ids for tokens in self.tokenizer.encode(texts)])
        rows = [self.tokenizer.joined(_shortened(ids, room)) for ids in zip(*encoded)]
        ids, segments = zip(*rows)
        targets = {"labels": self._targets(examples, what)}
        inputs = Inputs.of(ids, np.concatenate(segments), targets=targets)

        counts = [sum(map(len, ids)) for ids in zip(*encoded)]
        beyond = sum(max(0, count - room) for count in counts)
        used = int(inputs.lengths.sum()) - (slots - room) * len(inputs)
        self.accounts[what]["tokens"] = Account(
            sum(counts), used, {f"beyond {slots} slots": beyond}
        )
        return inputs

    def _targets(self, texts: Sequence[_Text], what: str) -> np.ndarray:
        if self.name == REGRESSION:
            return np.array(
                [0.0 if text.labels is None else text.number for text in texts], np.float32
            )
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
        """Names of the metrics; `f1`, of the second label, exists for two labels only."""
        if self.name == REGRESSION:
            return ("pearson", "spearman", "mean_squared_error", MEAN_LABEL_ERROR)
        if self.name == MULTI_LABEL:
            return ("micro_f1", "macro_f1", "all_right", MAJORITY_SET)
        if len(self.labels or ()) == 2:
            return ("accuracy", MAJORITY, "f1", "macro_f1", "matthews")
        return ("accuracy", MAJORITY, "macro_f1", "matthews")

    def network(self, attention: str) -> PackedBert:
        classes = max(1, len(self.labels or ()))
        return _PackedBertForSequenceClassification(
            self.model, classes=classes, kind=self.name, attention=attention
        )

    def score(self, outputs: Sequence[np.ndarray]) -> Scored:
        logits = np.stack(outputs).astype(np.float64)
        answers = self._answers(logits)
        metrics: Dict[str, Any] = {}
        if self.scorable and self.evaluation is not None:
            scored = self.scored
            labels = self.evaluation.targets["labels"][scored]
            known = labels if self.training is None else self.training.targets["labels"]
            values = self._score(logits[scored], labels, known)
            metrics = {**{name: values[name] for name in self.scores}, "texts": len(scored)}
        return Scored(metrics, {"predictions.json": answers}, answers)

    def _answers(self, logits: np.ndarray) -> List[Dict[str, Any]]:
        """Convert logits [n, C] to JSON values: a label or labels with probabilities, or a number."""
        names = self.labels or []
        if self.name == REGRESSION:
            return [{"prediction": float(value)} for value in logits[:, 0]]
        if self.name == MULTI_LABEL:
            answers: List[Dict[str, Any]] = []
            for row in _sigmoid(logits):
                chosen = np.flatnonzero(row > _THRESHOLD)
                likely = {names[number]: float(row[number]) for number in chosen}
                answers.append({"prediction": list(likely), "probabilities": likely})
            return answers
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities = weights / weights.sum(axis=1, keepdims=True)
        return [
            {"prediction": names[int(row.argmax())], "probability": float(row.max())}
            for row in probabilities
        ]

    def _score(
        self, logits: np.ndarray, labels: np.ndarray, known: np.ndarray
    ) -> Dict[str, Optional[float]]:
        """Return percentages, and correlations (Matthews', Pearson's, Spearman's) in [-1, 1].

        ``known``: the labels that determine the constant answer.
        """
        if self.name == REGRESSION:
            predicted = logits[:, 0]
            targets = labels.astype(np.float64)
            return {
                "pearson": pearson(predicted, targets),
                "spearman": spearman(predicted, targets),
                "mean_squared_error": float(((predicted - targets) ** 2).mean()),
                MEAN_LABEL_ERROR: float(((known.mean(dtype=np.float64) - targets) ** 2).mean()),
            }
        if self.name == MULTI_LABEL:
            likely = _sigmoid(logits) > _THRESHOLD
            wanted = labels > 0
            sets, texts_by_set = np.unique(known > 0, axis=0, return_counts=True)
            most_frequent = sets[texts_by_set.argmax()]
            return {
                "micro_f1": 100.0 * micro_f1(likely, wanted),
                "macro_f1": 100.0 * macro_f1(likely, wanted),
                "all_right": 100.0 * float((likely == wanted).all(axis=1).mean()),
                MAJORITY_SET: 100.0 * float((wanted == most_frequent).all(axis=1).mean()),
            }
        classes = logits.argmax(axis=1)
        numbers = np.union1d(classes, labels)  # macro-F1 is over the classes that occur
        return {
            "accuracy": 100.0 * float((classes == labels).mean()),
            MAJORITY: 100.0 * float((labels == np.bincount(known).argmax()).mean()),
            "f1": 100.0 * micro_f1(classes == 1, labels == 1),
            "macro_f1": 100.0 * macro_f1(classes[:, None] == numbers, labels[:, None] == numbers),
            "matthews": matthews(classes, labels),
        }

    def export_settings(self) -> Dict[str, Any]:
        return {**super().export_settings(), "problem_type": PROBLEM_TYPES[self.name]}


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-logits))


_Target = Tuple[Tuple[str, ...], float]  # `labels` and `number` of a _Text


def _target(columns: ClassificationConfig, raw: Any, where: str) -> _Target:
    try:
        return _READERS[columns.name](raw)
    except (ValueError, TypeError, OverflowError):
        rule = _RULES[columns.name]
        raise ValueError(
            f"{where}: {named(columns.label_column)} is {shown(raw)}; must be {rule}"
        ) from None


def _one_label(raw: Any) -> _Target:
    if raw == "" or not is_label(raw):
        raise ValueError
    return (str(raw),), math.nan


def _labels(raw: Any) -> _Target:
    has_repeats = False
    if isinstance(raw, list):
        parts = raw
        has_repeats = len(set(map(str, raw))) < len(raw)  # for example a list of 0 and 1
    else:
        parts = [part.strip() for part in str(raw).split("|")]
    if raw is None or isinstance(raw, dict) or has_repeats or not all(map(is_label, parts)):
        raise ValueError
    return tuple(dict.fromkeys(str(part) for part in parts if part != "")), math.nan


def _number(raw: Any) -> _Target:
    number = math.nan if isinstance(raw, bool) else float(raw)
    if not abs(number) <= _LARGEST_TARGET:  # also refuses NaN
        raise ValueError
    return (), number


# Kind -> a function from a value to a target, which raises ValueError if the value breaks the rule.
_READERS: Dict[str, Callable[[Any], _Target]] = {
    SINGLE_LABEL: _one_label,
    MULTI_LABEL: _labels,
    REGRESSION: _number,
}
_RULES = {
    SINGLE_LABEL: "one label, of at most 1,000 characters",
    MULTI_LABEL: "labels of at most 1,000 characters, each once",
    REGRESSION: "a number",
}


def _shortened(parts: Sequence[np.ndarray], room: int) -> List[np.ndarray]:
    """Truncate one or two lists of tokens to ``room`` tokens together; the longer one is truncated first."""
    if len(parts) == 1:
        return [parts[0][:room]]
    first, second = parts
    keep_second = max(room - len(first), min(len(second), room // 2))
    keep_first = room - min(len(second), keep_second)
    return [first[:keep_first], second[:keep_second]]
