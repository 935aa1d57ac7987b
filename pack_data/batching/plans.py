"""Nine ways to group examples into batches: the eight of "Enhancing Training Efficiency Using Packing with Flash
Attention", Table 1, and optimal packing with balanced attention.

A plan says, for one epoch, which pieces of which examples stand in which row of which batch. Rows are what a padding
collator pads; a padding-free one lays the rows of a batch one behind the other. Every token is in the plan exactly once:
the last batch is smaller, nothing is dropped and nothing cut off. bs is the batch size of a rank in examples or rows,
msl the longest sequence.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple, Union

import numpy as np

from pack_data.assignment import assign
from pack_data.histogram import LengthHistogram
from pack_data.packing import Packing

MEGA_BATCHES = 50  # batches sorted by length together, as the length-grouped sampler of Hugging Face Transformers does


class Piece(NamedTuple):
    """Tokens start..stop - 1 of an example; nearly always all of them."""

    example: int
    start: int
    stop: int


Row = Tuple[Piece, ...]
Batch = Tuple[Row, ...]


@dataclass(frozen=True)
class BatchOptions:
    """batch_size (bs), max_sequence_length (msl) in tokens, ranks that share the steps, seed of every random choice."""

    batch_size: int
    max_sequence_length: int
    ranks: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_sequence_length", "ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")

    @property
    def capacity(self) -> int:
        """Tokens of a batch that is filled, bs * msl."""
        return self.batch_size * self.max_sequence_length


@dataclass(frozen=True, eq=False)
class Plan:
    """One epoch.  Step t of rank r is batch t * ranks + r; every rank has as many steps.

    example, start, stop int64 [pieces]; rows int64 [rows + 1], first piece of each row; batches int64 [batches + 1], first
    row of each batch.  At the end of an epoch a batch may have no rows where there are fewer examples than ranks.
    """

    example: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    rows: np.ndarray
    batches: np.ndarray
    ranks: int

    @property
    def steps(self) -> int:
        return (len(self.batches) - 1) // self.ranks

    def batch(self, step: int, rank: int) -> Batch:
        number = step * self.ranks + rank
        return tuple(
            tuple(map(Piece, self.example[begin:end].tolist(), self.start[begin:end].tolist(), self.stop[begin:end].tolist()))
            for begin, end in zip(self.rows[self.batches[number]:self.batches[number + 1]].tolist(),
                                  self.rows[self.batches[number] + 1:self.batches[number + 1] + 1].tolist()))


def _offsets(sizes: Union[Sequence[int], np.ndarray]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.asarray(sizes, np.int64))]).astype(np.int64)


def _whole(lengths: np.ndarray, batches: Sequence[Sequence[Sequence[int]]], ranks: int) -> Plan:
    """A plan of whole examples, given as batches of rows of example numbers."""
    rows = [row for batch in batches for row in batch]
    example = np.array([number for row in rows for number in row], np.int64)
    return Plan(example, np.zeros(len(example), np.int64), lengths[example], _offsets([len(row) for row in rows]),
                _offsets([len(batch) for batch in batches]), ranks)


def _deal(rows: Sequence[Any], options: BatchOptions) -> List[List[Any]]:
    """Rows to batches, bs * ranks rows a step; the ranks take turns, so that a short last step is spread over them."""
    per_step = options.batch_size * options.ranks
    return [list(rows[at:at + per_step][rank::options.ranks])
            for at in range(0, len(rows), per_step) for rank in range(options.ranks)]


def _bins_to_plan(lengths: np.ndarray, bins: List[List[int]], options: BatchOptions) -> Plan:
    """One bin a batch.  The bins of a short last step are shared out, so that no rank is idle while others have several."""
    last = len(bins) % options.ranks
    if last:
        left = sorted((number for numbers in bins[-last:] for number in numbers), key=lambda number: (-lengths[number], number))
        shares: List[List[int]] = [[] for _ in range(options.ranks)]
        load = [0] * options.ranks
        for number in left:
            rank = load.index(min(load))
            shares[rank].append(number)
            load[rank] += int(lengths[number])
        bins = bins[:-last] + shares
    return _whole(lengths, [[numbers] if numbers else [] for numbers in bins], options.ranks)


# ---- the ways: lengths int64 [n], options, generator -> Plan -----------------------------------------------------------


def random_sampling(lengths: np.ndarray, options: BatchOptions, rng: np.random.Generator) -> Plan:
    """bs examples drawn at random; also the batches of MiniBatchPacking, which lays them one behind the other."""
    return _whole(lengths, _deal([[number] for number in rng.permutation(len(lengths)).tolist()], options), options.ranks)


def group_by_length(lengths: np.ndarray, options: BatchOptions, rng: np.random.Generator) -> Plan:
    """Random groups of up to 50 batches, each sorted by length, so that a batch needs little padding; the longest example
    comes first of all, so that memory runs out at once or never."""
    order = rng.permutation(len(lengths))
    size = max(1, min(len(order) // (4 * options.batch_size), MEGA_BATCHES)) * options.batch_size
    groups = [order[at:at + size] for at in range(0, len(order), size)]
    groups = [group[np.argsort(-lengths[group], kind="stable")] for group in groups]
    longest = max(range(len(groups)), key=lambda number: lengths[groups[number][0]])
    groups[longest][0], groups[0][0] = groups[0][0], groups[longest][0]
    return _whole(lengths, _deal([[number] for number in np.concatenate(groups).tolist()], options), options.ranks)


def fixed_length_packing(lengths: np.ndarray, options: BatchOptions, rng: np.random.Generator) -> Plan:
    """All examples, shuffled, as one stream that is cut every msl tokens: rows are full and examples broken."""
    order = rng.permutation(len(lengths))
    begins = np.cumsum(lengths[order]) - lengths[order]
    total = int(lengths.sum())
    cuts = np.unique(np.concatenate([begins, np.arange(0, total, options.max_sequence_length)]))
    which = np.searchsorted(begins, cuts, side="right") - 1
    example, start = order[which], cuts - begins[which]
    stop = start + np.diff(np.append(cuts, total))
    firsts = np.append(np.searchsorted(cuts, np.arange(0, total, options.max_sequence_length)), len(cuts))
    batches = _deal(range(len(firsts) - 1), options)
    # The ranks take turns, which puts rows, and with them their pieces, into another order.
    rows = [row for batch in batches for row in batch]
    sizes = np.diff(firsts)[rows]
    pieces = np.concatenate([np.arange(firsts[row], firsts[row + 1]) for row in rows])
    return Plan(example[pieces], start[pieces], stop[pieces], _offsets(sizes), _offsets([len(batch) for batch in batches]), options.ranks)


def multipack(lengths: np.ndarray, options: BatchOptions, rng: np.random.Generator) -> Plan:
    """For each step the longest run of the shuffled examples that first-fit decreasing puts into one bin a rank."""
    order = rng.permutation(len(lengths))
    ends = np.cumsum(lengths[order])
    bins: List[List[int]] = []
    at = 0
    while at < len(order):
        before = int(ends[at - 1]) if at else 0
        fits, fails = at + 1, int(np.searchsorted(ends, before + options.ranks * options.capacity, side="right")) + 1
        found = _first_fit_decreasing(lengths, order[at:fits], options)
        while fails - fits > 1:
            middle = (fits + fails) // 2
            tried = _first_fit_decreasing(lengths, order[at:middle], options)
            fits, fails, found = (middle, fails, tried) if tried is not None else (fits, middle, found)
        bins += found
        at = fits
    full = [numbers for numbers in bins if numbers]  # only the last step can have empty ones
    return _bins_to_plan(lengths, full, options)


def _first_fit_decreasing(lengths: np.ndarray, numbers: np.ndarray, options: BatchOptions):
    """The examples in `ranks` bins of bs * msl tokens, or None where they do not fit."""
    room = [options.capacity] * options.ranks
    bins: List[List[int]] = [[] for _ in room]
    for number in numbers[np.argsort(-lengths[numbers], kind="stable")].tolist():
        length = int(lengths[number])
        for rank, free in enumerate(room):
            if length <= free:
                room[rank] -= length
                bins[rank].append(number)
                break
        else:
            return None
    return bins


def _in_order(lengths: np.ndarray, order: np.ndarray, options: BatchOptions) -> Plan:
    """Bins filled first come, first served: the next one begins with the example that does not fit."""
    bins: List[List[int]] = []
    free = 0
    for number, length in zip(order.tolist(), lengths[order].tolist()):
        if length > free:
            bins.append([])
            free = options.capacity
        bins[-1].append(number)
        free -= length
    return _bins_to_plan(lengths, bins, options)


def random_packing(lengths: np.ndarray, options: BatchOptions, rng: np.random.Generator) -> Plan:
    return _in_order(lengths, rng.permutation(len(lengths)), options)


def sorted_packing(lengths: np.ndarray, options: BatchOptions, rng: np.random.Generator) -> Plan:
    """From the longest to the shortest; equal ones in random order."""
    order = rng.permutation(len(lengths))
    return _in_order(lengths, order[np.argsort(-lengths[order], kind="stable")], options)


def optimal_packing(lengths: np.ndarray, options: BatchOptions, rng: np.random.Generator) -> Plan:
    """As few rows of msl tokens as there can be, bs rows a batch, at random but for the attention work, the sum of squared
    lengths: ranks get the same number of rows of nearly the same work at every step, and steps get nearly the same work.
    """
    packing = _recipe(lengths.tobytes(), options.max_sequence_length)
    pack, _ = assign(lengths, packing, int(rng.integers(2**63)))
    order = np.argsort(pack, kind="stable")
    rows = [row.tolist() for row in np.split(order, np.cumsum(np.bincount(pack, minlength=packing.packs))[:-1])]
    work = np.array([int((lengths[row] ** 2).sum()) for row in rows])

    # By work, a row for each rank at a time; of as many such groups as there are steps, each step gets one at random.
    groups = np.split(np.argsort(-work, kind="stable"), range(options.ranks, len(rows), options.ranks))
    count = -(-len(rows) // (options.batch_size * options.ranks))
    steps: List[List[int]] = [[] for _ in range(count)]
    for at in range(0, len(groups), count):
        for step, group in zip(rng.permutation(count).tolist(), groups[at:at + count]):
            steps[step] += group.tolist()
    # The one with too few rows for the ranks, if any, comes last.
    fewest = min(range(count), key=lambda step: len(steps[step]))
    steps[fewest], steps[-1] = steps[-1], steps[fewest]

    batches: List[List[List[int]]] = []
    for chosen in steps:
        shares: List[List[int]] = [[] for _ in range(options.ranks)]
        load = [0] * options.ranks
        most = -(-len(chosen) // options.ranks)
        for row in chosen:  # the most work first, to the rank that has least
            rank = min((rank for rank in range(options.ranks) if len(shares[rank]) < most), key=lambda rank: load[rank])
            shares[rank].append(row)
            load[rank] += int(work[row])
        batches += [[rows[row] for row in share] for share in shares]
    return _whole(lengths, batches, options.ranks)


_RECIPES: Dict[Tuple[bytes, int], Packing] = {}


def _recipe(lengths: bytes, max_sequence_length: int) -> Packing:
    """The packing depends on the lengths alone: solved for the first epoch, kept for the others (one at a time)."""
    from pack_data.optimal import pack

    key = (lengths, max_sequence_length)
    if key not in _RECIPES:
        histogram = LengthHistogram.from_lengths(np.frombuffer(lengths, np.int64), max_sequence_length)
        _RECIPES.clear()
        _RECIPES[key] = pack(histogram, max_sequences_per_pack=None)
    return _RECIPES[key]


@dataclass(frozen=True)
class Way:
    """A row of the table: how examples are grouped, and whether a batch is padded or laid out without padding."""

    name: str
    group: Callable[[np.ndarray, BatchOptions, np.random.Generator], Plan]
    padding_free: bool

    def plan(self, lengths: np.ndarray, options: BatchOptions, epoch: int = 0) -> Plan:
        """One epoch's batches; the same for the same lengths, options and epoch.  Raises ValueError for no or bad lengths."""
        lengths = np.asarray(lengths, np.int64)
        if not len(lengths):
            raise ValueError("there are no examples to group")
        wrong = np.flatnonzero((lengths < 1) | (lengths > options.max_sequence_length))
        if len(wrong):
            raise ValueError(
                f"example {wrong[0]} has {lengths[wrong[0]]} tokens, must be 1 to {options.max_sequence_length} "
                "(max_sequence_length); shorten it before, nothing is cut here")
        return self.group(lengths, options, np.random.default_rng((options.seed, epoch)))


WAYS = {way.name: way for way in (
    Way("RandomSampling+Padding", random_sampling, False),
    Way("GroupByLength+Padding", group_by_length, False),
    Way("MiniBatchPacking+PosID", random_sampling, True),
    Way("FixedLengthPacking", fixed_length_packing, False),
    Way("FixedLengthPacking+PosID", fixed_length_packing, True),
    Way("Multipack+PosID", multipack, True),
    Way("SortedPacking+PosID", sorted_packing, True),
    Way("RandomPacking+PosID", random_packing, True),
    Way("OptimalPacking+PosID", optimal_packing, True),
)}


def get_way(name: str) -> Way:
    if name not in WAYS:
        raise ValueError(f"{name!r} is no way to make batches; choose from {', '.join(WAYS)}")
    return WAYS[name]
