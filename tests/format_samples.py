"""Examples and files for the tests of the formats; the TFRecord encoder here shares no code with the package."""

import struct
from functools import partial

import numpy as np

from pack_data.formats import bert_tfrecord
from pack_data.formats.records import EXAMPLE_FIELDS, Record
from pack_data.formats.source import open_source
from pack_data.reading.bad_records import Origin
from pack_data.store.data_set import StoreWriter
from pack_data.store.packs import FIELDS, PackSchema, assemble
from pack_data.store.sequences import Example, Sequences


def example(length=7, first=4, positions=(2, 5), label=1, seed=0):
    rng = np.random.default_rng(seed)
    return Example(
        input_ids=rng.integers(1, 30000, length).tolist(),
        first_segment_length=first,
        masked_lm_positions=list(positions),
        masked_lm_ids=rng.integers(1, 30000, len(positions)).tolist(),
        next_sentence_label=label,
    )


def random_examples(rng, count, longest=24, most_predictions=4):
    """Examples of 5 to `longest` tokens; position 0 ([CLS]) is never masked."""
    examples = []
    for _ in range(count):
        length = int(rng.integers(5, longest + 1))
        predictions = int(rng.integers(1, min(most_predictions, length - 1) + 1))
        examples.append(
            Example(
                input_ids=rng.integers(1, 30522, length).tolist(),
                first_segment_length=int(rng.integers(2, length)),
                masked_lm_positions=sorted((rng.permutation(length - 1)[:predictions] + 1).tolist()),
                masked_lm_ids=rng.integers(1, 30522, predictions).tolist(),
                next_sentence_label=int(rng.integers(2)),
            )
        )
    return examples


def mlperf_row(given, S, P):
    """The features of an unpacked record, as plain lists."""
    n = len(given.input_ids)
    p = len(given.masked_lm_ids)
    return {
        "input_ids": given.input_ids + [0] * (S - n),
        "input_mask": [1] * n + [0] * (S - n),
        "segment_ids": [0] * given.first_segment_length + [1] * (n - given.first_segment_length) + [0] * (S - n),
        "masked_lm_positions": given.masked_lm_positions + [0] * (P - p),
        "masked_lm_ids": given.masked_lm_ids + [0] * (P - p),
        "masked_lm_weights": [1.0] * p + [0.0] * (P - p),
        "next_sentence_labels": [given.next_sentence_label],
    }


def pack_from_examples(examples, shape):
    """Pack examples one after another into a pack of these widths; shares no code with `pack_data.store`."""
    size, width, depth = shape.of_packs()
    widths = [size] * 4 + [width] * 3 + [depth] * 3
    pack = {name: np.zeros(n, np.int32) for name, n in zip(FIELDS, widths)}
    assert len(examples) <= depth
    slot = prediction = 0
    for number, example in enumerate(examples, 1):
        end = slot + len(example.input_ids)
        last = prediction + len(example.masked_lm_positions)
        assert end <= size and last <= width
        pack["input_ids"][slot:end] = example.input_ids
        pack["input_mask"][slot:end] = number
        pack["segment_ids"][slot + example.first_segment_length : end] = 1
        pack["positions"][slot:end] = np.arange(end - slot)
        pack["masked_lm_positions"][prediction:last] = np.asarray(example.masked_lm_positions) + slot
        pack["masked_lm_ids"][prediction:last] = example.masked_lm_ids
        pack["masked_lm_weights"][prediction:last] = number
        pack["next_sentence_positions"][number - 1] = slot
        pack["next_sentence_labels"][number - 1] = example.next_sentence_label
        pack["next_sentence_weights"][number - 1] = 1
        slot = end
        prediction = last
    return pack


def write_store(folder, packs, shape):
    """Write lists of examples as the packs of a data set."""
    size, predictions, depth = shape
    schema = PackSchema.bert(size, depth, predictions, vocabulary_size=1 << 16)
    slots = np.concatenate([np.arange(len(pack)) for pack in packs])
    numbers = np.repeat(np.arange(len(packs)), [len(pack) for pack in packs])
    sequences = Sequences.from_examples([each for pack in packs for each in pack])
    writer = StoreWriter(folder, schema)
    writer.add(assemble(schema, sequences, numbers, slots, len(packs)))
    writer.finish(algorithm="by hand").close()


