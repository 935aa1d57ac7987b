"""On a real GPU: exactness, kernels, streams, memory. `make gpu` runs these; without a GPU they are skipped.

Tolerances. float32: other kernels sum in other orders than those of a CPU, in the same type. bfloat16 keeps 8
bits, so that two orders of summation differ by some 2 ** -8 of a value: what packing adds is compared with what
unpacked rows differ by from float32, and may be twice that, as both round about as often.
"""

import copy

import numpy as np
import pytest
import torch

from ipu_packed_bert.engine.host.attention import _without_kernel
from ipu_packed_bert.engine.host.devices import capability
from ipu_packed_bert.model.optimizer import build_optimizer
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import BatchConfig, DataConfig, EngineConfig, ModelConfig
from tests.graphs import count_graphs, graphs_of
from tests.packed_examples import fill_up, lay_out, random_packs, random_sequences, with_scales
from tests.pretraining import host_engine, initial_network
from tests.update_batches import change

pytestmark = pytest.mark.cuda

DEVICE = "cuda"
SLOTS = 128
DEPTH = 3
ROWS = 4
# Heads of 64, as in BERT; large weights, so that the attention's choice of tokens is not flat.
MODEL = ModelConfig(
    vocabulary_size=211,
    hidden_size=128,
    num_layers=3,
    num_heads=2,
    intermediate_size=256,
    max_position_embeddings=SLOTS,
    hidden_dropout=0.0,
    initializer_range=0.08,
)
CONFIG = Config(
    data=DataConfig(max_sequence_length=SLOTS, max_sequences_per_pack=DEPTH),
    model=MODEL,
    batch=BatchConfig(micro_batch=ROWS, gradient_accumulation=4),
    engine=EngineConfig(kind="host", device="cuda", deterministic=True),
)


