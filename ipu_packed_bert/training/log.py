"""What a run writes down: its logs, TensorBoard events, environment.json, and the line people watch."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import (
    Any,
    Callable,
    ContextManager,
    Deque,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Tuple,
    Union,
)

import numpy as np
import torch

from ipu_packed_bert.data.global_batches import Batch
from ipu_packed_bert.engine.base import StepResult
from ipu_packed_bert.run_files.checkpoints import NotSaved, checkpoints
from ipu_packed_bert.run_files.folder import (
    CHECKPOINTS,
    CONFIG,
    COUNTS,
    EVALUATIONS,
    LOCK,
    LOG,
    SUMMARY,
    environment_of,
    read_log,
)
from ipu_packed_bert.run_files.vocabulary_identity import Identity
from ipu_packed_bert.settings.schema import Configuration
from ipu_packed_bert.tasks.task import Counts, Evaluation
from ipu_packed_bert.training.loop import Log, not_finite
from ipu_packed_bert.training.picture import padding_avoided
from ipu_packed_bert.training.trackers import RUN_OF_MLFLOW, Tracker
from pack_data.cli.command import bare_stderr, check_folder
from pack_data.cli.timing import left_text
from pack_data.reading.fields import one_line
from pack_data.reading.files import locked, write_atomically
from pack_data.store.data_set import MANIFEST, Manifest

# Steps over which the watched line averages its rates.
_RECENT = 20

_PADDING_AVOIDED = (
    "padding avoided: of the padding that the same sequences have in rows of one, the share that their packs do without"
)


class Totals(NamedTuple):
    """Counts and seconds of several steps."""

    packs: int = 0
    sequences: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def _plus(self, counts: Counts, seconds: float) -> Totals:
        return Totals(
            self.packs + counts["packs"],
            self.sequences + counts["sequences"],
            self.tokens + counts["tokens"],
            self.seconds + seconds,
        )

    @property
    def sequences_per_second(self) -> float:
        return self.sequences / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def packing_factor(self) -> float:
        return self.sequences / self.packs if self.packs else 1.0


class RunLog(Log):
    """Writes one run's steps, as they are made, to its folder and to the terminal.

    A terminal gets a live line, anything else about twenty lines in all.  After a resumption the lines of steps that
    were made after the checkpoint, and lost with it, are taken out first.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        first_step: int = 0,
        max_sequence_length: int,
        stream: Any = None,
        tracker: Optional[Tracker] = None,
    ):
        self._folder = Path(folder)
        self._steps = steps
        self._max_sequence_length = max_sequence_length
        self._stream = sys.stdout if stream is None else stream
        self._recent: Deque[Tuple[Counts, float]] = deque(maxlen=_RECENT)
        self._lines_every = max(1, steps // 20)
        self._first: Optional[Tuple[Counts, float]] = None
        self._began = 0, 0.0  # that step, and when it was done
        self._totals = Totals()
        self._bar: Any = None
        _forget_after(self._folder / LOG, first_step, self.say)
        evaluations = _forget_after(self._folder / EVALUATIONS, first_step, self.say)
        self._evaluated_before = {record["step"] for record in evaluations}
        self._log = JsonlWriter(self._folder / LOG, self.say)
        self._evaluations = JsonlWriter(self._folder / EVALUATIONS, self.say)
        self._events = Events(self._folder, first_step, self.say, tracker)
        if sys.stderr and sys.stderr.isatty():
            from pack_data.cli.bars import DelayedBar

            self._bar = DelayedBar(
                terminal=True,
                total=steps,
                initial=first_step,
                file=bare_stderr(),
                unit="step",
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}",
            )
            self._bar.announce()

    def step(self, step: int, learning_rate: float, counts: Counts, result: StepResult) -> None:
        record = {
            "step": step,
            **result.metrics,
            "learning_rate": learning_rate,
            "gradient_norm": result.gradient_norm,
            **{name: counts[name] for name in COUNTS},
            "seconds": result.seconds,
            "cycles": result.cycles,
            **({} if result.applied else {"skipped": True}),
        }
        self._log.append(record)
        self._recent.append((counts, result.seconds))
        # The first step of a process warms up caches and allocators: it counts for the rates only where it is alone.
        if self._first is None:
            self.say(_PADDING_AVOIDED)
            self._first = (counts, result.seconds)
            self._began = step, time.perf_counter()
        else:
            self._totals = self._totals._plus(counts, result.seconds)
        recent = Totals()
        for each in self._recent:
            recent = recent._plus(*each)
        avoided = padding_avoided(recent.packs, recent.sequences, recent.tokens, self._max_sequence_length)
        self._events.add(
            step,
            {
                **{_tag(name): value for name, value in result.metrics.items()},
                "learning_rate": learning_rate,
                "gradient_norm": result.gradient_norm,
                "rate/sequences_per_second": recent.sequences_per_second,
                "rate/tokens_per_second": recent.tokens_per_second,
                "packing/sequences_per_pack": recent.packing_factor,
                "packing/padding_avoided": avoided,
            },
        )
        if not result.applied:
            self.say(f"left out  update {step:,}: {not_finite(result)}; weights and moments are as before")
        line = (
            f"{in_words(result.metrics)}  {recent.sequences_per_second:,.1f} seq/s"
            f"  {recent.tokens_per_second:,.0f} tok/s  padding avoided {avoided:.2%}"
        )
        if self._bar is not None:
            self._bar.set_postfix_str(line, refresh=False)
            self._bar.update(1)
        elif step == 1 or step == self._steps or step % self._lines_every == 0:
            self.say(f"step {step:>{len(str(self._steps))}}/{self._steps}  {line}{self._left(step)}")

    def _left(self, step: int) -> str:
        """The time left, at the speed of this process so far, with its evaluations and checkpoints."""
        began, since = self._began
        if not began < step < self._steps:
            return ""
        return f"  {left_text((time.perf_counter() - since) / (step - began) * (self._steps - step))}"

    def watched(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for number, batch in enumerate(batches, start=1):
            if self._bar is not None:
                self._bar.set_postfix_str(f"evaluating, batch {number:,}", refresh=True)
            yield batch

    def evaluation(self, step: int, found: Evaluation) -> None:
        """Files first, so that a line in evaluation.jsonl means that they are there, unless the disk was full."""
        self.evaluated = step
        for name, content in found.files.items():
            path, text = self._folder / name, json.dumps(content, indent=1, ensure_ascii=False) + "\n"
            try:
                write_atomically(path, text.encode())
            except OSError as error:
                self.say(f"note      {path} is not written ({error.strerror or error})")
        self._evaluations.append(
            {"step": step, **found.metrics, **{name: found.counts[name] for name in COUNTS}, "seconds": found.seconds}
        )
        self._events.add(step, {f"evaluation/{name}": value for name, value in found.metrics.items()})
        self.say(f"held out after step {step}: {in_words(found.metrics)}  ({found.counts['sequences']:,} sequences)")

    def lacks_evaluation(self, step: int) -> bool:
        return step not in self._evaluated_before

    def sync(self) -> None:
        self._log.sync()
        self._evaluations.sync()

    @property
    def totals(self) -> Totals:
        """This process's steps but its first, or that one if there is no other."""
        if self._totals.packs or self._first is None:
            return self._totals
        return Totals()._plus(*self._first)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._events.close()
        self._log.close()
        self._evaluations.close()

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)


