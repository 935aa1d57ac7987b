"""One run, of any task: it begins or goes on, is prepared, trains, evaluates and is written down.

What differs is what a run learns from: a data set of packs (`training.pretraining`) or files of examples
(`training.examples`). Each is a class of `Prepared`; the rest stands here, once.
"""

from __future__ import annotations

import abc
import argparse
import contextlib
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Dict, Generic, Mapping, NamedTuple, Optional, Tuple, Type, TypeVar

import torch

from ipu_packed_bert.data.global_batches import GlobalBatches, Packs
from ipu_packed_bert.engine import EngineChoice, build_engine, choose_engine
from ipu_packed_bert.engine.base import Engine, saved_by
from ipu_packed_bert.processes.ranks import Processes, flat
from ipu_packed_bert.run_files.checkpoints import Checkpoint, load_newest, newest_checkpoint
from ipu_packed_bert.run_files.folder import CHECKPOINTS
from ipu_packed_bert.run_files.vocabulary_identity import Identity
from ipu_packed_bert.settings.allowed_changes import Changes, check_allowed, compare
from ipu_packed_bert.settings.launch_lines import compiled_words
from ipu_packed_bert.settings.schema import Configuration
from ipu_packed_bert.tasks.task import Task
from ipu_packed_bert.training.log import RunLog
from ipu_packed_bert.training.loop import Log, Outcome, train
from ipu_packed_bert.training.run_folder import environment, locked_run, open_run_folder, refuse_a_run_in
from ipu_packed_bert.training.summary import RunEnd
from ipu_packed_bert.training.trackers import tracker
from pack_data.cli.memory import keep_buffers
from pack_data.reading.fields import said_of
from pack_data.reading.packages import require

C = TypeVar("C", bound=Configuration)


class Beginning(NamedTuple):
    """What a run begins with: a checkpoint of its own, the weights of another run, or neither."""

    folder: str = ""  # the run that checkpoint or weights are of
    checkpoint: Optional[Checkpoint] = None
    weights: Optional[Checkpoint] = None

    @property
    def step(self) -> int:
        """Updates made already."""
        return self.checkpoint.step if self.checkpoint else 0


def beginning(resume: Optional[str], start_from: Optional[str] = None) -> Beginning:
    """Raises ValueError where there is no checkpoint, or one that cannot be resumed."""
    if start_from:
        return Beginning(start_from, weights=load_newest(Path(start_from, CHECKPOINTS)))
    if not resume:
        return Beginning()
    found = load_newest(Path(resume, CHECKPOINTS))
    if "optimizer" not in found.engine:
        raise ValueError(
            f"{resume}: weights that were imported, not a run to resume; --config FILE --start-from {resume} begins one"
            " from them"
        )
    return Beginning(resume, found)


def _first_look(args: argparse.Namespace, opened: contextlib.ExitStack) -> Beginning:
    """What the run begins with; one that goes on is locked from here on.

    Raises ValueError where its folder holds another run, or another process writes it.
    """
    if args.resume:
        newest_checkpoint(Path(args.resume, CHECKPOINTS))  # before the lock, which leaves a file where there is no run
        opened.enter_context(locked_run(args.resume))
    else:
        refuse_a_run_in(args.out)
    return beginning(args.resume, args.start_from)


class Begun(NamedTuple):
    """What a run is made from, besides its configuration."""

    args: argparse.Namespace
    processes: Processes
    begin: Beginning
    choice: EngineChoice
    opened: contextlib.ExitStack  # closes all that the run opens


