"""Packed and unpacked pre-training beside each other, and each adjustment of packedBERT left out (paper, section 4.2,
Figures 3 and 4).

All runs process the same number of sequences. Nothing is switched off inside the model: a variant changes the batch
that the model is given, the way the packs were made, or the configuration. The claim is that packed training ends where
unpacked training ends. Its control is packed training without the mask, which has to fail the same test: the margin of
the test is a quarter of what the missing mask costs, measured on seeds that do not count before those that do.
"""

from __future__ import annotations

import argparse
from typing import Any, Callable, Dict, List, Tuple

import numpy as np

from evidence import packed_runs
from evidence.packed_runs import PretrainingSetup, Size
from evidence.pretraining_shown import PretrainingShown
from evidence.pretraining_variants import CALIBRATION, CALIBRATION_SEEDS, OF_SIZE, VARIANTS, Variant
from evidence.runner import Cell, Row, Runner
from ipu_packed_bert.data.global_batches import Batch

SIZES, DEFAULT = packed_runs.SIZES, "minutes"
SUMMARY = (
    "Packed against unpacked pre-training, and each adjustment of packedBERT left out (packedBERT, 4.2, Figures 3 and\n"
    "4): held-out loss of unpacked sequences of other documents, with intervals over sequences and seeds.\n"
    "Exit status 1 where training without the mask passes the test of equivalence as well: it then shows nothing.\n\n"
    "minutes: made-up topics, rows of 64. hours: Wikipedia (--data-dir; else Python's documentation), rows of 192.\n"
    "full: BERT base at 512, 25.6 million sequences a run, never run.\n"
    "Several processes with the same --out share the work; a run that was killed goes on with the same command."
)

settings = packed_runs.settings
shown = PretrainingShown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, metavar="NAME", help="only these, beside those of the test"
    )


# ---- what a variant changes ------------------------------------------------------------------------------------------


def without_mask(batch: Batch) -> Batch:
    """All tokens of a pack see each other; padding stays hidden from them."""
    return {**batch, "input_mask": (batch["input_mask"] > 0).astype(batch["input_mask"].dtype)}


def without_position_reset(batch: Batch) -> Batch:
    """Positions 0, 1, 2, ... through the pack, across its sequences; 0 in padding."""
    through = np.arange(batch["positions"].shape[1], dtype=batch["positions"].dtype)
    return {**batch, "positions": np.where(batch["input_mask"] > 0, through, np.zeros_like(through))}


CHANGES: Dict[str, Callable[[Batch, int], Batch]] = {
    "mask": lambda batch, _: without_mask(batch),
    "positions": lambda batch, _: without_position_reset(batch),
    "scales": packed_runs.micro_batch_means,
}


def changed(batch: Batch, variant: Variant, micro_batch: int) -> Batch:
    for name in variant.change.split():
        batch = CHANGES[name](batch, micro_batch)
    return batch


# ---- the runs --------------------------------------------------------------------------------------------------------


def cells(size: Size, variants: Tuple[str, ...], seeds: int) -> Tuple[List[Cell], List[Cell]]:
    """Those that set the margin, and those that are compared, seed by seed."""
    first = CALIBRATION_SEEDS[:1] if size.resumable else CALIBRATION_SEEDS
    margin = [Cell(name, seed) for seed in first for name in CALIBRATION]
    return margin, [Cell(name, seed) for seed in range(1, seeds + 1) for name in variants]


def run(options: Any, runner: Runner) -> int:
    setup = packed_runs.setup(options)
    chosen = OF_SIZE[options.size]
    if options.variants:
        chosen = tuple(name for name in VARIANTS if name in (*OF_SIZE["quick"], *options.variants))

    facts = setup.facts()
    runner.keep_facts(facts)
    if facts["sequences"]["held_out"] < packed_runs.LEAST_HELD_OUT:
        print(f"note: {facts['sequences']['held_out']} held-out sequences, fewer than {packed_runs.LEAST_HELD_OUT:,}")
    for some in cells(setup.size, chosen, options.seeds):  # the margin is fixed before the seeds that count
        runner.run(some, lambda cell: part(setup, VARIANTS[cell.variant], runner, cell))
    return runner.show(shown(runner.folder), plot=options.plot)


def part(setup: PretrainingSetup, variant: Variant, runner: Runner, cell: Cell) -> List[Row]:
    """One run; as many sequences as in all of them."""
    config = setup.config(
        variant.store,
        seed=cell.seed,
        adjustment=variant.adjustment,
        rate=variant.times * setup.packing_factor(variant.store) if variant.rate_times_p else 1.0,
        next_sentence=variant.next_sentence,
        times=variant.times,
    )
    micro_batch = setup.size.micro_batch
    return setup.run(
        config, lambda batch: changed(batch, variant, micro_batch), runner.unfinished(cell), times=variant.times
    )
