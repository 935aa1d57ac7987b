"""Moving data between tiles: payload, fragments and syncs. All results are tile cycles."""

from __future__ import annotations

from math import ceil

from ipu_packed_bert.cycles.target import Target


def receive(num_bytes: float, target: Target, *, shared_by_pair: bool = False) -> float:
    """Payload cycles of the tile that receives the most.

    A tile takes 4 bytes a cycle; 8 where the two tiles of a pair take the same data (poplibs, ExchangeEstimator).
    """
    rate = target.exchange_bytes_per_cycle * (2 if shared_by_pair else 1)
    return num_bytes / rate


def scattered(num_bytes: float, fragment_bytes: float, target: Target) -> float:
    """Payload in separately addressed fragments: the longer of the payload and the fragments' issue slots."""
    payload = receive(num_bytes, target)
    fragments = ceil(num_bytes / fragment_bytes) if num_bytes else 0
    return max(payload, fragments * target.fragment_cycles)
