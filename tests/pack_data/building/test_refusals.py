"""Refusals of builds and conversions that no other test meets: damaged work files, and mistakes that need a patch."""

import itertools
import json
import multiprocessing
import os
import re
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pack_data.building import runner
from pack_data.building.held_out import position
from pack_data.building.verify import verify
from tests.crash import REMOVE
from tests.pack_data.text_corpus import build_small, content, stop_at, write_corpus
from tests.refusals import refused

# The function of pack_data.building.stages at which a build is stopped, by what is then in the work directory.
STEPS = {
    "spread": "_growing",
    "counted": "get_packer",
    "assigned": "sort_part",
    "sorted": "make_shard",
    "written": "finish_data_set",
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A corpus, and the directories of builds of it that were stopped at each step."""
    folder = tmp_path_factory.mktemp("stopped")
    corpus = write_corpus(folder / "corpus", 12)
    return _stopped(folder, corpus)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    """The same with a held-out side."""
    folder = tmp_path_factory.mktemp("held-out")
    return _stopped(folder, write_corpus(folder / "corpus", 12), held_out=0.3)


def _stopped(folder, corpus, **options):
    with pytest.MonkeyPatch.context() as patch:
        for step, name in STEPS.items():
            stop_at(patch, name, corpus, folder / step / "data", **options)
    build_small(corpus, folder / "calm" / "data", **options).close()
    return folder


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


def no_object(path):
    path.write_text("{}")


def flip_first(path):
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


def too_long(path):
    """One length is too long, and others are shorter by as much."""
    count = json.loads(path.with_suffix(".json").read_text())["totals"][0]
    values = np.fromfile(path, np.uint8)
    excess = 65 - int(values[0])
    values[0] = 65
    for place in range(1, count):
        shorter = min(excess, int(values[place]) - 1)
        values[place] -= shorter
        excess -= shorter
    assert not excess
    values.tofile(path)


def far_packs(path):
    """Every sequence is in the last pack of a shard that is not full: the fifth column of bytes, of as many each."""
    count = int(np.load(path.with_suffix(".npy"))[-1, 0])
    values = np.fromfile(path, np.uint8)
    types = [np.uint8] * 4
    start = sum(np.dtype(kind).itemsize * count for kind in types)
    values[start : start + 4 * count] = 255
    values.tofile(path)


def test_a_damaged_data_set_is_built_again_as_its_error_says(stopped, tmp_path):
    expected = content(stopped / "calm" / "data")
    shutil.copytree(stopped / "calm", tmp_path, dirs_exist_ok=True)
    for name, damage in zip(sorted(expected), itertools.cycle([halve, empty, Path.unlink])):
        damage(tmp_path / "data" / name)
        with refused(tmp_path / "data", "build .*(--overwrite|--out)"):
            verify(tmp_path / "data")
        build_small(stopped / "corpus", tmp_path / "data", overwrite=True).close()
        assert content(tmp_path / "data") == expected


def no_numbers(path):
    np.save(path, np.array(["a"]))


def fractions(path):
    np.save(path, np.load(path).astype(float))


def far(path):
    np.save(path, np.load(path).astype(np.int64) + 10**9)


def falling(path):
    index = np.load(path)
    index[0] = 1
    np.save(path, index)


def one_digest_less(path):
    note = json.loads(path.read_text())
    path.write_text(json.dumps({**note, "sha256": note["sha256"][1:]}))


def another_digest(path):
    note = json.loads(path.read_text())
    path.write_text(json.dumps({**note, "digest": note["digest"] ^ 1}))


@pytest.mark.parametrize(
    "step, name, damage, names",
    [
        ("spread", "text.json", no_object, ["text.json", "parts"]),
        ("spread", "text.json", one_digest_less, ["text.json", "sha256"]),
        ("counted", "examples-00000.json", no_object, ["examples-00000.json", "digest"]),
        ("counted", "examples-00000.bin", flip_first, ["examples-00000.bin"]),
        ("counted", "examples-00000.bin", too_long, ["examples-00000.bin"]),
        ("assigned", "schema.json", no_object, ["schema.json", "max_sequence_length"]),
        ("assigned", "pack-00000.npy", fractions, ["pack-00000.npy", "whole numbers"]),
        ("assigned", "pack-00000.npy", far, ["pack-00000.npy", "places"]),
        ("assigned", "slot-00000.npy", far, ["slot-00000.npy", "places"]),
        ("sorted", "sorted-00000.bin", far_packs, ["place"]),
        ("sorted", "sorted-00000.npy", no_numbers, ["sorted-00000.npy"]),
        ("sorted", "sorted-00000.npy", falling, ["sorted-00000.npy", "index"]),
        ("written", "shard-00000.npy", no_numbers, ["shard-00000.npy"]),
        ("written", "shard-00000.json", no_object, ["shard-00000.json", "digest"]),
        ("written", "shard-00000.json", another_digest, ["exactly the sequences"]),
    ],
)
def test_a_damaged_work_file_is_named_and_the_advice_helps(stopped, tmp_path, step, name, damage, names):
    shutil.copytree(stopped / step, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "data.building" / name)
    with refused("data.building", *names) as caught:
        build_small(stopped / "corpus", tmp_path / "data")
    assert not (tmp_path / "data").exists()
    follow(caught, lambda: build_small(stopped / "corpus", tmp_path / "data"))
    assert content(tmp_path / "data") == content(stopped / "calm" / "data")


def follow(caught, work, most=3):
    """Remove or move away what the error says, and do the work again, until it succeeds."""
    for _ in range(most):
        text = f"{caught.value};"
        advised = REMOVE.search(text) or re.match("(.+): was not made by a build.*; move it away", text)
        assert advised, text
        path = Path(advised.group(1))
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():  # a build that has nothing to continue with removes its directory itself
            path.unlink()
        try:
            return work().close()
        except ValueError as error:
            caught = SimpleNamespace(value=error)
    pytest.fail(f"{caught.value}")


@pytest.mark.parametrize("side", [".", "held-out"])
@pytest.mark.parametrize("step", STEPS)
def test_every_file_of_a_stopped_build_may_be_damaged(held_out, tmp_path, step, side):
    """Damage every second file: the build ends as if undisturbed, or is refused with advice that leads there."""
    names = sorted(path.name for path in (held_out / step / "data.building" / side).iterdir() if path.is_file())
    damages = list(zip(names, itertools.cycle([Path.unlink, halve, empty])))
    for name, damage in damages[len(step) % 2 :: 2]:
        folder = tmp_path / name
        shutil.copytree(held_out / step, folder)
        damage(folder / "data.building" / side / name)

        def work(folder=folder):
            return build_small(held_out / "corpus", folder / "data", held_out=0.3)

        try:
            work().close()
        except (ValueError, OSError) as error:
            follow(SimpleNamespace(value=error), work)
        for data in ("data", "data-held-out"):
            assert content(folder / data) == content(held_out / "calm" / data), name


def test_a_side_without_a_token_is_refused(tmp_path):
    """Control characters are text, but no tokens."""
    texts = ["\x07" * count for count in range(1, 200)]
    silent = next(text for text in texts if position([text]) < 0.3)
    spoken = next(text for text in map("The words of {}.".format, range(200)) if position([text]) >= 0.3)
    (tmp_path / "corpus").mkdir()
    for name, text in (("a", silent), ("b", spoken)):
        (tmp_path / "corpus" / f"{name}.txt").write_text(text)
    with refused("--held-out 0.3", "held-out side"):
        build_small(tmp_path / "corpus", tmp_path / "data", held_out=0.3)


def test_a_system_without_locks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with refused("POSIX", "fcntl", unchanged=tmp_path):
        build_small(tmp_path, tmp_path / "data")


def test_a_directory_that_cannot_be_written_is_refused(stopped, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with refused(f"--out {tmp_path / 'data'}", "written", unchanged=tmp_path):
        build_small(stopped / "corpus", tmp_path / "data")


def test_a_disk_that_fails_while_files_move_leaves_what_goes_on(stopped, tmp_path, monkeypatch):
    replace = os.replace

    def fails(source, target):
        if str(target).startswith(str(tmp_path / "data" / "packs-")):
            raise OSError(5, "Input/output error")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fails)
        with pytest.raises(OSError, match="Input/output"):
            build_small(stopped / "corpus", tmp_path / "data")
    build_small(stopped / "corpus", tmp_path / "data").close()


@pytest.mark.parametrize("is_begun, names", [(True, ["--workers 1"]), (False, ["workers = 2", "memory"])])
def test_a_killed_worker_is_one_line_and_no_child_is_left(is_begun, names):
    processes = runner.open_runner(2)
    if not is_begun:
        processes._begun = threading.Event()  # never set
    with refused(*names):
        list(processes.map(os._exit, [1]))
    processes.close()
    assert not multiprocessing.active_children()


def test_workers_of_a_cluster_that_do_not_start_are_one_line(monkeypatch):
    distributed = pytest.importorskip("distributed", reason="needs the extra 'dask'")

    def fails(**_):
        raise RuntimeError("no room")

    monkeypatch.setattr(distributed, "Client", fails)
    with refused("--on dask:local:2", "no room", "memory"):
        runner.open_runner(None, "dask:local:2")
