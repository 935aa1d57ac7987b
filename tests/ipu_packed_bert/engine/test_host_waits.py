"""The number of times that an update waits for the device and casts a weight."""

import collections
import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import BatchConfig
from tests.pretraining import host_engine
from tests.tiny_runs import TINY
from tests.update_batches import make_batches

CONFIG = Config(
    model=dataclasses.replace(TINY, hidden_dropout=0.1), batch=BatchConfig(micro_batch=2, gradient_accumulation=4)
)


@pytest.mark.skipif(not hasattr(torch, "compiler"), reason="before torch 2.1 `meta` has no norms of lists")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_update_waits_for_the_device_once(attention, monkeypatch):
    """On torch's device `meta` no tensor has values, so that whatever reads one raises, but for the one counted."""
    batch = make_batches(1, depth=3, micro_batch=2)[0]
    engine = host_engine(CONFIG.changed("engine", attention=attention), device="meta")
    waits = []

    def tolist(tensor):
        waits.append(tensor.device.type)
        return [1.0] * len(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    assert len(batch["input_ids"]) > 2  # several micro-batches
    result = engine.step(batch, 1e-2)
    assert result.finite
    assert waits == ["meta"]
    with pytest.raises((RuntimeError, NotImplementedError)):
        engine.model.bert.pooler.dense.bias.sum().item()  # the control: such a read would have been noticed


class _Casts(TorchDispatchMode):
    """Counts casts to bfloat16 by the tensor that is cast."""

    def __init__(self):
        super().__init__()
        self.of = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is torch.bfloat16:
            self.of[args[0].data_ptr()] += 1
        return function(*args, **(kwargs or {}))


def test_a_weight_is_cast_once_an_update():
    batch = make_batches(1, depth=3, micro_batch=2)[0]
    engine = host_engine(CONFIG.changed("engine", precision="bfloat16"), device="cpu")
    dense = engine.model.bert.encoder.layer[0].intermediate.dense
    for _ in range(2):  # the second update casts what the first one changed
        before = dense.weight.detach().clone()
        with _Casts() as casts:
            engine.step(batch, 1e-2)
        assert len(batch["input_ids"]) > 2
        assert casts.of[dense.weight.data_ptr()] == 1
        assert not torch.equal(dense.weight, before)
        with _Casts() as casts:
            engine.evaluate(batch)
        assert casts.of[dense.weight.data_ptr()] == 1
