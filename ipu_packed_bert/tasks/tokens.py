"""Token classification: a label for each word, such as the names in a sentence.

The first token of a word has its label; the other tokens have none.
Suffixes as in `model/bert.py`: B rows, S slots; C classes.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import nn

from ipu_packed_bert.model.bert import initialise
from ipu_packed_bert.model.loss import at_least_float32, correct, cross_entropy
from ipu_packed_bert.model.packed import PackedBert
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.finetuning import TokensConfig
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
from ipu_packed_bert.tasks.scores import MAJORITY, MARKS, span_scores
from ipu_packed_bert.tasks.task import Metric
from pack_data.reading.account import Account
from pack_data.reading.fields import named, shown


class _PackedBertForTokenClassification(PackedBert):
    """A packed BERT with the weight names of Hugging Face's BertForTokenClassification.

    Labels [B, S] are 1 + class, and 0 for slots without a label.
    """

    def __init__(self, model: ModelConfig, *, classes: int, attention: str = "eager"):
        super().__init__(model, attention=attention, pooler=False)
        self.dropout = nn.Dropout(model.head_dropout)
        self.classifier = nn.Linear(model.hidden_size, classes)
        initialise(self, model.initializer_range)

    def predictions(
        self, input_ids_BS, input_mask_BS, segment_ids_BS, positions_BS
    ) -> torch.Tensor:
        """Compute class logits [B, S, C], at least float32."""
        hidden_BSH = self.hidden(input_ids_BS, input_mask_BS, segment_ids_BS, positions_BS)
        logits_BSC = self.classifier(self.dropout(hidden_BSH))
        return at_least_float32(logits_BSC)

    def forward(
        self, input_ids_BS, input_mask_BS, segment_ids_BS, positions_BS, labels_BS, scale_B
    ) -> LossAndCorrect:
        logits_BSC = self.predictions(input_ids_BS, input_mask_BS, segment_ids_BS, positions_BS)
        used_BS = (labels_BS > 0).to(logits_BSC.dtype)
        class_BS = (labels_BS - 1).clamp(min=0)
        loss_BS = cross_entropy(logits_BSC, class_BS) * used_BS
        correct_BS = correct(logits_BSC, class_BS).to(used_BS.dtype) * used_BS
        return LossAndCorrect((loss_BS.sum(1) * scale_B).sum(), correct_BS.sum())


class _Sentence(NamedTuple):
    words: Tuple[str, ...]
    labels: Optional[Tuple[str, ...]]  # one per word; None if the file has none
    where: str


class TokensTask(LabelTask):
    """Sentences with one label per word."""

    name = "tokens"
    architecture = "BertForTokenClassification"
    fields = (*ExampleTask.prediction_fields, "labels", "scale")
    counts = {"sequences": "sequence_numbers", "labelled_tokens": "labels"}
    scales = {"scale": "labelled_tokens"}
    metrics = (
        Metric("loss", "loss", "labelled_tokens", "scale"),
        Metric("accuracy", "correct", "labelled_tokens"),
    )
    heads = (PlacedPart("classifier", "classifier"),)
    of_slots = True
    label_setting = "labels_column"

    @classmethod
    def read(cls, source: ExampleSource, config: Config, *, labels: bool) -> List[_Sentence]:
        """Read JSONL with a list of words and a list of labels, or CoNLL, the format of all other files but CSV.

        CoNLL has a word and its label per line, and an empty line between sentences. CoNLL-U is recognised by its ten
        columns; its word is FORM, and `task.labels_column` names the column of the labels.
        """
        if source.format == "csv":
            raise ValueError(
                f"{source}: a CSV file, but words are read from CoNLL or JSONL; convert or rename it"
            )
        if source.format in ("json", "jsonl", "parquet"):
            columns = config.of_task(TokensConfig)
            return read_records(
                source,
                lambda record, where: _sentence(record, where, columns, source, labels),
                what="sentence",
            )
        sentences = _conll_sentences(source, config.of_task(TokensConfig), labels)
        if not sentences:
            raise ValueError(f"{source}: has no sentences; pass a file with words and labels")
        return sentences

    @staticmethod
    def texts_of(example: _Sentence) -> Sequence[str]:
        return (" ".join(example.words),)

    def inputs(self, examples: Sequence[_Sentence], what: str) -> Inputs:
        """Make [CLS] words [SEP], truncated to a row."""
        template = self.tokenizer.template(1)
        room = self.max_sequence_length - len(template.tokens)
        first_slot = len(template.before)
        words = chain.from_iterable(sentence.words for sentence in examples)
        encoded = iter(self.tokenizer.encode(list(words)))
        ids: List[np.ndarray] = []
        labels: List[np.ndarray] = []
        # For each sentence, the first token of each word, or -1 for a word without a token in the row.
        self._firsts: List[List[int]] = []
        faults = Faults(self.sources[what])
        without_token = beyond = 0
        for sentence in examples:
            pieces = [next(encoded).ids for _ in sentence.words]
            row, _ = self.tokenizer.joined([np.concatenate(pieces)[:room]])
            firsts = []
            start = first_slot
            for piece in pieces:
                firsts.append(start if len(piece) and start < first_slot + room else -1)
                without_token += not len(piece)
                beyond += len(piece) > 0 and firsts[-1] < 0
                start += len(piece)
            row_labels = np.zeros(len(row), np.int32)
            with faults.of_record():
                for first, label in zip(firsts, sentence.labels or ()):
                    number = 1 + self.number_of(label, sentence.where)
                    if first >= 0:
                        row_labels[first] = number
            self._firsts.append(firsts)
            ids.append(row)
            labels.append(row_labels)
        faults.refuse()

        segments = np.zeros(sum(map(len, ids)), np.int32)
        inputs = Inputs.of(ids, segments, slots={"labels": np.concatenate(labels)})
        count = sum(len(sentence.words) for sentence in examples)
        used = sum(first >= 0 for firsts in self._firsts for first in firsts)
        reasons = {
            f"beyond {self.max_sequence_length} slots": beyond,
            "without a token": without_token,
        }
        self.accounts[what]["words"] = Account(count, used, reasons)
        return inputs

    @property
    def scores(self) -> Tuple[str, ...]:
        marked = any(label.startswith(MARKS) for label in self.labels or ())
        accuracies = ("accuracy", MAJORITY)
        return (*accuracies, "precision", "recall", "f1") if marked else accuracies

    def network(self, attention: str) -> PackedBert:
        return _PackedBertForTokenClassification(
            self.model, classes=len(self.labels or ()), attention=attention
        )

    def score(self, outputs: Sequence[np.ndarray]) -> Scored:
        names = self.labels or []
        predictions: List[List[Optional[str]]] = []
        for logits, firsts in zip(outputs, self._firsts):
            predicted: List[Optional[str]] = []
            for first in firsts:
                predicted.append(names[int(logits[first].argmax())] if first >= 0 else None)
            predictions.append(predicted)
        records: List[Dict[str, Any]] = []
        answers: List[Dict[str, Any]] = []
        for sentence, labels in zip(self.examples, predictions):
            words = list(sentence.words)
            records.append({"words": words, "labels": labels})
            answers.append({"prediction": labels, "words": words})
        metrics: Dict[str, Any] = {}
        if self.scorable:
            labels = [self.examples[number].labels for number in self.scored]
            inputs = self.training or self.evaluation
            assert inputs is not None
            counts = np.bincount(inputs.slots["labels"], minlength=len(names) + 1)
            constant = names[int(counts[1:].argmax())]
            scored = [predictions[number] for number in self.scored]
            metrics = _word_scores(scored, labels, constant)
        return Scored(metrics, {"predictions.json": records}, answers)


def _sentence(
    record: TableRow, where: str, columns: TokensConfig, source: ExampleSource, with_labels: bool
) -> _Sentence:
    words = record.values.get(columns.words_column)
    if not isinstance(words, list) or not words or not all(map(plain_text, words)):
        raise ValueError(
            f"{where}: {columns.words_column} is {shown(words)}; must be a list of words; name it with --set "
            "task.words_column=..."
        )

    def labels_of_words() -> Optional[Tuple[str, ...]]:
        labels = record.values.get(columns.labels_column) if with_labels else None
        if labels is None:
            return None
        is_list = isinstance(labels, list) and len(labels) == len(words)
        if not is_list or not all(map(is_label, labels)):
            raise ValueError(
                f"{where}: {columns.labels_column} must be a list of {len(words)} labels, one per word, of at most "
                "1,000 characters"
            )
        return tuple(map(str, labels))

    return _Sentence(tuple(words), source.label(labels_of_words), where)


_CONLLU = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
_MOST_COLUMNS = 5  # of files with the word in the first column and the label in the last
_Word = Tuple[str, Optional[str]]  # the word and its label


def _conll_sentences(
    source: ExampleSource, settings: TokensConfig, with_labels: bool
) -> List[_Sentence]:
    sentences: List[_Sentence] = []
    block: List[str] = []  # lines of a sentence
    for number, line in enumerate(chain(source.lines(), [""]), start=1):
        # A no-break space is part of a word.
        if line.strip(" \t\r\n\f\v") and not line.startswith("-DOCSTART-"):
            block.append(line.rstrip("\r\n"))
            continue
        where = f"{source} line {number - len(block)}"
        words = _words_of(block, where, source, settings.labels_column if with_labels else "")
        if words:
            texts, labels = zip(*words)
            is_labelled = with_labels and None not in labels
            sentences.append(_Sentence(texts, labels if is_labelled else None, where))
        block = []
    return sentences


def _words_of(block: List[str], where: str, source: ExampleSource, label: str) -> List[_Word]:
    """Return the words of a sentence: column FORM of CoNLL-U, or the first column of other files."""
    table = [line.split("\t") for line in block if not line.startswith("#")]
    if source.format == "conllu" or (table and set(map(len, table)) == {len(_CONLLU)}):
        return _conllu_words(table, where, source, label)
    rows = [re.findall(r"[^ \t\r\n\f\v]+", line) for line in block]
    most = max(map(len, rows), default=0)
    if most > _MOST_COLUMNS:
        raise ValueError(
            f"{where}: a line has {most} columns; the word is read from the first and the label from the last of at "
            f"most {_MOST_COLUMNS}, or from the {len(_CONLLU)} of CoNLL-U, divided by tabs; convert the file"
        )
    return [(row[0], row[-1] if len(row) > 1 else None) for row in rows]


def _conllu_words(
    table: List[List[str]], where: str, source: ExampleSource, label: str
) -> List[_Word]:
    """Return the words of the rows of CoNLL-U; multiword ranges and empty nodes are counted."""
    if label and label.lower() not in _CONLLU:
        raise ValueError(
            f"{where}: CoNLL-U has no column {named(label)}; name one of {', '.join(_CONLLU)} with --set "
            "task.labels_column=upos"
        )
    words: List[_Word] = []
    for row in table:
        is_word = row[0].isdigit()
        if len(row) != len(_CONLLU) or not (is_word or re.fullmatch(r"\d+[-.]\d+", row[0])):
            raise ValueError(
                f"{where}: a line is {shown(' '.join(row))}; must be the {len(_CONLLU)} columns of CoNLL-U, divided by "
                "tabs, the first of which is a number"
            )
        if is_word:
            words.append((row[1], row[_CONLLU.index(label.lower())] if label else None))
        else:
            source.skipped.append(row[0])
    return words


def _word_scores(
    predictions: Sequence[Sequence[Optional[str]]], labels: Sequence[Any], constant: str
) -> Dict[str, Any]:
    """Return the percentage of correct words and, if labels are B-X, I-X and O, F1 of spans.

    A word without a prediction counts as wrong. ``constant``: the label of the constant answer.
    """
    pairs = list(zip(chain.from_iterable(predictions), chain.from_iterable(labels)))
    right = sum(prediction == label for prediction, label in pairs)
    constant_right = sum(label == constant for _, label in pairs)
    scores: Dict[str, Any] = {
        "accuracy": 100.0 * right / len(pairs),
        MAJORITY: 100.0 * constant_right / len(pairs),
        "words": len(pairs),
    }
    if any(label.startswith(MARKS) for _, label in pairs):
        scores.update(span_scores(predictions, labels))
    return scores
