"""A run that was stopped anywhere and resumed has, bit for bit, the losses of one that was not; and the commands around
it."""

import json
import os
import re
import signal
from contextlib import closing
from pathlib import Path

import pytest
import torch
import yaml

from ipu_packed_bert import __main__ as packed_bert
from ipu_packed_bert.commands import pretrain
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.run_files.checkpoints import checkpoints, load_checkpoint
from ipu_packed_bert.run_files.folder import CHECKPOINTS, CONFIG, EVALUATIONS, LOG, read_log
from ipu_packed_bert.settings.loading import load_config
from ipu_packed_bert.training import pretraining
from ipu_packed_bert.training import run as training
from pack_data.cli.command import run_main
from pack_data.store.data_set import PackStore
from tests.pack_data.text_corpus import write_corpus
from tests.pretraining import global_batches, host_engine
from tests.tiny_runs import logged

STEPS = 12


def results(folder):
    """Everything of the logs but the clock."""
    return [
        {key: value for key, value in record.items() if key != "seconds"}
        for name in (LOG, EVALUATIONS)
        for record in read_log(folder / name)
    ]


def stop_at(monkeypatch, step, how):
    """The update ``step`` of this process calls ``how`` instead of returning; earlier ones are as always."""
    original = HostEngine.step
    calls = []

    def stopping(engine, batch, rate):
        calls.append(rate)
        if len(calls) == step and how is None:
            raise MemoryError("killed")  # nothing is saved, as by kill -9
        result = original(engine, batch, rate)
        if len(calls) == step:
            os.kill(os.getpid(), how)
        return result

    monkeypatch.setattr(HostEngine, "step", stopping)


def test_after_a_kill(tiny, undisturbed, tmp_path, monkeypatch):
    """Saved after updates 3 and 6; the line of `test_the_same_line...` goes on after other updates."""
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_at(patch, 9, None)
        with pytest.raises(MemoryError):
            pretrain.main(["--config", tiny, "--out", str(folder)])
    assert len(read_log(folder / LOG)) == 8
    assert pretrain.main(["--resume", str(folder)]) == 0
    assert results(folder) == results(undisturbed)
    assert (folder / "environment-from-step-6.json").exists()


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_after_a_signal(tiny, undisturbed, tmp_path, monkeypatch, capsys, number, status):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_at(patch, 5, number)
        assert pretrain.main(["--config", tiny, "--out", str(folder)]) == status
    assert load_checkpoint(checkpoints(folder / "checkpoints")[-1]).step == 5
    assert f"resume    python run_pretraining.py --resume {folder}\n" in capsys.readouterr().out
    assert pretrain.main(["--resume", str(folder)]) == 0
    # The evaluation after step 5 was left out for the signal's sake, and is made up for.
    assert results(folder) == results(undisturbed)


def advice(text):
    """The arguments of the command that the end of a run tells to go on with."""
    (command,) = (line for line in text.split("\n") if "run_pretraining.py --resume" in line)
    return command[command.index("--resume") :].split()


def test_fewer_steps_leave_the_schedule_and_the_rest_follows_bit_for_bit(tiny, undisturbed, tmp_path, capsys):
    folder = tmp_path / "run"
    arguments = ["--set", "optimizer.schedule_steps=12", "--steps", "3", "--set", "run.evaluate_every=0"]
    assert pretrain.main(["--config", tiny, "--out", str(folder)] + arguments) == 0
    suggested = advice(capsys.readouterr().out)
    assert suggested == ["--resume", str(folder), "--steps", "12"]
    assert pretrain.main(suggested + ["--set", "run.evaluate_every=5"]) == 0
    assert "noted     run.evaluate_every 0 -> 5, run.steps 3 -> 12\n" in capsys.readouterr().out
    assert results(folder) == results(undisturbed)


def test_an_automatic_micro_batch_is_chosen_by_each_start_of_a_run(tiny, tmp_path, capsys):
    """The run's file keeps the word, so that the number of packs of an update does not depend on the choice."""
    folder = tmp_path / "auto"
    automatic = ["--set", "batch.micro_batch=auto", "--set", "batch.gradient_accumulation=12"]
    assert pretrain.main(["--config", tiny, "--out", str(folder), "--steps", "2", *automatic]) == 0
    batch = yaml.safe_load((folder / CONFIG).read_text())["batch"]
    assert batch == {"micro_batch": "auto", "gradient_accumulation": 12}
    (size,) = re.findall(r"= micro-batch (\d+) \(auto\) x accumulation 1 ", capsys.readouterr().out)
    assert pretrain.main(["--resume", str(folder), "--steps", "4", "--set", "optimizer.schedule_steps=4"]) == 0
    assert f"= micro-batch {size} (auto) x accumulation 1 " in capsys.readouterr().out


def test_a_run_folder_rebuilds_the_run(tiny, undisturbed, tmp_path):
    """config.yml as resolved, alone, gives the same losses."""
    folder = tmp_path / "run"
    pretrain.main(["--config", str(undisturbed / "config.yml"), "--out", str(folder)])
    assert results(folder) == results(undisturbed)
    environment = json.loads((undisturbed / "environment.json").read_text())
    assert environment["seed"] == 5
    assert environment["device"].startswith("host engine")


