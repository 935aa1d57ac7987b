"""The host engine: updates by hand, any cut into micro-batches, bit-identical continuation, one program a run."""

import dataclasses

import numpy as np
import pytest
import torch

from ipu_packed_bert.engine.host.attention import Attention, pick_attention
from ipu_packed_bert.model.optimizer import build_optimizer
from ipu_packed_bert.model.packed import BATCH_FIELDS
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import BatchConfig, OptimizerConfig
from ipu_packed_bert.tasks.pretraining import Pretraining
from tests.graphs import count_graphs, graphs_of
from tests.packed_examples import lay_out, with_scales
from tests.pretraining import count, host_engine, initial_network
from tests.refusals import refused
from tests.tiny_runs import TINY
from tests.tolerances import assert_same
from tests.update_batches import SLOTS, change, make_batches

CONFIG = Config(
    model=dataclasses.replace(TINY, initializer_range=0.2),
    batch=BatchConfig(micro_batch=2, gradient_accumulation=4),
    optimizer=OptimizerConfig(weight_decay=0.01),
)


def weights(engine):
    state = engine.state()["model"]
    return [state[name] for name in sorted(state)]


def same_bits(first, second):
    return len(first) == len(second) > 0 and all(map(torch.equal, first, second))


@pytest.mark.parametrize("name, normalisation", [("lamb", "token"), ("adamw", "sequence")])
def test_packed_and_unpacked_runs_stay_together(name, normalisation):
    """Three updates on the same sequences, packed and alone, end in the same weights."""
    config = change(CONFIG, optimizer={"name": name}, loss={"normalisation": normalisation})
    ends = []
    metrics = []
    for depth, micro_batch in ((1, 4), (3, 2)):
        engine = host_engine(config.changed("batch", micro_batch=micro_batch), device="cpu")
        batches = make_batches(3, depth=depth, micro_batch=micro_batch, normalisation=normalisation)
        # A higher rate amplifies the rounding of gradients that are zero, such as those of key biases.
        results = [engine.step(batch, 5e-3) for batch in batches]
        ends.append(weights(engine))
        metrics.append([list(result.metrics.values()) for result in results])
    assert np.allclose(*metrics, rtol=1e-4)
    assert_same(found=ends[0], expected=ends[1], dtype=torch.float32)


def test_a_step_is_what_it_says():
    batch = make_batches(1, depth=3, micro_batch=2)[0]
    engine = host_engine(CONFIG.changed("engine", attention="eager"), device="cpu")
    model = initial_network(CONFIG)
    optimizer = build_optimizer(model, CONFIG.optimizer, betas=(0.9, 0.999), in_pieces=True)
    number = len(batch["input_ids"]) // 2
    assert number >= 2
    loss = 0.0
    correct = 0.0
    for index in range(number):
        rows = slice(2 * index, 2 * index + 2)
        fields = [torch.from_numpy(batch[name][rows]) for name in BATCH_FIELDS]
        output = model(*fields)
        (output.loss / number).backward()
        loss += output.loss.item() / number
        correct += output.mlm_correct.item()
    gradients = engine.gradients(batch).by_name
    by_autograd = [parameter.grad for parameter in model.parameters()]
    assert_same(found=list(gradients.values()), expected=by_autograd, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    optimizer.step()
    result = engine.step(batch, 0.05)
    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert result.loss == pytest.approx(result.metrics["mlm_loss"] + result.metrics["nsp_loss"])
    assert result.metrics["mlm_accuracy"] == correct / count(batch)["masked_tokens"]
    assert result.seconds > 0.0
    assert result.cycles is None
    state = model.state_dict()
    assert same_bits(weights(engine), [state[name] for name in sorted(state)])


def test_continuation_is_bit_identical_with_dropout():
    config = CONFIG.changed("model", hidden_dropout=0.2, attention_dropout=0.1)
    batches = make_batches(4, depth=3, micro_batch=2)
    straight = host_engine(config, device="cpu")
    results = [straight.step(batch, 1e-2) for batch in batches]

    first = host_engine(config, device="cpu")
    for batch in batches[:2]:
        first.step(batch, 1e-2)
    state = first.state()
    first.step(batches[2], 1e-2)  # what happens later must not reach into the saved state
    torch.manual_seed(12345)  # nor does the process's own random stream matter
    second = host_engine(config, device="cpu")
    second.load_state(state)
    second.evaluate(batches[0])  # nor an evaluation in between
    continued = [second.step(batch, 1e-2) for batch in batches[2:]]
    assert [item.loss for item in continued] == [item.loss for item in results[2:]]
    assert same_bits(weights(second), weights(straight))

    # Dropout really draws: another seed gives another loss.
    other = host_engine(config.changed("run", seed=6), device="cpu")
    other.load_state(state)
    assert other.step(batches[2], 1e-2).loss != results[2].loss


def test_the_process_random_stream_is_left_alone():
    batch = make_batches(1, depth=3, micro_batch=2)[0]
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    engine = host_engine(CONFIG.changed("model", hidden_dropout=0.2), device="cpu")
    engine.compile(batch)
    engine.step(batch, 1e-2)
    assert torch.equal(torch.rand(3), expected)


def test_compile_and_evaluate_change_nothing():
    batch = make_batches(1, depth=3, micro_batch=2)[0]
    config = CONFIG.changed("model", hidden_dropout=0.2)
    prepared, fresh = (host_engine(config, device="cpu") for _ in range(2))
    prepared.compile(batch)
    losses = [prepared.evaluate(batch).loss for _ in range(2)]
    assert losses[0] == losses[1]
    assert prepared.step(batch, 1e-2).loss == fresh.step(batch, 1e-2).loss != losses[0]
    assert same_bits(weights(prepared), weights(fresh))


def test_compiled_it_is_as_many_graphs_for_each_mode_whatever_its_layers(monkeypatch, layers=3):
    """Captured without breaks, and not again for other data; by a backend that runs the graph as it is."""
    graphs = count_graphs(monkeypatch)
    config = CONFIG.changed("model", num_layers=layers)
    compiled = host_engine(config.changed("engine", compile=True), device="cpu")
    plain = host_engine(config, device="cpu")
    batches = make_batches(2, depth=3, micro_batch=2)
    compiled.compile(batches[0])
    assert len(graphs) == graphs_of(plain.model)
    for batch in batches:
        steps = [engine.step(batch, 1e-2).loss for engine in (compiled, plain)]
        assert steps[0] == pytest.approx(steps[1], rel=1e-6)
        evaluations = [engine.evaluate(batch).loss for engine in (compiled, plain)]
        assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-6)
    assert len(graphs) == 2 * graphs_of(plain.model)
    assert set(compiled.state()["model"]) == set(plain.state()["model"])
    count_graphs(monkeypatch, "no_compiler_here")
    with refused("engine.compile is true, but torch cannot compile here .*--set engine.compile=false"):
        host_engine(CONFIG.changed("engine", compile=True), device="cpu").compile(batches[0])


