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

from pack_data.cli.command import counted, depth_text
from pack_data.cli.memory import PeakMemory
from pack_data.display.table import padded
from pack_data.histogram import LengthHistogram
from pack_data.packers import get_packer
from pack_data.proof import prove

SLOTS = (4096, 8192, 32768, 131072)
DEPTHS: Tuple[Optional[int], ...] = (4, 8, 16, 64, None)
MOST_SEQUENCES = 200_000  # for packers whose time grows with their number, a minute or more beyond


class Peer(NamedTuple):
    """A packer of somebody else's. pack: (lengths, slots) -> packs."""

    name: str
    pack: Callable[[np.ndarray, int], int]
    most_tokens: float = math.inf  # in all, beyond which it is left out


def long_tail(slots: int, sequences: int) -> LengthHistogram:
    """Log-normal lengths around 425 tokens, 870 in the mean, with a long tail; those above the slots are cut."""
    drawn = np.random.default_rng(0).lognormal(math.log(700) - 0.5, 1.2, sequences)
    return LengthHistogram.from_lengths(_whole(drawn, slots), slots, "long tail")


def thirds(slots: int, sequences: int) -> LengthHistogram:
    """Log-normal lengths around slots / 3.5, where decreasing fits waste most."""
    drawn = np.random.default_rng(0).lognormal(math.log(slots / 3.5), 0.6, sequences)
    return LengthHistogram.from_lengths(_whole(drawn, slots), slots, "around S / 3.5")


def _whole(drawn: np.ndarray, slots: int) -> np.ndarray:
    return np.clip(np.rint(drawn), 1, slots).astype(np.int64)


def peers() -> Tuple[List[Peer], List[str]]:
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


def _timed(run: Callable[[], Any]) -> Tuple[Any, str, str]:
    """What it returns, seconds of the processor, and the memory it added at most."""
    memory, start = PeakMemory(), time.process_time()
    result = run()
    seconds, added = time.process_time() - start, memory.added()
    return result, f"{seconds:.2f}", "-" if added is None else f"{added / 2**20:,.0f}"


def rows(
    sequences: int,
    slots: Sequence[int] = SLOTS,
    depths: Sequence[Optional[int]] = DEPTHS,
    others: Sequence[Peer] = (),
) -> Iterator[Tuple[str, ...]]:
    """Lengths, slots, depth, packer, packs, packs above the bound, share of it, seconds of one core, MiB added."""
    for draw in (long_tail, thirds):
        for S in slots:
            histogram = draw(S, sequences)
            lengths = np.repeat(histogram.lengths, histogram.counts[histogram.lengths])
            for depth in depths if draw is long_tail else (None,):
                case = (histogram.name, f"{S:,}", depth_text(depth))
                bound = 0
                for name in ("optimal", "lpfhp"):
                    (packs, proven), seconds, added = _timed(partial(_ours, histogram, depth, name))
                    bound = bound if proven is None else proven
                    yield (*case, name, *_above(packs, bound), seconds, added)
                for peer in others if depth is None and sequences <= MOST_SEQUENCES else ():
                    if histogram.tokens > peer.most_tokens:
                        continue
                    packs, seconds, added = _timed(partial(peer.pack, lengths, S))
                    yield (*case, peer.name, *_above(packs, bound), seconds, added)


def _above(packs: int, bound: int) -> Tuple[str, str, str]:
    return f"{packs:,}", f"{packs - bound:,}", f"{(packs - bound) / bound:.3%}"


_HEADING = ("lengths", "slots", "depth", "packer", "packs", "above", "of the bound", "seconds", "MiB")
_LEFT = (0, 3)


def main(sequences: int) -> None:
    """Prints the table as Markdown, a row as soon as it is known."""
    others, missing = peers()
    print(
        f"{counted(sequences, 'sequence')}; above: packs over the proven bound; seconds of one core, the proof included"
    )
    for name in missing:
        print(f"not installed: {name} (pip install {name})")
    widths = (14, 7, 9, 12, 9, 7, 12, 7, 6)

    def show(cells: Sequence[str]) -> None:
        print("| " + " | ".join(padded([cells], left=_LEFT, widths=widths)[0]) + " |", flush=True)

    show(_HEADING)
    show(["---" if column in _LEFT else "--:" for column in range(len(_HEADING))])
    for row in rows(sequences, others=others):
        show(row)
