"""The pre-training of a trained BERT goes on in packs, with and without what keeps the sequences of a pack apart.

A model from nothing has no use for its context at first; a trained one is misled by its neighbours in the pack at once.
The weights have no heads for pre-training: one shared start trains them, with unpacked updates, and all runs begin with
it. It is also scored at once, on held-out sequences in packs as each variant sees packs. Claim, control and margin are
those of the pre-training experiment.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from evidence import packed_runs
from evidence.packed_runs import PretrainingSetup, Size
from evidence.pretraining import changed
from evidence.pretraining_variants import CALIBRATION, CALIBRATION_SEEDS, VARIANTS, Variant
from evidence.runner import Cell, Row, Runner, finished_cells
from evidence.trained_shown import AT_ONCE, IN_TABLE, START, TESTED, TrainedShown
from ipu_packed_bert.model.hugging_face import SAFETENSORS, Weights, read_folder
from ipu_packed_bert.settings.pretraining import Config
from ipu_packed_bert.tasks.starting_weights import PACKAGE, folder_of

START_SEED = 5


class TrainedSize(NamedTuple):
    """How large the experiment is."""

    checkpoint: Optional[str]  # a Hugging Face folder or the package of weights; None: a network from nothing
    runs: Size
    start: int  # unpacked updates that train the heads
    start_rate: float  # their learning rate
    along: int  # of the scored sequences, at the measurements along a run


_SIZE = Size("text", 8_000_000, 0.12, 128, 0.9, 3, 1.74, 30_522, 384, 6, 12, 4, 2, 1_400, 4, 5.0e-4, True)
SIZES = {
    "quick": TrainedSize(None, packed_runs.SIZES["quick"]._replace(resumable=True), 12, 4.0e-3, 32),
    "default": TrainedSize(PACKAGE, _SIZE, 160, 5.0e-4, 256),
    "full": TrainedSize(  # 1,000 updates of about 72 sequences
        PACKAGE,
        _SIZE._replace(amount=10**9, held_out=0.02, accumulation=18, sequences=72_000, points=10, learning_rate=3.0e-4),
        2_000,
        5.0e-4,
        2_048,
    ),
}


SUMMARY = (
    f"The pre-training of a trained BERT ({PACKAGE}) goes on in packs: with mask and positions, unpacked,\n"
    "and without what keeps the sequences of a pack apart. Held-out loss at once and along the runs, of unpacked\n"
    "sequences of other documents, with intervals over sequences and seeds. Needs --data-dir with wikipedia/.\n"
    "Exit status 1 where training without the mask passes the test of equivalence as well: it then shows nothing.\n\n"
    "default: 160 updates of the start, then 1,400 sequences a run; full: 2,000 and 72,000, which was never run.\n"
    "Several processes with the same --out share the work; a run that was killed goes on with the same command."
)

shown = TrainedShown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", metavar="DIR", help=f"Hugging Face folder of another BERT; default {PACKAGE} (make weights)"
    )


def chosen(options: Any) -> TrainedSize:
    """The size, with the checkpoint that was asked for."""
    size: TrainedSize = SIZES[options.size]
    return size if options.checkpoint is None else size._replace(checkpoint=options.checkpoint)


def settings(options: Any) -> Dict[str, Any]:
    size = chosen(options)
    if size.runs.corpus == "text" and options.data_dir is None:
        raise ValueError("trained needs data: --data-dir DIR, a folder with wikipedia/")
    return {
        "size": options.size,
        **size.runs._asdict(),
        "corpus": packed_runs.corpus_of(size.runs, options.data_dir),
        # No path of a machine: settings are committed with the results.
        "checkpoint": None if size.checkpoint is None else Path(size.checkpoint).name,
        **{name: getattr(size, name) for name in ("start", "start_rate", "along")},
    }


def cells(seeds: int) -> Tuple[List[Cell], List[Cell]]:
    """Those that set the margin, and those that are compared: seed by seed those of the test, then the others."""
    margin = [Cell(name, CALIBRATION_SEEDS[0]) for name in CALIBRATION]
    first = [Cell(name, 1) for name in IN_TABLE]
    tested = [Cell(name, seed) for seed in range(2, seeds + 1) for name in TESTED]
    others = [Cell(name, seed) for seed in range(2, seeds + 1) for name in IN_TABLE if name not in TESTED]
    return margin, first + tested + others


def run(options: Any, runner: Runner) -> int:
    trained = Trained(chosen(options), options, runner)
    model = trained.setup.config("packed", seed=0).model
    sizes = {"hidden_size": model.hidden_size, "num_layers": model.num_layers}
    runner.keep_facts({**trained.setup.facts(), "model": sizes})
    runner.run([Cell(START, START_SEED)], trained.start)
    runner.run([Cell(AT_ONCE, START_SEED)], trained.at_once)
    for part in cells(options.seeds):  # the margin is fixed before the seeds that count
        runner.run(part, trained.part)
    return runner.show(shown(runner.folder), plot=options.plot)


class Trained:
    """The runs of one size; `runner.folder / START` has the weights that they begin with."""

    def __init__(self, size: TrainedSize, options: Any, runner: Runner) -> None:
        self.size, self._runner = size, runner
        checkpoint = None if size.checkpoint is None else folder_of(size.checkpoint)
        folder = options.out.parent / f"data_trained_{options.size}"
        self.setup = PretrainingSetup(
            folder, size.runs, options.data_dir, progress=options.progress, checkpoint=checkpoint
        )
        self._weights: Optional[Weights] = None

    @property
    def folder(self) -> Path:
        return self._runner.folder / START

    def start(self, cell: Cell) -> List[Row]:
        """Trains the heads, and all else with them, with unpacked updates; keeps the weights."""
        size, pretrained = self.size, self.setup.pretrained
        config = self.setup.config("unpacked", seed=cell.seed, rate=size.start_rate / size.runs.learning_rate)
        config = self._measured(replace(config, run=replace(config.run, steps=size.start)))
        rows = self.setup.run(
            config,
            unfinished=self._runner.unfinished(cell),
            weights=None if pretrained is None else pretrained.weights,
            along=size.along,
            keep=self.folder,
        )
        rows[-1]["weights"] = self._sha256()
        return rows

    def at_once(self, cell: Cell) -> List[Row]:
        """The start, scored on the held-out sequences in packs, as each variant sees packs."""
        weights = self.weights()

        def scored(variant: Variant) -> Row:
            return self.setup.in_packs(lambda batch: changed(batch, variant, self.size.runs.micro_batch), weights)

        return [
            {"change": name, **scored(VARIANTS[name])}
            for name in IN_TABLE
            if VARIANTS[name].store == "packed" and "scales" not in VARIANTS[name].change
        ]

    def part(self, cell: Cell) -> List[Row]:
        """One run from the start on; as many sequences as in all of them."""
        variant: Variant = VARIANTS[cell.variant]
        micro_batch = self.size.runs.micro_batch
        return self.setup.run(
            self._measured(self.setup.config(variant.store, seed=cell.seed, adjustment=variant.adjustment)),
            lambda batch: changed(batch, variant, micro_batch),
            self._runner.unfinished(cell),
            weights=self.weights(),
            along=self.size.along,
        )

    def _measured(self, config: Config) -> Config:
        """The same with as many measurements as the size says."""
        every = math.ceil(config.run.steps / self.size.runs.points)
        return replace(config, run=replace(config.run, evaluate_every=every))

    def weights(self) -> Weights:
        """Those of the start. ValueError where they are not there any more, or are others."""
        if self._weights is None:
            kept = finished_cells(self._runner.folder)[Cell(START, START_SEED)][-1]["weights"]
            if not (self.folder / SAFETENSORS).exists() or self._sha256() != kept:
                raise ValueError(
                    f"{self.folder}: has not the weights that the finished runs began with; put them back, or remove "
                    f"{self._runner.folder} and begin anew"
                )
            self._weights = read_folder(self.folder).weights
        return self._weights

    def _sha256(self) -> str:
        return hashlib.sha256((self.folder / SAFETENSORS).read_bytes()).hexdigest()
