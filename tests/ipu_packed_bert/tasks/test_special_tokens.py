"""Examples of the tasks have the special tokens that the post-processor of a tokenizer.json adds."""

import pytest

from pack_data.text.vocabulary import TokenizerFile
from tests.fine_tuning_files import json_lines, tiny_task
from tests.pack_data.text.tokenizer_files import (
    A,
    B,
    roberta_processing,
    word_tokenizer,
)

SLOTS = 10
PARAGRAPH = "b b b b b b a b b"
QUESTION = {
    "question": "a",
    "context": PARAGRAPH,
    "answers": [{"text": "a", "answer_start": 12}],
}


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
    vocabulary = TokenizerFile(word_tokenizer(**options))
    single = before + after
    pair = before + between + after

    def read(kind, *records, **settings):
        file = json_lines(tmp_path / "train.jsonl", *records)
        return tiny_task(kind, file, slots=SLOTS, vocabulary=vocabulary, **settings).training

    long = {"text": "a " * 9, "second": "b " * 9, "label": "x"}
    short = {"text": "a", "second": "b", "label": "y"}
    texts = read("single_label", long, short, second_text_column="second")
    half = (SLOTS - len(pair)) // 2
    cut = before + [A] * half + between + [B] * half + after
    assert texts.input_ids.tolist() == [
        *cut,
        *before,
        A,
        *between,
        B,
        *after,
    ]

    words = read("tokens", {"words": ["a", "b"] * 5, "labels": ["X", "Y"] * 5})
    kept = SLOTS - len(single)
    assert words.input_ids.tolist() == before + ([A, B] * 5)[:kept] + after
    assert words.slots["labels"].tolist() == [0] * len(before) + ([1, 2] * 5)[:kept] + [0] * len(after)

    # The second window has the answer: it begins three tokens later.
    questions = read("squad", QUESTION, stride=3)
    start = before + [A] + between
    room = SLOTS - len(start) - len(after)
    first_windows = questions.input_ids.tolist()[: 2 * SLOTS]
    paragraph = [A if word == "a" else B for word in PARAGRAPH.split()]
    assert (
        first_windows
        == [
            *start,
            *paragraph[:room],
            *after,
            *start,
            *paragraph[3 : room + 3],
            *after,
        ][: 2 * SLOTS]
    )
    for end in ("start", "end"):
        places = questions.slot_targets[f"{end}_positions"].tolist()
        assert places[1] == len(start) + PARAGRAPH.split().index("a") - 3