def _tag(name: str) -> str:
    """TensorBoard's name of a metric: `mlm_loss` is "loss/mlm", `loss` is "loss/total"."""
    what, _, kind = name.rpartition("_")
    return f"{kind}/{what or 'total'}"


def in_words(metrics: Mapping[str, Any]) -> str:
    """Metrics as people read them.

    Means, which begin with a loss: `loss 5.436  mlm 4.681 12.0%  nsp 0.755 51.9%`, accuracies as fractions.  Scores of
    predictions are written as they are: `exact 55.10  f1 61.25  questions 240`.
    """
    if "loss" not in metrics:
        words = (
            f"{name} {'none' if value is None else f'{value:,}' if isinstance(value, int) else f'{value:.2f}'}"
            for name, value in metrics.items()
        )
        return "  ".join(words) or "no labels in the file"
    groups: Dict[str, List[str]] = {}
    for name, value in metrics.items():
        what, _, kind = name.rpartition("_")
        groups.setdefault(what or kind, []).append(
            "none" if value is None else f"{value:.1%}" if kind == "accuracy" else f"{value:.3f}"
        )
    return "  ".join(" ".join([what, *values]) for what, values in groups.items())


def refuse_a_run_in(folder: Optional[str]) -> None:
    """Raise ValueError if a new run would overwrite one, or cannot be made there."""
    if folder is None:
        return
    check_folder("--out", folder, "a run")
    if Path(folder, MANIFEST).exists():
        raise ValueError(f"--out {folder}: holds a data set; a run is a folder of its own, choose another name")
    if Path(folder, LOG).exists():
        go_on = f"; continue it with --resume {shlex.quote(str(folder))}"
        if not _saved(folder):
            go_on = ", which has saved no checkpoint; begin it again with --resume-if-there"
        raise ValueError(f"{folder}: holds a run already{go_on}, or give another --out")


