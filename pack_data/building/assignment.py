"""The pack, and the place in it, of each sequence of a list of lengths; vectorised over all sequences."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple, Sequence, Union

import numpy as np

from pack_data.packing.packing import Packing
from pack_data.store.sequences import smallest_type

# More sequences than this are assigned on disk (assignment_on_disk.py): this many need 320 MiB.
IN_MEMORY = 1 << 24
# Sequences handled at a time: they fit the processor's cache, where a random access takes a tenth of the time.
_BLOCK = 1 << 16
# Buckets of a random permutation, small enough for the processor's cache; their numbers are of type uint8.
_BUCKETS = 256


class _Assignment(NamedTuple):
    """Sequence i is number slot[i], from 0, of pack pack[i]. Both are integers [sequences] of the smallest type."""

    pack: np.ndarray
    slot: np.ndarray


class Places(NamedTuple):
    """All places of a packing, by length and then by strategy.

    An entry is one slot of one strategy; it stands for `repeat` packs with consecutive numbers from `base` on.
    """

    deepest: int  # sequences of the deepest pack, at least 1
    packs: int
    dtype: np.dtype  # of a place, pack * deepest + slot
    starts: np.ndarray  # int64 [S + 2]: the number of places for shorter lengths
    base: np.ndarray  # int64 [entries]
    repeat: np.ndarray  # int64 [entries]
    ends: np.ndarray  # int64 [entries]: places up to and including each entry
    slot: np.ndarray  # int64 [entries]

    @classmethod
    def of(cls, packing: Packing) -> Places:
        """Return the places of a packing."""
        depths = packing.depths
        repeats = np.array(packing.repeats, dtype=np.int64)
        packs = int(repeats.sum())
        deepest = max(packing.largest_depth, 1)
        first_packs = np.cumsum(repeats) - repeats
        first_entries = np.cumsum(depths) - depths
        slot = np.arange(int(depths.sum())) - np.repeat(first_entries, depths)
        lengths = np.fromiter(chain.from_iterable(packing.strategies), np.int64, len(slot))
        order = np.argsort(lengths, kind="stable")
        repeat = np.repeat(repeats, depths)[order]
        place_type = np.int32 if packs * deepest < 1 << 31 else np.int64
        return cls(
            deepest,
            packs,
            np.dtype(place_type),
            starts=np.concatenate([[0], np.cumsum(packing.placed())]),
            base=np.repeat(first_packs, depths)[order],
            repeat=repeat,
            ends=np.cumsum(repeat),
            slot=slot[order],
        )


def assign(lengths: np.ndarray, packing: Packing, seed: Union[int, Sequence[int]]) -> _Assignment:
    """Assign every sequence to a pack: at random among the sequences of its length, and the packs in random order.

    It needs about 20 bytes for each sequence.

    Args:
        lengths: Whole numbers [n], as many of each length as the packing places.
        packing: The packs.
        seed: One number or several, such as (seed, epoch).

    Raises:
        ValueError: If the packing is not for these lengths.
    """
    lengths = np.asarray(lengths)
    S = packing.max_sequence_length
    _check_lengths(lengths, packing)
    rng = np.random.default_rng(seed)

    # All places, numbered pack * deepest + slot, sorted by the length that each place is for.
    all_places = Places.of(packing)
    place_type = all_places.dtype.type
    deepest = place_type(all_places.deepest)
    repeat = all_places.repeat
    first_places = all_places.ends - repeat
    packs_before = (all_places.base - first_places).astype(place_type)
    places = np.repeat(packs_before, repeat)
    places += np.arange(len(places), dtype=place_type)
    places = _shuffled_numbers(all_places.packs, place_type, rng)[places]
    places *= deepest
    places += np.repeat(all_places.slot.astype(place_type), repeat)

    # The places of each length are shuffled; the sequences of that length then take them in order.
    starts = all_places.starts.tolist()
    for start, end in zip(starts, starts[1:]):
        if end - start > 1:  # a single one needs no random number
            rng.shuffle(places[start:end])

    # NumPy sorts numbers of 16 bits by radix, four times as fast as by comparison.
    key_type = np.uint16 if S < 1 << 16 else np.uint32
    pack: np.ndarray = np.empty(len(lengths), dtype=place_type)
    slot = np.empty(len(lengths), dtype=smallest_type(all_places.deepest - 1))

    next_place = all_places.starts[:-1].copy()
    for start in range(0, len(lengths), _BLOCK):
        keys = lengths[start : start + _BLOCK].astype(key_type)
        order = np.argsort(keys, kind="stable")
        counts = np.bincount(keys, minlength=S + 1)
        nth = np.repeat(next_place - (np.cumsum(counts) - counts), counts)
        nth += np.arange(len(keys))
        next_place += counts
        place: np.ndarray = np.empty(len(keys), dtype=place_type)
        place[order] = places[nth]
        pack_of_block = pack[start : start + _BLOCK]
        np.floor_divide(place, deepest, out=pack_of_block)
        slot[start : start + _BLOCK] = place - pack_of_block * deepest
    return _Assignment(pack, slot)


def _check_lengths(lengths: np.ndarray, packing: Packing) -> None:
    """Raise ValueError unless the packing places exactly these lengths."""
    S = packing.max_sequence_length
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= S:
        raise ValueError(
            f"lengths go from {lengths.min()} to {lengths.max()}; the packing is for lengths from 1 to {S}"
        )
    counts = np.zeros(S + 1, dtype=np.int64)
    for start in range(0, len(lengths), _BLOCK):
        block = lengths[start : start + _BLOCK].astype(np.int64, copy=False)
        counts += np.bincount(block, minlength=S + 1)
    placed = packing.placed()
    differs = np.flatnonzero(counts != placed)
    if len(differs):
        length = int(differs[0])
        raise ValueError(
            f"there are {int(counts[length])} sequences of length {length}, the packing places {int(placed[length])}; "
            "make a packing of these lengths"
        )


def _shuffled_numbers(count: int, dtype: type, rng: np.random.Generator) -> np.ndarray:
    """Return a random permutation of 0..count - 1: numbers go to random buckets, and each bucket is shuffled."""
    buckets = rng.integers(0, _BUCKETS, count, dtype=np.uint8)
    numbers: np.ndarray = np.argsort(buckets, kind="stable").astype(dtype)
    sizes = np.bincount(buckets, minlength=_BUCKETS)
    ends = np.cumsum(sizes)
    for start, end in zip((ends - sizes).tolist(), ends.tolist()):
        rng.shuffle(numbers[start:end])
    return numbers
