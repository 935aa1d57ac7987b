"""TFRecord files of tf.train.Example: frames with both checksums always checked, records by field name and type.

A frame, little endian: uint64 length; uint32 masked CRC32C of those 8 bytes; data; uint32 masked CRC32C of the data;
masked = rotate_right(crc, 15) + 0xa282ead8 mod 2**32 (tensorflow.org, TFRecord guide).  The data is a tf.train.Example
message, whose schema is built here at run time.  A file may be gzipped, whatever its name.
"""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from pack_data.cli.bad_records import BadRecords, Origin
from pack_data.formats.records import Record, RecordError, Value
from pack_data.reading.files import open_regular, replacing
from pack_data.reading.packages import load_package

HEADER = struct.Struct("<QI")
CHECKSUM = struct.Struct("<I")
GZIP_MAGIC = b"\x1f\x8b"
_LARGEST_MESSAGE = 2**31 - 1  # what a protobuf message may have

_Feature = Any  # int64 [n], float32 [n], or a list of byte strings


@lru_cache(maxsize=None)
def _crc32c():
    return load_package("google_crc32c", "this file format").value


def masked_crc(data: bytes) -> int:
    crc = _crc32c()(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def read_frames(path: str, bad: BadRecords) -> Iterator[Tuple[Origin, bytes]]:
    """The data of each frame of a file whose two checksums hold.

    A damaged record is one bad record, and so is an incomplete one at the end of a file that was cut.  A damaged length
    or gzip stream is always an error, raised after the records before it: the place of the next record is unknown, so
    the lost records cannot be counted.
    """
    number, position = 0, 0
    with open_regular(path) as raw:
        packed = raw.read(2) == GZIP_MAGIC
        raw.seek(0)
        file: Any = gzip.GzipFile(fileobj=raw) if packed else raw
        try:
            while True:
                origin = Origin(path, number)
                header = file.read(HEADER.size)
                if not header:
                    return
                length, whole, body = 0, len(header) == HEADER.size, b""
                if whole:
                    length, checksum = HEADER.unpack(header)
                    if masked_crc(header[:8]) != checksum:
                        bad.stop(
                            origin,
                            f"the checksum of its length is wrong, at byte {position}: the {number} records before "
                            "it were read, where the next begins cannot be known (repair or cut the file there)",
                        )
                    if length > _LARGEST_MESSAGE:
                        bad.stop(origin, f"says it has {length} bytes, at byte {position}: no message is that large")
                    if length > bad.longest:  # passed over but for its last byte, which says whether it is there
                        bad.add(origin, f"{bad.too_long()}, at byte {position}")
                        file.seek(length + CHECKSUM.size - 1, os.SEEK_CUR)
                        if not file.read(1):
                            return
                    else:
                        body = file.read(length + CHECKSUM.size)
                        whole = len(body) == length + CHECKSUM.size
                if not whole:
                    bad.add(origin, f"the file is cut short in this record, which begins at byte {position}")
                    return
                if body and masked_crc(body[:length]) != CHECKSUM.unpack(body[length:])[0]:
                    bad.add(origin, f"the checksum of its data is wrong, at byte {position}")
                elif body:
                    yield origin, body[:length]
                number += 1
                position += HEADER.size + length + CHECKSUM.size
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            bad.stop(
                Origin(path, number),
                f"the gzip stream is damaged ({error}): {number} records were read, those behind them cannot be",
            )


def write_records(path: str, records: Iterable[Record], features_of: Callable[[Value], Mapping[str, _Feature]]) -> int:
    """Writes the features of each record, and its foreign columns, as one file, gzipped where its name ends in .gz.

    Returns how many records. ValueError names the record.
    """
    count = 0
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing(Path(path)) as temporary, open(temporary, "wb") as raw:
        # A fixed time and no name in the gzip header: same records, same bytes.
        file = gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) if path.endswith(".gz") else raw
        for record in records:
            try:
                data = _message({**record.foreign, **features_of(record.value)})
            except RecordError as error:
                raise ValueError(f"{record.origin}: {error}") from None
            length = struct.pack("<Q", len(data))
            file.write(length + CHECKSUM.pack(masked_crc(length)) + data + CHECKSUM.pack(masked_crc(data)))
            count += 1
        if file is not raw:
            file.close()
    return count


# ---- tf.train.Example --------------------------------------------------------------------------------------------


