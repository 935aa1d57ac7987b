"""Checksums of a shard's records, a block of packs at a time, so that a reader of few packs sees damage in them.

The sha256 of a shard needs the whole shard.  A block is about 1 MiB: it is read and checked when its first pack is
asked for, and with one pass over the data all of it is.  The function is zlib's crc32, which every Python has: it takes
less than a microsecond a pack (`python -m pack_data.benchmark` measures it).  It finds what a disk or a copy changes;
against somebody who changes packs on purpose only the sha256 helps.
"""

from __future__ import annotations

import zlib
from dataclasses import asdict, dataclass
from typing import Any, Dict

import numpy as np

# Bytes of records under one checksum, about: 750 packs at 512.
BLOCK_BYTES = 1 << 20
_DIGITS = 8  # of a checksum, hexadecimal


@dataclass(frozen=True)
class Blocks:
    """The checksums of a shard: the crc32 of each `packs` records, the last of those that are left, one behind another.

    crc32: 8 hexadecimal digits for each block.
    """

    packs: int
    crc32: str

    @classmethod
    def of(cls, records: np.ndarray, packs: int = 0) -> Blocks:
        """Those of the records of a shard; packs: in a block, 0 for as many as make BLOCK_BYTES."""
        packs = packs or max(1, BLOCK_BYTES // records.dtype.itemsize)
        return cls(packs, "".join(checksum(records[at : at + packs]) for at in range(0, len(records), packs)))

    @classmethod
    def from_json(cls, data: Any, records: int) -> Blocks:
        """ValueError where these are not checksums of a shard of `records` packs."""
        blocks = cls(**data)
        if type(blocks.packs) is not int or blocks.packs < 1:
            raise ValueError(f"blocks.packs is {blocks.packs!r}; a block holds 1 pack or more")
        wanted = blocks.count(records) * _DIGITS
        digits = blocks.crc32
        if type(digits) is not str or len(digits) != wanted or set(digits) - set("0123456789abcdef"):
            raise ValueError(f"blocks.crc32 must be {wanted} hexadecimal digits for {records} packs")
        return blocks

    def to_json(self) -> Dict[str, Any]:
        return asdict(self)

    def count(self, records: int) -> int:
        """Blocks of a shard of `records` packs."""
        return -(-records // self.packs)

    def damaged(self, records: np.ndarray, block: int) -> bool:
        """Whether the records of a block are not those that were written; `records`: of the whole shard."""
        first = block * self.packs
        return checksum(records[first : first + self.packs]) != self.crc32[block * _DIGITS : (block + 1) * _DIGITS]


def checksum(records: np.ndarray) -> str:
    """8 hexadecimal digits."""
    return f"{zlib.crc32(records.view(np.uint8).data):0{_DIGITS}x}"
