"""The memory of a step as computed, against what torch keeps."""

import dataclasses
import re

import pytest

from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.placement import Block
from ipu_packed_bert.settings.schema import BatchConfig, ModelConfig
from ipu_profiling.planning.host_memory import _layer_bytes, host_memory
from ipu_profiling.planning.plan import plan
from ipu_profiling.planning.printing import _blocks, _lines
from tests.ipu_packed_bert.engine.test_recompute import kept
from tests.update_batches import SLOTS

MODEL = ModelConfig(61, 64, 2, 4, 256, SLOTS, hidden_dropout=0.0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_layer_keeps_what_is_computed(attention):
    """float32, no dropout; sums of attention and LayerNorm's means are not counted, and a kernel may copy less."""
    more = dataclasses.replace(MODEL, num_layers=5)
    configs = [Config(model=model, batch=BatchConfig(micro_batch=2)) for model in (MODEL, more)]
    few, many = (kept(config.changed("engine", attention=attention)) for config in configs)
    found = (many - few) / 3 / (2 * SLOTS)
    computed = _layer_bytes(MODEL, slots=SLOTS, half=False, eager=attention == "eager")
    assert 0.9 * computed < found < 1.1 * computed


def test_by_hand_in_bfloat16():
    """A layer of 4 hidden units, 8 inner ones, dropout: 24 inputs + 24 heads + 16 context + 32 norms + 8 + 32 + 8."""
    model = ModelConfig(100, 4, 3, 2, 8, 16, hidden_dropout=0.1)
    layer = 3 * 8 + 3 * 8 + 2 * 8 + 2 * 16 + 8 + 2 * 16 + 2 * 4
    assert _layer_bytes(model, slots=16, half=True) == layer
    config = Config(model=model, batch=BatchConfig(micro_batch=5)).changed("engine", precision="bfloat16")
    needs = host_memory(config, model, parameters=1000, slots=16, predictions=7)
    assert needs.held == 18000 and needs.update == 8000
    assert needs.activations == 5 * (16 * 3 * layer + 7 * 100 * 16)
    assert needs.most == 18000 + needs.activations
    config = config.changed("engine", recompute_layers=True)
    needs = host_memory(config, model, parameters=1000, slots=16, predictions=7)
    assert needs.activations == 5 * (16 * (3 * 16 + layer) + 7 * 100 * 16)


@pytest.mark.parametrize("device, expected", [("cpu", True), ("auto", True), ("cuda", False)])
def test_the_plan_of_a_cpu_counts_torch_itself(device, expected):
    """BERT-base, two rows: 2,945 and 3,024 MiB were measured (ru_maxrss), buffers returned and kept."""
    config = Config(model=ModelConfig(), batch=BatchConfig(micro_batch=2)).changed("engine", device=device)
    config = config.changed("engine", kind="host")
    text = "\n".join(_lines(plan(config, packing_factor=1.996)))
    assert ("a process on a CPU" in text) == expected
    if expected:
        (printed,) = re.findall(r"a process on a CPU ([\d,]+) MiB", text)
        assert 0.9 * 3024 < int(printed.replace(",", "")) < 1.1 * 2945


@pytest.mark.parametrize("half, narrow", [(False, 4), (True, 2)])
def test_dropout_of_eager_attention_keeps_its_mask_and_its_result(half, narrow):
    """One byte and one operand of a product for each weight of attention."""
    dropped = dataclasses.replace(MODEL, attention_dropout=0.1)
    layers = [_layer_bytes(model, slots=SLOTS, half=half, eager=True) for model in (MODEL, dropped)]
    assert layers[1] - layers[0] == MODEL.num_heads * SLOTS * (1 + narrow)


def test_the_blocks_of_an_ipu_are_named():
    layers = [Block(f"layer {number}", f"bert.encoder.layer.{number}", 0) for number in range(3)]
    blocks = (Block("embeddings", "bert.embeddings", 0), *layers, Block("MLM head", "cls.predictions", 0))
    assert _blocks(blocks) == "embeddings, layers 0-2, MLM head"
    assert _blocks((layers[1],)) == "layer 1" and _blocks(()) == "nothing"
