"""What each adjustment of packedBERT is worth: the held-out loss, on unpacked sequences, of runs that leave one out.

Nothing is switched off inside the model: a variant changes the batch that the model is given, the way the packs were
made, or the loss in the configuration.
"""

from __future__ import annotations

import argparse
from typing import Any, Callable, Dict, List, NamedTuple

import numpy as np

from ipu_packed_bert.experiments import pretraining, tables
from ipu_packed_bert.experiments.runner import Cell, Row, Runner
from ipu_packed_bert.loader import Batch

SUMMARY = (
    "Packed training without the mask, without the position reset, with means over micro-batches, with separators "
    "only\n"
    "(GREEDY) and without next sentence prediction, against the full model and the unpacked one (packedBERT, 4.2.1).\n"
    "Held-out loss on unpacked sequences of other documents.\n\n"
    + "\n".join(f"{name}: {pretraining.describe(size)}" for name, size in pretraining.SIZES.items())
    + "\nThe shared checkpoint and the data sets are made once and serve learning_curves too."
)

settings = pretraining.settings


def without_mask(batch: Batch) -> Batch:
    """All tokens of a pack see each other; padding stays hidden from them."""
    return {**batch, "input_mask": (batch["input_mask"] > 0).astype(batch["input_mask"].dtype)}


def without_position_reset(batch: Batch) -> Batch:
    """Positions 0, 1, 2, ... through the pack, across its sequences; 0 in padding."""
    through = np.arange(batch["positions"].shape[1], dtype=batch["positions"].dtype)
    return {**batch, "positions": np.where(batch["input_mask"] > 0, through, np.zeros_like(through))}


def separators_only(batch: Batch) -> Batch:
    """Concatenated sequences as one long one, told apart by [SEP] and [CLS] alone."""
    return without_mask(without_position_reset(batch))


class Ablation(NamedTuple):
    """What a variant changes against full packedBERT."""

    words: str
    store: str = "packed"
    change: Callable[[Batch, int], Batch] = lambda batch, micro_batch: batch
    next_sentence: bool = True


VARIANTS: Dict[str, Ablation] = {
    "unpacked": Ablation("unpacked", store="unpacked"),
    "full": Ablation("packed, all adjustments"),
    "no_mask": Ablation("without the attention mask", change=lambda batch, _: without_mask(batch)),
    "no_positions": Ablation("without the position reset", change=lambda batch, _: without_position_reset(batch)),
    "no_sequence_loss": Ablation("means over micro-batches", change=pretraining.micro_batch_means),
    "separators": Ablation("separators only, GREEDY", store="greedy", change=lambda batch, _: separators_only(batch)),
    "no_nsp": Ablation("without next sentence prediction", next_sentence=False),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: Any, runner: Runner) -> None:
    setup = pretraining.setup(options)

    def measure(cell: Cell) -> List[Row]:
        variant, micro_batch = VARIANTS[cell.variant], setup.size.micro_batch
        config = setup.config(
            variant.store, seed=cell.seed, steps=setup.size.steps, next_sentence=variant.next_sentence
        )
        return setup.run(config, lambda batch: variant.change(batch, micro_batch))

    rows = runner.run([Cell(name, seed) for seed in range(1, options.seeds + 1) for name in VARIANTS], measure)
    runner.write_csv("curves.csv", rows)
    text = table(rows) + f"\n{pretraining.describe(setup.size, options.seeds)}; {setup.corpus}; {tables.machine()}\n"
    runner.write("table.md", text)
    print("\n" + text)
    if options.plot:
        from ipu_packed_bert.experiments import pictures

        pictures.draw([panel(rows)], runner.folder / "ablation.png")
    print(f"{runner.folder}: curves.csv, table.md" + (", ablation.png" if options.plot else ""))


def final(rows: List[Row], name: str, value: str) -> np.ndarray:
    """The last measurement of every seed of a variant."""
    last: Dict[int, float] = {}
    for row in rows:
        if row["variant"] == name:
            last[row["seed"]] = row[value]
    return np.array([last[seed] for seed in sorted(last)])


def table(rows: List[Row]) -> str:
    """Held-out loss and accuracies of each variant at its end; differences are taken seed by seed against the full
    model."""
    full = final(rows, "full", "mlm_loss")
    lines = []
    for name, variant in VARIANTS.items():
        loss = final(rows, name, "mlm_loss")
        lines.append(
            [
                variant.words,
                tables.spread(loss),
                "" if name == "full" else tables.spread(loss - full, 4),
                tables.spread(100 * final(rows, name, "mlm_accuracy"), 2),
                "" if not variant.next_sentence else tables.spread(100 * final(rows, name, "nsp_accuracy"), 1),
            ]
        )
    return tables.markdown(
        ["variant", "held-out MLM loss", "against full", "masked tokens right, %", "next sentence right, %"], lines
    )


def panel(rows: List[Row]):
    """Held-out loss over sequences processed."""
    from ipu_packed_bert.experiments.pictures import Curve, Panel

    curves = [
        Curve(
            variant.words, columns(rows, name, "sequences"), columns(rows, name, "mlm_loss"), dashed=name == "unpacked"
        )
        for name, variant in VARIANTS.items()
    ]
    return Panel("what an adjustment is worth", "sequences processed", "held-out MLM loss, unpacked", curves)


def columns(rows: List[Row], name: str, value: str) -> np.ndarray:
    """One value of a variant's measurements: [seeds, points]."""
    seeds = sorted({row["seed"] for row in rows if row["variant"] == name})
    return np.array([[row[value] for row in rows if (row["variant"], row["seed"]) == (name, seed)] for seed in seeds])
