"""The data and scores of fine-tuning: windows, answers, tables, metrics; worked out by hand, or by brute
force.
"""

import gzip
import json
import lzma
from unittest import mock

import numpy as np
import pytest
from scipy import stats

from ipu_packed_bert.settings.config import ConfigError
from ipu_packed_bert.settings.loading import config_from_tree
from ipu_packed_bert.tasks import files
from ipu_packed_bert.tasks import questions as module
from ipu_packed_bert.tasks import scores as metrics
from ipu_packed_bert.tasks.classification import ClassificationTask
from ipu_packed_bert.tasks.examples import Asked, _in_order
from ipu_packed_bert.tasks.files import ExampleSource, located
from ipu_packed_bert.tasks.inputs import Tokenizer
from ipu_packed_bert.tasks.questions import QuestionsTask, gold
from pack_data.text.vocabulary import Vocabulary
from tests.fine_tuning_files import MODEL, VOCABULARY, WORDS, tiny_squad, tiny_table
from tests.refusals import refused


def table(path, kind, *, training=None, slots=32, **settings):
    """The task on a table, which it learns from, unless another is given, and is scored on."""
    data = {"training": str(training or path), "evaluation": str(path), "max_sequence_length": slots, "packer": "none"}
    config = config_from_tree({"task": {"name": kind, **settings}, "data": data}, "tiny")
    return ClassificationTask(config, Tokenizer(VOCABULARY), MODEL)


def test_normalised_as_squad_does():
    assert metrics._normalised("The  Normans, (a) people!") == "normans people"
    assert metrics._normalised("An anthem") == "anthem"  # "an" is a word here, not the beginning of one
    assert metrics._normalised("it's") == "its"  # punctuation goes without leaving a blank
    assert metrics._normalised("the. a? ") == ""


@pytest.mark.parametrize(
    "prediction, answer, exact, f1",
    [
        ("The Normans", "normans.", 1.0, 1.0),
        ("in France", "France", 0.0, 2 / 3),  # precision 1/2, recall 1
        ("10th century", "10th and 11th centuries", 0.0, 1 / 3),  # one of 2 and of 4 words: P 1/2, R 1/4
        ("b b c", "b c c", 0.0, 2 / 3),  # words count as often as both have them: b, c of 3 and 3
        ("Paris", "London", 0.0, 0.0),
        ("", "", 1.0, 1.0),
        ("", "Paris", 0.0, 0.0),
        ("the", "", 1.0, 1.0),
    ],
)
def test_exact_match_and_f1(prediction, answer, exact, f1):
    assert metrics.score_answer(prediction, [answer]) == (exact, pytest.approx(f1))


def test_the_best_of_the_answers_counts_and_no_answer_is_an_answer():
    # q1: the second answer is hit.  q2: half.  q3 has no answer and gets none: right.  q4 has none and gets one: wrong.
    answers = {"q1": ["Lyon", "in Paris"], "q2": ["red"], "q3": [], "q4": []}
    found = metrics.score_answers({"q1": "in Paris!", "q2": "red car", "q3": "", "q4": "blue"}, answers)
    assert (found["exact"], found["questions"]) == (50.0, 4)
    assert found["f1"] == pytest.approx(100 * (1 + 2 / 3 + 1 + 0) / 4)
    assert (found["has_answer_exact"], found["has_answer_questions"]) == (50.0, 2)
    assert found["has_answer_f1"] == pytest.approx(100 * (1 + 2 / 3) / 2)
    assert found["no_answer_exact"] == found["no_answer_f1"] == 50.0
    # Version 1.1: no such groups.
    assert set(metrics.score_answers({"q1": "x"}, {"q1": ["x"]})) == {"exact", "f1", "questions", "never_answering"}
    # An answer of articles alone counts for nothing: "" is then right.
    assert metrics.score_answer("", ["the"]) == (1.0, 1.0)


