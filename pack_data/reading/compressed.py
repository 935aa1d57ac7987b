"""Reading of compressed files: gzip, xz, bzip2, Zstandard and zip, also files of several parts.

Parallel writers, `cat` and dumps with several streams write a file as parts: members (gzip), streams (xz, bzip2) or
frames (Zstandard). Modules of Python stop at the first part that they cannot read, without an error. Here one loop
reads part after part. Between parts it accepts only the padding that the format permits; anything else is damage.
"""

from __future__ import annotations

import bz2
import errno
import io
import lzma
import os
import zipfile
import zlib
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO, Callable, Dict, Iterator, NamedTuple, Optional, Tuple

from pack_data.reading.durable import PathLike
from pack_data.reading.files import open_regular
from pack_data.reading.packages import load_package

# Bytes that are read or unpacked at a time.
_CHUNK = 1 << 16
# Bytes of Zstandard that are unpacked at a time: 1 KiB unpacks to 32 MiB at most, as a block of four bytes may
# stand for 128 KiB.
_ZSTANDARD_CHUNK = 1 << 10

_ZIP_END = b"PK\5\6"
# The record at the end has 22 bytes and a comment of up to 65,535.
_LONGEST_ZIP_END = 22 + (1 << 16)
# In place of the number of members, if the number stands in the record of ZIP64.
_IN_ZIP64 = 0xFFFF

_Chunks = Iterator[bytes]


class _Part:
    """A decompressor of zlib or zstandard with the interface of `bz2.BZ2Decompressor`.

    most: bytes of a result, a limit that zstandard does not have.
    """

    def __init__(self, part: Any, *most: int) -> None:
        self._part = part
        self._most = most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    @property
    def needs_input(self) -> bool:
        return not self._part.unconsumed_tail

    def decompress(self, data: bytes, _: int) -> bytes:
        return self._part.decompress(self._part.unconsumed_tail + data, *self._most)


def _gzip_member() -> _Part:
    return _Part(zlib.decompressobj(16 + zlib.MAX_WBITS), _CHUNK)


def _parts(
    raw: BinaryIO, new_part: Callable[[], Any], padding: int = 0, size: int = _CHUNK
) -> _Chunks:
    """Yield the content of all parts of a compressed file.

    new_part: returns a decompressor with the interface of `bz2.BZ2Decompressor`. padding: zero bytes may follow a part
    in multiples of this number; 0: no byte may. size: bytes read at a time.
    """
    data = raw.read(size)
    while data:
        part = new_part()
        while not part.eof:
            if not data and part.needs_input:
                data = raw.read(size)
                if not data:
                    raise EOFError("its last part is not complete")
            yield part.decompress(data, _CHUNK)
            data = b""
        data = part.unused_data or raw.read(size)
        if padding:
            data = _after_padding(data, raw, padding)


def _after_padding(data: bytes, raw: BinaryIO, padding: int) -> bytes:
    """Return the first bytes of the next part; b"" at the end of the file."""
    zeros = 0
    while data:
        rest = data.lstrip(b"\0")
        zeros += len(data) - len(rest)
        data = rest or raw.read(_CHUNK)
        if rest:
            break
    if zeros % padding:
        raise EOFError(f"{zeros} zero bytes after a part, not a multiple of {padding}")
    return data


def _zstandard_chunks(raw: BinaryIO) -> _Chunks:
    zstandard = load_package("zstandard", "a .zst file")

    def new_frame() -> _Part:
        return _Part(zstandard.ZstdDecompressor().decompressobj())

    return _parts(raw, new_frame, size=_ZSTANDARD_CHUNK)


def _zip_chunks(raw: BinaryIO) -> _Chunks:
    """Yield the files of an archive one after another, each from the beginning of a line."""
    end = b"\n"
    with zipfile.ZipFile(raw) as archive:
        _check_member_count(raw, len(archive.infolist()))
        for member in archive.infolist():
            # Opening compares the name with the one that stands before the content, also if the content is left out.
            with archive.open(member) as file:
                if member.is_dir() or member.filename.startswith("__MACOSX/"):
                    continue
                if end != b"\n":
                    yield b"\n"
                for chunk in iter(partial(file.read, _CHUNK), b""):
                    yield chunk
                    end = chunk[-1:]