def records(values):
    return [Record(Origin("given", number), value) for number, value in enumerate(values)]


def write_hdf5(path, values, kind="nvidia"):
    """Write padded rows as `mlperf_row` returns them ("nvidia"), or examples without padding ("varlength")."""
    import h5py

    with h5py.File(path, "w") as file:
        for name in (*EXAMPLE_FIELDS, "input_mask"):
            narrow = name in ("input_mask", "segment_ids", "next_sentence_labels")
            if kind == "varlength":
                rows = [mlperf_row(value, len(value.input_ids), len(value.masked_lm_ids))[name] for value in values]
            else:
                rows = [value[name] for value in values]
            if kind == "varlength" and name != "next_sentence_labels":
                data = file.create_dataset(name, (len(rows),), h5py.vlen_dtype(np.int8 if narrow else np.int32))
                for number, row in enumerate(rows):
                    data[number] = row
            else:
                data = np.array(rows, np.int8 if narrow else np.int32)
                data = data.reshape(-1) if name == "next_sentence_labels" else data
                chunks = (min(2, len(rows)), *data.shape[1:])
                file.create_dataset(name, data=data, compression="gzip", chunks=chunks)
    return str(path)


write_mlperf = partial(bert_tfrecord.write, format="mlperf_tfrecord")
write_packed = partial(bert_tfrecord.write, format="packed_tfrecord")


# Two sequences in a row of 10: [CLS] 11 [SEP] 12 [SEP], [CLS] 21 22 [SEP]; slots 1, 6 and 7 are masked.
PACKED = {
    "input_ids": [101, 103, 102, 12, 102, 101, 103, 103, 102, 0],
    "input_mask": [1, 1, 1, 1, 1, 2, 2, 2, 2, 0],
    "segment_ids": [0, 0, 0, 1, 1, 0, 0, 0, 1, 0],
    "positions": [0, 1, 2, 3, 4, 0, 1, 2, 3, 0],
    "masked_lm_positions": [1, 6, 7, 0, 0],
    "masked_lm_ids": [11, 21, 22, 0, 0],
    "masked_lm_weights": [1.0, 2.0, 2.0, 0.0, 0.0],
    "next_sentence_positions": [0, 5, 0],
    "next_sentence_labels": [1, 0, 0],
    "next_sentence_weights": [1.0, 1.0, 0.0],
}
UNPACKED = [([101, 103, 102, 12, 102], 3, [1], [11], 1), ([101, 103, 103, 102], 3, [1, 2], [21, 22], 0)]


def varint(value):
    value &= 2**64 - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


def field(number, data):
    """A length-delimited field (wire type 2)."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def tf_example(features):
    """tf.train.Example: floats make a float_list (2), integers an int64_list (3), bytes a bytes_list (1)."""
    entries = b""
    for name, values in features.items():
        if values and isinstance(values[0], bytes):
            feature = field(1, b"".join(field(1, value) for value in values))
        elif values and isinstance(values[0], float):
            feature = field(2, field(1, struct.pack(f"<{len(values)}f", *values)))
        else:
            feature = field(3, field(1, b"".join(varint(value) for value in values)))
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)


def feature_kinds(data):
    """name -> number of the list (1 bytes, 2 float, 3 int64), read from the wire format."""

    def fields(buffer):
        at = 0

        def number():
            nonlocal at
            value = shift = 0
            while True:
                byte = buffer[at]
                at += 1
                value |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    return value

        while at < len(buffer):
            key = number()
            assert key & 7 == 2
            size = number()
            yield key >> 3, buffer[at : at + size]
            at += size

    ((_, features),) = fields(data)
    kinds = {}
    for _, entry in fields(features):
        parts = dict(fields(entry))
        kinds[parts[1].decode()] = next(fields(parts[2]))[0]
    return kinds


def frame(data):
    import google_crc32c

    def checksum(value):
        crc = google_crc32c.value(value)
        return struct.pack("<I", ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) % 2**32)

    length = struct.pack("<Q", len(data))
    return length + checksum(length) + data + checksum(data)


def unframe(data):
    """The messages of a file, without a look at the checksums."""
    messages = []
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        messages.append(data[12 : 12 + size])
        data = data[16 + size :]
    return messages


def values(path, **options):
    """The values that a file or directory is read as."""
    return [record.value for record in open_source(path, **options).read()]
