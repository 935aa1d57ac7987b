"""Detection of the format of a file: by its first bytes, and by its suffix if they are ambiguous."""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from itertools import islice
from typing import Dict, Iterator, Set

from pack_data.formats import bert_tfrecord, tfrecord
from pack_data.formats.records import RecordError
from pack_data.reading.bad_records import BadRecords
from pack_data.reading.compressed import open_unpacked, without_compression
from pack_data.reading.fields import said_of
from pack_data.reading.files import open_regular
from pack_data.reading.npy import refuse_sequences

# Format -> the module of this package that reads it.
FORMATS: Dict[str, str] = {
    "mlperf_tfrecord": "bert_tfrecord",
    "packed_tfrecord": "bert_tfrecord",
    "hdf5": "hdf5",
    "parquet": "parquet",
    "arrow": "parquet",
    "jsonl": "jsonl",
    "megatron": "megatron",
    "packed_parquet": "parquet",
    "store": "store",
}
# Suffix -> format of the files of a directory; TFRecord is not one of FORMATS, its records tell which.
SUFFIXES = {
    "tfrecord": "tfrecord",
    "tfrecords": "tfrecord",
    "hdf5": "hdf5",
    "h5": "hdf5",
    "parquet": "parquet",
    "pq": "parquet",
    "arrow": "arrow",
    "feather": "arrow",
    "ipc": "arrow",
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "json": "jsonl",
}
MEGATRON_MAGIC = b"MMIDIDX\0\0"
_MAGIC = (
    (b"\x89HDF\r\n\x1a\n", "hdf5"),
    (b"PAR1", "parquet"),
    (b"ARROW1", "arrow"),
    (b"\xff\xff\xff\xff", "arrow"),
    (MEGATRON_MAGIC, "megatron"),
    (b"\x93NUMPY", "npy"),
)
_HEAD_BYTES = 256
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_RECORDS_FOR_DETECTION = 64  # of a TFRecord, some of which may be damaged


def suffix_format(path: str) -> str:
    """Return the format of a suffix, ignoring case and compression; "" if it reveals none."""
    return SUFFIXES.get(without_compression(path).rpartition(".")[2], "")


def content_format(path: str) -> str:
    """Return the format of a file's first bytes, after decompression.

    Args:
        path: an ordinary file.

    Returns:
        "parquet", "arrow", "hdf5", "megatron", "npy", "tfrecord" or "jsonl"; "" for any other content, such as text.

    Raises:
        ValueError: the file cannot be read.
    """
    with open_unpacked(path) as file:
        head = file.read(_HEAD_BYTES)
        is_compressed = not file.seekable()
    for magic, format in _MAGIC:
        if head.startswith(magic):
            if is_compressed:
                raise ValueError(f"{path}: a compressed file of {format}; decompress it first")
            return format
    if head.startswith(_BYTE_ORDER_MARK):
        head = head[len(_BYTE_ORDER_MARK) :]
    if head.lstrip()[:1] in (b"{", b"[") and b"\0" not in head:
        return "jsonl"
    with said_of(path):
        return "tfrecord" if tfrecord.is_start_of_file(head) else ""


def format_of(path: str) -> str:
    """Return which of FORMATS a file has; raise ValueError if it has none."""
    format = content_format(path)
    if not format:
        _refuse_zlib(path)
        format = suffix_format(path)
    if format == "tfrecord":
        return _tfrecord_format(path)
    if format == "npy":
        refuse_sequences(path)
    if format in FORMATS:
        return format
    if not os.path.getsize(path):
        raise ValueError(f"{path}: the file is empty")
    raise ValueError(f"{path}: not in a known format ({', '.join(FORMATS)})")


def _refuse_zlib(path: str) -> None:
    with open_regular(path) as file:
        head = file.read(_HEAD_BYTES)
    with suppress(zlib.error):
        if tfrecord.is_start_of_file(zlib.decompressobj().decompress(head)):
            raise ValueError(
                f"{path}: a TFRecord file compressed with ZLIB; write it with GZIP, or without compression"
            )


def _features(path: str) -> Iterator[Set[str]]:
    """Yield the features of the first readable records.  Raises ValueError if the file is damaged before the first."""
    frames = 0
    any_damage = BadRecords(allowed=_RECORDS_FOR_DETECTION)
    try:
        for _, data in islice(tfrecord.read_frames(path, any_damage), _RECORDS_FOR_DETECTION):
            frames += 1
            with suppress(RecordError):
                yield set(tfrecord.parse(data))
    except ValueError:
        if not frames:
            raise


def _tfrecord_format(path: str) -> str:
    """Return the format whose features the first record of a known format has.  Raises ValueError if there is none.

    A packed record has every feature of an unpacked one.  A record with only some of the others is of neither format
    and does not count: it would be read as unpacked, and all valid records after it would be bad ones.
    """
    packed = set(bert_tfrecord.FEATURES["packed_tfrecord"])
    unpacked = set(bert_tfrecord.FEATURES["mlperf_tfrecord"])
    names: Set[str] = set()
    for names in _features(path):
        if names.issuperset(packed):
            return "packed_tfrecord"
        if names.issuperset(unpacked) and names.isdisjoint(packed - unpacked):
            return "mlperf_tfrecord"
    if not names:
        raise ValueError(
            f"{path}: no record of this TFRecord file can be read; pass its format to see why"
        )
    raise ValueError(
        f"{path}: TFRecord of an unknown format, with features {', '.join(sorted(names)[:12])}; "
        "pass the format it should have to see what is missing (--format, --from-format)"
    )
