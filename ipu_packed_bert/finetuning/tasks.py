"""A task: what a configuration learns, from which files, and what it makes of the network's outputs."""
from __future__ import annotations

import abc
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import numpy as np
import torch

from ipu_packed_bert.config import ModelConfig
from ipu_packed_bert.finetuning import classification, squad
from ipu_packed_bert.finetuning.config import MULTI_LABEL, REGRESSION, SINGLE_LABEL, SQUAD, FinetuneConfig
from ipu_packed_bert.finetuning.heads import PackedBertForQuestionAnswering, PackedBertForSequenceClassification
from ipu_packed_bert.finetuning.metrics import best_threshold, score_answers
from ipu_packed_bert.finetuning.packing import Inputs
from ipu_packed_bert.finetuning.tokens import Tokenizer
from pack_data.text.wordpiece import Vocabulary

_EVALUATION_SEED = 0  # runs with other seeds are scored on the same examples


class Evaluation(NamedTuple):
    """What came of evaluating."""

    metrics: Dict[str, Any]  # empty where the file has no labels
    files: Dict[str, Any]  # plain values by file name, predictions.json among them


class Task(abc.ABC):
    """Training and evaluation data of one configuration, read and cut into sequences."""

    training: Optional[Inputs] = None
    evaluation: Optional[Inputs] = None
    architecture: str  # of Hugging Face

    def __init__(self) -> None:
        self.notes: List[str] = []  # what a user should know about the data, one line each

    @abc.abstractmethod
    def network(self, model: ModelConfig, attention: str) -> torch.nn.Module:
        """With initial weights."""

    @abc.abstractmethod
    def evaluate(self, outputs: Sequence[np.ndarray]) -> Evaluation:
        """outputs: for each sequence of `evaluation`, in order, what `FineTuner.predict` gives."""

    def export_settings(self) -> Dict[str, Any]:
        """Further keys of config.json."""
        return {}


class SquadTask(Task):
    architecture = "BertForQuestionAnswering"

    def __init__(self, config: FinetuneConfig, tokenizer: Tokenizer):
        super().__init__()
        data, self._squad = config.data, config.squad
        seen = set()
        if data.training is not None:
            questions = self._read(data.training)
            unlabelled = sum(not question.labelled for question in questions)
            if unlabelled:
                raise ValueError(f"{data.training}: {unlabelled} of {len(questions)} questions have neither answers nor is_impossible; "
                                 "nothing can be learnt from them")
            seen = {question.paragraph for question in questions}
            questions = drawn(questions, data.training_examples, data.seed)
            self.training = squad.make_windows(questions, tokenizer, self._squad, data.max_sequence_length).inputs
            self._note("training", questions, self.training)
        if data.evaluation is not None:
            questions = self._read(data.evaluation)
            if self._squad.drop_seen_paragraphs:
                kept = [question for question in questions if question.paragraph not in seen]
                self.notes.append(f"{data.evaluation}: {len(questions) - len(kept):,} questions on paragraphs of the training file are left out")
                if not kept:
                    raise ValueError(f"{data.evaluation}: all its paragraphs are in {data.training}; evaluate on others")
                questions = kept
            questions = drawn(questions, data.evaluation_examples, _EVALUATION_SEED)
            self.windows = squad.make_windows(questions, tokenizer, self._squad, data.max_sequence_length)
            self.evaluation = self.windows.inputs
            self._note("evaluation", questions, self.evaluation)

    def _read(self, name: str) -> List[squad.Question]:
        questions = squad.read_squad(Path(name))
        if self._squad.null_answers:
            return questions
        kept = [question for question in questions if question.answers or not question.labelled]
        if len(kept) < len(questions):
            self.notes.append(f"{name}: {len(questions) - len(kept):,} questions without an answer are left out (squad.null_answers is false)")
        if not kept:
            raise ValueError(f"{name}: no question has an answer; use them with --set squad.null_answers=true")
        return kept

    def _note(self, what: str, questions: Sequence[squad.Question], inputs: Inputs) -> None:
        self.notes.append(f"{what}: {len(questions):,} questions in {len(inputs):,} windows of {inputs.lengths.mean():.0f} tokens")

    def network(self, model: ModelConfig, attention: str) -> torch.nn.Module:
        return PackedBertForQuestionAnswering(model, attention=attention)

    def evaluate(self, outputs: Sequence[np.ndarray]) -> Evaluation:
        predictions = squad.answer_questions(self.windows, outputs, self._squad)
        labelled = all(question.labelled for question in self.windows.questions)
        metrics: Dict[str, Any] = {}
        if labelled:
            answers = squad.gold(self.windows.questions)
            metrics = score_answers({name: each.text for name, each in predictions.items()}, answers)
            if self._squad.null_answers:
                best = best_threshold({name: each.best_text for name, each in predictions.items()},
                                      {name: each.null_odds for name, each in predictions.items()}, answers)
                metrics.update(best_f1=best.f1, best_f1_threshold=best.threshold)
        return Evaluation(metrics, squad.prediction_files(predictions, null_answers=self._squad.null_answers))


