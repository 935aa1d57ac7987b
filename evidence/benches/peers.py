"""The installed packers of other projects, which pack lists of lengths without a limit on sequences."""

from __future__ import annotations

import importlib
import math
from typing import Callable, Dict, List, NamedTuple, Tuple

import numpy as np

_MOST_TOKENS = {"trl": 2**30}  # trl packs the tokens themselves: a byte each here, and copies
_Pack = Callable[[np.ndarray, int], int]  # (lengths, slots) -> packs


class Peer(NamedTuple):
    """A packer of another project."""

    name: str
    pack: _Pack
    most_tokens: float = math.inf  # of all sequences; it does not run with more


def installed_peers() -> Tuple[List[Peer], List[str]]:
    """Return the installed packers, and the names of the missing packages."""
    installed: List[Peer] = []
    missing: List[str] = []
    for name, load in _PEERS.items():
        try:
            pack = load()
        # Transformers raises RuntimeError for a missing package.
        except (ImportError, RuntimeError):
            missing.append(name)
            continue
        most_tokens = _MOST_TOKENS.get(name, math.inf)
        installed.append(Peer(name, pack, most_tokens))
    return installed, missing


def _trl() -> _Pack:
    pack = importlib.import_module("trl").pack_dataset
    datasets = importlib.import_module("datasets")
    arrow = importlib.import_module("pyarrow")

    def run(lengths: np.ndarray, slots: int) -> int:
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        tokens = np.zeros(int(offsets[-1]), np.int8)
        examples = arrow.LargeListArray.from_arrays(offsets, arrow.array(tokens))
        table = arrow.table({"input_ids": examples})
        dataset = datasets.Dataset(table)
        return len(pack(dataset, slots, "bfd", {"batch_size": len(lengths)}))

    return run


def _lightbinpack() -> _Pack:
    pack = importlib.import_module("lightbinpack").obfd
    return lambda lengths, slots: len(pack(lengths.tolist(), slots))


def _seqpack() -> _Pack:
    pack = importlib.import_module("seqpack").heap_pack_sequences
    return lambda lengths, slots: len(pack(lengths, slots))


_PEERS: Dict[str, Callable[[], _Pack]] = {
    "trl": _trl,
    "lightbinpack": _lightbinpack,
    "seqpack": _seqpack,
}
