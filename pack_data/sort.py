"""SORT, sorted batching, another way to avoid padding: `python -m pack_data.sort`.

Sequences of similar length share a batch, which is padded to its longest sequence. Sequences do not share rows, so the
result is a `Batching` instead of a packing. Almost no padding is left, but a static engine compiles a program for each
batch length (paper section 4.1), and the lengths within a batch are similar.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Dict, Tuple

import numpy as np

from pack_data.packing.histogram import LengthHistogram
from pack_data.reading.fields import whole_number
from pack_data.store.quantities import Filling

_REPORTED = (
    "max_sequence_length batch_size seed sequences tokens batches slots padding_tokens efficiency speedup shapes "
    "solve_seconds"
).split()


@dataclass(frozen=True)
class Batching(Filling):
    """Batches in the order of training, each of rows padded to its longest sequence."""

    max_sequence_length: int  # S: slots of a row without sorting
    batch_size: int  # rows in a batch; the batch of the shortest sequences may have fewer
    seed: int  # draws the order of the batches
    lengths: Tuple[int, ...]  # padded length of each batch, in the order of training
    sequences: int
    tokens: int
    slots: int  # rows x padded length, over all batches
    solve_seconds: float = field(default=0.0, compare=False)

    max_sequences_per_pack = 1
    largest_depth = 1

    @property
    def packs(self) -> int:
        """Rows, each of one sequence."""
        return self.sequences

    @property
    def batches(self) -> int:
        return len(self.lengths)

    @property
    def shapes(self) -> int:
        """The number of different padded lengths, and so of programs that a static engine compiles."""
        return len(set(self.lengths))

    def to_json(self) -> Dict[str, Any]:
        return {"algorithm": "sort", **{name: getattr(self, name) for name in _REPORTED}}


def batch(histogram: LengthHistogram, *, batch_size: int, seed: int = 0) -> Batching:
    """Sort, cut into batches and shuffle the batches, without expanding the histogram to single sequences.

    Args:
        histogram: lengths to batch.
        batch_size: rows in a batch.
        seed: draws the order of the batches.
    """
    start = time.perf_counter()
    batch_size = whole_number("batch_size", batch_size, least=1)
    seed = whole_number("seed", seed, least=0)
    sequences = histogram.sequences
    # The longest sequence of each batch, longest batch first.
    firsts = np.arange(0, sequences, batch_size, dtype=np.int64)
    ascending = np.cumsum(histogram.counts)  # sequences of at most this length
    padded = np.searchsorted(ascending, sequences - firsts)
    rows = np.minimum(batch_size, sequences - firsts)
    order = np.random.default_rng(seed).permutation(len(padded))
    return Batching(
        histogram.max_sequence_length,
        batch_size,
        seed,
        tuple(padded[order].tolist()),
        sequences,
        histogram.tokens,
        int(padded @ rows),
        time.perf_counter() - start,
    )


if __name__ == "__main__":
    from pack_data.lengths.sort_command import run

    raise SystemExit(run(batch))
