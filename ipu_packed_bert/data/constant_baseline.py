"""What predicting without looking at the text comes to, on held-out data: the least that a model must beat."""

from __future__ import annotations

from typing import Dict, Iterator, Optional

import numpy as np

from pack_data.store.data_set import PackStore
from pack_data.store.packs import disassemble
from pack_data.store.sequences import Sequences

# Packs of the training side whose labels are counted, at most: evenly spaced ones, with millions of labels.
COUNTED_PACKS = 65_536

_AT_ONCE = 4096

# What is scored, the model's metric, the baseline's, and what the baseline always says.
BESIDE = (
    ("masked tokens, right", "mlm_accuracy", "most_frequent_token_accuracy", "always the most frequent token"),
    ("masked tokens, loss", "mlm_loss", "unigram_loss", "always the frequencies of the tokens"),
    ("next sentence, right", "nsp_accuracy", "most_frequent_next_sentence_accuracy", "always the more frequent"),
)


def unigram_baseline(
    training: PackStore, held_out: Optional[PackStore], *, vocabulary: int, normalisation: str = "token"
) -> Dict[str, float]:
    """Scores of constant predictions on the held-out packs.

    most_frequent_token_accuracy : share of the masked tokens that are the most frequent label of the training side.
    unigram_loss : cross-entropy, in nats, of the labels' frequencies on the training side, each of the `vocabulary`
        tokens counted once more (add-one smoothing), over the held-out labels; a mean over masked tokens, or over
        sequences of their means, as `loss.normalisation` says.
    most_frequent_next_sentence_accuracy : as the first, of the next sentence.

    Empty for data sets without these labels, and where none is held out.
    """
    if held_out is None:
        return {}
    names = {column.name for column in held_out.schema.columns}
    if not {"masked_lm_ids", "next_sentence_labels"} <= names & {column.name for column in training.schema.columns}:
        return {}
    counts, nexts = np.zeros(vocabulary, np.int64), np.zeros(2, np.int64)
    for sequences in _sequences(training, min(len(training), COUNTED_PACKS)):
        counts += np.bincount(sequences.predictions["masked_lm_ids"], minlength=vocabulary)
        random = int(np.count_nonzero(sequences.scalars["next_sentence_labels"]))
        nexts += (len(sequences) - random, random)
    losses = -np.log((counts + 1.0) / (counts.sum() + vocabulary))
    most_frequent, most_next = int(counts.argmax()), int(nexts.argmax())
    right = masked = right_next = number = 0
    loss = 0.0
    for sequences in _sequences(held_out, len(held_out)):
        labels, own = sequences.predictions["masked_lm_ids"], sequences.prediction_counts
        right, masked = right + int((labels == most_frequent).sum()), masked + len(labels)
        right_next += int(((sequences.scalars["next_sentence_labels"] > 0) == most_next).sum())
        number += len(sequences)
        weights = 1.0 if normalisation == "token" else np.repeat(1.0 / np.maximum(own, 1), own)
        loss += float((losses[labels] * weights).sum())
    return {
        "most_frequent_token_accuracy": right / max(1, masked),
        "unigram_loss": loss / max(1, masked if normalisation == "token" else number),
        "most_frequent_next_sentence_accuracy": right_next / max(1, number),
    }


def _sequences(store: PackStore, packs: int) -> Iterator[Sequences]:
    """The sequences of so many packs of the store, evenly spaced, some thousand packs at a time."""
    chosen = np.arange(packs, dtype=np.int64) * len(store) // max(1, packs)
    for first in range(0, packs, _AT_ONCE):
        yield disassemble(store.schema, store.records(chosen[first : first + _AT_ONCE]))