def test_best_threshold_by_hand():
    # In the order of their odds: a right answer, a wrong one, one to a question without any, half of a right one.
    answers = {"a": ["red"], "b": ["red"], "c": [], "d": ["red"]}
    texts = {"a": "red", "b": "blue", "c": "blue", "d": "red car x"}
    odds = {"d": 3.0, "a": -2.0, "b": -1.0, "c": 1.0}
    # Nothing answered: 1 of 4.  Up to a: 2.  Up to b: 2.  Up to c: 1.  All: 1.5.
    assert metrics.best_threshold(texts, odds, answers) == (50.0, -2.0)
    # Exactly right: nothing answered 1, up to a 2, up to b 2, up to c 1, all 1.
    assert metrics.best_threshold(texts, odds, answers, of="exact") == (50.0, -2.0)
    # Half right answers count for F1 alone.
    assert metrics.best_threshold({"d": "red car x"}, {"d": 3.0}, {"d": ["red"]}) == (50.0, 3.0)
    assert metrics.best_threshold({"d": "red car x"}, {"d": 3.0}, {"d": ["red"]}, of="exact") == (0.0, 2.0)
    # What it promises is what the threshold gives, for random questions with equal odds among them.
    rng = np.random.default_rng(3)
    for _ in range(30):
        names = [str(each) for each in range(12)]
        answers = {name: ["red car"] if rng.random() < 0.6 else [] for name in names}
        texts = {name: str(rng.choice(["red car", "red", "blue"])) for name in names}
        odds = {name: float(rng.integers(-3, 4)) for name in names}
        found = metrics.best_threshold(texts, odds, answers)
        given = {
            limit: metrics.score_answers({name: "" if odds[name] > limit else texts[name] for name in names}, answers)[
                "f1"
            ]
            for limit in [found.threshold, *np.arange(-5, 5)]
        }
        assert given[found.threshold] == pytest.approx(found.score) == pytest.approx(max(given.values()))


def test_classification_metrics():
    found = np.array([[1, 1, 0], [0, 0, 1]], bool)
    wanted = np.array([[1, 0, 0], [0, 1, 1]], bool)
    assert metrics.micro_f1(found, wanted) == pytest.approx(2 * 2 / (3 + 3))
    assert metrics.micro_f1(found & False, wanted & False) == 0.0
    # By class: 2 * 1 / (1 + 1); nothing found or wanted of the second but each once, apart: 0; 2 * 1 / (1 + 1).
    assert metrics.macro_f1(found, wanted) == pytest.approx((1 + 0 + 1) / 3)
    rng = np.random.default_rng(0)
    first = rng.integers(0, 6, 40).astype(float)  # with ties
    second = first + rng.normal(size=40).round()
    assert metrics.pearson(first, second) == pytest.approx(stats.pearsonr(first, second)[0])
    assert metrics.spearman(first, second) == pytest.approx(stats.spearmanr(first, second)[0])
    assert metrics.spearman(first, np.exp(first)) == pytest.approx(1.0)
    assert metrics.pearson(first, np.zeros(40)) is None


def test_glues_metrics_by_hand(tmp_path):
    """Worked out; equal to scikit-learn 1.9.1 on 400 random tables, to 1e-15, when they were written."""
    (tmp_path / "t.csv").write_text("text,label\n" + "".join(f"river,{label}\n" for label in (1, 1, 1, 0, 0, 1)))
    outputs = np.eye(2)[[1, 1, 0, 0, 1, 1]]  # of class 1: three right, one missed, one too many
    # F1 of class 1: 2 * 3 / (4 + 4); of class 0: 2 * 1 / (2 + 2).  Matthews: (3 * 1 - 1 * 1) / sqrt(4 * 4 * 2 * 2).
    found = table(tmp_path / "t.csv", "single_label").score(outputs).metrics
    share = 100 * 4 / 6  # of the label 1
    wanted = {
        "accuracy": share,
        "majority_accuracy": share,
        "f1": 75.0,
        "macro_f1": 62.5,
        "matthews": 2 / 8,
        "texts": 6,
    }
    assert found == pytest.approx(wanted) and list(found) == list(wanted)
    assert "66.67 % correct: no better than" in metrics.verdict_of(found, "a.csv")
    assert "better than" in metrics.verdict_of({**found, "accuracy": 70.0}, "a.csv") and not metrics.verdict_of(
        {}, "a.csv"
    )
    # The mean label of 0, 0, 3 is 1, with errors 1, 1, 4; of the three sets of labels, {a} occurs twice.
    (tmp_path / "t.csv").write_text("text,label\nriver,0\nriver,0\nriver,3\n")
    found = table(tmp_path / "t.csv", "regression").score(np.array([[0.0], [1.0], [3.0]])).metrics
    assert found["mean_label_squared_error"] == pytest.approx(2) and found["mean_squared_error"] == pytest.approx(1 / 3)
    assert (
        "error 0.3333: better than always predicting the mean label of a.csv, whose error is 2"
        in metrics.verdict_of(found, "a.csv")
    )
    assert "no better" in metrics.verdict_of({**found, "mean_squared_error": 2.0}, "a.csv")
    (tmp_path / "t.csv").write_text("text,label\nriver,a\nriver,a|b\nriver,a\nriver,b\n")
    found = table(tmp_path / "t.csv", "multi_label").score(np.array([[1.0, 1.0]] * 4)).metrics
    assert (found["all_right"], found["majority_all_right"]) == (25.0, 50.0)
    assert "25.00 % correct: no better than" in metrics.verdict_of(found, "a.csv")
    answers = metrics.score_answers({"p": "", "q": "stone"}, {"p": [], "q": ["stone"]})
    assert answers["never_answering"] == 50.0 and "100.00 % correct: better" in metrics.verdict_of(answers, "a.csv")
    # Three classes: 3 of 5 right, products 1*1 + 3*2 + 1*2, squares 1 + 9 + 1 and 1 + 4 + 4.
    three = metrics.matthews(np.array([0, 1, 1, 1, 2]), np.array([0, 1, 1, 2, 2]))
    assert three == pytest.approx((4 * 5 - 9) / ((25 - 11) * (25 - 9)) ** 0.5)
    assert metrics.matthews(np.array([1, 1, 1]), np.array([0, 1, 1])) == 0.0
    rng = np.random.default_rng(1)
    for _ in range(20):  # Of two classes it is Pearson's correlation.
        pair = rng.integers(0, 2, (2, 30))
        expected = metrics.pearson(*pair.astype(float))
        assert metrics.matthews(*pair) == pytest.approx(expected or 0.0)
    # F1 alone is of two labels.
    (tmp_path / "t.csv").write_text("text,label\nriver,a\nstone,b\ncastle,c\n")
    assert list(table(tmp_path / "t.csv", "single_label").scores) == [
        "accuracy",
        metrics.MAJORITY,
        "macro_f1",
        "matthews",
    ]


