"""Which tokens are masked: each for itself, or with whole-word masking the pieces of a word together."""

import random

import numpy as np
import pytest

from pack_data.store.sequences import starts_of
from pack_data.text.corpus import Document
from pack_data.text.examples import ExampleOptions, _fitting, _mask, masked_count
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


def reference(words, length, rng):
    """The positions that are masked, as the published procedure says.

    15 % of the tokens, rounded, are wanted. The words are gone through in random order; one that would make more than
    wanted is passed over, until there are as many as wanted.
    """
    wanted, masked = min(MOST, max(1, round(length * SHARE))), []
    for word in rng.sample(words, len(words)):
        if len(masked) == wanted:
            break
        if len(masked) + len(word) <= wanted:
            masked += word
    return masked


def test_a_word_is_masked_whole_or_not_at_all(examples):
    """In every sequence, without exception; never more tokens than are wanted, and fewer only where no word fits."""
    several = 0
    for example in examples:
        masked, words = set(example.masked_lm_positions), words_of(example, VOCABULARY.tokens)
        for word in words:
            assert masked.issuperset(word) or masked.isdisjoint(word)
            several += len(word) > 1 and masked.issuperset(word)
        assert masked <= {position for word in words for position in word}
        left = min(MOST, max(1, round(len(example.input_ids) * SHARE))) - len(masked)
        assert left >= 0 and not any(len(word) <= left for word in words if masked.isdisjoint(word))
    assert several > 1000 and len(examples) > 4000


def statistics(words, masked, length):
    """Return the mean numbers of one sequence in which both ways of masking must agree."""
    masked = set(masked)
    whole = [len(word) for word in words if masked.issuperset(word)]
    runs = np.diff([-1, *(position for position in range(length) if position not in masked), length]) - 1
    return [
        len(masked) / length,
        len(whole) / len(words),
        *(whole.count(size) / len(words) for size in (1, 2, 3)),
        *(np.count_nonzero(runs == size) for size in (1, 2, 3, 4)),
        np.count_nonzero(runs > 4),
        sum(masked) / length / max(1, len(masked)),
    ]


def test_masked_as_by_the_published_procedure(examples):
    """Share of tokens and of words (by their length), lengths of masked runs and place, over the same 4,000 documents.

    Sequence by sequence against a plain implementation: each mean difference is within 3 of its standard deviations.
    """
    rng, differences = random.Random(3), []
    for example in examples:
        words, length = words_of(example, VOCABULARY.tokens), len(example.input_ids)
        ours = statistics(words, example.masked_lm_positions, length)
        differences.append(np.subtract(ours, statistics(words, reference(words, length, rng), length)))
    mean, deviation = np.mean(differences, axis=0), np.std(differences, axis=0)
    assert (deviation > 0).all()
    assert np.abs(mean / deviation * len(differences) ** 0.5).max() < 3


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


def test_rows_take_what_a_loop_would_take():
    rng = np.random.default_rng(0)
    for _ in range(50):
        count = int(rng.integers(1, 6))
        rows = np.sort(rng.integers(0, count, int(rng.integers(0, 60))))
        sizes, most = rng.integers(1, 7, len(rows)), rng.integers(0, 15, count)
        room, taken = most.tolist(), []
        for word, (row, size) in enumerate(zip(rows, sizes)):
            if size <= room[row]:
                room[row] -= size
                taken.append(word)
        assert sorted(_fitting(sizes, rows, most)) == taken


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
