"""Token sequences, and files of them, for the tests of formats and of `PackDataset`."""

import struct

import numpy as np

from pack_data.formats.source import open_source


def random_sequences(count, longest=16, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 500, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def write_megatron(prefix, sequences, code=4, dtype="<i4"):
    """Both files, one document a sequence; the path of the index."""
    data = [np.array(sequence, dtype).tobytes() for sequence in sequences]
    prefix.with_suffix(".bin").write_bytes(b"".join(data))
    starts = np.cumsum([0] + [len(sequence) for sequence in data])[:-1]
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(sequences) + 1)
    lengths = np.array([len(sequence) for sequence in sequences], "<i4").tobytes()
    documents = np.arange(len(sequences) + 1, dtype="<i8").tobytes()
    index = prefix.with_suffix(".idx")
    index.write_bytes(head + lengths + starts.astype("<i8").tobytes() + documents)
    return index


def sequences_of(path):
    return sorted(record.value["input_ids"].tolist() for record in open_source(path).examples())
