"""Token classification: files to sentences, words to tokens, predictions to spans and scores; by hand."""

import json

import numpy as np
import pytest

from ipu_packed_bert.settings.loading import config_from_tree
from ipu_packed_bert.tasks.inputs import Tokenizer
from ipu_packed_bert.tasks.scores import _spans, span_scores
from ipu_packed_bert.tasks.tokens import TokensTask
from tests.fine_tuning_files import MODEL, VOCABULARY


def read(training, evaluation=None, slots=16):
    data = {"training": str(training), "evaluation": str(evaluation or training), "max_sequence_length": slots}
    config = config_from_tree({"task": {"name": "tokens"}, "data": {**data, "packer": "spfhp"}}, "tiny")
    return TokensTask(config, Tokenizer(VOCABULARY), MODEL)


def made(tmp_path, sentences, slots=16):
    lines = [json.dumps({"words": words, "labels": labels}) for words, labels in sentences]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    return read(tmp_path / "a.jsonl", slots=slots)


def test_both_forms_of_files(tmp_path):
    (tmp_path / "a.conll").write_text("-DOCSTART- -X- O\n\nriver NN B-LOC\nstone NN I-LOC\n\n\nmusic NN O\n")
    of_lines = read(tmp_path / "a.conll")
    of_json = made(tmp_path, [(["river", "stone"], ["B-LOC", "I-LOC"]), (["music"], ["O"])])
    for task in (of_lines, of_json):
        assert task.texts(task.config) == ["river stone", "music"] and task.labels == ["B-LOC", "I-LOC", "O"]
        assert task.training.slots["labels"].tolist() == [0, 1, 2, 0, 0, 3, 0]
    (tmp_path / "a.conll").write_text("10\u00a0000\tO\n", encoding="utf-8")  # a no-break space, as in French numbers
    task = read(tmp_path / "a.conll")
    assert task.texts(task.config) == ["10\u00a0000"]


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.txt", "\n\n", "has no sentences"),
        ("a.txt", "river\nstone\n", "has no labels; name their column"),
        ("a.txt", "river O\n\nstone\n", "line 3: some records have labels and some have none"),
        ("a.csv", "word,label\nriver,O\n", "a.csv: a CSV file"),
        ("a.jsonl", '{"words": "river", "labels": ["O"]}\n', "line 1: words is 'river'; must be a list of words"),
        ("a.jsonl", '{"words": ["river", "stone"], "labels": ["O"]}\n', "line 1: labels must be a list of 2 labels"),
    ],
)
def test_broken_files_in_one_line(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        read(tmp_path / name)
    assert "\n" not in str(raised.value) and name in str(raised.value)


def test_a_words_label_stands_at_its_first_token(tmp_path):
    # "ab" is two tokens, a and ##b; an empty word is none.
    task = made(tmp_path, [(["ab", "river", "", "stone"], ["X", "O", "X", "O"])])
    assert task.labels == ["O", "X"]
    tokens = [VOCABULARY.tokens[each] for each in task.training.input_ids]
    assert tokens == ["[CLS]", "a", "##b", "river", "stone", "[SEP]"]
    assert task.training.slots["labels"].tolist() == [0, 2, 0, 1, 1, 0]


def test_words_that_are_cut_off_have_no_answer_and_are_wrong(tmp_path):
    task = made(tmp_path, [(["river"] * 9, ["O"] * 8 + ["X"]), (["stone"], ["X"])], slots=8)
    assert task.training.lengths.tolist() == [8, 3] and "7 of 10 words (not 3 beyond 8 slots)" in task.notes[0]
    outputs = [np.tile([1.0, 0.0], (8, 1)), np.tile([0.0, 1.0], (3, 1))]
    found = task.score(outputs)
    assert found.files["predictions.json"][0]["labels"] == ["O"] * 6 + [None] * 3
    assert found.metrics == pytest.approx({"accuracy": 70.0, "majority_accuracy": 80.0, "words": 10})


def test_an_unknown_label_is_named(tmp_path):
    training, evaluation = tmp_path / "a.conll", tmp_path / "b.conll"
    training.write_text("river O\nstone X\n")
    evaluation.write_text("river Y\n")
    with pytest.raises(ValueError, match="b.conll line 1: label 'Y' is not one of the 2 of the training file"):
        read(training, evaluation)


def test_the_constant_answer_is_the_most_frequent_label_of_the_training_words(tmp_path):
    """The label of the scored words was the constant before."""
    training, evaluation = tmp_path / "a.conll", tmp_path / "b.conll"
    training.write_text("river O\nriver O\nstone X\n")
    evaluation.write_text("river O\nstone X\nstone X\nstone X\n")
    assert read(training, evaluation).score([np.ones((6, 2))]).metrics["majority_accuracy"] == 25.0


def test_spans_by_hand():
    expected = {(0, 2, "A"), (3, 4, "A"), (4, 5, "A"), (5, 7, "B")}
    assert _spans(["B-A", "I-A", "O", "B-A", "B-A", "I-B", "I-B"]) == expected
    assert _spans(["I-A", "I-A"]) == {(0, 2, "A")} and _spans([None, "O"]) == set()
    # E- ends a span and S- is one; after them I- begins another; a kind may have a hyphen.
    expected = {(0, 3, "A"), (3, 4, "A"), (4, 5, "A"), (5, 6, "A"), (6, 7, "B")}
    assert _spans(["B-A", "I-A", "E-A", "I-A", "S-A", "I-A", "E-B"]) == expected
    assert _spans(["B-A-B", "I-A-B", "I-A"]) == {(0, 2, "A-B"), (2, 3, "A")}
    # A missing answer ends a span.
    assert _spans(["B-A", None, "I-A"]) == {(0, 1, "A"), (2, 3, "A")}


def test_span_scores_are_seqevals():
    """Its values for these labels (seqeval 1.2.2); equal on 400 random sets, to 1e-15, when they were written."""
    wanted = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    found = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    assert span_scores(found, wanted) == {"precision": 50.0, "recall": 50.0, "f1": 50.0}
    # Two of three found, two of four wanted.
    found, wanted = [["B-A", "O", "B-B", "B-A"]], [["B-A", "B-A", "B-B", "I-B", "B-A"]]
    found[0].append("I-A")
    assert span_scores(found, wanted) == pytest.approx({"precision": 100 / 3, "recall": 25.0, "f1": 200 / 7})
    nothing = {"precision": 0.0, "recall": 0.0, "f1": 0.0}
    assert span_scores([["O"]], [["O"]]) == span_scores([["B-A"]], [["O"]]) == nothing


def test_scores_by_hand(tmp_path):
    # Words: 4 of 5 right.  Spans: found (0, 1, A) and (2, 3, A), wanted (0, 1, A) and (2, 4, A): one of both.
    task = made(tmp_path, [(["river", "stone", "river", "stone"], ["B-A", "O", "B-A", "I-A"]), (["music"], ["O"])])
    found = [["B-A", "O", "B-A", "O"], ["O"]]
    outputs = [np.eye(3)[[2, *map(task.labels.index, labels), 2]] for labels in found]  # and [CLS] and [SEP]
    own = {"accuracy": 80.0, "majority_accuracy": 40.0, "words": 5}
    assert task.score(outputs).metrics == {**own, "precision": 50.0, "recall": 50.0, "f1": 50.0}
    assert "f1" not in made(tmp_path, [(["river"], ["x"])]).score([np.ones((3, 1))]).metrics