@pytest.mark.parametrize(
    "kind, training, name, score",
    [
        # The training file has 0 twice; the file that is scored, once in three.
        ("single_label", "001", "majority_accuracy", 100 / 3),
        # The set {0} is the most frequent one in training; two of three texts have {1}.
        ("multi_label", "001", "majority_all_right", 100 / 3),
        # The mean label in training is 1; the squared errors are 1, 0 and 0.
        ("regression", "012", "mean_label_squared_error", 1 / 3),
    ],
)
def test_the_constant_answer_is_that_of_the_training_labels(tmp_path, kind, training, name, score):
    """Constants of the scored labels made a baseline of 61.11 instead of 8.33 %."""
    for file, labels in (("a.csv", training), ("b.csv", "011")):
        (tmp_path / file).write_text("text,label\n" + "".join(f"river,{label}\n" for label in labels))
    task = table(tmp_path / "b.csv", kind, training=tmp_path / "a.csv")
    assert task.score(np.ones((3, 1 if kind == "regression" else 2))).metrics[name] == pytest.approx(score)
    asked = Asked(ExampleSource.of(str(tmp_path / "b.csv")), labels=True)
    predicted = ClassificationTask(task.config, Tokenizer(VOCABULARY), MODEL, task.labels, asked)
    own = predicted.score(np.ones((3, 1 if kind == "regression" else 2))).metrics[name]
    assert own == pytest.approx(2 / 9 if kind == "regression" else 200 / 3)


def read(path, slots=40, *, query=8, trains=False, **settings):
    """The task that answers all questions of a file, of which it reads so many tokens, or that trains on them."""
    settings = {"stride": 16, **settings}
    tree = {"task": settings, "data": {"training": str(path), "max_sequence_length": slots, "packer": "none"}}
    asked = None if trains else Asked(ExampleSource.of(path), labels=True)
    with mock.patch.object(module, "_MOST_OF_QUESTION", query):
        return QuestionsTask(config_from_tree(tree, "tiny"), Tokenizer(VOCABULARY), MODEL, asked=asked)


