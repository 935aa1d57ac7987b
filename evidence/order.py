"""Does the order that packing imposes change what is learnt?

Unpacked runs over the same sequences in as many updates: those of the packs of an update, against a random order of all
of them.  Packs put long and short sequences together, and their number varies from update to update.  Each sequence has
a row of its own here, so that only the order differs.  A random order against another random order shows the effect of
chance.  Sorted sequences are the control: by length, and synthetic topics, which length hardly tells apart, by a word.
"""

from __future__ import annotations

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
    size: Size
    seeds: Tuple[int, ...]
    pilot: Tuple[int, ...] = PILOT_SEEDS
    orders: Tuple[str, ...] = tuple(ORDERS)[:4]


SIZES, DEFAULT = (
    {
        "quick": Order(QUICK, (1,), (), tuple(ORDERS)),
        "topics": Order(TOPICS, tuple(range(1, 13)), orders=tuple(ORDERS)),
        "wikipedia": Order(WIKIPEDIA._replace(sequences=48_000, points=5), tuple(range(1, 13))),
    },
    "topics",
)
SUMMARY = (
    "Unpacked runs over the same sequences in as many updates, in the order of packs and in random order; random\n"
    "beside another random order; and, as the control, sorted by length.\n\n"
    "topics: made-up topics, half an hour. wikipedia (--data-dir): 5 million tokens a run, 5 hours.\n"
    "Several processes with the same --out share the work; a run that was killed goes on with the same command."
)


def settings(options: Any) -> Dict[str, Any]:
    return packed_runs.settings(options, SIZES[options.size].size)


def regrouped(arm: str, seed: int) -> Regroup:
    """Return a function that deals out the sequences of all updates evenly, in the order of the arm."""

    def regroup(by_packs: List[np.ndarray], sequences: Sequences) -> List[np.ndarray]:
        if arm == "packs":
            return by_packs
        if arm.startswith("random"):
            order = np.random.default_rng([seed, list(ORDERS).index(arm)]).permutation(
                len(sequences)
            )
        else:
            order = np.argsort(
                sequences.lengths if arm == "sorted" else frequent(sequences), kind="stable"
            )
        return np.array_split(order, len(by_packs))

    return regroup


def frequent(sequences: Sequences) -> np.ndarray:
    """Return the most frequent token of each sequence, without special ones, which a trained vocabulary has first."""
    ids = np.split(sequences.tokens["input_ids"], np.cumsum(sequences.lengths)[:-1])
    return np.array([np.bincount(np.maximum(each - SPECIAL + 1, 0))[1:].argmax() for each in ids])


def cells(size: Order, seeds: int) -> List[Cell]:
    """List the cells of the pilot, then seed by seed those that count; the first three seeds have the control too."""
    found = [Cell(arm, seed) for seed in size.pilot for arm in ("packs", "random")]
    for place, seed in enumerate(size.seeds[:seeds]):
        found += [Cell(arm, seed) for arm in size.orders if arm not in CONTROLS or place < 3]
    return found


def run(options: Any, runner: Runner) -> int:
    size: Order = SIZES[options.size]
    setup = packed_runs.setup(options, size.size)
    runner.keep_facts(setup.facts())

    def part(cell: Cell) -> List[Row]:
        return setup.run(
            setup.config("packed", seed=cell.seed),
            unfinished=runner.unfinished(cell),
            regroup=regrouped(cell.variant, cell.seed),
        )

    runner.run(cells(size, options.seeds), part)
    return runner.show(shown(runner.folder), plot=options.plot)
