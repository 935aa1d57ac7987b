"""A program that trains alone refuses to be one of several."""

import pytest

from ipu_packed_bert import finetune
from ipu_packed_bert.commands import pretrain
from ipu_packed_bert.experiments import __main__ as experiments
from ipu_packed_bert.processes import refuse_torchrun
from pack_data.command import run_main


@pytest.mark.parametrize(
    "main, arguments",
    [
        (pretrain.main, ["--config", "configs/packed_host.yml"]),
        (pretrain.main, ["--resume", "runs/one"]),
        (finetune.main, ["--config", "configs/finetune_squad_packed.yml"]),
        (experiments.main, ["exactness"]),
        (experiments.main, ["learning_curves"]),
        (experiments.main, ["fine_tuning"]),
    ],
)
def test_two_processes_of_torchrun_do_not_make_two_runs(main, arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert run_main(main, arguments) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: WORLD_SIZE is 2: every process of torchrun") and text.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "environment", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "2", "POPDIST_NUM_TOTAL_REPLICAS": "4"}]
)
def test_one_process_and_poprun_pass(environment):
    refuse_torchrun(environment)
