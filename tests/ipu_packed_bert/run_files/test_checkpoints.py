"""Checkpoints: whole or not at all, nothing lost in them, the last few kept, damaged ones named and passed over."""

import errno
import json
import os
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ipu_packed_bert.run_files import checkpoints as module
from ipu_packed_bert.run_files.checkpoints import (
    Checkpoint,
    Damaged,
    _join,
    _split,
    checkpoint_path,
    checkpoints,
    load_checkpoint,
    load_newest,
    newest_checkpoint,
    save_checkpoint,
)


def a_checkpoint(step=3):
    random = torch.Generator().manual_seed(step)
    weights = {"a.weight": torch.randn(64, 32, generator=random), "a.bias": torch.zeros(32)}
    return Checkpoint(
        step,
        {
            "model": weights,
            "optimizer": {"step": step, "exp_avg": dict(weights), "exp_avg_sq": {}},
            "random": {"cpu": torch.get_rng_state()},
            "ipu_random": torch.arange(4),
        },
        {"epoch": 1, "packs": 8, "seed": 5},
        "run: {steps: 3}\n",
        "ab" * 32,
        True,
    )


def same(one, other):
    """Equal in structure, types and every bit; the tensors of one side may be views."""
    return exact(one) == exact(other)


def exact(value):
    """Return a value with its type; tensors as type, shape and bytes."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: exact(inner) for key, inner in value.items()}
    return type(value), repr(value)


KEYS = st.one_of(st.text("ab.~_0", min_size=1, max_size=4), st.sampled_from(["model", "exp_avg"]))
TENSORS = st.sampled_from(
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor(2.5, dtype=torch.float64),
        torch.zeros(0, 3, dtype=torch.int64),
        torch.tensor([True, False]),
        torch.tensor([0.1, float("nan"), -0.0], dtype=torch.bfloat16),
    ]
)
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text())
VALUES = st.recursive(st.one_of(PLAIN, TENSORS), lambda inner: st.dictionaries(KEYS, inner, max_size=3), max_leaves=12)


def test_the_directories_above_a_checkpoint_are_made(tmp_path):
    path = save_checkpoint(tmp_path / "runs" / "mine" / "checkpoints", a_checkpoint(), keep=None)
    assert same(load_checkpoint(path).engine, a_checkpoint().engine)


@settings(deadline=None)
@given(state=st.dictionaries(KEYS, VALUES, max_size=5))
def test_any_state_is_split_into_json_and_tensors_and_joined_again(state):
    plain, tensors = _split(state)
    assert same(_join(json.loads(json.dumps(plain)), tensors), state)


def test_comes_back_bit_for_bit(tmp_path):
    saved = a_checkpoint()
    saved.engine["model"]["tied"] = saved.engine["model"]["a.weight"]
    path = save_checkpoint(tmp_path / "run" / "checkpoints", saved, keep=2)
    loaded = load_checkpoint(path)
    assert same(loaded.engine, saved.engine)
    assert loaded._replace(engine={}) == saved._replace(engine={})
    from safetensors.torch import load_file

    assert same(load_file(str(path / "model.safetensors")), saved.engine["model"])  # as Hugging Face reads it
    assert {item.name for item in path.iterdir()} == {
        *("model.safetensors", "optimizer.safetensors", "random.safetensors", "engine.safetensors"),
        *("state.json", "manifest.json"),
    }


def test_the_newest_are_kept(tmp_path):
    for step in (3, 6, 9, 12):
        save_checkpoint(tmp_path, a_checkpoint(step), keep=2)
    assert sorted(tmp_path.iterdir()) == [checkpoint_path(tmp_path, 9), checkpoint_path(tmp_path, 12)]
    assert checkpoints(tmp_path) == sorted(tmp_path.iterdir())
    assert newest_checkpoint(tmp_path) == checkpoint_path(tmp_path, 12)


def test_damaged_ones_are_not_counted_and_go_with_those_of_their_age(tmp_path):
    for step in (3, 6, 9, 12):
        save_checkpoint(tmp_path, a_checkpoint(step), keep=9)
    (checkpoint_path(tmp_path, 6) / "manifest.json").unlink()
    (checkpoint_path(tmp_path, 12) / "state.json").write_bytes(b"{}")
    save_checkpoint(tmp_path, a_checkpoint(15), keep=2)
    assert [load_or_none(path) for path in checkpoints(tmp_path)] == [9, None, 15]


def load_or_none(path):
    try:
        return load_checkpoint(path).step
    except Damaged:
        return None


def test_later_steps_of_before_do_not_push_out_what_is_saved_now(tmp_path):
    """A damaged newest one was passed over: what follows is saved at steps below it."""
    for step in (3, 6):
        save_checkpoint(tmp_path, a_checkpoint(step), keep=2)
    flipped(checkpoint_path(tmp_path, 6) / "model.safetensors")
    for step in (4, 5):
        save_checkpoint(tmp_path, a_checkpoint(step), keep=1)
        assert load_newest(tmp_path, note=lambda _: None).step == step
    save_checkpoint(tmp_path, a_checkpoint(6), keep=1)
    assert load_newest(tmp_path, note=pytest.fail).step == 6
    assert len(list(tmp_path.iterdir())) == 1


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(bytes(data))


# -- kills -------------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for kill -9: from here on the process does nothing any more."""


