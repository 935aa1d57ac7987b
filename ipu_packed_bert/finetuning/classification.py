"""Texts, or pairs of texts, with one label, several labels or a number: tables to sequences, logits to predictions."""
from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ipu_packed_bert.finetuning.config import MULTI_LABEL, REGRESSION, SINGLE_LABEL, ClassificationConfig
from ipu_packed_bert.finetuning.files import Record, read_table
from ipu_packed_bert.finetuning.metrics import accuracy, micro_f1, pearson, spearman
from ipu_packed_bert.finetuning.packing import Inputs
from ipu_packed_bert.finetuning.tokens import Tokenizer


class Text(NamedTuple):
    """One text of a table; `labels` None where the file doesn't tell."""

    parts: Tuple[str, ...]
    labels: Optional[Tuple[str, ...]]
    number: float  # regression
    where: str


def read_texts(path: Path, kind: str, columns: ClassificationConfig) -> List[Text]:
    """The texts of a table in their order; all of them have labels, or none."""
    records = read_table(path)
    if not records:
        raise ValueError(f"{path}: holds no text")
    labelled = columns.label_column in records[0].values
    wanted = [columns.text_column] + ([columns.second_text_column] if columns.second_text_column else [])
    texts = []
    for record in records:
        where = f"{path} line {record.line}"
        for name in wanted + ([columns.label_column] if labelled else []):
            if name not in record.values:
                raise ValueError(f"{where}: no column {name!r}, there are {', '.join(map(str, record.values))}; "
                                 "name them with --set classification.text_column=... and label_column=...")
        parts = tuple(record.values[name] for name in wanted)
        for part, name in zip(parts, wanted):
            if not isinstance(part, str):
                raise ValueError(f"{where}: {name} is {part!r}; must be a text")
        labels, number = _labels(record, where, kind, columns) if labelled else (None, math.nan)
        texts.append(Text(parts, labels, number, where))
    return texts


def _labels(record: Record, where: str, kind: str, columns: ClassificationConfig) -> Tuple[Tuple[str, ...], float]:
    raw = record.values[columns.label_column]
    if kind == REGRESSION:
        try:
            number = float(raw)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{where}: {columns.label_column} is {raw!r}; must be a number")
        return (), number
    if kind == MULTI_LABEL:
        parts = raw if isinstance(raw, list) else [part.strip() for part in str(raw).split(columns.label_separator)]
        return tuple(dict.fromkeys(str(part) for part in parts if part != "")), math.nan
    if raw in ("", None) or isinstance(raw, list):
        raise ValueError(f"{where}: {columns.label_column} is {raw!r}; must be one label")
    return (str(raw),), math.nan


def label_names(texts: Sequence[Text]) -> List[str]:
    """Every label that occurs, in alphabetical order (of numbers, in theirs)."""
    found = {label for text in texts for label in text.labels or ()}
    return sorted(found, key=lambda label: (0, int(label), "") if label.isdecimal() else (1, 0, label))


def make_inputs(texts: Sequence[Text], tokenizer: Tokenizer, kind: str, names: Sequence[str], max_sequence_length: int) -> Inputs:
    """[CLS] text [SEP], or [CLS] first [SEP] second [SEP]; what is too long loses its end, the longer of a pair first.

    Target `labels`: int64 [n], float32 [n, C] of 0 and 1, or float32 [n] by the kind; of texts without labels zeros.
    """
    parts = len(texts[0].parts)
    encoded = [[tokens.ids for tokens in tokenizer.encode([text.parts[part] for text in texts])] for part in range(parts)]
    ids: List[np.ndarray] = []
    segments: List[np.ndarray] = []
    for number in range(len(texts)):
        row, kinds = tokenizer.joined(shortened([part[number] for part in encoded], max_sequence_length - parts - 1))
        ids.append(row)
        segments.append(kinds)
    return Inputs(np.array([len(row) for row in ids], np.int64), np.concatenate(ids), np.concatenate(segments),
                  targets={"labels": _targets(texts, kind, names)})


def shortened(parts: Sequence[np.ndarray], room: int) -> List[np.ndarray]:
    """The beginnings of one or two lists of tokens that fit into `room`; the longer one gives way first."""
    if len(parts) == 1:
        return [parts[0][:room]]
    first, second = parts
    keep_second = max(room - len(first), min(len(second), room // 2))
    keep_first = room - min(len(second), keep_second)
    return [first[:keep_first], second[:keep_second]]


def _targets(texts: Sequence[Text], kind: str, names: Sequence[str]) -> np.ndarray:
    if kind == REGRESSION:
        return np.array([0.0 if text.labels is None else text.number for text in texts], np.float32)
    index = {name: number for number, name in enumerate(names)}
    targets = np.zeros((len(texts), len(names)), np.float32)
    for number, text in enumerate(texts):
        for label in text.labels or ():
            if label not in index:
                known = ", ".join(list(names)[:5]) + (", ..." if len(names) > 5 else "")
                raise ValueError(f"{text.where}: label {label!r} is none of the {len(names)} of the training file ({known})")
            targets[number, index[label]] = 1.0
    return targets.argmax(axis=1).astype(np.int64) if kind == SINGLE_LABEL else targets


def predict(logits: np.ndarray, kind: str, names: Sequence[str], threshold: float) -> List[Dict[str, Any]]:
    """Plain values for each text, logits [n, C]: its label and probability, its labels and theirs, or its number."""
    if kind == REGRESSION:
        return [{"prediction": float(value)} for value in logits[:, 0]]
    logits = logits.astype(np.float64)
    if kind == MULTI_LABEL:
        probabilities = 1.0 / (1.0 + np.exp(-logits))
        return [{"prediction": [names[each] for each in np.flatnonzero(row > threshold)],
                 "probabilities": {names[each]: float(row[each]) for each in np.flatnonzero(row > threshold)}} for row in probabilities]
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = weights / weights.sum(axis=1, keepdims=True)
    return [{"prediction": names[int(row.argmax())], "probability": float(row.max())} for row in probabilities]


def score(logits: np.ndarray, labels: np.ndarray, kind: str, threshold: float) -> Dict[str, Any]:
    """Accuracy and micro-F1 in percent, or the two correlations and the mean squared error."""
    if kind == REGRESSION:
        found, wanted = logits[:, 0].astype(np.float64), labels.astype(np.float64)
        return {"pearson": pearson(found, wanted), "spearman": spearman(found, wanted),
                "mean_squared_error": float(((found - wanted) ** 2).mean()), "texts": len(labels)}
    if kind == MULTI_LABEL:
        given, wanted = 1.0 / (1.0 + np.exp(-logits.astype(np.float64))) > threshold, labels > 0
        return {"micro_f1": 100.0 * micro_f1(given, wanted), "all_right": 100.0 * float((given == wanted).all(axis=1).mean()),
                "texts": len(labels)}
    return {"accuracy": 100.0 * accuracy(logits.argmax(axis=1), labels), "texts": len(labels)}
