"""Reading of ordinary files, and locks for files and directories that one process writes."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import platform
import stat
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Callable, Dict, Iterator, Optional, Set

from pack_data.reading.durable import PathLike, naming, not_through_links, remove_stale


@contextmanager
def open_regular(path: PathLike, *, way_out: str = "give an ordinary file") -> Iterator[BinaryIO]:
    """Open an ordinary file for reading bytes; raise ValueError, one line, for everything else that a path may be.

    The path is checked before it is opened, because opening a pipe waits for its writer, and a device may have no end.
    """
    check_regular(path, way_out=way_out)
    try:
        opened = open(path, "rb", buffering=0)  # noqa: SIM115 (closed below)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); {way_out}") from None
    with opened, io.BufferedReader(_RegularFile(opened.fileno(), path), _BUFFER) as file:
        yield file


_BUFFER = 1 << 16
# path -> digests of the content that was read, while `hashing_reads` is active
_digests: Optional[Dict[str, Set[str]]] = None


@contextmanager
def hashing_reads() -> Iterator[Dict[str, Set[str]]]:
    """Yield a dictionary that gets the sha256 of the files, by path, that are read whole in the block.

    So what is hashed is what is read, and no file is read twice. Files that are read in another way than with
    `open_regular`, or not from their beginning to their end, are left out.
    """
    global _digests
    _digests = {}
    try:
        yield _digests
    finally:
        _digests = None


class _RegularFile(io.FileIO):
    """A file that hashes what is read of it, if asked to, and whose errors of reading name it."""

    def __init__(self, descriptor: int, path: PathLike) -> None:
        super().__init__(descriptor, closefd=False)
        self._path = os.fspath(path)
        self._digests = _digests
        self._sha256 = hashlib.sha256()
        self._hashed = 0  # bytes

    def readinto(self, buffer: Any) -> int:
        with naming(self._path):
            count = super().readinto(buffer) or 0
        if self._digests is not None:
            end = self.tell()
            begin = end - count
            if begin <= self._hashed < end:
                self._sha256.update(memoryview(buffer)[self._hashed - begin : count])
                self._hashed = end
        return count

    def readall(self) -> bytes:
        return b"".join(iter(lambda: io.RawIOBase.read(self, _BUFFER), b""))

    def close(self) -> None:
        digests = self._digests
        if digests is not None and not self.closed:
            is_whole = self._hashed == os.fstat(self.fileno()).st_size
            if is_whole:
                digests.setdefault(self._path, set()).add(self._sha256.hexdigest())
        super().close()


def check_regular(path: PathLike, *, way_out: str = "give an ordinary file") -> None:
    """Raise ValueError, one line, unless the path leads to an ordinary file."""
    try:
        kind = os.stat(path).st_mode
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; {way_out}") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); {way_out}") from None
    except ValueError as error:  # a NUL in the name
        raise ValueError(f"{str(path)!r}: {error}; {way_out}") from None
    if not stat.S_ISREG(kind):
        raise ValueError(
            f"{path}: is {_KINDS.get(stat.S_IFMT(kind), 'a device')}, not an ordinary file; {way_out}"
        )


_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


# Bytes of a file that is read as a whole.
_MOST_BYTES = 1 << 28


def read_regular(path: PathLike, *, way_out: str, most_bytes: int = _MOST_BYTES) -> bytes:
    """Read an ordinary file of at most `most_bytes`; raise ValueError, one line, for anything else."""
    with open_regular(path, way_out=way_out) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(most_bytes + 1) if size <= most_bytes else b""
        if size > most_bytes or len(data) > most_bytes:  # some files of the system have no size
            raise ValueError(
                f"{path}: more than {most_bytes:,} bytes, too large for a file of its kind; {way_out}"
            )
        return data


def sha256_of(
    path: PathLike,
    *,
    way_out: str = "give an ordinary file",
    seen: Callable[[int], Any] = int,
) -> str:
    """Return the hexadecimal sha256 of an ordinary file of any size; raise ValueError, one line, for anything else.

    seen: called with the number of bytes read since its last call.
    """
    content = hashlib.sha256()
    with open_regular(path, way_out=way_out) as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            content.update(block)
            seen(len(block))
    return content.hexdigest()


def file_in(folder: PathLike, name: str, *, way_out: str) -> Path:
    """Return the file of a plain name in a directory; raise ValueError for a link that leads out of the directory."""
    path = Path(folder) / name
    if (
        path.is_symlink()
        and Path(os.path.realpath(folder)) not in Path(os.path.realpath(path)).parents
    ):
        raise ValueError(f"{path}: is a link that leads out of its directory; {way_out}")
    return path


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Hold the lock of `path` in the block, after removing what killed processes left of it.

    Raises ValueError if another process holds the lock, which is a hidden file beside `path`, removed at the end.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    with locked(lock, f"{path}: another process is writing it; wait for it or choose another name"):
        try:
            remove_stale(path)
            yield
        finally:
            with suppress(OSError):
                lock.unlink()


class LockRemovedError(ValueError):
    """The holder of a lock removed its file while this process waited for it."""


@contextmanager
def locked(
    path: Path, complaint: str, *, shared: bool = False, patience: Optional[float] = None
) -> Iterator[None]:
    """Hold the lock file `path` in the block; raise ValueError with `complaint` and the holder if another process does.

    The system keeps the lock with the open file, so it ends with the process, however that ends; the file itself stays.
    A lock that is held is tried again for `patience` seconds (None: `LOCK_PATIENCE`). shared: with other processes that
    share it (POSIX systems alone).
    On a file system without locks nothing is held, and a line on stderr says so.
    No link is followed, and a file that is not a lock is refused and stays as it is.

    Processes on several machines see each other's locks over NFS as Linux mounts it (since 2.6.12 a lock there is one
    of the server's byte ranges). They do not if a machine keeps locks to itself: NFS mounted with `nolock` or
    `local_lock`, Lustre with `localflock`. No process can detect this, so a line on stderr names a process of another
    machine that wrote here last and did not end in order. If a machine dies, an NFS server keeps its lock until the
    lease is over (NFS 4, about 90 s) or the machine is back (NFS 3).
    """
    with open(path, "a+", encoding="utf-8", errors="replace", opener=not_through_links) as file:
        try:
            _lock_soon(file, shared, LOCK_PATIENCE if patience is None else patience)
        except OSError as error:
            if error.errno in _HELD:
                holder = _holder(file)
                raise ValueError(
                    f"{complaint} ({_in_words(holder)})" if holder else complaint
                ) from None
            print(
                f"note: {path.parent} cannot be locked ({error.strerror}); start no second process on it",
                file=sys.stderr,
            )
        # If the holder has removed the file meanwhile, another process may lock a new one.
        if not _leads_to(path, file):
            raise LockRemovedError(complaint)
        if shared:
            yield
            return
        _check_is_lock(file, path)
        last = _holder(file)
        if last and last["host"] != platform.node():
            print(
                f"note: {path.parent}: {_in_words(last)}, wrote here and did not end in order; make sure that it has "
                "ended",
                file=sys.stderr,
            )
        own = {
            "process": os.getpid(),
            "host": platform.node(),
            "since": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        _sign(file, json.dumps(own) + "\n")
        try:
            yield
        finally:
            _sign(file, "")


def _leads_to(path: Path, file: Any) -> bool:
    """Return True if the path still leads to this open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except OSError:
        return False


