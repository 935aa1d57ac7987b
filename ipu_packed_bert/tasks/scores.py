"""Scores of SQuAD and GLUE, and F1 of label sets and of spans of words.

Exact match and F1 of SQuAD follow its script; GLUE has F1 and the correlations of Matthews, Pearson and Spearman.
Undefined scores are 0, as in the reference libraries, for example F1 without true or predicted positives. Correlations
of a constant are None.
"""

from __future__ import annotations

import collections
import math
import re
import string
from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from pack_data.display.facts import with_unit

# Scores of constant answers. Training labels determine the constant, as in `data/constant_baseline.py`; a file to
# predict comes without training labels, so its own labels do.
MAJORITY = "majority_accuracy"
MAJORITY_SET = "majority_all_right"
MEAN_LABEL_ERROR = "mean_label_squared_error"
# A metric, the same metric of a constant answer, and that answer.
_BASELINES = (
    ("accuracy", MAJORITY, "always predicting the most frequent label of {}"),
    ("all_right", MAJORITY_SET, "always predicting the most frequent set of labels of {}"),
    ("mean_squared_error", MEAN_LABEL_ERROR, "always predicting the mean label of {}"),
    ("exact", "never_answering", "never answering"),
)

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _normalised(text: str) -> str:
    """Normalise a text for SQuAD's comparison: lower case, no punctuation or articles, single blanks."""
    words = text.lower().translate(_PUNCTUATION)
    words = _ARTICLES.sub(" ", words)
    return " ".join(words.split())


class _AnswerScore(NamedTuple):
    exact: float
    f1: float


def _score_against(prediction: str, answer: str) -> _AnswerScore:
    """Score a normalised prediction by the words that it shares with a normalised answer.

    If either has no words, F1 equals exact match (rule of SQuAD 2; an empty prediction means: no answer).
    """
    predicted = prediction.split()
    wanted = answer.split()
    exact = float(predicted == wanted)
    if not predicted or not wanted:
        return _AnswerScore(exact, exact)
    common_words = collections.Counter(predicted) & collections.Counter(wanted)
    common = sum(common_words.values())
    if not common:
        return _AnswerScore(exact, 0.0)
    precision = common / len(predicted)
    recall = common / len(wanted)
    return _AnswerScore(exact, 2 * precision * recall / (precision + recall))


def _score_answer(prediction: str, answers: Sequence[str]) -> _AnswerScore:
    """Return the best exact match and F1 over the answers.

    Answers without words are ignored; if no others exist, only "" is correct.
    """
    wanted = [words for words in map(_normalised, answers) if words] or [""]
    predicted = _normalised(prediction)
    exact = f1 = 0.0
    for words in wanted:
        score = _score_against(predicted, words)
        exact = max(exact, score.exact)
        f1 = max(f1, score.f1)
    return _AnswerScore(exact, f1)


def score_answers(
    predictions: Mapping[str, str], answers: Mapping[str, Sequence[str]]
) -> Dict[str, float]:
    """Return percentages over all questions; if some have no answer, also over those with and without answers."""
    groups = {"": list(answers)}
    if not all(answers.values()):
        groups["has_answer_"] = [name for name, wanted in answers.items() if wanted]
        groups["no_answer_"] = [name for name, wanted in answers.items() if not wanted]

    result: Dict[str, float] = {}
    for prefix, names in groups.items():
        if not names:
            continue
        scores = [_score_answer(predictions[name], answers[name]) for name in names]
        result[prefix + "exact"] = 100.0 * float(np.mean([score.exact for score in scores]))
        result[prefix + "f1"] = 100.0 * float(np.mean([score.f1 for score in scores]))
        result[prefix + "questions"] = len(names)
    unanswerable = len(groups.get("no_answer_", ()))
    result["never_answering"] = 100.0 * unanswerable / max(1, len(answers))
    return result


class _Threshold(NamedTuple):
    score: float  # percent
    threshold: float  # of the odds of no answer; above it the question is not answered


def best_threshold(
    texts: Mapping[str, str],
    odds: Mapping[str, float],
    answers: Mapping[str, Sequence[str]],
    *,
    of: str = "f1",
) -> _Threshold:
    """Return the threshold with the best F1 or exact match (``of``), as in the script of SQuAD 2.

    ``texts`` has the best answer to each question, ``odds`` the score of no answer minus that of the text.
    """
    # Below all odds no question is answered, which is correct for questions without an answer.
    total = best = float(sum(not wanted for wanted in answers.values()))
    threshold = min(odds.values()) - 1.0
    ordered = sorted(odds, key=lambda name: odds[name])
    for name, next_name in zip(ordered, [*ordered[1:], None]):
        score = _score_answer(texts[name], answers[name])
        total += getattr(score, of)
        total -= float(not answers[name])
        is_last_of_equals = next_name is None or odds[next_name] != odds[name]
        if total > best and is_last_of_equals:
            best = total
            threshold = odds[name]
    return _Threshold(100.0 * best / len(answers), threshold)


