"""Random pre-training sequences, laid out as packs in the ten fields of a batch: for tests, independent of pack_data.

sequences = random_sequences(rng, lengths=[5, 9, 3], vocabulary=50)
packed = lay_out([[0, 2], [1]], sequences, slots=12, depth=3, predictions=6)      # packs of sequence indices
unpacked = lay_out([[0], [1], [2]], sequences, slots=12, depth=1, predictions=6)
batch = with_scales(packed, micro_batches=1, normalisation="token")
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class RandomSequence(NamedTuple):
    input_ids: np.ndarray
    segment_ids: np.ndarray
    masked_positions: np.ndarray  # inside the sequence, ascending
    masked_ids: np.ndarray
    is_random_next: int


def random_sequences(rng, *, lengths, vocabulary, share=0.15):
    """One sequence for each length; at least one token in each is masked, about `share` of them."""
    sequences = []
    for length in lengths:
        masked = max(1, int(round(share * length)))
        first = int(rng.integers(1, length + 1))
        sequences.append(
            RandomSequence(
                input_ids=rng.integers(1, vocabulary, length),
                segment_ids=(np.arange(length) >= first).astype(np.int64),
                masked_positions=np.sort(rng.choice(length, masked, replace=False)),
                masked_ids=rng.integers(1, vocabulary, masked),
                is_random_next=int(rng.integers(2)),
            )
        )
    return sequences


def lay_out(packs, sequences, *, slots, depth, predictions, multiple_of=1):
    """int32 fields, one row for each pack (an empty one is all zeros); a pack lists the sequences in their order.

    multiple_of: each sequence begins at a multiple of it.
    """
    widths = {
        **dict.fromkeys(("input_ids", "input_mask", "segment_ids", "positions"), slots),
        **{"masked_lm_" + name: predictions for name in ("positions", "ids", "weights")},
        **{"next_sentence_" + name: depth for name in ("positions", "labels", "weights")},
    }
    batch = {name: np.zeros((len(packs), width), dtype=np.int32) for name, width in widths.items()}
    for row, pack in enumerate(packs):
        start = 0
        masked = 0
        assert len(pack) <= depth
        for number, index in enumerate(pack, start=1):
            sequence = sequences[index]
            where = slice(start, start + len(sequence.input_ids))
            assert where.stop <= slots
            batch["input_ids"][row, where] = sequence.input_ids
            batch["input_mask"][row, where] = number
            batch["segment_ids"][row, where] = sequence.segment_ids
            batch["positions"][row, where] = np.arange(len(sequence.input_ids))
            used = slice(masked, masked + len(sequence.masked_ids))
            assert used.stop <= predictions
            batch["masked_lm_positions"][row, used] = start + sequence.masked_positions
            batch["masked_lm_ids"][row, used] = sequence.masked_ids
            batch["masked_lm_weights"][row, used] = number
            batch["next_sentence_positions"][row, number - 1] = start
            batch["next_sentence_labels"][row, number - 1] = sequence.is_random_next
            batch["next_sentence_weights"][row, number - 1] = 1
            start = -(-where.stop // multiple_of) * multiple_of
            masked = used.stop
    return batch


def with_scales(batch, *, micro_batches, normalisation, dtype=np.float32):
    """The batch with `mlm_scale` and `nsp_scale`, normalised over all of it."""
    packs = len(batch["input_ids"])
    sequences = max(1, int(batch["next_sentence_weights"].sum()))
    masked = max(1, int((batch["masked_lm_weights"] > 0).sum()))
    mlm = micro_batches / (masked if normalisation == "token" else sequences)
    return {
        **batch,
        "mlm_scale": np.full(packs, mlm, dtype=dtype),
        "nsp_scale": np.full(packs, micro_batches / sequences, dtype=dtype),
    }


def random_packs(rng, lengths, *, slots, depth):
    """First-fit of the sequences in random order: packs of indices, of mixed sizes, never over `slots` or `depth`."""
    packs = []
    for index in rng.permutation(len(lengths)):
        fitting = [
            pack
            for pack in packs
            if len(pack) < depth and sum(lengths[other] for other in pack) + lengths[index] <= slots
        ]
        if fitting:
            fitting[int(rng.integers(len(fitting)))].append(int(index))
        else:
            packs.append([int(index)])
    return packs


def fill_up(packs, multiple):
    """The packs and as many empty ones as make their number a multiple."""
    return list(packs) + [[]] * (-len(packs) % multiple)