def batch(depth=DEPTH, seed=0, sequences=20, rows=ROWS):
    """An update, the same sequences for every depth."""
    rng = np.random.default_rng(seed)
    lengths = [int(length) for length in rng.integers(3, 90, sequences)]
    examples = random_sequences(rng, lengths=lengths, vocabulary=MODEL.vocabulary_size)
    packs = fill_up(random_packs(np.random.default_rng(seed), lengths, slots=SLOTS, depth=depth), rows)
    update = lay_out(packs, examples, slots=SLOTS, depth=depth, predictions=20 + depth)
    return with_scales(update, micro_batches=len(packs) // rows, normalisation="token")


def engine(config=CONFIG, device=DEVICE, **settings):
    return host_engine(config.changed("engine", **settings, device=device) if settings else config, device=device)


def gradient(made, update):
    """(loss, all gradients in one float64 vector on the CPU), without those of the key biases, which are rounding."""
    actual = made.gradients(update)
    parts = [item.double().flatten().cpu() for name, item in actual.by_name.items() if not name.endswith("key.bias")]
    return actual.result.loss, torch.cat(parts)


def apart(one, other):
    """Return the relative difference of two gradients."""
    return float((one - other).norm() / other.norm())


def same_bits(first, second):
    return len(first) == len(second) > 0 and all(torch.equal(first[name], second[name]) for name in first)


def half_types():
    if capability(torch.device(DEVICE)) < (8, 0):
        pytest.skip("bfloat16 needs compute capability 8.0")


def test_packed_equals_unpacked_in_float32_and_equals_the_cpu():
    loss, packed = gradient(engine(), batch())
    loss_alone, unpacked = gradient(engine(CONFIG.changed("data", max_sequences_per_pack=1)), batch(depth=1))
    loss_cpu, cpu = gradient(engine(device="cpu", deterministic=False), batch())
    assert loss == pytest.approx(loss_alone, rel=2e-5)
    assert loss == pytest.approx(loss_cpu, rel=2e-5)
    assert apart(packed, unpacked) < 5e-5
    assert apart(packed, cpu) < 5e-5


@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager", "varlen"])
def test_in_bfloat16_packing_adds_no_more_rounding_than_unpacked_rows_have(attention):
    half_types()
    alone = CONFIG.changed("data", max_sequences_per_pack=1)
    _, exact = gradient(engine(), batch())
    _, unpacked = gradient(engine(alone, precision="bfloat16", attention="sdpa"), batch(depth=1))
    _, packed = gradient(engine(precision="bfloat16", attention=attention), batch())
    assert apart(packed, exact) <= 2 * apart(unpacked, exact) + 1e-5
    assert apart(unpacked, exact) < 0.1  # else the comparison says nothing


def test_the_variable_length_kernel_is_taken_and_is_the_mask():
    half_types()
    lacking = _without_kernel(torch.device(DEVICE), torch.bfloat16, dropout=0.0, head_size=64, depth=DEPTH)
    if lacking:
        pytest.skip(f"no variable-length kernel: {lacking}")
    _, exact = gradient(engine(), batch())
    kernel, dense = (engine(precision="bfloat16", attention=attention) for attention in ("varlen", "sdpa"))
    assert "varlen attention" in kernel.description
    assert apart(gradient(kernel, batch())[1], exact) <= 2 * apart(gradient(dense, batch())[1], exact) + 1e-5
    # An empty pack, and one full of one sequence: boundaries with lengths of 0 and of all slots.
    rng = np.random.default_rng(4)
    examples = random_sequences(rng, lengths=[SLOTS, 5, 7], vocabulary=MODEL.vocabulary_size)
    update = lay_out([[0], [], [1, 2], []], examples, slots=SLOTS, depth=DEPTH, predictions=20 + DEPTH)
    update = with_scales(update, micro_batches=1, normalisation="token")
    assert apart(gradient(kernel, update)[1], gradient(engine(), update)[1]) < 0.1


def test_attention_dropout_falls_back_and_says_so():
    half_types()
    gpu = engine(CONFIG.changed("model", attention_dropout=0.1), precision="bfloat16")
    assert "sdpa attention" in gpu.description
    assert "attention dropout" in gpu.description
    assert np.isfinite(gpu.step(batch(), 1e-3).loss)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_resumed_run_has_the_same_bits(precision):
    if precision == "bfloat16":
        half_types()
    config = change(CONFIG, model={"hidden_dropout": 0.1}, engine={"precision": precision})
    updates = [batch(seed=seed) for seed in range(4)]
    straight = engine(config)
    losses = [straight.step(update, 1e-3).loss for update in updates]
    first = engine(config)
    second = engine(config)
    actual = [first.step(update, 1e-3).loss for update in updates[:2]]
    state = copy.deepcopy(first.state())
    torch.rand(5, device=DEVICE)  # somebody else draws
    second.load_state(state)
    actual += [second.step(update, 1e-3).loss for update in updates[2:]]
    assert actual == losses
    assert same_bits(second.state()["model"], straight.state()["model"])


def test_a_cpu_goes_on_where_a_gpu_stopped():
    gpu = engine()
    other = engine(device="cpu", deterministic=False)
    gpu.step(batch(), 1e-3)
    other.load_state(gpu.state())
    assert other.evaluate(batch(seed=1)).loss == pytest.approx(gpu.evaluate(batch(seed=1)).loss, rel=2e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_compiled_its_graphs_serve_all_batches(precision, monkeypatch):
    if precision == "bfloat16":
        half_types()
    graphs = count_graphs(monkeypatch, "inductor")
    plain = engine(precision=precision)
    compiled = engine(precision=precision, compile=True, deterministic=False)
    for seed in range(2):
        actual, expected = (gpu.step(batch(seed=seed), 1e-3).loss for gpu in (compiled, plain))
        assert actual == pytest.approx(expected, rel=2e-2 if precision == "bfloat16" else 1e-3)
    assert len(graphs) == graphs_of(compiled.model)


def test_on_a_stream_of_its_caller_s_it_is_the_same():
    """The engine works on the caller's stream, and its copies on their own: nothing is read before it is there."""
    config = change(CONFIG, model={"hidden_dropout": 0.1}, batch={"micro_batch": 2})
    updates = [batch(seed=seed, sequences=60) for seed in range(3)]
    ends = []
    for stream in (None, torch.cuda.Stream(DEVICE)):
        gpu = engine(config)
        torch.cuda.synchronize()  # it was made on the default stream
        with torch.cuda.stream(stream):
            for update in updates:
                gpu.step({**update}, 1e-3)
            ends.append(gpu.state()["model"])
        torch.cuda.synchronize()
        gpu.close()
    assert same_bits(*ends)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_host_does_not_wait_within_an_update(precision):
    """torch raises an error where the host would wait for the device."""
    if precision == "bfloat16":
        half_types()
    gpu = engine(precision=precision, deterministic=False)
    gpu.step(batch(), 1e-3)  # what is made once
    mode = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        gpu._accumulate(batch(seed=1))
        gpu.optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.synchronize()


def peak(config, update):
    gpu = engine(config)
    gpu.step(update, 1e-3)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gpu.step(update, 1e-3)
    return torch.cuda.max_memory_allocated() - before, gpu.state()["model"]


def test_recomputed_layers_have_the_same_bits_and_take_less_memory():
    rows = 32  # so many that activations, and not the optimiser, take the most
    config = change(CONFIG, model={"hidden_dropout": 0.1, "num_layers": 12}, batch={"micro_batch": rows})
    update = batch(sequences=60, rows=rows)
    kept, weights = peak(config, update)
    recomputed, same = peak(config.changed("engine", recompute_layers=True), update)
    assert same_bits(weights, same)
    assert recomputed < 0.6 * kept


def test_tf32_rounds_the_factors_of_products_and_float32_does_not():
    if capability(torch.device(DEVICE)) < (8, 0):
        pytest.skip("TF32 needs compute capability 8.0")
    _, exact = gradient(engine(), batch())
    _, rounded = gradient(engine(precision="tf32"), batch())
    _, cpu = gradient(engine(device="cpu", deterministic=False), batch())
    # TF32 keeps 11 bits.
    assert 1e-4 < apart(rounded, exact) < 2e-2
    assert apart(exact, cpu) < 5e-5


@pytest.mark.parametrize("name", ["lamb", "adamw"])
def test_the_optimiser_s_step_is_the_cpu_s(name):
    config = CONFIG.changed("optimizer", name=name)
    ends = []
    for device in (DEVICE, "cpu"):
        network = initial_network(config)
        network.to(device)
        optimizer = build_optimizer(network, config.optimizer, betas=(0.9, 0.999))
        draw = torch.Generator().manual_seed(3)
        for _ in range(3):
            for parameter in network.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=draw).to(device)
            optimizer.step()
        ends.append(torch.cat([parameter.detach().flatten().cpu() for parameter in network.parameters()]))
    assert torch.allclose(ends[0], ends[1], rtol=1e-5, atol=1e-7)
