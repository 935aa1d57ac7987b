"""Examples of pre-training from documents: laws of segments, masks and random draws, over every script."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data.text import DRAWS
from pack_data.text.corpus import Document, cut_document
from pack_data.text.examples import ExampleOptions, _inner_ends, masked_count, tokenise
from pack_data.text.vocabulary import train_vocabulary
from tests.pack_data.text_corpus import document, examples_of

DRAW = random.Random(0)
DOCUMENTS = [Document("", document(DRAW).split("\n")) for _ in range(120)]
VOCABULARY = train_vocabulary(DOCUMENTS, 150)
OPTIONS = ExampleOptions(128, 20, duplication_factor=4, seed=1)
SEQUENCES = examples_of(DOCUMENTS, VOCABULARY, OPTIONS)
EXAMPLES = SEQUENCES.to_examples()
CLS = VOCABULARY.ids["[CLS]"]
SEP = VOCABULARY.ids["[SEP]"]
MASK = VOCABULARY.ids["[MASK]"]


def restored(example):
    """Return the ids of an example as they were before masking."""
    ids = list(example.input_ids)
    for position, label in zip(example.masked_lm_positions, example.masked_lm_ids):
        ids[position] = label
    return ids


def segments(example):
    """Return the ids of A and of B before masking."""
    ids = restored(example)
    begin = example.first_segment_length
    return ids[1 : begin - 1], ids[begin:-1]


def test_every_example_is_cls_a_sep_b_sep_with_as_many_masks_as_the_reference():
    assert len(EXAMPLES) > 400
    for example in EXAMPLES:
        a, b = segments(example)
        ids = restored(example)
        assert a
        assert b
        assert len(ids) <= 128
        assert ids == [CLS, *a, SEP, *b, SEP]
        assert not {CLS, SEP}.intersection(a + b)
        positions = example.masked_lm_positions
        wanted = max(1, round(0.15 * len(ids)))
        assert len(positions) == min(20, wanted)
        assert positions == sorted(set(positions))
        assert not {CLS, SEP}.intersection(example.masked_lm_ids)


def test_shares_of_masking_and_of_random_segments():
    """Within four standard deviations of a share in n draws; a random token may equal the label or [MASK]."""
    fates = []
    for example in EXAMPLES:
        for position, label in zip(example.masked_lm_positions, example.masked_lm_ids):
            token = example.input_ids[position]
            fates.append((token == MASK, token == label))
    assert len(fates) > 5000
    for share, expected in zip(np.mean(fates, axis=0), (0.8, 0.1)):
        variance = expected * (1 - expected) / len(fates)
        assert abs(share - expected) < 4 * variance**0.5 + 0.002
    labels = SEQUENCES.scalars["next_sentence_labels"]
    assert 0.45 < labels.mean() < 0.7


def test_label_0_means_the_text_goes_on_and_1_that_it_does_not():
    """With label 0, A + B is a run of the document; with 1, B is a run of another document."""

    def written(ids):
        return " ".join(map(str, ids)) + " "

    tokens = tokenise(DOCUMENTS, VOCABULARY, OPTIONS)
    text = written(tokens.ids.tolist())
    goes_on = []
    for example in EXAMPLES:
        a, b = segments(example)
        assert written(a) in text
        assert written(b) in text
        goes_on.append(written(a + b) in text)
        assert goes_on[-1] or example.next_sentence_label
    assert 200 < sum(goes_on) < len(goes_on) - 200


def test_the_same_seed_gives_the_same_examples_and_passes_differ():
    assert examples_of(DOCUMENTS, VOCABULARY, OPTIONS).to_examples() == EXAMPLES
    assert examples_of(DOCUMENTS, VOCABULARY, OPTIONS, part=1).to_examples() != EXAMPLES
    other = ExampleOptions(128, 20, duplication_factor=4, seed=2)
    assert examples_of(DOCUMENTS, VOCABULARY, other).to_examples() != EXAMPLES
    once = ExampleOptions(128, 20, duplication_factor=1, seed=1)
    first_pass = examples_of(DOCUMENTS, VOCABULARY, once).to_examples()
    count = len(first_pass)
    assert EXAMPLES[:count] == first_pass
    assert EXAMPLES[count : 2 * count] != first_pass


@pytest.mark.parametrize("draw_documents", DRAWS)
def test_documents_are_drawn_by_their_tokens_or_all_alike(draw_documents):
    """20 documents of 6 tokens beside two of 900: how often each is drawn, given the document of A."""
    lines = dict.fromkeys("abcdefghijklmnopqrst", 2)
    lines.update(u=300, v=300)
    documents = []
    for letter, count in lines.items():
        documents.append(Document(letter, [f"{letter} {letter} {letter}"] * count))
    vocabulary = train_vocabulary(documents, 150)
    options = ExampleOptions(32, 5, duplication_factor=20, seed=1, draw_documents=draw_documents)
    weights = lines if draw_documents == "tokens" else dict.fromkeys(lines, 1)
    drawn = dict.fromkeys(lines, 0)
    expected = dict.fromkeys(lines, 0.0)
    for example in examples_of(documents, vocabulary, options).to_examples():
        if example.next_sentence_label:
            own, other = (vocabulary.tokens[segment[0]] for segment in segments(example))
            drawn[other] += 1
            of_others = sum(weights.values()) - weights[own]
            for letter in lines.keys() - {own}:
                expected[letter] += weights[letter] / of_others
    assert sum(drawn.values()) > 1000
    for letter, count in expected.items():
        deviation = count**0.5
        assert abs(drawn[letter] - count) < 4 * deviation
    of_long = drawn["u"] + drawn["v"]
    is_uniform = of_long < 0.1 * sum(drawn.values())
    assert is_uniform == (draw_documents == "uniform")


SCRIPTS = {
    "Latin": ("word", "other", "."),
    "Hindi": ("\u0936\u092c\u0926", "\u092a\u0920", "\u0964"),
    "Urdu": ("\u0644\u0641\u0638", "\u062d\u0631\u0641", "\u06d4"),
    "Greek": ("\u03bb\u03b5\u03be\u03b7", "\u03bd\u03b1\u03b9", ";"),
    "Chinese": ("\u5b57", "\u6587", "\u3002"),
    "Thai": ("\u0e04\u0e33" * 20, "\u0e04", ""),
}
SEPARATORS = (" ", "\n", "\u2028", "\u2029", "\x85", "\f")
LINES = ["".join(SCRIPTS["Thai"]), *map(" ".join, SCRIPTS.values())]
OF_ALL_SCRIPTS = train_vocabulary([Document("", LINES)], 200)


@st.composite
def texts(draw):
    """A text of one script: any number of words, with few stops or none, in one line or many."""
    word, other, stop = SCRIPTS[draw(st.sampled_from(sorted(SCRIPTS)))]
    separator = draw(st.sampled_from(SEPARATORS))
    most = draw(st.sampled_from([5, 300]))
    words = draw(st.lists(st.sampled_from([word, other]), min_size=1, max_size=most))
    words_of_sentence = draw(st.sampled_from([1, 7, 1000]))
    for place in range(0, len(words), words_of_sentence):
        words[place] += stop
    return separator.join(words)


@given(
    corpus=st.lists(texts(), min_size=1, max_size=4),
    length=st.integers(5, 64),
    passes=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_every_pass_uses_every_token_once(corpus, length, passes, seed):
    """Text without punctuation, of other scripts, in one line, one word a line: the A and the real B are the text."""
    parts = []
    for text in corpus:
        parts.extend(cut_document("", [text]))
    options = ExampleOptions(length, 20, duplication_factor=passes, seed=seed)
    lines = [" ".join(text.split()) for text in corpus]
    ids, _ = OF_ALL_SCRIPTS.encode(lines)
    used = []
    for example in examples_of(parts, OF_ALL_SCRIPTS, options).to_examples():
        assert len(example.input_ids) <= length
        a, b = segments(example)
        used += a if example.next_sentence_label else a + b
    assert used == ids.tolist() * passes


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    length=st.integers(1, 20),
)
def test_pieces_of_a_long_sentence_end_between_words(sizes, length):
    class Encoding:
        word_ids = np.repeat(np.arange(len(sizes)), sizes).tolist()

    ends = [0, *_inner_ends(Encoding, length).tolist(), sum(sizes)]
    for size in np.diff(ends):
        assert 0 < size < 2 * length or length == size == 1
    if max(sizes) <= length // 2:
        assert set(ends) <= {0, *np.cumsum(sizes).tolist()}


def test_no_example_of_a_long_line_is_shorter_than_those_of_sentences():
    """Eight documents of 3,000 words in one line: half of the second segments are random, and rows are full."""
    rng = random.Random(5)
    lines = [" ".join(rng.choices(["word", "other"], k=3000)) for _ in range(8)]
    documents = [Document("", [line]) for line in lines]
    examples = examples_of(documents, OF_ALL_SCRIPTS, OPTIONS)
    labels = examples.scalars["next_sentence_labels"]
    assert 0.45 < labels.mean() < 0.6
    assert np.mean(examples.lengths == 128) > 0.75


def test_the_number_of_masked_tokens():
    # Half a token rounds to even, as Python's round does in the reference.
    counts = masked_count([3, 5, 10, 30, 512], 76, 0.15)
    assert counts.tolist() == [1, 1, 2, 4, 76]


def test_a_random_segment_fills_its_example_or_ends_with_its_document():
    options = ExampleOptions(128, 20, duplication_factor=1, short_sequence_probability=0.0, seed=2)
    tokens = tokenise(DOCUMENTS, VOCABULARY, options)
    ends = [tokens.sentence_ends[end - 1] for end in tokens.document_ends]
    texts = [part.tolist() for part in np.split(tokens.ids, ends)]
    is_full = []
    for example in examples_of(DOCUMENTS, VOCABULARY, options).to_examples():
        if example.next_sentence_label:
            _, segment = segments(example)
            is_full.append(len(example.input_ids) == 128)
            ends = [text[-len(segment) :] for text in texts]
            assert is_full[-1] or segment in ends
    assert 10 < sum(is_full) < len(is_full) - 10


@pytest.mark.parametrize("texts", [[], ["", " "], ["Word."], ["Word.", "Other."]])
def test_hardly_any_text(texts):
    documents = [Document("", [text]) for text in texts]
    examples = examples_of(documents, VOCABULARY, ExampleOptions(16, 3, 1))
    assert len(examples) == sum(bool(text.strip()) for text in texts)
