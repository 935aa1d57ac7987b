"""Dropout masks of random words: the law of dropout; masks belong to a pack of the update and the name of a layer."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ipu_packed_bert.engine.host.dropout import PackNoise
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import BatchConfig
from tests.graphs import count_graphs, graphs_of
from tests.packed_examples import with_scales
from tests.pretraining import host_engine
from tests.ranks_at_work import DoubleEngine
from tests.tiny_runs import TINY
from tests.tolerances import assert_same
from tests.update_batches import change, make_batches

VALUES = 1 << 20
ROWS = np.ones((2, 3), np.int32)  # of a micro-batch of two packs


def dropped(layer, values):
    """The factors of the layer, which the backward pass must repeat."""
    values.grad = None
    output = layer(values)
    output.backward(torch.ones_like(output))
    assert torch.equal(output, values * values.grad)
    return values.grad


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_masks_follow_the_law_of_dropout(rate):
    network = nn.Sequential(nn.Dropout(rate), nn.Dropout(rate))
    noise = PackNoise(network)
    values = torch.randn(2, VALUES // 2 - 1, requires_grad=True)
    masks = []
    for micro_batch in (0, 1):
        noise.begin([3, 2, 0], 2 * micro_batch, ROWS)
        masks += [dropped(layer, values) for layer in network]
        assert torch.equal(masks[-1], dropped(network[1], values))  # computed again
    for mask in masks:
        kept = np.unique(mask.numpy())
        assert len(kept) == 2
        assert kept[0] == 0.0
        assert kept[1] == pytest.approx(1.0 / (1.0 - rate), rel=1e-4)
        # Six standard deviations of the share of dropped values, and of pairs of neighbours.
        deviation = (rate * (1.0 - rate) / VALUES) ** 0.5
        zeros = (mask == 0.0).double()
        assert abs(float(zeros.mean()) - rate) < 6.0 * deviation + 1e-5
        for lag in (1, 2, 4, 256):
            pairs = zeros[:, lag:] * zeros[:, :-lag]
            assert abs(float(pairs.mean()) - rate**2) < 6.0 * (rate**2 * (1.0 - rate**2) / VALUES) ** 0.5 * 1.5 + 1e-5
    packs = [pack.numpy() for mask in masks for pack in mask]
    correlations = np.corrcoef(packs) - np.eye(len(packs))
    assert np.abs(correlations).max() < 6.0 / (VALUES / 2) ** 0.5


def test_no_values_are_dropped_in_evaluation_or_at_rate_zero():
    values = torch.randn(2, 3)
    for network in (nn.Sequential(nn.Dropout(0.5)).eval(), nn.Sequential(nn.Dropout(0.0))):
        PackNoise(network).begin([1], 0, ROWS)
        assert torch.equal(network(values), values)


def test_a_rate_near_one_keeps_the_mean():
    """0.999995 of 65,536 words rounds to all of them: a division by zero."""
    network = nn.Sequential(nn.Dropout(0.999995))
    PackNoise(network).begin([1], 0, ROWS)
    actual = network(torch.ones(2, VALUES * 4))
    assert actual.max() == 1 << 16
    assert float(actual.mean()) == pytest.approx(1.0, rel=0.6)


def test_values_that_are_not_of_rows_are_refused():
    network = nn.Sequential(nn.Dropout(0.5))
    PackNoise(network).begin([1], 0, ROWS)
    with pytest.raises(ValueError, match=r"dropout layer 0 .*\[3, 5\].* 2 packs"):
        network(torch.ones(3, 5))


# ---- the law: nothing but the seed, the update, the pack and the layer matters

CONFIG = Config(
    model=dataclasses.replace(TINY, initializer_range=0.2, num_layers=2, hidden_dropout=0.3, attention_dropout=0.2),
    batch=BatchConfig(micro_batch=2, gradient_accumulation=4),
)
UPDATES = 3


def in_micro_batches(batch, rows, dtype=np.float64):
    """The packs of an update in micro-batches of some rows, the last filled with empty packs."""
    packs = int(batch["input_mask"].any(axis=1).sum())
    number = -(-packs // rows)
    filled = {}
    for name, values in batch.items():
        if name.endswith("_scale"):
            continue
        filled[name] = np.zeros((number * rows, *values.shape[1:]), values.dtype)
        filled[name][:packs] = values[:packs]
    scaled = with_scales(filled, micro_batches=number, normalisation="token")
    for name, counted in (("mlm_scale", "masked_lm_weights"), ("nsp_scale", "next_sentence_weights")):
        scaled[name] = np.full(len(scaled[name]), number / np.count_nonzero(filled[counted]))
    return scaled


def updated(rows, *, resumed_after=0, double=True, **engine):
    """Losses and weights of three updates."""
    config = change(CONFIG, batch={"micro_batch": rows}, engine=engine)

    def new():
        if not double:
            return host_engine(config, device="cpu")
        from ipu_packed_bert.tasks.pretraining import Pretraining

        return DoubleEngine(config, Pretraining(config), packing_factor=1.0, device="cpu")

    trained = new()
    losses = []
    for number, batch in enumerate(make_batches(UPDATES, depth=3, micro_batch=1)):
        if number == resumed_after > 0:
            state = trained.state()
            trained = new()
            trained.load_state(state)
        losses.append(trained.step(in_micro_batches(batch, rows), 1e-2).loss)
    return losses, list(trained.state()["model"].values())


@functools.lru_cache(None)
def straight():
    return updated(4, attention="eager")


@given(
    rows=st.integers(1, 5),
    resumed_after=st.integers(0, UPDATES - 1),
    recompute=st.booleans(),
    attention=st.sampled_from(["auto", "eager", "sdpa", "varlen"]),
)
@settings(max_examples=12)
def test_micro_batch_attention_recomputation_and_resumption_change_no_mask(rows, resumed_after, recompute, attention):
    losses, weights = updated(rows, resumed_after=resumed_after, recompute_layers=recompute, attention=attention)
    assert losses == pytest.approx(straight()[0], rel=1e-12)
    assert_same(found=weights, expected=straight()[1], dtype=torch.float64)


@pytest.mark.slow
def test_compilation_changes_no_mask(monkeypatch):
    """And the layers still share one graph."""
    graphs = count_graphs(monkeypatch, "aot_eager")
    losses, weights = updated(3, double=False, compile=True)
    network = host_engine(CONFIG.changed("engine", compile=True), device="cpu").model
    assert len(graphs) == graphs_of(network)
    assert losses == pytest.approx(straight()[0], rel=1e-5)
    assert_same(found=weights, expected=straight()[1], dtype=torch.float32)
