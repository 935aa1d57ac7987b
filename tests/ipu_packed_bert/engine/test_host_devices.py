"""Which device the host engine takes, what it computes in there, and which attention, on GPUs that are not there."""

import contextlib
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from ipu_packed_bert.engine.host.attention import KERNEL_FROM, Attention, _without_kernel, pick_attention
from ipu_packed_bert.engine.host.devices import find_device, numerics_of, refuse_precision
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import DataConfig
from ipu_packed_bert.tasks.pretraining import Pretraining
from tests.fakes.cuda import pretend
from tests.refusals import refused
from tests.tiny_runs import TINY
from tests.update_batches import change

CPU = torch.device("cpu")


@pytest.fixture
def kernel(monkeypatch):
    """torch has a variable-length kernel, whichever torch this is."""
    module = types.ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = lambda *heads: None
    package = sys.modules.get("torch.nn.attention") or types.ModuleType("torch.nn.attention")
    monkeypatch.setitem(sys.modules, "torch.nn.attention", package)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    monkeypatch.setattr(package, "varlen", module, raising=False)


def engine(**settings):
    return Config(model=TINY).changed("engine", kind="host", **settings).engine


@pytest.mark.parametrize("there", [True, False])
def test_auto_takes_the_gpu_that_is_there(there, monkeypatch):
    pretend(monkeypatch, (9, 0) if there else None)
    assert find_device(engine()) == torch.device("cuda" if there else "cpu")
    assert find_device(engine(device="cpu")).type == "cpu"
    if there:
        assert find_device(engine(device="cuda")).type == "cuda"
    else:
        with refused("no CUDA device here: --set engine.device=cpu"):
            find_device(engine(device="cuda"))


def test_each_rank_has_a_gpu_of_its_own(monkeypatch):
    pretend(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ranks = [SimpleNamespace(size=3, local_rank=rank) for rank in range(3)]
    assert [find_device(engine(), rank) for rank in ranks[:2]] == [torch.device("cuda", rank) for rank in range(2)]
    assert find_device(engine(device="cpu"), ranks[2]) == CPU
    with refused("LOCAL_RANK", "2", "--nproc-per-node 2", "engine.device=cpu"):
        find_device(engine(device="cuda"), ranks[2])


def test_the_process_keeps_its_choices_and_inside_they_are_the_engine_s(monkeypatch):
    """The switches are those of the process: they hold in the engine only. (No GPU is needed to see them.)"""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    cuda = torch.device("cuda")
    outer = torch.get_float32_matmul_precision()
    try:
        for chosen in ("high", "highest"):
            torch.set_float32_matmul_precision(chosen)
            for precision, inside in (("float32", "highest"), ("bfloat16", "highest"), ("tf32", "high")):
                for deterministic in (False, True):
                    settings = engine(precision=precision, deterministic=deterministic)
                    with pytest.raises(KeyError), numerics_of(settings, cuda):
                        assert torch.get_float32_matmul_precision() == inside
                        assert torch.are_deterministic_algorithms_enabled() == deterministic
                        raise KeyError
                    assert torch.get_float32_matmul_precision() == chosen
                    assert not torch.are_deterministic_algorithms_enabled()
            with numerics_of(engine(deterministic=True), CPU):
                assert torch.get_float32_matmul_precision() == chosen
                assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_float32_matmul_precision(outer)


LACKING = {("tf32", None), ("bfloat16", (7, 5)), ("tf32", (7, 5))}


def test_a_precision_that_the_device_lacks_is_refused(monkeypatch):
    for precision in ("float32", "bfloat16", "tf32"):
        for version in (None, (7, 5), (8, 0), (9, 0)):
            device = pretend(monkeypatch, version) if version else CPU
            lacks = (precision, version) in LACKING
            expected = refused("engine.precision", precision, "float32") if lacks else contextlib.nullcontext()
            with expected:
                refuse_precision(precision, device)


BEST = {"dtype": torch.bfloat16, "dropout": 0.0, "head_size": 64, "depth": 3}


def test_the_kernel_is_for_half_types_from_8_0_on_without_dropout(kernel, monkeypatch):
    device = pretend(monkeypatch, (8, 0))
    assert _without_kernel(device, **BEST) == ""
    assert _without_kernel(device, **{**BEST, "dtype": torch.float16}) == ""
    for name, value, words in (
        ("dtype", torch.float32, "half types"),
        ("dropout", 0.1, "attention dropout, which is 0.1"),
        ("head_size", 12, "multiples of 8"),
        ("head_size", 264, "at most 256"),
        ("depth", None, "number of sequences"),
    ):
        assert words in _without_kernel(device, **{**BEST, name: value})
    assert _without_kernel(CPU, **BEST)
    assert "capability 8.0, this GPU has 7.5" in _without_kernel(pretend(monkeypatch, (7, 5)), **BEST)


def test_a_torch_without_the_kernel_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.nn.attention", None)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    assert torch.__version__ in _without_kernel(pretend(monkeypatch), **BEST)


def picked(device, **sections):
    config = change(Config(model=TINY, data=DataConfig(max_sequences_per_pack=3)), **sections)
    return pick_attention(config, Pretraining(config), device)


def test_auto_takes_the_kernel_on_cuda_for_long_rows_else_a_mask_and_says_why(kernel, monkeypatch):
    device = pretend(monkeypatch)
    half = {"precision": "bfloat16"}
    long = {"data": {"max_sequence_length": KERNEL_FROM}}
    assert picked(device, engine=half, **long) == Attention("varlen", True)
    assert picked(device, engine={**half, "compile": True}, **long) == Attention("varlen", True)
    assert picked(device, engine=half, data={"max_sequence_length": KERNEL_FROM - 1}) == Attention("sdpa")
    assert picked(device, engine={**half, "attention": "varlen", "compile": True}) == Attention("varlen", True)
    for sections, words in (
        ({"engine": half, "model": {"attention_dropout": 0.1}}, "attention dropout"),
        ({"engine": {"precision": "tf32"}}, "half types"),
        ({"engine": half, "data": {"max_sequences_per_pack": None}}, "number of sequences"),
    ):
        actual = picked(device, **sections)
        assert actual.kind == "sdpa"
        assert words in actual.note
    assert picked(device, engine={**half, "attention": "sdpa"}) == Attention("sdpa")
    with pytest.raises(ValueError, match="engine.compile.*attention dropout"):
        picked(device, engine={**half, "attention": "varlen", "compile": True}, model={"attention_dropout": 0.1})
