"""A new pairing each epoch: the same sequences under the same recipe, but other ones share a pack.

Nothing is written. The table of lengths says what every place of every pack holds; the sequences of one length change
places at random, by seed and epoch, and a pack is put together from its sources when it is read. So it is ready in
seconds for millions of packs, and (epoch, pack) says all there is to know about where a run stands.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Optional

import numpy as np

from pack_data.packs import PREDICTION, PackSchema, assemble, decode, disassemble
from pack_data.store import Manifest, PackStore


class RedrawnStore:
    """A data set as another epoch pairs it, with the interface of PackStore.

    Pack i has sequences of the same lengths as pack i of the data set, so counts, recipe and bound stay what they were.
    Sequences change places with others of the same length and number of masked tokens: no pack becomes overfull.
    """

    def __init__(self, store: PackStore, epoch: int, seed: Optional[int] = None, keep: Optional[np.ndarray] = None) -> None:
        """epoch 0 is the data set as it is; `seed` None means the data set's own; `keep`: numbers of packs that stay as they
        are, such as those held out for evaluation."""
        self._store = store
        self.schema: PackSchema = store.schema
        self.manifest: Manifest = store.manifest
        self.folder: Path = store.folder
        self.epoch = epoch
        self._source = _redraw(store, epoch, store.manifest.seed if seed is None else seed, keep)

    def __len__(self) -> int:
        return len(self._store)

    def records(self, indices: np.ndarray) -> np.ndarray:
        """The records of packs `indices` int64 [n], put together from their sources."""
        depth = self.schema.max_sequences_per_pack
        indices = np.asarray(indices, dtype=np.int64)
        places = self._source[indices]                                    # [n, D], -1 where no sequence stands
        row, slot = np.nonzero(places >= 0)
        source_pack, source_slot = np.divmod(places[row, slot].astype(np.int64), depth)
        packs, which = np.unique(source_pack, return_inverse=True)
        records = self._store.records(packs)
        before = np.concatenate([[0], np.cumsum((records["lengths"] > 0).sum(axis=1))])
        sequences = disassemble(self.schema, records).take(before[which.reshape(-1)] + source_slot)
        return assemble(self.schema, sequences, row, slot, len(indices))

    def batch(self, indices: np.ndarray) -> Dict[str, np.ndarray]:
        """As PackStore.batch."""
        return decode(self.schema, self.records(indices))

    def lengths(self) -> np.ndarray:
        return self._store.lengths()

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> "RedrawnStore":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _redraw(store: PackStore, epoch: int, seed: int, keep: Optional[np.ndarray]) -> np.ndarray:
    """For every place the place in the data set whose sequence it gets: pack * D + slot, [packs, D], -1 for none."""
    table = store.lengths()
    lengths = np.ascontiguousarray(table["lengths"])
    place_type = np.int32 if lengths.size < 1 << 31 else np.int64
    source = np.where(lengths > 0, np.arange(lengths.size, dtype=place_type).reshape(lengths.shape), place_type(-1))
    if epoch == 0:
        return source
    free = lengths > 0
    if keep is not None:
        free[keep] = False
    places = source[free]
    keys: np.ndarray = lengths[free].astype(np.uint32)
    if store.schema.on(PREDICTION):
        keys *= np.uint32(store.schema.max_predictions_per_pack + 1)
        keys += table["prediction_counts"][free]
    # The keys that occur are few; numbered with sixteen bits they are sorted by radix.
    numbers = np.cumsum(np.bincount(keys) > 0) - 1 if len(keys) else np.zeros(1, np.int64)
    keys = numbers.astype(np.uint16 if numbers[-1] < 1 << 16 else np.uint32)[keys]
    order = np.argsort(keys, kind="stable")
    by_key = places[order]
    ends = np.cumsum(np.bincount(keys)).tolist()
    rng = np.random.default_rng([seed, epoch])
    for start, end in zip([0] + ends[:-1], ends):
        rng.shuffle(by_key[start:end])
    places[order] = by_key
    source[free] = places
    return source
