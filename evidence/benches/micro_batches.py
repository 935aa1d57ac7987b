"""`python -m evidence.benches.micro_batches`: micro-batches over ranks, ours beside three usual rules.

Each rule shares the sequences out over the ranks by tokens, and then packs the sequences of each rank within the
budget. Ranks with fewer micro-batches than others get empty ones.

- KK: Karmarkar-Karp (largest differencing) over the ranks, and in each rank over the fewest micro-batches that fit.
- LPT: the longest sequence to the rank with fewest tokens; first-fit decreasing in each rank.
- round-robin: sorted sequences dealt to the ranks in turn; first-fit decreasing in each rank.
"""

from __future__ import annotations

import heapq
import math
import time
from functools import partial
from itertools import count
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from numpy.random import Generator

from pack_data.batching.micro_batches import dealt, micro_batches
from pack_data.cli.command import ArgumentParser, run_main
from pack_data.cli.timing import timed
from pack_data.display.table import text_table
from pack_data.packing.histogram import LengthHistogram

_Parts = List[List[int]]
_Summed = Tuple[int, List[int]]  # tokens of a part, and its sequences
_KINDS = ("Wikipedia", "log-normal", "around S / 3.5", "bimodal")
_SIZES = ((64, 4), (512, 8), (4096, 64))  # sequences, ranks
_MAX_TOKENS = 16384


# ---- lengths ---------------------------------------------------------------------------------------------------------


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


# ---- rules -----------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """Outcome of a rule."""

    steps: int
    slowest: float  # tokens of the slowest rank
    empty: int  # micro-batches


def karmarkar_karp(lengths: Sequence[int], parts: int) -> _Parts:
    """Partition by the largest differencing method: join the two partitions of largest spread, large with small."""
    if not len(lengths):
        return [[] for _ in range(parts)]

    # A partition per sequence: the sequence, and empty parts.
    order = count()  # breaks ties
    heap: List[Tuple[int, int, List[_Summed]]] = []
    for number, length in enumerate(lengths):
        partition: List[_Summed] = [(length, [number])]
        partition += [(0, []) for _ in range(parts - 1)]
        spread = length if parts > 1 else 0
        heap.append((-spread, next(order), partition))
    heapq.heapify(heap)

    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        partition = []
        for (large, members), (small, others) in zip(first, reversed(second)):
            partition.append((large + small, members + others))
        partition.sort(key=lambda part: -part[0])
        most, _ = partition[0]
        least, _ = partition[-1]
        heapq.heappush(heap, (least - most, next(order), partition))

    _, _, partition = heap[0]
    return [members for _, members in partition]


def longest_processing_time(lengths: Sequence[int], parts: int) -> _Parts:
    """Give each sequence, the longest first, to the part with fewest tokens."""
    return dealt(np.asarray(lengths), parts, len(lengths))


def round_robin(lengths: Sequence[int], parts: int) -> _Parts:
    """Deal the sequences, the longest first, in turn."""
    order = np.argsort(-np.asarray(lengths), kind="stable").tolist()
    return [order[part::parts] for part in range(parts)]


def _first_fit(lengths: Sequence[int], max_tokens: int) -> int:
    """Return the micro-batches that first-fit decreasing fills."""
    free: List[int] = []  # tokens of each micro-batch
    for length in sorted(lengths, reverse=True):
        for place, tokens in enumerate(free):
            if tokens >= length:
                free[place] -= length
                break
        else:
            free.append(max_tokens - length)
    return len(free)


def _differencing(lengths: Sequence[int], max_tokens: int) -> int:
    """Return the fewest parts of Karmarkar-Karp that all keep the budget."""
    fewest = -(-sum(lengths) // max_tokens)
    for parts in count(fewest):
        partition = karmarkar_karp(lengths, parts)
        tokens = [sum(lengths[number] for number in members) for members in partition]
        if max(tokens) <= max_tokens:
            return parts
    raise AssertionError("single sequences fit")


def by_rule(
    share: Callable[[Sequence[int], int], _Parts],
    within: Callable[[Sequence[int], int], int],
    lengths: Sequence[int],
    ranks: int,
) -> Result:
    """Share sequences out over ranks by a rule, and pack those of each rank by another."""
    of_ranks = []
    for members in share(lengths, ranks):
        of_ranks.append([lengths[number] for number in members])
    micro_batches_of = [within(rank_lengths, _MAX_TOKENS) for rank_lengths in of_ranks]
    steps = max(micro_batches_of)
    slowest = max(map(sum, of_ranks))
    empty = steps * ranks - sum(micro_batches_of)
    return Result(steps, slowest, empty)


RULES = {
    "KK": (karmarkar_karp, _differencing),
    "LPT": (longest_processing_time, _first_fit),
    "round-robin": (round_robin, _first_fit),
}


def rows_of(kind: str, sequences: int, ranks: int) -> List[List[str]]:
    """Return the rows of one case: ours first, then each rule."""
    lengths = DRAWN[kind](np.random.default_rng(0), sequences, _MAX_TOKENS)
    ours = partial(micro_batches, lengths, ranks=ranks, max_tokens=_MAX_TOKENS)
    seconds, plan = timed(ours, time.process_time)
    result = Result(plan.steps, plan.slowest, plan.empty)
    results: Dict[str, Tuple[float, Result]] = {"ours": (seconds, result)}
    for name, (share, within) in RULES.items():
        rule = partial(by_rule, share, within, lengths.tolist(), ranks)
        results[name] = timed(rule, time.process_time)

    rows = []
    case = [kind, f"{sequences:,}", f"{ranks}"]
    for name, (seconds, result) in results.items():
        above = result.slowest / plan.least_slowest - 1
        steps = f"{result.steps} of {plan.least_steps}"
        rows.append([*case, name, steps, f"{above:.3%}", f"{result.empty}", f"{seconds:.3f} s"])
        case = ["", "", ""]
    return rows


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(
        prog="python -m evidence.benches.micro_batches", description=__doc__.split("\n\n")[0]
    )
    parser.parse_args(argv)
    rows = [["lengths", "sequences", "ranks", "rule", "steps, least", "slowest", "empty", "time"]]
    for kind in _KINDS:
        for sequences, ranks in _SIZES:
            rows += rows_of(kind, sequences, ranks)
    print("\n".join(text_table(rows, left=(0, 3))))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(main))
