"""Files of a run's log: JSON lines, and curves for TensorBoard and a tracker."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional

from ipu_packed_bert.run_files.folder import read_log
from ipu_packed_bert.training.trackers import Tracker
from pack_data.display.lines import plain
from pack_data.reading.durable import not_through_links, sync_file, sync_folder, write_atomically
from pack_data.reading.fields import one_line


def forget_after(
    path: Path, step: int, note: Callable[[str], None], *, of_updates: bool = False
) -> List[Dict[str, Any]]:
    """Remove the records after ``step``, which the resumed run repeats; return the others.

    ``of_updates``: the log has one record for each update, so updates without one are noted.
    """
    records = read_log(path, note=note, counted=True)
    kept = [record for record in records if record["step"] <= step]
    if path.exists():
        lines = [json.dumps(record) + "\n" for record in kept]
        write_atomically(path, "".join(lines).encode())
    if of_updates:
        _note_gaps(path, [record["step"] for record in kept], step, note)
    return kept


def _note_gaps(path: Path, logged: List[int], step: int, note: Callable[[str], None]) -> None:
    """Note the updates up to ``step`` that a log lacks or has more than once."""
    missing = sorted(set(range(1, step + 1)).difference(logged))
    repeated = len(logged) - len(set(logged))
    problems = []
    if missing:
        problems.append(f"lacks {len(missing):,} of {step:,}, the first is {missing[0]:,}")
    if repeated:
        problems.append(f"has {repeated:,} more than once")
    if problems:
        note(
            f"note      {path}: of the updates before the checkpoint, the log {' and '.join(problems)}; totals and"
            " curves of the run are those of the log, weights are complete"
        )


class JsonlWriter:
    """Writer of a log with one JSON object per line; each record reaches the file at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(  # noqa: SIM115 - until close()
            path, "ab", buffering=0, opener=not_through_links
        )
        sync_folder(path.parent)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record; infinite values and NaN become null, because JSON cannot represent them.

        Raise OSError if it does not fit on the disk.
        """
        line = (json.dumps(plain(record)) + "\n").encode()
        with self._naming_file():
            written = self._file.write(line)
            if written != len(line):  # reading the log drops the incomplete line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def sync(self) -> None:
        """Write all records through to the disk. Raise OSError if they do not fit."""
        with self._naming_file():
            sync_file(self._path)

    def close(self) -> None:
        self._file.close()

    @contextlib.contextmanager
    def _naming_file(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(
                f"{self._path}: cannot be written ({error.strerror or error}); free some space, then continue with"
                f" --resume {self._path.parent}"
            ) from None


class Events:
    """Curves of a run for TensorBoard and a tracker.

    If one of them fails, for example because the disk is full or a service does not answer, one line is printed and the
    run goes on without its curves.
    """

    def __init__(
        self,
        folder: Path,
        first_step: int,
        say: Callable[[str], None],
        tracker: Optional[Tracker] = None,
    ) -> None:
        self._folder = folder
        self._say = say
        self._tracker = tracker
        self._writer: Any = None
        self._original_hook = threading.excepthook
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            say("no TensorBoard events: pip install tensorboard")
            return
        # The writer's thread raises its error again at the next call; without the hook it also prints a traceback.
        threading.excepthook = self._in_thread
        purge_step = first_step + 1 if first_step else None
        with self._failing():
            self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Add values of a step by name, without those that are None."""
        known = {name: value for name, value in values.items() if value is not None}
        with self._failing():
            for name, value in known.items():
                if self._writer is not None:
                    self._writer.add_scalar(name, value, step)
        self._tracked(lambda tracker: tracker.log(step, known))

    def close(self) -> None:
        """Finish the curves."""
        with self._failing():
            if self._writer is not None:
                self._writer.close()
        self._writer = None
        threading.excepthook = self._original_hook
        self._tracked(lambda tracker: tracker.finish())

    def _tracked(self, call: Callable[[Tracker], Any]) -> None:
        try:
            if self._tracker is not None:
                call(self._tracker)
        except Exception as error:  # services raise their own classes
            self._tracker = None
            self._say(f"note      {self._folder}: no more curves for run.track ({one_line(error)})")

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._writer = None
            self._say(
                f"note      {self._folder}: no more TensorBoard events ({error.strerror or error})"
            )

    def _in_thread(self, failure: Any) -> None:
        if not issubclass(failure.exc_type, OSError):
            self._original_hook(failure)
