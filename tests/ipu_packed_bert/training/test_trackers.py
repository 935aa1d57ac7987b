"""`run.track`: stand-ins for wandb and mlflow record what they are told; no network is used."""

import sys
from types import SimpleNamespace

import pytest

from ipu_packed_bert.commands import pretrain
from ipu_packed_bert.run_files.folder import EVALUATIONS, LOG, read_log
from ipu_packed_bert.training.log_files import Events
from ipu_packed_bert.training.trackers import Tracker
from pack_data.cli.command import run_main
from tests.tiny_runs import tiny_config, tiny_data


class Service:
    """Mock of both packages that records calls in a list."""

    def __init__(self, monkeypatch, name):
        self.curves, self.begun, self.finished, self.settings = [], [], 0, []
        self.package = SimpleNamespace(
            init=self.init, start_run=self.start_run, log_metrics=self.log, end_run=self.finish, log_dict=self.log_dict
        )
        monkeypatch.setitem(sys.modules, name, self.package)

    def init(self, *, id, resume, name, dir, config):
        assert resume == "allow"
        self.begun.append((id, name))
        self.settings.append(config)
        return SimpleNamespace(log=self.log, finish=self.finish)

    def start_run(self, *, run_id, run_name):
        number = run_id or f"number {len(self.begun)}"
        self.begun.append((number, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id=number))

    def log_dict(self, settings, file):
        assert file == "config.yml"
        self.settings.append(settings)

    def log(self, values, *, step):
        self.curves.append((step, values))

    def finish(self):
        self.finished += 1


@pytest.fixture
def tiny(tmp_path):
    return str(tiny_config(tmp_path / "tiny.yml", tiny_data(tmp_path / "data")))


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_gets_the_curves_of_the_logs_and_a_resumed_run_goes_on_in_its_own(name, tiny, tmp_path, monkeypatch):
    service, run = Service(monkeypatch, name), tmp_path / "run"
    settings = ["--set", "run.evaluate_every=2", "--set", "optimizer.schedule_steps=5"]
    assert (
        run_main(pretrain.main, ["--config", tiny, "--out", str(run), "--track", name, "--steps", "3", *settings]) == 0
    )
    assert service.finished == 1 and service.settings[0]["run"]["track"] == name
    assert run_main(pretrain.main, ["--resume", str(run), "--steps", "5"]) == 0
    (first, begun), (again, _) = service.begun
    assert first == again and begun == "run" and service.finished == 2

    records, evaluations = read_log(run / LOG), read_log(run / EVALUATIONS)
    assert len(records) == 5 and len(evaluations) == 4
    steps = [(step, values["loss/total"]) for step, values in service.curves if "loss/total" in values]
    assert steps == [(record["step"], record["loss"]) for record in records]
    held_out = [(step, values["evaluation/mlm_loss"]) for step, values in service.curves if len(values) < 8]
    assert held_out == [(record["step"], record["mlm_loss"]) for record in evaluations]
    assert all(isinstance(value, float) for _, values in service.curves for value in values.values())


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_one_line_before_the_work(name, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, name, None)
    assert run_main(pretrain.main, ["--config", tiny, "--out", str(tmp_path / "run"), "--track", name]) == 2
    assert capsys.readouterr().err == f"error: run.track={name} needs {name}: pip install {name}\n"
    assert not (tmp_path / "run").exists()


def test_a_service_that_fails_ends_its_curves_and_not_the_run(tmp_path):
    said, calls = [], []

    def log(step, values):
        calls.append((step, values))
        raise RuntimeError("no\nanswer")

    events = Events(tmp_path, 0, said.append, Tracker(log, lambda: calls.append("finished")))
    for step in (1, 2):
        events.add(step, {"loss": 1.0, "gradient_norm": None})
    events.close()
    assert calls == [(1, {"loss": 1.0})]
    assert len(said) == 1 and "no more curves for run.track" in said[0] and "\n" not in said[0]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_service_that_does_not_begin_ends_its_curves_and_not_the_run(name, tiny, tmp_path, monkeypatch, capsys):
    def fails(**_):
        raise ConnectionError("nobody answers")

    service = Service(monkeypatch, name)
    service.package.init = service.package.start_run = fails
    given = ["--config", tiny, "--out", str(tmp_path / "run"), "--track", name, "--steps", "2"]
    assert run_main(pretrain.main, given) == 0
    assert f"no curves for run.track={name} (nobody answers)" in capsys.readouterr().out
    assert len(read_log(tmp_path / "run" / LOG)) == 2 and not service.curves
