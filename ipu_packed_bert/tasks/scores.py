"""Scores: exact match and F1 by SQuAD's rules, micro-F1 of label sets, Pearson's and Spearman's correlations."""

from __future__ import annotations

import collections
import re
import string
from typing import Dict, Mapping, NamedTuple, Optional, Sequence

import numpy as np

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """What SQuAD compares: lower case, without punctuation and articles, single blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    return float(normalised(prediction) == normalised(answer))


def f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall over the words the two have in common.

    Where one of them has no words, 1 if the other has none either, else 0 (the rule of version 2; an empty prediction
    means that there is no answer).
    """
    found, wanted = normalised(prediction).split(), normalised(answer).split()
    if not found or not wanted:
        return float(found == wanted)
    common = sum((collections.Counter(found) & collections.Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(found), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


class AnswerScore(NamedTuple):
    exact: float
    f1: float


def score_answer(prediction: str, answers: Sequence[str]) -> AnswerScore:
    """The best over the given answers; those without words don't count, and where none is left, only "" is right."""
    wanted = [answer for answer in answers if normalised(answer)] or [""]
    return AnswerScore(
        max(exact_match(prediction, answer) for answer in wanted), max(f1(prediction, answer) for answer in wanted)
    )


def score_answers(predictions: Mapping[str, str], answers: Mapping[str, Sequence[str]]) -> Dict[str, float]:
    """Percentages over all questions, and, where some have no answer, over those with one and those without."""
    scores = {name: score_answer(predictions[name], wanted) for name, wanted in answers.items()}
    groups = {"": list(answers)}
    without = [name for name, wanted in answers.items() if not wanted]
    if without:
        groups["has_answer_"] = [name for name, wanted in answers.items() if wanted]
        groups["no_answer_"] = without
    result: Dict[str, float] = {}
    for prefix, names in groups.items():
        if names:
            result[prefix + "exact"] = 100.0 * float(np.mean([scores[name].exact for name in names]))
            result[prefix + "f1"] = 100.0 * float(np.mean([scores[name].f1 for name in names]))
            result[prefix + "questions"] = len(names)
    return result


class Threshold(NamedTuple):
    f1: float  # percent
    threshold: float  # no answer where its score is better by more than this


def best_threshold(
    texts: Mapping[str, str], odds: Mapping[str, float], answers: Mapping[str, Sequence[str]]
) -> Threshold:
    """The threshold with the best F1 over these questions, as SQuAD's script for version 2 finds it.

    texts: the best answer to each question; odds: the score of no answer minus that of the text.
    """
    # With a threshold below all odds nothing is answered, and the questions without an answer are right.
    total = best = float(sum(not wanted for wanted in answers.values()))
    threshold = min(odds.values()) - 1.0
    ordered = sorted(odds, key=lambda name: odds[name])
    for place, name in enumerate(ordered):
        total += score_answer(texts[name], answers[name]).f1 - float(not answers[name])
        equal = place + 1 < len(ordered) and odds[ordered[place + 1]] == odds[name]
        if total > best and not equal:
            best, threshold = total, odds[name]
    return Threshold(100.0 * best / len(answers), threshold)


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Fraction of classes [n] that are right."""
    return float((predictions == labels).mean())


def micro_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """F1 over all decisions of all texts, bool [n, C]; 1 where there is nothing to find and nothing was found."""
    both, either = int((predictions & labels).sum()), int(predictions.sum()) + int(labels.sum())
    return 2.0 * both / either if either else 1.0


def pearson(first: np.ndarray, second: np.ndarray) -> Optional[float]:
    """Linear correlation in [-1, 1]; None where one side is constant, which has none."""
    a, b = first - first.mean(), second - second.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size > 0 else None


def spearman(first: np.ndarray, second: np.ndarray) -> Optional[float]:
    """Correlation of the ranks; equal values share their mean rank."""
    return pearson(_ranks(first), _ranks(second))


def _ranks(values: np.ndarray) -> np.ndarray:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2.0)[group]
