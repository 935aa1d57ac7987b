"""A build that is stopped at any point loses nothing: run again, it ends with the bytes of an undisturbed one."""

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from itertools import product
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from pack_data.building import inputs, stages, tasks
from pack_data.building.verify import verify
from pack_data.building.work_folder import COMMIT, complete
from pack_data.reading import files
from pack_data.store.data_set import PackStore
from tests.pack_data.text_corpus import (
    Stopped,
    build_small,
    content,
    stop_at,
    stop_unlink,
    write_corpus,
)
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("small_parts")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("faults"), documents=30)


def test_stopped_while_the_work_folder_is_cleared(corpus, tmp_path, monkeypatch):
    """A build that was stopped after its commit is finished by the next one, wherever that one is stopped."""
    build_small(corpus, tmp_path / "calm").close()
    expected = content(tmp_path / "calm")
    stop_at(monkeypatch, "complete", corpus, tmp_path / "stopped" / "data")
    count = 0
    stopped = True
    while stopped:
        folder = tmp_path / str(count)
        shutil.copytree(tmp_path / "stopped", folder)
        with monkeypatch.context() as patch:
            stop_unlink(patch, count)
            try:
                build_small(corpus, folder / "data").close()
                stopped = False
            except Stopped:
                pass
        build_small(corpus, folder / "data").close()
        assert content(folder / "data") == expected
        assert not (folder / "data.building").exists()
        count += 2
    assert count > 10


def test_what_was_complete_is_not_made_again(corpus, tmp_path, monkeypatch):
    stop_at(monkeypatch, "make_shard", corpus, tmp_path / "data")
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "make_part", lambda task: pytest.fail("done a second time"))
        patch.setattr(stages, "sort_part", lambda task: pytest.fail("done a second time"))
        patch.setattr(inputs, "train_vocabulary", lambda *arguments: pytest.fail("trained a second time"))
        patch.setattr(stages, "get_packer", lambda name: lambda *a, **k: pytest.fail("packed a second time"))
        build_small(corpus, tmp_path / "data").close()
    verify(tmp_path / "data")


def test_other_options_or_another_corpus_do_not_continue(corpus, tmp_path, monkeypatch):
    for change in ({}, {"seed": 4}):
        stop_at(monkeypatch, "make_shard", corpus, tmp_path / "data", **change)
    build_small(corpus, tmp_path / "data").close()
    build_small(corpus, tmp_path / "calm").close()
    assert content(tmp_path / "data") == content(tmp_path / "calm")


def test_a_spilled_byte_that_changes_is_found_before_the_data_set_is_replaced(corpus, tmp_path, monkeypatch):
    build_small(corpus, tmp_path / "data", seed=9).close()
    before = content(tmp_path / "data")

    def spoil(task):
        tasks.sort_part(task)
        if task.part:
            return
        path = next((tmp_path / "data.building").glob("sorted-00000.bin"))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(stages, "sort_part", spoil)
    with refused("data.building", "exactly the sequences"):
        build_small(corpus, tmp_path / "data", overwrite=True)
    assert PackStore.open(tmp_path / "data").manifest.seed == 9
    assert all(
        (tmp_path / "data" / name).read_bytes() == data for name, data in before.items() if name.endswith(".npy")
    )


def test_two_builds_do_not_write_the_same_data_set(corpus, tmp_path, monkeypatch):
    def second(task):
        with refused(tmp_path / "data", "another build"):
            build_small(corpus, tmp_path / "data")
        return tasks.make_part(task)

    monkeypatch.setattr(files, "LOCK_PATIENCE", 0.0)
    monkeypatch.setattr(inputs, "make_part", second)
    build_small(corpus, tmp_path / "data").close()
    verify(tmp_path / "data")


def test_a_build_that_begins_while_another_one_ends_is_refused(corpus, tmp_path, monkeypatch):
    """The lock may be of a work folder that the other build removes: two builds must not then run at once."""

    lock = files._lock

    def late(file, shared):
        shutil.rmtree(tmp_path / "data.building")
        lock(file, shared)

    monkeypatch.setattr(files, "_lock", late)
    with refused(tmp_path / "data", "another build"):
        build_small(corpus, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_disk_too_small_is_said_before_anything_is_made(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with refused(tmp_path / "data", "MB of disk", "0 MB are free"):
        build_small(corpus, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_disk_that_states_no_room_and_syncs_no_directory_is_built_on(corpus, tmp_path, monkeypatch):
    """FUSE, SMB and object stores."""
    sync = os.fsync

    def sync_files_only(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync_files_only)
    for number, usage in enumerate([SimpleNamespace(free=0), OSError(errno.ENOSYS, "no such call")]):
        monkeypatch.setattr(shutil, "disk_usage", mock.Mock(side_effect=[usage]))
        build_small(corpus, tmp_path / f"data{number}").close()


@pytest.mark.parametrize("error", [errno.EROFS, errno.EMFILE])
@pytest.mark.parametrize("failing", ["synchronize.SemLock.__init__", "popen_spawn_posix.Popen.__init__"])
def test_workers_that_the_system_cannot_start_are_refused_with_the_way_out(
    corpus, tmp_path, monkeypatch, error, failing
):
    """A read-only /dev/shm, or `ulimit -n 16`."""
    monkeypatch.setattr(f"multiprocessing.{failing}", mock.Mock(side_effect=OSError(error, os.strerror(error))))
    with refused("--workers 2", os.strerror(error), "/dev/shm", "ulimit -n", "--workers 1"):
        build_small(corpus, tmp_path / "data", workers=2)
    assert not list(tmp_path.iterdir())


def test_kill_9_at_random_moments(tmp_path):
    """The process and its workers are killed again and again, a little later each time, until a run ends."""

    def command(out, workers):
        options = "--synthetic wikipedia_512 --sequences 40000 --packer spfhp --seed 1".split()
        where = ["--workers", str(workers), "--out", str(tmp_path / out)]
        return [sys.executable, "-m", "ipu_packed_bert", "build", *options, *where]

    began = time.perf_counter()
    subprocess.run(command("calm", 1), check=True, stdout=subprocess.DEVNULL)
    undisturbed = time.perf_counter() - began
    rng = np.random.default_rng(0)
    kills = 0
    patience = 0.0  # the first attempt is killed as soon as it has made something, on a machine of any speed
    for number in range(30):
        process = subprocess.Popen(
            command("data", 1 + number % 2), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None and {path.name for path in tmp_path.iterdir()} == {"calm"}:
            time.sleep(0.001)
        try:
            process.wait(timeout=patience * (1 + rng.random()))
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            patience = max(1.5 * patience, 0.3 * undisturbed)
    assert process.returncode == 0
    assert kills >= 1
    assert content(tmp_path / "data") == content(tmp_path / "calm")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calm", "data"]


@pytest.mark.parametrize(
    "field, name", [("out", "."), *product(("out", "work"), ("", "..", "../elsewhere", "/elsewhere"))]
)
def test_a_change_that_leads_elsewhere_is_not_completed(tmp_path, field, name):
    work = tmp_path / "data.building"
    work.mkdir()
    entry = {"out": "data", "work": ".", "files": [], "remove": ["kept"], field: name}
    (tmp_path / "kept").write_text("")
    (work / COMMIT).write_text(json.dumps([entry]))
    with refused(work / COMMIT, field, "without a path", unchanged=tmp_path):
        complete(work)