def _saved(folder: Union[str, Path]) -> bool:
    """Whether a run has saved a checkpoint."""
    return bool(checkpoints(Path(folder, CHECKPOINTS)))


def locked_run(folder: Union[str, Path], way_out: str = "") -> ContextManager[None]:
    """While entered, no other process writes the run; ValueError where one does."""
    return locked(Path(folder, LOCK), f"{folder}: another process writes this run; wait for it{way_out}")


def resumes(folder: Union[str, Path]) -> bool:
    """Whether there is a run that has saved something; what was logged of one that ended before that is taken away.

    Raises ValueError where another process writes it.
    """
    if not _saved(folder) and Path(folder, LOG).exists():
        with locked_run(folder):
            if _saved(folder):  # before the lock, by a process that has ended since
                return True
            for name in (LOG, EVALUATIONS, RUN_OF_MLFLOW):
                Path(folder, name).unlink(missing_ok=True)
        print(f"note      {folder} ended before its first checkpoint; it begins again")
    return _saved(folder)


@contextlib.contextmanager
def open_run_folder(
    folder: Optional[str], config: Configuration, *, first_step: int, environment: Dict[str, Any]
) -> Iterator[Path]:
    """The folder of a run with its config.yml and environment.json, locked while entered.

    ``folder`` None makes a new one, ``runs/NAME-TIME``.
    ``first_step`` above 0 means that the run is resumed: its environment goes beside the first one, and it is locked
    already. Raises ValueError, before anything is written, where another process writes the run, or has written it.
    """
    path = _new_folder(config.name) if folder is None else Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with contextlib.nullcontext() if first_step else locked_run(path, ", or give another --out"):
        if not first_step:  # since the first look at the folder, another process may have come and gone
            refuse_a_run_in(str(path))
        # What the run came to before: it goes on now, and says so anew at its end.
        (path / SUMMARY).unlink(missing_ok=True)
        write_atomically(path / CONFIG, config.to_yaml().encode())
        write_atomically(path / environment_of(first_step), (json.dumps(environment, indent=1) + "\n").encode())
        yield path


def _new_folder(name: str) -> Path:
    """``runs/NAME-TIME``, made by this call."""
    first = path = Path("runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    number = 1
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:  # a run begun within the same second
            number += 1
            path = first.with_name(f"{first.name}-{number}")


def _forget_after(path: Path, step: int, note: Callable[[str], None]) -> List[Dict[str, Any]]:
    """Keep only the records up to ``step``, and return them; later ones are made again."""
    kept = [record for record in read_log(path, note=note, counted=True) if record["step"] <= step]
    if path.exists():
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept).encode())
    return kept