def verdict_of(metrics: Mapping[str, Any], labels_of: str) -> str:
    """Compare a score with that of a constant answer in a sentence; "" without such a pair of metrics.

    ``labels_of`` names the file whose labels determine the constant answer.
    """
    for name, baseline, form in _BASELINES:
        if baseline not in metrics:
            continue
        words = form.format(labels_of)
        score, constant = metrics[name], metrics[baseline]
        if baseline == MEAN_LABEL_ERROR:
            relation = "better" if score < constant else "no better"
            return f"error {with_unit(score, '')}: {relation} than {words}, whose error is {with_unit(constant, '')}"
        relation = "better" if score > constant else "no better"
        return (
            f"{with_unit(score, 'percent')} correct: {relation} than {words}, which is correct in "
            f"{with_unit(constant, 'percent')}"
        )
    return ""


def _f1_of(common: int, predicted: int, wanted: int) -> float:
    """Return the harmonic mean of precision, common / predicted, and recall, common / wanted."""
    total = predicted + wanted
    return 2.0 * common / total if total else 0.0


def micro_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Return F1 over all decisions, bool of any shape: of one class [n], or of all texts and labels [n, C]."""
    common = int((predictions & labels).sum())
    return _f1_of(common, int(predictions.sum()), int(labels.sum()))


def macro_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean F1 of the classes, bool [n, C]."""
    return float(np.mean(list(map(micro_f1, predictions.T, labels.T))))


def matthews(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Return Matthews' correlation coefficient of classes [n] in [-1, 1]; Gorodkin's for more than two classes.

    It is 0 if either side has one class only.
    """
    classes = np.union1d(predictions, labels)
    predicted = (predictions[:, None] == classes).sum(axis=0, dtype=np.int64)
    wanted = (labels[:, None] == classes).sum(axis=0, dtype=np.int64)
    size = len(labels)
    correct = int((predictions == labels).sum())
    # Products of two of these exceed 64 bits; Python's integers do not overflow.
    covariance = correct * size - int(predicted @ wanted)
    predicted_variance = size**2 - int(predicted @ predicted)
    wanted_variance = size**2 - int(wanted @ wanted)
    product = predicted_variance * wanted_variance
    return covariance / math.sqrt(product) if product else 0.0


_Span = Tuple[int, int, str]  # first word, one after the last, kind


def _spans(labels: Sequence[Optional[str]]) -> Set[_Span]:
    """Return the spans that labels such as B-X I-X O mark, by the default rules of seqeval and conlleval.

    I- or E- continues the span of a preceding B- or I- of its kind; any other mark begins a span; E- and S- end one. A
    word without a label counts as O.
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
        first = number
        mark = next_mark
        kind = next_kind
    return marked


MARKS = ("B-", "I-", "E-", "S-")


def span_scores(
    predictions: Sequence[Sequence[Optional[str]]], labels: Sequence[Sequence[Optional[str]]]
) -> Dict[str, float]:
    """Return precision, recall and F1 of spans over all sentences, in percent; a span counts as a whole."""
    predicted = wanted = common = 0
    for prediction, labelled in zip(predictions, labels):
        predicted_spans = _spans(prediction)
        wanted_spans = _spans(labelled)
        predicted += len(predicted_spans)
        wanted += len(wanted_spans)
        common += len(predicted_spans & wanted_spans)
    return {
        "precision": 100.0 * common / max(1, predicted),
        "recall": 100.0 * common / max(1, wanted),
        "f1": 100.0 * _f1_of(common, predicted, wanted),
    }


def pearson(first: np.ndarray, second: np.ndarray) -> Optional[float]:
    """Return the linear correlation in [-1, 1]; None if one side is constant."""
    return _correlation("pearsonr", first, second)


def spearman(first: np.ndarray, second: np.ndarray) -> Optional[float]:
    """Return the rank correlation (equal values share their mean rank); None if one side is constant."""
    return _correlation("spearmanr", first, second)


def _correlation(name: str, first: np.ndarray, second: np.ndarray) -> Optional[float]:
    from scipy import stats  # takes long to import

    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(getattr(stats, name)(first, second)[0])
