"""Files that are there whole or not at all, and folders that one process at a time writes."""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Iterator, Union


@contextmanager
def open_regular(path: Union[str, os.PathLike], *, way_out: str = "give an ordinary file") -> Iterator[BinaryIO]:
    """An ordinary file, open for reading bytes. ValueError, one line, for everything else that a path can lead to.

    A pipe would be waited for without end, and a device may have no end. It is asked what the path leads to before it
    is opened: to open a pipe is to wait for its writer.
    """
    try:
        kind = os.stat(path).st_mode
        if not stat.S_ISREG(kind):
            raise ValueError(f"{path}: is {_KINDS.get(stat.S_IFMT(kind), 'a device')}, not an ordinary file; {way_out}")
        file = open(path, "rb")  # noqa: SIM115 (closed below: errors in the block are not of the opening)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; {way_out}") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); {way_out}") from None
    except ValueError as error:
        if str(error).startswith(str(path)):
            raise
        raise ValueError(f"{str(path)!r}: {error}; {way_out}") from None  # a NUL in the name
    with file:
        yield file


_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def read_regular(path: Union[str, os.PathLike], *, way_out: str, most_bytes: int) -> bytes:
    """What an ordinary file of at most `most_bytes` holds. ValueError, one line, for anything else."""
    with open_regular(path, way_out=way_out) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(most_bytes + 1) if size <= most_bytes else b""
        if size > most_bytes or len(data) > most_bytes:  # some files of the system have no size
            raise ValueError(f"{path}: more than {most_bytes:,} bytes, too large for a file of its kind; {way_out}")
        return data


def file_in(folder: Union[str, os.PathLike], name: str, *, way_out: str) -> Path:
    """The file of a plain name in a folder. ValueError where it is a link that leads out of the folder."""
    path = Path(folder) / name
    if path.is_symlink() and Path(os.path.realpath(folder)) not in Path(os.path.realpath(path)).parents:
        raise ValueError(f"{path}: is a link that leads out of its folder; {way_out}")
    return path


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
