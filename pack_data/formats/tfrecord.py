"""TFRecord files of tf.train.Example: frames with both checksums always checked, records by field name and type.

A frame, little endian: uint64 length; uint32 masked CRC32C of those 8 bytes; data; uint32 masked CRC32C of the data;
masked = rotate_right(crc, 15) + 0xa282ead8 mod 2**32 (tensorflow.org, TFRecord guide).  The data is a tf.train.Example
message, whose schema is built here at run time.  A file may be compressed.
"""

from __future__ import annotations

import gzip
import struct
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Callable, Dict, Iterable, Iterator, Mapping, Tuple

import numpy as np

from pack_data.formats.records import Record, RecordError, Value
from pack_data.reading.bad_records import BadRecords, Origin
from pack_data.reading.compressed import open_unpacked
from pack_data.reading.durable import replacing
from pack_data.reading.packages import load_package

_HEADER = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_SKIPPED = 1 << 20  # bytes read at a time of a record that is too long
_LARGEST_MESSAGE = 2**31 - 1  # bytes, the limit of protobuf

_Feature = Any  # int64 [n], float32 [n], or a list of byte strings


@lru_cache(maxsize=None)
def _crc32c():
    return load_package("google_crc32c", "this file format").value


def _masked_crc(data: bytes) -> int:
    crc = _crc32c()(data)
    rotated = (crc >> 15) | (crc << 17)
    return (rotated + 0xA282EAD8) & 0xFFFFFFFF


def is_start_of_file(head: bytes) -> bool:
    """Return True if the first bytes of a file are the header of a frame."""
    # A first record has bytes, and fewer than 4 GiB; other content, such as UTF-32, needs no package for the checksum.
    is_length = any(head[:4]) and head[4:8] == bytes(4)
    if len(head) < _HEADER.size or not is_length:
        return False
    _, checksum = _HEADER.unpack_from(head)
    return _masked_crc(head[:8]) == checksum


def read_frames(path: str, bad: BadRecords) -> Iterator[Tuple[Origin, bytes]]:
    """Yield the data of each frame whose two checksums hold.

    A damaged record is one bad record, and so is an incomplete record at the end of a truncated file.  A damaged length
    or compressed stream is always an error, raised after the records before it have been yielded: the start of the next
    record is unknown, so the lost records cannot be counted.
    """
    position = 0
    with open_unpacked(path) as file:
        for number in count():
            origin = Origin(path, number)
            cut_short = f"the file is cut short in this record, which begins at byte {position}"
            header = file.read(_HEADER.size)
            if not header:
                return
            if len(header) < _HEADER.size:
                bad.add(origin, cut_short)
                return
            length = _checked_length(header, origin, position, bad)
            frame_end = position + _HEADER.size + length + _CHECKSUM.size
            if length > bad.longest:
                bad.add(origin, f"{bad.too_long()}, at byte {position}")
                if not _skip(file, length + _CHECKSUM.size):
                    return
                position = frame_end
                continue

            body = file.read(length + _CHECKSUM.size)
            if len(body) < length + _CHECKSUM.size:
                bad.add(origin, cut_short)
                return
            data = body[:length]
            if _CHECKSUM.unpack(body[length:])[0] == _masked_crc(data):
                yield origin, data
            else:
                bad.add(origin, f"the checksum of its data is wrong, at byte {position}")
            position = frame_end


def _checked_length(header: bytes, origin: Origin, position: int, bad: BadRecords) -> int:
    """Return the length in the header of a frame.  Raises ValueError if it is damaged, whatever `bad` allows."""
    length, checksum = _HEADER.unpack(header)
    if _masked_crc(header[:8]) != checksum:
        bad.stop(
            origin,
            f"the checksum of its length is wrong, at byte {position}: the {origin.record} records before it were "
            "read, but where the next begins cannot be known (repair the file, or cut it there)",
        )
    if length > _LARGEST_MESSAGE:
        bad.stop(
            origin,
            f"its length, at byte {position}, is {length} bytes: no message is that large",
        )
    return length


def _skip(file: BinaryIO, size: int) -> bool:
    """Skip some bytes; return False if the file has fewer."""
    while size:
        skipped = len(file.read(min(size, _SKIPPED)))
        if not skipped:
            return False
        size -= skipped
    return True


def write_records(
    path: str, records: Iterable[Record], features_of: Callable[[Value], Mapping[str, _Feature]]
) -> int:
    """Write the features of each record and its foreign columns, with gzip if the path ends in .gz.

    Return the number of records.  Raises ValueError that names the record.
    """
    written = 0
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing(Path(path)) as temporary, open(temporary, "wb") as raw:
        # A fixed time and no name in the gzip header: same records, same bytes.
        file = (
            gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0)
            if path.endswith(".gz")
            else raw
        )
        for record in records:
            try:
                data = _message({**record.foreign, **features_of(record.value)})
            except RecordError as error:
                raise ValueError(f"{record.origin}: {error}") from None
            length = struct.pack("<Q", len(data))
            file.write(
                length
                + _CHECKSUM.pack(_masked_crc(length))
                + data
                + _CHECKSUM.pack(_masked_crc(data))
            )
            written += 1
        if file is not raw:
            file.close()
    return written


# ---- tf.train.Example --------------------------------------------------------------------------------------------

