"""Token classification: words with a label each, such as the names in a sentence.

A word's label stands at its first token; the other tokens have none.
Letters as in `model/bert.py`: B rows, S slots; C classes.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import chain
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import nn

from ipu_packed_bert.model.bert import initialise
from ipu_packed_bert.model.loss import correct, cross_entropy
from ipu_packed_bert.model.packed import PackedBert
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.finetuning import TokensConfig
from ipu_packed_bert.settings.placement import PlacedPart
from ipu_packed_bert.settings.schema import ModelConfig
from ipu_packed_bert.tasks.examples import ExampleTask, Inputs, LabelTask, LossAndCorrect, Scored
from ipu_packed_bert.tasks.files import ExampleSource, Faults, TableRow, is_label, plain_text, read_records
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


class TokensTask(LabelTask):
    name = "tokens"
    architecture = "BertForTokenClassification"
    fields = (*ExampleTask.prediction_fields, "labels", "scale")
    counts = {"sequences": "sequence_numbers", "labelled_tokens": "labels"}
    scales = {"scale": "labelled_tokens"}
    metrics = (Metric("loss", "loss", "labelled_tokens", "scale"), Metric("accuracy", "correct", "labelled_tokens"))
    heads = (PlacedPart("classifier", "classifier"),)
    of_slots = True
    label_setting = "labels_column"

    @classmethod
    def read(cls, source: ExampleSource, config: Config, *, labels: bool) -> List[_Sentence]:
        """JSONL with a list of words and one of labels; or, in any other file but CSV, a word and its label a line,
        sentences apart by an empty line, as in the CoNLL files.
        """
        if source.format == "csv":
            raise ValueError(f"{source}: read as CSV, and words come as CoNLL or JSONL; name it so, or convert it")
        if source.format in ("json", "jsonl"):
            of_record = partial(_sentence, columns=config.of_task(TokensConfig), labelled=labels)
            return read_records(source, of_record, what="sentence")
        sentences = _conll_sentences(source, labels)
        if not sentences:
            raise ValueError(f"{source}: holds no sentence")
        return sentences

    @staticmethod
    def texts_of(example: _Sentence) -> Sequence[str]:
        return (" ".join(example.words),)

    def inputs(self, examples: Sequence[_Sentence], what: str) -> Inputs:
        """[CLS] words [SEP]; what is too long loses its end."""
        room = self.max_sequence_length - 2
        pieces = iter(self.tokenizer.encode([word for sentence in examples for word in sentence.words]))
        ids: List[np.ndarray] = []
        slots: List[np.ndarray] = []
        self._firsts: List[List[int]] = []  # of each sentence: where each word begins, -1 if it was cut
        faults = Faults(self.sources[what])
        for sentence in examples:
            tokens = [next(pieces).ids for _ in sentence.words]
            row, _ = self.tokenizer.joined([np.concatenate(tokens)[:room]])
            starts = np.cumsum([1] + [len(each) for each in tokens[:-1]])
            firsts = [int(start) if len(each) and start <= room else -1 for start, each in zip(starts, tokens)]
            of_slots = np.zeros(len(row), np.int32)
            with faults.of_record():
                for first, label in zip(firsts, sentence.labels or ()):
                    number = 1 + self.number_of(label, sentence.where)
                    if first >= 0:
                        of_slots[first] = number
            self._firsts.append(firsts)
            ids.append(row)
            slots.append(of_slots)
        faults.refuse()
        inputs = Inputs.of(ids, np.zeros(sum(map(len, ids)), np.int32), slots={"labels": np.concatenate(slots)})
        cut = sum(first < 0 for firsts in self._firsts for first in firsts)
        self.notes.append(
            f"{what}: {len(examples):,} sentences of {inputs.lengths.mean():.0f} tokens"
            + (f"; {cut:,} words beyond {room + 2} tokens, or without one, have no answer" if cut else "")
        )
        return inputs

    @property
    def scores(self) -> Tuple[str, ...]:
        marked = any(label.startswith(MARKS) for label in self.labels or ())
        return ("accuracy", "precision", "recall", "f1") if marked else ("accuracy",)

    def network(self, attention: str) -> PackedBert:
        return _PackedBertForTokenClassification(self.model, classes=len(self.labels or ()), attention=attention)

    def score(self, outputs: Sequence[np.ndarray]) -> Scored:
        names = self.labels or []
        found = [
            [names[int(logits[first].argmax())] if first >= 0 else None for first in firsts]
            for logits, firsts in zip(outputs, self._firsts)
        ]
        words = [list(sentence.words) for sentence in self.examples]
        files = {"predictions.json": [{"words": own, "labels": labels} for own, labels in zip(words, found)]}
        answers: List[Dict[str, Any]] = [{"prediction": labels, "words": own} for own, labels in zip(words, found)]
        wanted = [sentence.labels for sentence in self.examples]
        return Scored(_word_scores(found, wanted) if self.scorable else {}, files, answers)


def _sentence(record: TableRow, where: str, *, columns: TokensConfig, labelled: bool) -> _Sentence:
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
        cells = re.findall(r"[^ \t\r\n\f\v]+", line)  # a no-break space is part of a word
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
