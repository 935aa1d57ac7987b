"""Scores of answers, classes and spans: worked out by hand, as their scripts compute them, and by their definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_packed_bert.tasks import scores
from ipu_packed_bert.tasks.scores import _score_answer, score_answers, span_scores

# Prediction, answer, exact match, F1.
ANSWERS = [
    ("The  Normans, (a) people!", "normans people.", 1.0, 1.0),
    ("An anthem", "anthem", 1.0, 1.0),  # "an" is a word here, not the beginning of one
    ("it's", "its", 1.0, 1.0),  # punctuation goes without leaving a blank
    ("in France", "France", 0.0, 2 / 3),  # precision 1/2, recall 1
    (
        "10th century",
        "10th and 11th centuries",
        0.0,
        1 / 3,
    ),  # one of 2 and of 4 words: P 1/2, R 1/4
    (
        "b b c",
        "b c c",
        0.0,
        2 / 3,
    ),  # words count as often as both have them: b, c of 3 and 3
    ("Paris", "London", 0.0, 0.0),
    ("", "", 1.0, 1.0),
    ("", "Paris", 0.0, 0.0),
    ("the", "", 1.0, 1.0),
    ("", "the", 1.0, 1.0),  # an answer of articles alone counts for nothing
]


def test_exact_match_and_f1():
    for prediction, answer, exact, f1 in ANSWERS:
        assert _score_answer(prediction, [answer]) == (exact, pytest.approx(f1)), prediction


def test_the_best_of_the_answers_counts_and_no_answer_is_an_answer():
    # q1: the second answer is hit.  q2: half.  q3 has no answer and gets none: right.  q4 has none and gets one: wrong.
    answers = {"q1": ["Lyon", "in Paris"], "q2": ["red"], "q3": [], "q4": []}
    values = score_answers({"q1": "in Paris!", "q2": "red car", "q3": "", "q4": "blue"}, answers)
    assert values == pytest.approx(
        {
            "exact": 50.0,
            "f1": 100 * (1 + 2 / 3 + 1 + 0) / 4,
            "questions": 4,
            "has_answer_exact": 50.0,
            "has_answer_f1": 100 * (1 + 2 / 3) / 2,
            "has_answer_questions": 2,
            "no_answer_exact": 50.0,
            "no_answer_f1": 50.0,
            "no_answer_questions": 2,
            "never_answering": 50.0,
        }
    )
    # Version 1.1: no such groups.
    names = {"exact", "f1", "questions", "never_answering"}
    assert set(score_answers({"q1": "river"}, {"q1": ["river"]})) == names


# For each question: whether it has the answer "red car", its best text, and the odds of no answer.
_QUESTIONS = st.lists(
    st.tuples(st.booleans(), st.sampled_from(["red car", "red", "blue"]), st.integers(-3, 3)),
    min_size=1,
    max_size=12,
)


@given(_QUESTIONS, st.sampled_from(["f1", "exact"]))
def test_no_threshold_scores_better_than_the_best_one(questions, measure):
    answers = {}
    texts = {}
    odds = {}
    for number, (is_answerable, text, odd) in enumerate(questions):
        name = f"q{number}"
        answers[name] = ["red car"] if is_answerable else []
        texts[name] = text
        odds[name] = float(odd)

    def score(threshold):
        predictions = {name: "" if odds[name] > threshold else text for name, text in texts.items()}
        return score_answers(predictions, answers)[measure]

    best = scores.best_threshold(texts, odds, answers, of=measure)
    assert score(best.threshold) == pytest.approx(best.score)
    assert best.score == pytest.approx(max(map(score, range(-5, 5))))


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=2, max_size=30))
def test_matthews_correlation_of_two_classes_is_pearsons(pairs):
    first, second = np.array(pairs).T
    expected = scores.pearson(first.astype(float), second.astype(float))
    assert scores.matthews(first, second) == pytest.approx(expected or 0.0)


def test_correlations_by_hand():
    # Three classes: 3 of 5 right, products 1*1 + 3*2 + 1*2, squares 1 + 9 + 1 and 1 + 4 + 4.
    predicted = np.array(list("01112"), int)
    wanted = np.array(list("01122"), int)
    variances = (25 - 11) * (25 - 9)
    assert scores.matthews(predicted, wanted) == pytest.approx((4 * 5 - 9) / variances**0.5)
    values = np.array(list("0155"), float)
    assert scores.spearman(values, np.exp(values)) == pytest.approx(1.0)  # the ranks alone count
    assert scores.pearson(values, 2 * values + 1) == pytest.approx(1.0)
    assert scores.pearson(values, np.zeros(4)) is None


# A metric, the same of the constant answer, the numbers that the sentence has, and whether the model is better.
VERDICTS = [
    ({"accuracy": 70.0, scores.MAJORITY: 66.67}, ("70.00 %", "66.67 %"), True),
    ({"accuracy": 66.67, scores.MAJORITY: 66.67}, ("66.67 %",), False),
    ({"all_right": 25.0, scores.MAJORITY_SET: 50.0}, ("25.00 %", "50.00 %"), False),
    ({"mean_squared_error": 1 / 3, scores.MEAN_LABEL_ERROR: 2.0}, ("0.3333", "2"), True),
    ({"mean_squared_error": 2.0, scores.MEAN_LABEL_ERROR: 2.0}, ("2",), False),
    ({"exact": 100.0, "never_answering": 50.0}, ("100.00 %", "50.00 %"), True),
]


def test_a_sentence_compares_a_score_with_that_of_the_constant_answer():
    for values, numbers, is_better in VERDICTS:
        sentence = scores.verdict_of(values, "a.csv")
        assert all(number in sentence for number in numbers), sentence
        assert ("no better" in sentence) != is_better and "better" in sentence, sentence
    assert scores.verdict_of({"f1": 1.0}, "a.csv") == ""


@st.composite
def _marked(draw):
    """Spans apart from each other, and the labels that mark them."""
    labels = []
    spans = set()
    with_ends = draw(st.booleans())  # E- ends a span, and S- is one
    for length, kind in draw(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["A", "B", "A-B"])), max_size=6)):
        if not length:
            labels.append("O")
            continue
        marks = ["B"] + ["I"] * (length - 1)
        if with_ends:
            marks[-1] = "E" if length > 1 else "S"
        spans.add((len(labels), len(labels) + length, kind))
        labels += [f"{mark}-{kind}" for mark in marks]
    return labels, spans


@given(_marked())
def test_the_spans_that_labels_mark_are_read_back(marked):
    labels, spans = marked
    assert scores._spans(labels) == spans
    if spans:
        assert span_scores([labels], [labels]) == {
            "precision": 100.0,
            "recall": 100.0,
            "f1": 100.0,
        }


def spans_in(labels):
    """Return the spans of labels as text; a label "-" is missing."""
    marked = [None if label == "-" else label for label in labels.split()]
    spans = sorted(scores._spans(marked))
    return ", ".join(f"{first}-{end} {kind}" for first, end, kind in spans)


def test_spans_by_hand():
    # I- begins a span where none of its kind goes on, and after E- or S-.
    assert spans_in("I-A I-A I-B") == "0-2 A, 2-3 B"
    assert spans_in("B-A I-A E-A I-A S-A I-A E-B") == "0-3 A, 3-4 A, 4-5 A, 5-6 A, 6-7 B"
    # A missing answer ends a span.
    assert spans_in("B-A - I-A") == "0-1 A, 2-3 A"


def of_spans(predicted, wanted):
    """Return precision, recall and F1 of sentences that are divided by a stroke."""
    sentences = [[line.split() for line in text.split("/")] for text in (predicted, wanted)]
    return tuple(span_scores(*sentences).values())


def test_span_scores_are_seqevals():
    """Its values for these labels (seqeval 1.2.2); equal on 400 random sets, to 1e-15, when they were written."""
    predicted = "O O B-MISC I-MISC I-MISC I-MISC O / B-PER I-PER O"
    wanted = "O O O B-MISC I-MISC I-MISC O / B-PER I-PER O"
    assert of_spans(predicted, wanted) == (50.0, 50.0, 50.0)
    # One of three predicted spans is one of the four wanted.
    values = of_spans("B-A O B-B B-A I-A", "B-A B-A B-B I-B B-A")
    assert values == pytest.approx((100 / 3, 25.0, 200 / 7))
    assert of_spans("O", "O") == of_spans("B-A", "O") == (0.0, 0.0, 0.0)


def classes(rows):
    """Return the classes of texts, a row of 0 and 1 for each, as bool [n, C]."""
    return np.array([list(map(int, row)) for row in rows.split()], bool)


def test_f1_of_classes_by_hand():
    predicted = classes("110 001")
    wanted = classes("100 011")
    assert scores.micro_f1(predicted, wanted) == pytest.approx(2 * 2 / (3 + 3))
    assert scores.micro_f1(predicted & False, wanted & False) == 0.0
    # By class: 2 * 1 / (1 + 1); nothing of the second in both, though each has it once: 0; 2 * 1 / (1 + 1).
    assert scores.macro_f1(predicted, wanted) == pytest.approx((1 + 0 + 1) / 3)
