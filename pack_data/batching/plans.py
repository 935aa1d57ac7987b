"""Nine ways to group examples into batches.

Eight are those of "Enhancing Training Efficiency Using Packing with Flash Attention", Table 1; the ninth is optimal
packing with balanced attention.

A plan lists the pieces of examples in each row of each batch of one epoch. A padding collator pads the rows; a
padding-free one joins the rows of a batch into one. Every token is in the plan exactly once: the last batch may be
smaller, and no token is dropped. bs: batch size of a rank, in examples or rows; msl: longest sequence, in tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple, TypeVar

import numpy as np

from pack_data.batching.micro_batches import dealt
from pack_data.building.assignment import assign
from pack_data.lengths.overlong import fit
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.reading.fields import whole_number

_MEGA_BATCHES = 50  # batches that are sorted together, as in the length-grouped sampler of Hugging Face Transformers

# With this many examples per length on average, shuffling the examples of each length is enough: pairs meet again only
# by chance.
_OFTEN = 64
# Rows are drawn up to this number of examples times rows, which takes 2 s: each example moves part of a sorted list.
_MOST_MOVES = 1 << 31
# Share of the tokens that are placed in random rows. The rest fills gaps: 5 of 14 families reach the bound every time.
_DRAWN_SHARE = 0.9
# An example may count as shorter by up to this share in the order of placement. Without it, pairs meet twice as often.
_SHIFT = 0.1
# Most sweeps of exchanges over all examples. Twice as many halve the pairs that meet again.
_SWEEPS = 64
# Most exchanges in all sweeps together, which take 2 s.
_MOST_EXCHANGES = 1 << 22
# Greatest distance of two exchanged examples in the order by length, sweep by sweep.
_DISTANCES = (2, 4, 8, 16, 32, 64)

_T = TypeVar("_T")
_Bins = List[List[int]]  # numbers of the examples of each bin


class Piece(NamedTuple):
    """Tokens start..stop - 1 of an example: all of them, unless the way breaks examples."""

    example: int
    start: int
    stop: int


_Row = Tuple[Piece, ...]
Batch = Tuple[_Row, ...]


@dataclass(frozen=True)
class BatchOptions:
    """Everything that a plan follows from, except the lengths.

    Args:
        batch_size: bs, examples or rows of a rank's batch.
        max_sequence_length: msl, tokens.
        ranks: processes that share each step.
        seed: seed of every random choice.

    Raises:
        ValueError: a size is below 1, or the seed below 0.
    """

    batch_size: int
    max_sequence_length: int
    ranks: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_sequence_length", "ranks", "seed"):
            least = 0 if name == "seed" else 1
            value = whole_number(name, getattr(self, name), least=least)
            object.__setattr__(self, name, value)

    @property
    def capacity(self) -> int:
        """Tokens of a full batch, bs * msl."""
        return self.batch_size * self.max_sequence_length


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The batches of one epoch. Batch t * ranks + r is step t of rank r; all ranks have equally many steps.

    A batch of the last step may have no rows, if fewer examples than ranks are left.

    Attributes:
        example: example of each piece, int64 [pieces].
        start: first token of each piece in its example, int64 [pieces].
        stop: token behind each piece in its example, int64 [pieces].
        rows: first piece of each row, and the number of pieces, int64 [rows + 1].
        batches: first row of each batch, and the number of rows, int64 [batches + 1].
        ranks: processes that share each step.
    """

    example: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    rows: np.ndarray
    batches: np.ndarray
    ranks: int

    @property
    def steps(self) -> int:
        """Batches of each rank."""
        return (len(self.batches) - 1) // self.ranks

    def has(self, step: int) -> bool:
        """Return True if the epoch has this step.

        Args:
            step: number of the step, from 0.
        """
        return step < self.steps

    def batch(self, step: int, rank: int) -> Batch:
        """Return the rows of one batch.

        Args:
            step: number of the step, from 0.
            rank: number of the process, from 0.

        Returns:
            The pieces of each row.
        """
        number = step * self.ranks + rank
        first, last = self.batches[number : number + 2]
        limits = self.rows[first : last + 1].tolist()
        return tuple(map(self._row, limits[:-1], limits[1:]))

    def _row(self, begin: int, end: int) -> _Row:
        examples = self.example[begin:end].tolist()
        starts = self.start[begin:end].tolist()
        stops = self.stop[begin:end].tolist()
        return tuple(map(Piece, examples, starts, stops))