def _check_member_count(raw: BinaryIO, members: int) -> None:
    """Raise BadZipFile unless the end of an archive states this number of members.

    zipfile ignores the number and does not check the size of the directory, which hides members if it is damaged.
    """
    size = raw.seek(0, os.SEEK_END)
    raw.seek(max(0, size - _LONGEST_ZIP_END))
    tail = raw.read()
    record = tail[tail.rfind(_ZIP_END) :]
    stated = int.from_bytes(record[10:12], "little")
    if stated not in (members, _IN_ZIP64):
        raise zipfile.BadZipFile(f"it has {members} of {stated} members")


class _Format(NamedTuple):
    """A compressed format."""

    # The first bytes of a file.
    magic: Tuple[bytes, ...]
    # Yields the content.
    chunks: Callable[[BinaryIO], _Chunks]


# The first bytes of a skippable frame of Zstandard.
_SKIPPABLE = tuple(bytes([low]) + b"\x2a\x4d\x18" for low in range(0x50, 0x60))

# By the suffix of the file.
COMPRESSED: Dict[str, _Format] = {
    ".gz": _Format((b"\x1f\x8b",), partial(_parts, new_part=_gzip_member, padding=1)),
    ".xz": _Format(
        (b"\xfd7zXZ\x00",),
        partial(_parts, new_part=partial(lzma.LZMADecompressor, lzma.FORMAT_XZ), padding=4),
    ),
    ".bz2": _Format((b"BZh",), partial(_parts, new_part=bz2.BZ2Decompressor)),
    ".zst": _Format((b"\x28\xb5\x2f\xfd", *_SKIPPABLE), _zstandard_chunks),
    ".zip": _Format((b"PK",), _zip_chunks),
}
# No text in UTF-8 begins with the first bytes of these formats, so they are unpacked under any name.
_UNMISTAKABLE = (".gz", ".xz", ".zst")
# Texts and tables unpack to 3 to 20 times their size; a large file that unpacks to more was made to exhaust the memory.
MOST_TIMES = 40
ALWAYS_UNPACKED = 1 << 24  # bytes of content


def without_compression(path: PathLike) -> str:
    """Return the path in lower case without the suffix of a compressed file."""
    stem, suffix = os.path.splitext(str(path).lower())
    return stem if suffix in COMPRESSED else stem + suffix


@contextmanager
def open_unpacked(path: PathLike, *, way_out: str = "give an ordinary file") -> Iterator[BinaryIO]:
    """Open an ordinary file for reading bytes, unpacked if its suffix or first bytes are of a compressed file.

    Raises ValueError in one line if this cannot be done. Python's modules read an empty file, and two of them a file of
    zeros, as empty content, so that a lost file would go unnoticed.
    """
    suffix = os.path.splitext(str(path).lower())[1]
    with open_regular(path, way_out=way_out) as raw:
        head = raw.read(6)
        raw.seek(0)
        if suffix not in COMPRESSED:
            names = (name for name in _UNMISTAKABLE if head.startswith(COMPRESSED[name].magic))
            suffix = next(names, "")
        if not suffix:
            yield raw
            return
        format = COMPRESSED[suffix]
        if not head.startswith(format.magic):
            raise ValueError(
                f"{path}: cannot be read as text: empty, damaged or not compressed as its name says; copy it again"
            )
        most = max(ALWAYS_UNPACKED, MOST_TIMES * os.fstat(raw.fileno()).st_size)
        with io.BufferedReader(_Unpacked(format.chunks(raw), path, most), _CHUNK) as counted:
            yield counted


class _Unpacked(io.RawIOBase):
    """The unpacked chunks of a compressed file as a file; ValueError if it is damaged or unpacks to too many bytes."""

    def __init__(self, chunks: _Chunks, path: PathLike, most: int) -> None:
        self._chunks = chunks
        self._path = path
        self._left = most
        self._chunk = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._chunk:
            chunk = self._next_chunk()
            if chunk is None:
                return 0
            self._chunk = memoryview(chunk)
        size = min(len(buffer), len(self._chunk))
        buffer[:size] = self._chunk[:size]
        self._chunk = self._chunk[size:]
        return size

    def _next_chunk(self) -> Optional[bytes]:
        try:
            chunk = next(self._chunks, None)
        except Exception as error:  # each module has errors of its own
            # Errors of bz2 have no number; a damaged archive seeks to an invalid place.
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise
            reason = f"{error}" or "it takes too much memory"
            raise ValueError(
                f"{self._path}: the compressed file is cut or damaged ({reason}); copy it again"
            ) from None
        self._left -= len(chunk or b"")
        if self._left < 0:
            raise ValueError(
                f"{self._path}: unpacks to more than {MOST_TIMES} times its size; unpack it first, if that is right"
            )
        return chunk
