"""Which pack, and which place in it, each sequence of a list of lengths gets; vectorised over all sequences."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple, Sequence, Union

import numpy as np

from pack_data.packing.packing import Packing
from pack_data.store.packs import smallest_type


class _Assignment(NamedTuple):
    """Sequence i is number slot[i], from 0, of pack pack[i]. Both are integers [sequences] of the smallest type."""

    pack: np.ndarray
    slot: np.ndarray


# More sequences than this are assigned on disk (assignment_on_disk.py): so many need 320 MiB.
IN_MEMORY = 1 << 24
# Sequences handled at a time. So many fit the processor's cache, where a random access takes a tenth of the time.
_BLOCK = 1 << 16


class Places(NamedTuple):
    """All places of a packing, by length and then by strategy. An entry is one slot of one strategy; it stands for
    `repeat` packs with consecutive numbers from `base` on."""

    deepest: int  # sequences of the deepest pack, at least 1
    packs: int
    dtype: np.dtype  # of a place, pack * deepest + slot
    starts: np.ndarray  # int64 [S + 2]: how many places there are for shorter lengths
    base: np.ndarray  # int64 [entries]
    repeat: np.ndarray  # int64 [entries]
    slot: np.ndarray  # int64 [entries]

    @property
    def ends(self) -> np.ndarray:
        """int64 [entries]: places up to and with each entry."""
        ends: np.ndarray = np.cumsum(self.repeat)
        return ends

    @classmethod
    def of(cls, packing: Packing) -> Places:
        depths, repeats = packing.depths, np.array(packing.repeats, dtype=np.int64)
        packs, deepest = int(repeats.sum()), max(packing.largest_depth, 1)
        slot = np.arange(int(depths.sum())) - np.repeat(np.cumsum(depths) - depths, depths)
        lengths = np.fromiter(chain.from_iterable(packing.strategies), np.int64, len(slot))
        order = np.argsort(lengths, kind="stable")
        return cls(
            deepest,
            packs,
            np.dtype(np.int32 if packs * deepest < 1 << 31 else np.int64),
            np.concatenate([[0], np.cumsum(packing.placed())]),
            np.repeat(np.cumsum(repeats) - repeats, depths)[order],
            np.repeat(repeats, depths)[order],
            slot[order],
        )


def assign(lengths: np.ndarray, packing: Packing, seed: Union[int, Sequence[int]]) -> _Assignment:
    """Assigns every sequence to a pack: at random among the sequences of its length, and the packs in random order.

    lengths: whole numbers [n], as many of each length as the packing places; ValueError otherwise. seed: one number or
    several, such as (seed, epoch). Needs about 20 bytes for each sequence.
    """
    lengths = np.asarray(lengths)
    S = packing.max_sequence_length
    _check_lengths(lengths, packing)
    rng = np.random.default_rng(seed)

    # All places, numbered pack * deepest + slot, sorted by the length that each place is for.
    all_places = Places.of(packing)
    place_type, deepest, repeat = all_places.dtype.type, all_places.deepest, all_places.repeat
    places = np.repeat((all_places.base - (all_places.ends - repeat)).astype(place_type), repeat)
    places += np.arange(len(places), dtype=place_type)
    places = _shuffled_numbers(all_places.packs, place_type, rng)[places]
    places *= place_type(deepest)
    places += np.repeat(all_places.slot.astype(place_type), repeat)

    # The places of each length are shuffled; the sequences of that length then take them in their own order.
    several = np.flatnonzero(np.diff(all_places.starts) > 1)  # a single one needs no random number
    for start, end in zip(all_places.starts[several].tolist(), all_places.starts[several + 1].tolist()):
        rng.shuffle(places[start:end])
    # NumPy sorts numbers of sixteen bits by radix, four times as fast as by comparison.
    key_type = np.uint16 if S < 1 << 16 else np.uint32
    pack: np.ndarray = np.empty(len(lengths), dtype=place_type)
    slot = np.empty(len(lengths), dtype=smallest_type(deepest - 1))
    dealt = all_places.starts[:-1].copy()
    for start in range(0, len(lengths), _BLOCK):
        keys = lengths[start : start + _BLOCK].astype(key_type)
        order = np.argsort(keys, kind="stable")
        found = np.bincount(keys, minlength=S + 1)
        nth = np.repeat(dealt - (np.cumsum(found) - found), found)
        nth += np.arange(len(keys))
        dealt += found
        place: np.ndarray = np.empty(len(keys), dtype=place_type)
        place[order] = places[nth]
        np.floor_divide(place, place_type(deepest), out=pack[start : start + _BLOCK])
        slot[start : start + _BLOCK] = place - pack[start : start + _BLOCK] * place_type(deepest)
    return _Assignment(pack, slot)


def _check_lengths(lengths: np.ndarray, packing: Packing) -> None:
    S, placed = packing.max_sequence_length, packing.placed()
    found = np.zeros(S + 1, dtype=np.int64)
    for start in range(0, len(lengths), _BLOCK):
        block = lengths[start : start + _BLOCK]
        if not 1 <= int(block.min()) <= int(block.max()) <= S:
            raise ValueError(
                f"lengths go from {int(block.min())} to {int(block.max())}; the packing is for lengths from 1 to {S}"
            )
        found += np.bincount(block.astype(np.int64, copy=False), minlength=S + 1)
    differs = np.flatnonzero(found != placed)
    if len(differs):
        length = int(differs[0])
        raise ValueError(
            f"there are {int(found[length])} sequences of length {length}, the packing places {int(placed[length])}; "
            "make a packing of these lengths"
        )


def _shuffled_numbers(count: int, dtype: type, rng: np.random.Generator) -> np.ndarray:
    """A random permutation of 0..count - 1: each number goes to a random bucket, and each bucket, small enough for the
    processor's cache, is shuffled."""
    buckets = rng.integers(0, 256, count, dtype=np.uint8)
    numbers: np.ndarray = np.argsort(buckets, kind="stable").astype(dtype)
    ends = np.cumsum(np.bincount(buckets, minlength=256))
    for start, end in zip((ends - np.bincount(buckets, minlength=256)).tolist(), ends.tolist()):
        rng.shuffle(numbers[start:end])
    return numbers
