import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data.text.corpus import Document, cut_document
from pack_data.text.examples import DRAWS, ExampleOptions, _inner_ends, masked_count, tokenise
from pack_data.text.vocabulary import train_vocabulary
from tests.pack_data.text_corpus import document, examples_of

DOCUMENTS = [Document(str(number), document(random.Random(number)).split("\n")) for number in range(120)]
VOCABULARY = train_vocabulary(DOCUMENTS, 150)
OPTIONS = ExampleOptions(128, 20, duplication_factor=4, seed=1)
EXAMPLES = examples_of(DOCUMENTS, VOCABULARY, OPTIONS)


def restored(example):
    """The example as it was before masking."""
    ids = list(example.input_ids)
    for position, label in zip(example.masked_lm_positions, example.masked_lm_ids):
        ids[position] = label
    return ids


def test_every_example_is_cls_a_sep_b_sep():
    cls, sep = VOCABULARY.ids["[CLS]"], VOCABULARY.ids["[SEP]"]
    examples = EXAMPLES.to_examples()
    assert len(examples) > 400
    for example in examples:
        ids = restored(example)
        assert (
            5 <= len(ids) <= 128 and ids[0] == cls and ids[-1] == sep and ids[example.first_segment_length - 1] == sep
        )
        assert [i for i, token in enumerate(ids) if token in (cls, sep)] == [
            0,
            example.first_segment_length - 1,
            len(ids) - 1,
        ]
        assert 3 <= example.first_segment_length <= len(ids) - 2


def test_as_many_masked_tokens_as_the_reference_asks_and_none_of_them_special():
    for example in EXAMPLES.to_examples():
        positions = example.masked_lm_positions
        assert len(positions) == min(20, max(1, round(0.15 * len(example.input_ids))))
        assert positions == sorted(set(positions))
        assert not {0, example.first_segment_length - 1, len(example.input_ids) - 1} & set(positions)


def test_shares_of_masking_and_of_random_segments():
    mask = VOCABULARY.ids["[MASK]"]
    inputs = [example.input_ids[p] for example in EXAMPLES.to_examples() for p in example.masked_lm_positions]
    labels = EXAMPLES.predictions["masked_lm_ids"].tolist()
    n = len(inputs)
    masked = sum(token == mask for token in inputs) / n
    kept = sum(token == label for token, label in zip(inputs, labels)) / n
    # Four standard deviations of a share of about 0.8 and 0.1 in n draws (a random token may equal the label or
    # [MASK]).
    assert (
        n > 5000
        and abs(masked - 0.8) < 4 * (0.16 / n) ** 0.5 + 0.002
        and abs(kept - 0.1) < 4 * (0.09 / n) ** 0.5 + 0.002
    )
    assert 0.45 < EXAMPLES.scalars["next_sentence_labels"].mean() < 0.7


def test_label_0_means_the_text_goes_on_and_1_that_it_does_not():
    """With label 0, A + B is a run of the document; with 1, B is a run of another document."""
    text = " ".join(map(str, tokenise(DOCUMENTS, VOCABULARY, OPTIONS).ids.tolist())) + " "
    real = random_ones = 0
    for example in EXAMPLES.to_examples():
        ids = restored(example)
        a = ids[1 : example.first_segment_length - 1]
        b = ids[example.first_segment_length : -1]
        for part in (a, b):
            assert " ".join(map(str, part)) + " " in text
        found = " ".join(map(str, a + b)) + " " in text
        assert found or example.next_sentence_label
        real += not example.next_sentence_label
        random_ones += not found
    assert real > 200 and random_ones > 200


