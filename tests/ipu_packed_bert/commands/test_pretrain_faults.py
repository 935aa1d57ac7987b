"""The command line when things go wrong: kill -9 at any moment, damaged files, settings that cannot be."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from ipu_packed_bert import __main__ as packed_bert
from ipu_packed_bert.commands import pretrain
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.run_files import checkpoints as checkpoint
from ipu_packed_bert.run_files.checkpoints import checkpoints, load_checkpoint
from ipu_packed_bert.run_files.folder import LOG, read_log
from ipu_packed_bert.settings.allowed_changes import NETWORK
from pack_data.cli.command import run_main
from tests.tiny_runs import tiny_data

# Setting of the network -> another value, with the same shapes of weights in some.
OTHERS = {
    "model.num_layers": 1,
    "model.num_heads": 4,
    "model.hidden_size": 32,
    "model.intermediate_size": 24,
    "model.vocabulary_size": 130,
    "model.max_position_embeddings": 70,
    "model.type_vocabulary_size": 3,
    "model.layer_norm_eps": 1e-12,
    "loss.next_sentence": False,
}


def test_weights_of_another_network_are_refused_by_the_names_of_the_settings(tiny, undisturbed, tmp_path, capsys):
    assert set(OTHERS) == NETWORK
    settings = yaml.safe_load(Path(tiny).read_text())
    del settings["placement"]
    for key, other in OTHERS.items():
        section, _, name = key.partition(".")
        changed = {**settings, section: {**settings.get(section, {}), name: other}}
        (tmp_path / "other.yml").write_text(yaml.safe_dump(changed))
        options = [
            "--config",
            str(tmp_path / "other.yml"),
            "--start-from",
            str(undisturbed),
            "--out",
            str(tmp_path / "run"),
        ]
        assert refused(capsys, *options).startswith(f"{undisturbed}: {key} is "), key
    settings["data"]["directory"] = str(tmp_path / "data")
    (tmp_path / "other.yml").write_text(yaml.safe_dump({**settings, "loss": {"next_sentence": False}}))
    assert "loss.next_sentence" in refused(capsys, *options)
    assert not (tmp_path / "data").exists()  # it is refused before its data set is built

    changes = ["--steps", "14", "--set", "optimizer.schedule_steps=14", "--set", "model.num_heads=4"]
    message = refused(capsys, "--resume", str(undisturbed), *changes)
    assert message == f"{undisturbed}: model.num_heads is 2 there, 4 by --set; a resumed run keeps its network"


def test_a_size_that_the_data_set_decides_is_compared_too(tiny, undisturbed, tmp_path, capsys):
    settings = yaml.safe_load(Path(tiny).read_text())
    settings["data"] = {"directory": str(tiny_data(tmp_path / "data", vocabulary=120))}
    del settings["model"]["vocabulary_size"]
    settings["run"] = {"steps": 1}
    (tmp_path / "left_out.yml").write_text(yaml.safe_dump(settings))
    arguments = ["--config", str(tmp_path / "left_out.yml"), "--start-from", str(undisturbed)]
    assert "model.vocabulary_size is 128 there, 120 by the data set in" in refused(capsys, *arguments)


def losses(folder):
    return [(record["step"], record["loss"], record["mlm_accuracy"]) for record in read_log(folder / LOG)]


def refused(capsys, *arguments):
    """The one line of a command that must end with status 2."""
    assert run_main(packed_bert.main, ["pretrain", *arguments]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    return text[len("error: ") : -1]


def test_one_changed_bit_of_a_checkpoint(undisturbed, tmp_path, capsys):
    folder = shutil.copytree(undisturbed, tmp_path / "run")
    older, newest = checkpoints(folder / "checkpoints")
    before = losses(folder)
    weights = load_checkpoint(newest).engine["model"]
    moments = newest / "optimizer.safetensors"
    damaged = bytearray(moments.read_bytes())
    damaged[-200] ^= 1
    moments.write_bytes(damaged)
    assert pretrain.main(["--resume", str(folder)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "is damaged" in line]
    assert str(newest) in line
    assert "optimizer.safetensors" in line
    assert older.name in line
    assert losses(folder) == before
    again = load_checkpoint(newest).engine["model"]  # made again, in its place
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


@pytest.fixture
def full(monkeypatch):
    """The steps at whose checkpoints the disk is full; its size is asked for once for each."""
    steps = set()
    write = checkpoint._write

    def written(path, found):
        with monkeypatch.context() as patch:
            if found.step in steps:
                patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 4, 5))
            write(path, found)

    monkeypatch.setattr(checkpoint, "_write", written)
    return steps


def test_a_full_disk_ends_a_run_which_resumes_as_if_nothing_had_happened(tiny, tmp_path, capsys, full):
    options = ["--steps", "6", "--set", "run.checkpoint_every=2", "--set", "run.evaluate_every=0"]
    begin = ["--config", tiny, *options, "--out", str(tmp_path / "run")]
    assert pretrain.main(["--config", tiny, "--out", str(tmp_path / "undisturbed"), *options]) == 0
    full.add(4)
    message = refused(capsys, *begin)
    assert "step_00000004: not saved (needs " in message
    assert message.endswith(f"--resume {tmp_path / 'run'}")
    assert [path.name[-1] for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["2"]
    full.clear()
    assert pretrain.main(["--resume", str(tmp_path / "run")]) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")
    newest = [checkpoints(tmp_path / name / "checkpoints")[-1] for name in ("undisturbed", "run")]
    expected, other = (load_checkpoint(checkpoint).engine["model"] for checkpoint in newest)
    assert all(torch.equal(other[name], tensor) for name, tensor in expected.items())


def not_finite(capsys, *arguments):
    """The error of a training that must end with status 3."""
    assert run_main(pretrain.main, list(arguments)) == 3
    text = capsys.readouterr().err
    assert text.startswith("error: update ")
    assert text.count("\n") == 1
    return text


def test_a_damaged_checkpoint(tiny, tmp_path, capsys):
    folder = tmp_path / "run"
    pretrain.main(["--config", tiny, "--out", str(folder), "--steps", "6"])
    older, newest = checkpoints(folder / "checkpoints")
    before = losses(folder)
    weights = load_checkpoint(newest).engine["model"]
    moments = newest / "optimizer.safetensors"
    moments.write_bytes(moments.read_bytes()[:-200])
    capsys.readouterr()
    assert pretrain.main(["--resume", str(folder), "--steps", "6"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "is damaged" in line]
    assert str(newest) in line
    assert "optimizer.safetensors" in line
    assert older.name in line
    assert losses(folder) == before
    again = load_checkpoint(newest).engine["model"]  # made again, in its place
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("every", [1, 5])  # saved right after the update that broke the weights, and later
def test_weights_that_break_while_the_loss_is_finite_are_not_saved(tiny, tmp_path, capsys, monkeypatch, every):
    folder = tmp_path / "run"
    original = HostEngine.step
    made = []

    def breaking(engine, batch, rate):
        result = original(engine, batch, rate)
        made.append(result.loss)
        if len(made) == 4:
            with torch.no_grad():
                next(engine.model.parameters())[0, 0] = float("inf")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(HostEngine, "step", breaking)
        options = ["--set", f"run.checkpoint_every={every}", "--set", "run.evaluate_every=0"]
        text = not_finite(capsys, "--config", tiny, "--out", str(folder), *options)
    assert all(math.isfinite(loss) for loss in made[:4])
    if every == 1:
        assert text.startswith("error: update 4: model bert.")
        assert len(made) == 4
        assert [load_checkpoint(path).step for path in checkpoints(folder / "checkpoints")] == [2, 3]
        assert pretrain.main(["--resume", str(folder)]) == 0
    else:
        assert "update 5: the loss is nan and the gradient norm is nan; no checkpoint was saved" in text
        assert not checkpoints(folder / "checkpoints")
        last = json.loads((folder / LOG).read_text().split("\n")[4], parse_constant=pytest.fail)  # strict JSON
        assert last["step"] == 5
        assert last["loss"] is None
