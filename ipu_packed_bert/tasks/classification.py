"""Texts, or pairs of texts, with one label, several labels or a number: a class, a set of classes or a number for every
sequence of a pack, from its own [CLS].

Letters as in `model/bert.py`: B rows, S slots, D places for sequences, H hidden size; C classes.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ipu_packed_bert.model.bert import initialise
from ipu_packed_bert.model.loss import correct, cross_entropy
from ipu_packed_bert.model.packed import GatherSlots, PackedBert
from ipu_packed_bert.settings.finetuning import (
    METRICS_OF,
    MULTI_LABEL,
    REGRESSION,
    SINGLE_LABEL,
    ClassificationConfig,
    FinetuneConfig,
)
from ipu_packed_bert.settings.placement import PlacedPart
from ipu_packed_bert.settings.schema import ModelConfig
from ipu_packed_bert.tasks.examples import Asked, ExampleTask, Inputs, LossAndCorrect, Scored, Tokenizer
from ipu_packed_bert.tasks.files import AnyFile, ExampleSource, Faults, TableRow, plain_text, table_rows
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


class ClassificationTask(ExampleTask):
    """labels: those of the checkpoint, where there is no training file to take them from."""

    architecture = "BertForSequenceClassification"
    fields = (*ExampleTask.prediction_fields, "cls_positions", "sequence_numbers", "labels", "scale")
    prediction_fields = (*ExampleTask.prediction_fields, "cls_positions")
    heads: Tuple[PlacedPart, ...] = (PlacedPart("pooler", "bert.pooler"), PlacedPart("classifier", "classifier"))
    of_slots = False

    def __init__(
        self,
        config: FinetuneConfig,
        tokenizer: Tokenizer,
        model: ModelConfig,
        labels: Optional[Sequence[str]] = None,
        asked: Optional[Asked] = None,
    ):
        super().__init__(config, tokenizer, model, asked)
        data, self._columns = config.data, config.of_task(ClassificationConfig)
        self.kind = self.name = config.task.name
        texts = {
            what: _read_texts(source, self.kind, self._columns, labels=self.reads_labels)
            for what, source in (("training", self.file("training")), ("evaluation", self.file("evaluation")))
            if source is not None
        }
        if "training" in texts:
            if texts["training"][0].labels is None:
                raise ValueError(
                    f"{data.training}: has no column {shown(self._columns.label_column)}; name it with --set "
                    "task.label_column=..."
                )
            labels = _label_names(texts["training"])
        self.labels = [] if self.kind == REGRESSION else self.labels_of_checkpoint(labels)
        if self.kind != REGRESSION and len(self.labels) < 2:
            raise ValueError(
                f"{data.training}: has {len(self.labels)} different labels in {shown(self._columns.label_column)}; "
                "there must be two at least"
            )
        for what, found in texts.items():
            found = self.drawn(found, what)
            inputs = _make_inputs(
                found,
                tokenizer,
                self.kind,
                self.labels,
                data.max_sequence_length,
                faults=Faults(self.file(what)),
                cut=self.cuts,
            )
            setattr(self, what, inputs)
            cut = int((inputs.lengths == data.max_sequence_length).sum()) if self.cuts else 0
            self.notes.append(
                f"{what}: {len(found):,} texts of {inputs.lengths.mean():.0f} tokens"
                + (f", {cut:,} of them cut at {data.max_sequence_length} or just as long" if cut else "")
            )
        self._positive = self._positive_class()
        self._labelled = "evaluation" in texts and texts["evaluation"][0].labels is not None
        self.pack()

    def _positive_class(self) -> Optional[int]:
        """The number of the class that F1 is of; None where F1 is not asked for."""
        if self.kind != SINGLE_LABEL or "f1" not in self._columns.metrics:
            return None
        label = self._columns.positive_label
        if label not in self.labels:
            raise ValueError(
                f"{self.config.path}: task.positive_label is {shown(label)}, and task.metric "
                f"{self._columns.metric} has F1 of that label; name one of {', '.join(map(named, self.labels[:8]))}"
            )
        return self.labels.index(label)

    @staticmethod
    def texts(config: FinetuneConfig) -> List[str]:
        found = _read_texts(str(config.data.training), config.task.name, config.of_task(ClassificationConfig))
        return list(dict.fromkeys(part for text in found for part in text.parts))

    @property
    def scores(self) -> Tuple[str, ...]:
        return self._columns.metrics

    @property
    def scorable(self) -> bool:
        return self._labelled

    def network(self, attention: str) -> PackedBert:
        return _PackedBertForSequenceClassification(
            self.model, classes=max(1, len(self.labels)), kind=self.kind, attention=attention
        )

    def score(self, outputs: Sequence[np.ndarray]) -> Scored:
        logits, threshold = np.stack(outputs), self._columns.threshold
        metrics = (
            _score(
                logits,
                self.evaluation.targets["labels"],
                self.kind,
                threshold,
                self._columns.metrics,
                positive=self._positive,
            )
            if self.scorable and self.evaluation is not None
            else {}
        )
        answers = _predict(logits, self.kind, self.labels, threshold)
        return Scored(metrics, {"predictions.json": answers}, answers)

    def export_settings(self) -> Dict[str, Any]:
        return {**label_settings(self.labels or ["number"]), "problem_type": PROBLEM_TYPES[self.kind]}


def label_settings(names: Sequence[str]) -> Dict[str, Any]:
    """Keys of config.json that name the classes."""
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


class _Text(NamedTuple):
    """One text of a table; `labels` None where the file doesn't tell."""

    parts: Tuple[str, ...]
    labels: Optional[Tuple[str, ...]]
    number: float  # regression
    where: str


