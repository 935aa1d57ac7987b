"""Checkpoints: whole or not at all, plain values, the last few kept, damage named in one line."""

import os

import pytest
import torch

from ipu_packed_bert.checkpoint import (
    Checkpoint,
    checkpoint_path,
    checkpoints,
    load_checkpoint,
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
        },
        {"epoch": 1, "packs": 8, "seed": 5},
        "run: {steps: 3}\n",
    )


def test_comes_back_bit_for_bit(tmp_path):
    saved = a_checkpoint()
    loaded = load_checkpoint(save_checkpoint(tmp_path, saved, keep=2))
    assert (loaded.step, loaded.batches, loaded.config) == (saved.step, saved.batches, saved.config)
    assert loaded.engine["optimizer"]["step"] == 3
    for name, tensor in saved.engine["model"].items():
        assert torch.equal(loaded.engine["model"][name], tensor)
    assert torch.equal(loaded.engine["random"]["cpu"], saved.engine["random"]["cpu"])


def test_the_newest_are_kept(tmp_path):
    for step in (3, 6, 9, 12):
        save_checkpoint(tmp_path, a_checkpoint(step), keep=2)
    assert checkpoints(tmp_path) == [checkpoint_path(tmp_path, 9), checkpoint_path(tmp_path, 12)]
    assert newest_checkpoint(tmp_path) == checkpoint_path(tmp_path, 12)


def test_a_kill_while_saving_leaves_the_one_before(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, a_checkpoint(3), keep=2)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, a_checkpoint(6), keep=2)
    assert len(list(tmp_path.iterdir())) == 2  # the half-written one is there, under another name
    assert load_checkpoint(newest_checkpoint(tmp_path)).step == 3
    save_checkpoint(tmp_path, a_checkpoint(9), keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000003.pt", "step_00000009.pt"}


def damaged(path, how):
    data = bytearray(path.read_bytes())
    if how == "cut":
        data = data[: len(data) // 2]
    elif how == "empty":
        data = b""
    elif how == "text":
        data = b"these are not the weights you are looking for"
    else:
        data[len(data) // 2] ^= 0x10
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("how", ["cut", "empty", "text", "one bit"])
def test_damage_is_one_line(tmp_path, how):
    path = save_checkpoint(tmp_path, a_checkpoint(), keep=2)
    damaged(path, how)
    with pytest.raises(ValueError) as caught:
        load_checkpoint(path)
    assert str(caught.value).startswith(f"{path} is damaged (") and "\n" not in str(caught.value)
    assert "delete it to continue from the checkpoint before it" in str(caught.value)


def test_something_else_is_refused(tmp_path):
    torch.save({"weights": torch.zeros(3)}, tmp_path / "step_00000001.pt")
    with pytest.raises(ValueError, match="is not a checkpoint of this program"):
        load_checkpoint(tmp_path / "step_00000001.pt")


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "trapped"),)

    torch.save({"format": Trap()}, tmp_path / "step_00000001.pt")
    with pytest.raises(ValueError, match="is damaged"):
        load_checkpoint(tmp_path / "step_00000001.pt")
    assert not (tmp_path / "trapped").exists()


def test_no_checkpoint_is_said(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint; a run can be resumed once it has saved one"):
        newest_checkpoint(tmp_path / "checkpoints")


def test_a_path_that_cannot_be_opened_is_not_called_damaged(tmp_path):
    (tmp_path / "step_00000001.pt").mkdir()
    with pytest.raises(IsADirectoryError):
        load_checkpoint(tmp_path / "step_00000001.pt")