def _offsets(sizes: Any) -> np.ndarray:
    """Return where each group begins, and where the last one ends, int64 [sizes + 1]."""
    ends = np.cumsum(np.asarray(sizes, np.int64))
    return np.concatenate([[0], ends]).astype(np.int64)


def _whole(lengths: np.ndarray, batches: Sequence[_Bins], ranks: int) -> EpochPlan:
    """Return a plan of whole examples; batches: the example numbers of each row of each batch."""
    rows = list(chain.from_iterable(batches))
    example = np.fromiter(chain.from_iterable(rows), np.int64)
    first_pieces = _offsets([len(row) for row in rows])
    first_rows = _offsets([len(batch) for batch in batches])
    return EpochPlan(
        example=example,
        start=np.zeros_like(example),
        stop=lengths[example],
        rows=first_pieces,
        batches=first_rows,
        ranks=ranks,
    )


def _deal(rows: Sequence[_T], options: BatchOptions) -> List[List[_T]]:
    """Deal rows to batches, bs * ranks rows a step. The ranks take turns, so all have rows of a short last step."""
    ranks = options.ranks
    rows_of_step = options.batch_size * ranks
    batches = []
    for start in range(0, len(rows), rows_of_step):
        step = rows[start : start + rows_of_step]
        for rank in range(ranks):
            batches.append(list(step[rank::ranks]))
    return batches


def _one_by_one(lengths: np.ndarray, order: np.ndarray, options: BatchOptions) -> EpochPlan:
    """Return a plan of one example a row, in this order."""
    rows = [[number] for number in order.tolist()]
    return _whole(lengths, _deal(rows, options), options.ranks)


def _bins_to_plan(lengths: np.ndarray, bins: _Bins, options: BatchOptions) -> EpochPlan:
    """Return a plan of one bin a batch, the examples of a last step with too few bins shared out over all ranks."""
    last = len(bins) % options.ranks
    if last:
        last_step = _shared_out(lengths, bins[-last:], options.ranks)
        bins = bins[:-last] + last_step
    return _whole(lengths, _as_batches(bins), options.ranks)


def _as_batches(bins: _Bins) -> List[_Bins]:
    """Return each bin as a batch of one row, an empty one as a batch without rows."""
    return [[numbers] if numbers else [] for numbers in bins]