# example.proto and feature.proto of TensorFlow, as a FileDescriptorProto in the text format of protobuf.
_SCHEMA = """
name: "example.proto" package: "tensorflow" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type {
  name: "Feature"
  oneof_decl { name: "kind" }
  field {
    name: "bytes_list" number: 1 label: LABEL_OPTIONAL
    type: TYPE_MESSAGE type_name: ".tensorflow.BytesList" oneof_index: 0
  }
  field {
    name: "float_list" number: 2 label: LABEL_OPTIONAL
    type: TYPE_MESSAGE type_name: ".tensorflow.FloatList" oneof_index: 0
  }
  field {
    name: "int64_list" number: 3 label: LABEL_OPTIONAL
    type: TYPE_MESSAGE type_name: ".tensorflow.Int64List" oneof_index: 0
  }
}
message_type {
  name: "Features"
  nested_type {
    name: "FeatureEntry"
    options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".tensorflow.Feature" }
  }
  field {
    name: "feature" number: 1 label: LABEL_REPEATED
    type: TYPE_MESSAGE type_name: ".tensorflow.Features.FeatureEntry"
  }
}
message_type {
  name: "Example"
  field { name: "features" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".tensorflow.Features" }
}
"""


def _protobuf(module: str):
    return load_package(f"google.protobuf.{module}", "this file format")


@lru_cache(maxsize=None)
def _message_class():
    """Return the message class of tf.train.Example, in its own pool so that TensorFlow can be loaded as well."""
    file = _protobuf("descriptor_pb2").FileDescriptorProto()
    _protobuf("text_format").Parse(_SCHEMA, file)
    pool = _protobuf("descriptor_pool").DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    example = pool.FindMessageTypeByName("tensorflow.Example")
    return _protobuf("message_factory").GetMessageClass(example)


def parse(data: bytes) -> Dict[str, _Feature]:
    """Return the features of one message: int64 or float32 arrays, or lists of bytes.  Raises RecordError."""
    try:
        message = _message_class().FromString(data)
    except _protobuf("message").DecodeError as error:
        raise RecordError(f"not a tf.train.Example ({error})") from None
    features: Dict[str, _Feature] = {}
    for name, feature in message.features.feature.items():
        kind = feature.WhichOneof("kind")
        if kind == "int64_list":
            features[name] = np.array(feature.int64_list.value, np.int64)
        elif kind == "float_list":
            features[name] = np.array(feature.float_list.value, np.float32)
        else:
            features[name] = list(feature.bytes_list.value)
    return features


def _message(features: Mapping[str, _Feature]) -> bytes:
    """Serialise features in the order of their names.

    Integers become int64, floating-point numbers float, and text and byte strings bytes; arrays, lists of text, or
    single values.  Raises RecordError for anything else.
    """
    example = _message_class()()
    for name in sorted(features):
        feature = example.features.feature[name]
        value = features[name]
        texts = [value] if isinstance(value, (bytes, str)) else value
        if isinstance(texts, np.ndarray) and texts.size and texts.dtype.kind in "OSU":
            texts = texts.tolist()
        if isinstance(texts, list) and all(isinstance(text, (bytes, str)) for text in texts):
            feature.bytes_list.value.extend(
                [text.encode() if isinstance(text, str) else text for text in texts]
            )
            continue

        numbers = np.atleast_1d(value)
        if numbers.ndim != 1 or numbers.dtype.kind not in "iubf":
            raise RecordError(f"{name} holds neither numbers nor text; a TFRecord cannot hold it")
        if numbers.dtype.kind == "f":
            with np.errstate(over="ignore"):
                floats = numbers.astype(np.float32)
            if not np.array_equal(floats, numbers, equal_nan=True):
                raise RecordError(
                    f"{name} holds numbers that 32 bits do not; a TFRecord cannot hold them"
                )
            feature.float_list.value.extend(floats.tolist())
        elif numbers.max(initial=0) >= 2**63:
            raise RecordError(
                f"{name} holds {numbers.max()}; the integers of a TFRecord end at 2^63 - 1"
            )
        else:
            feature.int64_list.value.extend(numbers.tolist())
    return example.SerializeToString(deterministic=True)


def _demand(features: Mapping[str, _Feature], types: Mapping[str, str]) -> None:
    for name, wanted in types.items():
        if name not in features:
            raise RecordError(
                f"has no feature {name}; its features are {', '.join(sorted(features)[:12]) or 'none'}"
            )
        values = features[name]
        actual = (
            "bytes" if isinstance(values, list) else {"i": "int64", "f": "float"}[values.dtype.kind]
        )
        if actual != wanted:
            raise RecordError(f"{name} is a list of {actual}, must be {wanted}")


def read_records(
    path: str,
    bad: BadRecords,
    types: Mapping[str, str],
    value_of: Callable[[Mapping[str, _Feature]], Value],
) -> Iterator[Record]:
    """Yield the records of one file, in file order.

    types: the features that a record must have, each with its type, "int64" or "float"; all others are
    foreign.  value_of: makes the value from the features; may raise RecordError.
    """
    for origin, data in read_frames(path, bad):
        try:
            features = parse(data)
            _demand(features, types)
            value = value_of(features)
        except RecordError as error:
            bad.add(origin, str(error))
            continue
        foreign = {name: values for name, values in features.items() if name not in types}
        yield Record(origin, value, foreign)
