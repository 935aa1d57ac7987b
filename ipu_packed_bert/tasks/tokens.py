"""Token classification: words with a label each, such as the names in a sentence.

A word's label stands at its first token; the other tokens have none.
Letters as in `model/bert.py`: B rows, S slots; C classes.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import nn

from ipu_packed_bert.model.bert import initialise
from ipu_packed_bert.model.loss import correct, cross_entropy
from ipu_packed_bert.model.packed import PackedBert
from ipu_packed_bert.settings.finetuning import FinetuneConfig, TokensConfig
from ipu_packed_bert.settings.placement import PlacedPart
from ipu_packed_bert.settings.schema import ModelConfig
from ipu_packed_bert.tasks.classification import is_label, label_settings, refuse_too_long
from ipu_packed_bert.tasks.examples import Asked, ExampleTask, Inputs, LossAndCorrect, Scored, Tokenizer
from ipu_packed_bert.tasks.files import AnyFile, ExampleSource, Faults, TableRow, plain_text, table_rows
from ipu_packed_bert.tasks.scores import MARKS, span_scores
from ipu_packed_bert.tasks.task import Metric
from pack_data.reading.fields import shown


class _PackedBertForTokenClassification(PackedBert):
    """Names of weights as in Hugging Face's BertForTokenClassification.  labels [B, S]: 1 + class, 0 without one."""

    def __init__(self, model: ModelConfig, *, classes: int, attention: str = "eager"):
        super().__init__(model, attention=attention, pooler=False)
        self.dropout = nn.Dropout(model.hidden_dropout)
        self.classifier = nn.Linear(model.hidden_size, classes)
        initialise(self, model.initializer_range)

    def predictions(self, input_ids_BS, input_mask_BS, segment_ids_BS, positions_BS) -> torch.Tensor:
        """[B, S, C], at least float32."""
        logits_BSC = self.classifier(
            self.dropout(self.hidden(input_ids_BS, input_mask_BS, segment_ids_BS, positions_BS))
        )
        return logits_BSC if logits_BSC.dtype == torch.float64 else logits_BSC.float()

    def forward(self, input_ids_BS, input_mask_BS, segment_ids_BS, positions_BS, labels_BS, scale_B) -> LossAndCorrect:
        logits_BSC = self.predictions(input_ids_BS, input_mask_BS, segment_ids_BS, positions_BS)
        used_BS = (labels_BS > 0).to(logits_BSC.dtype)
        class_BS = (labels_BS - 1).clamp(min=0)
        loss = ((cross_entropy(logits_BSC, class_BS) * used_BS).sum(1) * scale_B).sum()
        return LossAndCorrect(loss, (correct(logits_BSC, class_BS).to(used_BS.dtype) * used_BS).sum())


class _Sentence(NamedTuple):
    words: Tuple[str, ...]
    labels: Optional[Tuple[str, ...]]  # one a word; None where the file doesn't tell
    where: str


