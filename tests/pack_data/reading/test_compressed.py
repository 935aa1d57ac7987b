"""Laws of compressed files of several parts: all parts are read, and a flipped bit is never a loss in silence."""

import bz2
import gzip
import io
import lzma
import random
import tracemalloc
import zipfile

import pytest

from pack_data.reading.compressed import open_unpacked, without_compression

PARTS = [b"one\n" * 9, b"", b"two\n", b"three\n" * 20]
# The length of a skippable frame has no checksum, so here no flipped length ends where another frame begins.
SKIPPABLE = b"\x50\x2a\x4d\x18\x06\0\0\0a part" + b"\x5f\x2a\x4d\x18" + bytes(4)


def zst(part):
    return pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress(part)


def archive(parts):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as opened:
        for number, part in enumerate(parts):
            # A name of 18 bytes makes a record of 64 bytes, so that one bit of the directory's size hides a member;
            # one bit makes the last letter a slash, as of a directory.
            opened.writestr(f"part-{number}-of-a-texto", part, zipfile.ZIP_STORED if number == 2 else None)
    return file.getvalue()


def joined(compress, between=b"", before=b"", after=b""):
    return lambda parts: before + between.join(map(compress, parts)) + after


# Suffix and layout -> the compressed file of some parts.
LAYOUTS = {
    ".gz": joined(gzip.compress),
    ".gz padded": joined(gzip.compress, bytes(3), after=bytes(512)),
    ".bz2": joined(lambda part: bz2.compress(part, 1)),
    ".xz": joined(lzma.compress),
    ".xz padded": joined(lzma.compress, bytes(4), after=bytes(8)),
    ".zst": joined(zst),
    ".zst skippable": joined(zst, SKIPPABLE, SKIPPABLE, SKIPPABLE),
    ".zip": archive,
}
DAMAGED = {
    ".gz": joined(gzip.compress, b"\0more"),
    ".bz2": joined(bz2.compress, b"\0"),
    ".bz2 end": joined(bz2.compress, after=b"more"),
    ".xz": joined(lzma.compress, bytes(3)),
    ".xz end": joined(lzma.compress, after=bytes(5)),
    ".xz begin": joined(lzma.compress, before=bytes(4)),
    ".zst": joined(zst, bytes(4)),
    ".zst cut": joined(zst, after=SKIPPABLE[:-1]),
}


def content(path):
    with open_unpacked(path) as file:
        return file.read()


def test_the_suffix_of_a_compressed_file_is_left_out_and_no_other():
    for suffix in {layout.split()[0] for layout in LAYOUTS}:
        assert without_compression(f"A.jsonl{suffix.upper()}") == "a.jsonl"
    for name in ("a.jsonl", "a", "b.gz.txt"):
        assert without_compression(name) == name


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 8], ids=["every bit", "a bit a byte"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_parts_are_read_and_a_flipped_bit_is_refused_or_changes_nothing(tmp_path, layout, every):
    path = tmp_path / f"a.jsonl{layout.split()[0]}"
    sound = LAYOUTS[layout](PARTS)
    path.write_bytes(sound)
    expected = b"".join(PARTS)
    assert content(path) == expected
    refused = 0
    draw = random.Random(0)
    bits = [first + draw.randrange(every) for first in range(0, 8 * len(sound), every)]
    if layout == ".zip":  # its end, the size of the directory among it, decides which members there are
        bits += range(8 * sound.rindex(b"PK\5\6"), 8 * len(sound))
    for bit in bits:
        flipped = bytearray(sound)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            assert content(path) == expected, f"bit {bit}"
        except ValueError as error:
            assert str(path) in str(error)
            assert "copy it again" in str(error)
            refused += 1
    assert refused > len(sound) / every


def test_only_the_padding_of_the_format_stands_between_parts(tmp_path):
    for layout, damage in DAMAGED.items():
        path = tmp_path / f"a.jsonl{layout.split()[0]}"
        path.write_bytes(damage(PARTS))
        with pytest.raises(ValueError, match="copy it again"):
            content(path)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_memory_is_flat_for_many_parts(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    part = LAYOUTS[suffix]([b"0123456789abcdef" * 1000])
    peaks = []
    for parts in (40, 40, 400):
        path.write_bytes(part * parts)
        tracemalloc.start()
        with open_unpacked(path) as file:
            size = sum(len(block) for block in iter(lambda: file.read(1 << 16), b""))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert size == parts * 16000
    assert peaks[2] < peaks[1] + (1 << 18)
