"""Refusals of commands and engines that no other test reaches: one line that names field and value."""

from types import SimpleNamespace

import pytest
import torch

from ipu_packed_bert.benchmarks import packed
from ipu_packed_bert.commands import benchmark, predict
from ipu_packed_bert.engine import EngineChoice, build_engine
from ipu_packed_bert.engine.base import Engine
from ipu_packed_bert.engine.host import engine as host
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.tasks.pretraining import Pretraining
from ipu_packed_bert.training.examples import load_weights
from padding_free import check_model_command as check_model
from tests.pretraining import host_engine
from tests.refusals import refusal_of, refused
from tests.tiny_runs import TINY

CONFIG = Config(model=TINY)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The current directory, with what the commands below name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lengths.csv").write_text("length,count\n64,3\n8,9\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "records.csv").write_text("text,label\nriver,0\n")
    for name, text in {"config.json": "{}", "model.safetensors": "{}"}.items():
        (tmp_path / "bert").mkdir(exist_ok=True)
        (tmp_path / "bert" / name).write_text(text)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yml").write_text("task: {name: single_label}\n")


BENCHMARK = "--size tiny --histogram lengths.csv --max-sequence-length 64 --vocabulary-size 50 --packer spfhp"


@pytest.mark.parametrize(
    "main, arguments, names",
    [
        (
            benchmark.main,
            f"{BENCHMARK} --packs 4 --micro-batch 2 --ranks 1,3",
            ["--packs 4", "3 ranks", "--micro-batch 2", "6"],
        ),
        (benchmark.main, f"{BENCHMARK} --slots 96", ["96", "64"]),
        (check_model.main, "bert", ["bert", "cannot be loaded"]),
        (check_model.main, "bert --batch empty.jsonl", ["empty.jsonl", "input_ids"]),
        (predict.main, "run records.csv", ["run", "model/", "--resume"]),
    ],
)
def test_commands(files, capsys, main, arguments, names):
    if main is check_model.main:
        pytest.importorskip("transformers")
    refusal_of(main, arguments.split(), capsys, *names)


def test_a_benchmark_larger_than_the_gpu(files, capsys, monkeypatch):
    def full(*_, **__):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(packed, "compare_layouts", full)
    options = f"{BENCHMARK} --precision float32"
    refusal_of(benchmark.main, options.split(), capsys, "--micro-batch 2", "tiny", "--packs")


def test_a_head_that_is_missing(tmp_path):
    weights = dict(host_engine(CONFIG).weights())
    del weights["cls.predictions.bias"]
    with refused("bert", "cls.predictions.bias"):
        load_weights(host_engine(CONFIG), weights, "bert", whole=True)


def test_engines(monkeypatch):
    engine = host_engine(CONFIG)
    with refused(engine.description, "--engine host"):
        Engine.predict(engine, {})
    with refused("not of the compiler", kind=RuntimeError), host._naming_compiler():
        raise RuntimeError("not of the compiler")
    both = CONFIG.changed("engine", compile=True, recompute_layers=True)
    monkeypatch.delattr(torch, "compiler", raising=False)
    with refused("engine.recompute_layers", "engine.compile", torch.__version__):
        host_engine(both)
    ranks = SimpleNamespace(launcher="torchrun", size=2)
    with refused("torchrun", "2", "poprun", "--engine host"):
        build_engine(CONFIG, Pretraining(CONFIG), EngineChoice("ipu", ""), packing_factor=1.0, processes=ranks)