def test_the_same_seed_gives_the_same_examples_and_passes_differ():
    again = examples_of(DOCUMENTS, VOCABULARY, OPTIONS)
    assert np.array_equal(again.tokens["input_ids"], EXAMPLES.tokens["input_ids"])
    other = examples_of(DOCUMENTS, VOCABULARY, ExampleOptions(128, 20, duplication_factor=4, seed=2))
    assert other.tokens["input_ids"].tolist() != EXAMPLES.tokens["input_ids"].tolist()
    part = examples_of(DOCUMENTS, VOCABULARY, OPTIONS, part=1)
    assert part.tokens["input_ids"].tolist() != EXAMPLES.tokens["input_ids"].tolist()
    one = examples_of(DOCUMENTS, VOCABULARY, ExampleOptions(128, 20, duplication_factor=1, seed=1)).to_examples()
    four = EXAMPLES.to_examples()
    assert four[: len(one)] == one and four[len(one) : 2 * len(one)] != one


@pytest.mark.parametrize("draw_documents", DRAWS)
def test_documents_are_drawn_by_their_tokens_or_all_alike(draw_documents):
    """20 documents of 6 tokens beside two of 900: how often each is drawn, given the document of A."""
    lines = dict(zip("abcdefghijklmnopqrst", [2] * 20), u=300, v=300)
    documents = [Document(letter, [f"{letter} {letter} {letter}"] * count) for letter, count in lines.items()]
    vocabulary = train_vocabulary(documents, 150)
    options = ExampleOptions(32, 5, duplication_factor=20, seed=1, draw_documents=draw_documents)
    weights = lines if draw_documents == "tokens" else dict.fromkeys(lines, 1)
    drawn = dict.fromkeys(lines, 0)
    expected = dict.fromkeys(lines, 0.0)
    for example in examples_of(documents, vocabulary, options).to_examples():
        if example.next_sentence_label:
            ids = restored(example)
            own = vocabulary.tokens[ids[1]]
            drawn[vocabulary.tokens[ids[example.first_segment_length]]] += 1
            for other in lines.keys() - {own}:
                expected[other] += weights[other] / (sum(weights.values()) - weights[own])
    assert sum(drawn.values()) > 1000
    for letter, count in expected.items():
        assert abs(drawn[letter] - count) < 4 * count**0.5
    of_short = sum(drawn[letter] for letter in lines if lines[letter] == 2) / sum(drawn.values())
    assert of_short > 0.9 if draw_documents == "uniform" else of_short < 0.2


SCRIPTS = {
    "Latin": ("word", "other", "."),
    "Hindi": ("\u0936\u092c\u0926", "\u092a\u0920", "\u0964"),
    "Urdu": ("\u0644\u0641\u0638", "\u062d\u0631\u0641", "\u06d4"),
    "Greek": ("\u03bb\u03b5\u03be\u03b7", "\u03bd\u03b1\u03b9", ";"),
    "Chinese": ("\u5b57", "\u6587", "\u3002"),
    "Thai": ("\u0e04\u0e33" * 20, "\u0e04", ""),
}
SEPARATORS = (" ", "\n", "\u2028", "\u2029", "\x85", "\f")
OF_ALL_SCRIPTS = train_vocabulary([Document("", ["".join(SCRIPTS["Thai"]), *map(" ".join, SCRIPTS.values())])], 200)


@st.composite
def texts(draw):
    """A text of one script: any number of words, with few stops or none, in one line or many."""
    word, other, stop = SCRIPTS[draw(st.sampled_from(sorted(SCRIPTS)))]
    separator = draw(st.sampled_from(SEPARATORS))
    words = draw(st.lists(st.sampled_from([word, other]), min_size=1, max_size=draw(st.sampled_from([5, 300]))))
    words_of_sentence = draw(st.sampled_from([1, 7, 1000]))
    for place in range(0, len(words), words_of_sentence):
        words[place] += stop
    return separator.join(words)