class ClassificationTask(Task):
    architecture = "BertForSequenceClassification"

    def __init__(self, config: FinetuneConfig, tokenizer: Tokenizer, labels: Optional[Sequence[str]]):
        super().__init__()
        data, self._columns, self.kind = config.data, config.classification, config.data.task
        texts = {}
        for what, name in (("training", data.training), ("evaluation", data.evaluation)):
            if name is not None:
                texts[what] = classification.read_texts(Path(name), self.kind, self._columns)
        if "training" in texts:
            if texts["training"][0].labels is None:
                raise ValueError(f"{data.training}: has no column {self._columns.label_column!r}; name it with --set classification.label_column=...")
            labels = classification.label_names(texts["training"])
        elif labels is None and self.kind != REGRESSION:
            raise ValueError(f"{config.model.checkpoint}: its config.json names no labels (id2label); evaluate a checkpoint that was trained on them")
        self.labels = [] if self.kind == REGRESSION else list(labels)
        if self.kind != REGRESSION and len(self.labels) < 2:
            raise ValueError(f"{data.training}: has {len(self.labels)} different labels in {self._columns.label_column!r}; "
                             "there must be two at least")
        for what, found in texts.items():
            found = drawn(found, data.training_examples, data.seed) if what == "training" else drawn(found, data.evaluation_examples, _EVALUATION_SEED)
            inputs = classification.make_inputs(found, tokenizer, self.kind, self.labels, data.max_sequence_length)
            setattr(self, what, inputs)
            cut = int((inputs.lengths == data.max_sequence_length).sum())
            self.notes.append(f"{what}: {len(found):,} texts of {inputs.lengths.mean():.0f} tokens" + (
                f", {cut:,} of them cut at {data.max_sequence_length} or just as long" if cut else ""))
        self._labelled = "evaluation" in texts and texts["evaluation"][0].labels is not None

    def network(self, model: ModelConfig, attention: str) -> torch.nn.Module:
        return PackedBertForSequenceClassification(model, classes=max(1, len(self.labels)), kind=self.kind, attention=attention)

    def evaluate(self, outputs: Sequence[np.ndarray]) -> Evaluation:
        logits, threshold = np.stack(outputs), self._columns.threshold
        metrics = classification.score(logits, self.evaluation.targets["labels"], self.kind, threshold) if self._labelled else {}
        return Evaluation(metrics, {"predictions.json": classification.predict(logits, self.kind, self.labels, threshold)})

    def export_settings(self) -> Dict[str, Any]:
        names = self.labels or ["number"]
        return {"id2label": {str(number): name for number, name in enumerate(names)},
                "label2id": {name: number for number, name in enumerate(names)},
                "problem_type": {SINGLE_LABEL: "single_label_classification", MULTI_LABEL: "multi_label_classification",
                                 REGRESSION: "regression"}[self.kind]}


def drawn(examples: Sequence[Any], number: Optional[int], seed: int) -> List[Any]:
    """So many of them at random, in their order; None: all."""
    if number is None or number >= len(examples):
        return list(examples)
    chosen = np.sort(np.random.default_rng(seed).choice(len(examples), number, replace=False))
    return [examples[each] for each in chosen]


def build_task(config: FinetuneConfig, vocabulary: Vocabulary, labels: Optional[Sequence[str]] = None) -> Task:
    """labels: those of the checkpoint, where there is no training file to take them from."""
    tokenizer = Tokenizer(vocabulary)
    if config.data.task == SQUAD:
        return SquadTask(config, tokenizer)
    return ClassificationTask(config, tokenizer, labels)
