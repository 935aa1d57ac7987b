"""One run of any task: prepare or resume it, train, evaluate, and write the results."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Optional, Type

from ipu_packed_bert.engine import choose_engine
from ipu_packed_bert.processes.ranks import Processes
from ipu_packed_bert.run_files.checkpoints import UNFINISHED, load_newest, newest_checkpoint
from ipu_packed_bert.run_files.folder import CHECKPOINTS
from ipu_packed_bert.settings.allowed_changes import Changes, check_allowed, compare
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.launch_lines import compiled_words
from ipu_packed_bert.training.log import RunLog
from ipu_packed_bert.training.loop import Log, Outcome, train
from ipu_packed_bert.training.prepared import Beginning, Begun, Prepared
from ipu_packed_bert.training.run_folder import environment, locked_run, open_run_folder
from ipu_packed_bert.training.summary import finish, summary_if_not_finite
from ipu_packed_bert.training.trackers import tracker
from pack_data.cli.memory import keep_buffers
from pack_data.reading.durable import remove_unfinished
from pack_data.reading.packages import require

if TYPE_CHECKING:
    from ipu_packed_bert.settings.command_line import RunOptions


def run(
    kind: Type[Prepared],
    config: Config,
    args: RunOptions,
    processes: Processes,
    build: Optional[Callable[[Config], Any]] = None,
) -> int:
    """Make the updates of a run and write its directory.

    Args:
        kind: class of the run, by the kind of its data.
        config: settings of the run.
        args: options of `packed-bert pretrain` or `finetune`.
        processes: the processes that make the updates together.
        build: builds the data set of a configuration of pre-training, if it is missing.

    Returns:
        The exit status.
    """
    with contextlib.ExitStack() as resources:
        begin = processes.of_first(_claim, args, resources)
        choice = choose_engine(config, simulated=kind.simulated)
        begun = Begun(begin, processes, choice, resources, args.packing_factor, build)
        config = kind.settle(config.on_engine(begun.choice.kind), begun)
        changes = Changes()
        allowed = check_allowed(args.allow_change, config)
        if begin.checkpoint:
            changes = compare(begin.folder, begin.checkpoint.config, config, allowed=allowed)
        done = kind.nothing_left(config, begin)
        if done:
            print(done)
            return 0
        for line in changes.lines:
            print(line)
        _require_packages(config)
        if begun.choice.kind == "host":
            keep_buffers()

        prepared = kind.make(config, begun)
        engine = prepared.engine
        resources.enter_context(contextlib.closing(engine))
        resources.enter_context(contextlib.closing(prepared.batches))
        print(f"engine    {engine.description}", flush=True)
        if prepared.steps:
            engine.compile(prepared.batches.first())
        if config.engine.offline_export:
            print(f"compiled  {compiled_words(config.engine.offline_export, processes.size)}")
            return 0

        prepared.load(begin, same_batch=not changes.other_batch)
        if engine.share[0]:  # the first process writes for all
            return _train(prepared, Log(), None, begin.step).status
        return _train_and_write(prepared, args.resume or args.out, begin.step)


def _claim(args: RunOptions, resources: contextlib.ExitStack) -> Beginning:
    """Return the state that the run starts from, and lock a resumed run until ``resources`` close.

    Raises ValueError if another process writes the run, or its state cannot be resumed.
    """
    if args.resume:
        # Fails if there is no run, before the lock creates a file.
        newest_checkpoint(Path(args.resume, CHECKPOINTS))
        resources.enter_context(locked_run(args.resume))
        remove_unfinished(Path(args.resume, CHECKPOINTS), UNFINISHED)
    if args.start_from:
        return Beginning(args.start_from, weights=load_newest(Path(args.start_from, CHECKPOINTS)))
    if not args.resume:
        return Beginning()
    checkpoint = load_newest(Path(args.resume, CHECKPOINTS))
    if "optimizer" not in checkpoint.engine:
        raise ValueError(
            f"{args.resume}: has imported weights and no updates to resume; use --config FILE --start-from"
            f" {args.resume} to begin a run with them"
        )
    return Beginning(args.resume, checkpoint)


def _require_packages(config: Config) -> None:
    """Raise ValueError, before any work, if a package that writes the run is missing."""
    if config.engine.offline_export:
        return
    require("training, which saves its weights,", "safetensors")
    if config.run.track:
        require(f"run.track={config.run.track}", config.run.track)


def _train(prepared: Prepared, log: Log, checkpoints: Optional[Path], first_step: int) -> Outcome:
    """Make all updates, and the evaluation after the last one."""
    outcome = train(
        prepared.config,
        prepared.engine,
        prepared.batches,
        log,
        checkpoints,
        steps=prepared.steps,
        first_step=first_step,
        evaluate_every=prepared.evaluate_every,
        vocabulary=prepared.vocabulary,
    )
    if prepared.evaluate_every and outcome.stopped_by is None and log.evaluated != outcome.step:
        evaluation = prepared.task.evaluate(
            prepared.engine, log.watched(prepared.batches.held_out())
        )
        if evaluation is not None:
            log.evaluation(outcome.step, evaluation)
    return outcome


def _train_and_write(prepared: Prepared, out: Optional[str], first_step: int) -> int:
    """Make the updates and write them to a run directory; return the exit status."""
    config = prepared.config
    facts = environment(
        device=prepared.engine.description,
        seed=config.run.seed,
        data=prepared.data,
        command=[sys.executable, *sys.argv],
    )
    with open_run_folder(out, config, first_step=first_step, environment=facts) as folder:
        since = f", from update {first_step:,}" if first_step else ""
        print(f"run       {folder}{since}", flush=True)
        service = None
        if config.run.track:
            service = tracker(config.run.track, folder, config.as_dict())
        log = RunLog(
            folder,
            steps=prepared.steps,
            first_step=first_step,
            max_sequence_length=prepared.task.max_sequence_length,
            tracker=service,
        )
        with contextlib.closing(log), summary_if_not_finite(prepared, folder, log):
            outcome = _train(prepared, log, folder / CHECKPOINTS, first_step)
        finish(prepared, folder, log, outcome)
        if prepared.steps:
            prepared.export(folder, trained=outcome.step > first_step)
        return outcome.status
