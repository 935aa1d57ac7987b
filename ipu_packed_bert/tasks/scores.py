"""Scores: exact match and F1 by SQuAD's rules, GLUE's (accuracy, F1, Matthews, Pearson, Spearman), F1 of label sets and
of spans of words.

Where a score is undefined, as F1 with nothing to find and nothing found, it is what the reference libraries make of it:
0.  Correlations of a constant are None.
"""

from __future__ import annotations

import collections
import math
import re
import string
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """What SQuAD compares: lower case, without punctuation and articles, single blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


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


class _AnswerScore(NamedTuple):
    exact: float
    f1: float


def score_answer(prediction: str, answers: Sequence[str]) -> _AnswerScore:
    """The best over the given answers; those without words don't count, and where none is left, only "" is right."""
    wanted = [answer for answer in answers if normalised(answer)] or [""]
    return _AnswerScore(
        float(any(normalised(prediction) == normalised(answer) for answer in wanted)),
        max(f1(prediction, answer) for answer in wanted),
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


class _Threshold(NamedTuple):
    score: float  # percent
    threshold: float  # no answer where its score is better by more than this


def best_threshold(
    texts: Mapping[str, str], odds: Mapping[str, float], answers: Mapping[str, Sequence[str]], *, of: str = "f1"
) -> _Threshold:
    """The threshold with the best F1, or exact match, over these questions, as SQuAD's script for version 2 finds it.

    texts: the best answer to each question; odds: the score of no answer minus that of the text.
    """
    # With a threshold below all odds nothing is answered, and the questions without an answer are right.
    total = best = float(sum(not wanted for wanted in answers.values()))
    threshold = min(odds.values()) - 1.0
    ordered = sorted(odds, key=lambda name: odds[name])
    for place, name in enumerate(ordered):
        total += getattr(score_answer(texts[name], answers[name]), of) - float(not answers[name])
        equal = place + 1 < len(ordered) and odds[ordered[place + 1]] == odds[name]
        if total > best and not equal:
            best, threshold = total, odds[name]
    return _Threshold(100.0 * best / len(answers), threshold)


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Fraction of classes [n] that are right."""
    return float((predictions == labels).mean())


def _f1_of(both: int, found: int, wanted: int) -> float:
    """Harmonic mean of precision, both / found, and recall, both / wanted."""
    return 2.0 * both / (found + wanted) if found + wanted else 0.0


def micro_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """F1 over all decisions, bool of any shape: of one class, or of all texts and labels [n, C]."""
    return _f1_of(int((predictions & labels).sum()), int(predictions.sum()), int(labels.sum()))


def macro_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Mean over the classes of their F1, bool [n, C]."""
    return float(np.mean([micro_f1(given, asked) for given, asked in zip(predictions.T, labels.T)]))


def matthews(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Matthews' correlation coefficient of classes [n] in [-1, 1], Gorodkin's for more than two; 0 where either side
    has one class only.
    """
    classes = np.union1d(predictions, labels)
    given, asked = (each[:, None] == classes for each in (predictions, labels))
    size, right = len(labels), int((predictions == labels).sum())
    found, wanted = given.sum(axis=0, dtype=np.int64), asked.sum(axis=0, dtype=np.int64)
    # Of Python's integers, which do not overflow.
    products, squares = (
        sum(int(one) * int(other) for one, other in zip(*pair)) for pair in ((found, wanted), (found, found))
    )
    spread = (size**2 - squares) * (size**2 - sum(int(each) ** 2 for each in wanted))
    return (right * size - products) / math.sqrt(spread) if spread else 0.0


_Span = Tuple[int, int, str]  # first word, one after the last, kind


def spans(labels: Sequence[Optional[str]]) -> Set[_Span]:
    """What labels such as B-X I-X O mark, as seqeval reads them by default, and conlleval before it.

    A word with I- or E- goes on with a B- or I- of its kind before it; any other begins a span; E- and S- end one.  A
    word without a label is O.
    """
    found: Set[_Span] = set()
    first, mark, kind = 0, "O", ""
    for number, label in enumerate([*labels, "O"]):
        next_mark, _, next_kind = (label or "O").partition("-")
        if next_mark in ("I", "E") and mark in ("B", "I") and next_kind == kind:
            mark = next_mark
            continue
        if mark != "O":
            found.add((first, number, kind))
        first, mark, kind = number, next_mark, next_kind
    return found


MARKS = ("B-", "I-", "E-", "S-")


def span_scores(
    found: Sequence[Sequence[Optional[str]]], wanted: Sequence[Sequence[Optional[str]]]
) -> Dict[str, float]:
    """Percent, over the whole spans of all sentences: precision, recall and F1."""
    sides: List[Set[Tuple[int, _Span]]] = [
        {(number, span) for number, labels in enumerate(side) for span in spans(labels)} for side in (found, wanted)
    ]
    both = len(sides[0] & sides[1])
    return {
        "precision": 100.0 * both / len(sides[0]) if sides[0] else 0.0,
        "recall": 100.0 * both / len(sides[1]) if sides[1] else 0.0,
        "f1": 100.0 * _f1_of(both, *map(len, sides)),
    }


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
