"""Examples of the tasks have the special tokens that the post-processor of a tokenizer.json adds."""

import json

import pytest

from ipu_packed_bert.settings.loading import config_from_tree
from ipu_packed_bert.tasks.classification import ClassificationTask
from ipu_packed_bert.tasks.inputs import Tokenizer
from ipu_packed_bert.tasks.questions import QuestionsTask
from ipu_packed_bert.tasks.tokens import TokensTask
from pack_data.text.vocabulary import TokenizerFile
from tests.fine_tuning_files import MODEL
from tests.pack_data.text.tokenizer_files import A, B, roberta_processing, word_tokenizer

SLOTS = 10
PARAGRAPH = "b b b b b b a b b"
ANSWERS = [{"text": "a", "answer_start": 12}]
QUESTION = {"id": "q", "question": "a", "answers": ANSWERS, "is_impossible": False}
SQUAD = {"data": [{"paragraphs": [{"context": PARAGRAPH, "qas": [QUESTION]}]}]}


@pytest.mark.parametrize(
    "options, before, between, after",
    [
        (
            {"post_processor": roberta_processing()},
            [0],
            [2, 2],
            [2],
        ),  # <s> a </s> </s> b </s>
        ({"single": "$A [SEP]"}, [], [7], [7]),
    ],
)
def test_texts_words_and_questions(tmp_path, options, before, between, after):
    """Texts are cut to what fits beside the special tokens; labels and answers stand behind those before them."""
    tokenizer = Tokenizer(TokenizerFile(word_tokenizer(**options)))
    single, pair = before + after, before + between + after

    def task(kind, file, content, **settings):
        (tmp_path / file).write_text(content)
        data = {key: str(tmp_path / file) for key in ("training", "evaluation")}
        tree = {
            "task": settings,
            "data": {**data, "max_sequence_length": SLOTS, "packer": "spfhp"},
        }
        return kind(config_from_tree(tree, "tiny"), tokenizer, MODEL).training

    table = f"text,second,label\n{'a ' * 9},{'b ' * 9},x\na,b,y\n"
    texts = task(
        ClassificationTask,
        "pairs.csv",
        table,
        name="single_label",
        second_text_column="second",
    )
    half = (SLOTS - len(pair)) // 2
    cut = before + [A] * half + between + [B] * half + after
    assert texts.input_ids.tolist() == [*cut, *before, A, *between, B, *after]

    sentence = json.dumps({"words": ["a", "b"] * 5, "labels": ["X", "Y"] * 5})
    words = task(TokensTask, "words.jsonl", sentence, name="tokens")
    kept = SLOTS - len(single)
    assert words.input_ids.tolist() == before + ([A, B] * 5)[:kept] + after
    assert words.slots["labels"].tolist() == [0] * len(before) + ([1, 2] * 5)[:kept] + [0] * len(after)

    # The second window has the answer: it begins three tokens later.
    questions = task(QuestionsTask, "squad.json", json.dumps(SQUAD), name="squad", stride=3)
    start = before + [A] + between
    room = SLOTS - len(start) - len(after)
    first_windows = questions.input_ids.tolist()[: 2 * SLOTS]
    paragraph = [A if word == "a" else B for word in PARAGRAPH.split()]
    assert first_windows == [*start, *paragraph[:room], *after, *start, *paragraph[3 : room + 3], *after][: 2 * SLOTS]
    for end in ("start", "end"):
        places = questions.slot_targets[f"{end}_positions"].tolist()
        assert places[1] == len(start) + PARAGRAPH.split().index("a") - 3
