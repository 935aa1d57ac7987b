"""What a way of making batches does to the examples, measured on the batches that it makes.

In the examples used here, each token is its own number in the whole data set.  So every token of a batch shows which
example it comes from.
"""

from __future__ import annotations

from typing import Dict, Iterator, List, NamedTuple, Tuple

import numpy as np

from pack_data.batching.collators import collate
from pack_data.batching.plans import BatchOptions, Way

# Standard deviations by which the share of falling steps must miss one half to count as sorted.
_SORTED_DEVIATIONS = 4.0
_PAD = -1


class Properties(NamedTuple):
    """The five columns of the table."""

    variable_length_kernel: bool  # a batch has cumulative lengths, and no mask
    correct_position_ids: bool  # positions count from the first token of each example in the row
    no_cross_attention: bool  # no token may attend to a token of another example
    no_broken_example: bool  # no example is cut
    no_sorting: bool  # the mean length of the steps rises and falls as in a random order


COLUMNS = ("kernel", "positions", "isolated", "unbroken", "unsorted")  # their headings


class WayReport(NamedTuple):
    """One epoch of a way: its properties and its cost."""

    way: str
    properties: Properties
    steps: int  # batches of each rank
    rows: int
    tokens: int  # real ones
    slots: int  # token positions that the model computes, padding included
    efficiency: float  # real tokens / slots
    fill: float  # real tokens / slots if every batch had bs rows of msl tokens, as a static shape has
    attention_balance: float  # sum of squared lengths of the busiest rank over the ranks' mean; mean over the steps


def _runs(ids: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Where in a row the pieces of examples begin: int64 [pieces].

    ids: the row's token numbers.  begins: the first token number of each example.
    """
    which = np.searchsorted(begins, ids, side="right") - 1
    broken = np.ones(len(ids), bool)
    broken[1:] = (which[1:] != which[:-1]) | (ids[1:] != ids[:-1] + 1)
    return np.flatnonzero(broken)


def report(way: Way, lengths: np.ndarray, options: BatchOptions, epoch: int = 0) -> WayReport:
    """Make every batch of an epoch and measure it.  Raises ValueError if a token is missing or comes twice."""
    plan, lengths = way.plan(lengths, options, epoch), np.asarray(lengths, np.int64)
    begins = np.cumsum(lengths) - lengths
    dataset = [{"input_ids": np.arange(begin, begin + length)} for begin, length in zip(begins, lengths)]
    seen = np.zeros(int(lengths.sum()), np.int64)
    pieces = np.zeros(len(lengths), np.int64)
    kernel = positions_right = isolated = True
    slots = 0
    balances: List[float] = []
    means: List[float] = []
    for step in range(plan.steps):
        work, tokens, examples = [], 0, 0
        for rank in range(options.ranks):
            batch = collate(way, plan.batch(step, rank), dataset, pad_id=_PAD)
            slots += batch["input_ids"].size
            kernel &= "cumulative_lengths" in batch and "attention_mask" not in batch
            work.append(0)
            for ids, positions in _attended(batch):
                ids, positions = ids[ids != _PAD], positions[ids != _PAD]
                if not len(ids):
                    continue
                seen[ids] += 1
                firsts = _runs(ids, begins)
                owners = np.searchsorted(begins, ids[firsts], side="right") - 1
                np.add.at(pieces, owners, 1)
                isolated &= len(np.unique(owners)) == 1
                counted = np.arange(len(ids)) - np.repeat(firsts, np.diff(np.append(firsts, len(ids))))
                positions_right &= bool((positions == counted).all())
                work[-1] += len(ids) ** 2
                tokens += len(ids)
                examples += len(owners)
        balances.append(max(work) * options.ranks / sum(work))
        means.append(tokens / examples)
    if not (seen == 1).all():
        wrong = int(np.flatnonzero(seen != 1)[0])
        raise ValueError(f"{way.name}: token {wrong} comes {int(seen[wrong])} times in an epoch")
    properties = Properties(
        variable_length_kernel=kernel,
        correct_position_ids=positions_right,
        no_cross_attention=isolated,
        no_broken_example=bool((pieces == 1).all()),
        no_sorting=not _sorted(np.array(means)),
    )
    return WayReport(
        way=way.name,
        properties=properties,
        steps=plan.steps,
        rows=len(plan.rows) - 1,
        tokens=len(seen),
        slots=slots,
        efficiency=len(seen) / slots,
        fill=len(seen) / (plan.steps * options.ranks * options.capacity),
        attention_balance=float(np.mean(balances)),
    )


def _attended(batch: Dict[str, np.ndarray]) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
    """input_ids and position_ids of each group of tokens that may attend to each other."""
    if "cumulative_lengths" in batch:
        ends = batch["cumulative_lengths"]
        for begin, end in zip(ends[:-1], ends[1:]):
            yield batch["input_ids"][0, begin:end], batch["position_ids"][0, begin:end]
    else:
        for ids, positions, mask in zip(batch["input_ids"], batch["position_ids"], batch["attention_mask"]):
            yield ids[mask == 1], positions[mask == 1]


def _sorted(means: np.ndarray) -> bool:
    """Whether the mean lengths of the steps follow an order.

    In a random order, each mean is as often below as above the one before.  The number of falls among n numbers in
    random order has variance (n + 1) / 12 (Eulerian numbers).  Below about 30 steps no order can show.
    """
    changes = np.diff(means)
    changes = changes[changes != 0]
    if not len(changes):
        return False
    deviation = np.sqrt((len(changes) + 2) / 12)
    return bool(abs((changes < 0).sum() - len(changes) / 2) > _SORTED_DEVIATIONS * deviation)
