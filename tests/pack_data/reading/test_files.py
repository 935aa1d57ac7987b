"""The lock of a folder: one process at a time, also without fcntl, and not beyond the process that held it."""

import errno
import json
import os
import platform
import signal
import subprocess
import sys
import types

import pytest

from pack_data.reading import durable, files
from pack_data.reading.files import locked


def holding(path, more=""):
    """A process that holds a lock."""
    program = (
        "import os, sys, time; from pathlib import Path; from pack_data.reading.files import locked\n"
        f"with locked(Path(sys.argv[1]), 'taken'):\n{more}    print('held', flush=True); time.sleep(60)"
    )
    return subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, universal_newlines=True)


def test_a_killed_process_leaves_no_lock_behind(tmp_path):
    path = tmp_path / "lock"
    holder = holding(path)
    try:
        assert holder.stdout.readline() == "held\n"
        words = rf"^taken \(process {holder.pid} on {platform.node()}, since 2.*\)$"
        with pytest.raises(ValueError, match=words), locked(path, "taken"):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with locked(path, "taken"):
        assert json.loads(path.read_text())["process"] == os.getpid()
    assert path.read_text() == ""


def test_a_process_of_another_machine_that_did_not_end_in_order_is_named(tmp_path, capsys):
    """It may still run, where machines do not see each other's locks."""
    path = tmp_path / "lock"
    own = json.dumps({"process": 7, "host": platform.node(), "since": "now"})
    for text in (b"", b"{", bytes(9), b'{"process": "7"}', b'{"process": \xff', own.encode()):
        path.write_bytes(text)
        with locked(path, "taken"):
            pass
    assert capsys.readouterr().err == ""
    path.write_text('{"process": 7, "host": "another", "since": "now"}')
    for _ in range(2):  # said once
        with locked(path, "taken"):
            pass
    assert capsys.readouterr().err == (
        f"note: {tmp_path}: process 7 on another, since now, wrote here and did not end in order; "
        "make sure that it has ended\n"
    )


def test_a_child_of_a_killed_process_may_hold_the_lock_a_moment_longer(tmp_path):
    """Between fork and exec a child has the open files of its parent, the lock among them."""
    path = tmp_path / "lock"
    holder = holding(path, "    if os.fork() == 0:\n        time.sleep(0.3); os._exit(0)\n")
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
    def unsupported(file, shared):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(files, "_lock", unsupported)
    with locked(tmp_path / "lock", "taken"):
        pass
    assert "cannot be locked (Operation not supported)" in capsys.readouterr().err


def test_a_lock_that_cannot_be_signed_is_held_and_ends_in_silence(tmp_path):
    """Like a full disk: here no file of this process may have a byte."""
    program = (
        "import resource, sys; from pathlib import Path; from pack_data.reading.files import locked\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "with locked(Path(sys.argv[1]), 'taken'):\n    print('held')"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "lock")], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "held\n", "")


@pytest.mark.parametrize("replaced", [False, True])
def test_a_lock_that_its_holder_removed_meanwhile_is_none(tmp_path, monkeypatch, replaced):
    """A third process may hold the lock file that is there now."""
    path, lock = tmp_path / "lock", files._lock

    def late(file, shared):
        path.unlink()
        if replaced:
            path.write_text("")
        lock(file, shared)

    monkeypatch.setattr(files, "_lock", late)
    with pytest.raises(ValueError, match="^taken$"), locked(path, "taken"):
        pass


def test_a_stale_temporary_file_is_that_of_its_own_name(tmp_path):
    own, other = (durable.temporary_name(tmp_path / name) for name in ("a.json", "b.json"))
    own.write_text("")
    other.write_text("")
    durable.remove_stale(tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == [other]


def test_a_stale_link_to_a_directory_is_removed_and_the_directory_stays(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").write_text("")
    durable.temporary_name(tmp_path / "a.json").symlink_to(tmp_path / "full")
    durable.remove_stale(tmp_path / "a.json")
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "kept"]