@lru_cache(maxsize=None)
def _message_class():
    """The message class of tf.train.Example, in its own descriptor pool so that TensorFlow may be loaded as well."""
    descriptor = load_package("google.protobuf.descriptor_pb2", "this file format")
    pool = load_package("google.protobuf.descriptor_pool", "this file format").DescriptorPool()
    factory = load_package("google.protobuf.message_factory", "this file format")
    kind = descriptor.FieldDescriptorProto
    one, many = kind.LABEL_OPTIONAL, kind.LABEL_REPEATED
    file = descriptor.FileDescriptorProto(name="example.proto", package="tensorflow", syntax="proto3")
    lists = (("BytesList", kind.TYPE_BYTES), ("FloatList", kind.TYPE_FLOAT), ("Int64List", kind.TYPE_INT64))
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, value) in enumerate(lists, 1):
        file.message_type.add(name=name).field.add(name="value", number=1, label=many, type=value)
        feature.field.add(
            name=f"{name[:-4].lower()}_list",
            number=number,
            label=one,
            type=kind.TYPE_MESSAGE,
            type_name=f".tensorflow.{name}",
            oneof_index=0,
        )
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=one, type=kind.TYPE_STRING)
    entry.field.add(name="value", number=2, label=one, type=kind.TYPE_MESSAGE, type_name=".tensorflow.Feature")
    features.field.add(
        name="feature", number=1, label=many, type=kind.TYPE_MESSAGE, type_name=".tensorflow.Features.FeatureEntry"
    )
    file.message_type.add(name="Example").field.add(
        name="features", number=1, label=one, type=kind.TYPE_MESSAGE, type_name=".tensorflow.Features"
    )
    pool.AddSerializedFile(file.SerializeToString())
    return factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


def parse(data: bytes) -> Dict[str, _Feature]:
    """The features of one message: int64 or float32 arrays, or lists of bytes.  Raises RecordError."""
    decode_error = load_package("google.protobuf.message", "this file format").DecodeError
    try:
        message = _message_class().FromString(data)
    except decode_error as error:
        raise RecordError(f"is no tf.train.Example ({error})") from None
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
    """One message, its features in the order of their names.

    int64 for integers, float for floating-point numbers, bytes for text and bytes: arrays, lists or single values, also
    as Arrow scalars; None is a feature without values.  Raises RecordError for anything else.
    """
    example = _message_class()()
    for name in sorted(features):
        feature = example.features.feature[name]
        values = _listed(name, features[name])
        if values.dtype.kind in "iub":
            feature.int64_list.value.extend(values.tolist())
        elif values.dtype.kind == "f":
            feature.float_list.value.extend(values.tolist())
        else:
            feature.bytes_list.value.extend(values.tolist())
    return example.SerializeToString(deterministic=True)


def _listed(name: str, value: Any) -> np.ndarray:
    """Integers, floats, or an object array of bytes, one-dimensional."""
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iubf":
        return value
    if hasattr(value, "as_py"):
        value = value.as_py()
    if value is None:
        value = []
    values = value if isinstance(value, (list, np.ndarray)) else [value]
    if (
        len(values)
        and all(isinstance(item, (bytes, str)) for item in values)
        or not len(values)
        and isinstance(values, list)
    ):
        listed = np.empty(len(values), object)
        listed[:] = [item.encode() if isinstance(item, str) else item for item in values]
        return listed
    listed = np.asarray(values)
    if listed.ndim != 1 or listed.dtype.kind not in "iubf":
        raise RecordError(f"{name} is neither numbers nor text; a TFRecord cannot hold it")
    return listed


class Field(NamedTuple):
    """A feature that a format demands."""

    name: str
    kind: str  # "int64", "float", or "number" where files in use have either


def _demand(features: Mapping[str, _Feature], fields: Iterable[Field]) -> None:
    """Raise RecordError unless every field is there with its type."""
    for field in fields:
        if field.name not in features:
            raise RecordError(f"has no feature {field.name}; it has {', '.join(sorted(features)[:12]) or 'none'}")
        values = features[field.name]
        found = "bytes" if isinstance(values, list) else ("float" if values.dtype.kind == "f" else "int64")
        if found != field.kind and not (field.kind == "number" and found != "bytes"):
            raise RecordError(f"{field.name} is a list of {found}, must be {field.kind}")


def read_records(
    path: str, bad: BadRecords, fields: Sequence[Field], value_of: Callable[[Mapping[str, _Feature]], Value]
) -> Iterator[Record]:
    """The records of one file that have `fields`, in its order. value_of: may raise RecordError."""
    known = {field.name for field in fields}
    for origin, data in read_frames(path, bad):
        try:
            features = parse(data)
            _demand(features, fields)
            value = value_of(features)
        except RecordError as error:
            bad.add(origin, str(error))
            continue
        yield Record(origin, value, {name: given for name, given in features.items() if name not in known})
