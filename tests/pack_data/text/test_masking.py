"""Which tokens are masked: each for itself, or with whole-word masking the pieces of a word together."""

import random

import numpy as np
import pytest

from pack_data.store.sequences import starts_of
from pack_data.text import examples as examples_module
from pack_data.text.corpus import Document
from pack_data.text.examples import ExampleOptions, _in_window, _mask, masked_count
from pack_data.text.vocabulary import train_vocabulary
from tests.pack_data.text_corpus import examples_of, sentence, words_of

MOST = 20
SHARE = 0.15
DRAW = random.Random(0)
SHORT = [Document("", [sentence(DRAW), sentence(DRAW)]) for _ in range(2500)]
# Most words are two pieces or more.
VOCABULARY = train_vocabulary(SHORT[:200], 90)
OPTIONS = ExampleOptions(128, MOST, duplication_factor=1, seed=1, whole_word_masking=True)


@pytest.fixture(scope="module")
def examples():
    return examples_of(SHORT, VOCABULARY, OPTIONS).to_examples()


def test_a_word_is_masked_whole_or_not_at_all(examples):
    """In every sequence, without exception, and about as many tokens as are wanted."""
    several = 0
    missing = []
    for example in examples:
        masked = set(example.masked_lm_positions)
        words = words_of(example, VOCABULARY.tokens)
        masked_words = [word for word in words if not masked.isdisjoint(word)]
        assert masked == {position for word in masked_words for position in word}
        several += sum(len(word) > 1 for word in masked_words)
        length = len(example.input_ids)
        wanted = masked_count([length], MOST, SHARE)[0]
        longest = max(map(len, words))
        assert len(masked) <= MOST
        assert abs(len(masked) - wanted) < longest
        if wanted + longest <= MOST:
            missing.append(wanted - len(masked))
    assert several > 1000
    assert len(missing) > 1200
    deviation = np.std(missing) / len(missing) ** 0.5
    assert abs(np.mean(missing)) < 3 * deviation


@pytest.mark.parametrize(
    "words, most",
    [(90, 19), (400, 76), (3, 1)],
    ids=["a sequence", "a long one", "a title"],
)
def test_words_of_any_number_of_pieces_are_masked_alike(words, most):
    """They were masked in 15.6, 13.9, 12.6 and 11.3 %, and in titles in 19, 13, 4 and 2 %."""
    rng = np.random.default_rng(2)
    row_numbers = np.arange(600_000 // words)
    rows = np.repeat(row_numbers, words)
    sizes = rng.integers(1, 5, len(rows))
    tokens = np.bincount(rows, weights=sizes)
    wanted = np.full(len(tokens), most)
    limit = max(MOST, most)
    shifts = rng.random(len(tokens))
    masked = _in_window(sizes, rows, wanted, shifts, limit)
    masked_tokens = np.bincount(rows[masked], weights=sizes[masked])
    assert masked_tokens.max() <= limit
    for size in range(1, 5):
        is_of_size = sizes == size
        share = wanted / tokens
        expected = share[rows[is_of_size]].sum()
        shortfall = 1 - masked[is_of_size].sum() / expected
        assert -0.02 < shortfall < 0.03, size


def test_the_pieces_of_a_word_are_replaced_independently(examples):
    """80 % become [MASK]: both pieces of a word in 64 %, within three standard deviations and a random [MASK]."""
    mask = VOCABULARY.ids["[MASK]"]
    both = []
    for example in examples:
        masked = set(example.masked_lm_positions)
        for word in words_of(example, VOCABULARY.tokens):
            if len(word) > 1 and word[0] in masked:
                first, second = (example.input_ids[place] for place in word[:2])
                both.append(first == second == mask)
    deviation = (0.64 * 0.36 / len(both)) ** 0.5
    random_mask = 0.2 / len(VOCABULARY)
    assert abs(np.mean(both) - 0.64) < 3 * deviation + random_mask


@pytest.mark.parametrize("block", [examples_module._BLOCK, 100])
def test_without_whole_words_the_smallest_keys_are_masked(monkeypatch, block):
    """Without whole words nothing changed: the same random numbers give the same masks, in blocks of any size."""
    monkeypatch.setattr(examples_module, "_BLOCK", block)
    rng = np.random.default_rng(1)
    lengths = rng.integers(5, 60, 30)
    starts = starts_of(lengths)
    ids = rng.integers(10, 90, int(lengths.sum()))
    ends = starts + lengths
    special = np.concatenate([starts, starts + 2, ends - 1])
    keys = np.random.default_rng(7).random(len(ids))
    keys[special] = 1.0
    inside = np.zeros(len(ids), bool)
    options = ExampleOptions(60, 6, masked_lm_probability=0.15)
    rng = np.random.default_rng(7)
    counts, positions, labels = _mask(ids.copy(), lengths, special, inside, 4, 90, options, rng)
    wanted = masked_count(lengths, 6, 0.15)
    assert counts.tolist() == np.minimum(wanted, lengths - 3).tolist()
    first = 0
    for start, end, count in zip(starts, ends, counts):
        own = slice(first, first + count)
        by_key = np.argsort(keys[start:end])
        assert positions[own].tolist() == sorted(by_key[:count])
        originals = ids[start + positions[own]]
        assert labels[own].tolist() == originals.tolist()
        first += count
