"""GPU paths on fake CUDA tensors: a sample; all of them: python -m tests.gpu_dry."""

import json
import random

import pytest
import torch

if torch.__version__ < "2.9":
    pytest.skip("fake CUDA tensors need torch 2.9 or newer", allow_module_level=True)

from tests import gpu_dry
from tests.fakes.gpu import FakeGpu
from tests.gpu_dry import all_paths, dispatch, main
from tests.imports import ROOT

PAGE = ROOT / "docs" / "gpu_paths.md"
SEED = 57
PATHS = all_paths()
SMALL = [name for name in PATHS if not name.startswith("configuration")]


@pytest.mark.parametrize("name", random.Random(SEED).sample(SMALL, 2))
def test_a_path_is_dispatched(name):
    figures = dispatch(PATHS[name])
    assert figures.peak > 0 and figures.operators > 40
    assert len(figures.waits) == 1 or "varlen" in name or "padding-free" in name


def test_attention_in_blocks_waits_once_for_each_micro_batch():
    figures = dispatch(PATHS["layout: float32, attention varlen"])
    assert figures.waits == ["copy to the host", "copy to the host", "tolist"]


def test_the_page_lists_every_path():
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in PATHS if name not in text] == []


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return value * value

    @staticmethod
    def backward(ctx, gradient):
        (value,) = ctx.saved_tensors
        return 2 * value * gradient


def test_the_backward_pass_has_the_gradients_of_autograd():
    """A shared weight, a broadcast, a number of another type, a custom function, several outputs, an unused output."""
    torch.manual_seed(0)
    weight = torch.randn(4, 4, requires_grad=True)
    bias = torch.randn(4, requires_grad=True)

    def loss():
        hidden = torch.relu(torch.randn(3, 4, generator=torch.Generator().manual_seed(1)) @ weight + bias)
        first, _, last = _Doubled.apply(hidden @ weight.t()).split([1, 1, 2], dim=1)
        return (first.double() * last).sum() + bias.prod()

    expected = torch.autograd.grad(loss(), [weight, bias])
    for times in (1, 2):  # gradients are added
        FakeGpu()._backward(loss())
        for parameter, gradient in zip((weight, bias), expected):
            assert torch.allclose(parameter.grad, times * gradient, rtol=1e-6)


def test_integers_have_their_values_and_the_host_waits_for_them():
    with FakeGpu() as gpu:
        mask = torch.tensor([[1, 1, 0], [2, 0, 3]]).to(gpu.DEVICE, non_blocking=True)
        assert gpu.waits == []
        lengths = mask.flatten()[mask.flatten() > 0].bincount()
        assert gpu.waits == ["index by a mask", "bincount"]
        places = mask.flatten().nonzero().squeeze(1)
        assert (places.device.type, places.tolist()) == ("cuda", [0, 1, 3, 5])
        assert lengths.cpu().tolist() == [0, 2, 1, 1]
        assert gpu.waits == ["index by a mask", "bincount", "nonzero", "tolist", "copy to the host"]
        assert torch.randn(3, device=gpu.DEVICE).sum().item() == 1.0  # unknown


def test_the_peak_is_that_of_the_live_tensors():
    with FakeGpu() as gpu:
        first = torch.empty(1000, device=gpu.DEVICE)  # 4,000 bytes: 8 blocks
        view = first[:10]
        assert gpu.live == 4096
        second = first + 1
        del first, second
        assert (gpu.live, gpu.peak) == (4096, 8192)
        del view
        assert gpu.live == 0


def test_a_path_on_two_devices_or_too_large_for_the_card_is_reported(monkeypatch, capsys):
    def on_two_devices(gpu):
        return torch.ones(2, device=gpu.DEVICE) + torch.ones(2)

    paths = {"right": lambda gpu: torch.ones(2, device=gpu.DEVICE), "wrong": on_two_devices}
    monkeypatch.setattr(gpu_dry, "all_paths", lambda: paths)
    assert main(["--json"]) == 1
    right, wrong = map(json.loads, capsys.readouterr().out.splitlines())
    assert right["problem"] == "" and "cpu" in wrong["problem"]
    assert main(["--only", "right"]) == 0 and main(["--only", "right", "--memory", "100"]) == 1
    with pytest.raises(SystemExit) as refused:
        main(["--only", "nothing of this name"])
    assert refused.value.code == 2
