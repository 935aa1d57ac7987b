"""Compare our packer with others on many data sets: `python -m evidence.benches.packing --cases 50`.

The cases are drawn with a fixed seed from all combinations of lengths, rows and depths below.  Our packer puts lengths
into bins like the others, and its time includes the bound.  Only ours supports a limited depth.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
from numpy.random import Generator

from evidence.benches.peers import Peer, installed_peers
from pack_data.building.assignment import assign
from pack_data.cli.command import depth_text, progress_bar
from pack_data.cli.timing import timed
from pack_data.display.table import Column, Table, account
from pack_data.optimal import pack
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing

_SEQUENCES = (64, 256, 1000, 10_000, 100_000, 1_000_000)
_SLOTS = (512, 4096, 32_768, 131_072)
# The peers know no limit: as many cases.
_DEPTHS: Tuple[Optional[int], ...] = (3, 4, 8, 16, 64, None, None, None)
_FEW = 1000  # lengths of a call during a training
_NEAR = 1e-4  # gap over the bound of a near-optimal packing
_REPEATED = 10_000  # up to this number of lengths, the time is the smallest of three
_ALLOWED = 0.005  # seconds; shorter times are not compared


def _whole(drawn: np.ndarray, slots: int) -> np.ndarray:
    return np.clip(np.rint(drawn), 1, slots).astype(np.int64)


def _triplets(random: Generator, n: int, slots: int) -> np.ndarray:
    """Draw triplets of lengths that fill a row exactly, each between a quarter and a half of the row."""
    triplets = -(-n // 3)
    drawn = random.uniform(0.25 * slots, 0.5 * slots, (2, triplets))
    first, second = np.rint(drawn)
    third = slots - first - second
    lengths = np.concatenate([first, second, third])
    return _whole(lengths[:n], slots)


def _wikipedia(random: Generator, n: int, slots: int) -> np.ndarray:
    """Draw the lengths of the paper's Wikipedia, scaled to the slots."""
    counts = LengthHistogram.published("wikipedia_512").counts
    lengths = random.choice(len(counts), n, p=counts / counts.sum())
    return _whole(lengths * (slots / 512), slots)


def _one_short(random: Generator, n: int, slots: int) -> np.ndarray:
    drawn = random.normal(slots / 2, 0.08 * slots, n - 1)
    return np.append(_whole(drawn, slots), 1)


def _bimodal(random: Generator, n: int, slots: int) -> np.ndarray:
    is_short = random.random(n) < 0.7
    short = random.normal(0.1, 0.03, n)
    long = random.normal(0.55, 0.08, n)
    shares = np.where(is_short, short, long)
    return _whole(shares * slots, slots)


def _log_normal(center: float, sigma: float, random: Generator, n: int, slots: int) -> np.ndarray:
    """Draw lengths around slots / center."""
    mean = math.log(slots / center)
    return _whole(random.lognormal(mean, sigma, n), slots)


DRAWN: Dict[str, Callable[[Generator, int, int], np.ndarray]] = {
    "uniform": lambda random, n, slots: random.integers(1, slots + 1, n),
    "bimodal": _bimodal,
    "triplets": _triplets,
    "around S / 3.5": partial(_log_normal, 3.5, 0.6),
    "log-normal": partial(_log_normal, 8, 1.0),
    "one short": _one_short,
    "Wikipedia": _wikipedia,
}


@dataclass(frozen=True)
class PackingCase:
    """One packing, and the packings of the peers for the same lengths."""

    kind: str
    sequences: int
    slots: int
    depth: Optional[int]
    packs: int
    lower_bound: int
    seconds: float
    peers: Dict[str, Tuple[int, float]]  # name -> packs, seconds

    @property
    def gap(self) -> int:
        """Packs above the bound."""
        return self.packs - self.lower_bound

    @property
    def near(self) -> bool:
        """True if the gap is at most one pack or a ten-thousandth."""
        return self.gap <= max(1, _NEAR * self.lower_bound)

    @property
    def ratio(self) -> Optional[float]:
        """Time over lightbinpack's if it has the same number of packs; 0 for a time that is not compared."""
        packs, seconds = self.peers.get("lightbinpack", (-1, 0.0))
        if packs != self.packs:
            return None
        if self.seconds <= _ALLOWED:
            return 0.0
        return self.seconds / seconds


