"""The memory of a step as computed, against what torch keeps."""

import dataclasses

import pytest

from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.loading import load_config
from ipu_packed_bert.settings.placement import Block
from ipu_packed_bert.settings.schema import BatchConfig, ModelConfig
from ipu_packed_bert.settings.shipped import config_file
from ipu_profiling.planning.host_memory import _layer_bytes, host_memory
from ipu_profiling.planning.plan import plan
from ipu_profiling.planning.printing import _blocks, facts
from tests.ipu_packed_bert.engine.test_recompute import kept
from tests.update_batches import SLOTS

MODEL = ModelConfig(61, 64, 2, 4, 256, SLOTS, hidden_dropout=0.0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_layer_keeps_what_is_computed(attention):
    """float32, no dropout; sums of attention and LayerNorm's means are not counted, and a kernel may copy less."""
    more = dataclasses.replace(MODEL, num_layers=5)
    measured = []
    for model in (MODEL, more):
        config = Config(model=model, batch=BatchConfig(micro_batch=2))
        measured.append(kept(config.changed("engine", attention=attention)))
    of_a_layer = (measured[1] - measured[0]) / 3
    keys = SLOTS if attention == "eager" else 0
    computed = _layer_bytes(MODEL, half=False, keys=keys)
    assert of_a_layer / (2 * SLOTS) == pytest.approx(computed, rel=0.1)


def test_by_hand_in_bfloat16():
    """A layer of 4 hidden units, 8 inner ones, dropout: 24 inputs + 24 heads + 16 context + 32 norms + 8 + 32 + 8."""
    model = ModelConfig(100, 4, 3, 2, 8, 16, hidden_dropout=0.1)
    layer = 3 * 8 + 3 * 8 + 2 * 8 + 2 * 16 + 8 + 2 * 16 + 2 * 4
    assert _layer_bytes(model, half=True) == layer
    config = Config(model=model, batch=BatchConfig(micro_batch=5)).changed("engine", precision="bfloat16")
    needs = host_memory(config, model, parameters=1000, slots=16, predictions=7)
    assert needs.held == 18000
    assert needs.update == 8000
    assert needs.activations == 5 * (16 * 3 * layer + 7 * 100 * 16)
    assert needs.most == 18000 + needs.activations
    full = config.changed("engine", precision="float32")
    assert host_memory(full, model, parameters=1000, slots=16, predictions=7).held == 16000
    config = config.changed("engine", recompute_layers=True)
    needs = host_memory(config, model, parameters=1000, slots=16, predictions=7)
    assert needs.activations == 5 * (16 * (3 * 16 + layer) + 7 * 100 * 16)


# Peak resident memory in MiB (ru_maxrss), measured on an AMD EPYC (torch 2.13, Python 3.11, one thread) with
#   packed-bert pretrain --config packed_host --steps N --set SETTING ...
# N updates, at the packing factor of the embedded corpus with the slots of the settings.
_LARGER = "model.hidden_size=512 model.num_layers=6 model.num_heads=8 model.intermediate_size=2048"
_BASE = "model.hidden_size=768 model.num_layers=12 model.num_heads=12 model.intermediate_size=3072"
_SHORT = "data.max_sequence_length=128 data.max_predictions_per_sequence=20"
MEASURED = [
    ("batch.micro_batch=16", 1.360, 1297),  # 2 updates of 12 micro-batches; 5 of 3: 1,305
    ("batch.micro_batch=4", 1.360, 610),
    ("batch.micro_batch=16 engine.precision=bfloat16", 1.360, 1196),
    ("batch.micro_batch=8 model.hidden_dropout=0.1", 1.360, 822),
    (f"batch.micro_batch=16 {_SHORT}", 1.161, 586),
    (f"batch.micro_batch=2 {_SHORT}", 1.161, 445),
    (f"batch.micro_batch=16 engine.precision=bfloat16 {_SHORT}", 1.161, 583),
    (f"batch.micro_batch=8 {_SHORT} {_LARGER}", 1.161, 1067),
    (f"batch.micro_batch=4 {_LARGER}", 1.360, 1583),
    (f"batch.micro_batch=2 {_BASE}", 1.360, 2814),
]


@pytest.mark.parametrize("settings, packing_factor, measured", MEASURED)
def test_a_process_on_a_cpu_needs_what_the_plan_says(settings, packing_factor, measured):
    """packed_host with 16 packs of 512: the plan was 25 % below the measured memory."""
    config = load_config(config_file("packed_host"), settings.split(), command="pretrain")
    planned = facts(plan(config, packing_factor=packing_factor)).rows["process"]
    assert planned.value == pytest.approx(measured * 2**20, rel=0.1)


def test_no_process_on_a_cpu_is_named_for_a_gpu():
    config = load_config(config_file("packed_host"), ["engine.device=cuda"], command="pretrain")
    assert "process" not in facts(plan(config, packing_factor=1.996)).rows


@pytest.mark.parametrize("half, narrow", [(False, 4), (True, 2)])
def test_dropout_of_eager_attention_keeps_its_mask_and_its_result(half, narrow):
    """One byte and one operand of a product for each weight of attention."""
    dropped = dataclasses.replace(MODEL, attention_dropout=0.1)
    layers = [_layer_bytes(model, half=half, keys=SLOTS) for model in (MODEL, dropped)]
    assert layers[1] - layers[0] == MODEL.num_heads * SLOTS * (1 + narrow)


def test_the_blocks_of_an_ipu_are_named():
    layers = [Block(f"layer {number}", f"bert.encoder.layer.{number}", 0) for number in range(3)]
    blocks = (Block("embeddings", "bert.embeddings", 0), *layers, Block("MLM head", "cls.predictions", 0))
    assert _blocks(blocks) == "embeddings, layers 0-2, MLM head"
    assert _blocks((layers[1],)) == "layer 1"
    assert _blocks(()) == "nothing"
