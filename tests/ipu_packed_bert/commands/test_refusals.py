"""Commands and engines refuse in one line that names field and value what no other test reaches."""

# ruff: noqa: F401  The calls are texts, whose names ruff does not see.
import os
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from ipu_packed_bert.__main__ import main
from ipu_packed_bert.benchmarks import ipu_updates, packed
from ipu_packed_bert.engine import EngineChoice, build_engine
from ipu_packed_bert.engine.base import Engine
from ipu_packed_bert.engine.host import engine as host
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.tasks.pretraining import Pretraining
from ipu_packed_bert.training.examples import load_weights
from tests.fine_tuning_files import tiny_fine_tuned
from tests.pretraining import host_engine
from tests.refusals import faults_of_refusals, refusal_of, refused, rows_of
from tests.tiny_runs import TINY, tiny_data

CONFIG = Config(model=TINY)
BENCHMARK = "benchmark --size tiny --histogram lengths.csv --max-sequence-length 64 --vocabulary-size 50 --packer spfhp"
COMMANDS = [
    ("exporter", ["exporter", "did you mean export"]),
    ("nnlshp", ["nnlshp", "pack --packer nnlshp"]),
    ("pretrain --config configs/packed_hots.yml", ["packed_hots.yml", "packed_host"]),
    ("pretrain --config packed_host --pla", ["--plan", "packed-bert plan"]),
    ("look nothing.csv", ["nothing.csv", "no sequences"]),
    ("look data lengths.csv", ["lengths.csv", "data", "one directory"]),
    ("look data --packer spfhp", ["--packer", "leave the option out"]),
    ("pack lengths.txt --rows rows.npy --max-sequence-length 3", ["lengths.txt", "3"]),
    ("predict tuned records.csv --output there.jsonl", ["there.jsonl", "--overwrite"]),
    ("predict tuned texts.csv --score", ["texts.csv", "--score"]),
    ("predict run records.csv", ["run", "model/", "--resume"]),
    ("check-model tuned --batch empty.jsonl", ["empty.jsonl", "input_ids"]),
    ("check-model broken", ["broken", "cannot be loaded"]),
    (f"{BENCHMARK} --packs 4 --micro-batch 2 --ranks 1,3", ["--packs 4", "3 ranks", "--micro-batch 2", "6"]),
    (f"{BENCHMARK} --slots 96", ["96", "64"]),
]
FILES = {
    "lengths.csv": "length,count\n64,3\n8,9\n",
    "nothing.csv": "length,count\n64,0\n",
    "lengths.txt": "5\n6\n",
    "empty.jsonl": "",
    "there.jsonl": "",
    "records.csv": "text,label\nriver,0\n",
    "texts.csv": "text\nriver\n",
    "broken/config.json": "{}",
    "broken/model.safetensors": "{}",
    "run/config.yml": "task: {name: single_label}\n",
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The current directory, with what the commands name."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    tiny_data(tmp_path / "data")
    tiny_fine_tuned(tmp_path / "tuned", "single_label")
    return tmp_path


def test_commands(files, capsys):
    pytest.importorskip("transformers")
    for command, names in COMMANDS:
        refusal_of(main, command.split(), capsys, *names, after=".*", unchanged=files)


def test_a_benchmark_larger_than_the_gpu(files, capsys, monkeypatch):
    def full(*_, **__):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(packed, "compare_layouts", full)
    options = f"{BENCHMARK} --precision float32"
    refusal_of(main, options.split(), capsys, "--micro-batch 2", "tiny", "--packs")


def without_bias():
    weights = dict(host_engine(CONFIG).weights())
    del weights["cls.predictions.bias"]
    load_weights(host_engine(CONFIG), weights, "bert", whole=True)


def raised_in(context, error):
    with context:
        raise error


def on_ipus_by_torchrun():
    ranks = SimpleNamespace(launcher="torchrun", size=2)
    build_engine(CONFIG, Pretraining(CONFIG), EngineChoice("ipu", ""), packing_factor=1.0, processes=ranks)


CALLS = [
    *rows_of(
        """
without_bias() => bert | cls.predictions.bias
raised_in(host._naming_compiler(), RuntimeError('not of the compiler')) => not of the compiler => RuntimeError
on_ipus_by_torchrun() => torchrun | 2 | poprun | --engine host
raised_in(ipu_updates.profiling(True), AssertionError('entered')) => POPLAR_ENGINE_OPTIONS | JSON
import_module('ipu_packed_bert.padding_free').__path__ => __path__ => AttributeError
"""
    ),
    ("Engine.predict(host_engine(CONFIG), {})", [host_engine(CONFIG).description, "--engine host"]),
]


@pytest.mark.filterwarnings("ignore:ipu_packed_bert.padding_free:DeprecationWarning")
def test_calls(monkeypatch):
    monkeypatch.setitem(os.environ, "POPLAR_ENGINE_OPTIONS", "{")
    faults = faults_of_refusals(CALLS, globals())
    assert not faults, "\n".join(faults)
    both = CONFIG.changed("engine", compile=True, recompute_layers=True)
    monkeypatch.delattr(torch, "compiler", raising=False)
    with refused("engine.recompute_layers", "engine.compile", torch.__version__):
        host_engine(both)
