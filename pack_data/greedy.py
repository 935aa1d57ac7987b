"""GREEDY, as T5 packs: sequences are concatenated as they arrive. `python -m pack_data.greedy`.

A pack is closed as soon as the next sequence does not fit, or the depth is reached; nothing is ever put into an earlier
pack (next fit). The result depends on the order of arrival, so it takes an order, or a seed that draws one.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Iterator, List, Optional, Tuple

import numpy as np

from pack_data.cli.command import count_from_zero, progress_bar, run_main
from pack_data.lengths.packer_command import run_packer
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.reading.fields import packing_depth, whole_number

_CHUNK = 1 << 20  # sequences looked at together


def pack(
    histogram: LengthHistogram,
    *,
    max_sequences_per_pack: Optional[int],
    order: Any = None,
    seed: int = 0,
) -> Packing:
    """Pack in arrival order.

    order: the lengths in the order of arrival (array-like, whole numbers), which must add up to the histogram; without
    it, the sequences of the histogram arrive in a random order drawn from the seed.
    Time and memory grow with the number of sequences, unlike those of the histogram packers: about 30 bytes a sequence,
    and 200 bytes a strategy; a random order makes nearly as many strategies as packs.
    """
    max_sequences_per_pack = packing_depth(max_sequences_per_pack)
    seed = whole_number("seed", seed, least=0)
    start = time.perf_counter()
    if order is None:
        lengths = np.repeat(histogram.lengths.astype(np.int32), histogram.counts[histogram.lengths])
        np.random.default_rng(seed).shuffle(lengths)
    else:
        lengths = np.asarray(order)
        if (
            LengthHistogram.from_lengths(lengths, histogram.max_sequence_length, "order")
            != histogram
        ):
            raise ValueError(
                "order: its lengths do not add up to the histogram; pass the lengths that were counted"
            )
        lengths = lengths.ravel().astype(np.int32)
    S = histogram.max_sequence_length
    starts = _pack_starts(
        lengths, S, len(lengths) if max_sequences_per_pack is None else max_sequences_per_pack
    )
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
    """int64 [packs + 1]: the first sequence of each pack, and the number of sequences."""
    ends = np.cumsum(lengths, dtype=np.int64)
    starts: List[np.ndarray] = []
    at = 0
    with progress_bar(len(lengths), "greedy", unit=" sequences") as bar:
        for begin in range(0, len(lengths), _CHUNK):
            first = np.arange(begin, min(begin + _CHUNK, len(lengths)))
            # the sequence that opens the next pack, if `first` opened one; packs may reach into the next chunk
            following = np.searchsorted(ends, ends[first] - lengths[first] + S, side="right")
            jumps = np.minimum(following, first + D).tolist()
            chain = []
            while at < begin + len(jumps):
                chain.append(at)
                at = jumps[at - begin]
            starts.append(np.array(chain, np.int64))
            bar.update(len(first))
    return np.concatenate(starts + [np.array([len(lengths)], np.int64)])


def _count_strategies(
    lengths: np.ndarray, starts: np.ndarray, S: int
) -> Iterator[Tuple[Tuple[int, ...], int]]:
    """Yield the packs as (lengths, count), longest length first, one depth at a time to save memory."""
    depths = np.diff(starts)
    # Sorts the lengths inside each pack; the high part of a key is the pack's number, so packs keep their order.
    keys = np.repeat(np.arange(len(depths), dtype=np.int64) * (S + 1), depths) + (S - lengths)
    keys.sort()
    ordered = (S - keys % (S + 1)).astype(np.int32)
    del keys
    for depth in np.unique(depths).tolist():
        rows = ordered[starts[:-1][depths == depth][:, None] + np.arange(depth)]
        yield from _count_rows(rows, S)


def _count_rows(rows: np.ndarray, S: int) -> Iterator[Tuple[Tuple[int, ...], int]]:
    """Return the distinct rows of int32 [packs, depth], each with its count."""
    bits = S.bit_length()
    # Rows are compared by keys of int64, which is much faster; a key holds this many lengths.
    in_a_key = 62 // bits
    keys = []
    for column in range(0, rows.shape[1], in_a_key):
        key = np.zeros(len(rows), np.int64)
        for values in rows[:, column : column + in_a_key].T:
            key = (key << bits) | values
        keys.append(key)
    several = len(keys) > 1
    whole = np.stack(keys, axis=1) if several else keys[0]
    _, firsts, counts = np.unique(
        whole, return_index=True, return_counts=True, axis=0 if several else None
    )
    return zip(map(tuple, rows[firsts].tolist()), counts.tolist())


main = partial(
    run_packer,
    pack=pack,
    name="greedy",
    description="Concatenates sequences as they arrive, in a random order.",
    options={
        "--seed": dict(
            type=count_from_zero,
            default=0,
            help="draws the order in which the sequences arrive; default 0",
        )
    },
)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