def _longest_first(lengths: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return these examples sorted by length; equal ones keep their order."""
    order = np.argsort(-lengths[numbers], kind="stable")
    return numbers[order]


def _shared_out(lengths: np.ndarray, bins: _Bins, ranks: int) -> _Bins:
    """Return the examples of these bins in one bin a rank: the longest first, to the rank that has least."""
    numbers = np.sort(np.concatenate(bins))
    shares = dealt(lengths[numbers], ranks, len(numbers))
    return [numbers[share].tolist() for share in shares]


# ---- the ways: lengths int64 [examples], options, generator -> EpochPlan ---------------------------------------------


def _random_sampling(
    lengths: np.ndarray, options: BatchOptions, rng: np.random.Generator
) -> EpochPlan:
    """Draw bs examples at random. MiniBatchPacking has the same batches, without padding."""
    return _one_by_one(lengths, rng.permutation(len(lengths)), options)


def _group_by_length(
    lengths: np.ndarray, options: BatchOptions, rng: np.random.Generator
) -> EpochPlan:
    """Sort random groups of up to 50 batches by length, so that a batch needs little padding.

    The longest example comes first of all, so that memory runs out in the first step or not at all.
    """
    order = rng.permutation(len(lengths))
    quarter = len(order) // (4 * options.batch_size)
    batches = max(1, min(quarter, _MEGA_BATCHES))
    size = batches * options.batch_size
    groups = []
    for start in range(0, len(order), size):
        group = order[start : start + size]
        groups.append(_longest_first(lengths, group))
    first_group = groups[0]
    longest_group = max(groups, key=lambda group: lengths[group[0]])
    longest_group[0], first_group[0] = first_group[0], longest_group[0]
    return _one_by_one(lengths, np.concatenate(groups), options)


def _fixed_length_packing(
    lengths: np.ndarray, options: BatchOptions, rng: np.random.Generator
) -> EpochPlan:
    """Cut all examples, shuffled, as one stream every msl tokens. Rows are full, and examples are broken."""
    order = rng.permutation(len(lengths))
    begins = np.cumsum(lengths[order]) - lengths[order]
    total = int(lengths.sum())
    row_begins = np.arange(0, total, options.max_sequence_length)
    cuts = np.unique(np.concatenate([begins, row_begins]))
    place = np.searchsorted(begins, cuts, side="right") - 1
    example = order[place]
    start = cuts - begins[place]
    stop = start + np.diff(np.append(cuts, total))

    # The ranks take turns, so the rows and their pieces stand in another order than in the stream.
    firsts = np.append(np.searchsorted(cuts, row_begins), len(cuts))
    batches = _deal(range(len(row_begins)), options)
    rows = list(chain.from_iterable(batches))
    pieces = np.concatenate([np.arange(firsts[row], firsts[row + 1]) for row in rows])
    first_pieces = _offsets(np.diff(firsts)[rows])
    first_rows = _offsets([len(batch) for batch in batches])
    return EpochPlan(
        example=example[pieces],
        start=start[pieces],
        stop=stop[pieces],
        rows=first_pieces,
        batches=first_rows,
        ranks=options.ranks,
    )


def _multipack(lengths: np.ndarray, options: BatchOptions, rng: np.random.Generator) -> EpochPlan:
    """Take in each step as many of the next shuffled examples as first-fit decreasing fits into one bin a rank."""
    order = rng.permutation(len(lengths))
    ends = np.cumsum(lengths[order])
    bins: _Bins = []
    start = 0
    while start < len(order):
        tokens_before = int(ends[start - 1]) if start else 0
        most_tokens = tokens_before + options.ranks * options.capacity
        fits = start + 1  # one example always fits
        fails = int(np.searchsorted(ends, most_tokens, side="right")) + 1
        step = _first_fit_decreasing(lengths, order[start:fits], options) or []
        while fails - fits > 1:
            middle = (fits + fails) // 2
            longer_step = _first_fit_decreasing(lengths, order[start:middle], options)
            if longer_step is None:
                fails = middle
            else:
                fits = middle
                step = longer_step
        bins += step
        start = fits
    full = [numbers for numbers in bins if numbers]  # only the last step can have empty ones
    return _bins_to_plan(lengths, full, options)


def _first_fit_decreasing(
    lengths: np.ndarray, numbers: np.ndarray, options: BatchOptions
) -> Optional[_Bins]:
    """Return these examples in `ranks` bins of bs * msl tokens; None if they do not fit."""
    room = [options.capacity] * options.ranks
    bins: _Bins = [[] for _ in room]
    for number in _longest_first(lengths, numbers).tolist():
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
    """Fill bins in this order (next fit): an example that does not fit opens the next bin."""
    bins: _Bins = []
    free = 0
    for number, length in zip(order.tolist(), lengths[order].tolist()):
        if length > free:
            bins.append([])
            free = options.capacity
        bins[-1].append(number)
        free -= length
    return _bins_to_plan(lengths, bins, options)


def _random_packing(
    lengths: np.ndarray, options: BatchOptions, rng: np.random.Generator
) -> EpochPlan:
    """Fill bins of bs * msl tokens in random order."""
    return _in_order(lengths, rng.permutation(len(lengths)), options)


def _sorted_packing(
    lengths: np.ndarray, options: BatchOptions, rng: np.random.Generator
) -> EpochPlan:
    """Fill bins of bs * msl tokens from the longest example to the shortest; equal ones in random order."""
    order = rng.permutation(len(lengths))
    return _in_order(lengths, _longest_first(lengths, order), options)


def _optimal_packing(
    lengths: np.ndarray, options: BatchOptions, rng: np.random.Generator
) -> EpochPlan:
    """Take as few rows of msl tokens as possible, bs rows a batch, with the attention work balanced.

    The work of a row is the sum of its squared lengths. In every step the ranks get the same number of rows and nearly
    the same work, and all steps get nearly the same work. Otherwise rows are drawn at random.
    """
    rows = [row.tolist() for row in _optimal_rows(lengths, options.max_sequence_length, rng)]
    squares = lengths**2
    work = np.array([int(squares[row].sum()) for row in rows])
    steps = _steps_of_equal_work(work, options, rng)

    # The examples of a last step with too few rows are shared out, one row a rank, if they fit, so that no rank is
    # idle.
    last_step: List[_Bins] = []
    if len(steps[-1]) < options.ranks:
        _give_enough_examples(steps, [len(row) for row in rows], work, options.ranks)
        last_rows = [rows[row] for row in steps[-1]]
        shares = _shared_out(lengths, last_rows, options.ranks)
        longest = max(int(lengths[numbers].sum()) for numbers in shares)
        if longest <= options.max_sequence_length:
            steps.pop()
            last_step = _as_batches(shares)

    batches: List[_Bins] = []
    for step in steps:
        most_rows = -(-len(step) // options.ranks)
        for share in dealt(work[step], options.ranks, most_rows):
            batches.append([rows[step[place]] for place in share])
    return _whole(lengths, batches + last_step, options.ranks)


def _steps_of_equal_work(
    work: np.ndarray, options: BatchOptions, rng: np.random.Generator
) -> _Bins:
    """Return the rows of each step; a step with fewer rows than the others comes last.

    Rows sorted by work come in groups of one row a rank. Each step gets one of the next groups, at random.
    """
    ranks = options.ranks
    most_work_first = np.argsort(-work, kind="stable")
    groups = np.split(most_work_first, range(ranks, len(work), ranks))
    number = -(-len(work) // (options.batch_size * ranks))
    steps: _Bins = [[] for _ in range(number)]
    for start in range(0, len(groups), number):
        order = rng.permutation(number).tolist()
        for step, group in zip(order, groups[start : start + number]):
            steps[step] += group.tolist()
    fewest = min(range(number), key=lambda step: len(steps[step]))
    steps[fewest], steps[-1] = steps[-1], steps[fewest]
    return steps


def _give_enough_examples(steps: _Bins, examples: List[int], work: np.ndarray, ranks: int) -> None:
    """Exchange a row of the last step for one with more examples, if its rows have fewer examples than there are ranks.

    examples, work: of each row. Of the rows that have enough, the one of nearest work is taken.
    """
    last = steps[-1]
    missing = ranks - sum(examples[row] for row in last)
    if missing <= 0:
        return
    smallest = min(range(len(last)), key=lambda place: examples[last[place]])
    given_away = last[smallest]
    candidates = []
    for step, rows in enumerate(steps[:-1]):
        for place, row in enumerate(rows):
            if examples[row] >= examples[given_away] + missing:
                difference = abs(int(work[row] - work[given_away]))
                candidates.append((difference, step, place))
    if candidates:
        _, step, place = min(candidates)
        last[smallest], steps[step][place] = steps[step][place], given_away


def _optimal_rows(lengths: np.ndarray, slots: int, rng: np.random.Generator) -> List[np.ndarray]:
    """Return the numbers of the examples of each row: as many rows as an optimal packing, drawn anew."""
    packing = _optimal_packing_of(lengths.tobytes(), slots)
    number = len(lengths)
    is_varied = number <= _OFTEN * len(np.unique(lengths))
    row = None
    if is_varied and number * packing.packs <= _MOST_MOVES:
        row = _drawn_rows(lengths, slots, packing.packs, rng)
    if row is None:
        row, _ = assign(lengths, packing, int(rng.integers(2**63)))
        if is_varied:
            row = _exchanged(row, lengths, slots, rng)
    counts = np.bincount(row)
    return np.split(np.argsort(row, kind="stable"), np.cumsum(counts[counts > 0])[:-1])


def _drawn_rows(
    lengths: np.ndarray, slots: int, packs: int, rng: np.random.Generator
) -> Optional[np.ndarray]:
    """Place long examples in random rows with room, and short ones where they fit best; None if one does not fit."""
    number = len(lengths)
    order = np.argsort(-lengths * (1 - _SHIFT * rng.random(number)), kind="stable")
    tokens = np.cumsum(lengths[order])
    drawn = int(np.searchsorted(tokens, _DRAWN_SHARE * tokens[-1]))
    draws = np.zeros(number)
    draws[:drawn] = rng.random(drawn)

    row = np.empty(number, np.int64)
    rooms = [(slots, place) for place in range(packs)]  # ascending
    for example, length, draw in zip(order.tolist(), lengths[order].tolist(), draws.tolist()):
        tightest = bisect_left(rooms, (length, 0))
        if tightest == packs:
            return None
        room, place = rooms.pop(tightest + int(draw * (packs - tightest)))
        row[example] = place
        insort(rooms, (room - length, place))
    return row


def _exchanged(
    row: np.ndarray, lengths: np.ndarray, slots: int, rng: np.random.Generator
) -> np.ndarray:
    """Exchange examples of similar length between rows if they fit. The free slots move with them, to all rows."""
    number = len(lengths)
    order = np.argsort(lengths, kind="stable")
    ascending = lengths[order].tolist()
    row_of = row[order].tolist()
    room = (slots - np.bincount(row, lengths).astype(np.int64)).tolist()
    for sweep in range(min(_SWEEPS, _MOST_EXCHANGES // number)):
        distance = _DISTANCES[sweep % len(_DISTANCES)]
        short = rng.permutation(number)
        long = np.minimum(number - 1, short + rng.integers(1, distance + 1, number))
        for one, other in zip(short.tolist(), long.tolist()):
            more = ascending[other] - ascending[one]
            row_of_short = row_of[one]
            row_of_long = row_of[other]
            if more <= room[row_of_short]:
                room[row_of_short] -= more
                room[row_of_long] += more
                row_of[one] = row_of_long
                row_of[other] = row_of_short
    exchanged = np.empty(number, np.int64)
    exchanged[order] = row_of
    return exchanged


@lru_cache(1)
def _optimal_packing_of(lengths: bytes, max_sequence_length: int) -> Packing:
    """Return the optimal packing of these lengths (int64 bytes), solved in the first epoch and kept for the others."""
    from pack_data.optimal import pack

    histogram = LengthHistogram.from_lengths(np.frombuffer(lengths, np.int64), max_sequence_length)
    return pack(histogram, max_sequences_per_pack=None)


@dataclass(frozen=True)
class Way:
    """One row of the paper's table: how examples are grouped, and whether their batches are padded.

    Attributes:
        name: name in the paper's table.
        group: function of lengths (int64 [examples]), options and generator that returns the plan of an epoch.
        padding_free: False if the examples of a batch are padded.
    """

    name: str
    group: Callable[[np.ndarray, BatchOptions, np.random.Generator], EpochPlan]
    padding_free: bool

    def plan(self, lengths: Any, options: BatchOptions, epoch: int = 0) -> EpochPlan:
        """Return the batches of one epoch; the same for the same lengths, options and epoch.

        Args:
            lengths: tokens of each example, integers [examples].
            options: batch size, longest sequence, ranks and seed.
            epoch: number of the epoch, from 0.

        Returns:
            The batches of the epoch.

        Raises:
            ValueError: there are no lengths, or one is below 1 or above max_sequence_length.
        """
        lengths = fit(lengths, options.max_sequence_length).lengths.astype(np.int64)
        if not len(lengths):
            raise ValueError("lengths: no examples to group; pass at least one length")
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
    """Return a batching strategy.

    Args:
        name: one of `WAYS`.

    Returns:
        The strategy, which plans the batches of an epoch.

    Raises:
        ValueError: no strategy has this name.
    """
    if name not in WAYS:
        raise ValueError(f"unknown batching strategy {name!r}; choose from {', '.join(WAYS)}")
    return WAYS[name]
