"""Runs of tasks that learn from files of examples: prepared, trained, evaluated, written down and exported."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import shlex
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any, NamedTuple, Optional, Sequence, Tuple

import torch

from ipu_packed_bert.data.global_batches import GlobalBatches
from ipu_packed_bert.engine import EngineChoice, build_engine, choose_engine
from ipu_packed_bert.engine.base import Engine, saved_by
from ipu_packed_bert.model.hugging_face import merged, write_folder
from ipu_packed_bert.model.optimizer import schedule_change
from ipu_packed_bert.processes.ranks import ONE, Processes, flat
from ipu_packed_bert.run_files.checkpoints import Checkpoint, load_newest
from ipu_packed_bert.run_files.folder import ALLOWED, CHECKPOINTS, EXPORT, MODEL, allowed_before, begun_with
from ipu_packed_bert.run_files.vocabulary_identity import Identity, agree
from ipu_packed_bert.settings.allowed_changes import Changes, compare, stored_config
from ipu_packed_bert.settings.finetuning import FinetuneConfig
from ipu_packed_bert.settings.pretraining import ConfigError
from ipu_packed_bert.settings.schema import schedule_too_short
from ipu_packed_bert.settings.user_task import SHA256, recorded
from ipu_packed_bert.tasks import task_class
from ipu_packed_bert.tasks.examples import ExampleTask
from ipu_packed_bert.tasks.starting_weights import Start, find_start
from ipu_packed_bert.tasks.tokenizer import Tokenizer
from ipu_packed_bert.training.log import RunLog, environment, open_run_folder, saved_in
from ipu_packed_bert.training.loop import Log, Outcome, SilentLog, train
from ipu_packed_bert.training.summary import RunEnd
from pack_data.cli.command import typed
from pack_data.reading.fields import said_of
from pack_data.reading.files import write_atomically


class Prepared(NamedTuple):
    """All that is there before the first update."""

    config: FinetuneConfig
    start: Start
    task: ExampleTask
    engine: Engine
    batches: Any  # GlobalBatches, read in the way that suits the engine
    steps: int  # 0: no training
    fresh: Tuple[str, ...]  # weights that the checkpoint didn't have


def prepare(config: FinetuneConfig, *, former: Optional[FinetuneConfig] = None, processes: Processes = ONE) -> Prepared:
    """`former`: the configuration of the run that is resumed, whose schedule goes on."""
    if config.run.export and config.data.training is not None and importlib.util.find_spec("safetensors") is None:
        raise ValueError(
            "run.export is true; that needs the package safetensors: pip install safetensors, or --set run.export=false"
        )

    # A network of full size takes hours on the simulated device, so that this has to be asked for.
    choice = choose_engine(config, simulated=False)
    start = find_start(config)
    config = on_engine(config, choice).for_model(start.model, ipus=choice.kind != "host")
    task = task_class(config.task.name)(config, Tokenizer(start.vocabulary), start.model, start.labels)
    packs = task.packs
    factor = packs.packing.packing_factor
    config = config.with_micro_batch(factor)
    steps = 0
    if task.training_packs is not None:
        updates_per_epoch = -(-len(packs) // config.packs_per_update(factor))
        steps = config.run.epochs * updates_per_epoch
        config = _with_schedule(config, former, updates_per_epoch)
    processes.refuse_differences(
        {
            **flat(config.as_dict()),
            "the training file's digest": f"{packs.digest:016x}",
            "the vocabulary's sha256": Identity.of(start.vocabulary).sha256,
            "torch": torch.__version__,
        }
    )
    engine = build_engine(config, task, choice, packing_factor=factor, processes=processes)
    state = engine.state()
    weights, loaded = merged(state["model"], start.weights)
    if config.data.training is None and loaded.fresh:
        raise ValueError(
            f"{config.model.checkpoint}: has no {', '.join(loaded.fresh[:2])}; evaluate a model that was "
            "fine-tuned for this task"
        )
    engine.load_state({**state, "model": weights})
    refuse_other_weights(engine)
    batches = engine.feed(
        GlobalBatches(packs, task.layout(config, factor), held_out=task.evaluation_packs, share=engine.share)
    )
    return Prepared(config, start, task, engine, batches, steps, loaded.fresh if start.weights else ())


def on_engine(config: FinetuneConfig, choice: EngineChoice) -> FinetuneConfig:
    """The configuration as it runs on this engine, which is written down: a resumed run goes on where it began."""
    kind = "host" if choice.kind == "host" else "ipu"
    engine = dataclasses.replace(config.engine, kind=kind, ipu_model=choice.kind == "ipu_model")
    return dataclasses.replace(config, engine=engine)


def refuse_other_weights(engine: Engine) -> None:
    """Raises ValueError where the processes begin with different weights: they would stay different."""
    if engine.processes.size > 1:
        digest = 0
        for _, weight in sorted(engine.weights().items()):
            digest = zlib.crc32(weight.numpy().tobytes(), digest)
        engine.processes.refuse_differences({"the checksum of the weights": f"{digest:08x}"})


def print_other_ranks(checkpoint: Checkpoint, processes: Processes) -> None:
    """One line where a run goes on in another number of processes."""
    before = saved_by(checkpoint.engine)
    if before != processes.size:
        print(
            f"ranks     {processes.size}, after {before}: each update has the same sequences; dropout draws from new"
            " streams"
        )


def _with_schedule(config: FinetuneConfig, former: Optional[FinetuneConfig], updates_per_epoch: int) -> FinetuneConfig:
    """The length of the learning rate's schedule stated: `former`'s where a run is resumed, else all its updates."""
    steps = config.run.epochs * updates_per_epoch
    length = config.optimizer.schedule_steps or (former or config).run.epochs * updates_per_epoch
    if steps > length and config.optimizer.schedule != "constant":
        raise ConfigError(
            f"{config.path}: "
            + schedule_too_short(f"run.epochs is {config.run.epochs}, {steps} updates", steps, length)
        )
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, schedule_steps=length))


class _Resumed(NamedTuple):
    """What a run goes on from."""

    checkpoint: Checkpoint
    saved: Tuple[Tuple[str, int], ...]  # runlog.saved_in, before the checkpoint was read
    changes: Changes  # of the configuration since then


def resumed(run: str, config: FinetuneConfig, allowed: Sequence[str]) -> _Resumed:
    """Of the newest checkpoint of `run`; its changes are printed. Raises ConfigError where one is refused."""
    saved = saved_in(run)
    checkpoint = load_newest(Path(run, CHECKPOINTS))
    before = allowed_before(run, checkpoint.step)
    changes = compare(run, checkpoint.config, config, allowed=allowed, before=before)
    for line in changes.lines:
        print(line)
    found = begun_with(run).get(SHA256)
    if found is not None and {SHA256: found} != recorded(config.task.name):
        print(f"task      {config.task.name}: the file was changed after this run began; it goes on with the new one")
    return _Resumed(checkpoint, saved, changes)


def fine_tune(
    prepared: Prepared, out: Optional[str], *, resumed: Optional[_Resumed] = None, progress: Optional[bool] = None
) -> int:
    """Train, evaluate, write down and export; the exit status.

    `resumed` goes on in the folder `out`, where a finished run is evaluated again.
    """
    config, start, task, engine, batches, steps, _ = prepared
    first_step = 0
    saved: Tuple[Tuple[str, int], ...] = ()
    changes = Changes()
    if resumed:
        saved, changes = resumed.saved, resumed.changes
        first_step = _go_on(prepared, str(out), resumed)

    def trained(log: Log, checkpoints: Optional[Path]) -> Outcome:
        outcome = train(
            config,
            engine,
            batches,
            log,
            checkpoints,
            steps=steps,
            first_step=first_step,
            evaluate_every=(config.run.evaluate_every or steps) if task.evaluation else 0,
            vocabulary=Identity.of(start.vocabulary),
        )
        if outcome.stopped_by is None and log.evaluated != outcome.step and task.evaluation is not None:
            found = task.evaluate(engine, log.watched(batches.held_out()))
            if found is not None:
                log.evaluation(outcome.step, found)
        return outcome

    if engine.share[0]:  # the first process writes for all
        return trained(SilentLog(), None).status
    packing = task.packs.packing
    data = {
        "digest": f"{task.packs.digest:016x}",
        "packs": packing.packs,
        "sequences": packing.sequences,
        "algorithm": packing.algorithm,
        **Identity.of(start.vocabulary).recorded,
        **recorded(config.task.name),
    }
    written = environment(
        device=engine.description, seed=config.run.seed, data=data, command=[sys.executable] + sys.argv
    )
    if changes.allowed:
        written[ALLOWED] = changes.allowed_values
    with contextlib.ExitStack() as opened:
        folder = opened.enter_context(
            open_run_folder(out, config, first_step=first_step, saved=saved, environment=written)
        )
        print(f"run       {folder}" + (f", from update {first_step:,}" if first_step else ""), flush=True)
        write_atomically(folder / start.vocabulary.file, start.vocabulary.text)
        write_atomically(
            folder / EXPORT,
            json.dumps(
                {
                    "architecture": task.architecture,
                    "model": dataclasses.asdict(task.model),
                    "lower_case": start.vocabulary.lower_case,
                    "settings": task.export_settings(),
                }
            ).encode(),
        )
        log = opened.enter_context(
            contextlib.closing(
                RunLog(
                    folder,
                    steps=steps,
                    first_step=first_step,
                    log_every=config.run.log_every,
                    max_sequence_length=task.max_sequence_length,
                    progress=progress,
                )
            )
        )
        longer = "" if config.optimizer.schedule == "constant" else f" --set optimizer.schedule_steps={2 * steps}"
        command = typed("finetune")
        go_on = f"{command} --resume {shlex.quote(str(folder))} --set run.epochs={2 * config.run.epochs}{longer}"
        end = RunEnd(folder, config, engine, batches, log, steps, command, go_on, progress=progress)
        with end.if_not_finite():
            outcome = trained(log, folder / CHECKPOINTS)
            finished = outcome.stopped_by is None
        log.close()
        end.finish(outcome)
        if finished and config.run.export and steps and (outcome.step > first_step or not (folder / MODEL).exists()):
            export(prepared, folder / MODEL)
            print(f"model     {folder / MODEL}, as transformers loads it ({task.architecture})")
        return outcome.status


def _go_on(prepared: Prepared, run: str, resumed: _Resumed) -> int:
    """Engine and batches where the checkpoint left them; the updates made so far."""
    checkpoint = resumed.checkpoint
    processes = prepared.engine.processes
    agree(
        checkpoint.identity,
        Identity.of(prepared.start.vocabulary),
        weights_of=run,
        data_of=prepared.start.description,
    )
    with said_of(run):
        prepared.engine.load_state(checkpoint.engine)
        prepared.batches.load_state(checkpoint.batches, same_batch=not resumed.changes.other_batch)
    if prepared.steps:
        config, before = prepared.config, stored_config(run, checkpoint.config, prepared.config)
        change = schedule_change(
            checkpoint.step,
            before.optimizer,
            config.optimizer,
            steps_before=before.schedule_steps,
            steps_after=config.schedule_steps,
        )
        if change:
            print(f"schedule  {change}")
    print_other_ranks(checkpoint, processes)
    return checkpoint.step


def export(prepared: Prepared, folder: Path) -> None:
    """The model as a Hugging Face folder; a former one is replaced when the new one is whole."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    task = prepared.task
    write_folder(
        partial,
        task.model,
        prepared.engine.weights(),
        prepared.start.vocabulary,
        architecture=task.architecture,
        **task.export_settings(),
    )
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