def _measure(
    number: int, combination: Tuple[str, int, int, Optional[int]], peers: Sequence[Peer]
) -> PackingCase:
    """Pack one case, by ours and by the peers."""
    kind, sequences, slots, depth = combination
    random = np.random.default_rng(number)
    lengths = DRAWN[kind](random, sequences, slots)
    times = 3 if sequences <= _REPEATED else 1

    def least(make: Callable[[], Any]) -> Tuple[float, Any]:
        """Return the shortest time, and the result."""
        runs = [timed(make, time.process_time) for _ in range(times)]
        shortest = min(seconds for seconds, _ in runs)
        _, result = runs[0]
        return shortest, result

    def ours() -> Packing:
        """Count, pack, and assign a pack to each sequence, as `pack_data.pack` does."""
        histogram = LengthHistogram.from_lengths(lengths, slots)
        packing = pack(histogram, max_sequences_per_pack=depth)
        assign(lengths, packing, 0)
        return packing

    seconds, packing = least(ours)
    bound = packing.lower_bound or 0
    by_peer: Dict[str, Tuple[int, float]] = {}
    for peer in peers:
        if depth is None and lengths.sum() <= peer.most_tokens:
            time_of_peer, packs = least(partial(peer.pack, lengths, slots))
            by_peer[peer.name] = (packs, time_of_peer)
    return PackingCase(*combination, packing.packs, bound, seconds, by_peer)


def _cases(number: int, peers: Sequence[Peer], most: int = _SEQUENCES[-1]) -> List[PackingCase]:
    """Measure different cases of at most `most` sequences."""
    sequences = [number for number in _SEQUENCES if number <= most]
    combinations = list(product(DRAWN, sequences, _SLOTS, _DEPTHS))
    order = np.random.default_rng(0).permutation(len(combinations)).tolist()
    chosen = order[:number]
    cases = []
    with progress_bar(len(chosen), "packing", unit=" cases") as bar:
        for index in chosen:
            cases.append(_measure(index, combinations[index], peers))
            bar.update()
    return cases


def _summary(cases: Sequence[PackingCase]) -> List[Tuple[str, str, str]]:
    """Return rows of text: name, value, explanation."""
    # Time.
    ratios = [case.ratio for case in cases if case.ratio is not None]
    above_3 = sum(ratio > 3 for ratio in ratios)
    milliseconds = [1e3 * case.seconds for case in cases if case.sequences <= _FEW]

    # Packs.
    unlimited = [case for case in cases if case.peers]
    more_packs = 0
    for case in unlimited:
        fewest, _ = min(case.peers.values())
        more_packs += fewest < case.packs
    ordinary = [case.near for case in cases if case.kind != "uniform"]
    uniform = [case.near for case in cases if case.kind == "uniform"]

    return [
        (
            "time over lightbinpack's",
            _quantiles(ratios),
            f"median, 90 %, most of {len(ratios)} with as few packs",
        ),
        ("  above 3", str(above_3), "5 ms are always allowed"),
        ("more packs than a peer", str(more_packs), f"of {len(unlimited)} without a limit"),
        ("gap of one or 0.01 %", _share(ordinary), f"of {len(ordinary)}, uniform ones apart"),
        ("  the same of uniform", _share(uniform), f"of {len(uniform)}"),
        (
            f"ms, up to {_FEW:,} lengths",
            _quantiles(milliseconds),
            f"median, 90 %, most of {len(milliseconds)}",
        ),
    ]


def _quantiles(values: Sequence[float]) -> str:
    """Format median, 90 % quantile and maximum."""
    if not values:
        return "-"
    quantiles = np.quantile(values, (0.5, 0.9, 1.0)).tolist()
    return " / ".join(f"{value:.1f}" for value in quantiles)


def _share(flags: Sequence[bool]) -> str:
    """Format the share of true flags."""
    if not flags:
        return "-"
    share = sum(flags) / len(flags)
    return f"{share:.1%}"


_COLUMNS = (
    Column("kind", "lengths"),
    Column("sequences", "sequences", form=","),
    Column("slots", "slots", form=","),
    Column("depth", "depth"),
    Column("packs", "packs", form=","),
    Column("gap", "above", form=","),
    Column("seconds", "seconds", form=".3f"),
    Column("ratio", "times lightbinpack", form=".1f"),
)


def _worst(cases: Sequence[PackingCase], title: str, key: Callable[[PackingCase], float]) -> Table:
    """Return the table of the ten cases with the largest keys."""
    worst = sorted(cases, key=key, reverse=True)
    rows = []
    for case in worst[:10]:
        row = {column.key: getattr(case, column.key) for column in _COLUMNS}
        row["depth"] = depth_text(case.depth)
        rows.append(row)
    return Table("worst", title, _COLUMNS, rows)


def main(number: int, most: Optional[int]) -> None:
    """Print the summary and the worst ten by gap and by time."""
    peers, missing = installed_peers()
    for name in missing:
        print(f"not installed: {name} (pip install {name})")
    cases = _cases(number, peers, most or _SEQUENCES[-1])
    heading = f"{len(cases)} cases, processor seconds of one core"
    print(account(heading, _summary(cases)))

    gaps = _worst(cases, "the widest gaps", _relative_gap)
    print("\n" + gaps.text())
    title = "the longest times compared with lightbinpack"
    times = _worst(cases, title, lambda case: case.ratio or 0.0)
    print("\n" + times.text())


def _relative_gap(case: PackingCase) -> float:
    """Return the gap over the bound, 0 for a near-optimal packing."""
    if case.near:
        return 0.0
    return case.gap / max(1, case.lower_bound)
