"""Nine ways to group examples into batches.

Eight are those of "Enhancing Training Efficiency Using Packing with Flash Attention", Table 1; the ninth is optimal
packing with balanced attention.

A plan says which pieces of which examples make up each row of each batch of one epoch.  A padding collator pads the
rows; a padding-free one joins the rows of a batch into one.  Every token is in the plan exactly once: the last batch
may be smaller, and no token is dropped.  bs: batch size of a rank, in examples or rows; msl: longest sequence, in
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple, TypeVar, Union

import numpy as np

from pack_data.building.assignment import assign
from pack_data.lengths.overlong import fit
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.reading.fields import whole_number

_MEGA_BATCHES = 50  # batches that are sorted together, as in the length-grouped sampler of Hugging Face Transformers

_T = TypeVar("_T")


class Piece(NamedTuple):
    """Tokens start..stop - 1 of an example: all of them, unless the way breaks examples."""

    example: int
    start: int
    stop: int


_Row = Tuple[Piece, ...]
Batch = Tuple[_Row, ...]


@dataclass(frozen=True)
class BatchOptions:
    """What a plan follows from, besides the lengths.  Raises ValueError for a size below 1."""

    batch_size: int  # bs, examples or rows of a rank's batch
    max_sequence_length: int  # msl, tokens
    ranks: int = 1  # processes that share each step
    seed: int = 0  # of every random choice

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("max_sequence_length", 1), ("ranks", 1), ("seed", 0)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least=least))

    @property
    def capacity(self) -> int:
        """Tokens of a full batch, bs * msl."""
        return self.batch_size * self.max_sequence_length


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The batches of one epoch.  Batch number t * ranks + r is step t of rank r; all ranks have equally many steps.

    A batch of the last step may have no rows, if fewer examples than ranks are left.
    """

    example: np.ndarray  # int64 [pieces]
    start: np.ndarray  # int64 [pieces]
    stop: np.ndarray  # int64 [pieces]
    rows: np.ndarray  # int64 [rows + 1], the first piece of each row
    batches: np.ndarray  # int64 [batches + 1], the first row of each batch
    ranks: int

    @property
    def steps(self) -> int:
        """Batches of each rank."""
        return (len(self.batches) - 1) // self.ranks

    def batch(self, step: int, rank: int) -> Batch:
        """The rows of one batch."""
        number = step * self.ranks + rank
        limits = self.rows[self.batches[number] : self.batches[number + 1] + 1].tolist()
        return tuple(self._row(begin, end) for begin, end in zip(limits, limits[1:]))

    def _row(self, begin: int, end: int) -> _Row:
        columns = (column[begin:end].tolist() for column in (self.example, self.start, self.stop))
        return tuple(map(Piece, *columns))


def _offsets(sizes: Union[Sequence[int], np.ndarray]) -> np.ndarray:
    """Where each group begins, and after them where the last one ends: int64 [sizes + 1]."""
    return np.concatenate([[0], np.cumsum(np.asarray(sizes, np.int64))]).astype(np.int64)


def _whole(lengths: np.ndarray, batches: Sequence[Sequence[Sequence[int]]], ranks: int) -> EpochPlan:
    """A plan of whole examples.  batches: the example numbers of each row of each batch."""
    rows = [row for batch in batches for row in batch]
    example = np.array([number for row in rows for number in row], np.int64)
    sizes = [len(row) for row in rows], [len(batch) for batch in batches]
    return EpochPlan(
        example, np.zeros(len(example), np.int64), lengths[example], _offsets(sizes[0]), _offsets(sizes[1]), ranks
    )


def _deal(rows: Sequence[_T], options: BatchOptions) -> List[List[_T]]:
    """Rows to batches, bs * ranks rows a step.  The ranks take turns, so that each has rows of a short last step."""
    per_step, ranks = options.batch_size * options.ranks, options.ranks
    steps = [rows[at : at + per_step] for at in range(0, len(rows), per_step)]
    return [list(step[rank::ranks]) for step in steps for rank in range(ranks)]