def test_a_new_run_starts_from_the_weights_of_another(tiny, undisturbed, tmp_path, monkeypatch):
    begun = []
    original = HostEngine.step

    def looking(engine, batch, rate):
        if not begun:
            begun.append(engine.state())
        return original(engine, batch, rate)

    monkeypatch.setattr(HostEngine, "step", looking)
    arguments = ["--config", tiny, "--out", str(tmp_path / "run"), "--steps", "3", "--start-from", str(undisturbed)]
    assert pretrain.main(arguments) == 0
    weights = load_checkpoint(checkpoints(undisturbed / "checkpoints")[-1]).engine["model"]
    assert set(begun[0]["model"]) == set(weights)
    assert all(torch.equal(begun[0]["model"][name], weights[name]) for name in weights)
    optimizer = begun[0]["optimizer"]
    assert optimizer["step"] == 0
    assert not any(moment.any() for moment in optimizer["exp_avg"].values())


def test_a_run_is_restored_at_any_step(tiny, undisturbed, tmp_path):
    """From a checkpoint of each epoch, all that follows is as it was, bit for bit."""
    whole = tmp_path / "whole"
    keep = ["--set", "run.checkpoint_every=1", "--set", f"run.keep_checkpoints={STEPS}"]
    assert pretrain.main(["--config", tiny, "--out", str(whole), *keep]) == 0
    assert results(whole) == results(undisturbed)
    saved = {load_checkpoint(path).step: path for path in checkpoints(whole / CHECKPOINTS)}
    assert sorted(saved) == list(range(1, STEPS + 1))
    config = load_config(whole / CONFIG)
    with PackStore.open(Path(config.data.directory)) as store:
        factor = store.manifest.packing_factor
        engine = host_engine(config, store.schema, packing_factor=factor)
        last = load_checkpoint(saved[STEPS])
        for step in (1, 4, 5, 9, 11):
            checkpoint = load_checkpoint(saved[step])
            with closing(global_batches(store, config, packing_factor=factor)) as batches:
                engine.load_state(checkpoint.engine)
                batches.load_state(checkpoint.batches)
                for record in read_log(whole / LOG)[step:]:
                    actual = engine.step(next(batches), record["learning_rate"])
                    assert {name: record[name] for name in actual.metrics} == actual.metrics
                assert batches.state() == last.batches
            for name, weight in engine.state()["model"].items():
                assert torch.equal(weight, last.engine["model"][name])


def test_the_same_line_starts_a_run_and_goes_on_with_it(tiny, undisturbed, tmp_path, monkeypatch, capsys):
    line = ["--config", tiny, "--out", str(tmp_path / "run"), "--resume-if-there"]
    for step in (2, 5, 7):  # the first time before anything is saved
        with monkeypatch.context() as patch:
            stop_at(patch, step, None)
            with pytest.raises(MemoryError):
                pretrain.main(line)
    assert pretrain.main(line) == 0
    assert results(tmp_path / "run") == results(undisturbed)
    capsys.readouterr()
    assert pretrain.main(line) == 0  # done
    assert "has already made its 12 updates" in capsys.readouterr().out
    assert run_main(pretrain.main, ["--config", tiny, "--resume-if-there"]) == 2


def test_two_processes_cannot_write_one_run(tiny, tmp_path, monkeypatch, capsys):
    """A second run or resumption, started while the first one trains, is refused; the first one is undisturbed."""
    folder = tmp_path / "run"
    original = HostEngine.step
    met = []

    def meeting(engine, batch, rate):
        if not met and checkpoints(folder / "checkpoints"):
            with monkeypatch.context() as patch:  # it is refused before anything costly
                patch.setattr(pretraining, "open_packs", lambda *_, **__: pytest.fail("the data set was opened"))
                patch.setattr(training, "load_newest", lambda *_: pytest.fail("a checkpoint was read"))
                met.append(run_main(pretrain.main, ["--resume", str(folder)]))
        return original(engine, batch, rate)

    monkeypatch.setattr(HostEngine, "step", meeting)
    assert pretrain.main(["--config", tiny, "--out", str(folder)]) == 0
    error = f"error: {folder}: another process writes this run; wait for it (process {os.getpid()} on "
    text = capsys.readouterr().err
    assert met == [2]
    assert text.startswith(error)
    assert text.count("\n") == 1
    steps = logged(folder)
    assert steps == list(range(1, STEPS + 1))


def test_a_missing_data_set_is_built_once_and_kept(tiny, tmp_path, capsys, monkeypatch):
    corpus = write_corpus(tmp_path / "text", 30)
    settings = yaml.safe_load(Path(tiny).read_text())
    settings["data"].update(directory=str(tmp_path / "data"), corpus=str(corpus))
    config = tmp_path / "missing.yml"
    config.write_text(yaml.safe_dump(settings))
    arguments = ["pretrain", "--config", str(config), "--steps", "2", "--set", "run.evaluate_every=0"]
    assert packed_bert.main(arguments + ["--out", str(tmp_path / "one")]) == 0
    assert f"{tmp_path / 'data'} is missing" in capsys.readouterr().out
    assert packed_bert.main(arguments + ["--out", str(tmp_path / "two")]) == 0
    assert "building" not in capsys.readouterr().out
    assert results(tmp_path / "one") == results(tmp_path / "two")
    others = ["--set", "data.packer=lpfhp", "--set", "data.seed=6", "--set", "batch.gradient_accumulation=5"]
    place = str(tmp_path / "three")
    arguments += [*others, "--out", place, "--steps", "1"]
    assert packed_bert.main(arguments) == 0
    third = capsys.readouterr().out
    assert "packer spfhp (data.packer is lpfhp)" in third
    assert "seed 0 (data.seed is 6)" in third