class TokensTask(ExampleTask):
    """labels: those of the checkpoint, where there is no training file to take them from."""

    name = "tokens"
    architecture = "BertForTokenClassification"
    fields = (*ExampleTask.prediction_fields, "labels", "scale")
    counts = {"sequences": "sequence_numbers", "labelled_tokens": "labels"}
    scales = {"scale": "labelled_tokens"}
    metrics = (Metric("loss", "loss", "labelled_tokens", "scale"), Metric("accuracy", "correct", "labelled_tokens"))
    heads = (PlacedPart("classifier", "classifier"),)
    of_slots = True

    def __init__(
        self,
        config: FinetuneConfig,
        tokenizer: Tokenizer,
        model: ModelConfig,
        labels: Optional[Sequence[str]] = None,
        asked: Optional[Asked] = None,
    ):
        super().__init__(config, tokenizer, model, asked)
        learnt_from, evaluation = self.file("training"), self.file("evaluation")
        if learnt_from is not None:
            training = _read_sentences(learnt_from, config.of_task(TokensConfig))
            if training[0].labels is None:
                raise ValueError(f"{learnt_from}: has no labels; name their column with --set task.labels_column=...")
            labels = sorted({label for sentence in training for label in sentence.labels or ()})
            self.training = self._inputs(self.drawn(training, "training"), labels, "training")
        self.labels = self.labels_of_checkpoint(labels)
        if evaluation is not None:
            self._sentences = self.drawn(
                _read_sentences(evaluation, config.of_task(TokensConfig), labels=self.reads_labels), "evaluation"
            )
            self.evaluation = self._inputs(self._sentences, self.labels, "evaluation")
        self.pack()

    @staticmethod
    def texts(config: FinetuneConfig) -> List[str]:
        found = _read_sentences(str(config.data.training), config.of_task(TokensConfig))
        return list(dict.fromkeys(" ".join(sentence.words) for sentence in found))

    def _inputs(self, sentences: Sequence[_Sentence], labels: Sequence[str], what: str) -> Inputs:
        """[CLS] words [SEP]; what is too long loses its end.  `first_slots[what]`: where each word begins, -1 if it
        was cut.
        """
        index = {label: number for number, label in enumerate(labels, start=1)}
        pieces = iter(self.tokenizer.encode([word for sentence in sentences for word in sentence.words]))
        ids: List[np.ndarray] = []
        slots: List[np.ndarray] = []
        firsts: List[List[int]] = []
        faults = Faults(self.file(what))
        for sentence in sentences:
            tokens = [next(pieces).ids for _ in sentence.words]
            with faults.of_record():
                if not self.cuts:
                    refuse_too_long(sentence.where, sum(map(len, tokens)), self.max_sequence_length - 2)
            row, _ = self.tokenizer.joined([np.concatenate(tokens)[: self.max_sequence_length - 2]])
            starts = np.cumsum([1] + [len(each) for each in tokens[:-1]])
            firsts.append(
                [int(start) if len(each) and start < len(row) - 1 else -1 for start, each in zip(starts, tokens)]
            )
            of_slots = np.zeros(len(row), np.int32)
            with faults.of_record():
                for first, label in zip(firsts[-1], sentence.labels or ()):
                    if label not in index:
                        raise ValueError(
                            f"{sentence.where}: label {shown(label)} is none of the {len(index)} of the training file"
                        )
                    if first >= 0:
                        of_slots[first] = index[label]
            ids.append(row)
            slots.append(of_slots)
        faults.refuse()
        lengths = np.array([len(row) for row in ids], np.int64)
        cut = sum(first < 0 for each in firsts for first in each)
        self.notes.append(
            f"{what}: {len(sentences):,} sentences of {lengths.mean():.0f} tokens"
            + (
                f"; {cut:,} words beyond {self.max_sequence_length} tokens, or without one, have no answer"
                if cut
                else ""
            )
        )
        if what == "evaluation":
            self._firsts = firsts
        flat = np.concatenate(ids)
        return Inputs(lengths, flat, np.zeros(len(flat), np.int32), slots={"labels": np.concatenate(slots)})

    @property
    def scores(self) -> Tuple[str, ...]:
        marked = any(label.startswith(MARKS) for label in self.labels)
        return ("accuracy", "precision", "recall", "f1") if marked else ("accuracy",)

    @property
    def scorable(self) -> bool:
        return self._sentences[0].labels is not None

    def network(self, attention: str) -> PackedBert:
        return _PackedBertForTokenClassification(self.model, classes=len(self.labels), attention=attention)

    def score(self, outputs: Sequence[np.ndarray]) -> Scored:
        found = [
            [self.labels[int(logits[first].argmax())] if first >= 0 else None for first in firsts]
            for logits, firsts in zip(outputs, self._firsts)
        ]
        files = {
            "predictions.json": [
                {"words": list(sentence.words), "labels": labels} for sentence, labels in zip(self._sentences, found)
            ]
        }
        wanted = [sentence.labels for sentence in self._sentences]
        answers: List[Dict[str, Any]] = [
            {"prediction": labels, "words": list(sentence.words)} for sentence, labels in zip(self._sentences, found)
        ]
        return Scored(_word_scores(found, wanted) if self.scorable else {}, files, answers)

    def export_settings(self) -> Dict[str, Any]:
        return label_settings(self.labels)


