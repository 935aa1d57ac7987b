"""A fine-tuning run: it reads files of examples and packs them before training."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Tuple

from ipu_packed_bert.engine import choose_engine
from ipu_packed_bert.engine.base import Engine
from ipu_packed_bert.model.hugging_face import Weights, merged, write_folder
from ipu_packed_bert.processes.ranks import ONE, Processes
from ipu_packed_bert.run_files.folder import MODEL
from ipu_packed_bert.run_files.vocabulary_identity import Identity, agree
from ipu_packed_bert.settings.allowed_changes import stored_config
from ipu_packed_bert.settings.config import Config, ConfigError
from ipu_packed_bert.settings.rules import schedule_too_short
from ipu_packed_bert.tasks import task_class
from ipu_packed_bert.tasks.examples import ExampleTask
from ipu_packed_bert.tasks.inputs import Tokenizer
from ipu_packed_bert.tasks.starting_weights import Start, find_start
from ipu_packed_bert.training.prepared import Beginning, Begun, Prepared, engine_and_batches
from pack_data.display.facts import number
from pack_data.packing.packing import Packing, of_at_most
from pack_data.reading.durable import replacing_folder
from pack_data.reading.words import counted


@dataclasses.dataclass(frozen=True)
class ExamplesRun(Prepared):
    """A run that trains on files of examples.

    `simulated` is False: a simulated step of a full-size network takes hours, so the user has to request it.
    """

    task: ExampleTask
    start: Start
    fresh: Tuple[str, ...]  # names of weights that the checkpoint does not have

    @classmethod
    def make(cls, config: Config, begun: Begun) -> ExamplesRun:
        """Read and pack the files."""
        prepared = _prepare(config, begun)
        task = prepared.task
        batches = prepared.batches
        print(f"start     {prepared.start.description}")
        if prepared.fresh:
            print(f"          not in the checkpoint, initialised: {', '.join(prepared.fresh)}")
        for note in task.notes:
            print(f"data      {note}")
        for what in task.sources:
            _print_packing(what, getattr(task, f"{what}_packs").packing)
        if prepared.steps:
            words = prepared.config.update_words(task.packs.packing.packing_factor, "row")
            print(f"update    {words}")
            print(f"updates   {prepared.steps:,}, {batches.updates_per_epoch:,} per epoch")
        if task.evaluation:
            print(f"scores    {', '.join(task.scores)}, if the evaluation file has labels")
        if batches.sharing:
            print(f"ranks     {batches.sharing}")
        return prepared

    def export(self, folder: Path, *, trained: bool) -> None:
        model = folder / MODEL
        if trained or not model.exists():
            self.write_model(model)
            print(f"model     {model}, for transformers ({self.task.architecture})")

    def write_model(self, folder: Path) -> None:
        """Write the network as a Hugging Face directory; replace an older one once the new one is complete."""
        task = self.task
        with replacing_folder(folder) as partial:
            write_folder(
                partial,
                task.model,
                self.engine.weights(),
                self.start.vocabulary,
                architecture=task.architecture,
                trained_length=max(self.start.trained_length, task.max_sequence_length),
                **task.export_settings(),
            )


def prepare(config: Config, *, processes: Processes = ONE) -> ExamplesRun:
    """Read and pack the files of a new run, and build its engine.

    Args:
        config: settings of the run.
        processes: the processes that make the updates together.

    Returns:
        The run, ready for its first update.

    Raises:
        ValueError: a file, the checkpoint or the device does not fit the configuration.
    """
    choice = choose_engine(config, simulated=ExamplesRun.simulated)
    begun = Begun(Beginning(), processes, choice, contextlib.ExitStack())
    return _prepare(config.on_engine(choice.kind), begun)


def _prepare(config: Config, begun: Begun) -> ExamplesRun:
    checkpoint = begun.begin.checkpoint
    start = find_start(config)
    vocabulary = Identity.of(start.vocabulary)
    epochs = config.run.epochs
    if checkpoint:
        folder = begun.begin.folder
        agree(checkpoint.identity, vocabulary, weights_of=folder, data_of=start.description)
        epochs = stored_config(folder, checkpoint.config, config).run.epochs
    config = config.for_model(start.model, ipus=begun.choice.kind != "host")
    task = task_class(config.task.name)(
        config, Tokenizer(start.vocabulary), start.model, start.labels
    )
    packs = task.packs
    packing = packs.packing
    factor = packing.packing_factor
    config = config.with_micro_batch(factor, ranks=begun.processes.size)

    steps = 0
    if task.training:
        updates_per_epoch = -(-len(packs) // config.packs_per_update(factor))
        steps = config.run.epochs * updates_per_epoch
        config = _with_schedule(config, steps, epochs * updates_per_epoch)
    evaluate_every = 0
    if task.evaluation:
        # By default after the last update; with nothing to train on, `run` evaluates before any.
        evaluate_every = config.run.evaluate_every or steps or 1

    digest = f"{packs.digest:016x}"
    same = {"the training file's digest": digest, "the vocabulary's sha256": vocabulary.sha256}
    engine, batches = engine_and_batches(
        config, task, packs, task.evaluation_packs, begun, factor=factor, same=same
    )
    fresh = load_weights(
        engine, start.weights, f"{config.start.checkpoint}", whole=config.data.training is None
    )
    return ExamplesRun(
        config=config,
        task=task,
        engine=engine,
        batches=batches,
        steps=steps,
        evaluate_every=evaluate_every,
        vocabulary=vocabulary,
        data={
            "digest": digest,
            "packs": packing.packs,
            "sequences": packing.sequences,
            "algorithm": packing.algorithm,
            **vocabulary.recorded,
        },
        longer=_longer(config, steps),
        start=start,
        fresh=fresh if start.weights else (),
    )


def _longer(config: Config, steps: int) -> str:
    """Return the options that double the epochs."""
    options = f"--set run.epochs={2 * config.run.epochs}"
    if config.optimizer.schedule != "constant":
        options += f" --set optimizer.schedule_steps={2 * steps}"
    return options


def _print_packing(name: str, packing: Packing) -> None:
    print(
        f"packing   {name}: {counted(packing.sequences, 'sequence')} in {counted(packing.packs, 'row')} of"
        f" {packing.max_sequence_length} ({packing.algorithm}), {number(packing.efficiency, 'share')} of the slots are"
        f" tokens; factor {number(packing.packing_factor, 'sequences per pack')}"
        f" {of_at_most(packing.theoretical_speedup)}"
    )


def load_weights(engine: Engine, weights: Weights, source: str, *, whole: bool) -> Tuple[str, ...]:
    """Load weights into an engine.

    Args:
        engine: keeps its initial values of missing weights.
        weights: tensors by Hugging Face's names.
        source: name of the checkpoint, for the error.
        whole: refuse missing weights.

    Returns:
        The names of the missing weights.

    Raises:
        ValueError: a weight has another shape or, with ``whole``, is missing.
    """
    state = engine.state()
    all_weights, loaded = merged(state["model"], weights)
    if whole and loaded.fresh:
        raise ValueError(
            f"{source}: has no {', '.join(loaded.fresh[:2])}; pass a model that was fine-tuned for {engine.task.name}"
        )
    engine.load_state({**state, "model": all_weights})
    return loaded.fresh


def _with_schedule(config: Config, steps: int, default: int) -> Config:
    """Set the length of the learning rate schedule to ``default`` updates, unless the configuration has one."""
    length = config.optimizer.schedule_steps or default
    if steps > length and config.optimizer.schedule != "constant":
        epochs = f"run.epochs is {config.run.epochs}, {steps} updates"
        raise ConfigError(f"{config.path}: {schedule_too_short(epochs, steps, length)}")
    return config.with_schedule(length)