def _read_texts(file: AnyFile, kind: str, columns: ClassificationConfig, *, labels: bool = True) -> List[_Text]:
    """The texts of a table in their order; all of them have labels, or none.

    labels: False leaves them unread.
    """
    source = ExampleSource.of(file)
    faults = Faults(source)
    labelled: Optional[bool] = None
    wanted = [columns.text_column] + ([columns.second_text_column] if columns.second_text_column else [])
    texts = []
    for record in table_rows(source, faults):
        if labelled is None:
            labelled = labels and columns.label_column in record.values
            if source.format in ("csv", "tsv"):  # one header for all records: its mistake is said once
                _refuse_missing(record, f"{source} line {record.line}", wanted)
        with faults.of_record():
            texts.append(_text(record, f"{source} line {record.line}", kind, columns, wanted, labelled))
    faults.refuse()
    if not texts:
        raise ValueError(f"{source}: holds no text")
    return texts


def _text(
    record: TableRow, where: str, kind: str, columns: ClassificationConfig, wanted: Sequence[str], labelled: bool
) -> _Text:
    _refuse_missing(record, where, [*wanted, *([columns.label_column] if labelled else [])])
    parts = tuple(record.values[name] for name in wanted)
    for part, name in zip(parts, wanted):
        if not plain_text(part):
            raise ValueError(f"{where}: {named(name)} is {shown(part)}; must be a text")
    labels, number = _labels(record, where, kind, columns) if labelled else (None, math.nan)
    return _Text(parts, labels, number, where)


def _refuse_missing(record: TableRow, where: str, names: Sequence[str]) -> None:
    for name in names:
        if name not in record.values:
            raise ValueError(
                f"{where}: no column {shown(name)}, there are {', '.join(map(named, list(record.values)[:8]))}; "
                "name them with --set task.text_column=... and task.label_column=..."
            )


def _labels(record: TableRow, where: str, kind: str, columns: ClassificationConfig) -> Tuple[Tuple[str, ...], float]:
    raw = record.values[columns.label_column]

    def refused(rule: str) -> ValueError:
        return ValueError(f"{where}: {named(columns.label_column)} is {shown(raw)}; must be {rule}")

    if kind == REGRESSION:
        try:
            number = math.nan if isinstance(raw, bool) else float(raw)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not abs(number) <= _LARGEST:
            raise refused("a number")
        return (), number
    if kind == MULTI_LABEL:
        parts = raw if isinstance(raw, list) else [part.strip() for part in str(raw).split(columns.label_separator)]
        if isinstance(raw, dict) or not all(map(is_label, parts)):
            raise refused("labels of at most 1,000 characters")
        return tuple(dict.fromkeys(str(part) for part in parts if part != "")), math.nan
    if raw == "" or not is_label(raw):
        raise refused("one label, of at most 1,000 characters")
    return (str(raw),), math.nan


_LARGEST = 1e38  # a target is float32


def is_label(value: Any) -> bool:
    """Texts, numbers and truth values of JSON."""
    if isinstance(value, str):
        return plain_text(value) and value.isprintable() and len(value) <= 1000
    return isinstance(value, (bool, int, float))


def _label_names(texts: Sequence[_Text]) -> List[str]:
    """Every label that occurs, in alphabetical order (of numbers, in theirs)."""
    found = {label for text in texts for label in text.labels or ()}
    return sorted(
        found, key=lambda label: (0, int(label), "") if label.isdecimal() and len(label) < 19 else (1, 0, label)
    )


def _make_inputs(
    texts: Sequence[_Text],
    tokenizer: Tokenizer,
    kind: str,
    names: Sequence[str],
    max_sequence_length: int,
    *,
    faults: Optional[Faults] = None,
    cut: bool = True,
) -> Inputs:
    """[CLS] text [SEP], or [CLS] first [SEP] second [SEP]; what is too long loses its end, the longer of a pair first,
    or is refused, all of it together, where `cut` is false.

    Target `labels`: int32 [n], float32 [n, C] of 0 and 1, or float32 [n] by the kind; of texts without labels zeros.
    """
    faults = faults or Faults("the texts")
    parts = len(texts[0].parts)
    room = max_sequence_length - parts - 1
    encoded = [
        [tokens.ids for tokens in tokenizer.encode([text.parts[part] for text in texts])] for part in range(parts)
    ]
    ids: List[np.ndarray] = []
    segments: List[np.ndarray] = []
    for number, text in enumerate(texts):
        own = [part[number] for part in encoded]
        with faults.of_record():
            if not cut:
                refuse_too_long(text.where, sum(map(len, own)), room)
        row, kinds = tokenizer.joined(_shortened(own, room))
        ids.append(row)
        segments.append(kinds)
    targets = _targets(texts, kind, names, faults)
    faults.refuse()
    return Inputs.of(ids, np.concatenate(segments), targets={"labels": targets})


