"""From files to sequences and from logits to answers: worked out by hand, or by brute force."""

import json
import lzma
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_packed_bert.tasks import questions as module
from ipu_packed_bert.tasks.classification import _shortened
from ipu_packed_bert.tasks.examples import _in_order
from ipu_packed_bert.tasks.questions import _gold
from pack_data.text.vocabulary import Vocabulary
from tests.fine_tuning_files import VOCABULARY, json_lines, tiny_squad, tiny_table, tiny_task


def table(path, kind, *, training=None, **options):
    """The task on a table, which it learns from, unless another is given, and is scored on."""
    return tiny_task(kind, training or path, path, **options)


def labelled(path, labels):
    """Write a table of one text with each of the labels, which blanks divide."""
    path.write_text("text,label\n" + "".join(f"river,{label}\n" for label in labels.split()))
    return path


# Labels, logits of the classes of each text, scores.
SCORES = [
    (
        # F1 of class 1: 2 * 3 / (4 + 4); of class 0: 2 * 1 / (2 + 2).  Matthews: (3 * 1 - 1 * 1) / sqrt(4 * 4 * 2 * 2).
        "single_label",
        "1 1 1 0 0 1",
        "01 01 10 10 01 01",
        {
            "accuracy": 400 / 6,
            "majority_accuracy": 400 / 6,
            "f1": 75,
            "macro_f1": 62.5,
            "matthews": 2 / 8,
            "texts": 6,
        },
    ),
    (
        # One of three right; F1 of the classes: 2 * 1 / (1 + 3), 0, 0.
        "single_label",
        "a b c",
        "100 100 100",
        {
            "accuracy": 100 / 3,
            "majority_accuracy": 100 / 3,
            "macro_f1": 50 / 3,
            "matthews": 0,
            "texts": 3,
        },
    ),
    (
        # Of three sets of labels {a} occurs twice; five of eight predicted labels are right; F1 6 / 7 and 4 / 6.
        "multi_label",
        "a a|b a b",
        "11 11 11 11",
        {
            "micro_f1": 1000 / 13,
            "macro_f1": 50 * (6 / 7 + 4 / 6),
            "all_right": 25,
            "majority_all_right": 50,
            "texts": 4,
        },
    ),
    (
        # The mean label is 1, with errors 1, 1, 4; the predictions have one error, 1.
        "regression",
        "0 0 3",
        "0 1 3",
        {
            "pearson": 15 / (18 * 14) ** 0.5,
            "spearman": 0.75**0.5,
            "mean_squared_error": 1 / 3,
            "mean_label_squared_error": 2,
            "texts": 3,
        },
    ),
]


def test_scores_of_tables_by_hand(tmp_path):
    """Equal to scikit-learn 1.9.1 on 400 random tables, to 1e-15, when they were written."""
    for kind, labels, logits, scores in SCORES:
        task = table(labelled(tmp_path / "t.csv", labels), kind)
        outputs = np.array([list(map(float, row)) for row in logits.split()])
        if kind == "multi_label":
            outputs = 2 * outputs - 1
        metrics = task.score(outputs).metrics
        assert metrics == pytest.approx(scores), kind
        assert list(metrics) == [*task.scores, "texts"] == list(scores)


# The labels of the training file, the score of their constant answer to "0 1 1", and that of these labels' own.
CONSTANTS = [
    ("single_label", "0 0 1", "majority_accuracy", 100 / 3, 200 / 3),
    ("multi_label", "0 0 1", "majority_all_right", 100 / 3, 200 / 3),
    # The mean label in training is 1: squared errors 1, 0, 0; that of the file is 2/3: 4/9, 1/9, 1/9.
    ("regression", "0 1 2", "mean_label_squared_error", 1 / 3, 2 / 9),
]


def test_the_constant_answer_is_that_of_the_training_labels(tmp_path):
    """Constants of the scored labels made a baseline of 61.11 instead of 8.33 %."""
    evaluation = labelled(tmp_path / "b.csv", "0 1 1")
    for kind, labels, name, trained, of_file in CONSTANTS:
        task = table(evaluation, kind, training=labelled(tmp_path / "a.csv", labels))
        outputs = np.ones((3, 1 if kind == "regression" else 2))
        assert task.score(outputs).metrics[name] == pytest.approx(trained)
        predicted = tiny_task(kind, asked=evaluation, labels=task.labels)
        assert predicted.score(outputs).metrics[name] == pytest.approx(of_file)


