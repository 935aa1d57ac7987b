"""Shared parts of every command line: one-line errors, option types, checks of output files."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, Callable, Optional, Sequence

from pack_data.cli.option_types import byte_count as byte_count
from pack_data.cli.option_types import count_from_zero as count_from_zero
from pack_data.cli.option_types import depth_text as depth_text
from pack_data.cli.option_types import parse_depth as parse_depth
from pack_data.cli.option_types import positive_int as positive_int
from pack_data.cli.option_types import positive_ints as positive_ints
from pack_data.cli.option_types import positive_seconds as positive_seconds
from pack_data.cli.option_types import process_count as process_count
from pack_data.cli.outputs import check_output as check_output
from pack_data.cli.outputs import check_page as check_page
from pack_data.cli.outputs import check_picture as check_picture
from pack_data.cli.outputs import starting_workers as starting_workers
from pack_data.cli.parser import ArgumentParser as ArgumentParser
from pack_data.cli.parser import typed as typed
from pack_data.cli.terminal import Terminal, escaped, progress_shown
from pack_data.reading.cores import available_cores as available_cores
from pack_data.reading.packages import package_of
from pack_data.reading.words import NotFinite as NotFinite
from pack_data.reading.words import Problems


def run_main(
    main: Callable[[Optional[Sequence[str]]], Optional[int]], argv: Optional[Sequence[str]] = None
) -> int:
    """Run a command and return its exit status; print an error as one line on stderr (`Problems`: one line each).

    The status is 0 if the command succeeded, 1 for a negative verdict of the command itself, 2 for a mistake of the
    user, 3 if training is no longer finite, and 128 + n after signal n. Control characters are escaped.
    """
    stdout = sys.stdout
    stderr = sys.stderr
    sys.stdout = _without_controls(stdout)
    sys.stderr = _without_controls(stderr)
    try:
        with progress_shown():
            return _status(main, argv)
    finally:
        sys.stdout = stdout
        sys.stderr = stderr


def _without_controls(stream: Any) -> Any:
    return Terminal(stream) if stream and stream.isatty() else stream


def _status(
    main: Callable[[Optional[Sequence[str]]], Optional[int]], argv: Optional[Sequence[str]]
) -> int:
    try:
        status = main(argv) or 0
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader of the pipe (`| head`) has ended. Without this Python prints another error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        _print_error(error)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        words = " ".join(str(error).split())
        detail = f" ({words[:200]})" if words else ""
        print(f"error: not enough memory{detail}; choose smaller sizes", file=sys.stderr)
        return 2
    except NotFinite as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    except ModuleNotFoundError as error:
        # torch, for example, if only the packages of the packers are installed.
        package = package_of(error.name)
        if package is None:
            raise
        print(
            f"error: this command needs the package {package}: pip install {package}",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


_MAKE_ROOM = "make room, then run the command again"
# Error of the system -> instruction to the user.
_WAYS_OUT = {
    errno.EMFILE: "raise the limit of this shell with ulimit -n",
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
    errno.EIO: "check the disk, then run the command again",
    errno.ESTALE: "the file server has lost or replaced it; run the command again",
}


def _print_error(error: Exception) -> None:
    text = str(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        # The message of the system names no way out.
        way_out = _WAYS_OUT.get(
            error.errno or 0, "choose another file or directory, or fix this one"
        )
        text = f"{error.filename}: {error.strerror}; {way_out}"
    separator = "\n" if isinstance(error, Problems) else " "
    print("error: " + separator.join(map(escaped, text.splitlines())), file=sys.stderr)


def _is_out_of_memory(error: Exception) -> bool:
    # torch's allocators raise a RuntimeError.
    text = " ".join(str(error).split())
    return isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text
