"""Which tokens are masked: each for itself, or with whole-word masking the pieces of a word together."""

import random

import numpy as np
import pytest

from pack_data.store.sequences import starts_of
from pack_data.text.corpus import Document
from pack_data.text.examples import ExampleOptions, _in_window, _mask, masked_count
from pack_data.text.vocabulary import train_vocabulary
from tests.pack_data.text_corpus import examples_of, sentence, words_of

MOST, SHARE = 20, 0.15
SHORT = [Document("", [sentence(random.Random(number)), sentence(random.Random(-number))]) for number in range(1, 4001)]
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
        for word in words:
            assert masked.issuperset(word) or masked.isdisjoint(word)
            several += len(word) > 1 and masked.issuperset(word)
        assert masked <= {position for word in words for position in word}
        wanted = masked_count([len(example.input_ids)], MOST, SHARE)[0]
        assert len(masked) <= MOST and abs(len(masked) - wanted) < max(map(len, words))
        if wanted + max(map(len, words)) <= MOST:
            missing.append(wanted - len(masked))
    assert several > 1000 and len(missing) > 2000
    assert abs(np.mean(missing)) < 3 * np.std(missing) / len(missing) ** 0.5


@pytest.mark.parametrize("words, most", [(90, 19), (400, 76), (3, 1)], ids=["a sequence", "a long one", "a title"])
def test_words_of_any_number_of_pieces_are_masked_alike(words, most):
    """They were masked in 15.6, 13.9, 12.6 and 11.3 %, and in titles in 19, 13, 4 and 2 %."""
    rng = np.random.default_rng(2)
    rows = np.repeat(np.arange(600_000 // words), words)
    sizes = rng.integers(1, 5, len(rows))
    tokens = np.bincount(rows, weights=sizes)
    wanted = np.full(len(tokens), most)
    masked = _in_window(sizes, rows, wanted, rng.random(len(tokens)), MOST if most < MOST else most)
    assert np.bincount(rows[masked], weights=sizes[masked]).max() <= max(MOST, most)
    for size in range(1, 5):
        is_of_size = sizes == size
        expected = (wanted / tokens)[rows[is_of_size]]
        shortfall = 1 - masked[is_of_size].sum() / expected.sum()
        assert -0.02 < shortfall < 0.03, size


def test_each_piece_gets_its_own_fate(examples):
    """80 % of the pieces become [MASK], 10 % stay, 10 % become any token; two pieces of a word independently."""
    mask, fates, pairs = VOCABULARY.ids["[MASK]"], [], []
    for example in examples:
        labels = dict(zip(example.masked_lm_positions, example.masked_lm_ids))
        fate = {at: (example.input_ids[at] == mask, example.input_ids[at] == label) for at, label in labels.items()}
        fates += fate.values()
        pairs += [
            (fate[word[0]][0], fate[word[1]][0])
            for word in words_of(example, VOCABULARY.tokens)
            if len(word) > 1 and word[0] in fate
        ]
    masked, kept = np.mean(fates, axis=0)
    n, random_hit = len(fates), 0.1 / len(VOCABULARY)
    assert abs(masked - 0.8 - random_hit) < 3 * (0.16 / n) ** 0.5
    assert abs(kept - 0.1 - random_hit) < 3 * (0.09 / n) ** 0.5
    assert abs(np.mean(np.all(pairs, axis=1)) - 0.64) < 3 * (0.64 * 0.36 / len(pairs)) ** 0.5 + 2 * random_hit


def test_without_whole_words_the_smallest_keys_are_masked():
    """Without whole words nothing changed: the same random numbers give the same masks."""
    lengths = np.random.default_rng(1).integers(5, 60, 30)
    starts = starts_of(lengths)
    ids = np.random.default_rng(2).integers(10, 90, int(lengths.sum()))
    special = np.concatenate([starts, starts + 2, starts + lengths - 1])
    keys = np.random.default_rng(7).random(len(ids))
    keys[special] = 1.0
    masked = ids.copy()
    counts, positions, labels = _mask(
        masked,
        lengths,
        special,
        np.zeros(len(ids), bool),
        4,
        90,
        ExampleOptions(60, 6, masked_lm_probability=0.15),
        np.random.default_rng(7),
    )
    wanted = np.minimum(masked_count(lengths, 6, 0.15), lengths - 3)
    assert counts.tolist() == wanted.tolist()
    for row, (start, length, count) in enumerate(zip(starts, lengths, counts)):
        own = slice(int(counts[:row].sum()), int(counts[: row + 1].sum()))
        assert positions[own].tolist() == sorted(np.argsort(keys[start : start + length])[:count])
        assert labels[own].tolist() == ids[start + positions[own]].tolist()