def data_of(manifest: Manifest) -> Dict[str, Any]:
    """What environment.json says about a data set."""
    return {
        "digest": f"{manifest.digest:016x}",
        "packs": manifest.packs,
        "sequences": manifest.sequences,
        "algorithm": manifest.algorithm,
        **Identity.of_data(manifest).recorded,
    }


def environment(*, device: str, seed: int, data: Mapping[str, Any], command: List[str]) -> Dict[str, Any]:
    """What else, besides config and data, a run depends on."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    poptorch = sys.modules.get("poptorch")  # there only if the IPU engine has loaded it
    if poptorch is not None:
        versions["poptorch"] = poptorch.__version__
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command,
        "seed": seed,
        "device": device,
        "data": dict(data),
        "versions": versions,
        "commit": commit_here(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def commit_here() -> Optional[str]:
    """Commit of the checkout this file is in, with "+" if files differ from it; None outside a checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ("git", "-C", str(Path(__file__).resolve().parent)) + arguments,
            check=True,
            timeout=20,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


class JsonlWriter:
    """A log that is appended to: a record is in its file at once, or waits in memory while the disk is full.

    What is there of a line that did not fit is cut off again, so that the next one does not go on in it.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - until close()
        self._size = path.stat().st_size
        self._waiting: List[bytes] = []
        self._told = False

    def append(self, record: Mapping[str, Any]) -> None:
        """A value that is infinite or not a number is null there, as JSON has no word for it."""
        finite = {name: None if _not_finite(value) else value for name, value in record.items()}
        self._waiting.append((json.dumps(finite) + "\n").encode())
        with contextlib.suppress(OSError):
            self._write()

    def sync(self) -> None:
        """All records are on the disk when this returns. Raises NotSaved where they do not fit."""
        try:
            self._write()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise NotSaved(f"{self._path}: not written ({error.strerror or error})") from None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._write()
        if self._waiting:
            self._say(f"note      {self._path} lacks its last {len(self._waiting):,} lines, which could not be written")
        self._file.close()

    def _write(self) -> None:
        data = b"".join(self._waiting)
        try:
            if data and self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            if not self._told:
                self._say(f"note      {self._path} cannot be written ({error.strerror}); its lines wait in memory")
            self._told = True
            raise
        self._size += len(data)
        self._waiting, self._told = [], False


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


class Events:
    """What TensorBoard and a tracker show: values by name and step. What ends one of them, a full disk or a service
    that does not answer, is said in one line and does not end the run."""

    def __init__(
        self, folder: Path, first_step: int, say: Callable[[str], None], tracker: Optional[Tracker] = None
    ) -> None:
        self._folder, self._say, self._tracker = folder, say, tracker
        self._writer: Any = None
        self._former_hook = threading.excepthook
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            say("no TensorBoard events: pip install tensorboard")
            return
        # The writer's thread keeps its error for the next call, and would print it as a traceback as well.
        threading.excepthook = self._in_thread
        with self._failing():
            self._writer = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Values that are None are left out."""
        there = {name: value for name, value in values.items() if value is not None}
        with self._failing():
            for name, value in there.items():
                if self._writer is not None:
                    self._writer.add_scalar(name, value, step)
        self._tracked(lambda to: to.log(step, there))

    def close(self) -> None:
        with self._failing():
            if self._writer is not None:
                self._writer.close()
        self._writer, threading.excepthook = None, self._former_hook
        self._tracked(lambda to: to.finish())

    def _tracked(self, call: Callable[[Tracker], Any]) -> None:
        try:
            if self._tracker is not None:
                call(self._tracker)
        except Exception as error:  # a service has errors of its own
            self._tracker = None
            self._say(f"note      {self._folder}: no more curves for run.track ({one_line(error)})")

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._writer = None
            self._say(f"note      {self._folder}: no more TensorBoard events ({error.strerror or error})")

    def _in_thread(self, found: Any) -> None:
        if not issubclass(found.exc_type, OSError):
            self._former_hook(found)
