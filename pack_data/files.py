"""Files that are there whole or not at all, and folders that one process at a time writes."""

from __future__ import annotations

import errno
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator


def sync_folder(folder: Path) -> None:
    """Makes renames in this folder survive a power cut; Windows has no such call."""
    if os.name == "nt":
        return
    descriptor = os.open(str(folder), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes) -> None:
    """The whole file or none: temporary name, flush, fsync, rename."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to; the file takes the place of `path` only if the block ends well."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    except BaseException:
        if temporary.exists():
            temporary.unlink()
        raise
    sync_folder(path.parent)


@contextmanager
def locked(path: Path, complaint: str) -> Iterator[None]:
    """Holds the lock file `path` while entered; raises ValueError(complaint) where another process holds it.

    The system keeps the lock with the open file, so it ends with the process, however that ends; the file itself stays.
    A lock that is held is tried again for `LOCK_PATIENCE` seconds.
    On a file system without locks nothing is held, and a line on stderr says so.
    """
    with open(path, "a") as file:
        try:
            _lock_soon(file)
        except OSError as error:
            if error.errno in _HELD:
                raise ValueError(complaint) from None
            print(
                f"note: {path.parent} cannot be locked ({error.strerror}); start no second process on it",
                file=sys.stderr,
            )
        yield


# A process that was killed while it started another one leaves the lock to that one until it has replaced its program.
LOCK_PATIENCE = 1.0
_HELD = (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK)  # the last two on Windows


def _lock_soon(file: Any) -> None:
    """As `_lock`, tried again until `LOCK_PATIENCE` is over."""
    end = time.monotonic() + LOCK_PATIENCE
    while True:
        try:
            return _lock(file)
        except OSError as error:
            if error.errno not in _HELD or time.monotonic() > end:
                raise
        time.sleep(0.05)


def _lock(file: Any) -> None:
    """Locks an open file for this process; OSError where another one has it."""
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