def _check_is_lock(file: Any, path: Path) -> None:
    """Raise ValueError if the file holds anything but a signature, or the beginning of one after a power cut."""
    file.seek(0)
    text = file.read(len(_SIGNATURE)).strip("\0")
    if not _SIGNATURE.startswith(text):
        raise ValueError(f"{path}: is not a lock of ours and would be emptied; move it away")


_SIGNATURE = '{"process": '


def _sign(file: Any, text: str) -> None:
    """Replace the content of the lock file; ignore errors such as a full disk.

    The buffer of the file is bypassed: it would write again, and fail, when the file is closed.
    """
    with suppress(OSError):
        file.truncate(0)
        os.write(file.fileno(), text.encode())


def _holder(file: Any) -> Optional[Dict[str, Any]]:
    """Return who signed a lock file; None if nobody has, or it cannot be read."""
    try:
        file.seek(0)
        holder = json.loads(file.read(1000))
    except (OSError, ValueError, RecursionError):
        return None
    kinds = {"process": int, "host": str, "since": str}
    if not isinstance(holder, dict):
        return None
    is_signed = all(isinstance(holder.get(name), kind) for name, kind in kinds.items())
    return holder if is_signed else None


def _in_words(holder: Dict[str, Any]) -> str:
    return f"process {holder['process']} on {holder['host']}, since {holder['since']}"


# A process that was killed while it started another one leaves the lock to that one until it has replaced its program.
LOCK_PATIENCE = 1.0
_HELD = (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK)  # the last two on Windows


def _lock_soon(file: Any, shared: bool, patience: float) -> None:
    """Try `_lock` again until it succeeds or `patience` is over."""
    end = time.monotonic() + patience
    while True:
        try:
            return _lock(file, shared)
        except OSError as error:
            if error.errno not in _HELD or time.monotonic() > end:
                raise
        time.sleep(0.05)


def _lock(file: Any, shared: bool) -> None:
    """Lock an open file for this process, or for all that share it.  Raises OSError if another one holds it."""
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    else:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
