"""A run of fine-tuning: it learns from files of examples, which are packed when it is prepared."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

from ipu_packed_bert.engine import EngineChoice, choose_engine
from ipu_packed_bert.engine.base import Engine
from ipu_packed_bert.model.hugging_face import Weights, merged, write_folder
from ipu_packed_bert.processes.ranks import ONE, Processes
from ipu_packed_bert.run_files.folder import MODEL
from ipu_packed_bert.run_files.vocabulary_identity import Identity, agree
from ipu_packed_bert.settings.allowed_changes import stored_config
from ipu_packed_bert.settings.finetuning import FinetuneConfig
from ipu_packed_bert.settings.pretraining import ConfigError
from ipu_packed_bert.settings.schema import schedule_too_short
from ipu_packed_bert.tasks import task_class
from ipu_packed_bert.tasks.examples import ExampleTask, Tokenizer
from ipu_packed_bert.tasks.files import located
from ipu_packed_bert.tasks.starting_weights import Start, find_start
from ipu_packed_bert.training.run import Begun, Prepared, engine_and_batches
from pack_data.cli.command import typed


@dataclasses.dataclass(frozen=True)
class ExamplesRun(Prepared[FinetuneConfig]):
    """A run that learns from files of examples."""

    task: ExampleTask
    start: Start
    fresh: Tuple[str, ...]  # weights that the checkpoint didn't have

    # `simulated` stays false: a network of full size takes hours there, so that this has to be asked for.

    @classmethod
    def make(cls, config: FinetuneConfig, begun: Begun) -> ExamplesRun:
        begin = begun.begin
        former = stored_config(begin.folder, begin.checkpoint.config, config) if begin.checkpoint else None
        # With the files' full names, so that the run can be resumed without --data-dir.
        config = located(config, begun.args.data_dir)
        made = prepare(config, former=former, processes=begun.processes, choice=begun.choice)
        if begin.checkpoint:
            agree(begin.checkpoint.identity, made.vocabulary, weights_of=begin.folder, data_of=made.start.description)
        return made

    def _describe(self, *, resumed: bool) -> None:
        config, task, batches = self.config, self.task, self.batches
        print(f"start     {self.start.description}")
        if self.fresh:
            print(f"          initialised, not in the checkpoint: {', '.join(self.fresh)}")
        for note in task.notes:
            print(f"data      {note}")
        for what, packs in (("training", task.training_packs), ("evaluation", task.evaluation_packs)):
            if packs is not None:
                packing = packs.packing
                print(
                    f"packing   {what}: {packing.sequences:,} sequences in {packing.packs:,} rows of"
                    f" {packing.max_sequence_length} ({packing.algorithm}), {packing.packing_factor:.3f} in a row,"
                    f" {packing.efficiency:.1%} of the slots are tokens"
                )
        if self.steps:
            rows, factor = batches.packs_per_update, task.packs.packing.packing_factor
            print(
                f"updates   {self.steps:,}, {batches.updates_per_epoch:,} an epoch, of {rows:,} rows or about"
                f" {rows * factor:,.0f} sequences ({batches.micro_batches_per_update:,} micro-batches of"
                f" {config.batch.micro_batch})"
            )
        if task.evaluation_packs is not None:
            print(f"scores    {', '.join(task.scores)}, where the file has labels")
        if batches.sharing:
            print(f"ranks     {batches.sharing}")

    @property
    def _data(self) -> Dict[str, Any]:
        packing = self.task.packs.packing
        return {
            "digest": f"{self.task.packs.digest:016x}",
            "packs": packing.packs,
            "sequences": packing.sequences,
            "algorithm": packing.algorithm,
            **self.vocabulary.recorded,
        }

    @property
    def _evaluate_every(self) -> int:
        """At the end at least, where there is something to evaluate on."""
        return (self.config.run.evaluate_every or self.steps or 1) if self.task.evaluation else 0

    def _go_on(self, folder: Path) -> str:
        longer = (
            "" if self.config.optimizer.schedule == "constant" else f" --set optimizer.schedule_steps={2 * self.steps}"
        )
        epochs = 2 * self.config.run.epochs
        return f"{typed(self.config.command)} --resume {shlex.quote(str(folder))} --set run.epochs={epochs}{longer}"

    def _export(self, folder: Path, *, trained: bool) -> None:
        if trained or not (folder / MODEL).exists():
            self.write_model(folder / MODEL)
            print(f"model     {folder / MODEL}, as transformers loads it ({self.task.architecture})")

    def write_model(self, folder: Path) -> None:
        """As a Hugging Face folder; a former one is replaced when the new one is whole."""
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        task, vocabulary = self.task, self.start.vocabulary
        weights, settings = self.engine.weights(), task.export_settings()
        write_folder(partial, task.model, weights, vocabulary, architecture=task.architecture, **settings)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)


def prepare(
    config: FinetuneConfig,
    *,
    former: Optional[FinetuneConfig] = None,
    processes: Processes = ONE,
    choice: Optional[EngineChoice] = None,
) -> ExamplesRun:
    """`former`: the configuration of the run that is resumed, whose schedule goes on."""
    choice = choice or choose_engine(config, simulated=ExamplesRun.simulated)
    start = find_start(config)
    config = config.on_engine(choice.kind).for_model(start.model, ipus=choice.kind != "host")
    task = task_class(config.task.name)(config, Tokenizer(start.vocabulary), start.model, start.labels)
    packs = task.packs
    factor = packs.packing.packing_factor
    config = config.with_micro_batch(factor)
    steps = 0
    if task.training_packs is not None:
        updates_per_epoch = -(-len(packs) // config.packs_per_update(factor))
        steps = config.run.epochs * updates_per_epoch
        config = _with_schedule(config, former, updates_per_epoch)
    vocabulary = Identity.of(start.vocabulary)
    same = {"the training file's digest": f"{packs.digest:016x}", "the vocabulary's sha256": vocabulary.sha256}
    made = engine_and_batches(
        config, task, packs, task.evaluation_packs, choice, factor=factor, processes=processes, same=same
    )
    fresh = load_weights(made[0], start.weights, f"{config.model.checkpoint}", whole=config.data.training is None)
    return ExamplesRun(config, task, *made, steps, vocabulary, start, fresh if start.weights else ())


def load_weights(engine: Engine, given: Weights, source: str, *, whole: bool) -> Tuple[str, ...]:
    """The names of the weights that stay initial ones, as the given ones lack them; ValueError where `whole`."""
    state = engine.state()
    weights, loaded = merged(state["model"], given)
    if whole and loaded.fresh:
        raise ValueError(
            f"{source}: has no {', '.join(loaded.fresh[:2])}; name a model that was fine-tuned for {engine.task.name}"
        )
    engine.load_state({**state, "model": weights})
    return loaded.fresh


def _with_schedule(config: FinetuneConfig, former: Optional[FinetuneConfig], updates_per_epoch: int) -> FinetuneConfig:
    """The length of the learning rate's schedule stated: `former`'s where a run is resumed, else all its updates."""
    steps = config.run.epochs * updates_per_epoch
    length = config.optimizer.schedule_steps or (former or config).run.epochs * updates_per_epoch
    if steps > length and config.optimizer.schedule != "constant":
        raise ConfigError(
            f"{config.path}: "
            + schedule_too_short(f"run.epochs is {config.run.epochs}, {steps} updates", steps, length)
        )
    return config.with_schedule(length)