@given(st.lists(texts(), min_size=1, max_size=4), st.integers(5, 64), st.integers(1, 3), st.integers(0, 9))
def test_every_pass_uses_every_token_once(found, length, passes, seed):
    """Text without punctuation, of other scripts, in one line, one word a line: the A and the real B are the text."""
    parts = [part for number, text in enumerate(found) for part in cut_document(str(number), [text])]
    options = ExampleOptions(length, 20, duplication_factor=passes, seed=seed)
    as_one_line = [" ".join(text.split()) for text in found]
    ids = OF_ALL_SCRIPTS.encode(as_one_line)[0].tolist()
    used = []
    for example in examples_of(parts, OF_ALL_SCRIPTS, options).to_examples():
        assert len(example.input_ids) <= length
        tokens = restored(example)
        used += tokens[1 : example.first_segment_length - 1]
        if not example.next_sentence_label:
            used += tokens[example.first_segment_length : -1]
    assert used == ids * passes


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(1, 20))
def test_pieces_of_a_long_sentence_end_between_words(sizes, length):
    class Encoding:
        word_ids = np.repeat(np.arange(len(sizes)), sizes).tolist()

    ends = [0, *_inner_ends(Encoding, length).tolist(), sum(sizes)]
    assert all(0 < end - begin < 2 * length or length == end - begin == 1 for begin, end in zip(ends, ends[1:]))
    if max(sizes) <= length // 2:
        assert set(ends) <= {0, *np.cumsum(sizes).tolist()}


def test_no_example_of_a_long_line_is_shorter_than_those_of_sentences():
    """Twenty documents of 3,000 words in one line: half of the second segments are random, and rows are full."""
    rng = random.Random(5)
    found = [Document("", [" ".join(rng.choice(["word", "other"]) for _ in range(3000))]) for _ in range(20)]
    examples = examples_of(found, OF_ALL_SCRIPTS, OPTIONS)
    assert 0.45 < examples.scalars["next_sentence_labels"].mean() < 0.6
    assert np.mean(examples.lengths == 128) > 0.75


def test_short_and_long_documents_keep_their_proportions():
    """A token of a short document is in the examples about as often as one of a long document (it was 9 times that)."""
    rng = random.Random(5)
    short = [Document("", ["word " * 15]) for _ in range(50)]
    long = [Document("", ["other " * rng.randint(5, 15) for _ in range(400)]) for _ in range(10)]
    vocabulary = train_vocabulary(short + long, 100)
    ids = [
        token for example in examples_of(short + long, vocabulary, OPTIONS).to_examples() for token in restored(example)
    ]
    text = " ".join(line for found in short + long for line in found.lines).split()
    of_short, of_long = (ids.count(vocabulary.ids[word]) / text.count(word) for word in ("word", "other"))
    assert 0.6 < of_short / of_long < 1.2


def test_the_number_of_masked_tokens():
    # Half a token rounds to even, as Python's round does in the reference.
    assert masked_count(np.array([3, 5, 10, 30, 512]), 76, 0.15).tolist() == [1, 1, round(1.5), round(4.5), 76]


def test_a_random_segment_fills_its_example_or_ends_with_its_document():
    options = ExampleOptions(128, 20, duplication_factor=1, short_sequence_probability=0.0, seed=2)
    tokens = tokenise(DOCUMENTS, VOCABULARY, options)
    ends = [([0] + tokens.sentence_ends)[end] for end in tokens.document_ends]
    texts = [tokens.ids[begin:end].tolist() for begin, end in zip([0] + ends, ends)]
    short = full = 0
    for example in examples_of(DOCUMENTS, VOCABULARY, options).to_examples():
        if example.next_sentence_label:
            segment = restored(example)[example.first_segment_length : -1]
            if len(example.input_ids) == 128:
                full += 1
            else:
                short += 1
                assert any(text[-len(segment) :] == segment for text in texts)
    assert min(short, full) > 10


@pytest.mark.parametrize("texts", [[], ["", " "], ["Word."], ["Word.", "Other."]])
def test_hardly_any_text(texts):
    examples = examples_of(
        [Document("", [text]) for text in texts if text.strip()], VOCABULARY, ExampleOptions(16, 3, 1)
    )
    assert len(examples) == sum(bool(text.strip()) for text in texts)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(max_sequence_length=4),
        dict(max_predictions_per_sequence=0),
        dict(duplication_factor=0),
        dict(masked_lm_probability=1.5),
        dict(short_sequence_probability=-0.1),
    ],
)
def test_options_that_cannot_be(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ExampleOptions(**{**dict(max_sequence_length=128, max_predictions_per_sequence=20), **wrong})