def _read_sentences(file: AnyFile, columns: TokensConfig, *, labels: bool = True) -> List[_Sentence]:
    """JSONL with a list of words and one of labels; or, in any other file but CSV, a word and its label a line,
    sentences apart by an empty line, as in the CoNLL files.  All sentences have labels, or none.

    labels: False leaves them unread.
    """
    source = ExampleSource.of(file)
    faults = Faults(source)
    if source.format == "csv":
        raise ValueError(f"{source}: read as CSV, and words come as CoNLL or JSONL; name it so, or convert it")
    if source.format in ("json", "jsonl"):
        sentences: List[_Sentence] = []
        for record in table_rows(source, faults):
            with faults.of_record():
                sentences.append(_sentence(record, f"{source} line {record.line}", columns, labels))
    else:
        sentences = _conll_sentences(source, labels)
    for sentence in sentences:
        with faults.of_record():
            if (sentence.labels is None) != (sentences[0].labels is None):
                raise ValueError(
                    f"{sentence.where}: some sentences have labels and some have none; label all of them, or none"
                )
    faults.refuse()
    if not sentences:
        raise ValueError(f"{source}: holds no sentence")
    return sentences


def _sentence(record: TableRow, where: str, columns: TokensConfig, labelled: bool) -> _Sentence:
    words = record.values.get(columns.words_column)
    labels = record.values.get(columns.labels_column) if labelled else None
    if not isinstance(words, list) or not words or not all(map(plain_text, words)):
        raise ValueError(
            f"{where}: {columns.words_column} is {shown(words)}; must be a list of words; name it with --set "
            "task.words_column=..."
        )
    if labels is not None and not (
        isinstance(labels, list) and len(labels) == len(words) and all(map(is_label, labels))
    ):
        raise ValueError(
            f"{where}: {columns.labels_column} must be a list of {len(words)} labels, one a word, of at most "
            "1,000 characters"
        )
    return _Sentence(tuple(words), None if labels is None else tuple(map(str, labels)), where)


def _conll_sentences(source: ExampleSource, labelled: bool) -> List[_Sentence]:
    sentences: List[_Sentence] = []
    rows: List[List[str]] = []
    for number, line in enumerate(chain(source.lines(), [""]), start=1):
        cells = line.split()
        if cells and not line.startswith("-DOCSTART-"):
            rows.append(cells)
        elif rows:
            every = labelled and all(len(cells) > 1 for cells in rows)
            sentences.append(
                _Sentence(
                    tuple(cells[0] for cells in rows),
                    tuple(cells[-1] for cells in rows) if every else None,
                    f"{source} line {number - len(rows)}",
                )
            )
            rows = []
    return sentences


def _word_scores(found: Sequence[Sequence[Optional[str]]], wanted: Sequence[Any]) -> Dict[str, Any]:
    """Percent of the words that are right; where labels are B-X, I-X and O, also F1 of whole spans; a word without an
    answer is wrong.
    """
    pairs = [(mine, theirs) for first, second in zip(found, wanted) for mine, theirs in zip(first, second)]
    scores: Dict[str, Any] = {
        "accuracy": 100.0 * sum(mine == theirs for mine, theirs in pairs) / len(pairs),
        "words": len(pairs),
    }
    if any(theirs.startswith(MARKS) for _, theirs in pairs):
        scores.update(span_scores(found, wanted))
    return scores
