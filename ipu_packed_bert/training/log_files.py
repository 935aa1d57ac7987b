"""Files of a run's log: JSON lines, and events for TensorBoard and a tracker."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import threading
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional

from ipu_packed_bert.run_files.folder import read_log
from ipu_packed_bert.training.trackers import Tracker
from pack_data.reading.fields import one_line
from pack_data.reading.files import write_atomically


def forget_after(path: Path, step: int, note: Callable[[str], None]) -> List[Dict[str, Any]]:
    """Keep only the records up to ``step``, and return them; later ones are made again."""
    kept = [record for record in read_log(path, note=note, counted=True) if record["step"] <= step]
    if path.exists():
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept).encode())
    return kept


class JsonlWriter:
    """A log that is appended to, one JSON object per line; each record is written to its file at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - until close()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record; infinite values and NaN become null, because JSON cannot represent them.

        Raise OSError if it does not fit on the disk.
        """
        finite = {name: None if _not_finite(value) else value for name, value in record.items()}
        line = (json.dumps(finite) + "\n").encode()
        with self._naming_file():
            if self._file.write(line) != len(
                line
            ):  # the part that was written is dropped when the log is read
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def sync(self) -> None:
        """Write all records through to the disk. Raise OSError if they do not fit."""
        with self._naming_file():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    @contextlib.contextmanager
    def _naming_file(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(
                f"{self._path}: not written ({error.strerror or error}); free some space, then continue with --resume"
                f" {self._path.parent}"
            ) from None


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


class Events:
    """Values by name and step for TensorBoard and a tracker.

    A failure of either, such as a full disk or a service that does not answer, prints one line and the run goes on.
    """

    def __init__(
        self,
        folder: Path,
        first_step: int,
        say: Callable[[str], None],
        tracker: Optional[Tracker] = None,
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
            self._writer = SummaryWriter(
                str(folder), purge_step=first_step + 1 if first_step else None
            )

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
            self._say(
                f"note      {self._folder}: no more TensorBoard events ({error.strerror or error})"
            )

    def _in_thread(self, found: Any) -> None:
        if not issubclass(found.exc_type, OSError):
            self._former_hook(found)
