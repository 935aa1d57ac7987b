"""A sample of the states that a power cut leaves, a larger one in the slow tier; all: python -m tests.crash all."""

import os
import random
import sys

import pytest

from tests import crash
from tests.crash import Recorder, state, try_states
from tests.kills import DRIVES, Drive, memory_folder

# pathlib of older versions keeps functions of `os`, so that no call of them is seen.
pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="calls of pathlib are seen from Python 3.11 on")

# Training forks from a process with threads of torch, which may wait without end: the command tries it.
SAMPLE = {"build": 20, "replace": 20, "stages": 20, "convert": 5}
SLOW_SAMPLE = {"build": 120, "replace": 120, "stages": 120, "convert": 40}


@pytest.fixture
def folder():
    with memory_folder("crash-") as path:
        yield path


def try_sample(name, folder, states, seed):
    if name == "convert":
        pytest.importorskip("google.protobuf", reason="needs the formats extra (protobuf)")
        pytest.importorskip("google_crc32c", reason="needs the formats extra (google-crc32c)")
    *_, tried = try_states(name, folder, states=states, seed=seed)
    assert tried.states == states and tried.wrong == []


@pytest.mark.parametrize("name", SAMPLE)
def test_after_a_power_cut_the_same_command_ends_as_if_undisturbed(folder, name):
    try_sample(name, folder, SAMPLE[name], seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_SAMPLE)
def test_after_any_of_many_power_cuts_the_same_command_ends_as_if_undisturbed(folder, name):
    try_sample(name, folder, SLOW_SAMPLE[name], seed=1)


def _write(path, data, synced):
    part = path.with_suffix(".part")
    with open(part, "wb") as file:
        file.write(data)
        file.flush()
        if "file" in synced:
            os.fsync(file.fileno())
    os.replace(part, path)
    if "directory" in synced:
        descriptor = os.open(path.parent, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


@pytest.mark.parametrize(
    "synced, is_right", [("", False), ("file", True), ("directory", False), ("file and directory", True)]
)
def test_the_model_notices_whatever_is_not_synced(folder, monkeypatch, synced, is_right):
    """A note that is there promises the file that was written before it, in the same directory."""

    def work(folder):
        if not (folder / "note").exists():
            _write(folder / "data", b"12345678", synced)
            _write(folder / "note", b"done", "file and directory")
        return 0

    def result(folder):
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".part"}

    monkeypatch.setitem(DRIVES, "build", Drive(lambda folder: None, work, result))
    states = try_states("build", folder, states=60, seed=0)
    is_wrong = any(tried.wrong for tried in states)
    assert is_wrong != is_right


def test_what_was_there_before_and_what_is_synced_stays(tmp_path):
    (tmp_path / "before").write_bytes(b"before")
    recorder = Recorder(tmp_path)
    with recorder.recording():
        _write(tmp_path / "data", b"12345678", "file and directory")
        (tmp_path / "later").write_bytes(b"later")
    for number in range(40):
        left = state(recorder, f"{number}")
        assert left["before"] == b"before"
    assert crash.content_left(b"12345", b"123", random.Random(0)).startswith(b"123")
