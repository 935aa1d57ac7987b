"""Does the order of packs change the learned weights?

Unpacked runs over the same sequences in the same number of updates: in the order of packs, and in random order.  Packs
join long and short sequences, and the number of sequences varies between updates.  Here each sequence is alone in a
row, so that only the order differs.  A random order against another random order shows the effect of chance.  Sorted
sequences are the control: by length, and synthetic topics, which length hardly distinguishes, by a word.
"""

from __future__ import annotations

import itertools
from typing import Any, Dict, List, NamedTuple, Tuple

import numpy as np

from evidence import packed_runs
from evidence.arms import ORDERS, PILOT_SEEDS
from evidence.packed_runs import QUICK, TOPICS, WIKIPEDIA, Regroup, Size
from evidence.runner import Cell, Row, Runner
from evidence.training_shown import OrderShown
from pack_data.store.sequences import Sequences

shown = OrderShown


CONTROLS = ("sorted", "by_word")
SPECIAL = 5  # tokens: [PAD], [UNK], [CLS], [SEP], [MASK]


class Order(NamedTuple):
    """The size of the experiment, and its cells."""

    size: Size
    seeds: Tuple[int, ...]
    pilot: Tuple[int, ...] = PILOT_SEEDS
    orders: Tuple[str, ...] = tuple(ORDERS)[:4]


_SEEDS = tuple(range(1, 13))
SIZES = {
    "quick": Order(QUICK, (1,), (), tuple(ORDERS)),
    "topics": Order(TOPICS, _SEEDS, orders=tuple(ORDERS)),
    "wikipedia": Order(WIKIPEDIA._replace(sequences=48_000, points=5), _SEEDS),
}
DEFAULT = "topics"
SUMMARY = (
    "Unpacked runs over the same sequences in the same number of updates, in the order of packs and in random order;\n"
    "random against another random order; and, as the control, sorted by length.\n\n"
    "topics: synthetic topics, half an hour. wikipedia (--data-dir): 5 million tokens a run, 5 hours.\n"
    "A killed run continues with the same command."
)


def settings(options: Any) -> Dict[str, Any]:
    return packed_runs.settings(options, SIZES[options.size].size)


def regrouped(arm: str, seed: int) -> Regroup:
    """Return a function that divides the sequences of all updates evenly, in the order of the arm."""

    def regroup(by_packs: List[np.ndarray], sequences: Sequences) -> List[np.ndarray]:
        if arm == "packs":
            return by_packs
        if arm.startswith("random"):
            draw = np.random.default_rng([seed, list(ORDERS).index(arm)])
            order = draw.permutation(len(sequences))
        else:
            keys = sequences.lengths if arm == "sorted" else frequent(sequences)
            order = np.argsort(keys, kind="stable")
        return np.array_split(order, len(by_packs))

    return regroup


def frequent(sequences: Sequences) -> np.ndarray:
    """Return the most frequent token of each sequence except special ones, which are first in a trained vocabulary."""
    ends = np.cumsum(sequences.lengths)
    frequent_ids = []
    for ids in np.split(sequences.tokens["input_ids"], ends[:-1]):
        numbers = np.maximum(ids - SPECIAL + 1, 0)  # 0: all special tokens
        counts = np.bincount(numbers)
        frequent_ids.append(counts[1:].argmax())
    return np.array(frequent_ids)


def cells(size: Order, seeds: int) -> List[Cell]:
    """List the cells of the pilot, then those of the other seeds; the first three seeds also have the controls."""
    pilot = itertools.product(size.pilot, ("packs", "random"))
    grid = [Cell(arm, seed) for seed, arm in pilot]
    for place, seed in enumerate(size.seeds[:seeds]):
        grid += [Cell(arm, seed) for arm in size.orders if arm not in CONTROLS or place < 3]
    return grid


def run(options: Any, runner: Runner) -> int:
    size: Order = SIZES[options.size]
    setup = packed_runs.setup(options, size.size)
    runner.keep_facts(setup.facts())

    def part(cell: Cell) -> List[Row]:
        return setup.run(
            setup.config("packed", seed=cell.seed),
            regroup=regrouped(cell.variant, cell.seed),
        )

    runner.run(cells(size, options.seeds), part)
    return runner.show(shown(runner.path), plot=options.plot)
