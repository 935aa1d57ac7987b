"""Long rows: `optimal` and LPFHP beside other people's packers: `python -m pack_data.benchmark --rows`.

The others are optional. Each that is not installed is named in one line and left out. They pack lists of lengths
without a limit on the sequences of a pack; ours pack the histogram, whose counting is not timed.
"""

from __future__ import annotations

import importlib
import math
import time
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from pack_data.cli.command import counted, depth_text, progress_bar
from pack_data.cli.memory import PeakMemory
from pack_data.cli.timing import timed
from pack_data.display.table import Column, Table, percent
from pack_data.histogram import LengthHistogram
from pack_data.packers import get_packer
from pack_data.proof import prove

SLOTS = (4096, 8192, 32768, 131072)
_DEPTHS: Tuple[Optional[int], ...] = (4, 8, 16, 64, None)
_MOST_SEQUENCES = 200_000  # for packers whose time grows with their number, a minute or more beyond


class Peer(NamedTuple):
    """A packer of somebody else's. pack: (lengths, slots) -> packs."""

    name: str
    pack: Callable[[np.ndarray, int], int]
    most_tokens: float = math.inf  # in all, beyond which it is left out


# Log-normal lengths: name -> the middle one's logarithm in rows of so many slots, and their spread.
_LENGTHS: Dict[str, Tuple[Callable[[int], float], float]] = {
    "long tail": (lambda slots: math.log(700) - 0.5, 1.2),  # around 425 tokens, 870 in the mean
    "around S / 3.5": (lambda slots: math.log(slots / 3.5), 0.6),  # where decreasing fits waste most
}


def _drawn(name: str, slots: int, sequences: int) -> LengthHistogram:
    """Lengths of this name; those above the slots are cut."""
    middle, spread = _LENGTHS[name]
    drawn = np.random.default_rng(0).lognormal(middle(slots), spread, sequences)
    return LengthHistogram.from_lengths(np.clip(np.rint(drawn), 1, slots).astype(np.int64), slots, name)


def installed_peers() -> Tuple[List[Peer], List[str]]:
    """The packers that are installed, and the names of the packages that are not."""
    found: List[Peer] = []
    missing: List[str] = []
    for name, make in _PEERS.items():
        try:
            found.append(Peer(name, make(), _MOST_TOKENS.get(name, math.inf)))
        except (ImportError, RuntimeError):  # transformers says with a RuntimeError what it lacks
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


_MOST_TOKENS = {"trl": 2**30}  # it packs the tokens themselves: a byte each here, and copies of them


def _ours(histogram: LengthHistogram, depth: Optional[int], name: str) -> Tuple[int, Optional[int]]:
    packing = get_packer(name)(histogram, max_sequences_per_pack=depth)
    packing.check(histogram)
    return packing.packs, None if packing.certificate is None else prove(packing).lower_bound


def rows(
    sequences: int, slots: Sequence[int] = SLOTS, depths: Sequence[Optional[int]] = _DEPTHS, others: Sequence[Peer] = ()
) -> Iterator[Dict[str, Any]]:
    """One packer on one case; by the keys of `_COLUMNS`."""
    for name in _LENGTHS:
        for S in slots:
            histogram = _drawn(name, S, sequences)
            lengths = np.repeat(histogram.lengths, histogram.counts[histogram.lengths])
            for depth in depths if name == "long tail" else (None,):
                case = {"lengths": histogram.name, "slots": S, "depth": depth_text(depth)}
                packers: Dict[str, Callable[[], Any]] = {
                    packer: partial(_ours, histogram, depth, packer) for packer in ("optimal", "lpfhp")
                }
                for peer in others if depth is None and sequences <= _MOST_SEQUENCES else ():
                    if histogram.tokens <= peer.most_tokens:
                        packers[peer.name] = partial(_others, peer, lengths, S)
                bound = 0
                for packer, pack in packers.items():
                    memory = PeakMemory()
                    seconds, (packs, proven) = timed(pack, time.process_time)
                    added = memory.added()
                    bound = bound if proven is None else proven
                    yield {
                        **case,
                        "packer": packer,
                        "packs": packs,
                        "above": packs - bound,
                        "share": percent((packs - bound) / bound),
                        "seconds": seconds,
                        "memory": None if added is None else added / 2**20,
                    }


def _others(peer: Peer, lengths: np.ndarray, slots: int) -> Tuple[int, None]:
    return peer.pack(lengths, slots), None


_COLUMNS = (
    Column("lengths", "lengths"),
    Column("slots", "slots", form=","),
    Column("depth", "depth"),
    Column("packer", "packer"),
    Column("packs", "packs", form=","),
    Column("above", "above", form=","),
    Column("share", "% of the bound", form=".3f"),
    Column("seconds", "seconds", form=".2f"),
    Column("memory", "MiB", form=",.0f"),
)


def main(sequences: int) -> None:
    """Prints the table as Markdown."""
    others, missing = installed_peers()
    print(
        f"{counted(sequences, 'sequence')}; above: packs over the proven bound; seconds of one core, the proof included"
    )
    for name in missing:
        print(f"not installed: {name} (pip install {name})")
    with progress_bar(None, "packers", unit="row") as bar:
        found = [row for row in rows(sequences, others=others) if not bar.update()]
    print(Table("rows", "", _COLUMNS, found).markdown(), end="")