def read(path, slots=40, *, query=8, **settings):
    """The task that answers all questions of a file, of each of which it reads so many tokens."""
    with mock.patch.object(module, "_MOST_OF_QUESTION", query):
        return tiny_task("squad", asked=path, slots=slots, **{"stride": 16, **settings})


def asked(folder, paragraph, answer=None, slots=40, **settings):
    """The same of a question on a paragraph."""
    answers = [] if answer is None else [{"text": answer, "answer_start": paragraph.index(answer)}]
    entry = {"id": "q", "question": "where?", "context": paragraph, "answers": answers}
    file = json_lines(folder / "asked.jsonl", {**entry, "is_impossible": answer is None})
    return read(file, slots, query=3, **settings)


def targets_of(task):
    slots = task.evaluation.slot_targets
    return slots["start_positions"].tolist(), slots["end_positions"].tolist()


PARAGRAPH = "river stone castle bridge market winter garden letter"


def test_windows_by_hand(tmp_path):
    # "where?" is w ##h ##e ##r ##e ?: 6 tokens, cut to 3; room for 14 - 3 - 3 = 8 tokens, all of the paragraph.
    task = asked(tmp_path, PARAGRAPH, "castle bridge", 14)
    assert task.windows.windows == [(0, 0, 8, 5)]
    tokens = [VOCABULARY.tokens[number] for number in task.evaluation.input_ids]
    assert " ".join(tokens) == f"[CLS] w ##h ##e [SEP] {PARAGRAPH} [SEP]"
    assert task.evaluation.segment_ids.tolist() == [0] * 5 + [1] * 9
    assert targets_of(task) == ([7], [8])


# With room for 4 and a stride of 2 the windows are 0-3, 2-5, 4-7. An answer that is whole in a window has its place
# there, at its first or last token too; half of an answer is none, and none is [CLS].
TARGETS = [
    ("castle bridge", [7, 5, 0], [8, 6, 0]),
    ("bridge market winter", [0, 6, 0], [0, 8, 0]),
    ("river", [5, 0, 0], [5, 0, 0]),
    ("bridge", [8, 6, 0], [8, 6, 0]),
    ("winter garden letter", [0, 0, 6], [0, 0, 8]),
    (None, [0, 0, 0], [0, 0, 0]),
]
# Paragraph, slots, stride, and the first token and number of tokens of each window.
WINDOWS = [
    (
        PARAGRAPH,
        10,
        100,
        [(0, 4), (2, 4), (4, 4)],
    ),  # a stride of more than half a window would cut answers
    (PARAGRAPH + " seven music", 12, 3, [(0, 6), (3, 6), (6, 4)]),
    ("", 10, 2, [(0, 0)]),
]


def test_answers_in_windows_by_hand(tmp_path):
    for answer, starts, ends in TARGETS:
        task = asked(tmp_path, PARAGRAPH, answer, 10, stride=2)
        assert targets_of(task) == (starts, ends), answer
    for text, slots, stride, windows in WINDOWS:
        task = asked(tmp_path, text, None, slots, stride=stride)
        assert [(window.first, window.tokens) for window in task.windows.windows] == windows


