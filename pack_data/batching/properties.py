"""What a way of making batches does to the examples, read from the batches that it makes.

The examples carry, instead of words, the number of each token in the whole data set. So every token in a batch says
whose it is, and nothing has to be believed.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, NamedTuple

import numpy as np

from pack_data.batching.collators import collate
from pack_data.batching.plans import BatchOptions, Way

# Standard deviations by which the share of falling steps must miss one half to count as sorted.
SORTED_DEVIATIONS = 4.0
_PAD = -1


class Properties(NamedTuple):
    """The five columns of the table."""

    variable_length_kernel: bool  # the batch has cumulative lengths, and no mask that a plain kernel would need
    correct_position_ids: bool  # every position counts from the first token of its example in the row
    no_cross_attention: bool  # no token may attend to a token of another example
    no_broken_example: bool  # every example stands whole in one place
    no_sorting: bool  # the mean length of a step rises and falls as at random


@dataclass(frozen=True)
class Report:
    """One epoch of a way: its properties, and what it costs.

    slots: positions that the model computes, padding included; room: those of as many batches of bs rows of msl, what a
    static shape would compute; attention_balance: the largest rank's sum of squared lengths
    of what attends to each other, over the ranks' mean, averaged over steps (1 is even).
    """

    way: str
    properties: Properties
    steps: int
    rows: int
    tokens: int
    slots: int
    room: int
    attention_balance: float

    @property
    def efficiency(self) -> float:
        """Real tokens / slots."""
        return self.tokens / self.slots

    @property
    def fill(self) -> float:
        """Real tokens / room."""
        return self.tokens / self.room


def _runs(ids: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Where each piece of an example begins among its neighbours, int64 [pieces]."""
    which = np.searchsorted(begins, ids, side="right") - 1
    broken = np.ones(len(ids), bool)
    broken[1:] = (which[1:] != which[:-1]) | (ids[1:] != ids[:-1] + 1)
    return np.flatnonzero(broken)


def report(way: Way, lengths: np.ndarray, options: BatchOptions, epoch: int = 0) -> Report:
    """Makes and reads every batch of an epoch.  ValueError if a token is missing or comes twice."""
    lengths = np.asarray(lengths, np.int64)
    begins = np.cumsum(lengths) - lengths
    dataset = [{"input_ids": np.arange(begin, begin + length)} for begin, length in zip(begins, lengths)]
    plan = way.plan(lengths, options, epoch)
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
        raise ValueError(f"{way.name}: token {int(np.flatnonzero(seen != 1)[0])} comes {int(seen[seen != 1][0])} times in an epoch")
    properties = Properties(bool(kernel), positions_right, isolated, bool((pieces == 1).all()), not _sorted(np.array(means)))
    return Report(way.name, properties, plan.steps, len(plan.rows) - 1, len(seen), slots,
                  plan.steps * options.ranks * options.capacity, float(np.mean(balances)))


def _attended(batch: Dict[str, np.ndarray]):
    """The stretches of a batch within which tokens see each other, as (input_ids, position_ids)."""
    if "cumulative_lengths" in batch:
        ends = batch["cumulative_lengths"]
        for begin, end in zip(ends[:-1], ends[1:]):
            yield batch["input_ids"][0, begin:end], batch["position_ids"][0, begin:end]
    else:
        for ids, positions, mask in zip(batch["input_ids"], batch["position_ids"], batch["attention_mask"]):
            yield ids[mask == 1], positions[mask == 1]


def _sorted(means: np.ndarray) -> bool:
    """Whether lengths follow an order: in a random one, each step's mean is as often below as above the one before.

    The falls among n numbers in random order have variance (n + 1) / 12 (Eulerian numbers).  Some 30 steps are needed
    before an order can show.
    """
    changes = np.diff(means)
    changes = changes[changes != 0]
    if not len(changes):
        return False
    deviation = np.sqrt((len(changes) + 2) / 12)
    return bool(abs((changes < 0).sum() - len(changes) / 2) > SORTED_DEVIATIONS * deviation)
