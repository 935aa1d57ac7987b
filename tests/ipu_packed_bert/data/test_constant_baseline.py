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
    sequences = [
        Example([1, *labels], 1, list(range(1, len(labels) + 1)), labels, after)
        for pack in packs
        for labels, after in pack
    ]
    pack = np.repeat(np.arange(len(packs)), [len(each) for each in packs])
    slot = np.concatenate([np.arange(len(each)) for each in packs])
    writer = StoreWriter(folder, SCHEMA, packs_per_shard=2)
    writer.add(assemble(SCHEMA, Sequences.from_examples(sequences), pack, slot, len(packs)))
    return writer.finish(algorithm="spfhp", vocabulary_size=10)


@pytest.fixture
def both(tmp_path):
    # Labels 5: three times, 7: once, 3: twice; next sentence 1, 0, 1.
    training = stored(tmp_path / "training", [([5, 5, 7], 1), ([3], 0)], [([5, 3], 1)])
    # Of five labels one is 5, the most frequent; of three sequences one has the answer 1.
    return training, stored(tmp_path / "held_out", [([5, 3], 0), ([7, 7], 0)], [([9], 1)])


def test_by_hand(both):
    found = unigram_baseline(*both, packs=np.arange(2), vocabulary=10)
    # (count + 1) / (6 labels + 10 tokens of the vocabulary)
    five, three, seven, nine = (-math.log(count / 16) for count in (4, 3, 2, 1))
    assert found["most_frequent_token_accuracy"] == 1 / 5
    assert found["unigram_loss"] == pytest.approx((five + three + 2 * seven + nine) / 5, rel=1e-12)
    assert found["most_frequent_next_sentence_accuracy"] == 1 / 3
    # Normalised over sequences: the mean of each one's mean, as the model's loss is then.
    by_sequence = unigram_baseline(*both, packs=np.arange(2), vocabulary=10, normalisation="sequence")
    assert by_sequence["unigram_loss"] == pytest.approx(((five + three) / 2 + seven + nine) / 3, rel=1e-12)


def test_a_larger_training_side_is_counted_in_part_and_all_of_the_held_out_one(both, monkeypatch):
    monkeypatch.setattr(unigram, "COUNTED_PACKS", 1)  # the first of two: 5, 5, 7, 3
    monkeypatch.setattr(unigram, "_PACKS_AT_ONCE", 1)
    found = unigram_baseline(*both, packs=np.array([1, 0]), vocabulary=10)
    five, others, nine = (-math.log(count / 14) for count in (3, 2, 1))
    assert found["unigram_loss"] == pytest.approx((five + 3 * others + nine) / 5, rel=1e-12)


@pytest.mark.parametrize("shares, fives", [((1000.0, 1.0), 40), ((3.0, 1.0), 30), ((1.0, 1.0), 20), (None, 20)])
def test_a_mixture_counts_by_the_shares_that_it_is_trained_with(tmp_path, shares, fives):
    """Twenty packs with the label 5 and twenty with 7: of the 40 packs of an epoch, this many have a 5."""
    folders = [str(tmp_path / name) for name in ("fives", "sevens")]
    stores = [stored(Path(folder), *[[([label], 1)]] * 20) for folder, label in zip(folders, (5, 7))]
    held_out = stored(tmp_path / "held_out", [([5], 1)])
    manifest = replace(stores[0].manifest, packs=40, sequences=40)
    with contextlib.closing(MixedStore(folders, shares, 0, manifest)) as mixed:
        found = unigram_baseline(mixed, held_out, packs=StoredPacks(mixed).order(0), vocabulary=10)
    assert found["unigram_loss"] == pytest.approx(-math.log((fives + 1) / 50), rel=0.02)
