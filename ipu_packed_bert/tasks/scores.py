"""Scores of SQuAD and GLUE, and F1 of label sets and of spans of words.

SQuAD's exact match and F1 follow its script; GLUE's are F1 and the correlations of Matthews, Pearson and Spearman.

An undefined score, such as F1 with nothing to find and nothing found, is what the reference libraries return: 0.
Correlations of a constant are None.
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
    """Return the text as SQuAD compares it: lower case, without punctuation and articles, single blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


class _AnswerScore(NamedTuple):
    exact: float
    f1: float


def _score_against(prediction: str, answer: str) -> _AnswerScore:
    """Score normalised texts by the words they have in common.

    If one of them has no words, F1 is 1 if the other has none either, else 0 (the rule of version 2; an empty
    prediction means that there is no answer).
    """
    predicted = prediction.split()
    wanted = answer.split()
    exact = float(predicted == wanted)
    if not predicted or not wanted:
        return _AnswerScore(exact, exact)
    common = sum((collections.Counter(predicted) & collections.Counter(wanted)).values())
    if not common:
        return _AnswerScore(exact, 0.0)
    precision = common / len(predicted)
    recall = common / len(wanted)
    return _AnswerScore(exact, 2 * precision * recall / (precision + recall))


def score_answer(prediction: str, answers: Sequence[str]) -> _AnswerScore:
    """Return the best exact match and F1 over the answers.

    Answers without words do not count; if none is left, only "" is right.
    """
    wanted = [words for words in map(normalised, answers) if words] or [""]
    scores = [_score_against(normalised(prediction), words) for words in wanted]
    return _AnswerScore(max(score.exact for score in scores), max(score.f1 for score in scores))


def score_answers(
    predictions: Mapping[str, str], answers: Mapping[str, Sequence[str]]
) -> Dict[str, float]:
    """Return percentages over all questions; if some have no answer, also over those with one and those without."""
    groups = {"": list(answers)}
    if not all(answers.values()):
        groups["has_answer_"] = [name for name, wanted in answers.items() if wanted]
        groups["no_answer_"] = [name for name, wanted in answers.items() if not wanted]
    result: Dict[str, float] = {}
    for prefix, names in groups.items():
        if names:
            scores = [score_answer(predictions[name], answers[name]) for name in names]
            result[prefix + "exact"] = 100.0 * float(np.mean([score.exact for score in scores]))
            result[prefix + "f1"] = 100.0 * float(np.mean([score.f1 for score in scores]))
            result[prefix + "questions"] = len(names)
    return result


class _Threshold(NamedTuple):
    score: float  # percent
    threshold: float  # no answer if its score is better by more than this


def best_threshold(
    texts: Mapping[str, str],
    odds: Mapping[str, float],
    answers: Mapping[str, Sequence[str]],
    *,
    of: str = "f1",
) -> _Threshold:
    """Return the threshold with the best F1, or exact match, over these questions, as SQuAD's script for version 2.

    texts: the best answer to each question; odds: the score of no answer minus that of the text.
    """
    # With a threshold below all odds nothing is answered, and the questions without an answer are right.
    total = best = float(sum(not wanted for wanted in answers.values()))
    threshold = min(odds.values()) - 1.0
    ordered = sorted(odds, key=lambda name: odds[name])
    for name, next_name in zip(ordered, [*ordered[1:], None]):
        total += getattr(score_answer(texts[name], answers[name]), of) - float(not answers[name])
        is_last_of_equals = next_name is None or odds[next_name] != odds[name]
        if total > best and is_last_of_equals:
            best = total
            threshold = odds[name]
    return _Threshold(100.0 * best / len(answers), threshold)


def _f1_of(common: int, predicted: int, wanted: int) -> float:
    """Return the harmonic mean of precision, common / predicted, and recall, common / wanted."""
    return 2.0 * common / (predicted + wanted) if predicted + wanted else 0.0


def micro_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Return F1 over all decisions, bool of any shape: of one class, or of all texts and labels [n, C]."""
    return _f1_of(int((predictions & labels).sum()), int(predictions.sum()), int(labels.sum()))


def macro_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean over the classes of their F1, bool [n, C]."""
    return float(np.mean(list(map(micro_f1, predictions.T, labels.T))))


def matthews(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Return Matthews' correlation coefficient of classes [n] in [-1, 1], Gorodkin's for more than two.

    0 if either side has one class only.
    """
    classes = np.union1d(predictions, labels)
    predicted = (predictions[:, None] == classes).sum(axis=0, dtype=np.int64)
    wanted = (labels[:, None] == classes).sum(axis=0, dtype=np.int64)
    size = len(labels)
    right = int((predictions == labels).sum())
    # Products of two of these exceed 64 bits; Python's integers do not overflow.
    covariance = right * size - int(predicted @ wanted)
    spread = (size**2 - int(predicted @ predicted)) * (size**2 - int(wanted @ wanted))
    return covariance / math.sqrt(spread) if spread else 0.0


_Span = Tuple[int, int, str]  # first word, one after the last, kind


def spans(labels: Sequence[Optional[str]]) -> Set[_Span]:
    """Return the spans that labels such as B-X I-X O mark, as seqeval reads them by default, and conlleval before it.

    A word with I- or E- continues a B- or I- of its kind before it; any other begins a span; E- and S- end one.  A word
    without a label is O.
    """
    marked: Set[_Span] = set()
    first = 0
    mark = "O"
    kind = ""
    for number, label in enumerate([*labels, "O"]):
        next_mark, _, next_kind = (label or "O").partition("-")
        if next_mark in ("I", "E") and mark in ("B", "I") and next_kind == kind:
            mark = next_mark
            continue
        if mark != "O":
            marked.add((first, number, kind))
        first, mark, kind = number, next_mark, next_kind
    return marked


MARKS = ("B-", "I-", "E-", "S-")


def span_scores(
    predictions: Sequence[Sequence[Optional[str]]], labels: Sequence[Sequence[Optional[str]]]
) -> Dict[str, float]:
    """Return precision, recall and F1 over the whole spans of all sentences, in percent."""
    sides: List[Set[Tuple[int, _Span]]] = []
    for sentences in (predictions, labels):
        sides.append(
            {
                (number, span)
                for number, sentence in enumerate(sentences)
                for span in spans(sentence)
            }
        )
    predicted, wanted = map(len, sides)
    common = len(sides[0] & sides[1])
    return {
        "precision": 100.0 * common / predicted if predicted else 0.0,
        "recall": 100.0 * common / wanted if wanted else 0.0,
        "f1": 100.0 * _f1_of(common, predicted, wanted),
    }


def pearson(first: np.ndarray, second: np.ndarray) -> Optional[float]:
    """Return the linear correlation in [-1, 1]; None if one side is constant."""
    return _correlation("pearsonr", first, second)


def spearman(first: np.ndarray, second: np.ndarray) -> Optional[float]:
    """Return the correlation of the ranks, in which equal values share their mean rank; None if one is constant."""
    return _correlation("spearmanr", first, second)


def _correlation(name: str, first: np.ndarray, second: np.ndarray) -> Optional[float]:
    from scipy import stats  # takes long to import

    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(getattr(stats, name)(first, second)[0])