class Ops:
    """Every operation on files of `checkpoint.py`, numbered; from number `last` on each raises Killed."""

    def __init__(self, patch, last):
        self.made = 0
        self.last = last
        patch.setattr(module, "open", self.open, raising=False)
        for owner, name in (
            (os, "rename"),
            (os, "fsync"),
            (module.Path, "mkdir"),
            (module.Path, "unlink"),
            (shutil, "rmtree"),
        ):
            patch.setattr(owner, name, self.counted(getattr(owner, name)))

    def counted(self, operation):
        def instead(*args, **kwargs):
            self.made += 1
            if self.made >= self.last:
                raise Killed
            return operation(*args, **kwargs)

        return instead

    def open(self, path, mode, **kwargs):
        file = self.counted(open)(path, mode, **kwargs)
        if "w" in mode:
            write = file.write

            def halved(data):
                self.made += 1
                if self.made >= self.last:
                    write(data[: len(data) // 2])
                    file.flush()
                    raise Killed
                return write(data)

            return _File(file, halved)
        return file


class _File:
    def __init__(self, file, write):
        self.file = file
        self.write = write
        self.flush = file.flush
        self.fileno = file.fileno

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


@pytest.mark.parametrize("again", [False, True], ids=["a new step", "a step that is there, damaged"])
def test_a_kill_at_any_operation_leaves_whole_ones(tmp_path, monkeypatch, again):
    base = tmp_path / "base"
    monkeypatch.setattr(os, "fsync", lambda _: None)  # takes most of the time
    for step in (3, 6):
        save_checkpoint(base, a_checkpoint(step), keep=2)
    if again:
        save_checkpoint(base, a_checkpoint(9), keep=3)
        flipped(checkpoint_path(base, 9) / "random.safetensors")
    last = 1
    met = set()
    while True:
        folder = tmp_path / str(last)
        shutil.copytree(str(base), str(folder))
        with monkeypatch.context() as patch:
            ops = Ops(patch, last)
            try:
                save_checkpoint(folder, a_checkpoint(9), keep=2)
            except Killed:
                pass
            else:
                break
            assert ops.made >= last
        actual = load_newest(folder, note=lambda _: None)
        met.add(actual.step)
        assert actual.step in (6, 9)
        assert same(actual.engine, {**a_checkpoint(actual.step).engine, "random": actual.engine["random"]})
        save_checkpoint(folder, a_checkpoint(12), keep=2)  # clears what the kill left
        assert all(path.name.startswith("step_") for path in folder.iterdir())
        assert load_newest(folder, note=pytest.fail).step == 12
        shutil.rmtree(str(folder))
        last += 1
    assert last > 25
    assert met == {6, 9}


# -- a full disk -------------------------------------------------------------------------------------------------------


class FullDisk:
    """A disk with room for so many bytes more, of all files together."""

    def __init__(self, patch, room, code=errno.ENOSPC):
        self.left = room
        self.code = code
        patch.setattr(module, "open", self.open, raising=False)

    def open(self, path, mode, **kwargs):
        file = open(path, mode, **kwargs)  # noqa: SIM115 (the caller closes it)
        return _File(file, lambda data: self.write(file, data)) if "w" in mode else file

    def write(self, file, data):
        fits = min(self.left, len(data))
        self.left -= fits
        file.write(data[:fits])
        if fits < len(data):
            raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_disk_that_is_full_at_any_byte_leaves_those_of_before_and_nothing_else(tmp_path, monkeypatch, code):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    for step in (3, 6):
        whole = sum(path.stat().st_size for path in save_checkpoint(tmp_path, a_checkpoint(step), keep=2).iterdir())
    (checkpoint_path(tmp_path, 6) / "manifest.json").unlink()  # damaged, and stays where it is
    before = sorted(tmp_path.iterdir())
    failed = 0
    for room in [*range(0, whole, whole // 23 if code == errno.ENOSPC else whole // 3), whole - 1]:
        for step in (6, 9):
            with monkeypatch.context() as patch:
                FullDisk(patch, room, code)
                with pytest.raises(OSError, match=f"step_0000000{step}: not saved") as caught:
                    save_checkpoint(tmp_path, a_checkpoint(step), keep=1)
            assert "\n" not in str(caught.value)
            assert sorted(tmp_path.iterdir()) == before
            assert load_newest(tmp_path, note=lambda _: None).step == 3
            failed += 1
    assert failed >= 8
    with monkeypatch.context() as patch:
        FullDisk(patch, whole + 99)
        assert load_checkpoint(save_checkpoint(tmp_path, a_checkpoint(9), keep=1)).step == 9


def test_the_room_is_looked_at_before_anything_is_written(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, a_checkpoint(3), keep=2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 1 << 40, 5000))
    monkeypatch.setattr(module.Path, "mkdir", lambda *_, **__: None)
    monkeypatch.setattr(module, "_write_file", lambda *_: pytest.fail("written"))
    with pytest.raises(OSError, match=r"needs [\d,]+ bytes, 5,000 are free"):
        save_checkpoint(tmp_path, a_checkpoint(6), keep=2)


@pytest.mark.parametrize("failing, after", [("rename", 0), ("rename", 1), ("fsync", 0), ("fsync", 5)])
def test_a_system_that_refuses_is_not_saved(tmp_path, monkeypatch, failing, after):
    save_checkpoint(tmp_path, a_checkpoint(3), keep=2)
    save_checkpoint(tmp_path, a_checkpoint(6), keep=2)
    works = getattr(os, failing)
    calls = []

    def refuse(*args):
        calls.append(args)
        if len(calls) == after + 1:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return works(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, refuse)
        with pytest.raises(OSError, match="Read-only file system"):
            save_checkpoint(tmp_path, a_checkpoint(6), keep=2)
    assert sorted(tmp_path.iterdir()) == [checkpoint_path(tmp_path, 3), checkpoint_path(tmp_path, 6)]


# -- damage ------------------------------------------------------------------------------------------------------------

FILES = (
    *("manifest.json", "state.json", "model.safetensors", "optimizer.safetensors", "random.safetensors"),
    "engine.safetensors",
)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["cut", "empty", "text", "longer", "missing", "a folder", "a pipe"])
def test_damage_is_one_line_and_the_one_before_is_used(tmp_path, name, how):
    save_checkpoint(tmp_path, a_checkpoint(3), keep=2)
    path = save_checkpoint(tmp_path, a_checkpoint(6), keep=2) / name
    data = path.read_bytes()
    path.unlink()
    if how == "a folder":
        path.mkdir()
    elif how == "a pipe":
        os.mkfifo(str(path))
    elif how != "missing":
        path.write_bytes({"cut": data[:-9], "empty": b"", "text": b"[1, 2]", "longer": data + b"\0"}[how])
    passed_over(tmp_path, path)


def passed_over(folder, path):
    with pytest.raises(Damaged) as caught:
        load_checkpoint(path.parent)
    assert str(caught.value).startswith(f"{path.parent} is damaged (")
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)
    lines = []
    assert load_newest(folder, note=lines.append).step == 3
    (line,) = lines
    assert f"{path.parent} is damaged" in line
    assert "using step_00000003" in line
    assert "\n" not in line
    assert path.parent.is_dir()  # not deleted


@pytest.mark.parametrize("name", FILES)
def test_one_bit_anywhere_is_seen(tmp_path, name):
    whole = a_checkpoint(3)
    small = whole._replace(engine={**whole.engine, "random": {"cpu": torch.arange(3)}, "model": {"a": torch.ones(3)}})
    save_checkpoint(tmp_path, whole, keep=2)
    path = save_checkpoint(tmp_path, small._replace(step=6), keep=2) / name
    data = path.read_bytes()
    cases = 0
    for place in range(0, len(data), max(1, len(data) // 40)):
        flipped_bit = bytearray(data)
        flipped_bit[place] ^= 1 << (place % 8)
        path.write_bytes(bytes(flipped_bit))
        try:
            actual = load_checkpoint(path.parent)
        except Damaged:
            cases += 1
        else:  # white space of the manifest alone says nothing
            assert name == "manifest.json"
            assert chr(data[place]).isspace()
            assert same(actual.engine, small.engine)
    assert cases >= 20
    path.write_bytes(data)
    assert load_checkpoint(path.parent).step == 6