@dataclass(frozen=True)
class Prepared(abc.ABC, Generic[C]):
    """All that is there before the first update; a class for each that a run may learn from."""

    config: C  # of this class's kind of run, completed by the data
    task: Task
    engine: Engine
    global_batches: GlobalBatches
    batches: Any  # the same, read in the way that suits the engine
    steps: int  # updates of the whole run; 0: no training
    vocabulary: Identity  # of the data

    unit: ClassVar[str] = "update"  # what the line of the run's folder calls an update
    simulated: ClassVar[bool] = False  # whether `auto` may take the simulated device

    @classmethod
    def _on_this_machine(cls, config: C, begun: Begun) -> C:
        """The configuration as it will run here."""
        return config

    @classmethod
    def _nothing_left(cls, config: C, begin: Beginning) -> Optional[str]:
        """What to print in place of a run that has made its updates already; None where it goes on."""
        return None

    @classmethod
    @abc.abstractmethod
    def make(cls, config: C, begun: Begun) -> Prepared[C]:
        """Data, engine and batches; what the class opens besides engine and batches is closed with ``begun.opened``."""

    @abc.abstractmethod
    def _describe(self, *, resumed: bool) -> None:
        """What would run, printed."""

    @property
    @abc.abstractmethod
    def _data(self) -> Dict[str, Any]:
        """The data, as environment.json has them."""

    @property
    @abc.abstractmethod
    def _evaluate_every(self) -> int:
        """Updates between evaluations; 0: none, not at the end either."""

    @abc.abstractmethod
    def _go_on(self, folder: Path) -> str:
        """The whole command that continues the run in this folder after its last update."""

    def _baseline(self) -> Mapping[str, float]:
        """See `run_summary.summarise`."""
        return {}

    def _note_other_data(self, saved: Mapping[str, Any]) -> None:
        """A line where the data are others than those of a checkpoint whose batches were in this state."""

    def _export(self, folder: Path, *, trained: bool) -> None:
        """Writes the network for others. trained: updates were made just now."""

    def load(self, begin: Beginning, *, same_batch: bool) -> None:
        """Weights, and all else of a run that goes on, into engine and batches. ValueError where they do not fit."""
        engine = self.engine
        if begin.weights:
            with said_of(begin.folder):
                engine.load_state({**engine.state(), "model": begin.weights.engine["model"]})
        if begin.checkpoint:
            with said_of(begin.folder):
                engine.load_state(begin.checkpoint.engine)
                self.batches.load_state(begin.checkpoint.batches, same_batch=same_batch)
                self._note_other_data(begin.checkpoint.batches)
            _print_other_streams(begin.checkpoint, engine)
        _refuse_other_weights(engine)

    def trained(self, log: Log, checkpoints: Optional[Path], first_step: int = 0) -> Outcome:
        """All updates, and the evaluation after the last one."""
        outcome = train(
            self.config,
            self.engine,
            self.batches,
            log,
            checkpoints,
            steps=self.steps,
            first_step=first_step,
            evaluate_every=self._evaluate_every,
            vocabulary=self.vocabulary,
        )
        if self._evaluate_every and outcome.stopped_by is None and log.evaluated != outcome.step:
            found = self.task.evaluate(self.engine, log.watched(self.batches.held_out()))
            if found is not None:
                log.evaluation(outcome.step, found)
        return outcome

    def _train_and_write(self, args: argparse.Namespace, begin: Beginning) -> int:
        """The updates, in a run's folder; the exit status."""
        config, engine = self.config, self.engine
        written = environment(
            device=engine.description, seed=config.run.seed, data=self._data, command=[sys.executable, *sys.argv]
        )
        with open_run_folder(args.resume or args.out, config, first_step=begin.step, environment=written) as folder:
            print(f"run       {folder}{f', from {self.unit} {begin.step:,}' if begin.step else ''}", flush=True)
            log = RunLog(
                folder,
                steps=self.steps,
                first_step=begin.step,
                max_sequence_length=self.task.max_sequence_length,
                tracker=tracker(config.run.track, folder, config.as_dict()) if config.run.track else None,
            )
            end = RunEnd(
                folder,
                config,
                engine,
                self.global_batches,
                log,
                self.steps,
                go_on=self._go_on(folder),
                baseline=self._baseline,
            )
            with contextlib.closing(log), end.if_not_finite():
                outcome = self.trained(log, folder / CHECKPOINTS, begin.step)
            end.finish(outcome)
            if self.steps:
                self._export(folder, trained=outcome.step > begin.step)
            return outcome.status


