"""In = out + said for tasks: answers in windows, records in predictions, labels in sequences."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_packed_bert.settings.loading import config_from_tree
from ipu_packed_bert.tasks.inputs import Tokenizer
from ipu_packed_bert.tasks.questions import QuestionsTask
from tests.fine_tuning_files import MODEL, VOCABULARY, WORDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("conservation")


def questions(folder, entries, *, slots=32, asked=None, training=True, **settings):
    """The task of (paragraph, first word, one after the last word) of questions; one word is one token."""
    paragraphs = []
    for number, (words, first, end) in enumerate(entries):
        start = len(" ".join([*words[:first], ""]))
        answers = [{"text": " ".join(words[first:end]), "answer_start": start}]
        entry = {"id": str(number), "question": "river stone", "answers": answers}
        paragraphs.append({"context": " ".join(words), "qas": [entry]})
    (folder / "q.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    files = dict.fromkeys(["training", "evaluation"][not training :], str(folder / "q.json"))
    data = {**files, "max_sequence_length": slots, "packer": "none"}
    tree = {"task": settings, "data": data, "model": {} if training else {"checkpoint": "none"}}
    return QuestionsTask(config_from_tree(tree, "tiny"), Tokenizer(VOCABULARY), MODEL, asked=asked)


@st.composite
def _spans(draw):
    entries = []
    for _ in range(draw(st.integers(1, 4))):
        words = draw(st.integers(1, 60))
        first = draw(st.integers(0, words - 1))
        end = draw(st.integers(first + 1, words))
        entries.append((np.resize(WORDS, words).tolist(), first, end))
    return entries


@given(_spans(), st.integers(8, 40), st.integers(1, 200), st.integers(1, 40))
def test_an_answer_that_fits_is_whole_in_a_window_and_no_other_is_trained(folder, entries, slots, stride, longest):
    settings = {"slots": slots, "stride": stride, "max_answer_length": longest}
    room = slots - 5  # [CLS] river stone [SEP] ... [SEP]
    lengths = [end - first for _, first, end in entries]
    wanted = {number for number, length in enumerate(lengths) if length <= room}
    if not wanted:
        with pytest.raises(ValueError, match="longer than a window.*max_sequence_length"):
            questions(folder, entries, **settings)
        return
    task = questions(folder, entries, **settings)
    # The sequences of the training file; the windows kept are those to evaluate.
    assert int((task.training.slot_targets["start_positions"] > 0).sum()) >= len(wanted)
    left_out = len(entries) - len(wanted)
    note = next(note for note in task.notes if note.startswith("training"))
    assert (f"{left_out} answer" in note) == bool(left_out)
    # The windows to evaluate hold every answer that may be predicted, and do not depend on the answers.
    held = {
        window.question
        for window, start in zip(task.windows.windows, task.evaluation.slot_targets["start_positions"])
        if start
    }
    assert held >= {number for number in wanted if lengths[number] <= min(longest, room // 2)}
    moved = [(words, 0, 1) for words, _, _ in entries]
    assert questions(folder, moved, **settings).windows.windows == task.windows.windows
