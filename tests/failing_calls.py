"""Calls of the operating system that fail: once the cause is gone, the same command gives the undisturbed result.

    python -m tests.failing_calls build [--every 5]        # also: replace, train, convert, all

The work of `tests.kills` is done in a child in which call number k fails, once or from then on, for every k. A failure
must be one line that names a path and a way out, or change nothing. A file system without locks, or that does not know
its free bytes, must change nothing.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import errno
import fcntl
import io
import os
import shutil
import sys
import threading
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

from pack_data.cli.command import ArgumentParser, positive_int, run_main
from tests.crash import again
from tests.kills import DRIVES, Drive, differences, load_all, memory_folder

# A file opened for writing that fails when it is written, as on a full disk.
WRITE = "write"
# An error that stands for 0 free bytes, as object stores report.
NO_FREE_BYTES = 0
# Call -> the errors that it may give.
ERRORS = {
    WRITE: (errno.ENOSPC, errno.EIO),
    "mkdir": (errno.ENOSPC,),
    "fsync": (errno.EIO, errno.EINVAL),
    "replace": (errno.EIO, errno.EXDEV),
    "rename": (errno.EIO, errno.EXDEV),
    "unlink": (errno.EIO,),
    "rmdir": (errno.EIO,),
    "flock": (errno.ENOLCK, errno.ENOSYS),
    "statvfs": (NO_FREE_BYTES, errno.ENOSYS),
}
# Calls whose failure is not one of the work.
NEEDLESS = ("flock", "statvfs")


class Failure(NamedTuple):
    """A failure of call number `at` (from 1; 0: none) with an error, once or from then on."""

    call: str
    error: int
    at: int
    lasts: bool


class UnwritableFile(io.FileIO):
    """A file on a broken disk: every write is an I/O error."""

    def write(self, data):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@contextlib.contextmanager
def failing(failure, root, count):
    """Let the calls that concern `root` fail in the block; count[0] becomes their number."""

    def fails(path):
        if hasattr(path, "fileno"):
            path = path.fileno()
        if isinstance(path, int):
            path = os.path.realpath(f"/proc/self/fd/{path}")
        # TensorBoard's thread writes at other moments in each run.
        if not os.fsdecode(path).startswith(str(root)) or threading.current_thread() is not threading.main_thread():
            return False
        # File systems that cannot sync a directory can sync files.
        if failure.call == "fsync" and failure.error == errno.EINVAL and not os.path.isdir(path):
            return False
        count[0] += 1
        return bool(failure.at) and (count[0] == failure.at or failure.lasts and count[0] > failure.at)

    def opened(path, mode="r", *args, _open=io.open, **kwargs):
        # Locks ("a+") are not written.
        if isinstance(path, int) or "+" in mode or not set(mode) & set("wax") or not fails(path):
            return _open(path, mode, *args, **kwargs)
        kwargs.pop("opener", None)
        mode = mode.replace("x", "w")
        if failure.error == errno.ENOSPC:
            return _open("/dev/full", mode, *args, **kwargs)
        binary = io.BufferedWriter(UnwritableFile("/dev/full", "w"))
        return binary if "b" in mode else io.TextIOWrapper(binary, encoding="utf-8")

    module = fcntl if failure.call == "flock" else os
    original = getattr(module, failure.call, None)

    def called(path, *args, **kwargs):
        if fails(path):
            if failure.error == NO_FREE_BYTES:
                return SimpleNamespace(f_bavail=0, f_blocks=0, f_bfree=0, f_frsize=4096)
            if failure.call == "flock":
                raise OSError(failure.error, os.strerror(failure.error))
            names = () if failure.call == "fsync" else (os.fspath(path),)
            raise OSError(failure.error, os.strerror(failure.error), *names)
        assert original
        return original(path, *args, **kwargs)

    with contextlib.ExitStack() as patches:
        if failure.call == WRITE:
            for opener in (builtins, io):
                patches.enter_context(mock.patch.object(opener, "open", opened))
        else:
            patches.enter_context(mock.patch.object(module, failure.call, called))
        yield


def complaint(text, root):
    """Describe what is wrong with the output of a command that failed."""
    lines = [line for line in text.splitlines() if "error: " in line]
    if "Traceback" in text or len(lines) != 1:
        return f"not one line: {text[-400:]}"
    if str(root) not in lines[0] or ";" not in lines[0]:
        return f"no path or no way out: {lines[0]}"
    return None


def try_calls(name, folder, every=1, calls=tuple(ERRORS)):
    """Yield after each failure what was wrong with it."""
    drive = DRIVES[name]
    before = folder / "before"
    root = folder / "work"
    root.mkdir(parents=True)
    drive.prepare(root)
    shutil.copytree(root, before)

    def work(failure):
        shutil.rmtree(root)
        shutil.copytree(before, root)
        count = [0]
        counted = folder / "count"

        def disturbed(_):
            try:
                with failing(failure, root, count):
                    return drive.work(root)
            finally:
                counted.write_text(str(count[0]))

        status, text = again(Drive(drive.prepare, disturbed, drive.result), root, folder / "output")
        return status, text, int(counted.read_text())

    for call in calls:
        for error in ERRORS[call]:
            status, text, number = work(Failure(call, error, 0, False))
            assert status == 0, text
            calm = drive.result(root)
            for at in range(1, number + 1, every):
                for lasts in (False, True):
                    kind = errno.errorcode.get(error, "0 bytes")
                    story = f"{name}: {call} {at} of {number}{' and later' if lasts else ''}, {kind}"
                    status, text, _ = work(Failure(call, error, at, lasts))
                    problems = []
                    if status not in ((0,) if call in NEEDLESS else (0, 2)):
                        problems.append(f"exit status {status}: {text[-400:]}")
                    elif status == 2:
                        problems.append(complaint(text, root))
                        status, text = again(drive, root, folder / "output")
                        if status:
                            problems.append(f"afterwards exit status {status}: {text[-400:]}")
                    # A file that cannot be removed stays.
                    if status == 0 and call not in ("unlink", "rmdir"):
                        result = drive.result(root)
                        if result != calm:
                            problems.append(f"another result: {differences(calm, result)}")
                    yield [f"{story}: {problem}" for problem in problems if problem]


def main(argv=None):
    parser = ArgumentParser(
        prog="python -m tests.failing_calls", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=(*DRIVES, "all"))
    parser.add_argument("--every", type=positive_int, default=1, help="try each n-th call (default 1: every one)")
    args = parser.parse_args(argv)
    load_all()
    failed = False
    for name in DRIVES if args.what == "all" else [args.what]:
        failures = 0
        wrong = 0
        with memory_folder(f"calls-{name}-") as folder:
            for problems in try_calls(name, folder, args.every):
                failures += 1
                wrong += bool(problems)
                for line in problems:
                    print(f"wrong: {line}", flush=True)
        print(f"{name:<9} {failures:,} failing calls, {wrong:,} wrong", flush=True)
        failed |= bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(run_main(main))