def engine_and_batches(
    config: Configuration,
    task: Task,
    packs: Packs,
    held_out: Optional[Packs],
    choice: EngineChoice,
    *,
    factor: float,
    processes: Processes,
    same: Mapping[str, Any],
) -> Tuple[Engine, GlobalBatches, Any]:
    """As `Prepared` has them. same: what, besides the configuration, must be the same in all processes."""
    here = {"torch": torch.__version__, "the device": "cuda" if choice.cuda else choice.kind.replace("host", "cpu")}
    processes.refuse_differences({**flat(config.as_dict()), **same, **here})
    engine = build_engine(config, task, choice, packing_factor=factor, processes=processes)
    global_batches = GlobalBatches(packs, task.layout(config, factor), share=engine.share, held_out=held_out)
    return engine, global_batches, engine.feed(global_batches)


def run(kind: Type[Prepared[C]], config: C, args: argparse.Namespace, processes: Processes) -> int:
    """Trains, and writes the run down; the exit status."""
    with contextlib.ExitStack() as opened:
        return _run(kind, config, args, processes, opened)


def _run(
    kind: Type[Prepared[C]], config: C, args: argparse.Namespace, processes: Processes, opened: contextlib.ExitStack
) -> int:
    begin = processes.of_first(_first_look, args, opened)
    choice = choose_engine(config, simulated=kind.simulated)
    begun = Begun(args, processes, begin, choice, opened)
    config = kind._on_this_machine(config.on_engine(choice.kind), begun)
    changes, allowed = Changes(), check_allowed(args.allow_change, config.sections)
    if begin.checkpoint:
        changes = compare(begin.folder, begin.checkpoint.config, config, allowed=allowed)
    done = kind._nothing_left(config, begin)
    if done:
        print(done)
        return 0
    for line in changes.lines:
        print(line)
    if choice.kind == "host":
        keep_buffers()
    if not config.engine.offline_export:  # asked for before the work
        require("training, which saves its weights,", "safetensors")
        if config.run.track:
            require(f"run.track={config.run.track}", config.run.track)
    made = kind.make(config, begun)
    opened.enter_context(contextlib.closing(made.engine))
    opened.enter_context(contextlib.closing(made.batches))
    made._describe(resumed=begin.checkpoint is not None)
    print(f"engine    {made.engine.description}", flush=True)
    if made.steps:
        made.engine.compile(made.batches.first())
    if config.engine.offline_export:
        print(f"compiled  {compiled_words(config.engine.offline_export, processes.size)}")
        return 0
    made.load(begin, same_batch=not changes.other_batch)
    if made.engine.share[0]:  # the first process writes for all
        return made.trained(Log(), None, begin.step).status
    return made._train_and_write(args, begin)


def _print_other_streams(checkpoint: Checkpoint, engine: Engine) -> None:
    """One line where other IPUs, or other processes of them, go on: each keeps a random state."""
    before, now = saved_by(checkpoint.engine), engine.streams
    if before and now and before != now:
        what = f"ranks     {now[0]}, after {before[0]}" if now[0] != before[0] else "note      on other IPUs"
        print(f"{what}: each update has the same sequences; dropout draws from new streams")


def _refuse_other_weights(engine: Engine) -> None:
    """Raises ValueError where the processes begin with different weights: they would stay different."""
    if engine.processes.size > 1:
        digest = 0
        for _, weight in sorted(engine.weights().items()):
            digest = zlib.crc32(weight.numpy().tobytes(), digest)
        engine.processes.refuse_differences({"the checksum of the weights": f"{digest:08x}"})