def test_packing_adjusts_the_betas_where_configured():
    config = CONFIG.changed("optimizer", packing_adjustment="betas")
    engine = host_engine(config, packing_factor=2.0, device="cpu")
    assert engine.optimizer.param_groups[0]["betas"] == (0.9**2, 0.999**2)


@pytest.mark.parametrize("alone", [False, True])
def test_gradients_change_nothing_and_have_no_dropout_unless_asked(alone):
    dropout = CONFIG.changed("model", hidden_dropout=0.2)
    (batch,) = make_batches(1, depth=1 if alone else 3, micro_batch=2)
    engine, fresh, without = (host_engine(config, device="cpu") for config in (dropout, dropout, CONFIG))
    expected = without.gradients(batch)
    drawn = [engine.gradients(batch, alone=alone, dropout=True) for _ in range(2)]
    for actual in (engine.gradients(batch, alone=alone), engine.gradients(batch)):
        assert actual.result.loss == pytest.approx(expected.result.loss, rel=1e-6)
        assert_same(
            found=[*actual.by_name.values()],
            expected=[*expected.by_name.values()],
            dtype=torch.float32,
        )
    assert drawn[0].result.loss == drawn[1].result.loss != expected.result.loss
    assert same_bits(drawn[0].by_name.values(), drawn[1].by_name.values())
    assert engine.step(batch, 1e-2).loss == fresh.step(batch, 1e-2).loss
    assert same_bits(weights(engine), weights(fresh))


def test_an_empty_batch_moves_nothing_but_decay():
    batch = lay_out([[], []], [], slots=SLOTS, depth=3, predictions=7)
    batch = with_scales(batch, micro_batches=1, normalisation="sequence")
    engine = host_engine(CONFIG.changed("optimizer", weight_decay=0.0), device="cpu")
    before = weights(engine)
    result = engine.step(batch, 1e-2)
    assert (
        result.loss,
        result.metrics["mlm_accuracy"],
        result.metrics["nsp_accuracy"],
    ) == (
        0.0,
        0.0,
        0.0,
    )
    assert same_bits(before, weights(engine))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_in_bfloat16_the_mask_is_made_once_and_changes_no_bit(attention):
    config = CONFIG.changed("engine", precision="bfloat16", attention=attention)
    batch = make_batches(1, depth=3, micro_batch=2)[0]
    engines = [host_engine(config, device="cpu") for _ in range(2)]
    numbers = torch.from_numpy(batch["input_mask"])
    assert engines[0].model.attention_mask(numbers, torch.float32).dtype == torch.bfloat16
    engines[1].model.attention_mask.products = None  # each layer makes its own
    assert engines[0].step(batch, 1e-2).loss == engines[1].step(batch, 1e-2).loss
    assert same_bits(*map(weights, engines))


def test_attention_chosen_for_the_machine():
    cpu = torch.device("cpu")
    half = CONFIG.changed("engine", precision="bfloat16")

    def attention(config):
        return pick_attention(config, Pretraining(config), cpu)

    def within(dense):
        return Attention("varlen", mask=True, note=f"or {dense}, depending on lengths")

    dropout = {"model": {"attention_dropout": 0.1}}
    assert attention(CONFIG) == within("sdpa")
    assert attention(half) == attention(change(CONFIG, **dropout)) == within("eager")
    assert attention(half.changed("engine", attention="sdpa")) == Attention("sdpa")
    compiled = CONFIG.changed("engine", compile=True)  # one shape for all batches
    assert attention(compiled) == Attention("sdpa")
    assert attention(change(compiled, **dropout)) == Attention("eager")
    assert attention(CONFIG.changed("data", max_sequences_per_pack=None)) == within("sdpa")


def test_too_little_memory_names_the_settings_that_decide_it(monkeypatch):
    engine = host_engine(CONFIG, device="cpu")
    (batch,) = make_batches(1, depth=3, micro_batch=2)

    def full(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    monkeypatch.setattr(engine.optimizer, "step", full)
    monkeypatch.setattr(engine, "_program", full)
    for call in (lambda: engine.step(batch, 1e-2), lambda: engine.evaluate(batch)):
        with refused("CPU", "Tried", "batch.micro_batch.* 2", "engine.recompute_layers=true"):
            call()
