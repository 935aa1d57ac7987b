"""The command from start to end: every kind of task and of start, stopped and resumed, exported, refused in one
line.
"""

import json
import os
import signal

import numpy as np
import pytest
import torch
import yaml

from ipu_packed_bert.commands import finetune
from ipu_packed_bert.data.global_batches import GlobalBatches
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.model.hugging_face import read_folder
from ipu_packed_bert.run_files.checkpoints import load_checkpoint, newest_checkpoint
from ipu_packed_bert.run_files.folder import read_log
from ipu_packed_bert.settings.loading import load_config
from ipu_packed_bert.training.examples import prepare
from ipu_packed_bert.training.export import import_folder
from pack_data.cli.command import run_main
from tests.fine_tuning_files import (
    KINDS,
    VOCABULARY,
    tiny_checkpoint,
    tiny_config,
    tiny_table,
    training_file,
)
from tests.tiers import sample


def command(*arguments):
    return run_main(finetune.main, [str(argument) for argument in arguments])


def written(folder, checkpoint, task="squad", **sections):
    """A configuration file for data in the folder."""
    training = training_file(folder, task)
    config = tiny_config(checkpoint, training, task=task, **sections)
    (folder / "tiny.yml").write_text(config.to_yaml())
    return folder / "tiny.yml"


def outputs_of(made):
    return made.task.predict(made.engine, made.batches.held_out()).outputs


def evaluations(run):
    return read_log(run / "evaluation.jsonl")


def weights_of(run):
    return load_checkpoint(newest_checkpoint(run / "checkpoints")).engine["model"]