def refuse_too_long(where: str, tokens: int, room: int) -> None:
    """ValueError where an example has more tokens than there is room for."""
    if tokens > room:
        raise ValueError(
            f"{where}: {tokens:,} tokens, the rows have room for {room:,}; shorten it, --cut leaves out its end as "
            "training does, --set data.max_sequence_length=... makes rows longer"
        )


def _shortened(parts: Sequence[np.ndarray], room: int) -> List[np.ndarray]:
    """The beginnings of one or two lists of tokens that fit into `room`; the longer one gives way first."""
    if len(parts) == 1:
        return [parts[0][:room]]
    first, second = parts
    keep_second = max(room - len(first), min(len(second), room // 2))
    keep_first = room - min(len(second), keep_second)
    return [first[:keep_first], second[:keep_second]]


def _targets(texts: Sequence[_Text], kind: str, names: Sequence[str], faults: Faults) -> np.ndarray:
    if kind == REGRESSION:
        return np.array([0.0 if text.labels is None else text.number for text in texts], np.float32)
    index = {name: number for number, name in enumerate(names)}
    targets = np.zeros((len(texts), len(names)), np.float32)
    for number, text in enumerate(texts):
        for label in text.labels or ():
            with faults.of_record():
                if label not in index:
                    known = ", ".join(map(named, list(names)[:5])) + (", ..." if len(names) > 5 else "")
                    raise ValueError(
                        f"{text.where}: label {shown(label)} is none of the {len(names)} of the training file ({known})"
                    )
                targets[number, index[label]] = 1.0
    return targets.argmax(axis=1).astype(np.int32) if kind == SINGLE_LABEL else targets


def _predict(logits: np.ndarray, kind: str, names: Sequence[str], threshold: float) -> List[Dict[str, Any]]:
    """Plain values for each text, logits [n, C]: its label and probability, its labels and theirs, or its number."""
    if kind == REGRESSION:
        return [{"prediction": float(value)} for value in logits[:, 0]]
    logits = logits.astype(np.float64)
    if kind == MULTI_LABEL:
        probabilities = 1.0 / (1.0 + np.exp(-logits))
        chosen = [np.flatnonzero(row > threshold).tolist() for row in probabilities]
        return [
            {
                "prediction": [names[each] for each in numbers],
                "probabilities": {names[each]: float(row[each]) for each in numbers},
            }
            for numbers, row in zip(chosen, probabilities)
        ]
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = weights / weights.sum(axis=1, keepdims=True)
    return [{"prediction": names[int(row.argmax())], "probability": float(row.max())} for row in probabilities]


def _score(
    logits: np.ndarray,
    labels: np.ndarray,
    kind: str,
    threshold: float,
    metrics: Optional[Sequence[str]] = None,
    *,
    positive: Optional[int] = None,
) -> Dict[str, Any]:
    """The metrics of these names, None for the task's own, and the number of texts.

    In percent, but for the correlations (Matthews', Pearson's, Spearman's), which are in [-1, 1].
    positive: the class that F1 is of.
    """
    compute: Dict[str, Callable[[], Optional[float]]]
    if kind == REGRESSION:
        found, wanted = logits[:, 0].astype(np.float64), labels.astype(np.float64)
        compute = {
            "pearson": lambda: pearson(found, wanted),
            "spearman": lambda: spearman(found, wanted),
            "mean_squared_error": lambda: float(((found - wanted) ** 2).mean()),
        }
    elif kind == MULTI_LABEL:
        given, asked = 1.0 / (1.0 + np.exp(-logits.astype(np.float64))) > threshold, labels > 0
        compute = {
            "micro_f1": lambda: 100.0 * micro_f1(given, asked),
            "macro_f1": lambda: 100.0 * macro_f1(given, asked),
            "all_right": lambda: 100.0 * float((given == asked).all(axis=1).mean()),
        }
    else:
        classes = logits.argmax(axis=1)
        numbers = np.union1d(classes, labels)  # macro-F1 is of the classes that occur
        compute = {
            "accuracy": lambda: 100.0 * accuracy(classes, labels),
            "f1": lambda: 100.0 * micro_f1(classes == positive, labels == positive),
            "macro_f1": lambda: 100.0 * macro_f1(classes[:, None] == numbers, labels[:, None] == numbers),
            "matthews": lambda: matthews(classes, labels),
        }
    return {**{name: compute[name]() for name in metrics or METRICS_OF[kind]}, "texts": len(labels)}