def brute_force(windows, logits, options):
    """BERT's procedure, pair by pair: the best score over all windows and spans, and its text."""
    best = (-np.inf, "")
    question = windows.questions[0]
    spans = windows.paragraphs[question.paragraph].spans
    for number, window in enumerate(windows.windows):
        offset = window.offset - window.first
        for first in range(window.first, window.first + window.tokens):
            scores = []
            for other in windows.windows:
                right = other.first + other.tokens - 1 - first
                context = min(first - other.first, right)
                scores.append(context + 0.01 * other.tokens if context >= 0 else -1)
            if int(np.argmax(scores)) != number:
                continue
            for last in range(first, min(first + options.max_answer_length, window.first + window.tokens)):
                score = logits[number][first + offset, 0] + logits[number][last + offset, 1]
                best = max(best, (score, question.paragraph[spans[first, 0] : spans[last, 1]]))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_the_best_span_is_the_best_of_all(seed, tmp_path, monkeypatch):
    """No answer scores as its least window does, and is given if its score is better by more than the threshold."""
    monkeypatch.setattr(module, "_N_BEST", 5)
    rng = np.random.default_rng(seed)
    paragraph = " ".join(rng.choice(VOCABULARY.tokens[5:19], int(rng.integers(1, 40))))
    settings = {
        "stride": int(rng.integers(2, 9)),
        "max_answer_length": int(rng.integers(1, 12)),
    }
    if seed % 3:
        settings.update(null_answers=True, null_score_threshold=float(rng.normal()))
    task = asked(tmp_path, paragraph, None, int(rng.integers(12, 30)), **settings)
    logits = [rng.normal(size=(length, 2)) for length in task.evaluation.lengths]
    for values in logits:
        values[0] += rng.normal(size=2)
    answers = task.score(logits).files
    best = answers["nbest_predictions.json"]["q"]
    score, text = brute_force(task.windows, logits, task.config.task)
    answer = text
    if seed % 3:
        null = min(values[0].sum() for values in logits)
        assert answers["null_odds.json"]["q"] == pytest.approx(null - score)
        answer = "" if null - score > settings["null_score_threshold"] else text
        (of_null,) = [candidate for candidate in best if not candidate["text"]]
        assert of_null["score"] == pytest.approx(null)
        best.remove(of_null)
    assert answers["predictions.json"]["q"] == answer
    assert best[0]["text"] == text
    assert best[0]["score"] == pytest.approx(score)
    texts = [candidate["text"] for candidate in best]
    assert len(set(texts)) == len(texts) <= 5


def entries_of(content):
    """The questions of a SQuAD file."""
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            yield from paragraph["qas"]


def test_squad_files_of_both_versions_and_packed(tmp_path):
    path = tiny_squad(tmp_path / "v2.json", questions=6, without_answer=2)
    questions = read(path).windows.questions
    assert [question.id for question in questions] == [f"q{number}" for number in range(6)]
    assert [bool(question.answers) for question in questions] == [True] * 4 + [False] * 2
    assert all(question.labelled for question in questions)
    (tmp_path / "v2.json.xz").write_bytes(lzma.compress(path.read_bytes()))
    assert read(tmp_path / "v2.json.xz").windows.questions == questions
    # Version 1.1 does not state that there is no answer.
    content = json.loads(path.read_text())
    for entry in entries_of(content):
        del entry["is_impossible"]
    path.write_text(json.dumps(content))
    assert [question.labelled for question in read(path).windows.questions] == [True] * 4 + [False] * 2


def test_answers_without_a_place_are_left_out_and_counted(tmp_path):
    """CMRC2018's dev.json as published has answers with answer_start -1."""
    path = tiny_squad(tmp_path / "dev.json", questions=3)
    content = json.loads(path.read_text())
    first, second, _ = entries_of(content)
    elsewhere = {"text": "elsewhere", "answer_start": -1}
    first["answers"].append(elsewhere)
    second["answers"] = [elsewhere]
    path.write_text(json.dumps(content))
    task = read(path)
    assert [len(question.answers) for question in task.windows.questions] == [1, 0, 1]
    assert [question.labelled for question in task.windows.questions] == [True, False, True]
    assert "dev.json: 2 answers" in task.notes[0]


# File, its text, kind, texts and targets; the labels are x and y.
TABLES = [
    (
        "a.csv",
        'text,label\n"a ""b"", c\nd",x\nq,y\n',
        "single_label",
        ['a "b", c\nd', "q"],
        [0, 1],
    ),
    ("a.tsv", 'label\ttext\nx\ta "b\ny\tq\n', "single_label", ['a "b', "q"], [0, 1]),
    (
        "a.jsonl",
        '{"text": "a", "label": ["x", "y"]}\n\n{"text": "b", "label": []}\n',
        "multi_label",
        ["a", "b"],
        [[1, 1], [0, 0]],
    ),
    ("a.csv", "text,label\na,x| y |x\nb,\n", "multi_label", ["a", "b"], [[1, 1], [0, 0]]),
]


