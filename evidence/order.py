"""Does the order that packing imposes change what is learnt?  Unpacked runs over the same sequences in as many updates:
those of the packs of an update, beside a random order of all of them.

Packs put long and short sequences together, and their number varies from update to update. Each sequence has a row of
its own here, so that nothing but the order differs. Random order beside another random order shows what chance does;
sequences sorted by length are the control.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Tuple

import numpy as np

from evidence import packed_runs
from evidence.packed_runs import QUICK, TOPICS, WIKIPEDIA, Regroup, Size
from evidence.runner import Cell, Row, Runner

PACKS, RANDOM, AGAIN, SORTED = "packs", "random", "random_again", "sorted"
ARMS = {
    PACKS: "in the order of packs",
    RANDOM: "in random order",
    AGAIN: "in another random order",
    SORTED: "from short to long",
}
PILOT_SEEDS = (101, 102, 103)  # set the margin; they do not count


class Order(NamedTuple):
    size: Size
    seeds: Tuple[int, ...]
    pilot: Tuple[int, ...] = PILOT_SEEDS


SIZES, DEFAULT = (
    {
        "quick": Order(QUICK, (1,), ()),
        "topics": Order(TOPICS, tuple(range(1, 13))),
        "wikipedia": Order(WIKIPEDIA._replace(sequences=48_000, points=5), tuple(range(1, 13))),
    },
    "topics",
)
SUMMARY = (
    "Unpacked runs over the same sequences in as many updates, in the order of packs and in random order; random\n"
    "beside another random order; and, as the control, sorted by length.\n\n"
    "topics: made-up topics, half an hour. wikipedia (--data-dir): 5 million tokens a run, 7 hours.\n"
    "Several processes with the same --out share the work; a run that was killed goes on with the same command."
)


def settings(options: Any) -> Dict[str, Any]:
    size = SIZES[options.size].size
    return {"size": options.size, **size._asdict(), "corpus": packed_runs.corpus_of(size, options.data_dir)}


def regrouped(arm: str, seed: int) -> Regroup:
    """The sequences of all updates, dealt out in the order of the arm, as many to each update but for rounding."""

    def regroup(by_packs: List[np.ndarray], lengths: np.ndarray) -> List[np.ndarray]:
        if arm == PACKS:
            return by_packs
        order = np.argsort(lengths, kind="stable")
        if arm != SORTED:
            order = np.random.default_rng([seed, list(ARMS).index(arm)]).permutation(len(lengths))
        return np.array_split(order, len(by_packs))

    return regroup


def cells(size: Order, seeds: int) -> List[Cell]:
    """The pilot; then seed by seed those that count, whose first three have the control too."""
    found = [Cell(arm, seed) for seed in size.pilot for arm in ARMS]
    for place, seed in enumerate(size.seeds[:seeds]):
        found += [Cell(arm, seed) for arm in ARMS if arm != SORTED or place < 3]
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
    return 0
