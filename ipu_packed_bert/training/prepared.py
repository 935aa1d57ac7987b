"""A run before its first update.

`Prepared` has two subclasses: runs on a data set of packs (`training.pretraining`) and on files of examples
(`training.examples`).
"""

from __future__ import annotations

import abc
import contextlib
import shlex
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, ClassVar, Dict, Mapping, NamedTuple, Optional, Tuple

import torch

from ipu_packed_bert.data.global_batches import GlobalBatches, Packs
from ipu_packed_bert.engine import EngineChoice, build_engine
from ipu_packed_bert.engine.base import Engine, saved_by
from ipu_packed_bert.processes.ranks import Processes
from ipu_packed_bert.run_files.checkpoints import Checkpoint
from ipu_packed_bert.run_files.vocabulary_identity import Identity
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.declare import flat
from ipu_packed_bert.tasks.task import Task
from pack_data.cli.parser import runnable
from pack_data.reading.fields import said_of


class Beginning(NamedTuple):
    """State that a run starts from: its own checkpoint, the weights of another run, or neither."""

    folder: str = ""  # run directory of the checkpoint or weights
    checkpoint: Optional[Checkpoint] = None
    weights: Optional[Checkpoint] = None

    @property
    def step(self) -> int:
        """Updates made before this process."""
        return self.checkpoint.step if self.checkpoint else 0


class Begun(NamedTuple):
    """A run whose engine is chosen and whose data are not opened yet."""

    begin: Beginning
    processes: Processes
    choice: EngineChoice
    resources: contextlib.ExitStack  # closed at the end of the run
    packing_factor: Optional[float] = None  # --packing-factor, for a program that is only compiled
    build: Optional[Callable[[Config], Any]] = None  # builds a data set that is missing


@dataclass(frozen=True)
class Prepared(abc.ABC):
    """A run that is ready for its first update."""

    config: Config  # completed by the data
    task: Task
    engine: Engine
    batches: Any  # GlobalBatches, read in the way that suits the engine
    steps: int  # updates of the whole run; 0: no training
    evaluate_every: int  # updates between evaluations; 0: never, not even after the last update
    vocabulary: Identity  # of the data
    data: Dict[str, Any]  # entry "data" of environment.json
    longer: str  # options that continue the run after its last update

    simulated: ClassVar[bool] = False  # True: engine.kind auto may choose the simulated IPU

    @classmethod
    def settle(cls, config: Config, begun: Begun) -> Config:
        """Return the configuration as it will run on this machine."""
        return config

    @classmethod
    def nothing_left(cls, config: Config, begin: Beginning) -> Optional[str]:
        """Return what to print instead of resuming a run that has made all its updates; None to resume it."""
        return None

    @classmethod
    @abc.abstractmethod
    def make(cls, config: Config, begun: Begun) -> Prepared:
        """Open the data, build the engine and describe both; ``begun.resources`` closes other resources."""

    def baseline(self) -> Mapping[str, float]:
        """Return the held-out metrics of constant predictions, for summary.json."""
        return {}

    def export(self, folder: Path, *, trained: bool) -> None:
        """Write the network for other programs; ``trained`` if this process made updates."""

    def load(self, begin: Beginning, *, same_batch: bool) -> None:
        """Load the weights and, in a resumed run, the other state; raise ValueError if they do not fit."""
        engine = self.engine
        batches = self.batches
        if begin.weights:
            with said_of(begin.folder):
                engine.load_state({**engine.state(), "model": begin.weights.engine["model"]})
        checkpoint = begin.checkpoint
        if checkpoint:
            with said_of(begin.folder):
                engine.load_state(checkpoint.engine)
                batches.load_state(checkpoint.batches, same_batch=same_batch)
            _note_other_packs(checkpoint.batches, batches.state())
            _note_other_streams(checkpoint.engine, engine)
        _refuse_other_weights(engine)


def engine_and_batches(
    config: Config,
    task: Task,
    packs: Packs,
    held_out: Optional[Packs],
    begun: Begun,
    *,
    factor: float,
    same: Mapping[str, Any],
) -> Tuple[Engine, Any]:
    """Build the engine and its batches, for `Prepared`.

    Args:
        config: settings of the run, completed by the data.
        task: the task to train.
        packs: training packs.
        held_out: packs to evaluate, if any.
        begun: the processes and the chosen engine.
        factor: packing factor, sequences per pack.
        same: values that must be equal in all processes, besides the configuration.

    Returns:
        The engine, and its batches from `Engine.feed`.

    Raises:
        ValueError: the processes differ, or the engine does not run this configuration.
    """
    device = "cuda" if begun.choice.cuda else begun.choice.kind.replace("host", "cpu")
    begun.processes.refuse_differences(
        {**flat(config.as_dict()), **same, "torch": torch.__version__, "the device": device}
    )
    engine = build_engine(
        config, task, begun.choice, packing_factor=factor, processes=begun.processes
    )
    batches = GlobalBatches(
        packs, task.layout(config, factor), share=engine.share, held_out=held_out
    )
    return engine, engine.feed(batches)


def resume_command(config: Config, folder: Any) -> str:
    """Return the command that resumes the run in a directory."""
    return f"{runnable(config.command)} --resume {shlex.quote(str(folder))}"


def _note_other_packs(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Print a note if the same sequences are in other packs than those that the checkpoint's epoch began with."""
    if saved.get("packs") and saved.get("arrangement") not in (None, now["arrangement"]):
        print(
            "note      the packing of the data has changed since the checkpoint: in the rest of this epoch some"
            " sequences are repeated, and others are skipped"
        )


def _note_other_streams(saved: Mapping[str, Any], engine: Engine) -> None:
    """Print a note if the run continues on other IPUs or in other processes, because each has a random state."""
    before = saved_by(saved)
    now = engine.streams
    if before and now and before != now:
        change = "note      on other IPUs"
        if now[0] != before[0]:
            change = f"ranks     {now[0]}, after {before[0]}"
        print(f"{change}: updates have the same sequences; dropout uses new random numbers")


def _refuse_other_weights(engine: Engine) -> None:
    """Raise ValueError if the processes begin with different weights: they would stay different."""
    if engine.processes.size > 1:
        digest = 0
        for _, weight in sorted(engine.weights().items()):
            digest = zlib.crc32(weight.numpy().tobytes(), digest)
        engine.processes.refuse_differences({"the checksum of the weights": f"{digest:08x}"})
