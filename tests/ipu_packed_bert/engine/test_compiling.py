"""`engine.compile: auto`: decided by the length of the run, written down, kept when the run goes on."""

from __future__ import annotations

import pytest
import torch
import yaml

from ipu_packed_bert.commands import pretrain
from ipu_packed_bert.engine.host import devices
from ipu_packed_bert.settings.pretraining import BatchConfig, Config
from ipu_packed_bert.settings.schema import ModelConfig
from ipu_packed_bert.tasks.pretraining import Pretraining
from tests.pretraining import host_engine
from tests.tiny_runs import not_drawn, tiny_config, tiny_data
from tests.update_batches import change

BASE = change(Config(model=ModelConfig(hidden_dropout=0.0), batch=BatchConfig(micro_batch=2)), engine={"device": "cpu"})
LONG = 10**7  # packs


@pytest.fixture
def compiler(monkeypatch):
    """As if this torch could compile here."""
    monkeypatch.setattr(devices, "_can_compile", lambda: True)


def pays(packs, dropout=0.0, **engine):
    config = change(BASE, model={"hidden_dropout": dropout}, engine={"precision": "bfloat16", **engine})
    config = change(config, engine={"compile": "auto", "kind": "host"})
    return devices.compile_decided(config, Pretraining(config), packs=packs).engine.compile


def test_long_runs_are_compiled_and_short_ones_are_not(compiler):
    assert pays(LONG) and not pays(10)
    lengths = [pays(2**exponent) for exponent in range(30)]
    assert lengths == sorted(lengths)  # a longer run is not compiled less
    assert not pays(LONG, precision="float32") and not pays(LONG, dropout=0.1)  # where it was slower
    assert not pays(LONG, attention="varlen")  # whose shapes differ from batch to batch


def test_nothing_is_compiled_without_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not pays(LONG)


def test_a_run_writes_the_decision_down_and_keeps_it(tmp_path, monkeypatch):
    """Compiled, the tiny run would take a minute: the backend that compiles nothing stands in."""
    monkeypatch.setattr(devices, "_can_compile", lambda: True)
    monkeypatch.setattr(devices, "_RATE", 1e-3)  # so slow that two updates pay
    monkeypatch.setattr("ipu_packed_bert.training.summary.draw", not_drawn)
    kept = []
    monkeypatch.setattr("ipu_packed_bert.training.run.keep_buffers", lambda: kept.append(1))
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    config, folder = str(tiny_config(tmp_path / "tiny.yml", tiny_data(tmp_path / "data"))), tmp_path / "run"
    auto = ["--set", "engine.compile=auto", "--set", "engine.precision=bfloat16", "--steps", "2"]
    auto += ["--set", "model.hidden_dropout=0"]
    assert pretrain.main(["--config", config, "--out", str(folder), *auto]) == 0
    assert yaml.safe_load((folder / "config.yml").read_text())["engine"]["compile"] is True
    assert kept == [1]  # the memory of this process

    monkeypatch.setattr(devices, "_can_compile", lambda: False)  # it is not decided again
    longer = ["--steps", "3", "--set", "optimizer.schedule_steps=3", "--set", "engine.compile=auto"]
    assert pretrain.main(["--resume", str(folder), *longer]) == 0
    assert yaml.safe_load((folder / "config.yml").read_text())["engine"]["compile"] is True


def test_an_engine_without_a_run_does_not_compile():
    engine = host_engine(change(BASE, engine={"compile": "auto"}, model={"num_layers": 1}), device="cpu")
    assert "compiled" not in engine.description


@pytest.mark.parametrize("value, expected", [("auto", "auto"), (True, True), (False, False), ("true", True)])
def test_the_setting_takes_a_word_or_a_switch(value, expected):
    from ipu_packed_bert.settings.reader import FILE, SettingsReader
    from ipu_packed_bert.settings.schema import EngineConfig

    reader = SettingsReader({"engine": EngineConfig}, "a.yml")
    reader.read({"engine": {"compile": value}}, FILE)
    reader.refuse_problems()
    assert reader.sections()["engine"].compile is expected or value == "auto"


@pytest.mark.parametrize("value", ["sometimes", 1, None])
def test_other_values_are_refused(value):
    from ipu_packed_bert.settings.reader import FILE, ConfigError, SettingsReader
    from ipu_packed_bert.settings.schema import EngineConfig

    reader = SettingsReader({"engine": EngineConfig}, "a.yml")
    reader.read({"engine": {"compile": value}}, FILE)
    with pytest.raises(ConfigError, match="engine.compile is .*must be"):
        reader.refuse_problems()
