"""One run for every task: what every run does stands in one file, and both commands that train begin it there."""

import ast
import contextlib
from collections import defaultdict

import pytest

from ipu_packed_bert.commands import finetune, pretrain
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
