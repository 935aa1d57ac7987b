"""The lock of a folder: one process at a time, also without fcntl, and not beyond the process that held it."""

import errno
import os
import signal
import subprocess
import sys
import types

import pytest

from pack_data import files
from pack_data.files import locked


def test_a_killed_process_leaves_no_lock_behind(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from pack_data.files import locked\n"
        "with locked(Path(sys.argv[1]), 'taken'):\n    print('held', flush=True); time.sleep(60)"
    )
    path = tmp_path / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, universal_newlines=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="taken"), locked(path, "taken"):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with locked(path, "taken"):
        pass


def test_a_child_of_a_killed_process_may_hold_the_lock_a_moment_longer(tmp_path):
    """Between fork and exec a child has the open files of its parent, the lock among them."""
    program = (
        "import os, sys, time; from pathlib import Path; from pack_data.files import locked\n"
        "with locked(Path(sys.argv[1]), 'taken'):\n"
        "    if os.fork() == 0:\n        time.sleep(0.3); os._exit(0)\n"
        "    print('held', flush=True); time.sleep(60)"
    )
    path = tmp_path / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, universal_newlines=True
    )
    assert holder.stdout.readline() == "held\n"
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with locked(path, "taken"):
        pass
    holder.stdout.close()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EDEADLK])
def test_on_windows_the_lock_is_that_of_msvcrt(tmp_path, monkeypatch, code):
    taken = []

    def locking(descriptor, mode, length):
        if taken:
            raise OSError(code, "already locked")
        taken.append((mode, length))

    monkeypatch.setattr(files, "LOCK_PATIENCE", 0.1)
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", types.SimpleNamespace(LK_NBLCK=2, locking=locking))
    with locked(tmp_path / "lock", "taken"):
        assert taken == [(2, 1)]
        with pytest.raises(ValueError, match="taken"), locked(tmp_path / "lock", "taken"):
            pass


def test_a_file_system_without_locks_is_said_and_used(tmp_path, monkeypatch, capsys):
    def unsupported(file):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(files, "_lock", unsupported)
    with locked(tmp_path / "lock", "taken"):
        pass
    assert "cannot be locked (Operation not supported)" in capsys.readouterr().err