def _bins_to_plan(lengths: np.ndarray, bins: List[List[int]], options: BatchOptions) -> EpochPlan:
    """One bin a batch.  If the last step has fewer bins than ranks, its examples are shared out over all ranks."""
    last = len(bins) % options.ranks
    if last:
        bins = bins[:-last] + _shared_out(lengths, bins[-last:], options.ranks)
    return _whole(lengths, [[numbers] if numbers else [] for numbers in bins], options.ranks)


def _shared_out(lengths: np.ndarray, bins: Sequence[List[int]], ranks: int) -> List[List[int]]:
    """The examples of fewer bins than ranks in one bin a rank: the longest first, to the rank that has least."""
    shares: List[List[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for number in sorted((number for numbers in bins for number in numbers), key=lambda n: (-lengths[n], n)):
        rank = load.index(min(load))
        shares[rank].append(number)
        load[rank] += int(lengths[number])
    return shares


# ---- the ways: lengths int64 [examples], options, generator -> EpochPlan


def _random_sampling(lengths: np.ndarray, options: BatchOptions, rng: np.random.Generator) -> EpochPlan:
    """bs examples drawn at random.  MiniBatchPacking has the same batches, without padding."""
    return _whole(
        lengths, _deal([[number] for number in rng.permutation(len(lengths)).tolist()], options), options.ranks
    )


def _group_by_length(lengths: np.ndarray, options: BatchOptions, rng: np.random.Generator) -> EpochPlan:
    """Random groups of up to 50 batches, each sorted by length, so that a batch needs little padding.

    The longest example comes first of all, so that memory runs out in the first step or not at all.
    """
    order = rng.permutation(len(lengths))
    size = max(1, min(len(order) // (4 * options.batch_size), _MEGA_BATCHES)) * options.batch_size
    groups = [order[at : at + size] for at in range(0, len(order), size)]
    groups = [group[np.argsort(-lengths[group], kind="stable")] for group in groups]
    longest = max(range(len(groups)), key=lambda number: lengths[groups[number][0]])
    groups[longest][0], groups[0][0] = groups[0][0], groups[longest][0]
    return _whole(lengths, _deal([[number] for number in np.concatenate(groups).tolist()], options), options.ranks)


def _fixed_length_packing(lengths: np.ndarray, options: BatchOptions, rng: np.random.Generator) -> EpochPlan:
    """All examples, shuffled, as one stream that is cut every msl tokens.  Rows are full, and examples are broken."""
    order = rng.permutation(len(lengths))
    begins = np.cumsum(lengths[order]) - lengths[order]
    total = int(lengths.sum())
    cuts = np.unique(np.concatenate([begins, np.arange(0, total, options.max_sequence_length)]))
    which = np.searchsorted(begins, cuts, side="right") - 1
    example, start = order[which], cuts - begins[which]
    stop = start + np.diff(np.append(cuts, total))
    firsts = np.append(np.searchsorted(cuts, np.arange(0, total, options.max_sequence_length)), len(cuts))
    batches = _deal(range(len(firsts) - 1), options)
    # The ranks take turns, so the rows and their pieces are now in another order than in the stream.
    rows = [row for batch in batches for row in batch]
    sizes = _offsets(np.diff(firsts)[rows])
    pieces = np.concatenate([np.arange(firsts[row], firsts[row + 1]) for row in rows])
    per_batch = _offsets([len(batch) for batch in batches])
    return EpochPlan(example[pieces], start[pieces], stop[pieces], sizes, per_batch, options.ranks)


def _multipack(lengths: np.ndarray, options: BatchOptions, rng: np.random.Generator) -> EpochPlan:
    """In each step, as many of the next shuffled examples as first-fit decreasing fits into one bin a rank."""
    order = rng.permutation(len(lengths))
    ends = np.cumsum(lengths[order])
    bins: List[List[int]] = []
    at = 0
    while at < len(order):
        before = int(ends[at - 1]) if at else 0
        fits, fails = at + 1, int(np.searchsorted(ends, before + options.ranks * options.capacity, side="right")) + 1
        found = _first_fit_decreasing(lengths, order[at:fits], options) or []  # one example always fits
        while fails - fits > 1:
            middle = (fits + fails) // 2
            tried = _first_fit_decreasing(lengths, order[at:middle], options)
            fits, fails, found = (middle, fails, tried) if tried is not None else (fits, middle, found)
        bins += found
        at = fits
    full = [numbers for numbers in bins if numbers]  # only the last step can have empty ones
    return _bins_to_plan(lengths, full, options)


def _first_fit_decreasing(lengths: np.ndarray, numbers: np.ndarray, options: BatchOptions) -> Optional[List[List[int]]]:
    """These examples in `ranks` bins of bs * msl tokens; None where they do not fit."""
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


def _in_order(lengths: np.ndarray, order: np.ndarray, options: BatchOptions) -> EpochPlan:
    """Bins filled in this order (next fit): an example that does not fit opens the next bin."""
    bins: List[List[int]] = []
    free = 0
    for number, length in zip(order.tolist(), lengths[order].tolist()):
        if length > free:
            bins.append([])
            free = options.capacity
        bins[-1].append(number)
        free -= length
    return _bins_to_plan(lengths, bins, options)


def _random_packing(lengths: np.ndarray, options: BatchOptions, rng: np.random.Generator) -> EpochPlan:
    """Bins of bs * msl tokens, filled in random order."""
    return _in_order(lengths, rng.permutation(len(lengths)), options)


def _sorted_packing(lengths: np.ndarray, options: BatchOptions, rng: np.random.Generator) -> EpochPlan:
    """Bins of bs * msl tokens, filled from the longest example to the shortest; equal ones in random order."""
    order = rng.permutation(len(lengths))
    return _in_order(lengths, order[np.argsort(-lengths[order], kind="stable")], options)


def _optimal_packing(lengths: np.ndarray, options: BatchOptions, rng: np.random.Generator) -> EpochPlan:
    """As few rows of msl tokens as possible, bs rows a batch, with the attention work balanced.

    The work of a row is the sum of its squared lengths.  In every step the ranks get the same number of rows and nearly
    the same work, and all steps get nearly the same work.  Otherwise rows are drawn at random.
    """
    rows = [row.tolist() for row in _optimal_rows(lengths, options.max_sequence_length, rng)]
    work = np.array([int((lengths[row] ** 2).sum()) for row in rows])

    # Rows sorted by work, in groups of one row a rank.  Each step gets one of the next `count` groups, at random.
    groups = np.split(np.argsort(-work, kind="stable"), range(options.ranks, len(rows), options.ranks))
    count = -(-len(rows) // (options.batch_size * options.ranks))
    steps: List[List[int]] = [[] for _ in range(count)]
    for at in range(0, len(groups), count):
        for step, group in zip(rng.permutation(count).tolist(), groups[at : at + count]):
            steps[step] += group.tolist()
    # A step with too few rows for all ranks comes last.
    fewest = min(range(count), key=lambda step: len(steps[step]))
    steps[fewest], steps[-1] = steps[-1], steps[fewest]

    # Its examples are shared out, one row a rank, where that is possible, so that no rank is idle.
    tail: List[List[List[int]]] = []
    if len(steps[-1]) < options.ranks:
        _give_enough_examples(steps, [len(row) for row in rows], work, options.ranks)
        spread = _shared_out(lengths, [rows[row] for row in steps[-1]], options.ranks)
        if max(int(lengths[numbers].sum()) for numbers in spread) <= options.max_sequence_length:
            steps.pop()
            tail = [[numbers] if numbers else [] for numbers in spread]

    batches: List[List[List[int]]] = []
    for chosen in steps:
        shares: List[List[int]] = [[] for _ in range(options.ranks)]
        load = [0] * options.ranks
        most = -(-len(chosen) // options.ranks)
        for row in chosen:  # the most work first, to the rank that has least
            open_ranks = [rank for rank in range(options.ranks) if len(shares[rank]) < most]
            rank = min(open_ranks, key=load.__getitem__)
            shares[rank].append(row)
            load[rank] += int(work[row])
        batches += [[rows[row] for row in share] for share in shares]
    return _whole(lengths, batches + tail, options.ranks)


def _give_enough_examples(steps: List[List[int]], examples: List[int], work: np.ndarray, ranks: int) -> None:
    """If the rows of the last step have fewer examples than there are ranks, exchange one for a row that has more.

    examples, work: of each row.  Of the rows that have enough, the one of nearest work is taken.
    """
    missing = ranks - sum(examples[row] for row in steps[-1])
    if missing <= 0:
        return
    at = min(range(len(steps[-1])), key=lambda at: examples[steps[-1][at]])
    given = steps[-1][at]
    enough = [
        (abs(int(work[row] - work[given])), step, place)
        for step, rows in enumerate(steps[:-1])
        for place, row in enumerate(rows)
        if examples[row] >= examples[given] + missing
    ]
    if enough:
        _, step, place = min(enough)
        steps[-1][at], steps[step][place] = steps[step][place], given


def _optimal_rows(lengths: np.ndarray, slots: int, rng: np.random.Generator) -> List[np.ndarray]:
    """The numbers of the examples of each row of an optimal packing."""
    recipe = _recipe(lengths.tobytes(), slots)
    row, _ = assign(lengths, recipe, int(rng.integers(2**63)))
    ends = np.cumsum(np.bincount(row, minlength=recipe.packs))
    return np.split(np.argsort(row, kind="stable"), ends[:-1])


@lru_cache(1)
def _recipe(lengths: bytes, max_sequence_length: int) -> Packing:
    """The optimal packing of these lengths (int64 bytes), solved in the first epoch and kept for the others."""
    from pack_data.optimal import pack

    histogram = LengthHistogram.from_lengths(np.frombuffer(lengths, np.int64), max_sequence_length)
    return pack(histogram, max_sequences_per_pack=None)


@dataclass(frozen=True)
class Way:
    """One row of the paper's table: how examples are grouped, and whether their batches are padded."""

    name: str
    group: Callable[[np.ndarray, BatchOptions, np.random.Generator], EpochPlan]
    padding_free: bool

    def plan(self, lengths: Any, options: BatchOptions, epoch: int = 0) -> EpochPlan:
        """The batches of one epoch; the same for the same lengths, options and epoch.

        lengths: tokens of each example, integers [examples].  Raises ValueError where there are none, or one is below 1
        or above max_sequence_length.
        """
        lengths = fit(lengths, options.max_sequence_length).lengths.astype(np.int64)
        if not len(lengths):
            raise ValueError("there are no examples to group")
        return self.group(lengths, options, np.random.default_rng((options.seed, epoch)))


WAYS = {
    way.name: way
    for way in (
        Way("RandomSampling+Padding", _random_sampling, False),
        Way("GroupByLength+Padding", _group_by_length, False),
        Way("MiniBatchPacking+PosID", _random_sampling, True),
        Way("FixedLengthPacking", _fixed_length_packing, False),
        Way("FixedLengthPacking+PosID", _fixed_length_packing, True),
        Way("Multipack+PosID", _multipack, True),
        Way("SortedPacking+PosID", _sorted_packing, True),
        Way("RandomPacking+PosID", _random_packing, True),
        Way("OptimalPacking+PosID", _optimal_packing, True),
    )
}


def get_way(name: str) -> Way:
    """Raises ValueError for an unknown name."""
    if name not in WAYS:
        raise ValueError(f"unknown batching strategy {name!r}; choose from {', '.join(WAYS)}")
    return WAYS[name]