def asked(folder, paragraph, answer=None, slots=40, *, names=("q",), **settings):
    """The same of questions on one paragraph."""
    answers = [] if answer is None else [{"text": answer, "answer_start": paragraph.index(answer)}]
    entry = {"question": "where?", "answers": answers, "is_impossible": answer is None}
    paragraphs = [{"context": paragraph, "qas": [{**entry, "id": name} for name in names]}]
    (folder / "asked.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    return read(folder / "asked.json", slots, **settings)


def targets_of(task):
    return tuple(task.evaluation.slot_targets[f"{end}_positions"].tolist() for end in ("start", "end"))


def answer_of(task, logits):
    """The answer, the n best, and the odds of none."""
    files = task.score(logits).files
    return *(files[f"{name}predictions.json"]["q"] for name in ("", "nbest_")), files.get("null_odds.json", {}).get("q")


def test_windows_by_hand(tmp_path):
    paragraph = "river stone castle bridge market winter garden letter"
    # "where?" is w ##h ##e ##r ##e ?: 6 tokens, cut to 3; room for 14 - 3 - 3 = 8 tokens, all of the paragraph.
    found = asked(tmp_path, paragraph, "castle bridge", 14, query=3)
    assert found.windows.windows == [(0, 0, 8, 5)]
    tokens = [VOCABULARY.tokens[each] for each in found.evaluation.input_ids]
    assert tokens == ["[CLS]", "w", "##h", "##e", "[SEP]"] + paragraph.split() + ["[SEP]"]
    assert found.evaluation.segment_ids.tolist() == [0] * 5 + [1] * 9 and targets_of(found) == ([7], [8])
    # With room for 4 and a stride of 2: 0-3, 2-5, 4-7. An answer that is whole in a window has its place there, at its
    # first or last token too; half of an answer is none, and none is [CLS].
    for answer, starts, ends in (
        ("castle bridge", [7, 5, 0], [8, 6, 0]),
        ("bridge market winter", [0, 6, 0], [0, 8, 0]),
        ("river", [5, 0, 0], [5, 0, 0]),
        ("bridge", [8, 6, 0], [8, 6, 0]),
        ("market", [0, 7, 5], [0, 7, 5]),
        ("castle bridge market", [0, 5, 0], [0, 7, 0]),
        ("winter garden letter", [0, 0, 6], [0, 0, 8]),
        (None, [0, 0, 0], [0, 0, 0]),
    ):
        found = asked(tmp_path, paragraph, answer, 10, query=3, stride=2)
        assert [(window.first, window.tokens) for window in found.windows.windows] == [(0, 4), (2, 4), (4, 4)]
        assert targets_of(found) == (starts, ends), answer
    # A stride of more than half a window would cut answers: it is reduced.
    for text, slots, stride, windows in (
        (paragraph, 10, 100, [(0, 4), (2, 4), (4, 4)]),
        (paragraph + " seven music", 12, 3, [(0, 6), (3, 6), (6, 4)]),
        ("", 10, 2, [(0, 0)]),
    ):
        found = asked(tmp_path, text, None, slots, query=3, stride=stride).windows.windows
        assert [(window.first, window.tokens) for window in found] == windows


def test_answers_come_back_letter_by_letter(tmp_path):
    """Capitals, accents and part of a word: the text is that of the paragraph, from the first token's first character
    on.
    """
    task = asked(tmp_path, "The Rivér, (Stone)  CASTLE\u0301.", "Stone)  CASTLE\u0301")
    (start,), (end,) = targets_of(task)
    logits = np.zeros((len(task.evaluation.input_ids), 2))
    logits[start, 0] = logits[end, 1] = 9.0
    assert answer_of(task, [logits])[0] == "Stone)  CASTLE\u0301"


def brute_force(windows, logits, options):
    """BERT's procedure, pair by pair: the best score over all windows and spans, and its text."""
    best = (-np.inf, "")
    for number, window in enumerate(windows.windows):
        spans = windows.paragraphs[windows.questions[window.question].paragraph].spans
        for first in range(window.first, window.first + window.tokens):
            scores = []
            for other in windows.windows:
                if other.first <= first < other.first + other.tokens:
                    context = min(first - other.first, other.first + other.tokens - 1 - first)
                    scores.append(context + 0.01 * other.tokens)
                else:
                    scores.append(-1)
            if int(np.argmax(scores)) != number:
                continue
            for last in range(first, min(first + options.max_answer_length, window.first + window.tokens)):
                offset = window.offset - window.first
                score = logits[number][first + offset, 0] + logits[number][last + offset, 1]
                best = max(best, (score, windows.questions[0].paragraph[spans[first, 0] : spans[last, 1]]))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_the_best_span_is_the_best_of_all(seed, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_N_BEST", 5)
    rng = np.random.default_rng(seed)
    paragraph = " ".join(rng.choice(VOCABULARY.tokens[5:19], int(rng.integers(1, 40))))
    settings = {"stride": int(rng.integers(2, 9)), "max_answer_length": int(rng.integers(1, 12))}
    task = asked(tmp_path, paragraph, None, int(rng.integers(12, 30)), query=3, **settings)
    logits = [rng.normal(size=(length, 2)) for length in task.evaluation.lengths]
    answer, best, _ = answer_of(task, logits)
    score, text = brute_force(task.windows, logits, task.config.task)
    assert answer == text and best[0]["score"] == pytest.approx(score)
    assert len(best) <= 5 and sum(each["probability"] for each in best) == pytest.approx(1.0)
    assert len({each["text"] for each in best}) == len(best)


@pytest.mark.parametrize(
    "settings, answer",
    [({"null_answers": True}, ""), ({"null_answers": True, "null_score_threshold": 1.5}, "river"), ({}, "river")],
)
def test_no_answer_where_its_score_is_better(tmp_path, settings, answer):
    """By more than the threshold; and without null answers there is always one."""
    task = asked(tmp_path, "river stone castle", **settings)
    logits = np.zeros((len(task.evaluation.input_ids), 2))
    logits[task.windows.windows[0].offset, :] = 2.0, 1.0  # "river", 3.0
    logits[0, :] = 2.0, 2.0  # [CLS], 4.0
    found, best, odds = answer_of(task, [logits])
    assert found == answer
    if settings:
        assert odds == pytest.approx(1.0) and [each["text"] for each in best[:2]] == ["", "river"]


def test_no_answers_score_is_the_least_of_the_windows(tmp_path):
    """A window without the answer says that it has none; only if all say so there is none."""
    task = asked(tmp_path, " ".join(["river"] * 30), None, 20, query=3, stride=4, null_answers=True)
    assert len(task.windows.windows) > 2
    logits = [np.zeros((length, 2)) for length in task.evaluation.lengths]
    for each in logits:
        each[0] = 5.0, 5.0
    assert answer_of(task, logits)[2] == pytest.approx(10.0)
    logits[1][0] = -3.0, 1.0
    assert answer_of(task, logits)[2] == pytest.approx(-2.0)


def test_answers_are_in_the_order_of_the_questions(tmp_path):
    task = asked(tmp_path, "river stone", names=("z", "a", "m"), null_answers=True)
    found = task.score([np.zeros((length, 2)) for length in task.evaluation.lengths])
    assert [each["id"] for each in found.answers] == ["z", "a", "m"]
    assert all(list(found.files[f"{name}.json"]) == ["z", "a", "m"] for name in ("predictions", "null_odds"))
    json.dumps(found.files)


def test_squad_files_of_both_versions_and_packed(tmp_path):
    path = tiny_squad(tmp_path / "v2.json", questions=6, without_answer=2)
    questions = read(path).windows.questions
    assert [each.id for each in questions] == [f"q{number}" for number in range(6)]
    assert [bool(each.answers) for each in questions] == [True] * 4 + [False] * 2
    assert all(each.labelled for each in questions)
    (tmp_path / "v2.json.xz").write_bytes(lzma.compress(path.read_bytes()))
    (tmp_path / "v2.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert all(read(tmp_path / f"v2.json.{end}").windows.questions == questions for end in ("xz", "gz"))
    content = json.loads(path.read_text())
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for entry in paragraph["qas"]:
                del entry["is_impossible"]  # version 1.1, and files without labels
                entry.pop("answers") if entry["id"] == "q5" else None
    path.write_text(json.dumps(content))
    assert [each.labelled for each in read(path).windows.questions] == [True] * 4 + [False] * 2


def test_answers_without_a_place_are_left_out_and_counted(tmp_path):
    """CMRC2018's dev.json as published has answers with answer_start -1."""
    path = tiny_squad(tmp_path / "dev.json", questions=3)
    content = json.loads(path.read_text())
    entries = [
        entry for article in content["data"] for paragraph in article["paragraphs"] for entry in paragraph["qas"]
    ]
    entries[0]["answers"].append({"text": "elsewhere", "answer_start": -1})
    entries[1]["answers"] = [{"text": "elsewhere", "answer_start": -1}]
    path.write_text(json.dumps(content))
    task = read(path)
    assert [len(question.answers) for question in task.windows.questions] == [1, 0, 1]
    assert [question.labelled for question in task.windows.questions] == [True, False, True]
    assert "dev.json: 2 answers" in task.notes[0]


def broken(path, change):
    content = json.loads(tiny_squad(path, questions=2).read_text())
    change(content["data"][0]["paragraphs"][1]["qas"][0])
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    "change, names",
    [
        (lambda entry: entry["answers"][0].update(answer_start=1), ("q1", "character 1")),
        (lambda entry: entry.update(id="q0"), ("q0", "twice")),
        (lambda entry: entry.update(question="\ud800"), ("question", "text")),
        (lambda entry: entry.update(id=["q9"]), ("id", "text")),
        (lambda entry: entry.update(answers="a"), ("answers", "list")),
        (lambda entry: entry.update(answers={"text": ["a"], "answer_start": []}), ("answers.text", "answer_start", 0)),
        (lambda entry: entry["answers"][0].update(answer_start=1e300), ("answer_start", "whole number")),
        (lambda entry: entry["answers"][0].update(text="x" * 10_000), ("q1", "xxx")),
        (lambda entry: entry.update(is_impossible="no"), ("is_impossible", "'no'")),
        (lambda entry: entry.pop("question"), (r"qas\[0\].question",)),
    ],
)
def test_broken_squad_files_in_one_line(tmp_path, change, names):
    with refused("bad.json", *names) as caught:
        read(broken(tmp_path / "bad.json", change), trains=True)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "entry, settings, names",
    [
        ({"answers": [], "is_impossible": True}, {}, ("null_answers",)),
        ({}, {"null_answers": True}, ("1 of 1", "is_impossible")),
        (
            {"answers": [{"text": "river", "answer_start": 0}]},
            {"drop_seen_paragraphs": True},
            ("evaluation.json", "training.json"),
        ),
        ({"context": "a \u200b b", "answers": [{"text": "\u200b", "answer_start": 2}]}, {}, ("question q", "token")),
        (None, {}, ("training.json", "no question")),
    ],
    ids=["no answer", "no labels", "seen paragraphs", "answer without a token", "no question"],
)
def test_questions_that_cannot_be_learnt_from_are_refused(tmp_path, entry, settings, names):
    paragraph = {"context": "river stone", **(entry or {})}
    question = {"id": "q", "question": "where?", **(entry or {})}
    content = {"data": [{"paragraphs": [{**paragraph, "qas": [] if entry is None else [question]}]}]}
    for name in ("training", "evaluation"):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    files = {name: str(tmp_path / f"{name}.json") for name in ("training", "evaluation")}
    config = config_from_tree({"task": settings, "data": {**files, "max_sequence_length": 32}}, "tiny")
    with refused(*names):
        QuestionsTask(config, Tokenizer(VOCABULARY), MODEL)


def test_unreadable_files_in_one_line(tmp_path):
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text("[]")
    (tmp_path / "c.json.xz").write_bytes(lzma.compress(b"{}" * 500)[:40])
    for name, message in (("a.json", "not JSON"), ("b.json", "a SQuAD file has"), ("c.json.xz", "cut or damaged")):
        with pytest.raises(ValueError, match=message):
            read(tmp_path / name)
    with pytest.raises(ValueError, match="no such file"):
        located(config_from_tree({"data": {"training": "nothing.json"}}, "a.yml"), tmp_path)


@pytest.mark.parametrize(
    "name, text, kind, texts, labels",
    [
        ("a.csv", 'text,label\n"a ""b"", c\nd",x\nq,y\n', "single_label", ['a "b", c\nd', "q"], [0, 1]),
        ("a.tsv", 'label\ttext\nx\ta "b\ny\tq\n', "single_label", ['a "b', "q"], [0, 1]),
        (
            "a.jsonl",
            '{"text": "a", "label": ["x", "y"]}\n\n{"text": "b", "label": []}\n',
            "multi_label",
            ["a", "b"],
            [[1, 1], [0, 0]],
        ),
        ("a.csv", "text,label\na,x| y |x\nb,\n", "multi_label", ["a", "b"], [[1, 1], [0, 0]]),
    ],
)
def test_tables_of_every_kind(tmp_path, name, text, kind, texts, labels):
    (tmp_path / name).write_text(text)
    task = table(tmp_path / name, kind)
    assert task.texts(task.config) == texts and task.labels == ["x", "y"]
    assert task.training.targets["labels"].tolist() == labels


@pytest.mark.parametrize(
    "text, kind, names",
    [
        ("text,label\na\n", "single_label", ("line 2", "1 columns", "header has 2")),
        ("words,label\na,x\n", "single_label", ("line 2", "'text'", "words, label", "task.text_column")),
        ("text,label\na,\n", "single_label", ("label", "1,000 characters")),
        ('text,label\n"a\nb",x\nq,\n', "single_label", ("line 4", "label")),
        ('text,label\na,x\nb,"y\nc,x\n', "single_label", ("line 3", "quote")),
        ("text,label\na,much\n", "regression", ("'much'", "number")),
        ("text,label\n", "single_label", ("no text",)),
        ("text,label\na,1e300\n", "regression", ("label", "number")),
        ("text,label\na," + "x" * 70_000 + "\n", "single_label", ("label",)),
        ("x" * 70_000 + ",b\na,c\n", "single_label", ("'text'",)),
        ("text,label\na,x\nb,x\n", "single_label", ("1 different labels", "label", "two")),
    ],
)
def test_broken_tables_in_one_line(tmp_path, text, kind, names):
    (tmp_path / "t.csv").write_text(text)
    with refused("t.csv", *names) as caught:
        table(tmp_path / "t.csv", kind)
    assert len(str(caught.value)) < 600


def test_a_file_of_another_kind_or_size_is_refused(tmp_path, monkeypatch):
    (tmp_path / "t.xlsx").write_text("text,label\n")
    with refused("t.xlsx", ".csv, .tsv, .jsonl", ".parquet"):
        table(tmp_path / "t.xlsx", "single_label")
    monkeypatch.setattr(files, "_LONGEST_LINE", 12)
    (tmp_path / "t.csv").write_text("text,label\n" + "a" * 12 + ",x\n")
    with refused("t.csv line 2", 12):
        table(tmp_path / "t.csv", "single_label")
    monkeypatch.setattr(files, "_MOST_CHARACTERS", 20)
    with refused("q.json", 20):
        read(tiny_squad(tmp_path / "q.json"))


def test_labels_of_a_checkpoint_are_needed_without_a_training_file(tmp_path):
    path = tiny_table(tmp_path / "t.csv", "single_label", texts=4)
    tree = {"task": {"name": "single_label"}, "data": {"evaluation": str(path)}, "model": {"checkpoint": "weights"}}
    with refused("weights", "id2label"):
        ClassificationTask(config_from_tree(tree, "tiny"), Tokenizer(VOCABULARY), MODEL)


@pytest.mark.parametrize("label", ["null", "[0, 1, 0]", '["x", "x"]'])
def test_what_is_no_list_of_labels_is_refused(tmp_path, label):
    (tmp_path / "t.jsonl").write_text(f'{{"text": "a", "label": {label}}}\n')
    with refused("must be labels of at most 1,000 characters, each once"):
        table(tmp_path / "t.jsonl", "multi_label")


def test_labels_and_their_targets(tmp_path):
    assert sorted(["10", "x", "-1", "1", "2"], key=_in_order) == ["-1", "1", "2", "10", "x"]
    path = tiny_table(tmp_path / "t.csv", "multi_label", texts=30)
    task = table(path, "multi_label")
    assert task.labels == ["l0", "l1", "l2", "l3"]
    known = ["l3", "more", "l0", "l1", "l2"]  # of the checkpoint, whose head goes on
    again = ClassificationTask(task.config, Tokenizer(VOCABULARY), MODEL, known)
    assert again.labels == known and again.packs.digest != task.packs.digest
    for line, row in zip(path.read_text().splitlines()[1:], task.training.targets["labels"]):
        assert {task.labels[each] for each in np.flatnonzero(row)} == set(line.split(",")[1].split("|"))
    path.write_text("text,label\na,10\nb,9\n")
    assert table(path, "single_label").labels == ["9", "10"]
    (tmp_path / "other.csv").write_text("text,label\na,11\n")
    data = {"training": str(path), "evaluation": str(tmp_path / "other.csv")}
    tree = {"task": {"name": "single_label"}, "data": data}
    with pytest.raises(ValueError, match="other.csv line 2: label '11' is not one of the 2 of the training file"):
        ClassificationTask(config_from_tree(tree, "tiny"), Tokenizer(VOCABULARY), MODEL)


@pytest.mark.parametrize(
    "first, second, room, kept",
    [
        (10, 4, 8, (4, 4)),
        (10, 4, 20, (10, 4)),
        (4, 10, 8, (4, 4)),
        (10, 10, 7, (4, 3)),
        (2, 10, 7, (2, 5)),
        (10, 0, 6, (6,)),
    ],
)
def test_pairs_are_shortened_from_the_longer(tmp_path, first, second, room, kept):
    texts, pair = (" ".join(WORDS[:first]), " ".join(WORDS[:second])), bool(second)
    lines = [json.dumps({"text": texts[0], "other": texts[1], "label": label}) for label in "xy"]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    columns = {"second_text_column": "other"} if pair else {}
    inputs = table(tmp_path / "t.jsonl", "single_label", slots=room + 2 + pair, **columns).training
    own = [VOCABULARY.tokens[each] for each in inputs.input_ids[: inputs.lengths[0]]]
    words = [["[CLS]"], *([*WORDS[:number], "[SEP]"] for number in kept)]
    assert own == [word for part in words for word in part]


def test_predictions_of_every_kind(tmp_path):
    (tmp_path / "t.csv").write_text("text,label\nriver,0\nstone,1\n")
    logits = np.array([[2.0, 0.0], [-1.0, 3.0]])
    found = table(tmp_path / "t.csv", "single_label").score(logits).answers
    assert [each["prediction"] for each in found] == ["0", "1"]
    assert found[0]["probability"] == pytest.approx(1 / (1 + np.exp(-2)))
    found = table(tmp_path / "t.csv", "multi_label").score(logits + [0.0, 0.1]).answers
    assert [each["prediction"] for each in found] == [["0", "1"], ["1"]]
    found = table(tmp_path / "t.csv", "regression").score(logits[:, :1]).answers
    assert found == [{"prediction": 2.0}, {"prediction": -1.0}]


def test_every_problem_of_a_configuration_in_one_message():
    tree = {"data": {"training": "a.json", "packer": "nnlshp", "max_sequences_per_pack": 5}, "task": {"name": "squat"}}
    with pytest.raises(ConfigError) as raised:
        config_from_tree(tree, "mine.yml", ["model.hidden_size=65"])
    lines = str(raised.value).split("\n")
    assert len(lines) == 4 and lines[0] == "mine.yml: 3 problems"
    for line, words in zip(
        lines[1:], ("task.name is 'squat'; must be one of pretraining, squad", "max_sequences_per_pack", "65")
    ):
        assert words in line


@pytest.mark.parametrize(
    "name, own, others",
    [
        ("squad", "stride", "text_column"),
        ("regression", "text_column", "stride"),
        ("tokens", "words_column", "label_column"),
    ],
)
def test_the_section_task_holds_the_settings_of_its_task(name, own, others):
    config = config_from_tree({"task": {"name": name}, "data": {"training": "a.json"}}, "mine.yml")
    assert config.task.name == name and own in config.as_dict()["task"] and others not in config.as_dict()["task"]
    assert config_from_tree({"data": {"training": "a.json"}}, "mine.yml", [f"task.name={name}"]).task == config.task
    with pytest.raises(ConfigError, match=f"task.{others} is not a setting"):
        config_from_tree({"task": {"name": name, others: "x"}, "data": {"training": "a.json"}}, "mine.yml")


def test_a_configuration_of_the_other_kind_is_named_as_such():
    with pytest.raises(ConfigError, match="task.name .*pre-training.*run_pretraining.py"):
        config_from_tree({"task": {"name": "pretraining"}}, "mine.yml", command="finetune")
    with pytest.raises(ConfigError, match="task.name .*pre-training.*run_pretraining.py"):
        config_from_tree({"data": {"directory": "data/mine"}}, "mine.yml", command="finetune")  # without a task
    with pytest.raises(ConfigError, match="squad.* finetune"):
        config_from_tree({"task": {"name": "squad"}}, "mine.yml", command="pretrain")


@pytest.mark.parametrize(
    "name, answerable, windows", [("dev_half_v2.json.xz", 2910, 3050), ("xquad_en.json.xz", 1190, 1232)]
)
def test_as_many_windows_as_published(data_dir, name, answerable, windows):
    """The counts of the histograms squad_v2_dev_half_answerable_384 and xquad_en_384 beside the data, and their
    lengths.
    """
    text = lzma.decompress((data_dir / "vocab" / "bert-base-uncased-vocab.txt.xz").read_bytes()).decode()
    vocabulary = Vocabulary(tuple(text.rstrip("\n").split("\n")))
    data = {"evaluation": str(data_dir / "squad" / name), "packer": "none"}
    tree = {"task": {"max_answer_length": 60}, "data": data, "model": {"checkpoint": "none"}}
    task = QuestionsTask(config_from_tree(tree, "tiny"), Tokenizer(vocabulary), MODEL)
    assert len(task.windows.questions) == len(gold(task.windows.questions)) == answerable
    assert len(task.windows.windows) == windows
    # Nearly every answer, read out of its window with perfect logits, is the answer.
    logits = []
    for length, start, end in zip(task.evaluation.lengths, *targets_of(task)):
        values = np.zeros((int(length), 2))
        values[start, 0] = values[end, 1] = 9.0
        logits.append(values)
    scores = task.score(logits).metrics
    assert scores["exact"] > 97.0 and scores["f1"] > 99.0
