"""Other people's packers, as far as they are installed. They pack lists of lengths, and know no limit on sequences."""

from __future__ import annotations

import importlib
import math
from typing import Callable, Dict, List, NamedTuple, Tuple

import numpy as np


class Peer(NamedTuple):
    """A packer of another project.  pack: (lengths, slots) -> packs."""

    name: str
    pack: Callable[[np.ndarray, int], int]
    most_tokens: float = math.inf  # in all; it is left out beyond


def installed_peers() -> Tuple[List[Peer], List[str]]:
    """Return the packers that are installed, and the names of the packages that are not."""
    found: List[Peer] = []
    missing: List[str] = []
    for name, make in _PEERS.items():
        try:
            found.append(Peer(name, make(), _MOST_TOKENS.get(name, math.inf)))
        except (ImportError, RuntimeError):  # transformers raises a RuntimeError for what it lacks
            missing.append(name)
    return found, missing


def _trl() -> Callable[[np.ndarray, int], int]:
    pack = importlib.import_module("trl").pack_dataset
    datasets, arrow = importlib.import_module("datasets"), importlib.import_module("pyarrow")

    def run(lengths: np.ndarray, slots: int) -> int:
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        tokens = arrow.array(np.zeros(int(offsets[-1]), np.int8))
        table = arrow.table({"input_ids": arrow.LargeListArray.from_arrays(offsets, tokens)})
        return len(pack(datasets.Dataset(table), slots, "bfd", {"batch_size": len(lengths)}))

    return run


def _lightbinpack() -> Callable[[np.ndarray, int], int]:
    pack = importlib.import_module("lightbinpack").obfd
    return lambda lengths, slots: len(pack(lengths.tolist(), slots))


def _seqpack() -> Callable[[np.ndarray, int], int]:
    pack = importlib.import_module("seqpack").heap_pack_sequences
    return lambda lengths, slots: len(pack(lengths, slots))


_PEERS: Dict[str, Callable[[], Callable[[np.ndarray, int], int]]] = {
    "trl": _trl,
    "lightbinpack": _lightbinpack,
    "seqpack": _seqpack,
}


_MOST_TOKENS = {
    "trl": 2**30
}  # it packs the tokens themselves: a byte each here, and copies of them
