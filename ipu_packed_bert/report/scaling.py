"""Figure 5 of the paper: the speed-up of un-padding on many accelerators, which wait for the slowest.

Un-padding computes each sequence at its own length, so a step takes as long as the device with the most work. Packing
computes whole packs, so that all devices take the same time, and its speed-up is the packing factor for any number of
devices. Both are theoretical: without overhead and communication.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence, Tuple

import numpy as np

_DEVICES: Tuple[int, ...] = tuple(2**i for i in range(12))  # 1 to 2048
_BATCHES: Tuple[int, ...] = (1, 4, 16, 64)  # sequences a device takes in a step


class ScalingPoint(NamedTuple):
    batch: int
    devices: int
    speedup: float  # of un-padding over padding


def work(length: np.ndarray, *, hidden_size: int) -> np.ndarray:
    """Multiply-adds of a sequence in an encoder layer: linear layers by tokens, attention by tokens squared."""
    length = np.asarray(length, dtype=np.float64)
    return 12.0 * hidden_size**2 * length + 2.0 * hidden_size * length**2


def simulate(
    counts: np.ndarray,
    *,
    hidden_size: int,
    devices: Sequence[int] = _DEVICES,
    batches: Sequence[int] = _BATCHES,
    steps: int = 64,
    seed: int = 0,
) -> Tuple[ScalingPoint, ...]:
    """Speed-up of un-padding: mean over simulated steps of the slowest device's work, against padded work.

    counts: sequences by length, counts[l] of length l; the longest possible length is len(counts) - 1.
    Each device draws `batch` sequences at random. With fewer devices the same draws form more groups to average over.
    """
    lengths = np.flatnonzero(counts)
    cumulative = np.cumsum(counts[lengths]) / counts.sum()
    costs = work(lengths, hidden_size=hidden_size)
    padded = float(work(np.array(len(counts) - 1), hidden_size=hidden_size))
    most = max(devices)
    points = []
    for batch in batches:
        generator = np.random.default_rng([seed, batch])
        slowest = dict.fromkeys(devices, 0.0)
        for _ in range(steps):
            drawn = np.searchsorted(cumulative, generator.random((most, batch)), side="right")
            device_work = costs[np.minimum(drawn, len(lengths) - 1)].sum(axis=1)
            for count in devices:
                groups = device_work[: most // count * count].reshape(-1, count)
                slowest[count] += groups.max(axis=1).mean() / steps
        points += [ScalingPoint(batch, count, batch * padded / float(slowest[count])) for count in devices]
    return tuple(points)
