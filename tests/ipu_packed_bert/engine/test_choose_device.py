"""Which device a run takes where there are no IPUs, what it says of it, and `--whole`."""

import contextlib
import dataclasses

import pytest

from ipu_packed_bert.__main__ import main as packed_bert
from ipu_packed_bert.commands import pretrain
from ipu_packed_bert.engine import choose_engine
from ipu_packed_bert.processes.ranks import ONE
from ipu_packed_bert.settings.loading import load_config
from ipu_packed_bert.training import run
from ipu_packed_bert.training.prepared import Beginning, Begun
from ipu_packed_bert.training.pretraining import PacksRun
from tests.fakes.cuda import pretend
from tests.imports import CONFIGS
from tests.refusals import refused

POD16 = CONFIGS / "packed_phase2_pod16.yml"


@pytest.fixture(autouse=True)
def no_sdk(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "poptorch", None)
    for name in [name for name in sys.modules if name.startswith("ipu_packed_bert.engine.ipu")]:
        monkeypatch.delitem(sys.modules, name)


def test_without_ipus_a_gpu_comes_before_the_cpu_and_is_named(monkeypatch):
    config = load_config(POD16)
    assert "on the CPU: no Poplar SDK" in choose_engine(config).reason
    assert not choose_engine(config).cuda
    pretend(monkeypatch, name="Fake H100")
    choice = choose_engine(config)
    assert choice.kind == "host"
    assert choice.cuda
    assert "Fake H100" in choice.reason
    assert "\n" not in choice.reason
    assert not choose_engine(load_config(POD16, ["engine.device=cpu"])).cuda


@pytest.mark.parametrize("gpu", [True, False])
def test_it_still_shrinks_and_names_the_ways_to_run_in_full(gpu, monkeypatch, capsys):
    if gpu:
        pretend(monkeypatch)
    config = load_config(POD16)
    small = PacksRun.settle(config, Begun(Beginning(), ONE, choose_engine(config), contextlib.ExitStack()))
    assert small.run.steps <= 1000
    assert not small.without_ipus
    output = capsys.readouterr().out
    assert ("--config packed_phase2_gpu1" in output) == gpu
    assert "--whole" in output


def test_whole_leaves_the_block_out(monkeypatch):
    started = []
    monkeypatch.setattr(run, "run", lambda kind, config, *_: started.append(config) or 0)
    assert packed_bert(["pretrain", "--config", str(POD16), "--whole"]) == 0
    (whole,), config = started, load_config(POD16)
    assert config.without_ipus
    assert whole == dataclasses.replace(config, without_ipus=())


def test_whole_is_for_a_new_run():
    assert pretrain.parse(["--config", "packed_host", "--whole"]).whole
    with refused("--whole", "--resume"):
        pretrain.parse(["--resume", "runs/a", "--whole"])
