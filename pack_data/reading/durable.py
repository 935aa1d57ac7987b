"""Operations that declare a file or a directory complete: after a power cut it is the whole new one or the old one.

Each operation syncs the data, then gives it its name, then syncs the directory. A note that states what is complete is
a file like any other: write it by `write_atomically` once everything that it names has been written here.

No other module of the product calls `os.replace`, `os.rename`, `os.link`, `os.fsync`, `numpy.save` or `.tofile()`.
"""

from __future__ import annotations

import errno
import io
import os
import platform
import re
import shutil
import stat
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Iterator, Optional, Union

import numpy as np

PathLike = Union[str, "os.PathLike[str]"]

# Errors of file systems that cannot sync a directory, such as SMB and FUSE.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)
# Errors of file systems that have no hard links, and of a target on another file system.
_CANNOT_LINK = (errno.EPERM, errno.EMLINK, errno.EXDEV, errno.ENOTSUP, errno.ENOSYS)
# Errors of opening a link that is not to be followed; the second on FreeBSD.
_IS_LINK = (errno.ELOOP, errno.EMLINK)
# Permissions of a new file, less those of the umask.
_MODE = 0o666
# A number for this machine, in the names of what is not complete: another machine's process may be alive.
_MACHINE = zlib.crc32(platform.node().encode("utf-8", "surrogateescape"))


# ---- files -----------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, data: Union[bytes, memoryview]) -> None:
    """Write the whole file or none."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def check_new_folder(folder: Path, name: str = "") -> None:
    """Raise ValueError unless the directory is missing or empty; `name` is that of the option or of the directory."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"{name or folder}: exists and is not an empty directory; choose another one"
        )


def write_array(path: Path, values: np.ndarray) -> None:
    """Write the whole .npy file or none.

    `numpy.save` ignores errors when it closes a file (NumPy 2.4), so a full disk would leave a short one.
    """
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(values))
    with replacing(path) as temporary, open(temporary, "wb") as out:
        out.write(header.getvalue())
        out.write(raw_bytes(values))


def raw_bytes(values: np.ndarray) -> memoryview:
    """Return the bytes of an array in C order, without a copy if it has that order."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; its file replaces `path` only if the block ends well.

    An OSError that names no file (a full disk) or the temporary one names `path` instead.
    """
    temporary = temporary_name(path)
    try:
        with naming(path):
            new_file(temporary)
            yield temporary
        finish(temporary, path)
    except BaseException as error:
        if temporary.exists():
            temporary.unlink()
        if isinstance(error, OSError) and str(error.filename) == str(temporary):
            error.filename = str(path)
        raise


def new_file(path: Path) -> None:
    """Create an empty file in place of a file or a link of this name, so that no link leads a writer elsewhere."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE))


def not_through_links(path: str, flags: int) -> int:
    """Open a file of ours for writing; an `opener` of `open`.

    Raises ValueError for a link and for a file of several names or of another kind: what it leads to is not ours.
    """
    refusal = ValueError(
        f"{path}: is a link, or not an ordinary file with one name, and is not written; remove it"
    )
    try:
        descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), _MODE)
    except OSError as error:
        if error.errno in _IS_LINK:
            raise refusal from None
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise refusal
    return descriptor


@contextmanager
def naming(path: PathLike) -> Iterator[None]:
    """Let an OSError in the block that names no file, such as that of a full disk, name `path`."""
    try:
        yield
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = str(path)
        raise


def finish(temporary: Path, path: Path) -> None:
    """Give a file that is written whole, under its `temporary_name`, the name `path`."""
    sync_file(temporary)
    os.replace(temporary, path)
    sync_folder(path.parent)


def temporary_name(path: Path) -> Path:
    """Return the temporary file of this process that becomes `path` when it is complete."""
    return path.with_name(f"{path.name}.{_MACHINE}.{os.getpid()}.tmp")


def remove_stale(path: Path) -> None:
    """Remove what killed processes of this machine left of `path`.

    Call it with the lock held that every writer of `path` takes, so that none of them is alive.
    """
    for item in list(path.parent.iterdir()) if path.parent.is_dir() else []:
        if re.fullmatch(rf"{re.escape(path.name)}\.{_MACHINE}\.\d+\.tmp", item.name):
            if item.is_dir() and not item.is_symlink():
                shutil.rmtree(item)
            else:
                item.unlink()


def rename(source: Path, target: Path) -> None:
    """Rename a complete file within its directory, which the caller syncs.

    Do nothing if the file was renamed before.
    """
    if source.exists():
        os.replace(source, target)


def link(source: Path, target: Path) -> None:
    """Give a complete file a second name, in another directory, or copy it; the caller syncs that directory.

    A power cut may lose a rename from one directory to another in both of them, so the first name stays until the
    second is synced. Do nothing if the first name was removed since.
    """
    if not source.exists() or (target.exists() and source.samefile(target)):
        return
    temporary = temporary_name(source)
    with suppress(FileNotFoundError):
        temporary.unlink()
    try:
        os.link(source, temporary)
        os.replace(temporary, target)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        with replacing(target) as copy:
            shutil.copyfile(source, copy)


# ---- directories -----------------------------------------------------------------------------------------------------


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a new, empty directory beside `path`, which replaces `path` only if the block ends well.

    The directory holds files and no other directories. A kill at the moment of the change leaves the old one as
    `.NAME.replaced`; `remove_unfinished` deletes it.
    """
    partial = _hidden(path, "partial")
    replaced = _hidden(path, "replaced")
    _delete(partial)
    _delete(replaced)
    try:
        partial.mkdir(parents=True)
        yield partial
        for item in partial.iterdir():
            sync_file(item)
        sync_folder(partial)
        if os.path.lexists(path):
            os.rename(path, replaced)
        os.rename(partial, path)
    except BaseException:
        if os.path.lexists(replaced) and not os.path.lexists(path):
            os.rename(replaced, path)
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_folder(path.parent)
    _delete(replaced)


def discard(path: Path) -> None:
    """Delete a directory that must never be seen incomplete: rename it first, and ignore errors."""
    removed = _hidden(path, "removed")
    try:
        os.rename(path, removed)
        sync_folder(path.parent)
    except OSError:
        return
    _delete(removed)


def remove_unfinished(folder: Path, names: str) -> None:
    """Delete the hidden directories that killed processes left in `folder` of directories called `names`, a pattern.

    Call it only while nobody else replaces one of them.
    """
    for suffix in ("partial", "replaced", "removed"):
        for path in folder.glob(f".{names}.{suffix}"):
            _delete(path)


def _delete(path: Path) -> None:
    """Delete a file or a directory with all that it holds; ignore errors."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _hidden(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{suffix}")


# ---- the disk --------------------------------------------------------------------------------------------------------


def sync_file(path: Path) -> None:
    """Make the content of a file survive a power cut."""
    with naming(path), open(path, "rb+") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a directory survive a power cut, if its file system and the system can."""
    if os.name == "nt":
        return
    descriptor = os.open(str(folder), os.O_RDONLY)
    try:
        with naming(folder):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def free_bytes(folder: Path) -> Optional[int]:
    """Return the free bytes of a file system; None if they are unknown, as on object stores, which report 0."""
    try:
        return shutil.disk_usage(str(folder)).free or None
    except OSError:
        return None
