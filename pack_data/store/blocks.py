"""Checksums of a table's records, a block of packs at a time, so that a reader of few packs sees damage in them.

The sha256 of a shard (or of the table of lengths) needs all of it.  A block is about 1 MiB: it is read and checked when
its first pack is asked for, and with one pass over the data all of it is; what a disk changes after that is not seen.
The checksums stand in the manifest, so one rename adds them to a data set, and with it to all of it or to nothing.  The
function is zlib's crc32, which every Python has: it takes less than a microsecond a pack, so that a faster one would be
one dependency more for nothing (`python -m pack_data.benchmark` measures it).  It finds what a disk or a copy changes;
against somebody who changes packs on purpose only the sha256 helps.
"""

from __future__ import annotations

import zlib
from dataclasses import asdict, dataclass
from typing import Any, Dict, List

import numpy as np

from pack_data.reading.fields import Fields

# Bytes of records under one checksum, about: 750 packs at 512.
BLOCK_BYTES = 1 << 20
_DIGITS = 8  # of a checksum, hexadecimal


@dataclass(frozen=True)
class ChecksumBlocks:
    """The checksums of a shard: the crc32 of each `packs` records, the last of those that are left.

    crc32: 8 hexadecimal digits for each block, one behind another.
    """

    packs: int
    crc32: str

    @classmethod
    def of(cls, records: np.ndarray) -> ChecksumBlocks:
        """Those of the records of a whole shard."""
        sums = RunningBlocks(records.dtype)
        sums.add(records)
        return sums.blocks()

    @classmethod
    def from_json(cls, fields: Fields, records: int) -> ChecksumBlocks:
        """ValueError where these are not checksums of a shard of `records` packs."""
        fields.only("packs", "crc32")
        packs = fields.integer("packs", least=1, most=2**62)
        return cls(packs, fields.hex_digest("crc32", -(-records // packs) * _DIGITS))

    def to_json(self) -> Dict[str, Any]:
        return asdict(self)

    def count(self, records: int) -> int:
        """Blocks of a shard of `records` packs."""
        return -(-records // self.packs)

    def damaged(self, records: np.ndarray, block: int) -> bool:
        """Whether the records of a block are not those that were written; `records`: of the whole shard."""
        first = block * self.packs
        return (
            _digits(crc32(records[first : first + self.packs])) != self.crc32[block * _DIGITS : (block + 1) * _DIGITS]
        )


class RunningBlocks:
    """The checksums of records that are written bit by bit."""

    def __init__(self, dtype: np.dtype) -> None:
        self._packs = max(1, BLOCK_BYTES // dtype.itemsize)
        self._whole: List[str] = []
        self._sum, self._begun = 0, 0

    def add(self, records: np.ndarray) -> None:
        while len(records):
            part = records[: self._packs - self._begun]
            self._sum = crc32(part, self._sum)
            self._begun += len(part)
            if self._begun == self._packs:
                self._whole.append(_digits(self._sum))
                self._sum, self._begun = 0, 0
            records = records[len(part) :]

    def blocks(self) -> ChecksumBlocks:
        return ChecksumBlocks(self._packs, "".join(self._whole) + (_digits(self._sum) if self._begun else ""))


def crc32(records: np.ndarray, before: int = 0) -> int:
    """The checksum of records that follow others with the checksum `before`."""
    return zlib.crc32(np.ascontiguousarray(records).view(np.uint8).data, before)


def _digits(value: int) -> str:
    return f"{value:0{_DIGITS}x}"
