import random

import numpy as np
import pytest

from pack_data.text.corpus import Document
from pack_data.text.examples import ExampleOptions, _trim, masked_count, tokenise
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
    """With label 0, A + B is a run of the document (cut at its outer ends, or where both were trimmed); with 1 only B's
    own document has it."""
    tokenised = tokenise(DOCUMENTS, VOCABULARY)
    text = " ".join(map(str, tokenised.ids.tolist())) + " "
    real = random_ones = 0
    for example in EXAMPLES.to_examples():
        ids = restored(example)
        a, b = ids[1 : example.first_segment_length - 1], ids[example.first_segment_length : -1]
        run = " ".join(map(str, a + b)) + " "
        for part in (a, b):
            assert " ".join(map(str, part)) + " " in text
        if len(ids) < 128 and len(a) + len(b) > 12:
            found = run in text
            assert found or example.next_sentence_label
            real, random_ones = (
                real + (not example.next_sentence_label),
                random_ones + (example.next_sentence_label and not found),
            )
    assert real > 20 and random_ones > 20


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


def test_without_short_targets_every_token_of_the_first_pass_is_used():
    """Each sentence is in A or real B, or was set free and used by the next example: no text is dropped between
    examples."""
    options = ExampleOptions(100_000, 20, duplication_factor=1, short_sequence_probability=0.0)
    examples = examples_of(DOCUMENTS, VOCABULARY, options)
    labels, firsts = examples.scalars["next_sentence_labels"], examples.scalars["first_segment_lengths"]
    used = int((firsts - 2).sum() + (examples.lengths - firsts - 1)[labels == 0].sum())
    assert used == len(tokenise(DOCUMENTS, VOCABULARY).ids)


def reference_trim(a, b, most):
    """Token by token, as published: from the longer one, from B where equal."""
    while a + b > most:
        if a > b:
            a -= 1
        else:
            b -= 1
    return a, b


def test_trimming_equals_token_by_token():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 60, (500, 2))
    pairs = np.stack([np.zeros(500, int), lengths[:, 0], np.zeros(500, int), lengths[:, 1], np.zeros(500, int)], axis=1)
    trimmed = _trim(pairs, 40, rng)
    assert trimmed[:, [1, 3]].tolist() == [list(reference_trim(a, b, 40)) for a, b in lengths.tolist()]
    # Both ends are cut, and nothing outside the segment is used.
    assert (trimmed[:, 0] + trimmed[:, 1] <= lengths[:, 0]).all() and 0 < trimmed[:, 0].sum() < (
        lengths[:, 0] - trimmed[:, 1]
    ).sum()


def test_the_number_of_masked_tokens():
    # Half a token rounds to even, as Python's round does in the reference.
    assert masked_count(np.array([3, 5, 10, 30, 512]), 76, 0.15).tolist() == [1, 1, round(1.5), round(4.5), 76]


def test_a_random_segment_fills_its_example_or_ends_with_its_document():
    options = ExampleOptions(128, 20, duplication_factor=1, short_sequence_probability=0.0, seed=2)
    tokens = tokenise(DOCUMENTS, VOCABULARY)
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
