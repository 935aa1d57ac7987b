"""`run.track`: stand-ins for wandb and mlflow record what they are told; no network is used."""

import sys
from types import SimpleNamespace

import pytest

from ipu_packed_bert.commands import pretrain
from ipu_packed_bert.run_files.folder import EVALUATIONS, LOG, read_log
from ipu_packed_bert.training.log_files import Events
from ipu_packed_bert.training.trackers import Tracker
from pack_data.cli.command import run_main


class Service:
    """Mock of both packages that records calls."""

    def __init__(self, monkeypatch, name):
        self.curves = []
        self.begun = []
        self.settings = []
        self.finished = 0
        self.fails = False
        package = SimpleNamespace(init=self.init, start_run=self.start_run, log_dict=self.log_dict)
        package.log_metrics = self.log
        package.end_run = self.finish
        monkeypatch.setitem(sys.modules, name, package)

    def begin(self, number, name):
        if self.fails:
            raise ConnectionError("nobody answers")
        self.begun.append((number, name))

    def init(self, *, id, resume, name, dir, config):
        assert resume == "allow"
        self.begin(id, name)
        self.settings.append(config)
        return SimpleNamespace(log=self.log, finish=self.finish)

    def start_run(self, *, run_id, run_name):
        number = run_id or f"number {len(self.begun)}"
        self.begin(number, run_name)
        return SimpleNamespace(info=SimpleNamespace(run_id=number))

    def log_dict(self, settings, file):
        assert file == "config.yml"
        self.settings.append(settings)

    def log(self, values, *, step):
        self.curves.append((step, values))

    def finish(self):
        self.finished += 1

    def curve(self, name):
        return [(step, values[name]) for step, values in self.curves if name in values]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_gets_the_curves_of_the_logs_and_a_resumed_run_goes_on_in_its_own(
    name, tiny, tmp_path, monkeypatch, capsys
):
    """A service that does not answer ends its curves, not the run."""
    service = Service(monkeypatch, name)
    run = tmp_path / "run"
    begin = ["--config", tiny, "--track", name, "--set", "run.evaluate_every=2", "--set", "optimizer.schedule_steps=5"]
    assert run_main(pretrain.main, [*begin, "--out", str(run), "--steps", "3"]) == 0
    assert service.finished == 1
    assert service.settings[0]["run"]["track"] == name
    assert run_main(pretrain.main, ["--resume", str(run), "--steps", "5"]) == 0
    (first, begun), (again, _) = service.begun
    assert first == again
    assert begun == "run"
    assert service.finished == 2
    records = read_log(run / LOG)
    assert service.curve("loss/total") == [(record["step"], record["loss"]) for record in records]
    evaluations = read_log(run / EVALUATIONS)
    assert (len(records), len(evaluations)) == (5, 4)
    assert service.curve("evaluation/mlm_loss") == [(record["step"], record["mlm_loss"]) for record in evaluations]
    assert all(isinstance(value, float) for _, values in service.curves for value in values.values())

    service.fails = True
    service.curves.clear()
    assert run_main(pretrain.main, [*begin, "--out", str(tmp_path / "other"), "--steps", "1"]) == 0
    assert f"no curves for run.track={name} (nobody answers)" in capsys.readouterr().out
    assert len(read_log(tmp_path / "other" / LOG)) == 1
    assert not service.curves


def test_a_service_that_fails_ends_its_curves_and_not_the_run(tmp_path):
    printed = []
    calls = []

    def log(step, values):
        calls.append((step, values))
        raise RuntimeError("no\nanswer")

    events = Events(tmp_path, 0, printed.append, Tracker(log, lambda: calls.append("finished")))
    for step in (1, 2):
        events.add(step, {"loss": 1.0, "gradient_norm": None})
    events.close()
    assert calls == [(1, {"loss": 1.0})]
    (line,) = printed
    assert "run.track" in line
    assert "\n" not in line
