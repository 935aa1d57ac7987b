"""Recomputed layers: the same losses, gradients and random numbers to the last bit, from fewer kept activations."""

import pytest
import torch

from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import BatchConfig, ModelConfig
from tests.graphs import count_graphs, graphs_of
from tests.pretraining import host_engine
from tests.refusals import refused
from tests.tiny_runs import TINY
from tests.update_batches import make_batches

CONFIG = Config(model=TINY, batch=BatchConfig(micro_batch=2)).changed(
    "model", hidden_dropout=0.2, attention_dropout=0.1, num_layers=3
)


def recomputing(config, value):
    return config.changed("engine", recompute_layers=value)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "varlen"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_it_changes_no_bit(attention, precision):
    config = CONFIG.changed("engine", attention=attention, precision=precision)
    batches = make_batches(3, depth=3, micro_batch=2)
    losses = []
    weights = []
    for value in (False, True):
        engine = host_engine(recomputing(config, value), device="cpu")
        steps = [engine.step(batch, 1e-2).loss for batch in batches]
        losses.append([*steps, engine.evaluate(batches[0]).loss])
        weights.append(engine.state()["model"])
    assert losses[0] == losses[1]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def kept(config):
    """Bytes of a micro-batch that wait for the backward pass, the weights left out."""
    engine = host_engine(config, device="cpu")
    (batch,) = make_batches(1, depth=3, micro_batch=2)
    weights = {parameter.untyped_storage().data_ptr() for parameter in engine.model.parameters()}
    actual = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            actual[storage.data_ptr()] = (
                storage.nbytes(),
                storage,
            )  # kept alive: no address comes twice
        return tensor

    engine.model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.model(*(torch.from_numpy(batch[name][:2]) for name in engine.task.fields))
    return sum(size for size, _ in actual.values())


def test_each_layer_keeps_its_input_only():
    sizes = {}
    for layers in (2, 6):
        model = ModelConfig(61, 32, layers, 2, 128, 24, hidden_dropout=0.0)
        config = Config(model=model, batch=BatchConfig(micro_batch=2))
        sizes[layers] = [kept(recomputing(config, value)) for value in (False, True)]
    whole, recomputed = ((sizes[6][index] - sizes[2][index]) / 4 for index in (0, 1))
    slots = 2 * 24
    # float32; torch 2.0 holds the input itself, out of sight of the hooks.
    assert recomputed in (0, 4 * slots * 32)
    assert whole > 12 * 4 * slots * 32


def test_on_ipus_it_is_the_default_and_on_the_host_it_is_not():
    engine = CONFIG.engine
    assert engine.recomputes(ipus=True)
    assert not engine.recomputes(ipus=False)
    for value in (True, False):
        chosen = recomputing(CONFIG, value).engine
        assert chosen.recomputes(ipus=True) is chosen.recomputes(ipus=False) is value


@pytest.mark.slow
def test_compiled_it_has_no_more_graphs(monkeypatch):
    """Without dropout, whose compiled kernels draw other numbers."""
    graphs = count_graphs(monkeypatch, "aot_eager")
    config = CONFIG.changed("model", hidden_dropout=0.0, attention_dropout=0.0, num_layers=2)
    compiled = recomputing(config, True).changed("engine", compile=True)
    if not hasattr(torch, "compiler"):
        with refused("engine.compile"):
            host_engine(compiled, device="cpu")
        return
    (batch,) = make_batches(1, depth=3, micro_batch=2)
    actual = [host_engine(item, device="cpu") for item in (config, compiled)]
    losses = [[engine.step(batch, 1e-2).loss for _ in range(2)] for engine in actual]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert len(graphs) == graphs_of(actual[1].model)