def test_tables_of_every_kind(tmp_path):
    for name, text, kind, texts, targets in TABLES:
        (tmp_path / name).write_text(text)
        task = table(tmp_path / name, kind)
        assert task.texts(task.config) == texts
        assert task.labels == ["x", "y"]
        assert task.training.targets["labels"].tolist() == targets


def test_labels_and_their_targets(tmp_path):
    assert sorted(["10", "x", "-1", "1", "2"], key=_in_order) == ["-1", "1", "2", "10", "x"]
    path = tiny_table(tmp_path / "t.csv", "multi_label", texts=30)
    task = table(path, "multi_label")
    assert task.labels == ["l0", "l1", "l2", "l3"]
    for line, row in zip(path.read_text().splitlines()[1:], task.training.targets["labels"]):
        names = {task.labels[number] for number in np.flatnonzero(row)}
        assert names == set(line.split(",")[1].split("|"))
    known = ["l3", "more", "l0", "l1", "l2"]  # of the checkpoint, whose head goes on
    again = table(path, "multi_label", labels=known)
    assert again.labels == known
    assert again.packs.digest != task.packs.digest
    assert table(path, "multi_label", labels=known[1:]).labels == task.labels


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 30))
def test_pairs_are_shortened_from_the_longer(first, second, room):
    """Nothing is cut that fits; a text that is cut is as long as the other, or one token longer or shorter."""
    parts = [np.arange(first), np.arange(second)]
    kept = _shortened(parts, room)
    lengths = list(map(len, kept))
    assert sum(lengths) == min(room, first + second)
    assert all(np.array_equal(part[: len(rest)], rest) for part, rest in zip(parts, kept))
    if lengths[0] < first:
        assert lengths[0] >= lengths[1]
    if lengths[1] < second:
        assert lengths[1] >= lengths[0] - 1
    assert len(_shortened(parts[:1], room)[0]) == min(room, first)


def test_predictions_of_every_kind(tmp_path):
    path = labelled(tmp_path / "t.csv", "0 1")
    logits = np.array([[2.0, 0.0], [-1.0, 3.0]])
    answers = table(path, "single_label").score(logits).answers
    assert [answer["prediction"] for answer in answers] == ["0", "1"]
    assert answers[0]["probability"] == pytest.approx(1 / (1 + np.exp(-2)))
    answers = table(path, "multi_label").score(logits + [0.0, 0.1]).answers
    assert [answer["prediction"] for answer in answers] == [["0", "1"], ["1"]]
    answers = table(path, "regression").score(logits[:, :1]).answers
    assert answers == [{"prediction": 2.0}, {"prediction": -1.0}]


@pytest.mark.parametrize(
    "name, answerable, windows",
    [("dev_half_v2.json.xz", 2910, 3050), ("xquad_en.json.xz", 1190, 1232)],
)
def test_as_many_windows_as_published(data_dir, name, answerable, windows):
    """The histograms squad_v2_dev_half_answerable_384 and xquad_en_384 beside the data have the same counts."""
    text = lzma.decompress((data_dir / "vocab" / "bert-base-uncased-vocab.txt.xz").read_bytes()).decode()
    vocabulary = Vocabulary(tuple(text.rstrip("\n").split("\n")))
    file = data_dir / "squad" / name
    task = tiny_task("squad", evaluation=file, slots=384, vocabulary=vocabulary, max_answer_length=60)
    assert len(task.windows.questions) == len(_gold(task.windows.questions)) == answerable
    assert len(task.windows.windows) == windows
    # Nearly every answer, read out of its window with perfect logits, is the answer.
    logits = []
    for length, start, end in zip(task.evaluation.lengths, *targets_of(task)):
        values = np.zeros((int(length), 2))
        values[start, 0] = values[end, 1] = 9.0
        logits.append(values)
    scores = task.score(logits).metrics
    assert scores["exact"] > 97.0
    assert scores["f1"] > 99.0
