"""One run for every task: what every run does stands in one file, and both commands that train begin it there."""

import ast
import contextlib
from collections import defaultdict
from types import SimpleNamespace

import pytest

from ipu_packed_bert.commands import finetune, pretrain
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import OptimizerConfig, RunConfig
from ipu_packed_bert.training import predictions, pretraining
from ipu_packed_bert.training import run as training
from ipu_packed_bert.training.examples import ExamplesRun
from ipu_packed_bert.training.pretraining import PacksRun
from pack_data.cli.command import run_main
from tests.imports import ROOT
from tests.tiny_runs import tiny_config, tiny_data

# What every run does, and the one file that does it.
ONCE = {
    "compare": "ipu_packed_bert/training/run.py",  # what a resumed run may change
    "open_run_folder": "ipu_packed_bert/training/run.py",
    "RunLog": "ipu_packed_bert/training/run.py",
    "finish": "ipu_packed_bert/training/run.py",
    "start_lines": "ipu_profiling/planning/printing.py",
    "_settled": "ipu_packed_bert/commands/run_options.py",
    "options_without_plan": "ipu_profiling/planning/command.py",
}


def test_what_every_run_does_stands_in_one_file():
    callers = defaultdict(set)
    for package in ("ipu_packed_bert", "ipu_profiling"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    callers[node.func.id].add(path.relative_to(ROOT).as_posix())
    assert {name: callers[name] for name in ONCE} == {name: {file} for name, file in ONCE.items()}


@pytest.mark.parametrize(
    "main, file, kind",
    [(pretrain.main, "pre.yml", PacksRun), (finetune.main, "fine.yml", ExamplesRun)],
    ids=["pretrain", "finetune"],
)
def test_both_commands_begin_the_same_run(tmp_path, monkeypatch, main, file, kind):
    (tmp_path / "train.json").write_text("{}")
    (tmp_path / "fine.yml").write_text(f"data: {{training: {tmp_path}/train.json}}\n")
    tiny_config(tmp_path / "pre.yml", tiny_data(tmp_path / "data"))
    runs = []
    monkeypatch.setattr(training, "run", lambda kind, config, *_: runs.append((kind, config)) or 0)
    assert run_main(main, ["--config", str(tmp_path / file)]) == 0
    ((begun, config),) = runs
    assert begun is kind
    assert config.path == str(tmp_path / file)


def test_a_run_closes_what_it_opened_whatever_happens(tmp_path, monkeypatch):
    """Also where its weights do not fit: engine and data set are closed."""
    closed = []
    make = PacksRun.make.__func__

    def watched(cls, config, begun):
        begun.resources.callback(closed.append, "all")
        return make(cls, config, begun)

    monkeypatch.setattr(PacksRun, "make", classmethod(watched))
    monkeypatch.setattr(PacksRun, "load", lambda *_, **__: (_ for _ in ()).throw(ValueError("no")))
    tiny_config(tmp_path / "pre.yml", tiny_data(tmp_path / "data"))
    with contextlib.suppress(SystemExit):
        assert run_main(pretrain.main, ["--config", str(tmp_path / "pre.yml"), "--out", str(tmp_path / "run")]) == 2
    assert closed == ["all"]


@pytest.mark.parametrize("kind, batches", [("ipu", ["first"]), ("host", [])])
def test_only_ipus_compile_the_program_of_a_prediction_before_it(kind, batches, monkeypatch):
    predicted = []
    monkeypatch.setattr(predictions, "in_order", lambda *_: iter(["first", "second"]))
    config = SimpleNamespace(engine=SimpleNamespace(kind=kind))
    engine = SimpleNamespace(predict=predicted.append)
    task = SimpleNamespace(packs=())
    predictions.compile_program(SimpleNamespace(config=config, engine=engine, task=task, layout=None))
    assert predicted == batches


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_a_longer_run_ends_with_its_schedule(schedule):
    """The options that a run prints at its end: to the end of the schedule, then a schedule twice as long."""
    optimizer = OptimizerConfig(schedule=schedule, schedule_steps=9)
    config = Config(optimizer=optimizer, run=RunConfig(steps=9))
    assert pretraining._longer(config, 4) == "--steps 9"
    longer = pretraining._longer(config, 9)
    assert longer.startswith("--steps 18")
    assert ("--set optimizer.schedule_steps=18" in longer) == (schedule != "constant")
