"""Checks of what a command will write or start, before its work, which may take long."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Sequence, Union

from pack_data.reading.packages import require


@contextmanager
def starting_workers(workers: int) -> Iterator[None]:
    """Raise ValueError, with a way out, if the system cannot start worker processes in the block."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"--workers {workers}: the processes cannot be started ({error.strerror}); they need a writable /dev/shm "
            "and about ten open files each (ulimit -n): pass --workers 1"
        ) from None


_PICTURES = (".png", ".pdf", ".svg")
# Files that only show something: a command may replace its own earlier output.
_REPLACEABLE = (*_PICTURES, ".html")


def check_output(
    option: str,
    file: Union[str, Path],
    *,
    reads: Sequence[Union[str, Path]] = (),
    endings: Sequence[str] = (),
) -> None:
    """Raise ValueError if a file cannot be written; meant for the time before the work, which may take long.

    Args:
        option: The option that names the file, for the message.
        file: The file to write.
        reads: Files and directories that the command reads, which it must not overwrite.
        endings: The suffixes that the file may have; all, if empty.
    """
    path = Path(file)
    if not path.parent.is_dir():
        raise ValueError(f"{option} {file}: there is no directory {path.parent}; create it first")
    if path.is_dir():
        raise ValueError(f"{option} {file}: this is a directory; name a file in it")

    suffix = path.suffix.lower()
    if path.exists():
        if any(os.path.exists(read) and os.path.samefile(read, path) for read in reads):
            raise ValueError(f"{option} {file}: the command reads this file; name another one")
        directories = {Path(read).resolve() for read in reads if Path(read).is_dir()}
        if suffix not in _REPLACEABLE and directories & set(path.resolve().parents):
            raise ValueError(
                f"{option} {file}: the file exists in a directory that the command reads; name another one"
            )

    if endings and suffix not in endings:
        raise ValueError(
            f"{option} {file}: the name must end in {', '.join(endings[:-1])} or {endings[-1]}"
        )


def check_picture(
    option: str, file: Union[str, Path], *, reads: Sequence[Union[str, Path]] = ()
) -> None:
    """Raise ValueError if no picture can be written to this file."""
    check_output(option, file, reads=reads, endings=_PICTURES)
    require(option, "matplotlib")


def check_page(
    option: str, file: Union[str, Path], *, reads: Sequence[Union[str, Path]] = ()
) -> None:
    """Raise ValueError if no HTML page can be written to this file."""
    check_output(option, file, reads=reads)
    require(option, "matplotlib", "jinja2")
