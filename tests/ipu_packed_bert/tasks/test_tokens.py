"""Token classification: files to sentences, words to tokens, logits to labels and scores; by hand."""

import numpy as np
import pytest

from tests.fine_tuning_files import VOCABULARY, json_lines, tiny_task


def read(training, evaluation=None, slots=16):
    return tiny_task("tokens", training, evaluation or training, slots=slots)


def task_of(folder, *sentences, slots=16):
    """The task on sentences of "word label" pairs, which commas divide; an empty word is an underscore."""
    records = []
    for sentence in sentences:
        pairs = [pair.split() for pair in sentence.split(",")]
        words = ["" if word == "_" else word for word, _ in pairs]
        records.append({"words": words, "labels": [label for _, label in pairs]})
    return read(json_lines(folder / "a.jsonl", *records), slots=slots)


def test_both_forms_of_files(tmp_path):
    path = tmp_path / "a.conll"
    path.write_text("-DOCSTART- -X- O\n\nriver NN B-LOC\nstone NN I-LOC\n\n\nmusic NN O\n")
    for task in (
        read(path),
        task_of(tmp_path, "river B-LOC,stone I-LOC", "music O"),
    ):
        assert task.texts(task.config) == ["river stone", "music"]
        assert task.labels == ["B-LOC", "I-LOC", "O"]
        assert task.training.slots["labels"].tolist() == [
            0,
            1,
            2,
            0,
            0,
            3,
            0,
        ]
    path.write_text("10\u00a0000\tO\n", encoding="utf-8")  # a no-break space, as in French numbers
    task = read(path)
    assert task.texts(task.config) == ["10\u00a0000"]


def test_a_words_label_stands_at_its_first_token(tmp_path):
    # "ab" is two tokens, a and ##b; an empty word is none.
    task = task_of(tmp_path, "ab X,river O,_ X,stone O")
    assert task.labels == ["O", "X"]
    tokens = [VOCABULARY.tokens[number] for number in task.training.input_ids]
    assert tokens == ["[CLS]", "a", "##b", "river", "stone", "[SEP]"]
    assert task.training.slots["labels"].tolist() == [0, 2, 0, 1, 1, 0]


def test_words_that_are_cut_off_have_no_answer_and_are_wrong(tmp_path):
    task = task_of(
        tmp_path,
        ",".join(["river O"] * 8 + ["river X"]),
        "stone X",
        slots=8,
    )
    assert task.training.lengths.tolist() == [8, 3]
    assert "7 of 10 words (not 3 beyond 8 slots)" in task.notes[0]
    outputs = [np.tile([1.0, 0.0], (8, 1)), np.tile([0.0, 1.0], (3, 1))]
    scored = task.score(outputs)
    assert scored.files["predictions.json"][0]["labels"] == ["O"] * 6 + [None] * 3
    assert scored.metrics == pytest.approx({"accuracy": 70.0, "majority_accuracy": 80.0, "words": 10})


def test_the_constant_answer_is_the_most_frequent_label_of_the_training_words(
    tmp_path,
):
    """The label of the scored words was the constant before."""
    training = tmp_path / "a.conll"
    evaluation = tmp_path / "b.conll"
    training.write_text("river O\nriver O\nstone X\n")
    evaluation.write_text("river O\nstone X\nstone X\nstone X\n")
    assert read(training, evaluation).score([np.ones((6, 2))]).metrics["majority_accuracy"] == 25.0


def test_scores_by_hand(tmp_path):
    # Words: 4 of 5 right.  Spans: predicted (0, 1, A) and (2, 3, A), wanted (0, 1, A) and (2, 4, A): one of both.
    task = task_of(tmp_path, "river B-A,stone O,river B-A,stone I-A", "music O")
    outputs = []
    for labels in ("O B-A O B-A O O", "O O O"):  # with [CLS] and [SEP]
        outputs.append(np.eye(3)[list(map(task.labels.index, labels.split()))])
    of_words = {"accuracy": 80.0, "majority_accuracy": 40.0, "words": 5}
    assert task.score(outputs).metrics == {
        **of_words,
        "precision": 50.0,
        "recall": 50.0,
        "f1": 50.0,
    }
    assert "f1" not in task_of(tmp_path, "river x").score([np.ones((3, 1))]).metrics
