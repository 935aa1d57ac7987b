"""GREEDY, the packing of T5: sequences are concatenated as they arrive. `python -m pack_data.greedy`.

A pack is closed as soon as the next sequence does not fit or the depth is reached; no sequence goes into an earlier
pack (next fit). The result depends on the order of arrival, which is an argument or drawn from a seed.
"""

from __future__ import annotations

import time
from typing import Any, Iterator, List, Optional, Tuple

import numpy as np

from pack_data.cli.terminal import progress_bar
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.reading.fields import packing_depth, whole_number

_CHUNK = 1 << 20  # sequences per NumPy call, so that lists of them stay small


def pack(
    histogram: LengthHistogram,
    *,
    max_sequences_per_pack: Optional[int],
    order: Any = None,
    seed: int = 0,
) -> Packing:
    """Pack in arrival order.

    Time and memory grow with the number of sequences, unlike those of the histogram packers: about 30 bytes per
    sequence and 200 bytes per strategy; a random order gives nearly as many strategies as packs.

    Args:
        histogram: lengths to pack.
        max_sequences_per_pack: packing depth; None for unlimited.
        order: lengths in the order of arrival, whole numbers [n] with the counts of the histogram; None draws a random
            order.
        seed: draws the order.

    Raises:
        ValueError: `order` and the histogram differ.
    """
    max_sequences_per_pack = packing_depth(max_sequences_per_pack)
    seed = whole_number("seed", seed, least=0)
    start = time.perf_counter()
    if order is None:
        lengths = np.repeat(histogram.lengths.astype(np.int32), histogram.counts[histogram.lengths])
        np.random.default_rng(seed).shuffle(lengths)
    else:
        lengths = np.asarray(order)
        counted = LengthHistogram.from_lengths(lengths, histogram.max_sequence_length, "order")
        if counted != histogram:
            raise ValueError(
                "order: its lengths do not add up to the histogram; pass the lengths that were counted"
            )
        lengths = lengths.ravel().astype(np.int32)

    S = histogram.max_sequence_length
    depth = len(lengths) if max_sequences_per_pack is None else max_sequences_per_pack
    starts = _pack_starts(lengths, S, depth)
    # The strategies are merged already, so Packing.of, which would merge them again, is not needed.
    packs = sorted(_count_strategies(lengths, starts, S), reverse=True)
    return Packing(
        "greedy",
        S,
        max_sequences_per_pack,
        tuple(strategy for strategy, _ in packs),
        tuple(count for _, count in packs),
        solve_seconds=time.perf_counter() - start,
    )


def _pack_starts(lengths: np.ndarray, S: int, D: int) -> np.ndarray:
    """Return the first sequence of each pack, and at the end the number of sequences, int64 [packs + 1]."""
    ends = np.cumsum(lengths, dtype=np.int64)
    starts: List[np.ndarray] = []
    next_start = 0
    with progress_bar(len(lengths), "greedy", unit=" sequences") as bar:
        for begin in range(0, len(lengths), _CHUNK):
            first = np.arange(begin, min(begin + _CHUNK, len(lengths)))
            # The start of the next pack if a pack starts at `first`; packs may reach into the next chunk.
            tokens_before = ends[first] - lengths[first]
            next_too_long = np.searchsorted(ends, tokens_before + S, side="right")
            following = np.minimum(next_too_long, first + D).tolist()
            starts_in_chunk = []
            while next_start < begin + len(following):
                starts_in_chunk.append(next_start)
                next_start = following[next_start - begin]
            starts.append(np.array(starts_in_chunk, np.int64))
            bar.update(len(first))
    end = np.array([len(lengths)], np.int64)
    return np.concatenate([*starts, end])


def _count_strategies(
    lengths: np.ndarray, starts: np.ndarray, S: int
) -> Iterator[Tuple[Tuple[int, ...], int]]:
    """Yield the packs as (lengths, count), longest length first, one depth at a time to save memory."""
    depths = np.diff(starts)
    # Sorting these keys sorts the lengths inside each pack; their high part is the number of the pack.
    pack_keys = np.arange(len(depths), dtype=np.int64) * (S + 1)
    keys = np.repeat(pack_keys, depths) + (S - lengths)
    keys.sort()
    ordered = (S - keys % (S + 1)).astype(np.int32)
    del keys
    for depth in np.unique(depths).tolist():
        starts_of_depth = starts[:-1][depths == depth]
        rows = ordered[starts_of_depth[:, None] + np.arange(depth)]
        yield from _count_rows(rows, S)


def _count_rows(rows: np.ndarray, S: int) -> Iterator[Tuple[Tuple[int, ...], int]]:
    """Return the distinct rows of int32 [packs, depth], each with its count."""
    bits = S.bit_length()
    # Rows are compared by keys of int64, which is much faster; a key holds this many lengths.
    lengths_per_key = 62 // bits
    keys = []
    for column in range(0, rows.shape[1], lengths_per_key):
        key = np.zeros(len(rows), np.int64)
        for values in rows[:, column : column + lengths_per_key].T:
            key = (key << bits) | values
        keys.append(key)
    key_rows = keys[0]
    axis = None
    if len(keys) > 1:
        key_rows = np.stack(keys, axis=1)
        axis = 0
    _, firsts, counts = np.unique(key_rows, return_index=True, return_counts=True, axis=axis)
    return zip(map(tuple, rows[firsts].tolist()), counts.tolist())


if __name__ == "__main__":
    from pack_data.lengths.packer_command import run

    raise SystemExit(run("greedy"))
