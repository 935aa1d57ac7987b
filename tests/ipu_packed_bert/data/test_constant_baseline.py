"""The constant baseline of a model, worked by hand."""

import contextlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ipu_packed_bert.data import constant_baseline as unigram
from ipu_packed_bert.data.constant_baseline import unigram_baseline
from ipu_packed_bert.data.global_batches import MixedStore, StoredPacks
from pack_data.store.data_set import StoreWriter
from pack_data.store.packs import PackSchema, assemble
from pack_data.store.sequences import Example, Sequences

SCHEMA = PackSchema.bert(8, 2, 6, vocabulary_size=10)


def stored(folder, *packs):
    """A data set of these packs; a sequence is (labels of its masked tokens, next sentence label)."""
    examples = []
    places = []
    for number, pack in enumerate(packs):
        for slot, (labels, after) in enumerate(pack):
            positions = list(range(1, len(labels) + 1))
            examples.append(Example([1, *labels], 1, positions, labels, after))
            places.append((number, slot))
    sequences = Sequences.from_examples(examples)
    writer = StoreWriter(folder, SCHEMA, packs_per_shard=2)
    writer.add(assemble(SCHEMA, sequences, *np.array(places).T, len(packs)))
    return writer.finish(algorithm="spfhp", vocabulary_size=10)


@pytest.fixture
def both(tmp_path):
    # Labels 5: three times, 7: once, 3: twice; next sentence 1, 0, 1.
    training = stored(
        tmp_path / "training",
        [([5, 5, 7], 1), ([3], 0)],
        [([5, 3], 1)],
    )
    # Of five labels one is 5, the most frequent; of three sequences one has the answer 1.
    held_out = stored(
        tmp_path / "held_out",
        [([5, 3], 0), ([7, 7], 0)],
        [([9], 1)],
    )
    return training, held_out


def loss(count, total):
    """The loss of a label that occurs so often among the labels and the tokens of the vocabulary, which count once."""
    return -math.log(count / total)


def test_by_hand(both):
    scores = unigram_baseline(*both, packs=np.arange(2), vocabulary=10)
    # (count + 1) / (6 labels + 10 tokens of the vocabulary)
    five = loss(4, 16)
    three = loss(3, 16)
    seven = loss(2, 16)
    nine = loss(1, 16)
    assert scores["most_frequent_token_accuracy"] == 1 / 5
    assert scores["most_frequent_next_sentence_accuracy"] == 1 / 3
    mean = (five + three + 2 * seven + nine) / 5
    assert scores["unigram_loss"] == pytest.approx(mean, rel=1e-12)
    # Normalised over sequences: the mean of each one's mean, as the model's loss is then.
    options = {"packs": np.arange(2), "vocabulary": 10, "normalisation": "sequence"}
    by_sequence = unigram_baseline(*both, **options)["unigram_loss"]
    mean = ((five + three) / 2 + seven + nine) / 3
    assert by_sequence == pytest.approx(mean, rel=1e-12)


def test_a_larger_training_side_is_counted_in_part_and_all_of_the_held_out_one(both, monkeypatch):
    monkeypatch.setattr(unigram, "COUNTED_PACKS", 1)  # the first of two: 5, 5, 7, 3
    monkeypatch.setattr(unigram, "_PACKS_AT_ONCE", 1)
    scores = unigram_baseline(*both, packs=np.array([1, 0]), vocabulary=10)
    mean = (loss(3, 14) + 3 * loss(2, 14) + loss(1, 14)) / 5
    assert scores["unigram_loss"] == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("shares, fives", [((1000.0, 1.0), 40), ((3.0, 1.0), 30), ((1.0, 1.0), 20), (None, 20)])
def test_a_mixture_counts_by_the_shares_that_it_is_trained_with(tmp_path, shares, fives):
    """Twenty packs with the label 5 and twenty with 7: of the 40 packs of an epoch, this many have a 5."""
    folders = [str(tmp_path / name) for name in ("fives", "sevens")]
    for folder, label in zip(folders, (5, 7)):
        store = stored(Path(folder), *[[([label], 1)]] * 20)
    held_out = stored(tmp_path / "held_out", [([5], 1)])
    manifest = replace(store.manifest, packs=40, sequences=40)
    with contextlib.closing(MixedStore(folders, shares, 0, manifest)) as mixed:
        packs = StoredPacks(mixed).order(0)
        scores = unigram_baseline(mixed, held_out, packs=packs, vocabulary=10)
    assert scores["unigram_loss"] == pytest.approx(loss(fives + 1, 50), rel=0.02)
