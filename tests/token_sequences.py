"""Token sequences, and files of them, for the tests of formats and of `PackDataset`."""

import struct

import numpy as np

from pack_data.formats.source import open_source


def random_sequences(count, longest=16, seed=0):
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        length = rng.integers(1, longest + 1)
        sequence = rng.integers(1, 500, length)
        sequences.append(sequence.tolist())
    return sequences


def write_megatron(prefix, sequences, code=4, dtype="<i4"):
    """Both files, one document a sequence; the path of the index."""
    data = [np.array(sequence, dtype).tobytes() for sequence in sequences]
    prefix.with_suffix(".bin").write_bytes(b"".join(data))
    sizes = [len(sequence) for sequence in data]
    starts = np.cumsum([0, *sizes])[:-1]
    lengths = [len(sequence) for sequence in sequences]
    documents = np.arange(len(sequences) + 1)
    counts = struct.pack(
        "<QBQQ",
        1,
        code,
        len(sequences),
        len(documents),
    )
    parts = (
        b"MMIDIDX\0\0",
        counts,
        np.array(lengths, "<i4").tobytes(),
        starts.astype("<i8").tobytes(),
        documents.astype("<i8").tobytes(),
    )
    index = prefix.with_suffix(".idx")
    index.write_bytes(b"".join(parts))
    return index


def sequences_of(path):
    records = open_source(path).examples()
    sequences = [record.value["input_ids"] for record in records]
    return sorted(sequence.tolist() for sequence in sequences)
