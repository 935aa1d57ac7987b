"""Global batches of a few sequences, and configurations with settings replaced: for tests of engines."""

import dataclasses

import numpy as np

from tests.packed_examples import fill_up, lay_out, random_packs, random_sequences, with_scales

SLOTS = 24


def change(config, **sections):
    """A copy with settings replaced: change(CONFIG, model={"hidden_dropout": 0.1})."""
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    )


def make_batches(number, *, depth, micro_batch, seed=0, normalisation="token"):
    """Global batches of 8 sequences each, the same ones for every depth."""
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(number):
        lengths = [int(length) for length in rng.integers(2, 16, 8)]
        examples = random_sequences(rng, lengths=lengths, vocabulary=61)
        packs = random_packs(np.random.default_rng(seed), lengths, slots=SLOTS, depth=depth)
        packs = fill_up(packs, micro_batch)
        batch = lay_out(packs, examples, slots=SLOTS, depth=depth, predictions=4 + depth)
        micro_batches = len(packs) // micro_batch
        batches.append(with_scales(batch, micro_batches=micro_batches, normalisation=normalisation))
    return batches
