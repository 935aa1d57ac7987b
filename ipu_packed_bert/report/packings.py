"""Packings of a histogram for the report's rows, computed once and kept: a packer's result never changes."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Dict, NamedTuple, Optional, Sequence, Tuple

import numpy as np

import pack_data
from ipu_packed_bert.cycles.matmul import write_cache
from pack_data.histogram import LengthHistogram
from pack_data.packers import get_packer

PackingKey = Tuple[str, Optional[int]]  # packer, packing depth (None: unlimited)


class PackingSummary(NamedTuple):
    """What the report needs of a packing."""

    algorithm: str
    max_sequences_per_pack: Optional[int]
    packs: int
    efficiency: float
    packing_factor: float
    largest_depth: int
    lower_bound: Optional[int]


def _pack_one(counts: Tuple[int, ...], name: str, algorithm: str, depth: Optional[int]) -> PackingSummary:
    """Run one packer, in whichever process: counts[l] sequences of length l."""
    histogram = LengthHistogram(np.array(counts, dtype=np.int64), name)
    made = get_packer(algorithm)(histogram, max_sequences_per_pack=depth)
    return PackingSummary(
        algorithm, depth, made.packs, made.efficiency, made.packing_factor, made.largest_depth, made.lower_bound
    )


class Packings:
    """Packings by packer and depth; those that are not in the cache are made in a second process from the start on."""

    def __init__(self, histogram: LengthHistogram, folder: Optional[Path], wanted: Sequence[PackingKey]):
        self.histogram = histogram
        self.folder = folder
        self._counts = tuple(int(count) for count in histogram.counts)
        self._known: Dict[PackingKey, PackingSummary] = {}
        self._pending: Dict[PackingKey, Future] = {}
        self._pool: Optional[ProcessPoolExecutor] = None
        digest = _sources_digest()
        for key in wanted:
            stored = self._read(digest, key)
            if stored is not None:
                self._known[key] = stored
            elif key[0] == "none":
                self._known[key] = _pack_one(self._counts, histogram.name, *key)
            else:
                if self._pool is None:  # one beside this one: the smallest machine has two cores
                    self._pool = ProcessPoolExecutor(max_workers=1)
                self._pending[key] = self._pool.submit(_pack_one, self._counts, histogram.name, *key)
        self._digest = digest

    def __getitem__(self, key: PackingKey) -> PackingSummary:
        if key not in self._known:
            self._known[key] = self._pending.pop(key).result()
            path = self._path(self._digest, key)
            if path is not None:
                write_cache(path, json.dumps(self._known[key]._asdict()))
        return self._known[key]

    def close(self) -> None:
        """Cancel what has not begun and wait for the rest."""
        for pending in self._pending.values():
            pending.cancel()
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _path(self, digest: str, key: PackingKey) -> Optional[Path]:
        if self.folder is None:
            return None
        name = hashlib.sha256(repr((digest, self._counts, key)).encode()).hexdigest()[:24]
        return self.folder / f"packing_{name}.json"

    def _read(self, digest: str, key: PackingKey) -> Optional[PackingSummary]:
        path = self._path(digest, key)
        if path is None:
            return None
        try:
            return PackingSummary(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # absent or damaged: pack again
            return None


def packed_factor(histogram: LengthHistogram, folder: Optional[Path], packer: str, depth: Optional[int]) -> float:
    """The packing factor of one packing, from the cache where it is known."""
    packings = Packings(histogram, folder, [(packer, depth)])
    try:
        return packings[packer, depth].packing_factor
    finally:
        packings.close()


def _sources_digest() -> str:
    """Changes whenever a packer's source does."""
    digest = hashlib.sha256()
    for path in sorted(Path(pack_data.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
