"""A data set and a configuration so small that a whole run takes a second: for tests of what surrounds the model.

folder = tiny_data(tmp_path / "data")                  # 60 random sequences in packs of 64 slots, depth 3
path = tiny_config(tmp_path / "tiny.yml", folder)      # a YAML file; --set style overrides go into load_config
"""

import numpy as np
import yaml

from ipu_packed_bert.run_files.folder import LOG, read_log
from ipu_packed_bert.settings.schema import ModelConfig
from pack_data.building.held_out import held_out_folder
from pack_data.store.data_set import PackStore, StoreWriter
from pack_data.store.packs import PackSchema, assemble
from pack_data.store.sequences import Example, Sequences
from tests.packed_examples import random_packs, random_sequences

# The sizes of most tests' networks; what a test needs otherwise it replaces.
TINY = ModelConfig(
    vocabulary_size=61,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    intermediate_size=32,
    max_position_embeddings=24,
    hidden_dropout=0.0,
)

VOCABULARY = 128
SLOTS = 64
DEPTH = 3
PREDICTIONS = 10


def tiny_data(folder, *, sequences=60, vocabulary=VOCABULARY, depth=DEPTH, seed=0, **about):
    """A packed data set of random sequences of 5 to 64 tokens, and one of a third as many held out beside it.

    `about`: further fields of its manifest.
    """
    _random_data(held_out_folder(folder), sequences // 3, vocabulary, depth, seed + 1000)
    return _random_data(folder, sequences, vocabulary, depth, seed, **about)


def held_out_of(store):
    """The data set held out beside that of `tiny_data`."""
    return PackStore.open(held_out_folder(store.folder))


def _random_data(folder, sequences, vocabulary, depth, seed, **about):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, SLOTS + 1, sequences).tolist()
    examples = [
        Example(
            sequence.input_ids.tolist(),
            int((sequence.segment_ids == 0).sum()),
            sequence.masked_positions.tolist(),
            sequence.masked_ids.tolist(),
            sequence.is_random_next,
        )
        for sequence in random_sequences(rng, lengths=lengths, vocabulary=vocabulary)
    ]
    packs = random_packs(rng, lengths, slots=SLOTS, depth=depth)
    pack = np.zeros(sequences, np.int64)
    slot = np.zeros(sequences, np.int64)
    for number, members in enumerate(packs):
        for place, index in enumerate(members):
            pack[index] = number
            slot[index] = place
    schema = PackSchema.bert(SLOTS, depth, PREDICTIONS + depth, vocabulary_size=vocabulary)
    writer = StoreWriter(folder, schema)
    writer.add(assemble(schema, Sequences.from_examples(examples), pack, slot, len(packs)))
    writer.finish(
        algorithm="spfhp", vocabulary_size=vocabulary, max_predictions_per_sequence=PREDICTIONS, seed=seed, **about
    ).close()
    return folder


def tiny_settings(data=None):
    """Nested settings of a run of 12 updates of 4 packs, dropout on."""
    return {
        "data": {
            "directory": str(data or "data/tiny"),
            "vocabulary_size": VOCABULARY,
            "max_sequence_length": SLOTS,
            "max_predictions_per_sequence": PREDICTIONS,
            "packer": "spfhp",
            "max_sequences_per_pack": DEPTH,
            "held_out": 0.2,
        },
        "model": {
            "vocabulary_size": VOCABULARY,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": SLOTS,
            "hidden_dropout": 0.1,
        },
        "optimizer": {"learning_rate": 0.01},
        "batch": {"micro_batch": 2, "gradient_accumulation": 3},
        "engine": {"kind": "host", "threads": 1},
        "placement": {"layers_per_ipu": [2]},
        "run": {"steps": 12, "evaluate_every": 5, "checkpoint_every": 3},
    }


def not_drawn(*_, **__):
    """In place of `run_summary.draw_curves`, which takes as long as a tiny run."""
    raise ValueError("nobody looks at it")


def logged(folder, name="step", file=LOG):
    """Return a value of every record of a log of a run."""
    return [record[name] for record in read_log(folder / file)]


def tiny_config(path, data):
    path.write_text(yaml.safe_dump(tiny_settings(data)))
    return path
