"""The effects of a way of making batches on the examples, measured on the batches that it makes.

In the examples used here, each token is its own number in the whole data set. So every token of a batch shows which
example it comes from.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np

from pack_data.batching.collators import Example, padded_batch, padding_free_batch, token_columns
from pack_data.batching.plans import Batch, BatchOptions, Way

# Standard deviations by which the share of falling steps must miss one half to count as sorted.
_SORTED_DEVIATIONS = 4.0
_PAD = -1


class _Properties(NamedTuple):
    """The five columns of the paper's table."""

    variable_length_kernel: bool  # a batch has cumulative lengths instead of a mask
    correct_position_ids: bool  # positions count from the first token of each example in the row
    no_cross_attention: bool  # no token may attend to a token of another example
    no_broken_example: bool  # no example is cut
    no_sorting: bool  # the mean length of the steps rises and falls as in a random order


COLUMNS = ("kernel", "positions", "isolated", "unbroken", "unsorted")  # their headings


class WayReport(NamedTuple):
    """One epoch of a way: its properties and its cost."""

    way: str
    properties: _Properties
    steps: int  # batches of each rank
    rows: int
    tokens: int  # real ones
    slots: int  # token positions that the model computes, padding included
    efficiency: float  # real tokens / slots
    # Real tokens / slots if every batch had bs rows of msl tokens, as a static shape has.
    fill: float
    attention_balance: float  # sum of squared lengths of the busiest rank over the ranks' mean; mean over the steps


class _Epoch:
    """The batches of an epoch, measured one after another."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._begins = np.cumsum(lengths) - lengths  # first token number of each example
        self.seen = np.zeros(int(lengths.sum()), np.int64)  # times that each token was in a batch
        self.pieces = np.zeros(len(lengths), np.int64)  # of each example
        self.slots = 0
        self.kernel = True
        self.positions_right = True
        self.isolated = True

    def dataset(self) -> List[Dict[str, np.ndarray]]:
        """Return the examples, in which each token is its own number."""
        return [{"input_ids": ids} for ids in np.split(np.arange(len(self.seen)), self._begins[1:])]

    def measure(self, batch: Dict[str, np.ndarray]) -> Tuple[int, int, int]:
        """Measure a batch; return its attention work, tokens and pieces."""
        self.slots += batch["input_ids"].size
        self.kernel &= "cumulative_lengths" in batch
        work = tokens = pieces = 0
        for ids, positions in _attended(batch):
            is_token = ids != _PAD
            ids, positions = ids[is_token], positions[is_token]
            if not len(ids):
                continue
            self.seen[ids] += 1
            examples = np.searchsorted(self._begins, ids, side="right") - 1
            is_first = np.ones(len(ids), bool)
            is_first[1:] = (examples[1:] != examples[:-1]) | (ids[1:] != ids[:-1] + 1)
            firsts = np.flatnonzero(is_first)
            owners = examples[firsts]
            np.add.at(self.pieces, owners, 1)
            self.isolated &= len(np.unique(owners)) == 1
            counted = np.arange(len(ids)) - np.repeat(firsts, np.diff(np.append(firsts, len(ids))))
            self.positions_right &= bool((positions == counted).all())
            work += len(ids) ** 2
            tokens += len(ids)
            pieces += len(owners)
        return work, tokens, pieces


def report(way: Way, lengths: np.ndarray, options: BatchOptions, epoch: int = 0) -> WayReport:
    """Make every batch of an epoch and measure it.

    Args:
        way: one of the nine ways.
        lengths: tokens of each example, integers [examples].
        options: batch size, longest sequence, ranks and seed.
        epoch: number of the epoch, from 0.

    Returns:
        Padding, attention work and balance over the ranks.

    Raises:
        ValueError: a token is missing or comes twice.
    """
    plan = way.plan(lengths, options, epoch)
    measured = _Epoch(np.asarray(lengths, np.int64))
    dataset = measured.dataset()
    balances: List[float] = []
    means: List[float] = []
    for step in range(plan.steps):
        batches = [
            collate(way, plan.batch(step, rank), dataset, pad_id=_PAD)
            for rank in range(options.ranks)
        ]
        work, tokens, pieces = zip(*map(measured.measure, batches))
        balances.append(max(work) * options.ranks / sum(work))
        means.append(sum(tokens) / sum(pieces))

    seen = measured.seen
    if not (seen == 1).all():
        wrong = int(np.flatnonzero(seen != 1)[0])
        raise ValueError(f"{way.name}: token {wrong} comes {int(seen[wrong])} times in an epoch")
    properties = _Properties(
        variable_length_kernel=measured.kernel,
        correct_position_ids=measured.positions_right,
        no_cross_attention=measured.isolated,
        no_broken_example=bool((measured.pieces == 1).all()),
        no_sorting=not _sorted(np.array(means)),
    )
    return WayReport(
        way=way.name,
        properties=properties,
        steps=plan.steps,
        rows=len(plan.rows) - 1,
        tokens=len(seen),
        slots=measured.slots,
        efficiency=len(seen) / measured.slots,
        fill=len(seen) / (plan.steps * options.ranks * options.capacity),
        attention_balance=float(np.mean(balances)),
    )


def _attended(batch: Dict[str, np.ndarray]) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
    """Yield input_ids and position_ids of each group of tokens that may attend to each other."""
    if "cumulative_lengths" in batch:
        ends = batch["cumulative_lengths"]
        for begin, end in zip(ends[:-1], ends[1:]):
            yield batch["input_ids"][0, begin:end], batch["position_ids"][0, begin:end]
    else:
        for ids, positions, mask in zip(
            batch["input_ids"], batch["position_ids"], batch["attention_mask"]
        ):
            yield ids[mask == 1], positions[mask == 1]


def _sorted(means: np.ndarray) -> bool:
    """Return True if the mean lengths of the steps follow an order.

    In a random order, each mean is as often below as above the one before. The number of falls among n numbers in
    random order has variance (n + 1) / 12 (Eulerian numbers). Below about 30 steps no order can show.
    """
    changes = np.diff(means)
    changes = changes[changes != 0]
    if not len(changes):
        return False
    falls = (changes < 0).sum()
    deviation = np.sqrt((len(changes) + 2) / 12)
    return bool(abs(falls - len(changes) / 2) > _SORTED_DEVIATIONS * deviation)


def collate(
    way: Way,
    batch: Batch,
    dataset: Sequence[Example],
    pad_id: int = 0,
) -> Dict[str, np.ndarray]:
    """Return the arrays of one batch of a plan.

    A padded row of several pieces is one text to the model: nothing tells the pieces apart.
    """
    texts: List[Dict[str, Any]] = []
    for row in batch:
        pieces = []
        for number, start, stop in row:
            columns = token_columns(dataset[number], f"example {number}")
            pieces.append({name: values[start:stop] for name, values in columns.items()})
        if not way.padding_free:
            names = [name for name in ("input_ids", "labels") if name in pieces[0]]
            pieces = [{name: np.concatenate([piece[name] for piece in pieces]) for name in names}]
        texts += pieces
    batch_of = padding_free_batch if way.padding_free else padded_batch
    return batch_of(texts, pad_id=pad_id)
