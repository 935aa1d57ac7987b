"""Is the update of packs the update of their sequences?

Whole runs with the same sequences in every update, packed and each alone in a row; and the same without each part that
packedBERT adds (paper, section 4.2, Figure 4).  All arms start with the same weights.  An arm changes the batch of the
model or the configuration, and nothing inside the model.  Held-out losses are those of unpacked sequences of other
documents.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from evidence import packed_runs
from evidence.arms import (
    AGAIN,
    ARMS,
    DOUBLE,
    MEANS,
    NO_MASK,
    PACKED,
    PILOT_SEEDS,
    UNPACKED,
    changed,
)
from evidence.packed_runs import QUICK, TOPICS, WIKIPEDIA, Size
from evidence.runner import Cell, Row, Runner
from evidence.training_shown import UpdatesShown
from ipu_packed_bert.model.hugging_face import SAFETENSORS, Weights, read_folder
from ipu_packed_bert.tasks.starting_weights import PACKAGE, folder_of

shown = UpdatesShown
START = "start"
START_SEED = 5
SEEDS = (11, 12, 13)
_SAME = (PACKED, UNPACKED, AGAIN, NO_MASK)
_DOUBLE = tuple(name + DOUBLE for name in (PACKED, UNPACKED, MEANS))
_FIGURE_4 = (MEANS, "no_positions", "separators", "betas", "none")


class Start(NamedTuple):
    """The initial weights of all runs: their heads are trained by unpacked updates."""

    # A Hugging Face directory or the package of weights; None: new weights.
    checkpoint: Optional[str]
    updates: int
    rate: float
    along: int  # of the scored sequences, at the measurements along a run


class Updates(NamedTuple):
    """The size of the experiment, and its cells."""

    size: Size
    # Arms and seeds, in the order of their runs.
    cells: Tuple[Tuple[Tuple[str, ...], Tuple[int, ...]], ...]
    start: Optional[Start] = None


_BERT = Size(
    corpus="text",
    amount=8_000_000,
    held_out=0.12,
    max_sequence_length=128,
    short_sequence_probability=0.9,
    depth=3,
    vocabulary_size=30_522,
    hidden_size=384,
    num_layers=6,
    num_heads=12,
    micro_batch=4,
    accumulation=2,
    sequences=6_270,
    points=6,
    learning_rate=5.0e-4,
)
_FULL = Size(
    corpus="text",
    amount=10**12,
    held_out=0.001,
    max_sequence_length=512,
    short_sequence_probability=0.1,
    depth=3,
    vocabulary_size=30_522,
    hidden_size=768,
    num_layers=12,
    num_heads=12,
    micro_batch=8,
    accumulation=32,
    sequences=256 * 100_000,
    points=20,
    learning_rate=1.0e-4,
    precision="bfloat16",
)
SIZES = {
    "quick": Updates(QUICK, ((_SAME, (1,)), (_DOUBLE, (1,)))),
    "topics": Updates(
        TOPICS, (((PACKED, UNPACKED), PILOT_SEEDS), (_SAME, SEEDS), (_DOUBLE, SEEDS))
    ),
    "figure_4": Updates(TOPICS, (((PACKED, UNPACKED, NO_MASK, *_FIGURE_4), SEEDS),)),
    "wikipedia": Updates(WIKIPEDIA, ((_SAME, SEEDS[:1]), (_DOUBLE[:2], SEEDS[:1]), (_SAME, SEEDS))),
    "trained": Updates(
        _BERT, ((_SAME, SEEDS),), Start(PACKAGE, updates=160, rate=5.0e-4, along=256)
    ),
    "full": Updates(_FULL, (((PACKED, UNPACKED), (1,)),)),
}
DEFAULT = "topics"
SUMMARY = (
    "Whole pre-training runs whose updates have the same sequences, packed and each alone in a row, in float32 and\n"
    "float64, with controls: packs without the mask, losses as means over micro-batches.\n\n"
    "topics: made-up topics, rows of 64, 15 minutes. figure_4: the same data, each adjustment of packedBERT left out,\n"
    "half an hour. wikipedia (--data-dir): rows of 192, 10 million tokens a run, 6 hours. trained (--data-dir): a\n"
    "trained BERT goes on, 300 updates, 2 hours. full: BERT base at 512, 25.6 million sequences in bfloat16, for a\n"
    "GPU; never run.\n"
    "A killed run continues with the same command."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, metavar="NAME", help=f"only these of {', '.join(ARMS)}"
    )


def settings(options: Any) -> Dict[str, Any]:
    size = SIZES[options.size]
    if size.start is not None and options.data_dir is None:
        raise ValueError("trained needs data: pass --data-dir DIR with DIR/wikipedia/")
    start = {} if size.start is None else size.start._asdict()
    return {**packed_runs.settings(options, size.size), **start}


def cells(size: Updates, arms: Optional[Sequence[str]]) -> List[Cell]:
    """List the cells of the chosen arms, in the order of their runs."""
    grid: Dict[Cell, None] = {}
    for names, seeds in size.cells:
        for seed, name in itertools.product(seeds, names):
            if arms is None or name in arms:
                grid[Cell(name, seed)] = None
    return list(grid)


def run(options: Any, runner: Runner) -> int:
    runs = Runs(SIZES[options.size], options, runner)
    runner.keep_facts(runs.setup.facts())
    if runs.start is not None:
        runner.run([Cell(START, START_SEED)], runs.begin)
    runner.run(cells(SIZES[options.size], options.arms), runs.part)
    return runner.show(shown(runner.path), plot=options.plot)


class Runs:
    """The runs of one size; `runner.folder / START` has their initial weights, if any."""

    def __init__(self, size: Updates, options: Any, runner: Runner) -> None:
        self.start = size.start
        self._runner = runner
        checkpoint = size.start and size.start.checkpoint
        folder = folder_of(checkpoint) if checkpoint else None
        self.setup = packed_runs.setup(options, size.size, folder)
        self._weights: Optional[Weights] = None

    @property
    def folder(self) -> Path:
        return self._runner.folder / START

    def begin(self, cell: Cell) -> List[Row]:
        """Train the heads, and all other weights, with unpacked updates; keep the weights."""
        start = self.start
        assert start is not None
        pretrained = self.setup.pretrained
        size = self.setup.size
        rate = start.rate / size.learning_rate
        config = self.setup.config("unpacked", seed=cell.seed, rate=rate)
        every = math.ceil(start.updates / size.points)
        length = replace(config.run, steps=start.updates, evaluate_every=every)
        rows = self.setup.run(
            replace(config, run=length),
            weights=None if pretrained is None else pretrained.weights,
            along=start.along,
            keep=self.folder,
        )
        rows[-1]["weights"] = self._sha256()
        return rows

    def part(self, cell: Cell) -> List[Row]:
        """Make one run; all have the same number of sequences."""
        arm = ARMS[cell.variant]
        config = self.setup.config(
            "packed", seed=cell.seed, adjustment=arm.adjustment, attention=arm.attention
        )
        return self.setup.run(
            config,
            lambda batch: changed(batch, arm, self.setup.size.micro_batch),
            alone=arm.alone,
            double=arm.double,
            weights=self.weights(),
            along=self.start and self.start.along,
        )

    def weights(self) -> Optional[Weights]:
        """Return the weights of the start; raise ValueError if they are missing or have changed."""
        if self.start is not None and self._weights is None:
            rows = self._runner.results.cells[Cell(START, START_SEED)]
            trained = rows[-1]["weights"]
            if not (self.folder / SAFETENSORS).exists() or self._sha256() != trained:
                raise ValueError(
                    f"{self.folder}: not the initial weights of the finished runs; restore them, or remove "
                    f"{self._runner.folder} and start again"
                )
            self._weights = read_folder(self.folder).weights
        return self._weights

    def _sha256(self) -> str:
        return hashlib.sha256((self.folder / SAFETENSORS).read_bytes()).hexdigest()