def test_a_run_writes_all_it_should(tmp_path, checkpoint, capsys):
    run = tmp_path / "run"
    config = written(tmp_path, checkpoint, run={"evaluate_every": 2})
    assert command("--config", config, "--out", run) == 0
    capsys.readouterr()
    records = read_log(run / "log.jsonl")
    updates = len(records)
    assert [record["step"] for record in records] == list(range(1, updates + 1))
    environment = json.loads((run / "environment.json").read_text())
    for epoch in (
        records[: updates // 2],
        records[updates // 2 :],
    ):
        assert sum(record["sequences"] for record in epoch) == environment["data"]["sequences"]
    assert any(record["sequences"] > record["packs"] for record in records)
    assert [record["step"] for record in evaluations(run)] == sorted({*range(2, updates, 2), updates})
    predictions = json.loads((run / "predictions.json").read_text())
    assert list(predictions) == [f"q{number}" for number in range(20)]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == updates
    assert summary["held_out"]["exact"] == evaluations(run)[-1]["exact"]
    training = yaml.safe_load((run / "config.yml").read_text())["data"]["training"]
    assert training == str((tmp_path / "train.json").resolve())
    # Two more epochs, and the exported model is the new one.
    before = read_folder(run / "model").weights
    longer = f"optimizer.schedule_steps={2 * updates}"
    assert command("--resume", run, "--set", "run.epochs=4") == 2
    assert longer in capsys.readouterr().err
    assert command("--resume", run, "--set", "run.epochs=4", "--set", longer) == 0
    rates = [record["learning_rate"] for record in read_log(run / "log.jsonl")]
    assert rates[:updates] == [record["learning_rate"] for record in records]
    assert rates[updates] > 0
    after = read_folder(run / "model").weights
    assert set(after) == set(weights_of(run))
    assert not torch.equal(before["qa_outputs.weight"], after["qa_outputs.weight"])
    assert torch.equal(after["qa_outputs.weight"], weights_of(run)["qa_outputs.weight"])
    assert not (run / "model.partial").exists()


@pytest.mark.slow
def test_it_learns(tmp_path, checkpoint):
    """The first word of a text says its class, which packs teach; the most frequent class is right in 42.5 %.

    This seed reaches 97.5 % with torch 2.0.1 and 2.13, the worst of five 70 %. At a higher rate the result depends
    on rounding.
    """
    run = tmp_path / "run"
    sections = {
        "run": {"epochs": 80},
        "batch": {"micro_batch": 8},
        "optimizer": {"learning_rate": 3.0e-3},
    }
    config = written(tmp_path, checkpoint, "single_label", **sections)
    assert command("--config", config, "--out", run) == 0
    assert evaluations(run)[-1]["accuracy"] > 60.0
    labels = [item["prediction"] for item in json.loads((run / "predictions.json").read_text())]
    assert len(labels) == 40
    assert set(labels) <= {"0", "1", "2"}


def test_stopped_and_resumed_it_is_the_same_run(tmp_path, checkpoint, monkeypatch):
    """Bit for bit, dropout included, also where the signal comes while it evaluates."""
    sections = {"model": {"hidden_dropout": 0.2}, "run": {"evaluate_every": 3}}
    config = written(tmp_path, checkpoint, **sections)
    assert command("--config", config, "--out", tmp_path / "whole") == 0
    following = GlobalBatches.__next__
    calls = []

    def interrupted(batches):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return following(batches)

    with monkeypatch.context() as patched:
        patched.setattr(GlobalBatches, "__next__", interrupted)
        assert command("--config", config, "--out", tmp_path / "stopped") == 130
    assert len(read_log(tmp_path / "stopped" / "log.jsonl")) == 3
    assert not (tmp_path / "stopped" / "predictions.json").exists()
    with open(tmp_path / "stopped" / "log.jsonl", "a") as log:
        log.write('{"step": 4, "lo')  # what a kill leaves
    assert command("--resume", tmp_path / "stopped") == 0
    whole = weights_of(tmp_path / "whole")
    stopped = weights_of(tmp_path / "stopped")
    assert all(torch.equal(stopped[name], tensor) for name, tensor in whole.items())
    losses = [[record["loss"] for record in read_log(tmp_path / name / "log.jsonl")] for name in ("whole", "stopped")]
    assert losses[0] == losses[1]
    stopped, whole = (tmp_path / name / "predictions.json" for name in ("stopped", "whole"))
    assert stopped.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("form", ["headless safetensors", "our run", "from scratch", "no pooler"])
def test_every_start(tmp_path, checkpoint, form):
    start = checkpoint
    if form == "headless safetensors":
        from safetensors.torch import load_file, save_file

        start = tiny_checkpoint(tmp_path / "headless")
        weights = {name[len("bert.") :]: tensor for name, tensor in load_file(start / "model.safetensors").items()}
        save_file(weights, start / "model.safetensors")
    elif form == "our run":
        start = tmp_path / "run"
        import_folder(checkpoint, start)
    elif form == "no pooler":
        start = tiny_checkpoint(tmp_path / "bert", pooler=False)
    training = tiny_table(tmp_path / "train.csv", "single_label")
    prepared = prepare(
        tiny_config(
            None if form == "from scratch" else start,
            training,
            task="single_label",
            model={"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 16, "vocabulary_size": 128},
        )
    )
    name = "bert.encoder.layer.0.attention.self.query.weight"
    actual = prepared.engine.state()["model"][name]
    if form == "from scratch":
        assert len(prepared.start.vocabulary) > 30
        assert "from scratch" in prepared.start.description
        assert not prepared.fresh
    else:
        assert torch.equal(
            actual,
            read_folder(start if form == "no pooler" else checkpoint).weights[name],
        )
        assert prepared.start.vocabulary.tokens == VOCABULARY.tokens
        assert ("bert.pooler.dense.weight" in prepared.fresh) == (form == "no pooler")
        assert "classifier.weight" in prepared.fresh
    assert len(outputs_of(prepared)) == 40


@pytest.mark.parametrize("task", sample(KINDS, 2))
def test_exported_it_scores_the_same_in_transformers(tmp_path, checkpoint, task):
    run = tmp_path / "run"
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = written(tmp_path, checkpoint, task)
    assert command("--config", config, "--out", run) == 0
    prepared = prepare(load_config(run / "config.yml"))
    prepared.engine.load_state(load_checkpoint(newest_checkpoint(run / "checkpoints")).engine)
    outputs = outputs_of(prepared)
    theirs = getattr(transformers, prepared.task.architecture).from_pretrained(str(run / "model")).eval()
    inputs = prepared.task.evaluation
    starts = np.cumsum(prepared.task.evaluation.lengths)
    for number in range(0, len(inputs), 7):
        tokens = slice(
            int(starts[number] - inputs.lengths[number]),
            int(starts[number]),
        )
        with torch.no_grad():
            actual = theirs(
                input_ids=torch.from_numpy(inputs.input_ids[tokens].astype(np.int64))[None],
                token_type_ids=torch.from_numpy(inputs.segment_ids[tokens].astype(np.int64))[None],
            )
        pair = [actual.start_logits[0], actual.end_logits[0]] if task == "squad" else None
        expected = torch.stack(pair, dim=1) if pair else actual.logits[0]
        assert float((torch.from_numpy(outputs[number]) - expected).abs().max()) < 1e-4
    # Ours evaluates it too, without training, and from another table only what that asks for.
    again = load_config(
        config,
        ["data.training=null", f"model.checkpoint={tmp_path / 'run' / 'model'}"],
    )
    (tmp_path / "again.yml").write_text(again.to_yaml())
    assert command("--config", tmp_path / "again.yml", "--out", tmp_path / "again") == 0
    assert (tmp_path / "again" / "predictions.json").read_bytes() == (run / "predictions.json").read_bytes()
    scores = [evaluations(tmp_path / name)[-1] for name in ("run", "again")]
    metrics = set(scores[0]) - {"step", "seconds"}
    assert len(metrics) > 2
    assert all(scores[0][name] == scores[1][name] for name in metrics)


def test_a_run_that_is_no_longer_finite_keeps_what_was(tmp_path, checkpoint, capsys, monkeypatch):
    run = tmp_path / "run"
    config = written(tmp_path, checkpoint, run={"checkpoint_every": 1, "evaluate_every": 1})
    step = HostEngine.step

    def breaking(engine, batch, rate):
        update = step(engine, batch, rate)
        if engine.optimizer.param_groups[0]["step"] == 3:
            with torch.no_grad():
                next(engine.model.parameters())[0, 0] = float("nan")
        return update

    with monkeypatch.context() as patched:
        patched.setattr(HostEngine, "step", breaking)
        assert command("--config", config, "--out", run, "--set", "optimizer.warmup_fraction=0.0") == 3
    error = capsys.readouterr().err
    assert error.startswith("error: update 3: the held-out loss is nan")
    assert error.count("\n") == 1
    assert load_checkpoint(newest_checkpoint(run / "checkpoints")).step == 2
    assert command("--resume", run) == 0
