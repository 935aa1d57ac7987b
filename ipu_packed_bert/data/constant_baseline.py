"""Scores of predictions that ignore the text, on held-out data: the least that a model must beat."""

from __future__ import annotations

from typing import Dict, Iterator, Optional

import numpy as np

from pack_data.store.data_set import PackStore
from pack_data.store.packs import disassemble
from pack_data.store.sequences import Sequences

# Maximum number of training packs whose labels are counted: evenly spaced, with millions of labels.
COUNTED_PACKS = 65_536

_PACKS_AT_ONCE = 4096  # read together; bounds the memory

# (label of the score, metric of the model, metric of the baseline, constant prediction of the baseline)
BESIDE = (
    (
        "masked tokens, right",
        "mlm_accuracy",
        "most_frequent_token_accuracy",
        "the most frequent token alone",
    ),
    ("masked tokens, loss", "mlm_loss", "unigram_loss", "the token frequencies alone"),
    (
        "next sentence, right",
        "nsp_accuracy",
        "most_frequent_next_sentence_accuracy",
        "the more frequent answer alone",
    ),
)


def unigram_baseline(
    training: PackStore,
    held_out: Optional[PackStore],
    *,
    vocabulary: int,
    packs: Optional[np.ndarray] = None,
    normalisation: str = "token",
) -> Dict[str, float]:
    """Return the scores of constant predictions on the held-out packs.

    - `most_frequent_token_accuracy`: fraction of the masked tokens that are the most frequent training label.
    - `unigram_loss`: cross-entropy, in nats, of the frequencies of the training labels (add-one smoothing over the
      vocabulary) on the held-out labels; a mean over masked tokens, or over sequences of their means.
    - `most_frequent_next_sentence_accuracy`: as the first, for the next sentence.

    Args:
        training: the training data set.
        held_out: the held-out data set, if there is one.
        vocabulary: number of tokens.
        packs: indices of the training packs of an epoch, as often as the epoch has them, so that a data set of a
            mixture counts by its share; default: each pack once.
        normalisation: ``"token"`` or ``"sequence"``, as `loss.normalisation`.

    Returns:
        The scores by name; empty if a data set has no such labels, or none is held out.
    """
    if held_out is None or not (_has_labels(training) and _has_labels(held_out)):
        return {}
    token_counts = np.zeros(vocabulary, np.int64)
    next_counts = np.zeros(2, np.int64)
    packs = np.arange(len(training)) if packs is None else np.sort(packs)
    number = min(len(packs), COUNTED_PACKS)
    evenly_spaced = np.arange(number, dtype=np.int64) * len(packs) // max(1, number)
    for sequences in _sequences(training, packs[evenly_spaced]):
        token_counts += np.bincount(sequences.predictions["masked_lm_ids"], minlength=vocabulary)
        random = int(np.count_nonzero(sequences.scalars["next_sentence_labels"]))
        next_counts += (len(sequences) - random, random)
    losses = -np.log((token_counts + 1.0) / (token_counts.sum() + vocabulary))
    most_frequent = int(token_counts.argmax())
    most_frequent_next = int(next_counts.argmax())

    correct = masked = correct_next = number = 0
    loss = 0.0
    for sequences in _sequences(held_out, np.arange(len(held_out))):
        labels = sequences.predictions["masked_lm_ids"]
        per_sequence = sequences.prediction_counts
        correct += int((labels == most_frequent).sum())
        masked += len(labels)
        is_random = sequences.scalars["next_sentence_labels"] > 0
        correct_next += int((is_random == most_frequent_next).sum())
        number += len(sequences)
        label_losses = losses[labels]
        if normalisation == "sequence":
            label_losses = label_losses * np.repeat(1.0 / np.maximum(per_sequence, 1), per_sequence)
        loss += float(label_losses.sum())
    terms = masked if normalisation == "token" else number
    return {
        "most_frequent_token_accuracy": correct / max(1, masked),
        "unigram_loss": loss / max(1, terms),
        "most_frequent_next_sentence_accuracy": correct_next / max(1, number),
    }


def _has_labels(store: PackStore) -> bool:
    names = {column.name for column in store.schema.columns}
    return {"masked_lm_ids", "next_sentence_labels"} <= names


def _sequences(store: PackStore, packs: np.ndarray) -> Iterator[Sequences]:
    """Yield the sequences of some packs, given by their indices, some thousand packs at a time."""
    for first in range(0, len(packs), _PACKS_AT_ONCE):
        records = store.records(packs[first : first + _PACKS_AT_ONCE])
        yield disassemble(store.schema, records)
